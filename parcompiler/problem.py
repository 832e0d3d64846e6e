"""The input of the passes: model, mesh, options, and prices of the model's blocks and tensors.

Blocks are costed once per template and granularity, when a pass first asks for them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import fx

from parcompiler.capture.attention import with_kernels
from parcompiler.capture.blocks import Cut, cut, levels, unmatched
from parcompiler.capture.clean import simplify
from parcompiler.capture.effects import effects_of, viewed
from parcompiler.capture.lift import lift
from parcompiler.capture.prologue import cone
from parcompiler.capture.row_gradients import with_row_gradients
from parcompiler.cost import (
    WHOLE,
    BlockCost,
    bytes_per_parameter,
    collective,
    moved_in_update,
    multiplied_in_update,
    seconds,
    trace_block,
)
from parcompiler.cost.collective import slowest
from parcompiler.cost.selective import running_again
from parcompiler.cost.times import Bench, measured, modelled, modelled_on
from parcompiler.cost.vocabulary import parameters_held
from parcompiler.device import Device, Link
from parcompiler.graph import Block, Graph, Parameter, nbytes_of, tensors_of
from parcompiler.mesh import Mesh
from parcompiler.naming.variables import argument_names, overwritten
from parcompiler.options import Options
from parcompiler.pieces import dealt
from parcompiler.plan import Plan, Sharding, TemplateTime, VocabularyTime
from parcompiler.priced import Priced

T = TypeVar("T")
Judge = Callable[["Problem", Plan], float]

SPARE = 0.01  # share of memory left free where parameters are gathered; twice that in pipelines
BUCKET = 25 * 2**20  # bytes of gradients that data ranks sum together; as DistributedDataParallel
LEVELS = range(4)  # of ZeRO
SMALL_BUCKET = 2**20  # least bytes of a bucket, the size of DistributedDataParallel's first one
PARTS = 8  # buckets of a rank in small models, whose buckets are smaller than BUCKET


def bucket_size(graph: Graph, pipeline: int) -> int:
    """Bytes of a bucket of gradients, for a model on `pipeline` ranks.

    Small models have small buckets: the staging copy would be a large share of their memory.
    """
    trained = sum(item.gradient_nbytes for item in graph.parameters if item.trainable)
    return min(BUCKET, max(SMALL_BUCKET, trained // pipeline // PARTS))


def filled(items: Iterable[Parameter], most: int) -> list[list[Parameter]]:
    """The parameters in buckets of at most `most` bytes of gradients, in the order of the last
    parameter of each. A bucket has one dtype, and either experts or no experts. A tensor that is
    larger, or has row gradients, is a bucket by itself; small ones before and after it share one.
    """
    buckets: list[list[Parameter]] = []
    unfilled: dict[Hashable, list[Parameter]] = {}
    sizes: Counter[Hashable] = Counter()  # of unfilled buckets, in bytes
    place: dict[str, int] = {}
    for item in items:
        place[item.name] = len(place)
        alike, size = (item.dtype, bool(item.experts)), item.gradient_nbytes
        if item.looked_up or size > most:
            buckets.append([item])
            continue
        if alike not in unfilled or sizes[alike] + size > most:
            unfilled[alike], sizes[alike] = [], 0
            buckets.append(unfilled[alike])
        unfilled[alike].append(item)
        sizes[alike] += size
    return sorted(buckets, key=lambda part: place[part[-1].name])


def prepared(captured: Graph, options: Options, mesh: Mesh, dtype: torch.dtype | None) -> Graph:
    """The graph to plan: with the attention kernels of the devices, in `dtype` (None: its own)."""
    if not options.exact:
        captured = with_kernels(captured, on_cpu=mesh.devices[0].is_cpu)
    if options.takes_rows and mesh.context == 1:
        captured = with_row_gradients(captured, options.microbatches * mesh.replicas)
    return simplify(captured if dtype in (None, captured.narrow) else lift(captured, dtype))


@dataclass
class Cache:
    """Computed and measured results for one graph; problems that differ in options share it.

    `values` is by mesh, level of ZeRO and key (see `Problem.once`); `priced` by granularity,
    recomputed blocks, and whether parameters are gathered, cheap operators run again, and the
    blocks are offloaded instead. Measured are `times`, by granularity and template, and
    `vocabulary_times`, by method.
    """

    values: dict[Hashable, Any] = field(default_factory=dict)
    priced: dict[tuple[int, frozenset[str], bool, bool, bool], Priced] = field(default_factory=dict)
    times: dict[tuple[int, str], TemplateTime] = field(default_factory=dict)
    vocabulary_times: dict[str, VocabularyTime] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """The input of the passes: a value that none of them changes, and a cache.

    `explain`: whether a refusal takes the time to find out what would fit. `selective`: whether
    cheap operators of all blocks run again in the backward (see `cost.selective`). `offload`:
    whether recomputed blocks are offloaded instead. With context ranks, `graph` is that of one of
    them, and `context` the sharding that made it. `bench` measures times where they are not
    modelled. `judge` gives the seconds of the lowered step of a plan, from the problem of a rank;
    it is used where the estimate of the passes is not exact (see `exchange.step_of`).
    """

    graph: Graph
    mesh: Mesh
    options: Options
    bench: Bench | None = None
    explain: bool = field(default=True, repr=False, compare=False)
    selective: bool = False
    offload: bool = False
    context: Sharding | None = None
    judge: Judge | None = field(default=None, repr=False, compare=False)
    cache: Cache = field(default_factory=Cache, repr=False, compare=False)

    def once(self, key: Hashable, find: Callable[[], T]) -> T:
        """The result of `find`, cached by key, mesh, level of ZeRO, and kind of recomputation.

        Many schedules share results. Every other option on which one depends must be in the key.
        """
        place = self.mesh, self.options.zero, self.selective, self.offload, key
        if place not in self.cache.values:
            self.cache.values[place] = find()
        value: T = self.cache.values[place]
        return value

    def anew(self, **changes: Any) -> Problem:
        """The problem of another graph or mesh, with an empty cache."""
        return dataclasses.replace(self, **changes, cache=Cache())

    @property
    def zero(self) -> int:
        """The level of ZeRO by which memory is counted: the highest while that is undecided."""
        if self.mesh.replicas == 1 or self.options.asynchronous:
            return 0
        if isinstance(self.options.zero, int):
            return self.options.zero
        # Updates of parameters in a forward (`Embedding(max_norm=)`) do not reach other data ranks,
        # and row gradients are not in pieces.
        return 0 if self.graph.updates_weights or self.graph.has_row_gradients else LEVELS[-1]

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered for each block: ZeRO 3 was decided."""
        return self.zero == 3 and self.options.zero == 3

    @property
    def scatters(self) -> bool:
        """Whether gradients are reduce-scattered after every backward: ZeRO 2 or 3 was decided."""
        return self.zero >= 2 and self.options.zero == self.zero

    def at_zero(self, level: str | int) -> Problem:
        """The problem at a level of ZeRO, or with the level undecided ("auto")."""
        place = "zero", self.mesh, level, self.selective, self.offload
        options = dataclasses.replace(self.options, zero=level)
        problem: Problem | None = self.cache.values.get(place)
        if problem is None or (problem.options, problem.explain) != (options, self.explain):
            problem = dataclasses.replace(self, options=options)
            self.cache.values[place] = problem
        return problem

    def selectively(self, selective: bool, *, offload: bool = False) -> Problem:
        """The problem with or without selective recomputation, and with blocks offloaded or not."""
        if (selective, offload) == (self.selective, self.offload):
            return self
        return dataclasses.replace(self, selective=selective, offload=offload)

    @cached_property
    def host(self) -> Link | None:
        """The slowest link between a device and its host; None if any is unknown. A CPU copies
        within its own memory."""
        links = [
            Link(device.memory_bandwidth / 2, 0.0) if device.is_cpu else device.host
            for device in set(self.mesh.devices)
        ]
        known = [link for link in links if link is not None]
        slowest = min(known, key=lambda link: link.bandwidth, default=None)
        return slowest if len(known) == len(links) else None

    @property
    def may_offload(self) -> bool:
        """Whether offloading activations can save memory: not on a CPU."""
        return self.accelerator and self.host is not None

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
        """Whether ranks compute on accelerators, not on CPUs."""
        return not self.devices[0].is_cpu

    @property
    def memories(self) -> tuple[int, ...]:
        """Bytes that a plan may take on each pipeline rank. Where parameters are gathered this is
        less than the device's room: the instruction lists place gathers in ways that an estimate
        does not foresee, most of all where a rank has several stages."""
        return tuple(size - int(size * self.spare) for size in map(self.room, self.devices))

    @property
    def spare(self) -> float:
        """The share of the memory that is left free."""
        return SPARE * (1 + (self.mesh.pipeline > 1)) if self.gathers else 0.0

    def room(self, device: Device) -> int:
        """Bytes of a device, without those that the option `memory_margin` keeps free; at least
        one."""
        return max(1, device.memory - math.ceil(self.options.memory_margin * device.memory))

    @cached_property
    def levels(self) -> Sequence[int]:
        """The granularities at which the model may be cut, in order; 1 is the coarsest. Those at
        which each pattern of `recompute` names a block, if there are any, else all."""
        every, wanted = levels(self.graph), self.options.recompute
        if isinstance(wanted, str):
            return every
        return [k for k in every if not unmatched(cut(self.graph, k), wanted)] or every

    def priced(self, level: int) -> Priced:
        """The blocks at a granularity, with their costs."""
        return self.recomputing(level, ())

    def recomputing(self, level: int, names: Collection[str]) -> Priced:
        """The blocks at a granularity, with their costs when the named ones are recomputed."""
        key = level, frozenset(names), self.gathers, self.selective, self.offload
        if key not in self.cache.priced:
            if self.gathers:
                plain = self.at_zero("auto").recomputing(level, names)
                priced = plain.gathering(self.exchanges(plain))
            else:
                priced = self._sparing(level, key[1]) if names else self._plain(level)
            self.cache.priced[key] = priced
        return self.cache.priced[key]

    def _sparing(self, level: int, names: frozenset[str]) -> Priced:
        """The blocks at a granularity, with the named ones recomputed as a whole, or offloaded."""
        priced = self.priced(level)
        if self.selective and not self.offload:
            priced = priced.mixed(self.selectively(False).priced(level), names)
        if not self.offload:
            return priced.recomputing(names)
        assert self.host is not None, "such devices are refused with the options"
        return priced.offloading(names, self.host, beside=self.accelerator)

    def _plain(self, level: int) -> Priced:
        """The blocks at a granularity, without recomputation and gathers."""
        sent = self._cheaper_sent(cut(self.graph, level))
        parts = cut(self.graph, level, sent)
        instances: dict[str, list[Block]] = {}
        for block in parts.blocks:
            instances.setdefault(block.template, []).append(block)
        by_template = {name: self._trace(blocks) for name, blocks in instances.items()}
        costs = (by_template[block.template] for block in parts.blocks)
        return Priced.timed(parts, costs, sent, self._times(level, parts, by_template))

    def exchanges(self, priced: Priced) -> list[tuple[float, float]]:
        """Seconds to gather each block's parameters, and to reduce-scatter its gradients, on the
        slowest ranks."""

        def joined(action: str, nbytes: int, expert: int | None) -> float:
            if not nbytes:
                return 0.0
            ranks = range(1 if self.mesh.is_uniform else self.mesh.pipeline)
            rows = (self.mesh.grid.replicas([rank], expert=expert) for rank in ranks)
            return max(collective.joined(self.mesh, action, nbytes, row) for row in rows)

        def summed(block: Block, expert: int | None) -> float:
            trained = (x for x in self._shared(block, expert) if x.trainable)
            parts = filled(trained, self.bucket)
            return sum(known("reduce-scatter", self.sent_bytes(part), expert) for part in parts)

        known, seconds = functools.cache(joined), []
        for block in priced.cut.blocks:
            gathers = [known("all-gather", self._unit_bytes(block, of), of) for of in (None, 0)]
            seconds.append((sum(gathers), sum(summed(block, of) for of in (None, 0))))
        return seconds

    def sent_bytes(self, bucket: Iterable[Parameter]) -> int:
        """Bytes of the sum of a bucket, compressed if the options say so."""
        return sum(item.summed_nbytes(self.options.data_updates) for item in bucket)

    def under(self, plan: Plan) -> Priced:
        """The plan's blocks with their costs under it."""
        assert plan.granularity is not None
        return self.recomputing(plan.granularity, plan.recompute or ())

    def state_bytes(self, item: Parameter) -> int:
        """Bytes of a parameter or buffer with its gradient and optimizer states, on the data rank
        with the largest shard."""
        return sum(self.kept_bytes(item))

    def kept_bytes(self, item: Parameter) -> tuple[int, int, int]:
        """Resident bytes of a parameter or buffer, of its gradient, and of its optimizer states
        and master, on a data rank: whole, or a shard where the level of ZeRO shards them."""
        return self._for_alike(item, self._kept_bytes)

    def _for_alike(self, item: Parameter, find: Callable[[Parameter], T]) -> T:
        """`find(item)`, cached for parameters of equal shape and dtype, as layers are many."""
        key = (find.__name__, item.shape, item.dtype, item.trainable, item.buffer, item.experts,
               item.looked_up, item.has_master)  # fmt: skip
        if key not in self._alike:
            self._alike[key] = find(item)
        value: T = self._alike[key]
        return value

    @cached_property
    def _alike(self) -> dict[Hashable, Any]:
        return {}

    def _kept_bytes(self, item: Parameter) -> tuple[int, int, int]:
        levels = zip((3, 2, 1), self.bytes_of(item), strict=True)
        whole, part = item.numel, self.part(item)
        value, gradient, states = ((part if self.zero >= k else whole) * n for k, n in levels)
        return value, item.gradient_nbytes if item.looked_up else gradient, states

    def bytes_of(self, item: Parameter) -> tuple[int, int, int]:
        """Bytes of an element of a parameter, of its gradient, and of its optimizer states."""
        value, wide = item.dtype.itemsize, item.wide_dtype.itemsize
        every = bytes_per_parameter(
            self.options.optimizer, item.dtype, trainable=item.trainable, masters=item.has_master
        )
        gradient, kept = wide * item.trainable, self._kept * wide * item.trainable
        return value, gradient, every - value - gradient + kept

    @cached_property
    def _kept(self) -> int:
        """The number of copies of each weight that `updates=` keeps, for local and asynchronous
        steps."""
        return self.options.data_updates.kept

    def part(self, item: Parameter) -> int:
        """Elements of the largest shard of a parameter; of a buffer, all. Optimizers of whole
        matrices give each rank whole parameters: there each parameter counts with the fullest
        rank's share of all elements."""
        if self.options.optimizer in WHOLE and not item.buffer:
            return math.ceil(item.numel * self._fullest)
        rows, ranks = item.shape[0] if item.shape else 1, self.sharers(item)
        return -(-rows // ranks) * (item.numel // max(1, rows))

    def sharers(self, item: Parameter) -> int:
        """Data ranks that hold the same parameter and can shard it: those with the same experts, or
        all of them; buffers stay whole."""
        same = self.mesh.replicas // self.mesh.expert
        return 1 if item.buffer else same if item.experts else self.mesh.replicas

    @cached_property
    def _fullest(self) -> float:
        """The fullest data rank's share of all elements, if ranks get whole parameters."""
        sizes = {item.name: item.numel for item in self.graph.parameters if not item.buffer}
        loads, homes = [0] * self.mesh.replicas, dealt(sizes, self.mesh.replicas)
        for name, home in homes.items():
            loads[home] += sizes[name]
        return max(loads) / max(1, sum(loads))

    def unit_bytes(self, block: Block) -> int:
        """Bytes of the parameters that are gathered for a block (ZeRO 3)."""
        return sum(self._unit_bytes(block, of) for of in (None, 0))

    def _unit_bytes(self, block: Block, expert: int | None) -> int:
        """`unit_bytes` of experts (0) or of all other parameters (None)."""
        return sum(x.nbytes for x in self._shared(block, expert)) if self.gathers else 0

    def _shared(self, block: Block, expert: int | None) -> Iterator[Parameter]:
        """The distinct sharded parameters that a block reads, of experts or of others."""
        for name in {binding.name: None for binding in block.tensors}:
            item = self.graph.by_name[name]
            if self.sharers(item) > 1 and bool(item.experts) == (expert is not None):
                yield item

    def constant_bytes(self, parts: Cut, blocks: Iterable[int]) -> dict[str, int]:
        """Bytes of the constants that these blocks read, by the node that allocates them. Views of
        buffers take nothing."""
        read = (node for b in blocks for node in parts.blocks[b].inputs if node in parts.constants)
        return {
            node.name: sum(one.numel() * one.itemsize for one in tensors_of(node.meta["val"]))
            for node in map(viewed, read)
            if node.op == "call_function"
        }

    def update_seconds(self, item: Parameter) -> float:
        """Seconds of the optimizer's step for a parameter, or for the largest shard of it: memory
        traffic, products of matrices and kernel launches."""
        return self._for_alike(item, self._update_seconds) if item.trainable else 0.0

    def _update_seconds(self, item: Parameter) -> float:
        optimizer, narrow = self.options.optimizer, item.has_master

        def on(device: Device) -> float:
            # Scripts use fused optimizers on a GPU, and where layers are compiled.
            fused = not device.is_cpu or self.options.costs == "compiled"
            each = moved_in_update(optimizer, item.dtype, masters=narrow, fused=fused)
            moved = self.part(item) if self.zero else item.numel
            if item.looked_up:
                moved = item.looked_up * (item.numel // item.shape[0])
            nbytes = each * moved
            bandwidth = device.memory_bandwidth * device.efficiency.traffic(nbytes)
            kernels = 2 * narrow + (1 if fused else each // (3 * item.dtype.itemsize))
            products = multiplied_in_update(optimizer, item.shape) / device.peak(torch.bfloat16)
            products *= self._fullest if products and self.zero else 1.0
            moving = nbytes / bandwidth + kernels * device.launch_overhead if each else 0.0
            return products + moving

        return max(map(on, set(self.mesh.devices)))

    @cached_property
    def bucket(self) -> int:
        """Bytes of a full bucket of gradients."""
        return bucket_size(self.graph, self.mesh.pipeline)

    @cached_property
    def bucket_bytes(self) -> int:
        """Upper bound on the staging memory of a rank's buckets, in bytes."""
        summed = [x for x in self._held if x.trainable and self.sharers(x) > 1]
        ranks = min(map(self.sharers, summed), default=1)
        size = min(self.bucket, sum(item.gradient_nbytes for item in summed))
        if self.options.compression is not None:  # a copy to send, and one to receive
            size = 2 * max([size, *(item.gradient_nbytes for item in summed)])
        if self.scatters:  # and this rank's part of the sum
            size = max(size, self.largest_gradient) * (ranks + 1) // ranks
        return max(size, self.largest_gradient if self.zero else 0)

    @cached_property
    def _held(self) -> list[Parameter]:
        """The parameters and buffers; of a vocabulary on all ranks the rows of one rank."""
        ranks = self.mesh.pipeline * self.mesh.tensor
        return [*parameters_held(self.graph, ranks).values()]

    @cached_property
    def largest_gradient(self) -> int:
        """Bytes of the largest gradient that is staged by itself: one whose rows do not divide
        evenly among the data ranks is copied into shards of equal length."""
        summed = (x for x in self._held if x.trainable and self.sharers(x) > 1)
        copied = (x for x in summed if self.scatters or (x.shape and x.shape[0] % self.sharers(x)))
        return max((item.gradient_nbytes for item in copied), default=0)

    def carried(self, node: fx.Node) -> float:
        """Seconds to move a value between pipeline neighbours, over their slowest link.

        At the nominal bandwidth: the measured curve of a "message" is for messages beside compute,
        while ranks wait for the messages that these decisions are about.
        """
        return self._slowest_link.seconds(nbytes_of(node))

    @cached_property
    def _slowest_link(self) -> Link:
        """The slowest link between pipeline neighbours."""
        return slowest(self.mesh)

    @property
    def held_batch_bytes(self) -> int:
        """Bytes of the inputs of all micro-batches."""
        return self.options.microbatches * self.batch_bytes

    @cached_property
    def batch_bytes(self) -> int:
        """Bytes of the inputs of one micro-batch."""
        named = set(self.graph.input_nodes)
        return sum(nbytes_of(n) for n in self.graph.fx_graph.nodes if n.name in named)

    def message_seconds(self, node: fx.Node) -> float:
        """Seconds to move a value between neighbours, and its gradient back if there is one."""
        once = self.carried(node)
        return 2 * once if node.name in self.graph.differentiable else once

    def _times(
        self, level: int, parts: Cut, costs: Mapping[str, BlockCost]
    ) -> list[dict[str, TemplateTime]]:
        """Seconds of each template: one entry, or one for each rank where devices differ."""
        if self.mesh.is_uniform:
            return [self._seconds(level, parts, costs)]
        return modelled_on(self.mesh, costs)

    def _seconds(
        self, level: int, parts: Cut, costs: Mapping[str, BlockCost]
    ) -> dict[str, TemplateTime]:
        """Seconds of each template on the one device, modelled or measured."""
        first = {block.template: block for block in reversed(parts.blocks)}
        seconds = {}
        for name, cost in costs.items():
            known = self.cache.times.get((level, name))
            if self.selective and (known is not None or self.bench is not None):
                known = self._longer(level, name, first[name], cost)
            elif known is None:
                known = modelled(name, cost, self.device)
                if self.bench is not None:
                    context = first[name], self.graph, self.device, self.bench
                    known = measured(known, cost, *context)
                    self.cache.times[level, name] = known
            seconds[name] = known
        return seconds

    def _longer(self, level: int, name: str, block: Block, cost: BlockCost) -> TemplateTime:
        """A measured template's time, plus the modelled time of the operators that selective
        recomputation repeats."""
        plain = self.selectively(False)
        priced = plain.priced(level)
        (before, *_) = (
            other
            for one, other in zip(priced.cut.blocks, priced.costs, strict=True)
            if one.template == name
        )
        more = seconds(cost.backward, self.device) - seconds(before.backward, self.device)
        known = plain.cache.times[level, name]
        return dataclasses.replace(known, backward=known.backward + more)

    def arguments(self, instances: Sequence[Block]) -> dict[fx.Node, str]:
        """Names for the inputs of a template's blocks, by the nodes that the first block reads."""
        inputs = tuple(block.inputs for block in instances)
        return self.graph.once(
            ("arguments", inputs), lambda: argument_names(self.graph, inputs, {})
        )

    def _trace(self, instances: Sequence[Block]) -> BlockCost:
        """The cost of a template, traced on its first block."""
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
        """The cost of nodes that read `arguments`. It depends on the kind of device only, so all
        meshes of accelerators share it."""
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
        """Uncached body of `_cost`: run the nodes on tensors without data."""
        return trace_block(
            nodes,
            tuple(arguments),
            outputs,
            self.graph.roles,
            split=split,
            overwritten=overwritten(nodes, arguments, outputs),
            accelerator=self.accelerator,
            again=again,
        )

    def _cheaper_sent(self, parts: Cut) -> tuple[fx.Node, ...]:
        """Prologue values that some device takes longer to recompute than to receive."""
        effects, devices = effects_of(self.graph), set(self.devices)
        used = {node for block in parts.blocks for node in block.inputs}
        cheaper = []
        for node in parts.prologue:
            if node in used - parts.constants:
                members = cone(node, effects)
                nodes = tuple(n for n in parts.prologue if n in members)
                outside = {o: None for n in nodes for o in n.all_input_nodes if o not in members}
                inputs = {o: o.name for o in outside if o.name in self.graph.input_nodes}
                cost = self._cost(nodes, inputs, (node,))
                if any(seconds(cost.forward, one) > self.carried(node) for one in devices):
                    cheaper.append(node)
        return tuple(cheaper)
