"""Pieces make up the whole, whatever its size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parcompiler.errors import InputError
from parcompiler.pieces import piece
from parcompiler.spmd.placement import I, P, Placement, R, S, join, local_shape, parse, take

DIMS = st.integers(0, 5)


@given(st.integers(0, 10**6), st.integers(1, 64))
def test_pieces_follow_each_other_and_differ_by_one_at_most(size: int, n: int) -> None:
    pieces = [piece(size, n, rank) for rank in range(n)]
    assert [span.start for span in pieces] == [
        sum(span.size for span in pieces[:rank]) for rank in range(n)
    ]
    assert sum(span.size for span in pieces) == size
    assert pieces[0].size - pieces[-1].size in (0, 1)


@given(st.integers(0, 40), st.integers(1, 6))
def test_pieces_are_those_of_tensor_split(size: int, n: int) -> None:
    parts = torch.arange(size).tensor_split(n)
    assert [len(part) for part in parts] == [piece(size, n, rank).size for rank in range(n)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 4))
def test_pieces_of_segments_join_to_the_whole(segments: list[int], n: int) -> None:
    whole = torch.arange(3 * sum(segments)).reshape(3, -1)
    placement = S(1, segments)
    pieces = [take(whole, placement, n, rank) for rank in range(n)]
    assert torch.equal(join(pieces, placement), whole)
    assert [tuple(part.shape) for part in pieces] == [
        local_shape(whole.shape, placement, n, rank) for rank in range(n)
    ]


def test_a_fused_projection_gives_each_rank_a_piece_of_every_part() -> None:
    rows = torch.tensor([10, 11, 12, 13, 20, 21, 30, 31])
    assert take(rows, S(0, (4, 2, 2)), 2, 1).tolist() == [12, 13, 21, 31]


@given(st.one_of(st.sampled_from((R, I, P)), st.builds(S, DIMS, st.lists(st.integers(1, 99)))))
def test_a_placement_is_read_as_it_is_written(placement: Placement) -> None:
    assert parse(str(placement)) == placement


@pytest.mark.parametrize("text", ["", "X", "S", "S()", "S(-1)", "S(0:)", "RR", "P(0)"])
def test_what_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no placement"):
        parse(text)
