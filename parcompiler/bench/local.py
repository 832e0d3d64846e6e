"""A device of this machine as the bench of a compilation, and what tensor ranks exchange on it.

    rank 0   work ──────── exchange ┄┄┄ work ────────── exchange ┄
    rank 1   work ────────── exchange ┄ work ──────── exchange ┄┄┄

Ranks that come to it in the middle of a step have been computing: the values are wherever the last
operator left them, the threads of the backend are asleep, and nobody comes at the same moment as
the others. So a collective takes longer than between ranks that do nothing else, and what it takes
is the mean over the ranks of how long each is in it.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from parcompiler.bench.vocabulary import time_passes
from parcompiler.calibrate.machine import cores
from parcompiler.cost import collective
from parcompiler.cost.operation import Operation
from parcompiler.cost.times import RunningBlock, TimedBlock
from parcompiler.graph import Graph
from parcompiler.plan import VocabularyTime
from parcompiler.verification.pool import PATIENCE, pool

SECONDS = 1.5  # of measuring one exchange, if nobody else needs the cores
LEAST = 0.95  # of the time of its work a rank had the processor, or others disturbed the round
ENOUGH = 6  # rounds that nobody disturbed
TRIES = 3  # to have as many
LONGEST = 0.05  # of the rounds: the longest are left out
BETWEEN = 1e-4, 0.25  # s of work between two collectives: as short and as long as is measured

_log = logging.getLogger(__name__)


class WaitQuery(NamedTuple):
    """A collective of `action` about `nbytes` in `dtype`, after `between` s of work on each rank.

    `nbytes` are those of the whole value.
    """

    action: str
    nbytes: int
    dtype: str
    ranks: int
    between: float


class Round(NamedTuple):
    """Seconds that a rank was in the collective, and its share of the processor before."""

    wait: float
    share: float


@dataclass(frozen=True)
class LocalBench:
    """Measures on `device`, for one model; with `compiled` layers or eager ones."""

    device: torch.device
    compiled: bool = False
    _waits: dict[WaitQuery, float | None] = field(default_factory=dict, repr=False, compare=False)
    _passes: dict[object, VocabularyTime] = field(default_factory=dict, repr=False, compare=False)

    def prepared(self, block: TimedBlock) -> RunningBlock:
        """A block as a worker runs it. Raises whatever the compiler raises."""
        if not self.compiled:
            return block
        from parcompiler.bench.compiled import CompiledBlock  # imports for seconds

        return CompiledBlock(block)

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
            self._passes[key] = time_passes(graph, ranks, method, self.device, fused=self.compiled)
        return self._passes[key]


def query_of(exchange: Operation, between: float) -> WaitQuery:
    """The query for an exchange; the work before it is a power of two, to measure less often.

    >>> import torch
    >>> sent = Operation("all-reduce", "exchange", 0.0, 1024.0, torch.float32, 2)
    >>> query_of(sent, 0.0015)
    WaitQuery(action='all-reduce', nbytes=1024, dtype='float32', ranks=2, between=0.001953125)
    """
    whole = collective.whole(exchange.name, exchange.nbytes, exchange.ranks)
    shortest, longest = BETWEEN
    return WaitQuery(
        action=exchange.name,
        nbytes=round(whole),
        dtype=str(exchange.dtype).removeprefix("torch."),
        ranks=exchange.ranks,
        between=2.0 ** round(math.log2(min(max(between, shortest), longest))),
    )


def wait_of(query: WaitQuery) -> float | None:
    """Seconds of one collective; None, and a warning, where others leave no cores for it.

    Raises LaunchError where the processes cannot be started.
    """
    for _ in range(TRIES):
        seconds = typical(rounds_of(query))
        if seconds is not None:
            return seconds
    _log.warning("others use the cores: the time of an %s is the cost model's", query.action)
    return None


def rounds_of(query: WaitQuery, seconds: float = SECONDS) -> list[list[Round]]:
    """The rounds of each rank, for about `seconds` s. Raises LaunchError."""
    with tempfile.TemporaryDirectory(prefix="parcompiler-") as folder:
        message = {**query._asdict(), "size": query.ranks, "seconds": seconds, "out": folder}
        messages = [message | {"rank": rank} for rank in range(query.ranks)]
        pool().ask([{"exchange": one} for one in messages], PATIENCE + 10 * seconds)
        texts = [(Path(folder) / f"{rank}.json").read_text("utf-8") for rank in range(query.ranks)]
    return [[Round(*one) for one in json.loads(text)] for text in texts]


def typical(ranks: Sequence[Sequence[Round]]) -> float | None:
    """The mean over ranks and undisturbed rounds, without the longest; None of a few rounds.

    >>> quiet, disturbed = [Round(1.0, 1.0), Round(3.0, 0.99)], [Round(90.0, 0.5)]
    >>> typical([3 * quiet + disturbed] * 2), typical([quiet + 9 * disturbed] * 2)
    (2.0, None)
    """
    waits = sorted(
        statistics.fmean(part.wait for part in parts)
        for parts in zip(*ranks, strict=True)
        if min(part.share for part in parts) >= LEAST
    )
    if len(waits) < ENOUGH:
        return None
    return statistics.fmean(waits[: math.ceil(len(waits) * (1 - LONGEST))])
