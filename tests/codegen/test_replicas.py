"""What a rank runs follows from the list of its pipeline coordinate and from where it sits."""

from collections import Counter

import pytest

from parcompiler.codegen.rank import rank_program
from parcompiler.grid import Grid
from parcompiler.instruction import Kind, parse
from parcompiler.runtime.program import on_rank
from tests.verifier.programs import program

MESHES = [(2, 2), (4, 3), (1, 4), (3, 1)]


def test_peers_have_the_same_data_and_tensor_coordinate() -> None:
    grid = Grid(pipeline=2, data=3, tensor=2)
    lines = parse("SEND x mb 0 to 1\nREDUCE_GRADIENTS bucket_0 ranks 0\nSHARE_LOSS from 1")
    found = on_rank(lines, grid.coordinate(3), grid)  # pipeline 0, data 1, tensor 1
    assert [str(line) for line in found] == [
        "SEND x mb 0 to 9",
        "REDUCE_GRADIENTS bucket_0 ranks 1,3,5",
        "SHARE_LOSS from 9",
    ]


@pytest.mark.parametrize(("pipeline", "data"), MESHES)
def test_every_message_has_two_ends_and_every_sum_all_of_its_ranks(
    pipeline: int, data: int
) -> None:
    lowered = program("ties", pipeline, "1f1b", 3, data=data)
    programs = [rank_program(lowered, rank, "cpu") for rank in range(pipeline * data)]
    sent: Counter[tuple[object, ...]] = Counter()
    sums: dict[tuple[str | None, tuple[int, ...]], set[int]] = {}
    for own in programs:
        for line in own.instructions:
            message = line.value, line.gradient, line.microbatch
            if line.kind is Kind.SEND:
                sent[own.rank, line.peer, *message] += 1
            elif line.kind is Kind.RECV:
                sent[line.peer, own.rank, *message] -= 1
            elif line.kind is Kind.REDUCE_GRADIENTS:
                sums.setdefault((line.value, line.ranks), set()).add(own.rank)
                assert line.ranks in own.summing()
    assert not any(sent.values())
    assert all(members == set(ranks) for (_, ranks), members in sums.items())
    assert len({own.digest for own in programs}) == 1
    assert all(own.summing() == programs[0].summing() for own in programs)


def test_lowering_does_not_grow_with_the_number_of_data_ranks() -> None:
    few, many = (program("ties", 4, "1f1b", 3, data=data) for data in (2, 1024))
    assert few.instructions == many.instructions
    assert many.grid.size == 4096
    last = rank_program(many, 4095, "cpu")
    assert last.instructions[-1].peer == 4095
    assert last.channels == rank_program(few, 0, "cpu").channels


def test_programs_on_other_numbers_of_data_ranks_are_told_apart() -> None:
    digests = {
        rank_program(program("chain", 2, "1f1b", 3, data=d), 0, "cpu").digest for d in (2, 4)
    }
    assert len(digests) == 2
