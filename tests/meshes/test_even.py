"""Bounds that know the schedules: even stages are soon bounded, what fits nowhere is told."""

import dataclasses
import math

import pytest

import parcompiler as pc
from parcompiler.meshes.weigh import planned
from parcompiler.options import Options
from parcompiler.passes import DEFAULT
from parcompiler.passes.decide import fastest, start
from parcompiler.passes.even import even_step, packed_bound, roomy_bound
from parcompiler.passes.least import least_step
from parcompiler.passes.schedule import CANDIDATES
from parcompiler.problem import Problem
from parcompiler.schedules import stages_per_rank
from tests.meshes.test_search import LARGE, captured, fits

DEEP = dataclasses.replace(LARGE, layers=12)  # as many for each of 2, 3 or 4 ranks


def given(
    microbatches: int, ranks: int = 2, tensor: int = 1, memory: int = 80 * 10**9, **options: str
) -> Problem:
    """A GPT on a mesh with so much memory a device."""
    mesh = pc.Mesh(ranks, tensor, device=fits(memory))
    graph = captured(DEEP).problem.graph
    return Problem(graph, mesh, Options(microbatches, **options), explain=False)  # type: ignore[arg-type]  # words


def test_what_fits_nowhere_is_infinite_and_cannot_be_planned() -> None:
    problem = given(4, 2, memory=150 * 2**20)
    assert least_step(problem, start(problem)) == math.inf
    with pytest.raises(pc.InfeasibleError):
        planned(problem, DEFAULT)


@pytest.mark.parametrize("vocabulary", ["auto", "whole"])
def test_passes_are_asked_only_where_a_step_may_be_shorter(vocabulary: str) -> None:
    problem = given(8, 2, schedule="auto", vocabulary=vocabulary)
    _, choice = planned(problem, DEFAULT)
    assert choice.seconds is not None
    assert least_step(problem, start(problem)) <= choice.seconds
    again = problem.anew()
    assert fastest(again, DEFAULT, below=choice.seconds * (1 + 1e-6)).stages
    with pytest.raises(pc.InfeasibleError):
        fastest(again, DEFAULT, below=0.9 * least_step(problem, start(problem)))


@pytest.mark.parametrize("name", CANDIDATES)
def test_what_is_said_without_simulating_is_below_what_is_said_with_it(name: str) -> None:
    for ranks, microbatches in ((2, 3), (3, 20), (4, 33)):
        for memory in (80 * 10**9, 250 * 2**20):  # the second may be too little
            problem = given(microbatches, ranks, memory=memory)
            plan = dataclasses.replace(
                start(problem), schedule=name, virtual_stages=stages_per_rank(name, 1)
            )
            least, packed = roomy_bound(problem, plan), packed_bound(problem, plan)
            step = even_step(problem, plan)
            assert least <= packed * (1 + 1e-9)
            assert 0.7 * step <= packed <= step * (1 + 1e-9)
            assert packed == math.inf or 0.7 * packed <= least
