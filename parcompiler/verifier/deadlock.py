"""The rule that no ranks wait for each other in a circle, even if every send blocks until received.

The program is simulated with counters only. Reaching an instruction may raise a counter; leaving it
may need other counters to have reached some number:

    reaching                          raises      leaving needs
    RECV k of a channel               posted      -
    SEND k of a channel               sent        posted > k       [1]
    FORWARD, BACKWARD[_INPUT]         -           sent > k for every message k that it uses
    k-th collective of a group        arrived     arrived > k on each of its ranks
    k-th one of the vocabulary        arrived     -                                          [2]
    its users                         -           arrived > k on all ranks

[1] A transport may or may not buffer a send: a program that ends without buffers always ends. [2]
These run beside compute, one after the other. One that uses the result of another comes after it,
and starts when that has ended; the rank does not wait for it.

Each rank advances as far as it can and then sleeps on the first counter that is too low, so that
the run is linear in the number of instructions. Messages without a second end and collectives
without all of their ranks are reported by other rules; here nothing waits for them. So if ranks are
left over, each waits for an instruction that another has not reached, some of them in a circle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from operator import itemgetter
from typing import NamedTuple

from parcompiler.instruction import Kind
from parcompiler.verifier import shared_vocabulary
from parcompiler.verifier.fault import Fault
from parcompiler.verifier.steps import Places, StepIndex, Way

NO_CIRCLE = "no ranks wait for each other"


class Need(NamedTuple):
    """The `number`-th raise of a counter, from 0."""

    counter: int
    number: int


class Halt(NamedTuple):
    """An instruction that others wait for, or that waits: its position, and the counters."""

    position: int
    raises: int | None
    needs: tuple[Need, ...]


class Counter(NamedTuple):
    """The rank whose list raises a counter, and the positions."""

    rank: int
    positions: list[int]


def faults(step: StepIndex) -> Iterator[Fault]:
    """The shortest circle in which ranks are left waiting, if there is one."""
    race = _Execution(step)
    race.run()
    circle = race.circle()
    if circle:
        lines = "".join(f"\n      {race.described(rank)}" for rank in circle)
        advice = "a receive must stand further up, or a send further down"
        yield Fault(NO_CIRCLE, f"{len(circle)} ranks do, each for the next ({advice}):{lines}")


class _Execution:
    """The simulated run of all ranks."""

    def __init__(self, step: StepIndex) -> None:
        self.step = step
        self.counters: list[Counter] = []
        self.halts: list[list[Halt]] = [[] for _ in step.lists]
        self._read_messages()
        self._read_vocabulary()
        self._read_collectives()
        for halts in self.halts:
            halts.sort(key=itemgetter(0))  # by position; stable for equal positions
        self.reached = [0] * len(self.counters)
        self.at = [0] * len(self.halts)  # of each rank, the index of its current halt
        self.asleep: dict[int, list[int]] = defaultdict(list)  # by counter

    def run(self) -> None:
        """Advance every rank as far as it can, and again when a counter that it needs is raised."""
        self.ready = [rank for rank, halts in enumerate(self.halts) if halts]
        for rank in self.ready:
            self._reach(rank)
        while self.ready:
            self._advance(self.ready.pop())

    def circle(self) -> list[int]:
        """The ranks of the shortest circle; each waits for the next, the last for the first."""
        circles = []
        stuck = [rank for rank, halts in enumerate(self.halts) if self.at[rank] < len(halts)]
        for rank in stuck:
            path: list[int] = []
            while rank not in path:
                path.append(rank)
                need = self._lacks(rank)
                assert need is not None
                rank = self.counters[need.counter].rank
            circles.append(path[path.index(rank) :])
        return min(circles, key=len, default=[])

    def described(self, rank: int) -> str:
        """The position of a rank, and the instruction that it waits for."""
        need = self._lacks(rank)
        assert need is not None
        other = self.counters[need.counter]
        here = self.step.at(rank, self.halts[rank][self.at[rank]].position)
        there = self.step.at(other.rank, other.positions[need.number])
        return f"rank {rank}: {here} (waits for rank {other.rank}: {there})"

    def _advance(self, rank: int) -> None:
        """Advance a rank until a need is not met."""
        halts = self.halts[rank]
        while (need := self._lacks(rank)) is None:
            self.at[rank] += 1
            if self.at[rank] == len(halts):
                return
            self._reach(rank)
        self.asleep[need.counter].append(rank)

    def _reach(self, rank: int) -> None:
        """Reach the next halt, which wakes the ranks that wait for it."""
        raises = self.halts[rank][self.at[rank]].raises
        if raises is not None:
            self.reached[raises] += 1
            self.ready += self.asleep.pop(raises, ())

    def _lacks(self, rank: int) -> Need | None:
        """The first need of a rank that is not met."""
        for need in self.halts[rank][self.at[rank]].needs:
            if self.reached[need.counter] <= need.number:
                return need
        return None

    def _counter(self, rank: int, positions: list[int]) -> int:
        """A new counter, raised where a rank reaches these positions."""
        self.counters.append(Counter(rank, positions))
        return len(self.counters) - 1

    def _read_messages(self) -> None:
        """Make the halts at messages and at their users."""
        arrivals: dict[Way, dict[int, tuple[int, Need]]] = defaultdict(dict)
        for (source, target), channel in self.step.channels.items():
            sends = channel.sends.common(channel.receives)
            receives = channel.receives.common(channel.sends)
            starts = [channel.sends.positions[k] for k in sends]
            posts = [channel.receives.positions[k] for k in receives]
            sent, posted = self._counter(source, starts), self._counter(target, posts)
            self.halts[source] += [
                Halt(position, sent, (Need(posted, k),)) for k, position in enumerate(starts)
            ]
            self.halts[target] += [Halt(position, posted, ()) for position in posts]
            for k, number in enumerate(receives):
                name, gradient, i = channel.receives.labels[number]
                arrivals[source, target, name, gradient].setdefault(i, (posts[k], Need(sent, k)))
        self._read_computes(arrivals)

    def _read_computes(self, arrivals: dict[Way, dict[int, tuple[int, Need]]]) -> None:
        """Make the halts at compute instructions: each waits for messages that it uses and that
        were posted before."""
        needs: dict[tuple[int, int], list[Need]] = defaultdict(list)
        uses: list[tuple[Way, int, Places]] = []
        for item in self.step.wiring.crossings:
            way = (item.source, item.target, item.name, False)
            uses += [(way, item.target, self.step.computed[Kind.FORWARD, j]) for j in item.readers]
            back = (item.target, item.source, item.name, True)
            uses.append((back, item.source, self.step.back[item.maker]))
        for way, rank, places in uses:
            for i, (posted, need) in arrivals.get(way, {}).items():
                position = places.get(i, -1)
                if posted < position:
                    needs[rank, position].append(need)
        for (rank, position), listed in needs.items():
            self.halts[rank].append(Halt(position, None, tuple(listed)))

    def _read_vocabulary(self) -> None:
        """Make the halts at collectives of the vocabulary and at their users."""
        sequences = shared_vocabulary.sequences(self.step)
        places = [
            [self.step.parts[rank][part][i] for part, i in sequence]
            for rank, sequence in enumerate(sequences)
        ]
        counters = [self._counter(rank, positions) for rank, positions in enumerate(places)]
        met = [tuple(Need(counter, k) for counter in counters) for k in range(len(sequences[0]))]
        numbers = [{label: k for k, label in enumerate(sequence)} for sequence in sequences]
        for rank, part, _, after in shared_vocabulary.dependencies(self.step):
            for i, position in after.items():
                k = numbers[rank].get((part, i))
                if k is not None and places[rank][k] < position:
                    self.halts[rank].append(Halt(position, None, met[k]))
        for rank, positions in enumerate(places):
            self.halts[rank] += [Halt(position, counters[rank], ()) for position in positions]

    def _read_collectives(self) -> None:
        """Make the halts at collectives."""
        groups: dict[Hashable, dict[int, list[int]]] = defaultdict(dict)
        for rank, share in enumerate(self.step.shares):
            if share is not None:
                groups[None][rank] = [share]
            for position in sorted(self.step.reductions[rank].values()):
                group = self.step.at(rank, position).ranks
                groups[group].setdefault(rank, []).append(position)
        for places in groups.values():
            counters = {rank: self._counter(rank, positions) for rank, positions in places.items()}
            for rank, positions in places.items():
                others = [(other, listed) for other, listed in places.items() if other != rank]
                for k, position in enumerate(positions):
                    needs = (Need(counters[x], k) for x, listed in others if k < len(listed))
                    self.halts[rank].append(Halt(position, counters[rank], tuple(needs)))
