"""Measures blocks, and exchanges of tensor ranks, on a device of this machine.

    rank 0   work ──────── exchange ┄┄┄ work ────────── exchange ┄
    rank 1   work ────────── exchange ┄ work ──────── exchange ┄┄┄

Ranks reach a collective in the middle of a step: values are where the last operator left them, the
threads of the backend are asleep, and ranks do not arrive at the same moment. So a collective takes
longer than between ranks that do nothing else. Its time is the mean over the ranks of the time that
each spends in it.
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

SECONDS = 1.5  # for measuring one exchange, if the cores are idle
LEAST = 0.95  # CPU share in the work; with less, others disturbed the round
ENOUGH = 6  # undisturbed rounds
TRIES = 3  # to get ENOUGH rounds
LONGEST = 0.05  # of the rounds: the longest are left out
BETWEEN = 1e-4, 0.25  # s of work between two collectives: limits of what is measured

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
    """Seconds of a rank in the collective, and its CPU share in the work before."""

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

        None if that many ranks cannot compute at once here: on a GPU, with fewer cores, or when
        others use the cores. Raises LaunchError if the processes cannot be started.
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

        Raises the error of an operator that cannot run here.
        """
        assert graph.vocabulary is not None, "the graph's vocabulary is not spread"
        head, lookups = graph.vocabulary.head, graph.vocabulary.lookups
        tables = [item.weight for item in lookups]
        key = ranks, method, tuple(tables), head and head.weight
        if key not in self._passes:
            self._passes[key] = time_passes(graph, ranks, method, self.device, fused=self.compiled)
        return self._passes[key]


def query_of(exchange: Operation, between: float) -> WaitQuery:
    """The query for an exchange; the work before it is rounded to a power of two (s), so that fewer
    queries differ.

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
    """Seconds of one collective; None, with a warning, if other processes keep the cores busy.

    Raises LaunchError if the processes cannot be started.
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
    """The mean over ranks and undisturbed rounds, without the longest; None if there are too few.

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
