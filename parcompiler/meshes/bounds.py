"""What no plan of a mesh can be below: bytes on its fullest rank, and seconds of its step.

Given       c[i]        seconds of block i on t devices at best, forward and backward of a
                        micro-batch: its arithmetic and traffic over t, as many kernels
            p, t        ranks of the pipeline axis; of the tensor and context axes together
            m, v        micro-batches on each data rank, the most stages on a rank
Bytes       states of all parameters / (p · tensor), and what a block keeps for its backward / t
Seconds     work        m times the sum of c / p, and the optimizer's step of the mean rank; of even
                        stages also what the last rank waits for its first micro-batch, (p - 1) of
                        p v stages
            even        what is known of the passes: `passes.least`

Layers of the vocabulary may be spread over all ranks: of blocks that contain them only the matrix
products count for `work`. That a piece of an operator takes no longer than the whole is taken for
granted; blocks are costed at every granularity, because the plan chooses one.
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
from parcompiler.cost import BlockCost, Operation, seconds
from parcompiler.mesh import Mesh
from parcompiler.meshes.space import Candidate
from parcompiler.passes.least import ROUNDING
from parcompiler.passes.schedule import CANDIDATES
from parcompiler.problem import Problem
from parcompiler.schedules import stages_per_rank
from parcompiler.vocabulary import find

VOCABULARY = ("embedding", "cross_entropy_loss")


class _Work(NamedTuple):
    """Seconds of a micro-batch: of all blocks but those of the vocabulary, of these, and of the
    forwards of the first."""

    blocks: float
    vocabulary: float
    forward: float


@dataclass(frozen=True)
class Bounds:
    """The bounds that need no sharding, for a problem whose own mesh has the device alone."""

    problem: Problem
    _works: dict[int, _Work] = field(default_factory=dict, repr=False, compare=False)
    _updates: dict[int, float] = field(default_factory=dict, repr=False, compare=False)

    def states_on(self, mesh: Mesh) -> int:
        """Bytes of all parameters and buffers in the optimizer's step, gradients and states too, on
        the ranks of one data coordinate at least."""
        return self._states_at(mesh, dataclasses.replace(self.problem, mesh=mesh).zero)

    def _states_at(self, mesh: Mesh, level: int) -> int:
        """`states_on` at a level of ZeRO."""
        size = 0
        for of_experts, parts in self._states.items():
            ranks = mesh.replicas // (mesh.expert if of_experts else 1)  # that share them out
            levels = zip((3, 2, 1), parts, strict=True)
            size += sum(math.ceil(n / (ranks if level >= k else 1)) for k, n in levels)
        return size

    @cached_property
    def _states(self) -> dict[bool, tuple[int, int, int]]:
        """Bytes of parameters, of gradients and of optimizer states; of what all data ranks have,
        and of experts in pieces."""
        whole, found = self.problem.at_zero(0), {}
        for of_experts in (False, True):
            items = [x for x in whole.graph.parameters if bool(x.experts) == of_experts]
            pairs = [(item.numel, whole.bytes_of(item)) for item in items]
            value, gradient, states = (sum(numel * n[k] for numel, n in pairs) for k in range(3))
            found[of_experts] = value, gradient, states
        return found

    @cached_property
    def blocks(self) -> list[int]:
        """How many blocks the model is cut into at every granularity."""
        return [len(self.problem.priced(level).cut.blocks) for level in self.problem.levels]

    def nbytes(self, candidate: Candidate) -> int:
        """Bytes that the fullest rank holds at least."""
        return max(self.states_of(candidate), math.ceil(self.activations / _pieces(candidate)))

    def states_of(self, candidate: Candidate) -> int:
        """Bytes of parameters, gradients and optimizer states on the fullest rank at least."""
        mesh = candidate.mesh
        return math.ceil(self.states_on(mesh) / (mesh.pipeline * mesh.tensor))

    @cached_property
    def activations(self) -> int:
        """Bytes that the largest block keeps inside for its backward, on one device: a recomputed
        one has them too, when that begins."""
        auto = self.problem.options.recompute in ("auto", "selective")
        problem = self.problem.selectively(auto)
        return min(
            max((cost.saved - cost.saved_outputs for cost in costs), default=0)
            for costs in (self._costs(problem, k, vocabulary=False) for k in problem.levels)
        )

    def seconds(self, candidate: Candidate, *, is_even: bool = False) -> float:
        """Seconds of a step whose ranks wait at most for their first micro-batch, where stages are
        even. 0 where times are measured."""
        if self.problem.bench is not None:
            return 0.0
        return self._busy(candidate, is_even=is_even) * ROUNDING

    def _busy(self, candidate: Candidate, *, is_even: bool) -> float:
        """Seconds of a rank if all have as much work; the last may do its part for the vocabulary
        until its first micro-batch is there."""
        mesh, pieces, m = candidate.mesh, _pieces(candidate), candidate.microbatches
        if pieces not in self._works:
            every = (self._work(level, pieces) for level in self.problem.levels)
            self._works[pieces] = _Work(*map(min, zip(*every, strict=True)))
        if mesh.replicas not in self._updates and not self.problem.options.asynchronous:
            update = dataclasses.replace(self.problem, mesh=mesh).update_seconds
            self._updates[mesh.replicas] = sum(map(update, self.problem.graph.parameters))
        work = self._works[pieces]
        wait = (mesh.pipeline - 1) * work.forward / self._most_stages if is_even else 0.0
        behind = self._updates.get(mesh.replicas, 0.0) / mesh.tensor
        return (m * work.blocks + max(wait, m * work.vocabulary) + behind) / mesh.pipeline

    @cached_property
    def _most_stages(self) -> int:
        """Stages on a rank under any schedule in question."""
        options = self.problem.options
        if isinstance(options.stages, tuple):
            return len(options.stages)
        return max(stages_per_rank(name, options.virtual_stages) for name in CANDIDATES)

    def _work(self, level: int, pieces: int) -> _Work:
        """Seconds at a granularity of what so many devices divide evenly; of the layers of the
        vocabulary only the matrix products count."""
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
        """The nodes that all ranks may compute together: lookups, and all behind the head."""
        graph = self.problem.graph
        nodes, head = graph.fx_graph.nodes, find(graph, 1).head
        behind = {head.chain.product.node} if head else set()
        for node in nodes:
            if not behind.isdisjoint(node.all_input_nodes):
                behind.add(node)
        return frozenset(behind | {node for node in nodes if name_of(node) in VOCABULARY})


def _pieces(candidate: Candidate) -> int:
    """How many ranks have pieces of a block's activations."""
    return candidate.mesh.tensor * candidate.mesh.context


def _divided(operations: Iterable[Operation], parts: int) -> Iterator[Operation]:
    """Operations of which each of `parts` devices does as much."""
    for one in operations:
        yield dataclasses.replace(one, flops=one.flops / parts, nbytes=one.nbytes / parts)
