"""The bytes that one micro-batch takes on a stage, while it computes and between.

    FORWARD             what the blocks before have saved, and what is alive within one block
    between             what all blocks have saved
    BACKWARD            what the blocks before have saved, and what is alive within one block;
                        what the blocks behind had saved is free
    BACKWARD_INPUT      the same, and what the linear layers of the blocks behind have left
    between             what all linear layers have left
    BACKWARD_WEIGHT     what is not multiplied yet, and the gradient of one weight

Parameters and their gradients, and messages, are counted elsewhere; but in the first backward of
a step, gradients come block by block, while what was saved goes. What a stage gives to another of
its rank is no message: it stays until it goes back, and its gradient in its place then.

Where data ranks keep parts of gradients (ZeRO's second level), every backward makes whole ones, and
those of the blocks behind are on their way to the parts while a block goes back. Where they keep
parts of parameters too (the third), those of a block are whole while it runs, and those of the next
are gathered meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import fx

from parcompiler.cost import BlockCost
from parcompiler.graph import Block, nbytes_of
from parcompiler.problem import Priced
from parcompiler.timeline import First


class Summed(NamedTuple):
    """A bucket of gradients that so many data ranks share, with the block that completes it."""

    size: int
    block: int
    ranks: int

    @property
    def part(self) -> int:
        """The bytes that each rank gets."""
        return self.size // self.ranks


class Exchanged(NamedTuple):
    """What data ranks exchange for the blocks of a stage, in bytes: `made` are the gradients that
    the backward of each block makes, `gathered` its parameters if they are in parts.

    Ranks share out what `level` says. Gradients go together in `buckets`, in the order of the
    backward. `copied` is the copy of the last, `later` what more is on its way than `in_flight`
    when the stage begins to go back.
    """

    level: int = 0
    made: Sequence[int] = ()
    gathered: Sequence[int] = ()
    buckets: Sequence[Summed] = ()
    copied: int = 0
    later: int = 0

    def forward(self, k: int) -> int:
        """While a block runs: its parameters, and those of the next on their way."""
        return sum(self.gathered[k : k + 2])

    def backward(self, k: int) -> int:
        """While a block goes back: the same, and where parts of gradients stay, those of the blocks
        behind that wait for their bucket or are on their way, more than those `in_flight`."""
        late = self.later
        if self.level >= 2:
            done = [bucket for bucket in self.buckets if bucket.block > k]
            gone = sum(bucket.size for bucket in done)
            late += sum(self.made[k + 1 :]) - gone + self.latest(done) - self.latest()
        return sum(self.gathered[max(0, k - 1) : k + 1]) + late

    def own(self, k: int) -> int:
        """Gradients that a block makes anew where parts of them stay."""
        return self.made[k] if self.level >= 2 else 0

    @property
    def at_end(self) -> tuple[int, int]:
        """Behind the last backward, where gradients stay whole until then: the parts that buckets
        have left for the optimizer, and the copy of the last of them, which is there until the
        optimizer has all of it."""
        if self.level >= 2:
            return 0, 0
        return sum(bucket.part for bucket in self.buckets) if self.level else 0, self.copied

    def latest(self, done: Sequence[Summed] = ()) -> int:
        """The last buckets on their way, whole and a rank's part, when these of this backward have
        gone."""
        before = [*self.buckets] * IN_FLIGHT  # of micro-batches before
        return sum(bucket.size + bucket.part for bucket in [*before, *done][-IN_FLIGHT:])


NOTHING = Exchanged()
IN_FLIGHT = 1  # buckets


def in_flight(stages: Sequence[Exchanged], done: Sequence[Summed] = ()) -> int:
    """Bytes on a rank with some stages from the first backward on: a bucket on its way to
    parts, and what comes of them. Some are `done` in this backward."""
    one = stages[0]
    if one.level < 2:
        return 0
    if one.level == 2:
        return max(stage.latest() for stage in stages)
    buckets = [bucket for stage in reversed(stages) for bucket in stage.buckets]
    return one._replace(buckets=buckets).latest(done)


@dataclass(frozen=True)
class Footprint:
    """A stage with some blocks, in order of execution, and one micro-batch on it. All in bytes.

    `differentiable` are the names of the nodes that carry gradients, `weights` the bytes of the
    parameters that have gradients, by name. `beside` are the blocks of other stages on its rank.
    `exchange` is what data ranks exchange for its blocks.
    """

    priced: Priced
    blocks: tuple[int, ...]
    differentiable: Collection[str]
    weights: Mapping[str, int]
    beside: Collection[int] = ()
    exchange: Exchanged = NOTHING

    @property
    def saved(self) -> int:
        """From the forward to the backward."""
        return sum(self._saved)

    @property
    def left(self) -> int:
        """From the first part of a backward to the second."""
        return sum(self._left)

    @cached_property
    def forward_more(self) -> int:
        """More than `saved` during the forward."""
        alive, before = [0], 0
        for k, b in enumerate(self.blocks):
            cost = self.priced.costs[b]
            peak = cost.unsaved_peak if self._again(k) else cost.forward_peak
            alive.append(before + self._passing(k) + peak + self.exchange.forward(k))
            before += self._saved[k]
        return max(0, max(alive) - self.saved)

    @cached_property
    def backward_more(self) -> int:
        """More than `saved` during a whole backward."""
        return self._backward(self._peaks, [0] * len(self.blocks))

    @cached_property
    def input_more(self) -> int:
        """More than `saved` during the first part of a backward."""
        pairs = zip(self._costs, self._peaks, strict=True)
        peaks = [cost.input_peak or peak for cost, peak in pairs]
        return self._backward(peaks, self._left)

    @cached_property
    def _peaks(self) -> list[int]:
        """Of the backward of each block, which makes whole gradients anew where parts stay."""
        own = self.exchange.own
        return [_first(c, own(k)) if own(k) else c.backward_peak for k, c in enumerate(self._costs)]

    @cached_property
    def weight_more(self) -> int:
        """More than `left` during the second part, which begins with the last layer."""
        alive, before = [0], 0
        for left, cost in zip(self._left, self._costs, strict=True):
            before += left
            alive.append(before + cost.weight_peak)
        return max(0, max(alive) - self.left)

    def first(self, kept: Mapping[str, int]) -> First:
        """What the first backward of a step leaves: gradients of so many bytes, by name."""
        costs, own = self._costs, self._own(kept)
        later = [min(size, cost.deferred_weights) for cost, size in zip(costs, own, strict=True)]
        now = [size - least for size, least in zip(own, later, strict=True)]
        left = [sum(pair) for pair in zip(self._left, now, strict=True)]
        whole = [_first(cost, size) for cost, size in zip(costs, own, strict=True)]
        whole = [*map(max, whole, self._peaks)]
        parted = [_first_input(cost, size) for cost, size in zip(costs, now, strict=True)]
        return First(
            gradients=sum(own),
            later=sum(later),
            backward_more=self._backward(whole, own),
            input_more=self._backward(parted, left),
            weight_more=self._first_weights(later),
        )

    def _first_weights(self, later: Sequence[int]) -> int:
        """`weight_more` when gradients stay: of `later` bytes of each block."""
        behind, alive = 0, [0]
        before = self.left
        for cost, left, size in reversed([*zip(self._costs, self._left, later, strict=True)]):
            before -= left
            peak = min(left - cost.deferred + cost.first_weight_peak, left + size)
            alive.append(before + behind + max(peak, left))
            behind += size
        return max(0, max(alive) - self.left)

    def _own(self, kept: Mapping[str, int]) -> list[int]:
        """Bytes of the gradients that each block is the last to add to: it reads them first."""
        found, left = [0] * len(self.blocks), set(kept)
        for k, block in enumerate(self._parts):
            own = left & {binding.name for binding in block.tensors}
            found[k] = sum(kept[name] for name in own)
            left -= own
        return found

    def _backward(self, peaks: Sequence[int], left: Sequence[int]) -> int:
        """More than `saved` while the blocks go back one after the other, and each leaves some
        bytes."""
        before, behind, alive = self.saved, 0, [0]
        for k in reversed(range(len(self.blocks))):
            before -= self._saved[k]
            cost, peak = self._costs[k], peaks[k]
            if self._again(k):
                peak = max(peak, cost.recompute_peak + cost.gradient_bytes)
            alive.append(before + behind + peak + self._waiting[k] + self.exchange.backward(k))
            behind += left[k]
        return max(0, max(alive) - self.saved)

    @cached_property
    def _waiting(self) -> list[int]:
        """Bytes of gradients that are there while a block goes back, but for messages; the runtime
        holds those of a stage's results to the end of its backward."""
        found = []
        for k, cost in enumerate(self._costs):
            last = sum(nbytes_of(node) for node in self._results(k))
            sent = sum(nbytes_of(node) for node in self._results(k) if self._is_sent(node))
            found.append(self._summed(k) - sent + min(last, cost.output_peak - cost.backward_peak))
        return found

    @cached_property
    def _costs(self) -> list[BlockCost]:
        return [self.priced.costs[b] for b in self.blocks]

    @cached_property
    def _parts(self) -> list[Block]:
        return [self.priced.cut.blocks[b] for b in self.blocks]

    @cached_property
    def _left(self) -> list[int]:
        """Of each block; what several of them have read counts with the first."""
        found, seen = [], set[fx.Node]()
        for block, cost in zip(self._parts, self._costs, strict=True):
            new = {block.inputs[i] for i in cost.deferred_inputs} - seen
            seen |= new
            found.append(cost.deferred + sum(map(nbytes_of, new)))
        return found

    def _again(self, k: int) -> bool:
        """Whether a block is recomputed."""
        return self._parts[k].name in self.priced.recomputed

    @cached_property
    def _saved(self) -> list[int]:
        """Of each block; a value counts with the block that makes it, if any here keeps it, and
        one of the prologue with the first block that does. Constants are there all the time."""
        kept, parts = self.kept, self.priced.cut
        early = kept.intersection(parts.prologue) - parts.constants
        found = []
        for k, (block, cost) in enumerate(zip(self._parts, self._costs, strict=True)):
            inner = 0 if self._again(k) else cost.saved - cost.saved_outputs
            own = sum(nbytes_of(node) for node in block.outputs if node in kept)
            new = early.intersection(block.inputs)
            early -= new
            found.append(inner + own + sum(map(stored, new)))
        return found

    @cached_property
    def kept(self) -> set[fx.Node]:
        """The values at the ends of blocks that some block keeps, or a stage beside needs."""
        kept = {node for k in range(len(self.blocks)) for node in self._keeps(k)}
        if self.beside:
            kept |= {node for block in self._parts for node in block.outputs if self._given(node)}
        if self._units:
            kept |= {node for node, (maker, reader) in self._uses.items() if 0 <= maker < reader}
        return kept

    @property
    def _units(self) -> Collection[int]:
        """The blocks, where parameters of each are gathered: they give each other values then."""
        return self.blocks if any(self.exchange.gathered) else ()

    def _given(self, node: fx.Node) -> bool:
        """Whether another stage of this rank uses a value."""
        return any(self.priced.home.get(user) in self.beside for user in node.users)

    def _keeps(self, k: int) -> Iterator[fx.Node]:
        """The values at the ends of a block that it keeps; all that it reads to run again."""
        block, cost = self._parts[k], self._costs[k]
        if self._again(k):
            yield from block.inputs
        else:
            yield from (block.inputs[i] for i in cost.kept_inputs)
            yield from (block.outputs[i] for i in cost.kept_outputs)

    @cached_property
    def _uses(self) -> dict[fx.Node, tuple[int, int]]:
        """Of each value at the ends of the blocks: who makes it (-1: another stage) and who here
        reads it last (-1: nobody)."""
        made = {node: k for k, block in enumerate(self._parts) for node in block.outputs}
        read = {node: k for k, block in enumerate(self._parts) for node in block.inputs}
        return {n: (made.get(n, -1), read.get(n, -1)) for n in {**made, **read}}

    @cached_property
    def _unkept(self) -> list[tuple[int, int, int]]:
        """The values that a block here makes and nobody keeps: maker, last reader, bytes."""
        return [
            (maker, reader, nbytes_of(node))
            for node, (maker, reader) in self._uses.items()
            if 0 <= maker < reader and node not in self.kept
        ]

    def _passing(self, k: int) -> int:
        """Bytes that nobody keeps and that go into a block, or past it."""
        return sum(size for maker, reader, size in self._unkept if maker < k <= reader)

    @cached_property
    def _long(self) -> list[tuple[int, int, int]]:
        """The values with gradients that are read behind the next block: maker, reader, bytes."""
        return [
            (maker, reader, nbytes_of(node))
            for node, (maker, reader) in self._uses.items()
            if reader > maker + 1 and self._has_gradient(node)
        ]

    @cached_property
    def _tied(self) -> list[tuple[int, int, int]]:
        """The parameters that several blocks read: the first of them, the last, bytes.

        Autograd adds their gradients up before it is done with them."""
        readers: dict[str, list[int]] = {}
        for k, block in enumerate(self._parts):
            for name in {binding.name for binding in block.tensors} & self.weights.keys():
                readers.setdefault(name, []).append(k)
        return [(ks[0], ks[-1], self.weights[name]) for name, ks in readers.items() if len(ks) > 1]

    def _summed(self, k: int) -> int:
        """Bytes of the gradients that wait while a block goes back, for what was made before it."""
        values = sum(size for maker, reader, size in self._long if maker < k < reader)
        return values + sum(size for first, last, size in self._tied if first <= k < last)

    def _results(self, k: int) -> Iterator[fx.Node]:
        """The outputs of a block that no block here reads, and that have gradients."""
        for node in self._parts[k].outputs:
            if (self._units or self._uses[node][1] < 0) and self._has_gradient(node):
                yield node

    def _has_gradient(self, node: fx.Node) -> bool:
        """Whether the backward makes a gradient of a value that blocks make."""
        return node.name in self.differentiable and node in self.priced.home

    def _is_sent(self, node: fx.Node) -> bool:
        """Whether a block of another rank uses it, which nobody here does."""
        homes = {self.priced.home[user] for user in node.users if user in self.priced.home}
        return not homes <= {*self.beside, *self._units}


def _first(cost: BlockCost, made: int) -> int:
    """The peak of a block's first backward, which makes gradients of some bytes."""
    return max(cost.backward_peak, min(cost.first_peak, cost.backward_peak + made))


def _first_input(cost: BlockCost, made: int) -> int:
    """The same of the first part of a backward, where it has two."""
    if not cost.input_peak:
        return _first(cost, made)
    return max(cost.input_peak, min(cost.first_input_peak, cost.input_peak + made))


def stored(node: fx.Node) -> int:
    """Bytes of the memory that a value occupies: one that is spread out takes less than its size.

    A size that depends on the data counts as far as it is known.
    """
    value = node.meta["val"]
    try:
        return min(nbytes_of(node), int(value.untyped_storage().nbytes()))
    except (RuntimeError, TypeError, ValueError):
        return nbytes_of(node)
