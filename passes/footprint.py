"""Activation memory of one micro-batch on a stage, in bytes, at each point of its life.

    FORWARD             saved by the blocks already run + the live memory of the block that runs
    in flight           saved by all blocks
    BACKWARD            saved by the blocks still to come + the live memory of the block that runs
    BACKWARD_INPUT      as BACKWARD + operands that finished linear layers keep for their weights
    in between          the operands that all linear layers keep for their weights
    BACKWARD_WEIGHT     the operands not multiplied yet + the gradient of one weight

An offloaded block saves nothing in flight. What it has saved is also on the device while the next
block runs: in the forward on its way to the host, in the backward on its way back.

Resident tensors (parameters, their gradients, optimizer states) and messages are counted elsewhere.
The exception is the first backward of a step: there gradients appear block by block while saved
activations are freed, so that the sum of both peaks would be too much. A value that goes to another
stage of the same rank is no message: it stays until its backward, and is then replaced by its
gradient.

With ZeRO 2 every backward makes whole gradients, and those of finished blocks wait for their
reduce-scatter while the next block runs. Where the backward is in two parts, all wait until the end
of the second, also those that the first has made (of a table, of a norm). With ZeRO 3 the
parameters of a unit (`Cut.units`) are whole while it runs, and those of the next unit are being
gathered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add, sub
from typing import NamedTuple

from torch import fx

from parcompiler.cost import BlockCost
from parcompiler.graph import Block, nbytes_of
from parcompiler.priced import Priced
from parcompiler.timeline import First


class Summed(NamedTuple):
    """A bucket of gradients that `ranks` data ranks sum, in `size` bytes; `block` completes it. The
    gradients are `made` in fewer bytes where they have 16 bits and are summed in float32."""

    size: int
    block: int
    ranks: int
    made: int

    @property
    def part(self) -> int:
        """Bytes of the part that each rank gets."""
        return self.size // self.ranks


class Exchanged(NamedTuple):
    """What the data ranks exchange for the blocks of a stage, in bytes.

    `level` is that of ZeRO. Of each block, `made` are its gradients, `gathered` its parameters, and
    `units` its unit (one for all below ZeRO 3). Where a rank `repeats` passes of one kind, the unit
    to prefetch may be that at the other end of the stage, or at an end of another stage, of
    `beside` bytes at most. Gradients go in `buckets`, in the order of the backward; `gone[n]` are
    the bytes made in the first n of them. `copied` is the staging copy of the last bucket. The
    buckets in `before` have been sent when the stage begins its backward; `resident` are the bytes
    under way that are counted with the rank (None: of the last bucket of this stage). `waiting`
    micro-batches are usually between their backwards for inputs and for weights;
    `input_follows_weight` says whether one for inputs may follow one for weights on the rank.
    """

    level: int = 0
    made: Sequence[int] = ()
    gathered: Sequence[int] = ()
    units: Sequence[int] = ()
    repeats: bool = False
    beside: int = 0
    buckets: Sequence[Summed] = ()
    gone: Sequence[int] = (0,)
    copied: int = 0
    before: Sequence[Summed] = ()
    resident: int | None = None
    input_follows_weight: bool = False
    waiting: int = 1

    def forward(self, k: int) -> int:
        """Gathered parameters while block `k` runs: of its unit, and of the next, prefetched."""
        return self._whole(k, 1)

    def _whole(self, k: int, step: int) -> int:
        """Gathered parameters of the unit of block `k`, and of the unit `step` after it."""
        if not self.gathered:
            return 0
        unit, count = self.units[k], self.units[-1] + 1
        near = unit + step
        if 0 <= near < count:
            return self._unit(unit) + self._unit(near)
        end = self._unit(near % count) if self.repeats and count > 1 else 0
        return self._unit(unit) + max(end, self.beside)

    def _unit(self, unit: int) -> int:
        """Bytes of the gathered parameters of a unit."""
        pairs = zip(self.gathered, self.units, strict=True)
        return sum(size for size, home in pairs if home == unit)

    @property
    def at_ends(self) -> int:
        """Bytes of the larger of the first and the last unit; 0 where nothing is gathered."""
        return max(map(self._unit, (0, self.units[-1]))) if self.gathered else 0

    def backward(self, k: int) -> int:
        """Gathered parameters while the backward of block `k` runs and, from level 2 on, gradients
        that wait for their bucket or are being scattered, beyond those that are `resident`."""
        late = 0
        if self.level >= 2:
            count = bisect_left(self.buckets, -k, key=lambda bucket: -bucket.block)
            late += sum(self.made[k + 1 :]) - self.gone[count]
            if sent := [*self.before, *self.buckets[:count]]:
                late += self.latest(sent)
                late -= self.latest() if self.resident is None else self.resident
        return self.prefetched(k) + late

    def prefetched(self, k: int) -> int:
        """Gathered parameters while the backward of block `k` runs: of its unit, and of the one
        before it, prefetched."""
        return self._whole(k, -1)

    @property
    def during_weights(self) -> int:
        """Gathered parameters during a backward for weights, which needs none: those of the next
        pass, and where that is a backward, maybe still those of the pass before."""
        if self.input_follows_weight:
            return self.prefetched(0)
        return max(self.at_ends, self.beside) if self.gathered else 0

    def own(self, k: int) -> int:
        """Gradients that block `k` allocates in every backward, because only shards are kept."""
        return self.made[k] if self.level >= 2 else 0

    @property
    def at_end(self) -> tuple[int, int]:
        """Bytes after the last backward where gradients stay whole until then: the shards that
        reduce-scatter made for the optimizer, and the staging copy of the last bucket."""
        if self.level >= 2:
            return 0, 0
        return sum(bucket.part for bucket in self.buckets) if self.level else 0, self.copied

    def latest(self, done: Sequence[Summed] = ()) -> int:
        """Bytes of the last buckets under way, each whole and a rank's part of it, when those in
        `done` have been sent in this backward."""
        before = [*self.buckets[-IN_FLIGHT:]] * IN_FLIGHT  # of earlier micro-batches
        last = [*before, *done[-IN_FLIGHT:]][-IN_FLIGHT:]
        return sum(bucket.size + bucket.part for bucket in last)


NOTHING = Exchanged()
IN_FLIGHT = 1  # buckets whose reduce-scatter may be under way


def in_flight(stages: Sequence[Exchanged], done: Sequence[Summed] = ()) -> int:
    """Bytes on a rank with these stages from the first backward on: buckets that are being
    scattered, and a rank's parts of them. Those in `done` have been sent in this backward."""
    one = stages[0]
    if one.level < 2:
        return 0
    if one.level == 2:
        return max(stage.latest() for stage in stages)
    buckets = [bucket for stage in reversed(stages) for bucket in stage.buckets]
    return one._replace(buckets=buckets).latest(done)


@dataclass(frozen=True)
class Footprint:
    """The memory of one micro-batch on a stage that runs `blocks`, in this order. All in bytes.

    `differentiable` are the names of the nodes that have gradients, `weights` the bytes of the
    trained parameters, by name. `beside` are the blocks of the other stages of its rank, `exchange`
    what the data ranks exchange for its blocks.
    """

    priced: Priced
    blocks: tuple[int, ...]
    differentiable: Collection[str]
    weights: Mapping[str, int]
    beside: Collection[int] = ()
    exchange: Exchanged = NOTHING

    @property
    def saved(self) -> int:
        """Kept from the forward to the backward."""
        return sum(self._saved)

    @property
    def left(self) -> int:
        """Kept from the backward for inputs to that for weights. Micro-batches that wait together
        add to the same gradients: each has its share of them."""
        return sum(self._left) + sum(self._early) // self.exchange.waiting

    @cached_property
    def forward_more(self) -> int:
        """Peak of the forward, less `saved`."""
        alive, before = [0], 0
        for k, b in enumerate(self.blocks):
            cost = self.priced.costs[b]
            peak = cost.unsaved_peak if self._is_recomputed(k) else cost.forward_peak
            alive.append(
                before + self._passing(k) + peak + self._leaving(k) + self.exchange.forward(k)
            )
            before += self._saved[k]
        return max(0, max(alive) - self.saved)

    @cached_property
    def backward_more(self) -> int:
        """Peak of a whole backward, less `saved`."""
        return self._backward(self._peaks, [0] * len(self.blocks))

    @cached_property
    def input_more(self) -> int:
        """Peak of the backward for inputs, less `saved`."""
        return self._for_inputs(self._early)

    def _for_inputs(self, made: Sequence[int]) -> int:
        """`input_more` where each block allocates gradients of `made` bytes, which stay."""
        peaks = [
            _first_input_peak(cost, size) if size else cost.input_peak or peak
            for cost, peak, size in zip(self._costs, self._peaks, made, strict=True)
        ]
        return self._backward(peaks, [*map(add, self._left, made)], sends=False)

    @cached_property
    def _early(self) -> list[int]:
        """Bytes of the gradients that each block makes in every backward for inputs, because only
        shards are kept; they are sent after that for weights."""
        pairs = enumerate(self._costs)
        return [max(0, self.exchange.own(k) - cost.deferred_weights) for k, cost in pairs]

    @cached_property
    def _peaks(self) -> list[int]:
        """Peak of each block's backward, with the gradients that it allocates."""
        own_bytes = self.exchange.own
        return [
            _first_peak(c, own_bytes(k), c.first_peak) if own_bytes(k) else c.backward_peak
            for k, c in enumerate(self._costs)
        ]

    @cached_property
    def weight_more(self) -> int:
        """Peak of the backward for weights, from the last layer to the first, less `left`."""
        if self.exchange.level >= 2:
            early = enumerate(self._early)
            return self._for_weights([self.exchange.own(k) - size for k, size in early])
        alive, before = [0], 0
        for left, cost in zip(self._left, self._costs, strict=True):
            before += left
            alive.append(before + cost.weight_peak)
        return max(0, max(alive) - self.left) + self.exchange.during_weights

    def first(self, kept: Mapping[str, int]) -> First:
        """Memory of the first backward of a step, which allocates the gradients that stay; `kept`
        are their bytes, by name."""
        costs, completed = self._costs, self._completed(kept)
        made = [max(size, self.exchange.own(k)) for k, size in enumerate(completed)]
        later = [min(size, cost.deferred_weights) for cost, size in zip(costs, made, strict=True)]
        now = [*map(sub, made, later)]
        pairs = zip(costs, completed, strict=True)
        whole = [_first_peak(cost, size, cost.copied_peak) for cost, size in pairs]
        whole = [*map(max, whole, self._peaks)]
        return First(
            gradients=sum(completed),
            later=sum(completed) - (sum(now) - sum(self._early)),  # shards: when these are sent
            backward_more=self._backward(whole, completed),
            input_more=self._for_inputs(now),
            weight_more=self._for_weights(later),
        )

    def _for_weights(self, later: Sequence[int]) -> int:
        """`weight_more` where each block allocates `later` bytes of gradients. At level 3 those of
        a unit are sent before the next unit begins."""
        behind, alive = 0, [0]
        before = sum(self._left)
        for k in reversed(range(len(self.blocks))):
            cost, left = self._costs[k], self._left[k]
            before -= left
            peak = min(left - cost.deferred + cost.first_weight_peak, left + later[k])
            if self.exchange.level >= 2 and not later[k]:
                peak = left + cost.weight_peak
            alive.append(before + behind + max(peak, left))
            behind += later[k]
            if self.exchange.level == 3 and k and self._units[k] != self._units[k - 1]:
                behind = 0
        return max(0, max(alive) - sum(self._left)) + self.exchange.during_weights

    def _completed(self, kept: Mapping[str, int]) -> list[int]:
        """Bytes of the gradients that each block completes: the first to read a parameter is the
        last to add to its gradient."""
        completed, left = [0] * len(self.blocks), set(kept)
        for k, block in enumerate(self._cut):
            names = left & {binding.name for binding in block.tensors}
            completed[k] = sum(kept[name] for name in names)
            left -= names
        return completed

    def _backward(self, peaks: Sequence[int], left: Sequence[int], *, sends: bool = True) -> int:
        """Peak of the blocks' backwards one after the other, each of which leaves `left` bytes
        behind, less `saved`. It `sends` buckets of gradients unless weights have a backward of
        their own."""
        before, behind, alive = self.saved, 0, [0]
        for k in reversed(range(len(self.blocks))):
            before -= self._saved[k]
            cost, peak = self._costs[k], peaks[k]
            if self._is_recomputed(k):
                peak = max(peak, cost.recompute_peak + cost.gradient_bytes)
            peak += self._waiting[k] + self._returned(k)
            exchanged = self.exchange.backward(k) if sends else self.exchange.prefetched(k)
            alive.append(before + behind + peak + exchanged)
            behind += left[k]
        return max(0, max(alive) - self.saved)

    @cached_property
    def _waiting(self) -> list[int]:
        """Bytes of gradients of values that other blocks made or read, during each block's
        backward, without messages. The runtime holds the gradients of a stage's results until the
        stage's backward ends."""
        waiting = []
        for k, cost in enumerate(self._costs):
            last = sum(nbytes_of(node) for node in self._results(k))
            sent = sum(nbytes_of(node) for node in self._results(k) if self._is_sent(node))
            waiting.append(
                self._summed(k) - sent + min(last, cost.output_peak - cost.backward_peak)
            )
        return waiting

    @cached_property
    def _costs(self) -> list[BlockCost]:
        return [self.priced.costs[b] for b in self.blocks]

    @cached_property
    def _cut(self) -> list[Block]:
        return [self.priced.cut.blocks[b] for b in self.blocks]

    @cached_property
    def _left(self) -> list[int]:
        """`left` by block; an operand that several blocks have read counts with the first."""
        deferred, seen = [], set[fx.Node]()
        for block, cost in zip(self._cut, self._costs, strict=True):
            new = {block.inputs[i] for i in cost.deferred_inputs} - seen
            seen |= new
            deferred.append(cost.deferred + sum(map(nbytes_of, new)))
        return deferred

    def _is_recomputed(self, k: int) -> bool:
        """Whether a block is recomputed."""
        return self._cut[k].name in self.priced.recomputed

    @cached_property
    def _offloaded(self) -> list[int]:
        """The blocks whose activations wait in the host's memory."""
        return [k for k, block in enumerate(self._cut) if block.name in self.priced.copies]

    @cached_property
    def _copied(self) -> Sequence[tuple[int, int, int, fx.Node | None]]:
        """Contents of the host's memory: the first and the last block that keep it there, bytes,
        and the value, if it is one between blocks."""
        users: dict[fx.Node, list[int]] = {}
        for k in self._offloaded:
            block, cost = self._cut[k], self._costs[k]
            read = (block.inputs[i] for i in cost.kept_inputs)
            made = (block.outputs[i] for i in cost.kept_outputs)
            for node in (*(node for node in read if not self._stays(node, k)), *made):
                users.setdefault(node, []).append(k)
        inner = [(k, self._costs[k].saved - self._costs[k].saved_outputs) for k in self._offloaded]
        return [(k, k, size, None) for k, size in inner] + [
            (ks[0], ks[-1], nbytes_of(node), node) for node, ks in users.items()
        ]

    def _stays(self, node: fx.Node, k: int) -> bool:
        """Whether block `k` reads a leaf of its stage's graph, which is not copied."""
        maker, _ = self._uses[node]
        return maker < 0 or self._units[maker] != self._units[k] or not self._has_gradient(node)

    def _after(self, k: int, otherwise: int) -> int:
        """The next offloaded block of the same unit: copies are finished with each forward."""
        unit = self._units[k]
        offloaded = (later for later in self._offloaded if later > k and self._units[later] == unit)
        return next(offloaded, otherwise)

    def _leaving(self, k: int) -> int:
        """Bytes on their way to the host while the forward of block `k` runs."""
        total = 0
        for first, _, size, node in self._copied:
            is_alive = node is not None and (node in self.kept or k <= self._uses[node][1])
            end = self._after(first, k if self._units[first] == self._units[k] else 0)
            if first < k <= end and not is_alive:
                total += size
        return total

    def _returned(self, k: int) -> int:
        """Bytes back from the host while the backward of block `k` runs, besides what it saved
        itself: values that it has read, and what the offloaded block before it saved, which comes
        back meanwhile."""
        made = self._cut[k].outputs
        return sum(
            size
            for first, last, size, node in self._copied
            if first <= k <= self._after(last, last)
            and (first < k if node is None else node not in made)
        )

    @property
    def host(self) -> int:
        """Kept in the host's memory from the forward to the backward."""
        return sum(size for _, _, size, _ in self._copied)

    @property
    def waits(self) -> tuple[float, float]:
        """Seconds of copies that no compute hides: after the forward, and before the backward."""
        leaving = returning = 0.0
        for last in (k for k in self._offloaded if self._after(k, k) == k):
            later = range(last + 1, len(self.blocks))
            blocks = (self.blocks[k] for k in later if self._units[k] == self._units[last])
            seconds = self.priced.copies[self._cut[last].name]
            leaving += max(0.0, seconds - sum(self.priced.forward[b] for b in blocks))
            returning += seconds
        return leaving, returning

    @cached_property
    def _saved(self) -> list[int]:
        """`saved` by block. A kept value counts with the block that makes it, one of the prologue
        with the first block that keeps it; constants are resident and do not count."""
        kept, parts = self.kept, self.priced.cut
        early = kept.intersection(parts.prologue) - parts.constants
        saved = []
        for k, (block, cost) in enumerate(zip(self._cut, self._costs, strict=True)):
            gone = self._is_recomputed(k) or k in self._offloaded
            inner = 0 if gone else cost.saved - cost.saved_outputs
            outputs = sum(nbytes_of(node) for node in block.outputs if node in kept)
            new = early.intersection(block.inputs)
            early -= new
            saved.append(inner + outputs + sum(map(stored, new)))
        return saved

    @cached_property
    def kept(self) -> set[fx.Node]:
        """The values between blocks that a backward here, or another stage of this rank, needs."""
        kept = {node for k in range(len(self.blocks)) for node in self._keeps(k)}
        if self.beside:
            kept |= {
                node for block in self._cut for node in block.outputs if self._is_read_beside(node)
            }
        units, pairs = self._units, self._uses.items()
        return kept | {node for node, (a, b) in pairs if 0 <= a < b and units[a] < units[b]}

    @cached_property
    def _units(self) -> Sequence[int]:
        """The unit of each block. Where parameters are gathered, each unit is a stage of its own;
        elsewhere all blocks are one unit."""
        return self.exchange.units or [0] * len(self.blocks)

    @cached_property
    def _read(self) -> dict[int, set[fx.Node]]:
        """The values that each unit reads."""
        nodes: dict[int, set[fx.Node]] = {unit: set() for unit in self._units}
        for unit, block in zip(self._units, self._cut, strict=True):
            nodes[unit].update(block.inputs)
        return nodes

    def _is_read_beside(self, node: fx.Node) -> bool:
        """Whether another stage of this rank reads a value."""
        return any(self.priced.home.get(user) in self.beside for user in node.users)

    def _keeps(self, k: int) -> Iterator[fx.Node]:
        """The inputs and outputs that a block keeps; a recomputed one keeps all of its inputs, an
        offloaded one those that are not copied."""
        block, cost = self._cut[k], self._costs[k]
        if self._is_recomputed(k):
            yield from block.inputs
        elif k in self._offloaded:
            read = (block.inputs[i] for i in cost.kept_inputs)
            yield from (node for node in read if self._stays(node, k))
        else:
            yield from (block.inputs[i] for i in cost.kept_inputs)
            yield from (block.outputs[i] for i in cost.kept_outputs)

    @cached_property
    def _uses(self) -> dict[fx.Node, tuple[int, int]]:
        """Each value's maker (-1: another stage) and last reader (-1: none here)."""
        made = {node: k for k, block in enumerate(self._cut) for node in block.outputs}
        read = {node: k for k, block in enumerate(self._cut) for node in block.inputs}
        return {n: (made.get(n, -1), read.get(n, -1)) for n in {**made, **read}}

    @cached_property
    def _transient(self) -> list[tuple[int, int, int]]:
        """Values between blocks that no backward needs: maker, last reader, bytes."""
        return [
            (maker, reader, nbytes_of(node))
            for node, (maker, reader) in self._uses.items()
            if 0 <= maker < reader and node not in self.kept
        ]

    def _passing(self, k: int) -> int:
        """Bytes of the values that no backward needs, still to be read by block `k` or later."""
        return sum(size for maker, reader, size in self._transient if maker < k <= reader)

    @cached_property
    def _skips(self) -> list[tuple[int, int, int]]:
        """Differentiable values read after the next block, as skips are: maker, reader, bytes."""
        return [
            (maker, reader, nbytes_of(node))
            for node, (maker, reader) in self._uses.items()
            if reader > maker + 1 and self._has_gradient(node)
        ]

    @cached_property
    def _tied(self) -> list[tuple[list[int], int]]:
        """Parameters that several blocks read: these, and bytes.

        Autograd holds the sum of their gradients until the first block's backward has added to it.
        It makes the first sum in a new tensor, if the last block's gradient is a view, as that of a
        linear layer is, and later ones in place (torch/csrc/autograd/input_buffer.cpp).
        """
        readers: dict[str, list[int]] = {}
        for k, block in enumerate(self._cut):
            for name in {binding.name for binding in block.tensors} & self.weights.keys():
                readers.setdefault(name, []).append(k)
        return [(ks, self.weights[name]) for name, ks in readers.items() if len(ks) > 1]

    def _summed(self, k: int) -> int:
        """Bytes of partial sums of gradients that wait during block `k`'s backward."""
        values = sum(size for maker, reader, size in self._skips if maker < k < reader)
        held = sum(size for readers, size in self._tied if readers[0] <= k < readers[-1])
        new = max((size for readers, size in self._tied if k == readers[-2]), default=0)
        return values + held + new

    def _results(self, k: int) -> Iterator[fx.Node]:
        """The differentiable outputs of a block that no block of its unit reads."""
        read = self._read[self._units[k]]
        for node in self._cut[k].outputs:
            if node not in read and self._has_gradient(node):
                yield node

    def _has_gradient(self, node: fx.Node) -> bool:
        """Whether a block makes this value and the backward its gradient."""
        return node.name in self.differentiable and node in self.priced.home

    def _is_sent(self, node: fx.Node) -> bool:
        """Whether a block of another rank reads a result of this stage."""
        homes = {self.priced.home[user] for user in node.users if user in self.priced.home}
        return not homes <= {*self.beside, *self.blocks}


def _first_peak(cost: BlockCost, made: int, traced: int) -> int:
    """Peak of a block's first backward, which allocates gradients of `made` bytes; `traced` is the
    peak if it allocates those of all its parameters."""
    return max(cost.backward_peak, min(traced, cost.backward_peak + made))


def _first_input_peak(cost: BlockCost, made: int) -> int:
    """Peak of a block's first backward for inputs, if that is a pass of its own."""
    if not cost.input_peak:
        return _first_peak(cost, made, cost.copied_peak)
    return max(cost.input_peak, min(cost.first_input_peak, cost.input_peak + made))


def stored(node: fx.Node) -> int:
    """Bytes of the storage of a value: that of an expanded tensor is smaller than its size.

    Where the size of the storage depends on the data, that of the value counts.
    """
    value = node.meta["val"]
    try:
        return min(nbytes_of(node), int(value.untyped_storage().nbytes()))
    except (RuntimeError, TypeError, ValueError):
        return nbytes_of(node)
