"""The meshes of a cluster that are weighed, each with its share of the micro-batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from parcompiler.mesh import AXES, Cluster, Mesh, divisors

EACH = 4  # default micro-batches per device: enough for a pipeline of all devices


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mesh, the micro-batches of each data rank, and its place in the list: plainer meshes come
    first, and for each mesh the given micro-batch. `rows` are those of a micro-batch, if any.

    `reason` says why the candidate is impossible, if that is known before planning.
    """

    mesh: Mesh
    microbatches: int
    place: int
    reason: str | None = None
    rows: int | None = None


def global_microbatches(cluster: Cluster, wanted: int | None) -> int:
    """The micro-batches of a step on all devices together: those asked for, or EACH a device."""
    return EACH * cluster.size if wanted is None else wanted


def space(
    cluster: Cluster,
    microbatches: Mapping[int | None, int],
    blocks: int,
    positions: int = 1,
    experts: int = 1,
) -> Iterator[Candidate]:
    """All degrees; the data ranks share the micro-batches equally, so the batch is always the same.

    `microbatches` are those of a step, by the rows of one; `blocks` is the number of blocks at the
    finest granularity; degrees of context and expert ranks divide `positions` and `experts`.

    >>> candidates = list(space(Cluster(devices_per_node=4), {1: 6}, blocks=3))
    >>> [(c.mesh.data, c.microbatches) for c in candidates if c.reason is None]
    [(2, 3), (2, 3), (1, 6), (1, 6)]
    >>> candidates[0].reason
    '4 data ranks need a number of micro-batches that 4 divides (6 given)'
    >>> candidates[2].reason
    '4 stages need at least 4 blocks (3 found)'
    >>> candidates = space(Cluster(devices_per_node=4), {1: 4}, blocks=3, experts=6)
    >>> [(c.mesh.tensor, c.mesh.data, c.mesh.expert) for c in candidates if c.mesh.data > 1]
    [(1, 4, 1), (1, 4, 2), (1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2)]
    """
    pairs = itertools.product(_meshes(cluster, positions, experts), microbatches.items())
    for place, (mesh, (rows, count)) in enumerate(pairs):
        each, rest = divmod(count, mesh.data)
        reason = None
        if rest:
            reason = (
                f"{mesh.data} data ranks need a number of micro-batches that {mesh.data} divides "
                f"({count} given)"
            )
        elif mesh.pipeline > blocks:
            reason = f"{mesh.pipeline} stages need at least {mesh.pipeline} blocks ({blocks} found)"
        yield Candidate(mesh, each, place, reason, rows)


def _meshes(cluster: Cluster, positions: int, experts: int) -> Iterator[Mesh]:
    """All meshes of a cluster, each with all degrees of context and expert ranks; then those whose
    tensor ranks are on several nodes."""
    for mesh in cluster.meshes():
        for context in divisors(gcd(positions, mesh.data)):
            data = mesh.data // context
            for expert in divisors(gcd(experts, mesh.data)):
                yield dataclasses.replace(mesh, data=data, context=context, expert=expert)
    for nodes in divisors(cluster.nodes)[1:]:
        tensor = nodes * cluster.devices_per_node
        for pipeline in divisors(cluster.size // tensor):
            data = cluster.size // tensor // pipeline
            yield Mesh(pipeline=pipeline, tensor=tensor, data=data, device=cluster.device)


def are_neighbours(one: Mesh, other: Mesh) -> bool:
    """Whether two meshes of a cluster differ by one prime factor that moves between two axes, apart
    from their expert ranks.

    >>> are_neighbours(Mesh(tensor=4, data=6), Mesh(tensor=4, data=2, context=3))
    True
    >>> are_neighbours(Mesh(tensor=4, data=6), Mesh(tensor=2, data=3, context=4))
    False
    """
    pairs = [(getattr(one, axis), getattr(other, axis)) for axis in AXES if axis != "expert"]
    moved = [max(pair) / min(pair) for pair in pairs if pair[0] != pair[1]]
    return not moved or (len(moved) == 2 and all(map(_is_prime, moved)))


@lru_cache(maxsize=1024)  # a search asks millions of times
def _is_prime(factor: float) -> bool:
    return factor.is_integer() and len(divisors(int(factor))) == 2
