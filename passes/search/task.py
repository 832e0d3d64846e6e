"""The search problem: codes of all actions, their dependencies, and their seconds and bytes.

A backward is I and W where a stage can leave a part of it for later, else I alone stands for the
whole. The k-th forward of a stage is that of micro-batch k, and so are its k-th I and W:
micro-batches are alike, so this loses nothing. An order is thus a word per rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from parcompiler.instruction import Kind
from parcompiler.schedules import Action, Schedule
from parcompiler.timeline import Message, StageCost
from parcompiler.timeline.candidate import links_of, order_peaks, pairs_of
from parcompiler.timeline.order import PLACE, OrderTasks
from parcompiler.timeline.run import INFINITY, Moments, run

Word = list[int]
"""The codes (see `OrderTasks`) of one rank's actions in their order."""

KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class SearchTask:
    """One placement of the stages, for a number of micro-batches. Limits are bytes per rank."""

    placement: tuple[int, ...]
    costs: tuple[StageCost, ...]
    messages: tuple[Message, ...]
    limits: tuple[float, ...]
    microbatches: int

    @cached_property
    def pipeline(self) -> OrderTasks:
        """The dependencies of all actions."""
        return OrderTasks(self.placement, links_of(self.messages), self.microbatches)

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """By rank, the classes of its actions: 3 j + kind."""
        return tuple(
            tuple(
                3 * j + kind
                for j, at in enumerate(self.placement)
                if at == rank
                for kind in ((0, 1, 2) if self.is_parted(j) else (0, 1))
            )
            for rank in range(self.pipeline.ranks)
        )

    @cached_property
    def durations(self) -> tuple[float, ...]:
        """Seconds of an action, by class."""
        durations = []
        for j, cost in enumerate(self.costs):
            parted = self.is_parted(j)
            back = cost.seconds(Kind.BACKWARD_INPUT) if parted else cost.backward
            durations += [cost.forward, back, cost.weight if parted else 0.0]
        return tuple(durations)

    @cached_property
    def seconds(self) -> list[float]:
        """Seconds by code: of all actions, then of all messages."""
        return self.pipeline.seconds(self.durations, pairs_of(self.messages))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """By stage, the least bytes that a micro-batch takes from its forward to its backward.

        Between the two parts of a backward it takes `left` bytes, which may be less or more.
        """
        return tuple(
            min(copies + cost.saved, self.left(j)) if self.is_parted(j) else copies + cost.saved
            for j, (cost, copies) in enumerate(zip(self.costs, self.received, strict=True))
        )

    @cached_property
    def received(self) -> tuple[int, ...]:
        """By stage, the bytes of the values that it receives for its rank."""
        nbytes = [0] * len(self.costs)
        for message in self.messages:
            for rank in {self.placement[j] for j in message.targets}:
                if rank != self.placement[message.source]:
                    first = min(j for j in message.targets if self.placement[j] == rank)
                    nbytes[first] += message.nbytes
        return tuple(nbytes)

    @cached_property
    def changes(self) -> tuple[int, ...]:
        """By class, the bytes that an action allocates, negative if it frees them."""
        changes = []
        for j, (cost, copies) in enumerate(zip(self.costs, self.received, strict=True)):
            left = self.left(j) if self.is_parted(j) else 0
            size = cost.saved + copies
            changes += [size, left - size, -left]
        return tuple(changes)

    @cached_property
    def momentary(self) -> bool:
        """Whether some action takes further memory while it runs."""
        return any(
            more
            for cost in self.costs
            for more in (cost.forward_more, cost.backward_more, cost.input_more, cost.weight_more)
        )

    @cached_property
    def resident(self) -> tuple[int, ...]:
        """By rank, the resident bytes."""
        return tuple(
            sum(c.resident for c, r in zip(self.costs, self.placement, strict=True) if r == rank)
            for rank in range(self.pipeline.ranks)
        )

    @cached_property
    def rooms(self) -> tuple[float, ...]:
        """By rank, the bytes that micro-batches may take."""
        return tuple(limit - size for limit, size in zip(self.limits, self.resident, strict=True))

    @cached_property
    def makers(self) -> dict[int, list[int]]:
        """By row of a message, the classes that it waits for."""
        makers: dict[int, list[int]] = {}
        for kind, sends in enumerate(self.pipeline.sends):
            for sent in sends:
                makers.setdefault(sent.row, []).append(kind)
        return makers

    def left(self, stage: int) -> int:
        """Bytes that a micro-batch takes between the two parts of its backward."""
        cost = self.costs[stage]
        return cost.saved if cost.left is None else cost.left

    def is_parted(self, stage: int) -> bool:
        """Whether the backward of a stage is in two parts."""
        return self.costs[stage].weight > 0

    def words(self, schedule: Schedule) -> list[Word]:
        """The orders of a schedule, with the micro-batches of each class in ascending order."""
        return [self._word(order) for order in schedule.orders]

    def _word(self, order: Sequence[Action]) -> Word:
        """The order of one rank."""
        word: Word = []
        done: dict[int, int] = {}
        for kind in self._letters(order):
            i = done.get(kind, 0)
            done[kind] = i + 1
            word.append(kind * self.microbatches + i)
        return word

    def _letters(self, order: Sequence[Action]) -> Iterator[int]:
        """The classes of an order, with backwards in two parts where the stage can have them."""
        for action in order:
            kind = 3 * action.stage + PLACE[action.kind]
            parted = self.is_parted(action.stage)
            if action.kind is not Kind.BACKWARD_WEIGHT or parted:
                yield kind
            if action.kind is Kind.BACKWARD and parted:
                yield kind + 1

    def one_at_a_time(self) -> list[Word]:
        """The words in which each micro-batch goes all the way before the next one."""
        stages = range(len(self.placement))
        steps = [3 * j for j in stages]
        steps += [3 * j + kind for j in reversed(stages) for kind in (1, 2)]
        return [
            [
                kind * self.microbatches + i
                for i in range(self.microbatches)
                for kind in steps
                if kind in kinds
            ]
            for kinds in map(set, self.classes)
        ]

    def step_time(self, words: Sequence[Word]) -> float:
        """Seconds of a step; infinite when ranks wait for each other."""
        return last_end(words, self.run(words).ends)

    def run(self, words: Sequence[Word], seconds: Sequence[float] | None = None) -> Moments:
        """Start and end of every action and message, in seconds."""
        return run(self.pipeline.tasks, words, seconds or self.seconds)

    def use(self, word: Word) -> int:
        """The most bytes of micro-batches in flight, without message buffers."""
        m, changes = self.microbatches, self.changes
        return max(accumulate((changes[code // m] for code in word), initial=0))

    def has_rooms(self, words: Sequence[Word]) -> bool:
        """Whether the micro-batches in flight fit on every rank."""
        return all(self.use(word) <= room for word, room in zip(words, self.rooms, strict=True))

    def fits(self, words: Sequence[Word], whole: Collection[int] = ()) -> bool:
        """Whether the memory suffices, by the exact peaks."""
        peaks = self.peaks(words, whole)
        return all(peak <= limit for peak, limit in zip(peaks, self.limits, strict=True))

    def peaks(self, words: Sequence[Word], whole: Collection[int] = ()) -> tuple[int, ...]:
        """The most bytes on each rank."""
        schedule = self.schedule(words, whole)
        return order_peaks(self.pipeline, schedule.orders, self.costs, self.messages)

    def schedule(self, words: Sequence[Word], whole: Collection[int] = ()) -> Schedule:
        """The schedule of words; `whole` are the codes of I that stand for a whole backward."""
        orders = tuple(tuple(self._actions(word, whole)) for word in words)
        return Schedule("search", self.placement, orders)

    def _actions(self, word: Word, whole: Collection[int]) -> Iterator[Action]:
        """The actions of one rank."""
        for code in word:
            (j, place), i = divmod(code // self.microbatches, 3), code % self.microbatches
            if place == 1 and (code in whole or not self.is_parted(j)):
                yield Action(Kind.BACKWARD, j, i)
            elif place < 2 or code - self.microbatches not in whole:
                yield Action(KINDS[place], j, i)


def last_end(words: Sequence[Word], arrived: Sequence[float]) -> float:
    """The end of the last action."""
    return max((arrived[word[-1]] for word in words if word), default=0.0)


__all__ = ["INFINITY", "SearchTask", "Word", "last_end"]
