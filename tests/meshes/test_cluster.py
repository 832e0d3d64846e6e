"""Clusters: what is refused, and the meshes that they leave open."""

from pathlib import Path

import pytest

import parcompiler as pc
from parcompiler.meshes.fill import Piece, least_step
from parcompiler.schedules import build


@pytest.mark.parametrize("field", ["nodes", "devices_per_node"])
@pytest.mark.parametrize("count", [0, -1, True, 1.5, "2", None])
def test_a_cluster_of_no_devices_is_refused(field: str, count: object) -> None:
    with pytest.raises(pc.InputError, match=f"the cluster's '{field}' must be a positive integer"):
        pc.Cluster(**{field: count})  # type: ignore[arg-type]


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(pc.InputError, match="abacus"):
        pc.Cluster(device="abacus")


def test_meshes_have_all_devices_and_tensor_ranks_of_one_node() -> None:
    cluster = pc.Cluster(nodes=3, devices_per_node=4, device="h100")
    meshes = list(cluster.meshes())
    degrees = [(mesh.pipeline, mesh.tensor, mesh.data) for mesh in meshes]
    expected = {(p, t, 12 // t // p) for t in (1, 2, 4) for p in range(1, 13) if (12 // t) % p == 0}
    assert set(degrees) == expected
    assert len(degrees) == len(expected)
    assert {mesh.size for mesh in meshes} == {cluster.size}


def test_the_nodes_of_a_cluster_are_those_of_its_device(tmp_path: Path) -> None:
    assert pc.Cluster(2, 8, "h100").device == "h100"
    four = pc.Cluster(2, 4, "h100").hardware
    assert (four.name, four.devices_per_node) == ("h100", 4)
    file = tmp_path / "mine.json"
    file.write_text(four.to_json())
    assert pc.Cluster(2, 4, file).device == four


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "interleaved", "zb-v"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (2, 4), (4, 4), (4, 8)])
def test_filling_a_pipeline_takes_time_and_never_more_than_the_even_stages(
    name: str, ranks: int, microbatches: int
) -> None:
    """Even stages without messages, in the order of the simplest schedule, are one way."""
    placement = build(name, ranks, ranks, 1 + (name in ("interleaved", "zb-v"))).placement
    piece = Piece(4 * ranks, 1.0, 1.0, 1.0)
    found = least_step([piece], 0.0, placement, microbatches)
    work = 3.0 * piece.count * microbatches / ranks
    even = 12.0 * (microbatches + ranks - 1)  # 1F1B
    assert work < found < even + 1e-6
    one = least_step([piece], 0.0, (0,) * len(placement), microbatches)
    assert one == pytest.approx(3.0 * piece.count * microbatches)
