"""The catalogue of devices, and files that describe no device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import parcompiler as pc
from parcompiler.device import Device, device, names
from parcompiler.errors import InputError


def test_the_catalogue_has_a_core_and_seven_accelerators() -> None:
    known = ("a100-40g", "a100-80g", "b200", "cpu", "h100", "h200", "l40s", "mi300x")
    assert names() == known


@pytest.mark.parametrize("name", names())
def test_ranks_of_a_node_are_no_farther_apart_than_nodes(name: str) -> None:
    found = device(name)
    assert found.devices_per_node == 8
    assert found.link.bandwidth >= found.network.bandwidth
    assert found.link.latency <= found.network.latency
    assert found.peak(torch.bfloat16) >= found.peak(torch.float32) >= found.peak(torch.float64)


@pytest.mark.parametrize("name", names())
def test_a_device_of_the_catalogue_is_equal_after_the_round_trip(name: str) -> None:
    found = device(name)
    again = Device.from_json(found.to_json())
    assert found.name == name
    assert (again, again.sources) == (found, found.sources)
    assert hash(again) == hash(found)


@pytest.mark.parametrize("name", names())
def test_every_figure_of_the_catalogue_names_its_source(name: str) -> None:
    figures = json.loads(device(name).to_json())
    named = {
        f"{key}.{part}" if isinstance(value, dict) else key
        for key, value in figures.items()
        if key not in {"name", "sources"} and value != 0  # of multiprocessors: not known
        for part in (value if isinstance(value, dict) else [""])
    }
    assert set(figures["sources"]) == named


def test_a_device_is_read_once() -> None:
    assert device("cpu") is device("cpu")


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    known = "a100-40g, a100-80g, b200, cpu, h100, h200, l40s, mi300x"
    with pytest.raises(InputError, match=rf"no device 'tpu' in the catalogue \(known: {known}\)"):
        device("tpu")


def test_a_name_that_is_a_path_is_no_device() -> None:
    with pytest.raises(InputError, match="no device"):
        device("../devices/cpu")


def test_the_peak_of_an_unlisted_dtype_is_that_of_float32() -> None:
    h100 = device("h100")
    assert h100.peak(torch.bfloat16) == 989e12
    assert h100.peak(torch.int64) == h100.peak(torch.float32) == 67e12


def changed(path: str, value: Any) -> str:
    """The file of the cpu with one figure changed, or left out where `value` is ...."""
    data = json.loads(device("cpu").to_json())
    *parents, last = path.split(".")
    part = data
    for parent in parents:
        part = part[parent]
    if value is ...:
        del part[last]
    else:
        part[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("memory", ..., "device figure 'memory' is missing"),
        ("link.latency", ..., "device figure 'link.latency' is missing"),
        ("flops.float32", ..., "device figure 'flops.float32' is missing"),
        ("color", 1, "unknown device figure 'color' (known: name, flops, "),
        ("network.hops", 1, "unknown device figure 'network.hops' (known: bandwidth, latency)"),
        ("flops.real", 1.0, "device figure 'flops.real' names no dtype of torch"),
        ("memory", -1, "device figure 'memory' must be a number above 0 (-1 given)"),
        ("memory_bandwidth", 0, "'memory_bandwidth' must be a number above 0 (0 given)"),
        ("flops.float64", -5.0, "'flops.float64' must be a number above 0 (-5.0 given)"),
        ("link.bandwidth", "fast", "'link.bandwidth' must be a number above 0 ('fast' given)"),
        ("link.latency", -1e-6, "must be a number of at least 0 and at most 3600 (-1e-06 given)"),
        ("launch_overhead", True, "'launch_overhead' must be a number of at least 0 and at most"),
        ("launch_overhead", float("nan"), "device.launch_overhead must be a finite number (NaN"),
        ("efficiency.matmul", 1.5, "'efficiency.matmul' must be a number above 0 and at most 1"),
        ("name", 7, "device figure 'name' must be a string (7 given)"),
        ("devices_per_node", 0, "'devices_per_node' must be a number above 0 (0 given)"),
        ("devices_per_node", 2.5, "'devices_per_node' must be a whole number (2.5 given)"),
        ("efficiency.curves", [1], "'efficiency.curves' must be a JSON object ([1] given)"),
        ("efficiency.curves", {"matmul": {"any": [[1e3, 1.5]]}}, "curves.matmul.any' must be a nu"),
        ("efficiency.curves", {"matmul": {"any": []}}, "must have a pair of size and fraction"),
        ("efficiency.curves", {"matmul": {"any": [3]}}, "must be a list of pairs of size and frac"),
        ("efficiency.curves", {"other": {"any": [[1, "fast"]]}}, "above 0 and at most 1 ('fast'"),
        (
            "efficiency.curves",
            {"other": {"any": [[9, 0.1], [3, 0.1]]}},
            "must have ascending sizes",
        ),
        ("link", [1, 2], "device figure 'link' must be a JSON object ([1, 2] given)"),
        ("name", " ", "device figure 'name' must be a name (' ' given)"),
        ("memory", 1.5, "device figure 'memory' must be a whole number (1.5 given)"),
        ("flops.float32", 5e-324, "'flops.float32' must be a number above 0, from 1e-15 on (5e-"),
        ("link.latency", 1e5, "'link.latency' must be a number of at least 0 and at most 3600 (10"),
        ("multiprocessors", 1e300, "must be a number of at least 0 and at most 1e+30 (1e+300"),
        ("efficiency.curves", {"netwrok": {"any": [[1, 1]]}}, "curves.netwrok.any' names no kind"),
        ("efficiency.curves", {"link": {"fp61": [[1, 1]]}}, "curves.link.fp61' names no dtype"),
        ("efficiency.curves", {"link": {"any": [[1, 1e7]]}}, "above 0 and at most 1e+06 (1000000"),
    ],
)
def test_a_wrong_figure_is_refused_by_name(path: str, value: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        Device.from_json(changed(path, value))
    assert message in str(caught.value)


def test_bytes_may_be_written_with_an_exponent() -> None:
    assert type(Device.from_json(changed("memory", 8e10)).memory) is int  # as reports read it


def test_a_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(InputError, match="the device is no JSON"):
        Device.from_json("flops: many")


def test_sources_may_be_left_out() -> None:
    assert Device.from_json(changed("sources", ...)) == device("cpu")


def test_a_node_has_eight_devices_unless_the_file_says_otherwise() -> None:
    assert Device.from_json(changed("devices_per_node", ...)).devices_per_node == 8
    assert Device.from_json(changed("devices_per_node", 4)).devices_per_node == 4


def test_a_device_is_loaded_from_a_file_by_the_class_and_by_the_mesh(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(changed("name", "mine"))
    assert pc.Device.load(path) == pc.Device.load(str(path))
    for given in (path, str(path)):
        mesh = pc.Mesh(device=given)
        assert mesh.hardware.name == "mine"
        assert mesh == pc.Mesh(device=pc.Device.load(path))


def test_a_file_is_read_when_the_mesh_is_made_and_not_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(changed("name", "mine"))
    mesh = pc.Mesh(device=path)
    path.unlink()
    assert mesh.hardware.name == "mine"


@pytest.mark.parametrize(
    ("path", "value"), [("memory", ...), ("memory", -1), ("memory", "much"), ("speed", 1)]
)
def test_a_wrong_file_is_refused_by_field_and_file(tmp_path: Path, path: str, value: Any) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(changed(path, value))
    for load in (lambda: Device.load(file), lambda: pc.Mesh(device=str(file))):
        with pytest.raises(InputError) as caught:
            load()
        assert str(file) in str(caught.value)
        assert f"'{path}'" in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none\.json"):
        pc.Mesh(device=tmp_path / "none.json")
