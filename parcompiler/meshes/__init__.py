"""Which mesh of a cluster: all degrees are weighed, and that with the shortest step is taken.

    Cluster ── space ──► pipeline x tensor x data, always the same global batch
    inputs ─── sizes ──► x rows of a micro-batch, if asked for: the model captured on them
                             │  bounds    bytes and seconds that no plan of a mesh is below
                             ▼
                         in the order of these seconds: what `compile` would plan      weigh
                             │  until the next bound is above the best step
                             ▼
                         the best plan, and what was weighed                Plan.meshes

A mesh that a bound excludes cannot be better, so the best is that of weighing all; the bound `even`
takes for granted, as the schedule pass does, that no stages are better than even ones. Where a
bound leaves it open, the passes divide what may be shorter than the best step, and all that they
would weigh for the mesh alone only if something is. Of equal steps the plainest mesh is taken: that
with least tensor, then least pipeline ranks, and the micro-batch that is given. Deep pipelines with
few layers on each rank (`space`) are weighed where nothing else fits; else they are listed as not
weighed.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
    """The best mesh: the captured graph, its problem and plan, which lists all that was weighed.

    `check` raises InputError for options that a mesh cannot have. Raises InfeasibleError when
    nothing fits, with the least memory with which something would, and what the options raise when
    no mesh can have them.
    """
    state = MeshSearch(sizes, cluster, passes, check, observer)
    state.weigh_all()
    return state.answer()


@dataclass(frozen=True, slots=True)
class Incumbent:
    """The best mesh so far."""

    seconds: float
    candidate: Candidate
    problem: Problem
    plan: Plan

    @property
    def rank(self) -> tuple[float, int]:
        """Its step, and for equal steps the place of its mesh."""
        return self.seconds, self.candidate.place


class MeshSearch:
    """The state of a search: the best mesh so far, and what is known of every mesh."""

    def __init__(
        self,
        sizes: MicrobatchSizes,
        cluster: Cluster,
        passes: Sequence[Pass],
        check: Check,
        observer: Observer,
    ) -> None:
        self.sizes, self.cluster, self.passes = sizes, cluster, passes
        self.check, self.observer = check, observer
        with observer("bounds of meshes"):
            self.faults = {rows: sizes.fault(rows) for rows in sizes.rows}
            possible = [rows for rows, fault in self.faults.items() if fault is None]
            self.bounds = {rows: Bounds(sizes.at(rows)) for rows in possible}
            self.candidates = list(self._candidates())
        self.best: Incumbent | None = None
        self.choices: dict[int, MeshChoice] = {}
        self.problems: dict[int, Problem] = {}  # they keep what a bound has computed
        self.errors: dict[int, InputError] = {}  # of meshes that the options exclude
        self.full = False  # whether memory excluded any

    def weigh_all(self) -> None:
        """Weigh all meshes; deep pipelines only where nothing else fits."""
        candidates = self.candidates
        self._weigh_by_bounds([candidate for candidate in candidates if not candidate.deep])
        deep = [candidate for candidate in candidates if candidate.deep]
        if self.best is None:
            self._weigh_by_bounds(deep)
        else:
            for candidate in self._roomy(deep):
                stages = candidate.mesh.pipeline
                self._note(candidate, reason=f"not weighed: few layers on each of {stages} ranks")
        if self.best is None:
            if self.errors and not self.full:
                raise next(iter(self.errors.values()))
            possible = [c for c in candidates if c.reason is None and c.place not in self.errors]
            if not possible:
                reasons = list(dict.fromkeys(c.reason for c in candidates if c.reason))
                message = f"no mesh of the cluster can be: {'; '.join(reasons[:4])}"
                raise InputError(message)
            raise nothing_fits(self.cluster, self.sizes, possible, self.passes)

    def answer(self) -> tuple[Graph, Problem, Plan]:
        """The captured graph, the problem and the plan of the best mesh.

        The plan lists planned meshes by their seconds, then those with a bound by it.
        """
        assert self.best is not None, "something fits"

        def rank(choice: MeshChoice) -> tuple[int, float]:
            if choice.seconds is None:
                return (3, 0.0) if choice.memory is None else (2, choice.memory)
            return (0 if choice.reason is None else 1), choice.seconds

        graph = self.sizes.graphs[self.best.candidate.rows]
        problem = dataclasses.replace(self.best.problem, explain=True)
        meshes = tuple(sorted(self.choices.values(), key=rank))
        return graph, problem, dataclasses.replace(self.best.plan, meshes=meshes)

    def _candidates(self) -> Iterator[Candidate]:
        """All meshes with micro-batches of all rows; impossible rows with the first mesh alone."""
        counts = self.bounds[self.sizes.given].blocks
        microbatches = {rows: self.sizes.microbatches(rows) for rows in self.sizes.rows}
        refused = set()
        for candidate in space(self.cluster, microbatches, min(counts), max(counts)):
            fault = self.faults[candidate.rows]
            if fault is None:
                yield candidate
            elif candidate.rows not in refused:
                refused.add(candidate.rows)
                yield dataclasses.replace(candidate, reason=fault)

    def _roomy(self, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
        """The meshes on which the states and the largest block fit; others are noted."""
        memory = self.sizes.problem.device.memory
        for candidate in candidates:
            self.choices[candidate.place] = unplanned(candidate)
            if candidate.reason is None:
                bounds = self.bounds[candidate.rows]
                nbytes = bounds.nbytes(candidate)
                if nbytes <= memory:
                    yield candidate
                    continue
                self.full = True
                alone = "parameters and their states"
                if nbytes > bounds.states_of(candidate):
                    alone = f"micro-batches of {candidate.rows} rows in one block"
                reason = f"{alone} alone are {nbytes / memory:.1f} times the memory"
                self._note(candidate, memory=nbytes, reason=reason)

    def _weigh_by_bounds(self, candidates: Sequence[Candidate]) -> None:
        """Weigh meshes in the order of their bounds, as long as one can be better.

        The bound that takes longer is computed for a mesh that stands first by the other.
        """
        heap = [
            (self.bounds[candidate.rows].seconds(candidate), candidate.place, WORK, candidate)
            for candidate in self._roomy(candidates)
        ]
        heapq.heapify(heap)
        while heap:
            bound, place, why, candidate = heapq.heappop(heap)
            if self.best is not None and (bound, place) > self.best.rank:
                self._beaten(bound, candidate, why)
            elif why == EVEN or not self._evenly:
                self._weigh(candidate)
            else:
                with self.observer(self._title("bound of", candidate)):
                    seconds = even_seconds(self._problem(candidate))
                if seconds == math.inf:
                    self.full = True
                    self._note(candidate, reason=TOO_LARGE)
                else:
                    heapq.heappush(heap, (max(bound, seconds), place, EVEN, candidate))

    @property
    def _evenly(self) -> bool:
        """Whether it is known what the passes do, how long blocks take, and that no stages are
        better than even ones."""
        problem = self.sizes.problem
        return tuple(self.passes) == DEFAULT and problem.bench is None and is_known(problem)

    def _problem(self, candidate: Candidate) -> Problem:
        """The problem of a candidate."""
        if candidate.place not in self.problems:
            self.problems[candidate.place] = on_mesh(self.sizes.at(candidate.rows), candidate)
        return self.problems[candidate.place]

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
            self.errors[candidate.place] = error
            self._note(candidate, reason=first_line(error))
            return
        except PlanError as error:  # nothing fits, or the passes found nothing that does
            self.full = True
            self._note(candidate, reason=first_line(error))
            return
        assert choice.seconds is not None, "it was simulated"
        self.choices[candidate.place] = choice
        if self.best is None or (choice.seconds, candidate.place) < self.best.rank:
            self.best = Incumbent(choice.seconds, candidate, problem, plan)

    def _title(self, step: str, candidate: Candidate) -> str:
        """A step of the search, for who watches it."""
        mesh = candidate.mesh
        degrees = f"{step} {mesh.pipeline} x {mesh.tensor} x {mesh.data}"
        return f"{degrees}, {candidate.rows} rows" if len(self.bounds) > 1 else degrees

    def _beaten(self, bound: float, candidate: Candidate, why: str) -> None:
        """Note that no plan of a mesh is as fast as the best, and which bound says so."""
        self.problems.pop(candidate.place, None)
        self._note(candidate, seconds=bound, reason=why)

    def _note(self, candidate: Candidate, **known: Any) -> None:
        """Remember why there is no plan of a mesh, and its bound of seconds or memory."""
        self.choices[candidate.place] = dataclasses.replace(unplanned(candidate), **known)
