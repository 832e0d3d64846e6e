"""Lists as text: loops and headings, and what is read back is the list."""

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import parcompiler as pc
from parcompiler.codegen.listing import written
from parcompiler.instruction import Instruction, parse
from tests.test_instruction import instructions
from tests.verifier.programs import WIDTH, Chain, program

SCHEDULES = ["naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "zb-v", "pipedream"]


@given(st.lists(instructions, max_size=6).map(tuple), st.integers(1, 3), st.booleans())
def test_any_list_reads_back(lines: tuple[Instruction, ...], times: int, sections: bool) -> None:
    assert parse(written(lines * times, sections=sections)) == lines * times


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lists_of_schedules_have_phases_and_few_lines(schedule: str) -> None:
    program = pc.compile(
        Chain(8),
        pc.Mesh(pipeline=4),
        {"x": torch.ones(2, WIDTH)},
        microbatches=64,
        schedule=schedule,
        virtual_stages=2 if schedule == "interleaved" else 1,
        stages="even",
        progress=False,
    )
    for lines in program.lowered.instructions:
        text = written(lines, sections=True)
        assert parse(text) == lines
        assert len(text.splitlines()) < len(lines) / 2
        assert "\n    FORWARD" in text
        assert ("# Steady state" in text) == (schedule not in {"naive", "gpipe"})


def test_a_loop_is_told_by_the_micro_batch_that_goes_forward() -> None:
    lowered = program("chain", 2, "1f1b", 6)
    text = written(lowered.instructions[0], sections=True)
    body = text.partition("for i in range(1, 6):\n")[2].splitlines()
    assert [" ".join(line.split()) for line in islice(body, 4)] == [
        "FORWARD stage 0 mb i",
        "SEND layers_1 mb i to 1",
        "RECV layers_1.grad mb i-1 from 1",
        "BACKWARD stage 0 mb i-1",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "for i in range(3):\n    FORWARD stage 0 mb i",
        "for i in range(0, 3, 0):\n    FORWARD stage 0 mb i",
        "for i in range(0, 2):\n    FORWARD stage 0 mb j",
        "    FORWARD stage 0 mb i",
        "for i in range(0, 2):\n    for i in range(0, 2):",
    ],
)
def test_a_loop_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(pc.InputError, match="not an instruction"):
        parse(text)
