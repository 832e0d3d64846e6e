"""What to say when a model fits no mesh: the least memory, and what would make it fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parcompiler import device as catalogue
from parcompiler.errors import InfeasibleError, ParcompilerError
from parcompiler.mesh import Cluster
from parcompiler.meshes.bounds import Bounds
from parcompiler.meshes.sizes import Sizes
from parcompiler.meshes.space import Candidate
from parcompiler.meshes.weigh import given, planned
from parcompiler.passes import Pass
from parcompiler.problem import Problem

ENDLESS = 2**60  # bytes: more than any model takes
TRIED = 3  # meshes, those with the least states on a rank


@dataclass(frozen=True, slots=True)
class Least:
    """The least bytes of a device that were found to do, and on which mesh."""

    nbytes: int
    candidate: Candidate
    states: int


def nothing_fits(
    cluster: Cluster, sizes: Sizes, candidates: Sequence[Candidate], passes: Sequence[Pass]
) -> InfeasibleError:
    """The error for a model of which no mesh has room."""
    least = _least(sizes, candidates, passes)
    device = cluster.hardware
    has = f"{cluster.size} x {device.name} of {device.memory:,} bytes"
    if least is None:
        message = f"the model fits no mesh of the cluster ({has}), nor with any more memory"
        return InfeasibleError(message)
    mesh = least.candidate.mesh
    degrees = f"pipeline={mesh.pipeline}, tensor={mesh.tensor}, data={mesh.data}"
    cures = ", or ".join(_cures(cluster, sizes, least))
    error = InfeasibleError(
        f"the model fits no mesh of the cluster ({has}; the least found to do is "
        f"{least.nbytes:,} bytes a device, with {degrees}): {cures}"
    )
    error.add_note(f"parameters, gradients and optimizer states are {least.states:,} bytes of that")
    return error


def _least(sizes: Sizes, candidates: Sequence[Candidate], passes: Sequence[Pass]) -> Least | None:
    """What the meshes with the least states on a rank need, if memory were no matter."""
    bounds = Bounds(sizes.problem)
    hardware = dataclasses.replace(sizes.problem.device, memory=ENDLESS)
    found = []
    leanest = sorted(candidates, key=lambda c: (bounds.states_of(c), c.rows or 0, c.place))
    for candidate in leanest[:TRIED]:
        roomy = dataclasses.replace(
            candidate, mesh=dataclasses.replace(candidate.mesh, device=hardware)
        )
        try:
            _, choice = planned(_leanest(given(sizes.at(candidate.rows), roomy)), passes)
        except ParcompilerError:
            continue
        assert choice.memory is not None, "it was planned"
        found.append(Least(choice.memory, candidate, bounds.states_of(candidate)))
    return min(found, key=lambda least: least.nbytes, default=None)


def _leanest(problem: Problem) -> Problem:
    """The problem with everything recomputed, where that may be decided."""
    if problem.options.recompute != "auto":
        return problem
    options = dataclasses.replace(problem.options, recompute="full")
    return dataclasses.replace(problem, options=options)


def _cures(cluster: Cluster, sizes: Sizes, least: Least) -> Iterator[str]:
    """What would make it fit."""
    device, problem = cluster.hardware, sizes.problem
    if least.states > device.memory:
        times = math.ceil(least.states / device.memory)
        yield f"take at least {times * cluster.nodes} nodes"
    else:
        yield "take more nodes"
    if problem.options.recompute not in ("auto", "full"):
        yield 'recompute activations (recompute="auto")'
    if least.nbytes - least.states > least.states // 2:
        if least.candidate.rows == sizes.given:
            yield "make the micro-batch smaller"
    larger = [name for name in catalogue.names() if catalogue.device(name).memory >= least.nbytes]
    larger = [name for name in larger if name != "cpu" and name != device.name]
    yield f"take a larger device ({', '.join(larger)})" if larger else "take a larger device"
