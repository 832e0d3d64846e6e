"""Wrong values of any argument end in an error of ours, at once, with a message that fits a screen.

Each argument of the public functions gets each value of a table; what it takes, it may take.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler.report import Report

HUGE = 10**5000  # Python prints no integers of more than 4,300 digits


class Rude:
    """An object that neither prints nor compares."""

    def __repr__(self) -> str:
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = object.__hash__


VALUES: list[Any] = [
    None, True, 0, -1, 3.5, float("nan"), float("inf"), 10**6, 10**9, 10**18, HUGE, -HUGE,
    "", "x", "\ud800", "\x00", "a" * 100_000, b"x", [], (), {}, {1: 2}, {"*": "P"}, [0], [None],
    [HUGE], (1, 1, 1, 1), object(), Rude(), len, torch.tensor(1), torch.zeros(0), torch.ones(2, 4),
    numpy.array([1, 2]), set(), iter([1]), type, 1j, ["\x00"],
]  # fmt: skip


class Chain(nn.Module):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


@cache
def program() -> pc.Program:
    return pc.compile(Chain(), pc.Mesh(), (torch.ones(2, 4),), microbatches=2, progress=False)


def refused(call: Callable[..., object], *given: Any, **named: Any) -> None:
    """Whatever goes wrong in a call is an error of ours that can be shown."""
    try:
        call(*given, **named)
    except pc.ParcompilerError as error:
        assert 0 < len(str(error).encode(errors="backslashreplace")) < 4000


def every(call: Callable[..., object], *names: str) -> None:
    """Call with each value for each argument, and nothing for the others."""
    for name in names:
        for value in VALUES:
            refused(call, **{name: value})


def test_meshes_and_clusters() -> None:
    every(pc.Mesh, "pipeline", "tensor", "data", "device")
    every(pc.Mesh(2).rank, "pipeline", "tensor", "data")
    every(pc.Mesh(2).coordinate, "rank")
    every(lambda **given: list(pc.Cluster(**given).meshes()), "nodes", "devices_per_node", "device")


def test_devices() -> None:
    hardware = pc.Mesh(device="h100").hardware
    names = [item.name for item in dataclasses.fields(hardware)]
    every(lambda **given: dataclasses.replace(hardware, **given), *names)
    every(pc.Device.from_json, "text")
    for value in VALUES:
        if not isinstance(value, int):  # a number is an open file
            refused(pc.Device.load, value)


@pytest.mark.parametrize(
    "name",
    [
        "mesh", "microbatches", "schedule", "virtual_stages", "vocabulary", "stages", "sharding",
        "recompute", "precision", "optimizer", "costs", "passes", "plan", "microbatch",
    ],
)  # fmt: skip
def test_options_of_compile(name: str) -> None:
    options: dict[str, Any] = {"mesh": pc.Mesh(pipeline=2), "microbatches": 2, "progress": False}
    every(lambda **given: pc.compile(program(), **{**options, **given}), name)


def test_inputs_of_compile() -> None:
    options: dict[str, Any] = {"mesh": pc.Mesh(), "microbatches": 2, "progress": False}
    for value in VALUES:
        refused(pc.compile, value, inputs=(torch.ones(2, 4),), **options)
        refused(pc.compile, Chain(), inputs=value, **options)
    with pytest.raises(pc.InputError, match=r"the input '0' has no rows \(shape \(0, 4\)\)"):
        pc.compile(Chain(), inputs=(torch.zeros(0, 4),), **options)
    with pytest.raises(pc.InputError, match="the inputs are on the meta device, and the par"):
        pc.compile(Chain(), inputs=(torch.zeros(2, 4, device="meta"),), **options)


def edited(data: Any) -> Iterator[str]:
    """The JSON of `data` with each of its fields in turn replaced by each wrong value."""
    wrong: list[Any] = [None, -1, 10**30, 10**50, "\ud800x", [[]], float("nan")]
    for container, key in fields_of(data):
        before = container[key]
        for value in wrong:
            container[key] = value
            yield json.dumps(data)
        container[key] = before


def fields_of(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every field of nested objects, and the first item of every list."""
    keys: Any = list(data) if isinstance(data, dict) else [0] if data else []
    for key in keys if isinstance(data, dict | list) else []:
        yield data, key
        yield from fields_of(data[key])


TEXTS = [
    "", "{", "null", "1", "[]", "{}", "NaN", "1e400", "1" * 5000, "[" * 100_000,
    '{"a":' * 500 + "1" + "}" * 500, '{"a": 1, "a": 2}', '"\\ud800"', "\ufeff{}", "\x00",
]  # fmt: skip


def test_plans_and_reports_as_json() -> None:
    two = pc.compile(
        program(), pc.Mesh(pipeline=2), microbatches=2, schedule="search", progress=False
    )
    for text in [*TEXTS, *VALUES]:
        refused(pc.Plan.from_json, text)
        refused(Report.from_json, text)
    for text in edited(json.loads(two.plan.to_json())):
        refused(pc.Plan.from_json, text)
    for text in edited(json.loads(two.report().to_json())):
        refused(Report.from_json, text)
    for orders in ([], [""], ["", ""], ["0F0", "1F0"], ["9F999999999"] * 2):
        data = json.loads(two.plan.to_json()) | {"orders": orders}
        plan = pc.Plan.from_json(json.dumps(data))
        with pytest.raises(pc.ParcompilerError):
            pc.compile(program(), pc.Mesh(pipeline=2), plan=plan, progress=False)


def test_exported_folders(tmp_path: Path) -> None:
    folder = program().export(tmp_path / "out")
    for value in VALUES:
        refused(pc.load, value)
        refused(pc.load(folder).instructions, value)
        refused(program().instructions, value)
        if not isinstance(value, int):
            refused(pc.Schedule.from_csv, value)
    for path in (folder / name for name in ("plan.json", "report.json", "rank_0.py")):
        whole = path.read_bytes()
        for data in (b"", b"\xff\xfe", b"{", b"[" * 100_000, b"\x00", whole[: len(whole) // 3]):
            path.write_bytes(data)
            with pytest.raises(pc.InputError):
                loaded = pc.load(folder)
                loaded.report()
                loaded.instructions(0)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 10**6}, "microbatches may be at most 262,144 (1000000 given)"),
        ({"virtual_stages": 10**6}, "virtual_stages may be at most 262,144 (1000000 given)"),
        (
            {"microbatches": 200_000},
            "pipeline=2, virtual_stages=1 and microbatches=200,000 make a step of 400,000 forwards "
            "of stages (at most 262,144)",
        ),
        ({"microbatches": HUGE}, "(of type int, too large to print given)"),
    ],
)
def test_counts_are_bounded_before_anything_is_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pc.InputError) as caught:
        pc.compile(nn.Identity(), pc.Mesh(pipeline=2), (), **options)
    assert message in str(caught.value)


def test_meshes_are_bounded() -> None:
    with pytest.raises(pc.InputError, match=r"axis 'pipeline' may be at most 16,384 \(1000000 gi"):
        pc.Mesh(pipeline=10**6)
    with pytest.raises(pc.InputError, match=r"ranks of a mesh may be at most 1,048,576"):
        pc.Mesh(tensor=2**11, data=2**10)
    with pytest.raises(pc.InputError, match=r"devices of a cluster may be at most 1,048,576"):
        pc.Cluster(nodes=2**20, devices_per_node=8)


@pytest.mark.parametrize("name", ["H100", "A100-80G", "Cpu"])
def test_devices_are_named_in_any_case(name: str) -> None:
    assert pc.Mesh(device=name) == pc.Mesh(device=name.lower())
    assert pc.Mesh(pipeline=2, device=(name, name.lower())).is_uniform
    assert pc.Cluster(device=name).hardware.name == name.lower()
