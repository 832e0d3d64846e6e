"""Seconds that a tensor rank spends in a collective, measured among processes of this machine.

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
from pathlib import Path
from typing import NamedTuple

from parcompiler.cost import collective
from parcompiler.cost.operation import Operation
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
