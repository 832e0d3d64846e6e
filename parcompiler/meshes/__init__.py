"""Choose a mesh of a cluster: branch and bound over all degrees, then the plainest of the fastest.

    Cluster ── space ──► pipeline x tensor x data (x context x expert), always the same batch
    inputs ─── sizes ──► x rows of a micro-batch, if asked for: the model captured on them
                             │  bounds    lower bounds of a mesh, in bytes and seconds
                             ▼
                         in the order of these seconds: the plan of `compile`          weigh
                             │  until no remaining mesh can be the answer
                             ▼
                         the plan, and all meshes with their figures        Plan.meshes

The answer is the plainest mesh whose step is at most MARGIN longer than that of any other. Plainer
means fewer pipeline ranks, then fewer tensor ranks, then the given micro-batch. So a plainer mesh
is planned if its bound is at most MARGIN above the best step, and any other mesh if its bound is
MARGIN below the step of the answer so far; the passes stop at these seconds. A mesh that they
exclude stays open, and is planned if a later answer lets it matter again. In the end the step of
the answer is at most MARGIN longer than every known step and every remaining bound. So is that of
the plainest plan of its mesh, which is taken (`decide.plainest`).

Context ranks multiply the number of meshes, and each needs a search for what they exchange. So
meshes without context ranks come first, unless all of them take much longer than others may. Once
there is an answer, only its neighbours with context ranks (one prime factor moves to another axis)
are weighed, and only if its ranks recompute, or have fewer micro-batches than the pipeline has
ranks. The neighbours of the mesh with the lowest sharp bound or step are weighed too: to follow
bounds costs a tenth of planning. As long as that bound is far above the lowest bound of any mesh,
the neighbours of the latter mesh are weighed instead, so that a good plan is found soon. A mesh
without a pipeline is planned as soon as its bound is low: that takes a tenth as long, and its step
excludes pipelines. Then come pipelines with room for all states and activations (`is_tight`):
their bounds are close to their steps, while tight ones are often planned in vain. Of meshes with
context ranks those with short pipelines and few micro-batches come first.

The bound `even` assumes, as the schedule pass does, that no stages are better than even ones. An
interrupt (Ctrl-C) ends the search with the answer so far, if there is one.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from parcompiler.errors import InputError, PlanError
from parcompiler.graph import Graph
from parcompiler.mesh import Cluster, Mesh
from parcompiler.meshes.bounds import Bounds
from parcompiler.meshes.refusal import nothing_fits, with_reasons
from parcompiler.meshes.sizes import GIVEN, MicrobatchSizes, Wanted, first_line, wanted_rows
from parcompiler.meshes.space import Candidate, are_neighbours, global_microbatches, space
from parcompiler.meshes.weigh import Check, CheckLowered, figures, on_mesh, unplanned
from parcompiler.passes import DEFAULT, Pass
from parcompiler.passes.base import MARGIN
from parcompiler.passes.decide import Observer, fastest, plainest, start, step_of
from parcompiler.passes.least import LeastStep, is_known
from parcompiler.passes.schedule import TOO_LARGE
from parcompiler.passes.shard.axes import on_axes
from parcompiler.passes.shard.context import positions
from parcompiler.plan import MeshChoice, Plan
from parcompiler.problem import Problem
from parcompiler.solver import ROUNDING
from parcompiler.spmd.experts import divisible

# Reasons for a lower bound, as the report gives them after its seconds.
WORK = "its work, and the wait for it, or its exchange, take that"
EVEN = "even stages take that"
SCHEDULES = "no schedule takes less"
SHALLOW = 8  # most pipeline ranks of a shallow mesh
AHEAD = 1.05  # times the lowest bound: plainer meshes up to that bound are weighed first
QUICK = 128  # pipeline ranks x micro-batches: up to so many, a mesh is planned in a few seconds
QUICKLY = 1.2  # as AHEAD, for quick meshes with context ranks
EASILY = 1.1  # as AHEAD, for meshes with room for everything
FIRST = 1.25  # times the lowest bound: slower plans do not count while other meshes are open

__all__ = [
    "GIVEN",
    "MeshSearch",
    "MicrobatchSizes",
    "Wanted",
    "global_microbatches",
    "wanted_rows",
]


@dataclass(frozen=True, slots=True)
class Incumbent:
    """A planned mesh, with the seconds of its step."""

    seconds: float
    candidate: Candidate
    problem: Problem
    plan: Plan


@dataclass(slots=True)
class Unweighed:
    """A mesh that is not planned, with a lower bound on the seconds of its plans and the reason for
    it. `is_sharp` says that only a plan can tell more; `even` refines the bound until then.
    `is_tight` says that memory is short."""

    candidate: Candidate
    bound: float
    why: str = WORK
    is_sharp: bool = False
    is_tight: bool = False
    even: LeastStep | None = None


@dataclass
class MeshSearch:
    """A search: the planned meshes, and the bounds of all others.

    `check` raises InputError for options that a mesh cannot have, `check_lowered` for those that
    the stages of a plan cannot have.
    """

    sizes: MicrobatchSizes
    cluster: Cluster
    passes: Sequence[Pass]
    check: Check
    check_lowered: CheckLowered
    observer: Observer

    def __post_init__(self) -> None:
        """List the meshes."""
        with self.observer("bounds of meshes"):
            self.faults = {rows: self.sizes.fault(rows) for rows in self.sizes.rows}
            possible = [rows for rows, fault in self.faults.items() if fault is None]
            self.bounds = {(rows, 1): Bounds(self.sizes.at(rows)) for rows in possible}
            self.candidates = list(self._candidates())
        self.planned: list[Incumbent] = []
        self.open: list[Unweighed] = []
        self.choices: dict[int, MeshChoice] = {}
        self.problems: dict[int, Problem] = {}  # they cache what bounds compute
        self.errors: dict[int, InputError] = {}  # of meshes that the options exclude
        self.full = False  # whether memory excluded any mesh
        self.cramped: list[Mesh] = []  # meshes that memory excluded although they might have won
        self.stopped = False  # whether an interrupt ended the search

    def answer(self) -> tuple[Graph, Problem, Plan]:
        """The best mesh: the captured graph, its problem and its plan.

        The plan lists its mesh first, then planned meshes by their seconds, then the others by
        their bounds. Its runner-up is the fastest of the plans that were not taken. Raises
        InfeasibleError, with the least memory that would do, when nothing fits, and the InputError
        of the options when no mesh can have them.
        """
        self._weigh_all()
        best = self._plainest()
        others = [self.choices[one.candidate.place] for one in self.planned if one is not best]
        others += [best.plan.runner_up] if best.plan.runner_up else []
        following = min(others, key=lambda choice: choice.seconds or 0.0, default=None)
        for item in self.open:
            if not self._is_rare(item.candidate) or item.why != WORK:
                self._note(item.candidate, seconds=item.bound, reason=item.why)
        if self.stopped:
            self._tell_interrupt()

        def rank(choice: MeshChoice) -> tuple[int, float]:
            if choice.seconds is None:
                return (4, 0.0) if choice.memory is None else (3, choice.memory)
            if choice is self.choices[best.candidate.place]:
                return 0, 0.0
            return (1 if choice.reason is None else 2), choice.seconds

        graph = self.sizes.graphs[best.candidate.rows]
        problem = dataclasses.replace(best.problem, explain=True)
        meshes = tuple(sorted(self.choices.values(), key=rank))
        return graph, problem, dataclasses.replace(best.plan, meshes=meshes, runner_up=following)

    def _weigh_all(self) -> None:
        """Weigh every mesh that may be the answer, the one with the lowest bound first."""
        is_even = self._evenly
        self.open = [
            Unweighed(
                candidate,
                self._bounds(candidate).seconds(candidate, is_even=is_even),
                is_sharp=not is_even,
                is_tight=self._bounds(candidate).is_tight(candidate),
            )
            for candidate in self._roomy()
        ]
        try:
            while (item := self._next()) is not None:
                self._refine(item)
        except KeyboardInterrupt:
            if not self.planned:
                raise
            self.stopped = True
        if not self.planned:
            if self.errors and not self.full:
                raise with_reasons(next(iter(self.errors.values())), self.choices.values())
            weighed = [c for c in self.candidates if c.reason is None and not self._is_wide(c)]
            possible = [c for c in weighed if c.place not in self.errors]
            if not possible:
                reasons = list(dict.fromkeys(c.reason for c in self.candidates if c.reason))
                message = f"no mesh of the cluster is possible: {'; '.join(reasons[:4])}"
                raise InputError(message)
            error = nothing_fits(self.cluster, self.sizes, possible, self.passes)
            raise error if error.needed else with_reasons(error, self.choices.values())

    def _plainest(self) -> Incumbent:
        """The best mesh with its plainest plan that is fast enough."""
        best = self._best
        known = [one.seconds for one in self.planned] + [item.bound for item in self._eligible]
        enough = (1 + MARGIN) * min(known)
        if self.stopped or best.plan.stages is None or not self._evenly:
            return best
        more = best.seconds - step_of(best.problem, best.plan)  # only the simulator sees these
        with self.observer(self._title("plainest plan of", best.candidate)):
            plan = plainest(best.problem, self.passes, best.plan, enough - more)
        if plan is best.plan:
            return best
        try:
            choice = figures(best.problem, plan, best.candidate.rows, self.check_lowered)
        except InputError:  # its stages cannot have the options
            return best
        assert choice.seconds is not None, "it was simulated"
        if choice.seconds > enough:
            return best
        before = self.choices[best.candidate.place]
        self.choices[best.candidate.place] = choice
        plan = dataclasses.replace(plan, runner_up=before)
        return Incumbent(choice.seconds, best.candidate, best.problem, plan)

    @property
    def _best(self) -> Incumbent:
        """The plainest planned mesh whose step is at most MARGIN longer than the shortest."""
        enough = (1 + MARGIN) * min(one.seconds for one in self.planned)
        fast = (one for one in self.planned if one.seconds <= enough)
        return min(fast, key=lambda one: _plainness(one.candidate))

    def _needed(self, candidate: Candidate) -> float:
        """Seconds that the step on a mesh must be below to make it the answer."""
        if not self.planned:
            return math.inf
        best = self._best
        if _plainness(candidate) < _plainness(best.candidate):
            return (1 + MARGIN) * min(one.seconds for one in self.planned) / (1 - ROUNDING)
        return best.seconds / (1 + MARGIN)

    @property
    def _eligible(self) -> list[Unweighed]:
        """The open meshes to weigh now. Before there is an answer, only shallow ones without
        context ranks, which are bounded and planned fastest, unless all take FIRST times what
        others may take. Then all but rare ones, and these rare ones: neighbours of the answer, of
        the mesh in the lead, and, where ranks lack room for activations, or micro-batches to be
        busy, of the most promising mesh with context ranks (with such ranks only then, or if one of
        these meshes has some); and those that divide the rows of a mesh that lacks room."""
        if not self.planned:
            near = [x for x in self.open if not self._is_wide(x.candidate)]
            plain = [x for x in near if x.candidate.mesh.context == 1] or near
            shallow = [x for x in plain if x.candidate.mesh.pipeline <= SHALLOW] or plain
            if not near or _lowest(shallow) <= FIRST * _lowest(near):
                return shallow
        leads, short = [self._lead], True
        if self.planned:
            mesh, plan = self._best.candidate.mesh, self._best.plan
            leads.append(mesh)
            # Of the step, under 1F1B or its interleaved form; others idle less.
            idle = (mesh.pipeline - 1) / plan.virtual_stages / plan.microbatches
            short = bool(plan.recompute or plan.selective or idle > MARGIN)
            tried = [x for x in self.open if x.why != WORK and x.candidate.mesh.context > 1]
            if short and tried and _lowest(tried) < self._best.seconds:
                leads.append(min(tried, key=lambda item: item.bound).candidate.mesh)
        cramped = short or any(lead.context > 1 for lead in leads)

        def counts(item: Unweighed) -> bool:
            other = item.candidate.mesh
            useful = any(are_neighbours(other, lead) for lead in leads)
            useful = useful and (cramped or other.context == 1)
            useful = useful or any(_divides_rows_of(mesh, other) for mesh in self.cramped)
            return not self._is_rare(item.candidate) or item.is_sharp or useful

        return [item for item in self.open if counts(item)]

    @property
    def _lead(self) -> Mesh:
        """The mesh with the shortest step, planned or by its sharp bound; or, where that is more
        than FIRST times the lowest refined bound, the mesh with the latter."""
        known = [(one.seconds, one.candidate) for one in self.planned]
        known += [(item.bound, item.candidate) for item in self.open if item.is_sharp]
        refined = [item for item in self.open if item.why != WORK] or self.open
        rough = [(item.bound, item.candidate) for item in refined] or known
        first, least = (min(x or rough, key=lambda pair: pair[0]) for x in (known, rough))
        return (least if first[0] > FIRST * least[0] else first)[1].mesh

    def _is_rare(self, candidate: Candidate) -> bool:
        """Whether a mesh is of a numerous kind that seldom pays: only some near an answer are
        weighed."""
        return candidate.mesh.context > 1 or self._is_wide(candidate)

    def _is_wide(self, candidate: Candidate) -> bool:
        """Whether tensor ranks are on several nodes."""
        return candidate.mesh.tensor > self.cluster.devices_per_node

    def _next(self) -> Unweighed | None:
        """Of the meshes that may be the answer and have about the lowest bound, the plainest with
        room, or else the plainest: it is planned fastest, and excludes the others. Rare ones come
        last, those that are planned fastest first, unless they have no pipeline."""
        lowest = self._lowest()

        def rank(item: Unweighed) -> tuple[float, ...]:
            candidate = item.candidate
            if self._is_rare(candidate) and candidate.mesh.pipeline > 1:
                return 1, _size(candidate), item.bound
            return 0, item.is_tight, *_plainness(candidate)

        near = (x for x in self._matters() if x.bound <= _ahead(x) * lowest)
        return min(near, key=rank, default=None)  # of measured costs, all bounds are 0

    def _matters(self) -> Iterator[Unweighed]:
        """The meshes that may be the answer."""
        return (item for item in self._eligible if item.bound < self._needed(item.candidate))

    def _lowest(self) -> float:
        """The lowest bound of the meshes that may be the answer."""
        return min((item.bound for item in self._matters()), default=0.0)

    def _candidates(self) -> Iterator[Candidate]:
        """All meshes with micro-batches of all numbers of rows; impossible rows only with the first
        mesh.

        Context and expert ranks only as the options can have them; no context ranks where
        predictions are kept, or gradients are rows.
        """
        counts = self.bounds[self.sizes.given, 1].blocks
        microbatches = {rows: self.sizes.microbatches(rows) for rows in self.sizes.rows}
        graph = self.sizes.problem.graph
        alone = graph.kept or graph.has_row_gradients
        axes = (1 if alone else positions(graph), divisible(graph))
        refused = set()
        for candidate in space(self.cluster, microbatches, max(counts), *axes):
            several = candidate.mesh.context * candidate.mesh.expert > 1
            if several and not self._is_possible(candidate.mesh):
                continue
            fault = self.faults[candidate.rows]
            if fault is None:
                yield candidate
            elif candidate.rows not in refused:
                refused.add(candidate.rows)
                yield dataclasses.replace(candidate, reason=fault)

    def _roomy(self) -> Iterator[Candidate]:
        """The meshes on which the states and the largest block fit; others are noted."""
        memory = self.sizes.problem.room(self.sizes.problem.device)
        for candidate in self.candidates:
            is_rare = self._is_rare(candidate)  # too many to report each
            if not is_rare:
                self.choices[candidate.place] = unplanned(candidate)
            if candidate.reason is None:
                bounds = self._bounds(candidate)
                nbytes = bounds.nbytes(candidate)
                if nbytes <= memory:
                    yield candidate
                    continue
                self.full = True
                if is_rare:
                    continue
                alone = "parameters and their states"
                if nbytes > bounds.states_of(candidate):
                    alone = f"micro-batches of {candidate.rows} rows in one block"
                reason = f"{alone} alone are {nbytes / memory:.1f} times the memory"
                self._note(candidate, memory=nbytes, reason=reason)

    @property
    def _evenly(self) -> bool:
        """Whether `LeastStep` is a bound: the passes are the default ones, times are modelled, and
        no stages are better than even ones."""
        problem = self.sizes.problem
        return tuple(self.passes) == DEFAULT and problem.bench is None and is_known(problem)

    def _is_possible(self, mesh: Mesh) -> bool:
        """Whether the options can have a mesh."""
        try:
            self.check(mesh, self.sizes.problem.options)
        except InputError:
            return False
        return True

    def _bounds(self, candidate: Candidate) -> Bounds:
        """The bounds of meshes with the rows and expert ranks of a candidate."""
        key = candidate.rows, candidate.mesh.expert
        if key not in self.bounds:
            alone = Mesh(device=self.cluster.device)
            one = Mesh(data=key[1], expert=key[1], device=self.cluster.device)  # nearest ranks
            pieces = on_axes(self.sizes.at(candidate.rows).anew(mesh=one))
            self.bounds[key] = Bounds(pieces.anew(mesh=alone))
        return self.bounds[key]

    def _problem(self, candidate: Candidate) -> Problem:
        """The problem of a candidate."""
        if candidate.place not in self.problems:
            self.problems[candidate.place] = on_mesh(self.sizes.at(candidate.rows), candidate)
        return self.problems[candidate.place]

    def _refine(self, item: Unweighed) -> None:
        """Refine the bound of a mesh, or plan it if the bound is sharp."""
        try:
            problem = self._problem(item.candidate)
        except InputError as error:  # its ranks cannot share out the rows, or the experts
            self._refuse(item, error)
            return
        if item.is_sharp:
            self._weigh(item)
            return
        enough = min(self._needed(item.candidate), _ahead(item) * self._lowest())
        with self.observer(self._title("bound of", item.candidate)):
            item.even = item.even or LeastStep(problem, start(problem))
            seconds = item.even.seconds(enough)
        if seconds == math.inf:
            self._close(item, TOO_LARGE)
        else:
            item.is_sharp = seconds < enough
            item.bound, item.why = max(item.bound, seconds), EVEN

    def _weigh(self, item: Unweighed) -> None:
        """Plan a mesh; the passes give up when it cannot be the answer."""
        candidate, problem = item.candidate, self._problem(item.candidate)
        below = self._needed(candidate)
        if not self.planned and self._evenly and item.why != SCHEDULES:  # not yet tried in vain
            below = FIRST * self._lowest()
        try:
            with self.observer(self._title("plan of", candidate)):
                self.check(candidate.mesh, problem.options)
                plan = fastest(problem, self.passes, below=below)
                choice = figures(problem, plan, candidate.rows, self.check_lowered)
        except InputError as error:
            self._refuse(item, error)
            return
        except PlanError as error:
            if below < math.inf:
                item.bound, item.why = below, SCHEDULES
            else:  # nothing fits, or the passes found nothing that fits
                self._close(item, first_line(error))
            return
        assert choice.seconds is not None, "it was simulated"
        self.choices[candidate.place] = choice
        self.open.remove(item)
        self.planned.append(Incumbent(choice.seconds, candidate, problem, plan))

    def _refuse(self, item: Unweighed, error: InputError) -> None:
        """Note that the options, or the model, exclude a mesh."""
        self.errors[item.candidate.place] = error
        self.open.remove(item)
        self._note(item.candidate, reason=first_line(error))

    def _title(self, step: str, candidate: Candidate) -> str:
        """The title of a step of the search, with the answer so far, for the observer."""
        text = f"{step} {self._words(candidate)}"
        if self.planned:
            best = self._best
            text += f" (so far {self._words(best.candidate)}: {best.seconds:.4g} s)"
        return text

    def _words(self, candidate: Candidate) -> str:
        """A mesh in a few words."""
        degrees = unplanned(candidate).degrees
        return f"{degrees}, {candidate.rows} rows" if len(self.faults) > 1 else degrees

    def _tell_interrupt(self) -> None:
        """Say on stderr that the search was not finished."""
        left = list(self._matters())
        message = (
            f"parcompiler: interrupted: this is the best plan so far ({len(self.planned)} meshes "
            f"planned, {len(left)} that might be better not weighed)"
        )
        print(message, file=sys.stderr)
        for item in left:
            reason = f"not weighed: interrupted (at least {item.bound:.4g} s)"
            self._note(item.candidate, reason=reason)

    def _close(self, item: Unweighed, reason: str) -> None:
        """Note that a mesh does not fit."""
        self.full = True
        self.cramped.append(item.candidate.mesh)
        self.open.remove(item)
        self.problems.pop(item.candidate.place, None)
        self._note(item.candidate, reason=reason)

    def _note(self, candidate: Candidate, **known: Any) -> None:
        """Record why a mesh has no plan, and its lower bound of seconds or memory."""
        self.choices[candidate.place] = dataclasses.replace(unplanned(candidate), **known)


def _plainness(candidate: Candidate) -> tuple[int, ...]:
    """Sort key: plainer meshes first."""
    mesh = candidate.mesh
    return mesh.context, mesh.pipeline, mesh.tensor, mesh.expert, candidate.place


def _size(candidate: Candidate) -> int:
    """Pipeline ranks x micro-batches: the time that planning a mesh takes grows with them."""
    return candidate.mesh.pipeline * candidate.microbatches


def _ahead(item: Unweighed) -> float:
    """Times the lowest bound: up to that bound a mesh is weighed at once."""
    mesh = item.candidate.mesh
    if mesh.context > 1:
        return QUICKLY if _size(item.candidate) <= QUICK else AHEAD
    return AHEAD if item.is_tight or mesh.pipeline == 1 else EASILY


def _divides_rows_of(one: Mesh, other: Mesh) -> bool:
    """Whether `other` is `one` with a prime factor of its data ranks moved to context ranks."""
    return one.data > other.data and one.context < other.context and are_neighbours(one, other)


def _lowest(items: Sequence[Unweighed]) -> float:
    """The lowest bound of some meshes, in seconds."""
    return min(item.bound for item in items)
