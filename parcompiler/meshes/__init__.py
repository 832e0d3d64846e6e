"""Which mesh of a cluster: all degrees are weighed, and that with the shortest step is taken.

    Cluster ── space ──► pipeline x tensor x data, always the same global batch
                             │  bounds    bytes and seconds that no plan of a mesh is below
                             ▼
                         in the order of these seconds: what `compile` would plan      weigh
                             │  until the next bound is above the best step
                             ▼
                         the best plan, and what was weighed                Plan.meshes

What is left out by a bound cannot be better, so the best is that of weighing all. Of equal steps
the plainest mesh is taken: that with least tensor, then least pipeline ranks. Deep pipelines with
few layers on each rank (`space`) are weighed where nothing else fits.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

from parcompiler.errors import InputError, ParcompilerError, PlanError
from parcompiler.mesh import Cluster
from parcompiler.meshes.bounds import Bounds
from parcompiler.meshes.refusal import nothing_fits
from parcompiler.meshes.sharper import least_seconds
from parcompiler.meshes.space import Candidate, global_microbatches, space
from parcompiler.meshes.weigh import Check, given, named, planned
from parcompiler.passes import DEFAULT, Pass
from parcompiler.passes.decide import Observer
from parcompiler.plan import MeshChoice, Plan
from parcompiler.problem import Problem

__all__ = ["Check", "global_microbatches", "search"]


def search(
    problem: Problem, cluster: Cluster, passes: Sequence[Pass], check: Check, observer: Observer
) -> tuple[Problem, Plan]:
    """The problem of the best mesh and its plan, in which all that were weighed are told.

    `problem` has one device for its mesh, and as its micro-batches those of all data ranks
    together. `check` raises InputError for options that a mesh cannot have. Raises InfeasibleError
    when nothing fits, with the least memory that was found to do, and what the options raise when
    no mesh can have them.
    """
    with observer("bounds of meshes"):
        bounds = Bounds(problem)
        found = _Search(problem, bounds, passes, check, observer)
        counts = bounds.blocks
        candidates = list(space(cluster, problem.options.microbatches, min(counts), max(counts)))
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
        raise found.refusal or nothing_fits(cluster, problem, possible, passes)
    _, _, chosen, plan = found.best
    return dataclasses.replace(chosen, explain=True), dataclasses.replace(plan, meshes=found.told())


class _Search:
    """The state of a search: the best so far, and what is known of every mesh."""

    def __init__(
        self,
        problem: Problem,
        bounds: Bounds,
        passes: Sequence[Pass],
        check: Check,
        observer: Observer,
    ) -> None:
        self.problem, self.bounds, self.passes = problem, bounds, passes
        self.check, self.observer = check, observer
        self.best: tuple[float, int, Problem, Plan] | None = None
        self.known: dict[int, MeshChoice] = {}
        self.problems: dict[int, Problem] = {}  # they keep what was found for a bound
        self.refused: set[int] = set()  # meshes that the options exclude
        self.wrong: InputError | None = None
        self.full = False  # whether memory excluded any

    @property
    def refusal(self) -> InputError | None:
        """What is wrong with the options, when that alone excludes all meshes."""
        return None if self.full else self.wrong

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Weigh meshes in the order of their bounds, as long as one can be better."""
        heap: list[tuple[float, int, bool, Candidate]] = []
        for candidate in candidates:
            self.known[candidate.place] = named(candidate)
            if candidate.reason is None and self._has_room(candidate):
                heap.append((self.bounds.seconds(candidate), candidate.place, False, candidate))
        heapq.heapify(heap)
        while heap:
            bound, place, sharp, candidate = heapq.heappop(heap)
            if self.best is not None and (bound, place) > self.best[:2]:
                self._beaten(bound, candidate)
            elif not sharp:
                heapq.heappush(heap, (self._sharper(bound, candidate), place, True, candidate))
            else:
                self._weigh(candidate)

    def _sharper(self, bound: float, candidate: Candidate) -> float:
        """A better bound, as far as the passes are known."""
        if tuple(self.passes) != DEFAULT or self.problem.bench is not None:
            return bound
        with self.observer(_title("bound of", candidate)):
            problem = self.problems[candidate.place] = given(self.problem, candidate)
            return max(bound, least_seconds(problem))

    def leave(self, candidates: Sequence[Candidate]) -> None:
        """Note meshes that are not weighed, as others fit."""
        for candidate in candidates:
            self.known[candidate.place] = named(candidate)
            if candidate.reason is None and self._has_room(candidate):
                stages = candidate.mesh.pipeline
                self._note(candidate, reason=f"not weighed: few layers on each of {stages} ranks")

    def told(self) -> tuple[MeshChoice, ...]:
        """What is known: the best first, then those beaten by their bounds, then the others."""
        return tuple(sorted(self.known.values(), key=_rank))

    def _has_room(self, candidate: Candidate) -> bool:
        """Whether what must be held fits; noted where it does not."""
        nbytes, memory = self.bounds.nbytes(candidate), self.problem.device.memory
        if nbytes <= memory:
            return True
        self.full = True
        over = f"{nbytes / memory:.1f} times the memory"
        reason = f"parameters, gradients and optimizer states alone are {over}"
        self._note(candidate, memory=nbytes, reason=reason)
        return False

    def _beaten(self, bound: float, candidate: Candidate) -> None:
        """Note that no plan of a mesh is as fast as the best."""
        self._note(candidate, seconds=bound, reason="no plan can be faster than that")

    def _weigh(self, candidate: Candidate) -> None:
        """Plan a mesh in full."""
        problem = self.problems.get(candidate.place) or given(self.problem, candidate)
        try:
            with self.observer(_title("plan of", candidate)):
                self.check(candidate.mesh, problem.options)
                plan, choice = planned(problem, self.passes)
        except InputError as error:
            self.wrong = self.wrong or error
            self.refused.add(candidate.place)
            self._note(candidate, reason=_first_line(error))
            return
        except PlanError as error:  # nothing fits, or nothing was found that does
            self.full = True
            self._note(candidate, reason=_first_line(error))
            return
        assert choice.seconds is not None, "it was simulated"
        self.known[candidate.place] = choice
        if self.best is None or (choice.seconds, candidate.place) < self.best[:2]:
            self.best = choice.seconds, candidate.place, problem, plan

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


def _title(what: str, candidate: Candidate) -> str:
    """A step of the search, for who watches it."""
    mesh = candidate.mesh
    return f"{what} {mesh.pipeline} x {mesh.tensor} x {mesh.data}"


def _first_line(error: ParcompilerError) -> str:
    """What an error says, in short."""
    return str(error).splitlines()[0]
