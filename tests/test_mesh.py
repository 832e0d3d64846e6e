"""The mesh: ranks and coordinates, and what is no mesh."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parcompiler as pc
from parcompiler.device import device


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
    with pytest.raises(pc.InputError, match=f"mesh axis '{axis}' must be a positive integer"):
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


def test_each_pipeline_coordinate_may_have_its_device(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(dataclasses.replace(device("h100"), name="mine").to_json())
    mesh = pc.Mesh(pipeline=3, data=2, device=["h100", file, device("l40s")])
    assert [one.name for one in mesh.devices] == ["h100", "mine", "l40s"]
    assert mesh.name == ("h100", "mine", "l40s")
    assert hash(mesh) == hash(pc.Mesh(3, 1, 2, ("h100", str(file), device("l40s"))))
    with pytest.raises(pc.InputError, match=r"several devices \(h100, mine, l40s\)"):
        mesh.hardware  # noqa: B018


def test_equal_devices_in_a_sequence_are_one() -> None:
    assert pc.Mesh(pipeline=2, device=("h100", device("h100"))) == pc.Mesh(2, device="h100")
    assert pc.Mesh(pipeline=2, device=("h100", "h100")).is_uniform


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (("h100", "l40s"), r"a device for each pipeline coordinate \(2 given, pipeline=3\)"),
        ((), r"a device for each pipeline coordinate \(0 given, pipeline=3\)"),
        (("h100", "abacus", "l40s"), "no device 'abacus'"),
        (("h100", "l40s", 3), r"a name or a Device \(int given\)"),
        (("h100", "cpu", "h100"), r"cannot exchange messages \(h100, cpu, h100 given\)"),
    ],
)
def test_a_sequence_that_is_none_of_devices_is_refused(
    devices: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(pc.InputError, match=message):
        pc.Mesh(pipeline=3, device=devices)


def test_a_cluster_has_one_kind_of_device() -> None:
    with pytest.raises(pc.InputError, match=r"one kind of device \(several given\)"):
        pc.Cluster(device=("h100", "l40s"))  # type: ignore[arg-type]


def test_context_ranks_are_numbered_between_tensor_and_data() -> None:
    mesh = pc.Mesh(pipeline=2, tensor=2, context=3, data=2)
    assert mesh.size == 24
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        assert rank == ((at.pipeline * 2 + at.data) * 3 + at.context) * 2 + at.tensor
        assert rank == mesh.rank(at.pipeline, at.data, at.tensor, at.context)


def test_expert_ranks_are_a_part_of_the_data_and_context_ranks() -> None:
    mesh = pc.Mesh(data=2, context=2, expert=4)
    assert mesh.size == 4
    assert list(mesh.grid.runs(mesh.expert)) == [(0, 1, 2, 3)]
    with pytest.raises(pc.InputError, match=r"expert=3 must divide data · context \(2 · 2 = 4\)"):
        pc.Mesh(data=2, context=2, expert=3)
