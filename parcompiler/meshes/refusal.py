"""What to say when a model fits no mesh: the least memory, and what would make it fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from parcompiler import device as catalogue
from parcompiler.errors import InfeasibleError, ParcompilerError
from parcompiler.mesh import Cluster, Mesh
from parcompiler.meshes.bounds import Bounds
from parcompiler.meshes.sizes import Sizes
from parcompiler.meshes.space import Candidate
from parcompiler.meshes.weigh import given, planned
from parcompiler.passes import Pass
from parcompiler.passes.decide import Observer, decide
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
        f"{least.nbytes:,} bytes a device, {least.nbytes - device.memory:,} more than it has, with "
        f"{degrees}): {cures}"
    )
    error.add_note(f"parameters, gradients and optimizer states are {least.states:,} bytes of that")
    return error


def refuse_too_large(problem: Problem, passes: Sequence[Pass], observer: Observer) -> None:
    """Raise InfeasibleError where the states of the model alone are more than all ranks have.

    The plainest plan says soonest which rank lacks how much: the others need not be weighed.
    """
    mesh = problem.mesh
    if Bounds(problem).states <= mesh.tensor * sum(device.memory for device in mesh.devices):
        return
    lean = plainest(problem)
    try:
        decide(lean, passes, observer)
    except InfeasibleError as error:
        if lean.options.recompute == "full":
            error.add_note("that is with every block recomputed")
        raise


def enough_ranks(problem: Problem, passes: Sequence[Pass]) -> Iterator[str]:
    """What to say of the fewest ranks that would do where a mesh has too little memory.

    Fewer than a bound cannot hold the states; which pipeline of more ranks fits is tried, with
    everything recomputed. Nothing where memory is not the reason, or ranks have several devices.
    """
    mesh, options = problem.mesh, problem.options
    if not mesh.is_uniform or not isinstance(options.schedule, str):
        return
    hardware = mesh.hardware
    roomy = dataclasses.replace(mesh, device=dataclasses.replace(hardware, memory=ENDLESS))
    if not _does(problem, roomy, passes):
        return
    bounds = Bounds(problem)
    least = math.ceil(bounds.states / (mesh.tensor * hardware.memory))
    held = f"parameters, gradients and optimizer states are {bounds.states:,} bytes in all"
    replicas, given = mesh.tensor * mesh.data, f"tensor={mesh.tensor}, data={mesh.data}"
    fewer = f"fewer than {least * replicas} ranks (pipeline={least}, {given})"
    yield f"{held}: {fewer} cannot hold them"
    low, most = max(least, mesh.pipeline + 1), max(bounds.blocks)
    enough = _smallest(low, most, lambda p: _does(problem, _longer(mesh, p), passes))
    if enough is None:
        yield f"no pipeline of up to {most} ranks was found to fit with {given}: raise tensor"
    else:
        ranks = f"{enough * replicas} ranks (pipeline={enough}, {given})"
        yield f"{ranks} were tried and fit, with what may be recomputed: the fewest found to do"


def _longer(mesh: Mesh, pipeline: int) -> Mesh:
    """The mesh with another number of pipeline ranks."""
    return dataclasses.replace(mesh, pipeline=pipeline)


def _does(problem: Problem, mesh: Mesh, passes: Sequence[Pass]) -> bool:
    """Whether a mesh has room for the leanest plan that the options allow."""
    lean = plainest(problem)
    try:
        decide(Problem(lean.graph, mesh, lean.options, explain=False), passes)
    except ParcompilerError:
        return False
    return True


def plainest(problem: Problem) -> Problem:
    """The problem with everything recomputed and nothing to weigh, where that may be decided."""
    options = _leanest(problem).options
    schedule = "1f1b" if options.schedule in ("auto", "search") else options.schedule
    vocabulary = "whole" if options.vocabulary == "auto" else options.vocabulary
    options = dataclasses.replace(options, schedule=schedule, vocabulary=vocabulary)
    return dataclasses.replace(problem, options=options)


def _smallest(low: int, most: int, does: Callable[[int], bool]) -> int | None:
    """The smallest number from `low` to `most` that does, if all larger ones do; else None.

    >>> _smallest(3, 100, lambda n: n >= 37), _smallest(3, 100, lambda n: n >= 101)
    (37, None)
    """
    step, before = 1, low - 1
    while low <= most and not does(low):
        before, low, step = low, min(low + step, most) if low < most else most + 1, 2 * step
    if low > most:
        return None
    while low - before > 1:
        middle = (before + low) // 2
        before, low = (before, middle) if does(middle) else (middle, low)
    return low


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
