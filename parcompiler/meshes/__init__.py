"""Which mesh of a cluster: all degrees are weighed, and that with the shortest step is taken.

    Cluster ── space ──► pipeline x tensor x data, always the same global batch
    inputs ─── sizes ──► x rows of a micro-batch, if asked for: its graph without a capture
                             │  bounds    bytes and seconds that no plan of a mesh is below
                             ▼
                         in the order of these seconds: what `compile` would plan      weigh
                             │  until the next bound is above the best step
                             ▼
                         the best plan, and what was weighed                Plan.meshes
                             │  the model captured for its micro-batch, and planned again
                             ▼
                         the same plan; where a model asks how many rows there are, perhaps
                         another: then all are weighed once more, with what is known now

What is left out by a bound cannot be better, so the best is that of weighing all; the bound `even`
takes for granted, as the schedule pass does, that no stages are better than even ones. Where a
bound leaves it open, the passes divide what may be shorter than the best step, and all that they
would weigh for the mesh alone only if something is. Of equal steps the plainest mesh is taken: that
with least tensor, then least pipeline ranks, and the micro-batch that is given. Deep pipelines with
few layers on each rank (`space`) are weighed where nothing else fits; else they are told as not
weighed.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parcompiler.errors import InputError, PlanError
from parcompiler.graph import Graph
from parcompiler.mesh import Cluster
from parcompiler.meshes.bounds import Bounds, even_seconds, is_known
from parcompiler.meshes.refusal import nothing_fits
from parcompiler.meshes.sizes import GIVEN, MicrobatchSizes, Wanted, first_line, wanted_rows
from parcompiler.meshes.space import Candidate, global_microbatches, space
from parcompiler.meshes.weigh import Check, may_be_below, on_mesh, planned, unplanned
from parcompiler.passes import DEFAULT, Pass
from parcompiler.passes.decide import Observer
from parcompiler.passes.schedule import TOO_LARGE
from parcompiler.plan import MeshChoice, Plan
from parcompiler.problem import Problem

# What no plan of a mesh is below, as the report says it behind these seconds.
WORK = "its work alone takes that"
EVEN = "even stages take that"
SCHEDULES = "no schedule takes less"

__all__ = [
    "GIVEN",
    "Check",
    "MicrobatchSizes",
    "Wanted",
    "global_microbatches",
    "search",
    "wanted_rows",
]


def search(
    sizes: MicrobatchSizes,
    cluster: Cluster,
    passes: Sequence[Pass],
    check: Check,
    observer: Observer,
) -> tuple[Graph, Problem, Plan]:
    """The best mesh: the captured graph, its problem and plan, in which all that was weighed is
    told.

    `check` raises InputError for options that a mesh cannot have. Raises InfeasibleError when
    nothing fits, with the least memory that was found to do, and what the options raise when no
    mesh can have them.
    """
    while True:
        found = _weighed(sizes, cluster, passes, check, observer)
        if found.confirmed():
            return found.answer()


def _weighed(
    sizes: MicrobatchSizes,
    cluster: Cluster,
    passes: Sequence[Pass],
    check: Check,
    observer: Observer,
) -> MeshSearch:
    """All meshes weighed, of which one is the best."""
    with observer("bounds of meshes"):
        found = MeshSearch(sizes, passes, check, observer)
        candidates = list(found.candidates(cluster))
    found.run([candidate for candidate in candidates if not candidate.deep])
    deep = [candidate for candidate in candidates if candidate.deep]
    if found.best is None:
        found.run(deep)
    else:
        found.leave(deep)
    if found.best is None:
        possible = [c for c in candidates if c.reason is None and c.place not in found.refused]
        if not possible:
            raise found.refusal or _impossible(candidates)
        raise found.refusal or nothing_fits(cluster, sizes, possible, passes)
    return found


@dataclass(frozen=True, slots=True)
class Incumbent:
    """The best so far."""

    seconds: float
    candidate: Candidate
    problem: Problem
    plan: Plan

    @property
    def rank(self) -> tuple[float, int]:
        """What it is compared by."""
        return self.seconds, self.candidate.place


class MeshSearch:
    """The state of a search: the best so far, and what is known of every mesh."""

    def __init__(
        self, sizes: MicrobatchSizes, passes: Sequence[Pass], check: Check, observer: Observer
    ) -> None:
        self.sizes, self.passes = sizes, passes
        self.check, self.observer = check, observer
        self.faults = {rows: sizes.fault(rows) for rows in sizes.rows}
        self.bounds = {rows: Bounds(sizes.at(rows)) for rows in sizes.rows if not self.faults[rows]}
        self.best: Incumbent | None = None
        self.known: dict[int, MeshChoice] = {}
        self.problems: dict[int, Problem] = {}  # they keep what was found for a bound
        self.refused: set[int] = set()  # meshes that the options exclude
        self.wrong: InputError | None = None
        self.full = False  # whether memory excluded any

    @property
    def refusal(self) -> InputError | None:
        """What is wrong with the options, when that alone excludes all meshes."""
        return None if self.full else self.wrong

    def candidates(self, cluster: Cluster) -> Iterator[Candidate]:
        """All meshes with micro-batches of all rows; what cannot be had on any mesh, on one."""
        counts = self.bounds[self.sizes.given].blocks
        shared = {rows: self.sizes.microbatches(rows) for rows in self.sizes.rows}
        told = set()
        for candidate in space(cluster, shared, min(counts), max(counts)):
            fault = self.faults[candidate.rows]
            if fault is None:
                yield candidate
            elif candidate.rows not in told:
                told.add(candidate.rows)
                yield dataclasses.replace(candidate, reason=fault)

    def confirmed(self) -> bool:
        """Whether the best plan is that of a captured graph: the one that it was made for, or one
        that is captured now, for these rows, and has the same plan. If not, what is known now has
        changed what is to be weighed."""
        assert self.best is not None, "something fits"
        candidate = self.best.candidate
        if candidate.rows in self.sizes.graphs:
            return True
        with self.observer(f"capture of {candidate.rows} rows"):
            if not self.sizes.try_capture(candidate.rows):
                return False
        before, known = self.best, self.known[candidate.place]
        self.problems.pop(candidate.place, None)
        self.best = None
        self._weigh(candidate)
        if self.best is None or self.known[candidate.place] != known:
            return False
        plan = dataclasses.replace(self.best.plan, fingerprint=before.plan.fingerprint)
        return plan == before.plan

    def answer(self) -> tuple[Graph, Problem, Plan]:
        """The captured graph, the problem and the plan of the best."""
        assert self.best is not None, "something fits"
        graph = self.sizes.graphs[self.best.candidate.rows]
        problem = dataclasses.replace(self.best.problem, explain=True)
        return graph, problem, dataclasses.replace(self.best.plan, meshes=self.told())

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Weigh meshes in the order of their bounds, as long as one can be better.

        The bound that takes longer is found for a mesh that stands first by the other.
        """
        heap: list[tuple[float, int, str, Candidate]] = []
        for candidate in candidates:
            self.known[candidate.place] = unplanned(candidate)
            if candidate.reason is None and self._has_room(candidate):
                bound = self.bounds[candidate.rows].seconds(candidate)
                heap.append((bound, candidate.place, WORK, candidate))
        heapq.heapify(heap)
        while heap:
            bound, place, why, candidate = heapq.heappop(heap)
            if self.best is not None and (bound, place) > self.best.rank:
                self._beaten(bound, candidate, why)
            elif why == EVEN or not self._evenly:
                self._weigh(candidate)
            elif (seconds := self._even(candidate)) == math.inf:
                self._too_large(candidate)
            else:
                heapq.heappush(heap, (max(bound, seconds), place, EVEN, candidate))

    @property
    def _evenly(self) -> bool:
        """Whether it is known what the passes do, how long blocks take, and that no stages are
        better than even ones."""
        problem = self.sizes.problem
        return tuple(self.passes) == DEFAULT and problem.bench is None and is_known(problem)

    def _even(self, candidate: Candidate) -> float:
        """Seconds with even stages, and with what tensor ranks really do."""
        with self.observer(self._title("bound of", candidate)):
            return even_seconds(self._problem(candidate))

    def _problem(self, candidate: Candidate) -> Problem:
        """The problem of a candidate; it keeps what was found for a bound."""
        if candidate.place not in self.problems:
            self.problems[candidate.place] = on_mesh(self.sizes.at(candidate.rows), candidate)
        return self.problems[candidate.place]

    def leave(self, candidates: Sequence[Candidate]) -> None:
        """Note meshes that are not weighed, as others fit."""
        for candidate in candidates:
            self.known[candidate.place] = unplanned(candidate)
            if candidate.reason is None and self._has_room(candidate):
                stages = candidate.mesh.pipeline
                self._note(candidate, reason=f"not weighed: few layers on each of {stages} ranks")

    def told(self) -> tuple[MeshChoice, ...]:
        """What is known: the best first, then those beaten by their bounds, then the others."""
        return tuple(sorted(self.known.values(), key=_rank))

    def _has_room(self, candidate: Candidate) -> bool:
        """Whether what must be held fits; noted where it does not."""
        bounds, memory = self.bounds[candidate.rows], self.sizes.problem.device.memory
        nbytes = bounds.nbytes(candidate)
        if nbytes <= memory:
            return True
        self.full = True
        alone = "parameters and their states"
        if nbytes > bounds.states_of(candidate):
            alone = f"micro-batches of {candidate.rows} rows in one block"
        reason = f"{alone} alone are {nbytes / memory:.1f} times the memory"
        self._note(candidate, memory=nbytes, reason=reason)
        return False

    def _too_large(self, candidate: Candidate) -> None:
        """Note that the blocks of a mesh fit on no ranks."""
        self.full = True
        self._note(candidate, reason=TOO_LARGE)

    def _beaten(self, bound: float, candidate: Candidate, why: str) -> None:
        """Note that no plan of a mesh is as fast as the best, and what takes so long."""
        self.problems.pop(candidate.place, None)
        self._note(candidate, seconds=bound, reason=why)

    def _weigh(self, candidate: Candidate) -> None:
        """Plan a mesh in full."""
        problem = self._problem(candidate)
        try:
            with self.observer(self._title("plan of", candidate)):
                self.check(candidate.mesh, problem.options)
                if self.best is not None and self._evenly:
                    if not may_be_below(problem, self.passes, self.best.seconds):
                        self._beaten(self.best.seconds, candidate, SCHEDULES)
                        return
                plan, choice = planned(problem, self.passes, candidate.rows)
        except InputError as error:
            self.wrong = self.wrong or error
            self.refused.add(candidate.place)
            self._note(candidate, reason=first_line(error))
            return
        except PlanError as error:  # nothing fits, or nothing was found that does
            self.full = True
            self._note(candidate, reason=first_line(error))
            return
        assert choice.seconds is not None, "it was simulated"
        self.known[candidate.place] = choice
        if self.best is None or (choice.seconds, candidate.place) < self.best.rank:
            self.best = Incumbent(choice.seconds, candidate, problem, plan)

    def _title(self, what: str, candidate: Candidate) -> str:
        """A step of the search, for who watches it."""
        mesh = candidate.mesh
        degrees = f"{what} {mesh.pipeline} x {mesh.tensor} x {mesh.data}"
        return f"{degrees}, {candidate.rows} rows" if len(self.bounds) > 1 else degrees

    def _note(
        self,
        candidate: Candidate,
        *,
        reason: str,
        seconds: float | None = None,
        memory: int | None = None,
    ) -> None:
        """Remember why there is no plan of a mesh."""
        known = self.known[candidate.place]
        self.known[candidate.place] = dataclasses.replace(
            known, reason=reason, seconds=seconds, memory=memory
        )


def _rank(choice: MeshChoice) -> tuple[int, float]:
    """Planned ones by their seconds, then those with a bound by it; the order of others stays."""
    if choice.seconds is None:
        return (3, 0.0) if choice.memory is None else (2, choice.memory)
    return (0 if choice.reason is None else 1), choice.seconds


def _impossible(candidates: Sequence[Candidate]) -> InputError:
    """What to say when no mesh can be, whatever memory there is."""
    reasons = list(dict.fromkeys(c.reason for c in candidates if c.reason))
    message = f"no mesh of the cluster can be: {'; '.join(reasons[:4])}"
    return InputError(message)
