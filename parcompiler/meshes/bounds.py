"""What no plan of a mesh can be below: bytes on its fullest rank, and seconds of its step.

Given       c[i]        seconds of block i on one device, forward and backward of a micro-batch
            p, t, d     ranks of the pipeline, tensor and data axes
            m           micro-batches on each data rank
Bytes       states of all parameters / (p t), and what a block keeps for its backward / t
Seconds     work        m times what the slowest of p ranks has of the blocks, each on t devices at
                        best (its arithmetic and traffic over t, as many kernels)
            sums        the gradients of a rank, twice (d - 1) / d of them over the fastest link

Layers of the vocabulary may be spread over all ranks: of blocks that contain them only the matrix
products count, on whichever rank. That a piece of an operator takes no longer than the whole is
taken for granted; blocks are costed at every granularity, because the plan chooses one. `sharper`
has a bound that takes longer.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from parcompiler.cost import BlockCost, Operation, seconds
from parcompiler.device import Device
from parcompiler.meshes.fill import Piece
from parcompiler.meshes.space import Candidate
from parcompiler.problem import Problem
from parcompiler.vocabulary import find
from parcompiler.vocabulary.reading import name_of

VOCABULARY = ("embedding", "cross_entropy_loss")
ROUNDING = 1 - 1e-9  # sums of the same numbers in another order


@dataclass(frozen=True, slots=True)
class Work:
    """The blocks of a granularity on the tensor ranks, and seconds that may be on any rank."""

    pieces: tuple[Piece, ...]
    floating: float

    def slowest(self, ranks: int) -> float:
        """Seconds of a micro-batch that the slowest of some ranks has at least.

        Blocks are whole: of 9 blocks of a second, one of 4 ranks has 3.

        >>> Work((Piece(9, 1.0, 0.0, 0.0),), 0.0).slowest(4)
        3.0
        """
        sizes = {piece.seconds for piece in self.pieces if piece.seconds > 0}
        counts = ((s, sum(p.count * int(p.seconds // s) for p in self.pieces)) for s in sizes)
        whole = max((size * math.ceil(count / ranks) for size, count in counts), default=0.0)
        total = sum(piece.count * piece.seconds for piece in self.pieces) + self.floating
        return max(whole, total / ranks)


@dataclass(frozen=True)
class Bounds:
    """The bounds of the meshes of a problem, whose own mesh has the device alone."""

    problem: Problem
    _works: dict[int, tuple[Work, ...]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def states(self) -> int:
        """Bytes of all parameters and buffers in the optimizer's step, gradients and states too."""
        problem = self.problem
        return sum(
            problem.state_bytes(x) + problem.update_bytes(x) for x in problem.graph.parameters
        )

    @cached_property
    def blocks(self) -> list[int]:
        """How many blocks the model is cut into at every granularity."""
        return [len(self.problem.priced(level).cut.blocks) for level in self.problem.levels]

    def nbytes(self, candidate: Candidate) -> int:
        """Bytes that the fullest rank holds at least."""
        return max(self.states_of(candidate), math.ceil(self.moment / candidate.mesh.tensor))

    def states_of(self, candidate: Candidate) -> int:
        """Bytes of parameters, gradients and optimizer states on the fullest rank at least."""
        return math.ceil(self.states / (candidate.mesh.pipeline * candidate.mesh.tensor))

    @cached_property
    def moment(self) -> int:
        """Bytes of activations alive at once, on one device, of whichever block needs most."""
        return min(max(self._kept(level), default=0) for level in self.problem.levels)

    def _kept(self, level: int) -> Iterator[int]:
        """Bytes that each block keeps inside for its backward: a recomputed one has them too, when
        that begins."""
        priced = self.problem.priced(level)
        for block, cost in zip(priced.cut.blocks, priced.costs, strict=True):
            if self._shared.isdisjoint(block.nodes):
                yield cost.saved - cost.saved_outputs

    def seconds(self, candidate: Candidate) -> float:
        """Seconds of a step at least: work and sums. 0 where times are measured."""
        if self.problem.bench is not None:
            return 0.0
        mesh = candidate.mesh
        works = self.works(mesh.tensor)
        least = min(work.slowest(mesh.pipeline) for work in works) * candidate.microbatches
        return max(least, self._sums(candidate)) * ROUNDING

    def _sums(self, candidate: Candidate) -> float:
        """Seconds of the gradients' sums on a rank."""
        mesh, device = candidate.mesh, self.problem.device
        if mesh.data == 1 or device.efficiency.curves:  # a curve may beat the nominal bandwidth
            return 0.0
        own = sum(item.nbytes for item in self.problem.graph.parameters if item.trainable)
        sent = 2 * (mesh.data - 1) / mesh.data * own / (mesh.pipeline * mesh.tensor)
        return sent / max(device.link.bandwidth, device.network.bandwidth)

    def works(self, tensor: int) -> tuple[Work, ...]:
        """The work at every granularity, on so many devices at best."""
        if tensor not in self._works:
            self._works[tensor] = tuple(self._work(level, tensor) for level in self.problem.levels)
        return self._works[tensor]

    def _work(self, level: int, tensor: int) -> Work:
        """The blocks at a granularity, those of a template together."""
        priced, device = self.problem.priced(level), self.problem.device
        counts: Counter[str] = Counter()
        costs: dict[str, BlockCost] = {}
        floating = 0.0
        for block, cost in zip(priced.cut.blocks, priced.costs, strict=True):
            if self._shared.isdisjoint(block.nodes):
                counts[block.template] += 1
                costs[block.template] = cost
            else:
                products = (o for o in (*cost.forward, *cost.backward) if o.kind == "matmul")
                floating += _at_best(products, tensor, device, kernels=False)
        pieces = (_piece(counts[name], costs[name], tensor, device) for name in costs)
        return Work(tuple(pieces), floating)

    @cached_property
    def _shared(self) -> frozenset[fx.Node]:
        """The nodes that may be computed in another way: lookups, and all behind the head."""
        graph = self.problem.graph
        nodes, head = graph.fx_graph.nodes, find(graph, 1).head
        behind = {head.product} if head else set()
        for node in nodes:
            if not behind.isdisjoint(node.all_input_nodes):
                behind.add(node)
        return frozenset(behind | {node for node in nodes if name_of(node) in VOCABULARY})


def _piece(count: int, cost: BlockCost, tensor: int, device: Device) -> Piece:
    """Blocks of a template on tensor ranks at best."""
    forward = _at_best(cost.forward, tensor, device)
    backward = _at_best(cost.backward, tensor, device)
    weight = min(backward, _at_best(cost.weight, tensor, device))
    return Piece(count, forward, backward - weight, weight)


def _at_best(
    operations: Iterable[Operation], tensor: int, device: Device, *, kernels: bool = True
) -> float:
    """Seconds of operations that `tensor` devices divide evenly."""
    pieces = [
        dataclasses.replace(one, flops=one.flops / tensor, nbytes=one.nbytes / tensor)
        for one in operations
    ]
    overhead = 0.0 if kernels else device.launch_overhead * len(pieces)
    return max(0.0, seconds(pieces, device) - overhead)
