"""The mesh: ranks and coordinates, and what is no mesh."""

import numpy as np
import pytest

import parcompiler as pc


def test_tensor_is_the_fastest_axis_then_data_then_pipeline() -> None:
    mesh = pc.Mesh(pipeline=2, tensor=2, data=3)
    assert mesh.size == 12
    assert mesh.coordinate(0) == pc.Coordinate(pipeline=0, data=0, tensor=0)
    assert mesh.coordinate(1) == pc.Coordinate(pipeline=0, data=0, tensor=1)
    assert mesh.coordinate(2) == pc.Coordinate(pipeline=0, data=1, tensor=0)
    assert mesh.coordinate(6) == pc.Coordinate(pipeline=1, data=0, tensor=0)


@pytest.mark.parametrize("degrees", [(1, 1, 1), (4, 1, 1), (2, 3, 4), (1, 5, 2)])
def test_rank_and_coordinate_are_inverse(degrees: tuple[int, int, int]) -> None:
    pipeline, tensor, data = degrees
    mesh = pc.Mesh(pipeline=pipeline, tensor=tensor, data=data)
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        assert mesh.rank(pipeline=at.pipeline, data=at.data, tensor=at.tensor) == rank
        assert rank == (at.pipeline * mesh.data + at.data) * mesh.tensor + at.tensor


@pytest.mark.parametrize("axis", ["pipeline", "tensor", "data"])
@pytest.mark.parametrize("degree", [0, -1, True, 2.0, "2", None])
def test_a_degree_that_is_no_positive_integer_is_refused(axis: str, degree: object) -> None:
    with pytest.raises(pc.InputError, match=f"mesh axis '{axis}' needs a positive integer"):
        pc.Mesh(**{axis: degree})  # type: ignore[arg-type]


def test_integers_of_numpy_are_integers() -> None:
    mesh = pc.Mesh(pipeline=np.int64(2))  # type: ignore[arg-type]
    assert mesh == pc.Mesh(pipeline=2)
    assert type(mesh.pipeline) is int


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_mesh_is_refused(rank: int) -> None:
    with pytest.raises(pc.InputError, match=r"not in the mesh \(4 ranks: 0 to 3\)"):
        pc.Mesh(pipeline=4).coordinate(rank)


def test_a_coordinate_outside_the_mesh_is_refused() -> None:
    with pytest.raises(pc.InputError, match=r"no pipeline coordinate 2 in the mesh \(pipeline=2\)"):
        pc.Mesh(pipeline=2).rank(pipeline=2)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(pc.InputError, match="abacus"):
        pc.Mesh(device="abacus")
    with pytest.raises(pc.InputError, match=r"a name or a Device \(int given\)"):
        pc.Mesh(device=3)  # type: ignore[arg-type]
