"""The best division into runs of which some blocks run twice: a dynamic programme.

A run costs its seconds and those of the cheapest blocks to run twice until it fits (`twice`); most
runs cost what another has cost, as layers repeat. Of the labels of the same blocks on the same
stages those are kept that no other beats in the sum and in the slowest stage, and whose bound is
below the best division known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from parcompiler.passes.divide.again import Repeatable
from parcompiler.passes.divide.twice import Choice, cheapest


class KindedRun(NamedTuple):
    """Consecutive blocks as one stage: units of time, bytes fixed + in_flight * scaled, kinds.

    `kinds` are pairs of a kind's number and its count. What a block takes for a moment is left out.
    `ranks` are the units on each rank where these differ.
    """

    seconds: int
    fixed: int
    scaled: int
    kinds: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...] = ()

    def on(self, rank: int) -> int:
        """Units on a rank."""
        return self.ranks[rank] if self.ranks else self.seconds


class Label(NamedTuple):
    """The stages so far: their units, those of the slowest, squares; and how they came about.

    The last stage begins with block `start`, and `twice` of its kinds run twice.
    """

    total: int
    largest: int
    squares: int
    before: Label | None
    start: int
    twice: tuple[int, ...]


RunsTwice = tuple[tuple[int, ...], frozenset[int]]


@dataclass
class Spans:
    """The runs of a task with one stage per rank, and what they cost where they must fit."""

    joint: Repeatable
    known: dict[tuple[KindedRun, int, int, int], Choice | None] = field(default_factory=dict)

    def best(self, known: float) -> RunsTwice | None:
        """The stage of each block and the blocks that run twice, if that is better than `known`,
        an objective in units."""
        spans = [list(self._from(a)) for a in range(len(self.joint.again))]
        first = self._walk(spans, known, keep=1)
        if first is not None:
            known = min(known, self._objective(first))
        better = self._walk(spans, known, keep=None)
        best = better or first
        return None if best is None else self._read(best)

    def _objective(self, label: Label) -> int:
        """Units of a step."""
        return label.total + self.joint.task.further * label.largest

    def _from(self, a: int) -> Iterator[KindedRun]:
        """The runs that begin with block a."""
        task, of = self.joint.task, self.joint.kind_of
        seconds = fixed = scaled = moved = 0
        ranks = [] if task.is_uniform else [0] * task.ranks
        received: set[int] = set()
        held: set[tuple[str, int]] = set()
        counts: dict[int, int] = {}
        for i in range(a, len(task.loads)):
            load = task.loads[i]
            new = {f for f in task.arriving[i] if task.flows[f].producer < a} - received
            copies = sum(task.flows[f].saved for f in new)
            moved += sum(task.move[f] for f in new)
            seconds += task.compute[i]
            ranks = [units + task.cost[r][i] for r, units in enumerate(ranks)]
            fixed += load.resident + sum(size for _, size in set(load.shared) - held) + copies
            scaled += load.saved + copies
            received |= new
            held.update(load.shared)
            counts[of[i]] = counts.get(of[i], 0) + 1
            own = tuple(units + moved for units in ranks)
            yield KindedRun(seconds + moved, fixed, scaled, tuple(sorted(counts.items())), own)

    def _fitted(self, span: KindedRun, j: int) -> Choice | None:
        """What must run twice of a run on a stage."""
        task = self.joint.task
        rank = task.placement[j]
        k, room = task.in_flight[j], task.room[rank]
        key = span._replace(seconds=0, ranks=()), k, room, 0 if task.is_uniform else rank
        if key not in self.known:
            kinds = [self.joint.kind(number, count, [k], rank) for number, count in span.kinds]
            self.known[key] = cheapest(kinds, [span.fixed + k * span.scaled - room])
        return self.known[key]

    def _walk(self, spans: list[list[KindedRun]], known: float, keep: int | None) -> Label | None:
        """The best label of all blocks below `known`, of `keep` labels for the same blocks."""
        task = self.joint.task
        best: dict[int, list[Label]] = {0: [Label(0, 0, 0, None, 0, ())]}
        for j in range(task.stages):
            behind = task.placement[j + 1 :]
            least, pace = task.least_on(behind), task.pace(behind)
            rest = [*itertools.accumulate(reversed(least), initial=0)][::-1]
            slowest = [math.ceil(units / pace) if pace else 0 for units in rest]
            reached: dict[int, list[Label]] = {}
            for a, labels in best.items():
                for b, units, choice in self._ends(spans[a], a, j):
                    if min(self._objective(label) for label in labels) + units >= known:
                        break
                    longer = (_longer(label, units, a, choice) for label in labels)
                    good = [x for x in longer if self._bound(x, rest[b], slowest[b]) < known]
                    reached.setdefault(b, []).extend(good)
            best = {
                b: _unbeaten(found, keep, self._objective) for b, found in reached.items() if found
            }
        final = best.get(len(spans))
        if not final:
            return None
        return min(final, key=lambda label: (self._objective(label), label.squares))

    def _ends(self, spans: list[KindedRun], a: int, j: int) -> Iterator[tuple[int, int, Choice]]:
        """The runs from block a that fit on stage j and leave a block for each stage behind: where
        they end, what they take, and what runs twice."""
        task, blocks = self.joint.task, len(self.joint.again)
        behind, rank = task.stages - 1 - j, task.placement[j]
        for b, span in enumerate(spans[: blocks - behind - a], a + 1):
            choice = self._fitted(span, j)
            if choice is None:
                return
            if behind or b == blocks:
                yield b, span.on(rank) + choice.seconds, choice

    def _bound(self, label: Label, rest: int, slowest: int) -> float:
        """Units that no division can be below that begins like this: the other stages take `rest`
        units, and the slowest of them `slowest`, at least."""
        return label.total + rest + self.joint.task.further * max(label.largest, slowest)

    def _read(self, label: Label) -> RunsTwice:
        """The division of a label: of blocks of one kind the first ones run twice."""
        of, end = self.joint.kind_of, len(self.joint.again)
        starts: list[int] = []
        twice: set[int] = set()
        at: Label | None = label
        while at is not None and at.before is not None:
            starts.append(at.start)
            numbers = sorted(set(of[at.start : end]))
            for number, count in zip(numbers, at.twice, strict=True):
                twice |= set([i for i in range(at.start, end) if of[i] == number][:count])
            at, end = at.before, at.start
        starts.reverse()
        stage_of = [sum(i >= start for start in starts) - 1 for i in range(len(of))]
        return tuple(stage_of), frozenset(twice)


def _longer(label: Label, units: int, start: int, choice: Choice) -> Label:
    """A label with one stage more."""
    return Label(
        label.total + units,
        max(label.largest, units),
        label.squares + units**2,
        label,
        start,
        choice.counts,
    )


def _unbeaten(
    labels: list[Label], keep: int | None, objective: Callable[[Label], int]
) -> list[Label]:
    """The labels that no other is as good as in the sum and in the slowest stage; or a few."""
    if keep is not None:
        return sorted(labels, key=lambda label: (objective(label), label.squares))[:keep]
    found: list[Label] = []
    for label in sorted(labels, key=lambda label: label[:3]):
        if not found or label.largest < found[-1].largest:
            found.append(label)
    return found
