"""What the ranks found: messages, sums, and the steps of each schedule.

A step is disturbed when a rank had its processor for less than `LEAST` of the time of its compute
instructions: others used the machine.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parcompiler.instruction import Kind
from parcompiler.timeline import StageCost

LEAST = 0.95
Computed = tuple[str, int, float]  # kind, stage and seconds of an instruction


@dataclass(frozen=True, slots=True)
class Step:
    """A step of all ranks: its seconds, how much of it each rank computed, its instructions."""

    seconds: float
    busy: tuple[float, ...]
    computed: tuple[Computed, ...]
    quiet: bool

    @property
    def bubble(self) -> float:
        """The fraction of the step in which a rank did not compute, on average."""
        return 1 - sum(self.busy) / len(self.busy) / self.seconds


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds of messages and sums by their bytes; `steps[k]` are those of turn k."""

    messages: Mapping[int, float]
    sums: Mapping[int, float]
    steps: Sequence[Sequence[Step]]


def read(folder: Path, size: int) -> Found:
    """The files of the ranks."""
    ranks = [
        json.loads((folder / f"rank_{r}.json").read_text(encoding="utf-8")) for r in range(size)
    ]
    rounds = [
        [_step(parts) for parts in zip(*own, strict=True)]
        for own in zip(*(rank["rounds"] for rank in ranks), strict=True)
    ]
    return Found(_mean(ranks, "messages"), _mean(ranks, "sums"), list(zip(*rounds, strict=True)))


def _mean(ranks: Sequence[Mapping[str, Any]], what: str) -> dict[int, float]:
    """The mean over the ranks."""
    return {
        int(nbytes): statistics.mean(rank[what][nbytes] for rank in ranks)
        for nbytes in ranks[0][what]
    }


def _step(parts: Sequence[Mapping[str, Any]]) -> Step:
    """The step of which these are the ranks' parts."""
    busy = tuple(sum(seconds for _, _, seconds in part["computed"]) for part in parts)
    shares = [part["processor"] / own for part, own in zip(parts, busy, strict=True)]
    computed = tuple(tuple(line) for part in parts for line in part["computed"])
    return Step(max(part["seconds"] for part in parts), busy, computed, min(shares) >= LEAST)


def quiet(steps: Sequence[Step]) -> Sequence[Step]:
    """The steps that nothing disturbed."""
    return [step for step in steps if step.quiet]


def costs(steps: Sequence[Step]) -> list[StageCost]:
    """What each stage costs: the medians of its instructions, whose backwards come in two parts."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for step in steps:
        for kind, stage, seconds in step.computed:
            found[kind, stage].append(seconds)
    middle = {key: statistics.median(seconds) for key, seconds in found.items()}
    stages = 1 + max(stage for _, stage in middle)

    def of(kind: Kind, stage: int) -> float:
        return middle[kind.value, stage]

    return [
        StageCost(
            forward=of(Kind.FORWARD, j),
            backward=of(Kind.BACKWARD_INPUT, j) + of(Kind.BACKWARD_WEIGHT, j),
            resident=0,
            saved=0,
            weight=of(Kind.BACKWARD_WEIGHT, j),
        )
        for j in range(stages)
    ]


def merged(parts: Sequence[StageCost]) -> StageCost:
    """What a stage costs that does the work of several."""
    return StageCost(
        forward=sum(part.forward for part in parts),
        backward=sum(part.backward for part in parts),
        resident=0,
        saved=0,
        weight=sum(part.weight for part in parts),
    )
