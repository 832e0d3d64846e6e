"""Measuring this machine: the file that comes out, interruptions, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import parcompiler as pc
from parcompiler.calibrate import calibrate, measure
from parcompiler.calibrate.machine import find_machine
from parcompiler.calibrate.measure import checked, recognized
from parcompiler.calibrate.work import seconds_of
from parcompiler.cost import seconds
from parcompiler.models import gpt
from parcompiler.runtime import rank_device
from tests.calibrate.machines import CORE, gpu
from tests.cost.blocks import GptLayer
from tests.cost.capture import capture

TINY: dict[str, Any] = {"sizes": 1, "seconds": 1e-4, "dtypes": ["float32"]}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibrate") / "mine.json"
    calibrate(path, **TINY)
    return path


def refuse(*_: object) -> float:
    pytest.fail("nothing is to be measured")


def count(counted: list[int]) -> float:
    counted.append(1)
    return 0.002


def test_the_file_is_a_device_that_the_mesh_takes(written: Path) -> None:
    device = pc.Mesh(device=written).hardware
    assert device.name == "cpu-measured"
    assert device.launch_overhead > 0
    assert dict(device.sources)["launch_overhead"].startswith("measured on ")
    assert not list(written.parent.glob(".*"))


def test_a_plan_for_a_measured_cpu_runs_on_the_cpu(written: Path) -> None:
    config = gpt.Config(layers=2, heads=2, hidden=16, vocabulary=32, sequence=8)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    mesh = pc.Mesh(pipeline=2, device=written)
    program = pc.compile(gpt.GPT(config), mesh, (tokens, tokens), progress=False)
    assert program.plan.mesh.device == "cpu-measured"
    assert rank_device("cpu-measured") == torch.device("cpu")
    again = pc.compile(gpt.GPT(config), mesh, (tokens, tokens), plan=program.plan, progress=False)
    assert again.plan == program.plan


def test_a_second_run_measures_nothing_again(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = written.read_text()
    monkeypatch.setattr(measure, "seconds_of", refuse)
    device = calibrate(written, **TINY)
    assert device is not None
    assert device.to_json() == written.read_text() == before


def interrupted(after: int) -> Iterator[float]:
    yield from [0.001] * after
    raise KeyboardInterrupt


def test_an_interrupted_run_keeps_what_it_measured_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.json"
    path.write_text("the old file")
    times = interrupted(after=4)
    monkeypatch.setattr(measure, "seconds_of", lambda *_: next(times))
    with pytest.raises(KeyboardInterrupt) as caught:
        calibrate(path, **TINY)
    kept = tmp_path / "mine.json.measurements.jsonl"
    assert f"kept in {kept}: run again to go on" in caught.value.__notes__[0]
    assert len(kept.read_text().splitlines()) == 4
    assert path.read_text() == "the old file"

    counted: list[int] = []
    monkeypatch.setattr(measure, "seconds_of", lambda *_: count(counted))
    calibrate(path, **TINY)
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [line["seconds"] for line in lines] == [0.001] * 4 + [0.002] * len(counted)
    assert len({line["work"] for line in lines}) == len(lines)
    assert pc.Device.load(path).name == "cpu-measured"


def test_a_fresh_run_measures_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, counted = tmp_path / "mine.json", list[int]()
    monkeypatch.setattr(measure, "seconds_of", lambda *_: count(counted))
    calibrate(path, **TINY)
    first = len(counted)
    calibrate(path, **TINY, fresh=True)
    assert len(counted) == 2 * first > 0


def test_a_ladder_ends_before_a_call_that_would_take_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "seconds_of", lambda *_: 1.0)
    calibrate(tmp_path / "mine.json", dtypes=["float32"], seconds=0.2)
    kept = (tmp_path / "mine.json.measurements.jsonl").read_text().splitlines()
    products = [line for line in kept if '"matmul ' in line]
    assert len(products) == 1


def test_threads_are_as_before_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()

    def noting(*_: object) -> float:
        seen.append(torch.get_num_threads())
        return 1.0

    monkeypatch.setattr(measure, "seconds_of", noting)
    calibrate(tmp_path / "mine.json", threads=2, **TINY)
    assert (set(seen), torch.get_num_threads()) == ({2}, 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seconds": 0}, "seconds of a measurement must be a number above 0 (0 given)"),
        ({"seconds": float("inf")}, "must be a number above 0 (inf given)"),
        ({"sizes": 0}, "the number of sizes must be a positive integer (0 given)"),
        ({"threads": 0}, "the number of threads must be a positive integer (0 given)"),
        ({"dtypes": ["int64"]}, "calibrate measures float32, float64, bfloat16, float16 ('int64'"),
        ({"dtypes": ["fast"]}, "('fast' given)"),
        ({"name": "h100"}, "the name of this device must begin with 'cpu-' ('h100' given)"),
        ({"name": "cpu"}, "the catalogue has a device 'cpu' already"),
        ({"name": "cpu-a/b"}, "has letters, digits, '.', '_' and '-' ('cpu-a/b' given)"),
        ({"like": "abacus"}, "no device 'abacus' in the catalogue"),
        ({"like": "none.json"}, "cannot read none.json"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(measure, "seconds_of", refuse)
    with pytest.raises(pc.InputError) as caught:
        calibrate(tmp_path / "mine.json", **{**TINY, **wrong})
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "seconds_of", refuse)
    with pytest.raises(pc.InputError, match="it is a folder"):
        calibrate(tmp_path, **TINY)
    with pytest.raises(pc.InputError, match="there is no folder"):
        calibrate(tmp_path / "none" / "mine.json", **TINY)


@pytest.mark.parametrize(
    ("model", "memory", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 80, "h100"),
        ("NVIDIA H100 PCIe", 80, None),
        ("NVIDIA H100 NVL", 94, None),
        ("NVIDIA H200", 141, "h200"),
        ("NVIDIA B200", 180, "b200"),
        ("NVIDIA GB200", 186, None),
        ("NVIDIA L40S", 48, "l40s"),
        ("NVIDIA L40", 48, None),
        ("NVIDIA A100-SXM4-80GB", 80, "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40g"),
        ("NVIDIA A100-PCIE-40GB", 40, None),
        ("AMD Instinct MI300X", 192, "mi300x"),
    ],
)
def test_a_gpu_of_the_catalogue_is_recognized(model: str, memory: int, name: str | None) -> None:
    machine = gpu(model, memory * 10**9)
    assert recognized(machine) == name
    if name is not None:
        request = checked(machine, "mine.json", None, None, None, 0.1)
        assert (request.name, request.like.name, request.nominal) == (
            f"{name}-measured",
            name,
            True,
        )


def test_an_unknown_gpu_needs_a_device_that_it_is_like() -> None:
    machine = gpu("NVIDIA H100 PCIe")
    with pytest.raises(pc.InputError, match="say with like= which device"):
        checked(machine, "mine.json", None, None, None, 0.1)
    request = checked(machine, "mine.json", None, "l40s", None, 0.1)
    assert (request.name, request.nominal) == ("nvidia-h100-pcie-measured", False)
    with pytest.raises(pc.InputError, match="must not be that of a CPU"):
        checked(machine, "mine.json", "cpu-fast", "l40s", None, 0.1)


def test_a_core_is_no_gpu() -> None:
    assert recognized(CORE) is None


@pytest.mark.sweep
def test_a_layer_takes_about_what_the_calibrated_device_predicts(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    calibrate(path, dtypes=["float32"])
    x = torch.randn(4, 256, 512, requires_grad=True)
    layer = GptLayer(512, 8)
    cost = capture(layer, x).cost()
    predicted = seconds((*cost.forward, *cost.backward), pc.Device.load(path))
    operands = [x, *layer.parameters()]
    measured = seconds_of(
        lambda: torch.autograd.grad(layer(x), operands, torch.ones_like(x)),
        1.0,
        clock=find_machine().clock,
    )
    assert 0.5 < predicted / measured < 2
