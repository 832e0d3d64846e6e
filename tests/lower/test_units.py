"""Units: what of a stage is gathered at once where data ranks keep pieces of parameters."""

import torch

from parcompiler.instruction import Instruction, Kind
from parcompiler.lower import Lowered
from parcompiler.timeline.costs import StageCost
from parcompiler.timeline.simulate import simulate
from tests.verifier.programs import program


def lines(lowered: Lowered, rank: int) -> list[str]:
    return [str(line) for line in lowered.instructions[rank]]


def test_the_parameters_of_the_next_unit_come_while_one_computes() -> None:
    lowered = program("deep chain", 2, "gpipe", 1, data=2, zero=3)
    assert lines(lowered, 0)[:12] == [
        "UNSHARD stage 0 mb 0 ranks 0",
        "UNSHARD stage 1 mb 0 ranks 0",
        "FORWARD stage 0 mb 0",
        "RESHARD stage 0 mb 0",
        "UNSHARD stage 2 mb 0 ranks 0",
        "FORWARD stage 1 mb 0",
        "RESHARD stage 1 mb 0",
        "UNSHARD stage 3 mb 0 ranks 0",
        "FORWARD stage 2 mb 0",
        "RESHARD stage 2 mb 0",
        "FORWARD stage 3 mb 0",  # which goes back next, and stays whole
        *[line for line in lines(lowered, 0) if line.startswith("SEND")],
    ]


def test_what_is_computed_is_that_of_whole_stages() -> None:
    for schedule, each in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)):
        whole, units = (
            program("deep chain", 2, schedule, 4, virtual_stages=each, data=2, zero=zero)
            for zero in (2, 3)
        )
        one, other = ([c.block.name for s in x.stages for c in s.calls] for x in (whole, units))
        assert one == other
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
            for rank in range(2):
                wanted = [(n, x.microbatch) for x, n in named(whole, rank, kind)]
                assert [(n, x.microbatch) for x, n in named(units, rank, kind)] == wanted


def named(lowered: Lowered, rank: int, kind: Kind) -> list[tuple[Instruction, str]]:
    """The blocks that a rank computes, each with its instruction."""
    found = []
    for line in lowered.instructions[rank]:
        if line.kind is kind and line.stage is not None:
            calls = lowered.stages[line.stage].calls
            for call in calls if kind is Kind.FORWARD else reversed(calls):
                found.append((line, call.block.name))
    return found


def test_a_gather_runs_beside_the_compute_and_is_waited_for() -> None:
    lowered = program("deep chain", 1, "gpipe", 1, data=2, zero=3)
    costs = [StageCost(1.0, 2.0, resident=0, saved=0)] * len(lowered.stages)

    def step(seconds: float) -> float:
        return simulate(
            lowered.instructions,
            [0] * len(costs),
            costs,
            {name: 0 for name in lowered.values},
            collective_seconds=lambda line: seconds if line.kind is Kind.UNSHARD else 0.0,
        ).step_time

    compute, gathers = 8 * 3.0, 8 + 6  # the last two units stay whole
    assert step(0.5) == compute + 0.5  # the first one is waited for, the others hide
    assert step(2.0) > compute + 2.0
    assert step(100.0) >= gathers * 100.0


def test_small_blocks_are_in_the_unit_of_a_neighbour() -> None:
    lowered = program("gpt2", 1, "gpipe", 1, data=2, zero=3)
    sizes = [
        sum(p.numel for name in {*stage.tensors} if not (p := lowered.graph.by_name[name]).buffer)
        for stage in lowered.stages
    ]
    assert all(sizes)
    assert torch.tensor(sizes).min() * 8 >= torch.tensor(sizes).max()
