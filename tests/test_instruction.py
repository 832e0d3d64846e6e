"""Instructions: their text says everything, and what is none is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import parcompiler as pc
from parcompiler.instruction import COMPUTE, MESSAGES, Instruction, Kind, listing, parse

small = st.integers(0, 200)
names = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True)
instructions = st.one_of(
    st.builds(Instruction, st.sampled_from(sorted(COMPUTE)), small, small),
    st.builds(
        Instruction,
        st.sampled_from(sorted(MESSAGES)),
        microbatch=small,
        value=names,
        gradient=st.booleans(),
        peer=small,
    ),
    st.builds(
        Instruction,
        st.just(Kind.REDUCE_GRADIENTS),
        value=names,
        ranks=st.lists(small, min_size=2, max_size=4, unique=True).map(tuple),
    ),
    st.builds(Instruction, st.just(Kind.SHARE_LOSS), peer=small),
)


@given(st.lists(instructions, max_size=8).map(tuple))
def test_the_text_of_a_program_parses_back_to_it(program: tuple[Instruction, ...]) -> None:
    assert parse(listing(program)) == program


@pytest.mark.parametrize(
    "line",
    [
        "FORWARD",
        "FORWARD stage 0",
        "FORWARD stage one mb 0",
        "FORWARD stage 0 mb",
        "FORWARD stage 0 mb 0 to 1",
        "forward stage 0 mb 0",
        "SEND x mb 0",
        "SEND x mb 0 from 1",
        "SEND",
        "REDUCE_GRADIENTS tied_0",
        "REDUCE_GRADIENTS tied_0 ranks 0,x",
        "SHARE_LOSS",
        "DANCE stage 0",
        "FORWARD colour 3",
    ],
)
def test_a_line_that_is_no_instruction_is_refused_with_an_example(line: str) -> None:
    with pytest.raises(pc.InputError, match=r"not an instruction: .*for example"):
        parse(line)


def test_blank_lines_do_not_count() -> None:
    assert parse("\n\nSHARE_LOSS from 1\n\n") == (Instruction(Kind.SHARE_LOSS, peer=1),)
