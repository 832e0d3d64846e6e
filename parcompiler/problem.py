"""What is given to the passes: the model, the mesh, the options, and what everything costs.

Blocks are costed per template and per granularity, when a pass asks for them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import fx

from parcompiler.capture.attention import with_kernels
from parcompiler.capture.blocks import Cut, cut, levels
from parcompiler.capture.clean import simplify
from parcompiler.capture.effects import effects_of, is_repeatable, viewed
from parcompiler.capture.lift import lift
from parcompiler.capture.prologue import cone
from parcompiler.cost import (
    WHOLE,
    BlockCost,
    bytes_per_parameter,
    collective,
    more_in_update,
    moved_in_update,
    multiplied_in_update,
    seconds,
    trace_block,
)
from parcompiler.cost.collective import slowest
from parcompiler.cost.selective import running_again
from parcompiler.cost.stand_in import tensors
from parcompiler.cost.times import Bench, measured, modelled, modelled_on
from parcompiler.device import Device
from parcompiler.graph import Block, Graph, Parameter, nbytes_of
from parcompiler.mesh import Mesh
from parcompiler.naming.variables import argument_names, overwritten
from parcompiler.options import Options
from parcompiler.pieces import dealt
from parcompiler.plan import Plan, Sharding, TemplateTime, VocabularyTime

Found = TypeVar("Found")

SPARE = 50  # so small a part of the memory stays free where parameters are gathered
BUCKET = 25 * 2**20  # bytes of gradients that data ranks sum together; as DistributedDataParallel
LEVELS = range(4)  # of ZeRO
SMALL_BUCKET = 2**20  # as its first one
PARTS = 8  # of the gradients of a rank, one of which is a bucket at most


def bucket_size(graph: Graph, pipeline: int) -> int:
    """Bytes of the gradients that data ranks sum together, of a model on so many ranks of the
    pipeline: of a small one a part, so that they take little memory besides."""
    trained = sum(item.nbytes for item in graph.parameters if item.trainable)
    return min(BUCKET, max(SMALL_BUCKET, trained // pipeline // PARTS))


def prepared(captured: Graph, options: Options, mesh: Mesh, dtype: torch.dtype | None) -> Graph:
    """The graph of a problem: a captured one with the kernels of its devices, lifted to `dtype`
    (None: its own)."""
    if not options.exact:
        captured = with_kernels(captured, on_cpu=mesh.devices[0].is_cpu)
    return simplify(captured if dtype in (None, captured.narrow) else lift(captured, dtype))


@dataclass(frozen=True)
class Priced:
    """The blocks of one granularity with what each costs for one micro-batch on the device.

    `forward` and `backward` are seconds, `weight` those of `backward` that can be left for later;
    `hidden` come on top of it where its two parts run apart (see `TemplateTime`).
    The blocks in `recomputed` keep no activations but what they read: their backward begins with
    their forward. Where ranks have different devices, `ranks` are the same blocks on each of them,
    and the seconds here the least of theirs.
    """

    cut: Cut
    costs: tuple[BlockCost, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    hidden: tuple[float, ...]
    sent: tuple[fx.Node, ...]
    recomputed: frozenset[str] = frozenset()
    ranks: tuple[Priced, ...] = ()

    @staticmethod
    def timed(
        parts: Cut,
        costs: Iterable[BlockCost],
        sent: tuple[fx.Node, ...],
        times: Sequence[Mapping[str, TemplateTime]],
    ) -> Priced:
        """Blocks with what their templates take, on the one device or on that of each rank."""
        names, given = [block.template for block in parts.blocks], tuple(costs)

        def made(took: Mapping[str, TemplateTime]) -> Priced:
            backward = tuple(took[name].backward for name in names)
            weight = map(min, (took[name].weight for name in names), backward)
            forward = tuple(took[name].forward for name in names)
            hidden = tuple(took[name].hidden for name in names)
            return Priced(parts, given, forward, backward, tuple(weight), hidden, sent)

        if len(times) == 1:
            return made(times[0])
        return dataclasses.replace(made(_least(times)), ranks=tuple(map(made, times)))

    def on(self, rank: int) -> Priced:
        """The same blocks on the device of a rank of the pipeline."""
        return self.ranks[rank] if self.ranks else self

    @cached_property
    def pace(self) -> float:
        """As many ranks on which every block took the least time would do what all ranks do, at
        most; 0 where ranks are alike."""
        found = []
        for one in self.ranks:
            rows = zip(self.forward, self.backward, one.forward, one.backward, strict=True)
            found.append(max(((a + b) / (c + d) for a, b, c, d in rows if a + b), default=1.0))
        return math.fsum(found)

    def recomputing(self, names: Collection[str]) -> Priced:
        """The same blocks when those of these names are recomputed."""
        assert not self.recomputed
        again = [block.name in names for block in self.cut.blocks]
        rows = zip(self.forward, self.backward, again, strict=True)
        return dataclasses.replace(
            self,
            backward=tuple(back + once if twice else back for once, back, twice in rows),
            recomputed=frozenset(names),
            ranks=tuple(one.recomputing(names) for one in self.ranks),
        )

    def mixed(self, other: Priced, names: Collection[str]) -> Priced:
        """The same blocks, those of these names as in `other`."""
        places = [(other if b.name in names else self) for b in self.cut.blocks]

        def taken(name: str) -> Any:
            return tuple(getattr(one, name)[b] for b, one in enumerate(places))

        fields = "costs", "forward", "backward", "weight", "hidden"
        pairs = zip(self.ranks, other.ranks, strict=True)
        ranks = tuple(mine.mixed(its, names) for mine, its in pairs)
        return dataclasses.replace(self, ranks=ranks, **{name: taken(name) for name in fields})

    def gathering(self, exchanges: Sequence[tuple[float, float]]) -> Priced:
        """The same blocks when the parameters of each are gathered before both of its passes, and
        its gradients scattered behind them, beside other compute: seconds of both for each."""
        rows = [*zip(self.forward, self.backward, self.weight, exchanges, strict=True)]
        backward = [max(back, gather + scatter) for _, back, _, (gather, scatter) in rows]
        late = (max(weight, scatter) for _, _, weight, (_, scatter) in rows)
        return dataclasses.replace(
            self,
            forward=tuple(max(once, gather) for once, _, _, (gather, _) in rows),
            backward=tuple(backward),
            weight=tuple(map(min, late, backward)),
            ranks=tuple(one.gathering(exchanges) for one in self.ranks),
        )

    @cached_property
    def repeatable(self) -> frozenset[str]:
        """The blocks that can be recomputed: they update nothing that outlives them."""
        first = {block.template: block for block in reversed(self.cut.blocks)}
        able = {template for template, block in first.items() if is_repeatable(block.nodes)}
        return frozenset(block.name for block in self.cut.blocks if block.template in able)

    @cached_property
    def home(self) -> dict[fx.Node, int]:
        """The block that makes each node."""
        return {node: b for b, block in enumerate(self.cut.blocks) for node in block.nodes}

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """Bytes that each block keeps for its backward; a value between blocks counts once,
        with the block that makes it. A recomputed block keeps all that it reads and no more."""
        kept: set[fx.Node] = set()
        own = []
        for block, cost in zip(self.cut.blocks, self.costs, strict=True):
            if block.name in self.recomputed:
                kept.update(block.inputs)
                own.append(0)
            else:
                kept.update(block.inputs[i] for i in cost.kept_inputs)
                kept.update(block.outputs[i] for i in cost.kept_outputs)
                own.append(cost.saved - cost.saved_outputs)
        return tuple(
            inner + sum(nbytes_of(node) for node in block.outputs if node in kept)
            for block, inner in zip(self.cut.blocks, own, strict=True)
        )

    @cached_property
    def moments(self) -> tuple[int, ...]:
        """Bytes that each block takes besides those saved while it computes: in the forward or in
        the backward, which for a recomputed block begins with its forward."""
        return tuple(
            max(cost.unsaved_peak, cost.recompute_peak + cost.gradient_bytes, cost.backward_peak)
            if block.name in self.recomputed
            else max(cost.saved, cost.forward_peak, cost.backward_peak, cost.input_peak)
            - cost.saved
            for block, cost in zip(self.cut.blocks, self.costs, strict=True)
        )

    @cached_property
    def later(self) -> tuple[int, ...]:
        """Bytes by which what the linear layers of a block leave is more than what it saves."""
        return tuple(
            max(0, cost.deferred - size) for cost, size in zip(self.costs, self.saved, strict=True)
        )


def _least(times: Sequence[Mapping[str, TemplateTime]]) -> dict[str, TemplateTime]:
    """The least that each template takes on any device."""
    found = {}
    for name in times[0]:
        own = [took[name] for took in times]
        fields = ("forward", "backward", "weight", "hidden")
        found[name] = TemplateTime(name, *(min(getattr(t, x) for t in own) for x in fields))
    return found


def _peaks(cost: BlockCost) -> tuple[int, int, int]:
    """Bytes of a block at the fullest moments of its forward, its backward, and that for inputs."""
    return cost.forward_peak, cost.backward_peak, cost.input_peak


@dataclass(frozen=True)
class Problem:
    """What is given. A pass reads it and never changes it.

    `local` keeps what was found out before (see `once`), the problems of one tensor rank among it
    (see passes/shard/local.py), `times` what was measured on the `bench`, by granularity and
    template, and `vocabulary_times` the same of a spread vocabulary, by method. `explain` says
    whether it is worth time to say what would do when nothing fits. With `selective` cheap
    operators of all blocks run again in the backward (see `cost.selective`). With context ranks,
    `graph` is that of one of them, and `context` how it was divided.
    """

    graph: Graph
    mesh: Mesh
    options: Options
    _priced: dict[tuple[int, frozenset[str], bool, bool], Priced] = field(
        default_factory=dict, repr=False, compare=False
    )
    local: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    bench: Bench | None = None
    explain: bool = field(default=True, repr=False, compare=False)
    times: dict[tuple[int, str], TemplateTime] = field(
        default_factory=dict, repr=False, compare=False
    )
    vocabulary_times: dict[str, VocabularyTime] = field(
        default_factory=dict, repr=False, compare=False
    )
    selective: bool = False
    context: Sharding | None = None

    def once(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """What `find` returns, found once for each key, mesh and level of ZeRO: many schedules ask
        for the same.

        Of the options it must depend on those in the key alone.
        """
        place = self.mesh, self.options.zero, self.selective, key
        if place not in self.local:
            self.local[place] = find()
        found: Found = self.local[place]
        return found

    def anew(self, **changes: Any) -> Problem:
        """The problem with another graph or mesh, of which nothing is known yet."""
        names = ("_priced", "local", "times", "vocabulary_times")
        fresh: dict[str, Any] = {name: {} for name in names}
        return dataclasses.replace(self, **changes, **fresh)

    @property
    def zero(self) -> int:
        """The level of ZeRO by which memory counts; the highest while that is open."""
        if self.mesh.replicas == 1 or self.options.asynchronous:
            return 0
        return self.options.zero if isinstance(self.options.zero, int) else LEVELS[-1]

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered for each block: the third level, if that is decided."""
        return self.zero == 3 and self.options.zero == 3

    @property
    def scatters(self) -> bool:
        """Whether gradients are scattered behind every backward: the second level and above, if
        that is decided."""
        return self.zero >= 2 and self.options.zero == self.zero

    def at_zero(self, level: str | int) -> Problem:
        """The problem with a level of ZeRO, or with one that is open ("auto")."""
        place = "zero", self.mesh, level, self.selective
        options = dataclasses.replace(self.options, zero=level)
        found: Problem | None = self.local.get(place)
        if found is None or (found.options, found.explain) != (options, self.explain):
            found = dataclasses.replace(self, options=options)
            self.local[place] = found
        return found

    def selectively(self, selective: bool) -> Problem:
        """The problem in which cheap operators run again, or do not."""
        if selective == self.selective:
            return self
        return dataclasses.replace(self, selective=selective)

    @property
    def device(self) -> Device:
        """The figures of the mesh's device. Raises InputError where there are several."""
        return self.mesh.hardware

    @property
    def devices(self) -> tuple[Device, ...]:
        """The figures of the device of each rank of the pipeline."""
        return self.mesh.devices

    @property
    def slowest_device(self) -> Device:
        """The device with the fewest FLOP/s in the model's dtype, the first of equals."""
        dtype = self.graph.dtype
        return min(self.devices, key=lambda device: device.peak(dtype))

    @property
    def accelerator(self) -> bool:
        """Whether ranks compute on something else than a CPU."""
        return not self.devices[0].is_cpu

    @property
    def memories(self) -> tuple[int, ...]:
        """The bytes of each rank of the pipeline that a plan may take: less than the room of its
        device where gathers are between its blocks, which lists time and order in ways that an
        estimate does not."""
        sizes = map(self.room, self.devices)
        return tuple(size - size // SPARE if self.gathers else size for size in sizes)

    def room(self, device: Device) -> int:
        """The bytes of a device besides those that the option `memory_margin` keeps free."""
        return device.memory - math.ceil(self.options.memory_margin * device.memory)

    @cached_property
    def levels(self) -> range:
        """The granularities at which the model can be cut; 1 is the coarsest."""
        return levels(self.graph)

    def priced(self, level: int) -> Priced:
        """The blocks at a granularity, with their costs."""
        return self.recomputing(level, ())

    def recomputing(self, level: int, names: Collection[str]) -> Priced:
        """The blocks at a granularity, with their costs when some of them are recomputed, and their
        parameters gathered where they are."""
        key = level, frozenset(names), self.gathers, self.selective
        if key not in self._priced:
            if self.gathers:
                plain = self.at_zero("auto").recomputing(level, names)
                found = plain.gathering(self.exchanges(plain))
            else:
                found = (
                    self._keeping(level, names).recomputing(key[1])
                    if names
                    else (self._plain(level))
                )
            self._priced[key] = found
        return self._priced[key]

    def _keeping(self, level: int, names: Collection[str]) -> Priced:
        """The blocks at a granularity; in those of these names no operator runs again by itself."""
        found = self.priced(level)
        if not self.selective:
            return found
        return found.mixed(self.selectively(False).priced(level), names)

    def _plain(self, level: int) -> Priced:
        """The blocks at a granularity, nothing recomputed or gathered."""
        sent = self._cheaper_sent(cut(self.graph, level))
        parts = cut(self.graph, level, sent)
        instances: dict[str, list[Block]] = {}
        for block in parts.blocks:
            instances.setdefault(block.template, []).append(block)
        by_template = {name: self._trace(blocks) for name, blocks in instances.items()}
        costs = (by_template[block.template] for block in parts.blocks)
        return Priced.timed(parts, costs, sent, self._times(level, parts, by_template))

    def exchanges(self, priced: Priced) -> list[tuple[float, float]]:
        """Seconds in which data ranks gather the parameters of each block, and scatter the sums of
        its gradients; on the slowest of the ranks."""

        def joined(action: str, nbytes: int, expert: int | None) -> float:
            if not nbytes:
                return 0.0
            ranks = range(1 if self.mesh.is_uniform else self.mesh.pipeline)
            rows = (self.mesh.grid.replicas([rank], expert=expert) for rank in ranks)
            count = math.ceil(nbytes / self.bucket) if action == "reduce-scatter" else 1
            each = nbytes / max(1, count)
            return count * max(collective.joined(self.mesh, action, each, row) for row in rows)

        known, found = functools.cache(joined), []
        for block in priced.cut.blocks:
            gathers = [known("all-gather", self._unit_bytes(block, of), of) for of in (None, 0)]
            sums = [known("reduce-scatter", self._made_bytes(block, of), of) for of in (None, 0)]
            found.append((sum(gathers), sum(sums)))
        return found

    def under(self, plan: Plan) -> Priced:
        """The blocks of a plan with what each costs under it."""
        assert plan.granularity is not None
        return self.recomputing(plan.granularity, plan.recompute or ())

    def state_bytes(self, item: Parameter) -> int:
        """Bytes of a parameter or buffer with its gradient and optimizer states, on the data rank
        that has most of them."""
        return sum(self.kept_bytes(item))

    def kept_bytes(self, item: Parameter) -> tuple[int, int, int]:
        """Bytes of a parameter or buffer, of its gradient, and of its optimizer states and master,
        as a data rank keeps them: the whole, or its part from the level that shares them out."""
        return self._for_alike(item, self._kept_bytes)

    def _for_alike(self, item: Parameter, find: Callable[[Parameter], Found]) -> Found:
        """What `find` says of a parameter, asked once for all that are alike: layers are many."""
        key = find.__name__, item.shape, item.dtype, item.trainable, item.buffer, item.experts
        if key not in self._alike:
            self._alike[key] = find(item)
        found: Found = self._alike[key]
        return found

    @cached_property
    def _alike(self) -> dict[Hashable, Any]:
        return {}

    def _kept_bytes(self, item: Parameter) -> tuple[int, int, int]:
        levels = zip((3, 2, 1), self.bytes_of(item), strict=True)
        whole, part = item.numel, self.part(item)
        value, gradient, states = ((part if self.zero >= k else whole) * n for k, n in levels)
        return value, gradient, states

    def element_bytes(self, item: Parameter) -> int:
        """The bytes of one element on the mean, rounded up."""
        return -(-self.state_bytes(item) // max(1, item.numel))

    def bytes_of(self, item: Parameter) -> tuple[int, int, int]:
        """Bytes of an element of a parameter, of its gradient, and of its optimizer states."""
        narrow, value = item.dtype == self.options.narrow, item.dtype.itemsize
        bare = bytes_per_parameter("none", item.dtype, trainable=item.trainable)
        every = bytes_per_parameter(
            self.options.optimizer, item.dtype, trainable=item.trainable, masters=narrow
        )
        kept = self._kept * (4 if narrow else item.dtype.itemsize)
        return value, bare - value, every - bare + kept * item.trainable

    @cached_property
    def _kept(self) -> int:
        """How many more tensors like each weight the way of the data axis keeps."""
        return self.options.data_updates.kept

    def part(self, item: Parameter) -> int:
        """The most elements of a parameter that one data rank updates; of a buffer, all. Where it
        takes whole parameters, as large a part of each as the fullest rank has of all."""
        if self.options.optimizer in WHOLE and not item.buffer:
            return math.ceil(item.numel * self._fullest)
        rows, ranks = item.shape[0] if item.shape else 1, self.sharers(item)
        return -(-rows // ranks) * (item.numel // max(1, rows))

    def sharers(self, item: Parameter) -> int:
        """How many data ranks can share out what they all have of a parameter: those with the same
        experts, or all; buffers are whole."""
        same = self.mesh.replicas // self.mesh.expert
        return 1 if item.buffer else same if item.experts else self.mesh.replicas

    @cached_property
    def _fullest(self) -> float:
        """The part of the parameters that the fullest data rank gets, if it gets whole ones."""
        sizes = {item.name: item.numel for item in self.graph.parameters if not item.buffer}
        loads, homes = [0] * self.mesh.replicas, dealt(sizes, self.mesh.replicas)
        for name, home in homes.items():
            loads[home] += sizes[name]
        return max(loads) / max(1, sum(loads))

    def unit_bytes(self, block: Block) -> int:
        """Bytes of the parameters that are gathered for a block."""
        return sum(self._unit_bytes(block, of) for of in (None, 0))

    def _unit_bytes(self, block: Block, expert: int | None) -> int:
        """The same of experts (0), or of all others (None)."""
        return sum(x.nbytes for x in self._shared(block, expert)) if self.gathers else 0

    def _made_bytes(self, block: Block, expert: int | None) -> int:
        """Bytes of the gradients that a backward of a block makes for data ranks to share out."""
        return sum(item.nbytes for item in self._shared(block, expert) if item.trainable)

    def _shared(self, block: Block, expert: int | None) -> Iterator[Parameter]:
        """The parameters that a block reads and data ranks share out, each once."""
        for name in {binding.name: None for binding in block.tensors}:
            item = self.graph.by_name[name]
            if self.sharers(item) > 1 and bool(item.experts) == (expert is not None):
                yield item

    def constant_bytes(self, parts: Cut, blocks: Iterable[int]) -> dict[str, int]:
        """Bytes of the constants that some blocks read, by the node that makes the memory; nothing
        for views of buffers."""
        read = (node for b in blocks for node in parts.blocks[b].inputs if node in parts.constants)
        return {
            node.name: sum(one.numel() * one.itemsize for one in tensors(node.meta["val"]))
            for node in map(viewed, read)
            if node.op == "call_function"
        }

    def update_bytes(self, item: Parameter) -> int:
        """Bytes by which a parameter or buffer takes more in the optimizer's step. Nothing where
        data ranks have gradients of parts by then."""
        if item.dtype != self.options.narrow or (self.zero and self.sharers(item) > 1):
            return 0
        more = more_in_update(
            self.options.optimizer, item.dtype, trainable=item.trainable, masters=True
        )
        return item.numel * more

    def update_seconds(self, item: Parameter) -> float:
        """Seconds of the optimizer's step for a parameter, or for the part of it that a data rank
        updates: what it moves, and its kernels."""
        return self._for_alike(item, self._update_seconds) if item.trainable else 0.0

    def _update_seconds(self, item: Parameter) -> float:
        optimizer, narrow = self.options.optimizer, item.dtype == self.options.narrow

        def on(device: Device) -> float:
            fused = not device.is_cpu  # as torch has it for parameters that are on a GPU
            each = moved_in_update(optimizer, item.dtype, masters=narrow, fused=fused)
            nbytes = each * (self.part(item) if self.zero else item.numel)
            bandwidth = device.memory_bandwidth * device.efficiency.traffic(nbytes)
            kernels = 3 * narrow + (1 if fused else each // (3 * item.dtype.itemsize))
            products = multiplied_in_update(optimizer, item.shape) / device.peak(torch.bfloat16)
            products *= self._fullest if self.zero else 1.0
            moving = nbytes / bandwidth + kernels * device.launch_overhead if each else 0.0
            return products + moving

        return max(map(on, set(self.mesh.devices)))

    @cached_property
    def bucket(self) -> int:
        """Bytes of the gradients that data ranks sum together."""
        return bucket_size(self.graph, self.mesh.pipeline)

    @cached_property
    def bucket_bytes(self) -> int:
        """Bytes that a rank may need at most to bring the gradients of buckets together."""
        summed = [x for x in self.graph.parameters if x.trainable and self.sharers(x) > 1]
        ranks = min(map(self.sharers, summed), default=1)
        packed = self.options.compression is not None  # it is sent, and others' are received
        size = min(self.bucket, sum(item.nbytes for item in summed)) * (1 + packed)
        if self.scatters:  # and what comes of it
            size = max(size, self.largest_gradient) * (ranks + 1) // ranks
        return max(size, self.largest_gradient if self.zero else 0)

    @cached_property
    def largest_gradient(self) -> int:
        """Bytes of the largest gradient that data ranks need room for besides: one of which they
        share rows out unevenly is copied, to pieces that are as long on every rank."""
        summed = (x for x in self.graph.parameters if x.trainable and self.sharers(x) > 1)
        copied = (x for x in summed if self.scatters or (x.shape and x.shape[0] % self.sharers(x)))
        return max((item.nbytes for item in copied), default=0)

    def carried(self, node: fx.Node) -> float:
        """Seconds to move a value between neighbours of the pipeline, over their slowest link.

        At its nominal bandwidth: what is decided by this lets ranks wait for messages, which go
        beside the compute (the curve of a "message" is for them).
        """
        return slowest(self.mesh).seconds(nbytes_of(node))

    @property
    def held_batch_bytes(self) -> int:
        """Bytes of the tensors of all micro-batches."""
        return self.options.microbatches * self.batch_bytes

    @cached_property
    def batch_bytes(self) -> int:
        """Bytes of the tensors of one micro-batch."""
        named = set(self.graph.input_nodes)
        return sum(nbytes_of(n) for n in self.graph.fx_graph.nodes if n.name in named)

    def message_seconds(self, node: fx.Node) -> float:
        """Seconds to move a value between neighbours, and its gradient back if it has one."""
        once = self.carried(node)
        return 2 * once if node.name in self.graph.differentiable else once

    def _times(
        self, level: int, parts: Cut, costs: Mapping[str, BlockCost]
    ) -> list[dict[str, TemplateTime]]:
        """What each template takes; by rank where they have different devices."""
        if self.mesh.is_uniform:
            return [self._seconds(level, parts, costs)]
        return modelled_on(self.mesh, costs)

    def _seconds(
        self, level: int, parts: Cut, costs: Mapping[str, BlockCost]
    ) -> dict[str, TemplateTime]:
        """What each template takes: by the device's figures, or as it was measured."""
        first = {block.template: block for block in reversed(parts.blocks)}
        found = {}
        for name, cost in costs.items():
            known = self.times.get((level, name))
            if self.selective and self.bench is not None:  # longer than what was measured
                known = self._longer(level, name, first[name], cost)
            elif known is None:
                known = modelled(name, cost, self.device)
                if self.bench is not None:
                    given = first[name], self.graph, self.device, self.bench
                    known = measured(known, cost, *given)
                    self.times[level, name] = known
            found[name] = known
        return found

    def _longer(self, level: int, name: str, block: Block, cost: BlockCost) -> TemplateTime:
        """The time of a template that was measured where nothing runs again."""
        plain = self.selectively(False)
        priced = plain.priced(level)
        (before, *_) = (
            other
            for one, other in zip(priced.cut.blocks, priced.costs, strict=True)
            if one.template == name
        )
        more = seconds(cost.backward, self.device) - seconds(before.backward, self.device)
        known = plain.times[level, name]
        return dataclasses.replace(known, backward=known.backward + more)

    def arguments(self, instances: Sequence[Block]) -> dict[fx.Node, str]:
        """What the blocks of a template call their inputs; those of the first."""
        inputs = tuple(block.inputs for block in instances)
        return self.graph.once(
            ("arguments", inputs), lambda: argument_names(self.graph, inputs, {})
        )

    def _trace(self, instances: Sequence[Block]) -> BlockCost:
        """The cost of each block of a template."""
        split = self.mesh.pipeline > 1  # some schedule may divide its backward
        block = instances[0]
        again = running_again(self.graph, block) if self.selective else frozenset()
        arguments = self.arguments(instances)
        return self._cost(block.nodes, arguments, block.outputs, split=split, again=again)

    def _cost(
        self,
        nodes: tuple[fx.Node, ...],
        arguments: Mapping[fx.Node, str],
        outputs: tuple[fx.Node, ...],
        *,
        split: bool = False,
        again: frozenset[fx.Node] = frozenset(),
    ) -> BlockCost:
        """The cost of some nodes that read others under these names: the same on every mesh of
        accelerators, and on every one of CPUs."""
        key = "cost", nodes, tuple(arguments.items()), outputs, split, self.accelerator, again
        return self.graph.once(key, lambda: self._traced(nodes, arguments, outputs, split, again))

    def _traced(
        self,
        nodes: tuple[fx.Node, ...],
        arguments: Mapping[fx.Node, str],
        outputs: tuple[fx.Node, ...],
        split: bool,
        again: frozenset[fx.Node],
    ) -> BlockCost:
        """The same, found by running them."""
        trainable = {item.node for item in self.graph.parameters if item.trainable}
        others = {item.node for item in self.graph.parameters} - trainable
        given = nodes, tuple(arguments), outputs, trainable, others, self.graph.differentiable
        return trace_block(
            *given,
            split=split,
            overwritten=overwritten(nodes, arguments, outputs),
            accelerator=self.accelerator,
            again=again,
        )

    def _cheaper_sent(self, parts: Cut) -> tuple[fx.Node, ...]:
        """Prologue values that take longer to recompute than to receive; on some device."""
        effects, devices = effects_of(self.graph), set(self.devices)
        used = {node for block in parts.blocks for node in block.inputs}
        found = []
        for node in parts.prologue:
            if node in used - parts.constants:
                members = cone(node, effects)
                nodes = tuple(n for n in parts.prologue if n in members)
                outside = {o: None for n in nodes for o in n.all_input_nodes if o not in members}
                inputs = {o: o.name for o in outside if o.name in self.graph.input_nodes}
                cost = self._cost(nodes, inputs, (node,))
                if any(seconds(cost.forward, one) > self.carried(node) for one in devices):
                    found.append(node)
        return tuple(found)
