"""A device of this machine as the bench of a compilation; measurements are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from parcompiler.bench.vocabulary import time_passes
from parcompiler.bench.waits import WaitQuery, query_of, wait_of
from parcompiler.calibrate.machine import cores
from parcompiler.cost.operation import Operation
from parcompiler.graph import Graph
from parcompiler.plan import VocabularyTime


@dataclass(frozen=True)
class LocalBench:
    """Measures on `device`, for one model."""

    device: torch.device
    _waits: dict[WaitQuery, float | None] = field(default_factory=dict, repr=False, compare=False)
    _passes: dict[object, VocabularyTime] = field(default_factory=dict, repr=False, compare=False)

    def exchanged(self, exchanges: Sequence[Operation], between: float) -> float | None:
        """Seconds that a tensor rank spends in `exchanges`, computing for `between` s before each.

        None where so many ranks cannot be busy at once here: on a GPU, with fewer cores, and where
        others use them. Raises LaunchError where the processes cannot be started.
        """
        if self.device.type != "cpu" or any(one.ranks > cores() for one in exchanges):
            return None
        total = 0.0
        for exchange in exchanges:
            query = query_of(exchange, between)
            if query not in self._waits:
                self._waits[query] = wait_of(query)
            seconds = self._waits[query]
            if seconds is None:
                return None
            total += seconds
        return total

    def vocabulary(self, graph: Graph, ranks: int, method: str) -> VocabularyTime:
        """The times of the passes on one of `ranks` ranks that share the graph's vocabulary.

        Raises whatever an operator raises that cannot run here.
        """
        assert graph.vocabulary is not None, "the graph's vocabulary is not spread"
        head, lookups = graph.vocabulary.head, graph.vocabulary.lookups
        tables = [item.weight for item in lookups]
        key = ranks, method, tuple(tables), head and head.weight
        if key not in self._passes:
            self._passes[key] = time_passes(graph, ranks, method, self.device)
        return self._passes[key]
