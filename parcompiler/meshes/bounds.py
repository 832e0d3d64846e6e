"""Lower bounds of a mesh that need no plan: bytes on its fullest rank, and seconds of its step.

Given       c[i]        seconds of block i on t devices at best, forward and backward of a
                        micro-batch: its arithmetic and traffic over t, all of its kernels
            p, t        ranks of the pipeline axis; of the tensor and context axes together
            m, v        micro-batches on each data rank, the most stages on a rank
            g, s        seconds to gather all parameters, to reduce-scatter all gradients
Bytes       states of all parameters / (p · tensor), or what a block keeps for its backward / t
Seconds     work        m times the sum of c / p, and the optimizer's step of the mean rank; with
                        even stages also the wait of the last rank for its first micro-batch:
                        (p - 1) of p v stages
            exchange    m (2 g + s) / (p · tensor), where memory leaves only ZeRO 3
            even        the bound of `passes.least`

Layers of the vocabulary may be spread over all ranks: only the matrix products of blocks with such
layers count for `work`. It is assumed that a piece of an operator takes no longer than the whole.
Blocks are costed at every granularity, because the plan chooses one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import fx

from parcompiler.capture.effects import name_of
from parcompiler.cost import BlockCost, Operation, collective, seconds
from parcompiler.mesh import Mesh
from parcompiler.meshes.space import Candidate
from parcompiler.passes.even import WAITING
from parcompiler.passes.schedule import CANDIDATES, MOST_STAGES
from parcompiler.problem import Problem
from parcompiler.schedules import stages_per_rank
from parcompiler.solver import ROUNDING
from parcompiler.vocabulary import find

VOCABULARY = ("embedding", "cross_entropy_loss")
FILLED = 0.9  # share of the memory that states and activations may take; messages take some too


class _Work(NamedTuple):
    """Seconds of a micro-batch: of all blocks without vocabulary layers, of the blocks with such
    layers, and of the forwards of the former."""

    blocks: float
    vocabulary: float
    forward: float


@dataclass(frozen=True)
class Bounds:
    """The bounds that need no sharding; the mesh of `problem` is a single device."""

    problem: Problem
    _works: dict[int, _Work] = field(default_factory=dict, repr=False, compare=False)
    _updates: dict[int, float] = field(default_factory=dict, repr=False, compare=False)

    def states_on(self, mesh: Mesh) -> int:
        """Lower bound on the bytes of all parameters and buffers, with gradients and optimizer
        states, on the ranks of one data coordinate together."""
        return self._states_at(mesh, dataclasses.replace(self.problem, mesh=mesh).zero)

    def _states_at(self, mesh: Mesh, level: int) -> int:
        """`states_on` at a level of ZeRO."""
        size = 0
        for of_experts, parts in self._states.items():
            ranks = mesh.replicas // (mesh.expert if of_experts else 1)  # that share the states
            levels = zip((3, 2, 1), parts, strict=True)
            size += sum(math.ceil(n / (ranks if level >= k else 1)) for k, n in levels)
        return size

    @cached_property
    def _states(self) -> dict[bool, tuple[int, int, int]]:
        """Bytes of parameters, of gradients and of optimizer states, for experts in pieces (True)
        and for all else (False)."""
        whole, nbytes = self.problem.at_zero(0), {}
        for of_experts in (False, True):
            items = [x for x in whole.graph.parameters if bool(x.experts) == of_experts]
            pairs = [(item.numel, whole.bytes_of(item)) for item in items]
            value, gradient, states = (sum(numel * n[k] for numel, n in pairs) for k in range(3))
            nbytes[of_experts] = value, gradient, states
        return nbytes

    @cached_property
    def blocks(self) -> list[int]:
        """The number of blocks of the model at each granularity."""
        return [len(self.problem.priced(level).cut.blocks) for level in self.problem.levels]

    def nbytes(self, candidate: Candidate) -> int:
        """Lower bound on the bytes of the fullest rank."""
        return max(self.states_of(candidate), math.ceil(self.activations / _pieces(candidate)))

    def states_of(self, candidate: Candidate) -> int:
        """Lower bound on the bytes of parameters, gradients and states of the fullest rank."""
        mesh = candidate.mesh
        return math.ceil(self.states_on(mesh) / (mesh.pipeline * mesh.tensor))

    def is_tight(self, candidate: Candidate) -> bool:
        """Whether the first of several pipeline ranks lacks memory for 1F1B with optimizer states
        shared out (ZeRO 1) and cheap operators recomputed. As it keeps a micro-batch for each rank,
        it has as many activations as all blocks for one."""
        mesh, resized = candidate.mesh, dataclasses.replace(self.problem, mesh=candidate.mesh)
        if mesh.pipeline == 1:
            return False
        states = self._states_at(mesh, min(1, resized.zero)) / (mesh.pipeline * mesh.tensor)
        filled = min(1.0, candidate.microbatches / mesh.pipeline)
        kept = states + filled * self._saved / _pieces(candidate)
        return kept > FILLED * resized.room(resized.device)

    @cached_property
    def _saved(self) -> int:
        """Bytes of a micro-batch that all blocks keep for their backward, on one device."""
        auto = self.problem.options.recompute in ("auto", "selective")
        problem = self.problem.selectively(auto)
        return sum(problem.priced(problem.levels[0]).saved)

    @cached_property
    def activations(self) -> int:
        """Bytes that the largest block keeps inside for its backward, on one device; a recomputed
        block has them too when its backward begins."""
        auto = self.problem.options.recompute in ("auto", "selective")
        problem = self.problem.selectively(auto)
        return min(
            max((cost.saved - cost.saved_outputs for cost in costs), default=0)
            for costs in (self._costs(problem, k, vocabulary=False) for k in problem.levels)
        )

    def seconds(self, candidate: Candidate, *, is_even: bool = False) -> float:
        """Lower bound on the seconds of a step; where stages are even, ranks also wait for their
        first micro-batch. 0 where times are measured."""
        if self.problem.bench is not None:
            return 0.0
        bound = max(self._busy(candidate, is_even=is_even), self._exchanging(candidate))
        return bound * (1 - ROUNDING)

    def _exchanging(self, candidate: Candidate) -> float:
        """Seconds in which a mean rank gathers parameters for both passes and scatters gradients,
        where memory leaves only ZeRO 3; else 0. It does one of them at a time, beside compute."""
        mesh = candidate.mesh
        ranks, resized = mesh.pipeline * mesh.tensor, dataclasses.replace(self.problem, mesh=mesh)
        if resized.zero < 3 or self._states_at(mesh, 2) <= ranks * resized.room(
            self.problem.device
        ):
            return 0.0
        gathered, scattered = self._exchanged
        replicas = mesh.grid.replicas([0])
        gather = collective.joined(mesh, "all-gather", gathered, replicas)
        scatter = collective.joined(mesh, "reduce-scatter", scattered, replicas)
        return candidate.microbatches * (2 * gather + scatter) / ranks

    @cached_property
    def _exchanged(self) -> tuple[int, int]:
        """Bytes of the parameters of all blocks without vocabulary layers, and of their gradients;
        without experts, which fewer ranks share. At the granularity with the fewest."""
        graph, sizes = self.problem.graph, []
        for level in self.problem.levels:
            blocks = self.problem.priced(level).cut.blocks
            inner = (block for block in blocks if self._spreadable.isdisjoint(block.nodes))
            names = {tensor.name for block in inner for tensor in block.tensors}
            items = [graph.by_name[name] for name in names]
            items = [item for item in items if not (item.buffer or item.experts)]
            sent = self.problem.sent_bytes(item for item in items if item.trainable)
            sizes.append((sum(item.nbytes for item in items), sent))
        return min(sizes)

    def _busy(self, candidate: Candidate, *, is_even: bool) -> float:
        """Seconds of a rank if all have equal work. The last may do its part of the vocabulary
        while it waits for its first micro-batch."""
        mesh, pieces, m = candidate.mesh, _pieces(candidate), candidate.microbatches
        if pieces not in self._works:
            every = (self._work(level, pieces) for level in self.problem.levels)
            self._works[pieces] = _Work(*map(min, zip(*every, strict=True)))
        if mesh.replicas not in self._updates and not self.problem.options.asynchronous:
            update = dataclasses.replace(self.problem, mesh=mesh).update_seconds
            self._updates[mesh.replicas] = sum(map(update, self.problem.graph.parameters))
        work = self._works[pieces]
        wait = (mesh.pipeline - 1) * self._least_wait(work) if is_even else 0.0
        behind = self._updates.get(mesh.replicas, 0.0) / mesh.tensor
        return (m * work.blocks + max(wait, m * work.vocabulary) + behind) / mesh.pipeline

    def _least_wait(self, work: _Work) -> float:
        """The least seconds by which a rank waits longer than the one before it for its first
        micro-batch: those of a stage's forward, or where ranks also wait for gradients, of both its
        passes."""
        options = self.problem.options
        if isinstance(options.stages, tuple):
            return work.forward / len(options.stages)
        wanted = options.virtual_stages
        most = {name: stages_per_rank(name, wanted) for name in CANDIDATES}
        most["interleaved"] = wanted if wanted > 1 else MOST_STAGES
        seconds = ((work.blocks if name in WAITING else work.forward) / most[name] for name in most)
        return min(seconds)

    def _work(self, level: int, pieces: int) -> _Work:
        """Seconds at a granularity if `pieces` devices divide all work evenly; of blocks with
        vocabulary layers only the matrix products count."""
        device, forward, both, vocabulary = self.problem.device, 0.0, 0.0, 0.0
        for cost in self._costs(self.problem, level, vocabulary=False):
            forward += seconds(_divided(cost.forward, pieces), device)
            both += seconds(_divided((*cost.forward, *cost.backward), pieces), device)
        for cost in self._costs(self.problem, level, vocabulary=True):
            products = [o for o in (*cost.forward, *cost.backward) if o.kind == "matmul"]
            kernels = device.launch_overhead * len(products)
            vocabulary += max(0.0, seconds(_divided(products, pieces), device) - kernels)
        return _Work(both, vocabulary, forward)

    def _costs(self, problem: Problem, level: int, *, vocabulary: bool) -> Iterator[BlockCost]:
        """The costs of the blocks with layers of the vocabulary, or of all others."""
        priced = problem.priced(level)
        for block, cost in zip(priced.cut.blocks, priced.costs, strict=True):
            if self._spreadable.isdisjoint(block.nodes) != vocabulary:
                yield cost

    @cached_property
    def _spreadable(self) -> frozenset[fx.Node]:
        """The nodes that all ranks may compute together: lookups, the head, and all after it."""
        graph = self.problem.graph
        nodes, head = graph.fx_graph.nodes, find(graph, 1).head
        behind = {head.chain.product.node} if head else set()
        for node in nodes:
            if not behind.isdisjoint(node.all_input_nodes):
                behind.add(node)
        return frozenset(behind | {node for node in nodes if name_of(node) in VOCABULARY})


def _pieces(candidate: Candidate) -> int:
    """The number of ranks that have pieces of a block's activations."""
    return candidate.mesh.tensor * candidate.mesh.context


def _divided(operations: Iterable[Operation], parts: int) -> Iterator[Operation]:
    """One device's part of operations that `parts` devices divide evenly."""
    for one in operations:
        yield dataclasses.replace(one, flops=one.flops / parts, nbytes=one.nbytes / parts)
