"""Errors for a model that fits no mesh: the least memory, and what would make it fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from parcompiler import device as catalogue
from parcompiler.errors import InfeasibleError, ParcompilerError
from parcompiler.mesh import Cluster
from parcompiler.meshes.bounds import Bounds
from parcompiler.meshes.sizes import MicrobatchSizes, first_line
from parcompiler.meshes.space import Candidate
from parcompiler.meshes.weigh import on_mesh, planned
from parcompiler.passes import Pass
from parcompiler.passes.decide import Observer, decide
from parcompiler.passes.estimate import estimate
from parcompiler.passes.shard.axes import on_axes
from parcompiler.passes.shard.context import LONG, positions
from parcompiler.passes.shard.local import local
from parcompiler.plan import MeshChoice
from parcompiler.problem import LEVELS, Problem

ENDLESS = 2**60  # bytes: more than any model takes
TRIED = 3  # meshes that are tried: those with the least states on a rank
MOST_PIECES = 16  # of a row, among context ranks
SHOWN = 4  # reasons that an error lists
E = TypeVar("E", bound=ParcompilerError)


@dataclass(frozen=True, slots=True)
class LeastMemory:
    """The least device memory with which a plan fits, in bytes, and its mesh; `states` of the bytes
    are parameters, gradients and optimizer states."""

    nbytes: int
    candidate: Candidate
    states: int


def nothing_fits(
    cluster: Cluster,
    sizes: MicrobatchSizes,
    candidates: Sequence[Candidate],
    passes: Sequence[Pass],
) -> InfeasibleError:
    """The error for a model that fits no mesh."""
    least = _least(sizes, candidates, passes)
    device, room = cluster.hardware, sizes.problem.room(cluster.hardware)
    has = f"{cluster.size} x {device.name} of {device.memory:,} bytes"
    if room < device.memory:
        has += f", {room:,} without the margin"
    if least is None:
        message = (
            f"the model fits no mesh of the cluster ({has}), and would not with more memory either"
        )
        return InfeasibleError(message)
    mesh = least.candidate.mesh
    degrees = f"pipeline={mesh.pipeline}, tensor={mesh.tensor}, data={mesh.data}"
    cures = ", or ".join(_cures(cluster, sizes, least))
    error = InfeasibleError(
        f"the model fits no mesh of the cluster ({has}; the least that was found is "
        f"{least.nbytes:,} bytes a device, {least.nbytes - room:,} more than it has, with "
        f"{degrees}): {cures}"
    )
    error.needed = least.nbytes
    error.add_note(f"parameters, gradients and optimizer states are {least.states:,} bytes of that")
    return error


def with_reasons(error: E, choices: Iterable[MeshChoice]) -> E:
    """An error about all meshes, with the reasons against some that it does not say."""
    reasons: dict[str, str] = {}
    for choice in choices:
        if choice.reason and choice.reason != first_line(error):
            reasons.setdefault(choice.reason, choice.degrees)
    for reason, degrees in [*reasons.items()][:SHOWN]:
        error.add_note(f"pipeline × tensor × data {degrees}: {reason}")
    return error


def refuse_too_large(problem: Problem, passes: Sequence[Pass], observer: Observer) -> None:
    """Raise InfeasibleError where the states of the model alone exceed the memory of all ranks.

    The plainest plan is the fastest way to tell which rank lacks how much.
    """
    mesh = problem.mesh
    if Bounds(problem).states_on(mesh) <= mesh.tensor * sum(
        problem.room(device) for device in mesh.devices
    ):
        return
    lean = _simplest(problem)
    try:
        decide(lean, passes, observer)
    except InfeasibleError as error:
        if lean.options.recompute == "full":
            error.add_note("that is with every block recomputed")
        raise


def enough_ranks(problem: Problem, passes: Sequence[Pass]) -> Iterator[str]:
    """In words, the fewest ranks that would do where a mesh has too little memory.

    A lower bound follows from the states; longer pipelines are tried, with everything recomputed.
    Yields nothing where memory is not the reason, or where ranks have different devices.
    """
    mesh, options = problem.mesh, problem.options
    if not mesh.is_uniform or not isinstance(options.schedule, str):
        return
    lean, hardware = _simplest(problem), mesh.hardware

    def fits(level: str | int = options.zero, **changes: Any) -> bool:
        other, at = dataclasses.replace(mesh, **changes), lean.at_zero(level)
        try:
            decide(at.anew(mesh=other, bench=None, explain=False), passes)
        except ParcompilerError:
            return False
        return True

    if not fits(device=dataclasses.replace(hardware, memory=ENDLESS)):
        return
    levels = _higher_levels(problem) if mesh.replicas > 1 else ()
    if (level := next((level for level in levels if fits(level)), None)) is not None:
        yield f"zero={level} was tried and fits on these ranks, where zero={options.zero} does not"
    bounds = Bounds(problem)
    size = bounds.states_on(mesh)
    if size <= mesh.tensor * mesh.pipeline * problem.room(hardware):
        yield from _rows_in_pieces(lean, passes)
    least = math.ceil(size / (mesh.tensor * problem.room(hardware)))
    states = f"parameters, gradients and optimizer states are {size:,} bytes in all"
    replicas, others = mesh.tensor * mesh.data, f"tensor={mesh.tensor}, data={mesh.data}"
    fewer = f"fewer than {least * replicas} ranks (pipeline={least}, {others})"
    yield f"{states}: {fewer} cannot hold them"
    low, most = max(least, mesh.pipeline + 1), max(bounds.blocks)
    enough = _smallest(low, most, lambda pipeline: fits(pipeline=pipeline))
    if enough is None:
        yield f"no pipeline of up to {most} ranks was found to fit with {others}: raise tensor"
    else:
        ranks = f"{enough * replicas} ranks (pipeline={enough}, {others})"
        yield f"{ranks} were tried and fit, with what may be recomputed: the fewest found to do"


def _higher_levels(problem: Problem) -> range:
    """The levels of ZeRO above the one that was asked for, at which data ranks keep less."""
    options, graph = problem.options, problem.graph
    if (
        not isinstance(options.zero, int) or options.asynchronous
        or options.data_updates.way != "all-reduce" or options.data_updates.rank
        or graph.updates_weights or graph.has_row_gradients
    ):  # fmt: skip
        return range(0)
    return LEVELS[options.zero + 1 :]


def _rows_in_pieces(lean: Problem, passes: Sequence[Pass]) -> Iterator[str]:
    """In words, the fewest context ranks, besides the other ranks of a mesh, with which long rows
    fit, and the bytes of the fullest rank."""
    graph, mesh = lean.graph.undivided or lean.graph, lean.mesh
    rows = positions(graph)
    degrees = (mesh.context * 2**k for k in range(1, MOST_PIECES.bit_length()))
    possible = [n for n in degrees if n <= MOST_PIECES and rows % n == 0]
    for degree in possible if rows >= LONG and mesh.expert == 1 and not graph.kept else ():
        other = dataclasses.replace(mesh, context=degree)
        try:
            trial = on_axes(
                lean.anew(graph=graph, mesh=other, context=None, bench=None, explain=False)
            )
            plan = decide(trial, passes)
        except ParcompilerError:
            continue
        most = max(estimate(local(trial, plan), plan).peak_memory)
        yield (
            f"{other.size} ranks (context={degree}, pipeline={mesh.pipeline}, tensor="
            f"{mesh.tensor}, data={mesh.data}) were tried and fit: rows of {rows:,} positions in "
            f"pieces of {rows // degree:,}, {most:,} bytes on the fullest rank"
        )
        return


def _simplest(problem: Problem) -> Problem:
    """The problem with everything recomputed and nothing to weigh, as far as options are open."""
    options = _leanest(problem).options
    schedule = "1f1b" if options.schedule in ("auto", "search") else options.schedule
    vocabulary = "whole" if options.vocabulary == "auto" else options.vocabulary
    options = dataclasses.replace(options, schedule=schedule, vocabulary=vocabulary)
    return dataclasses.replace(problem, options=options)


def _leanest(problem: Problem) -> Problem:
    """The problem with everything recomputed, if that option is open."""
    if problem.options.recompute != "auto":
        return problem
    options = dataclasses.replace(problem.options, recompute="full")
    return dataclasses.replace(problem, options=options)


def _smallest(low: int, most: int, does: Callable[[int], bool]) -> int | None:
    """The smallest number from `low` to `most` for which `does` holds, if it then holds for all
    larger ones; None if it holds for none.

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


def _least(
    sizes: MicrobatchSizes, candidates: Sequence[Candidate], passes: Sequence[Pass]
) -> LeastMemory | None:
    """The least memory of plans without a memory limit, for the meshes with the fewest bytes of
    states on a rank."""
    bounds = Bounds(sizes.problem)
    hardware = dataclasses.replace(sizes.problem.device, memory=ENDLESS)
    plans = []
    for candidate in sorted(candidates, key=lambda c: (bounds.states_of(c), c.rows or 0, c.place))[
        :TRIED
    ]:
        mesh = dataclasses.replace(candidate.mesh, device=hardware)
        roomy = on_mesh(sizes.at(candidate.rows), dataclasses.replace(candidate, mesh=mesh))
        try:
            _, choice = planned(_leanest(roomy), passes)
        except ParcompilerError:
            continue
        assert choice.memory is not None, "it was planned"
        plans.append(LeastMemory(choice.memory, candidate, bounds.states_of(candidate)))
    return min(plans, key=lambda least: least.nbytes, default=None)


def _cures(cluster: Cluster, sizes: MicrobatchSizes, least: LeastMemory) -> Iterator[str]:
    """Changes that would make the model fit."""
    device, problem = cluster.hardware, sizes.problem
    room = problem.room(device)
    if least.states > room:
        times = math.ceil(least.states / room)
        yield f"take at least {times * cluster.nodes} nodes"
    else:
        yield "take more nodes"
    if problem.options.recompute not in ("auto", "full"):
        yield 'recompute activations (recompute="auto")'
    if _higher_levels(problem):
        yield 'let data ranks share more out (zero="auto")'
    if least.nbytes - least.states > least.states // 2 and least.candidate.rows == sizes.given:
        yield "make the micro-batch smaller"
    names = (name for name in catalogue.names() if name not in ("cpu", device.name))
    larger = [name for name in names if problem.room(catalogue.device(name)) >= least.nbytes]
    yield f"take a larger device ({', '.join(larger)})" if larger else "take a larger device"
