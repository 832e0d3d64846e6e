"""The meshes of a cluster that are weighed, each with its share of the micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parcompiler.mesh import Cluster, Mesh

EACH = 4  # micro-batches for each device, unless the user says: as many as a pipeline of all needs
DEEP, FEW = 16, 4  # a pipeline of more ranks is weighed first where each can have so many layers


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mesh, the micro-batches of each data rank, and its place: the plainest mesh is first, and
    for each the micro-batch that is given. `rows` are those of a micro-batch, if it has any.

    `reason` says why it cannot be, before anything about it is planned. A `deep` one has few layers
    on each of many ranks.
    """

    mesh: Mesh
    microbatches: int
    place: int
    reason: str | None = None
    deep: bool = False
    rows: int | None = None


def global_microbatches(cluster: Cluster, wanted: int | None) -> int:
    """The micro-batches of a step on all devices together: those asked for, or EACH a device."""
    return EACH * cluster.size if wanted is None else wanted


def space(
    cluster: Cluster, microbatches: Mapping[int | None, int], layers: int, blocks: int
) -> Iterator[Candidate]:
    """All degrees; the data ranks share the micro-batches equally, so the batch is always the same.

    `microbatches` are those of a step, by the rows of one.

    `layers` and `blocks` are the parts of the model at the coarsest and the finest granularity.
    Deep pipelines take longest to plan and leave little to balance: they are marked.

    >>> candidates = list(space(Cluster(devices_per_node=4), {1: 6}, layers=3, blocks=3))
    >>> [(c.mesh.data, c.microbatches) for c in candidates if c.reason is None]
    [(2, 3), (2, 3), (1, 6), (1, 6)]
    >>> candidates[0].reason
    '4 data ranks need a multiple of so many micro-batches (6)'
    >>> candidates[2].reason
    '4 stages need as many blocks (3)'
    """
    pairs = itertools.product(cluster.meshes(), microbatches.items())
    for place, (mesh, (rows, count)) in enumerate(pairs):
        each, rest = divmod(count, mesh.data)
        reason = None
        if rest:
            reason = f"{mesh.data} data ranks need a multiple of so many micro-batches ({count})"
        elif mesh.pipeline > blocks:
            reason = f"{mesh.pipeline} stages need as many blocks ({blocks})"
        deep = mesh.pipeline > max(DEEP, layers // FEW)
        yield Candidate(mesh, each, place, reason, deep, rows)
