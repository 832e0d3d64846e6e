"""Clusters: what is refused, and the meshes that they leave open."""

from pathlib import Path

import pytest

import parcompiler as pc


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
