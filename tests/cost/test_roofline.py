"""Seconds on a device, and bytes per parameter."""

import dataclasses

import pytest
import torch

from parcompiler.cost import OPTIMIZERS, Operation, bytes_per_parameter, seconds
from parcompiler.device import Device, Efficiency, Link
from parcompiler.errors import InputError

DEVICE = Device(
    name="toy",
    flops=(("float32", 100.0), ("bfloat16", 400.0)),
    memory_bandwidth=20.0,
    memory=1000,
    launch_overhead=0.25,
    efficiency=Efficiency(matmul=0.5, attention=0.25, convolution=0.2, other=0.1, bandwidth=0.5),
    link=Link(bandwidth=8.0, latency=1.0),
    network=Link(bandwidth=2.0, latency=3.0),
)


def operation(kind: str, flops: float, nbytes: float, dtype: torch.dtype) -> Operation:
    return Operation("test", kind, flops, nbytes, dtype)


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        ("matmul", torch.float32, 100 / 50),
        ("matmul", torch.bfloat16, 100 / 200),
        ("attention", torch.float32, 100 / 25),
        ("convolution", torch.float32, 100 / 20),
        ("other", torch.float32, 100 / 10),
        ("other", torch.int64, 100 / 10),
    ],
)
def test_arithmetic_is_bound_by_the_peak_that_its_kind_reaches(
    kind: str, dtype: torch.dtype, expected: float
) -> None:
    assert seconds([operation(kind, 100, 1, dtype)], DEVICE) == expected + 0.25


def test_traffic_is_bound_by_the_bandwidth() -> None:
    assert seconds([operation("matmul", 1, 40, torch.float32)], DEVICE) == 40 / 10 + 0.25


def test_operations_run_one_after_another_and_each_pays_its_launch() -> None:
    product = operation("matmul", 100, 1, torch.float32)
    copy = operation("other", 0, 40, torch.float32)
    assert seconds([product, copy, copy], DEVICE) == 2 + 4 + 4 + 3 * 0.25
    assert seconds([], DEVICE) == 0


def test_a_faster_memory_does_not_speed_up_arithmetic() -> None:
    faster = dataclasses.replace(DEVICE, memory_bandwidth=1e9)
    product = operation("matmul", 100, 1, torch.float32)
    assert seconds([product], faster) == seconds([product], DEVICE)


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    assert DEVICE.link.seconds(16) == 1 + 16 / 8
    assert DEVICE.network.seconds(0) == 3


def test_a_parameter_costs_itself_its_gradient_and_its_optimizer_states() -> None:
    sizes = {name: bytes_per_parameter(name, torch.float32) for name in OPTIMIZERS}
    assert sizes == {"adamw": 16, "none": 8, "sgd": 8, "sgd-momentum": 12}
    assert bytes_per_parameter("adamw", torch.float64) == 32
    assert bytes_per_parameter("adamw", torch.bfloat16, trainable=False) == 2


def test_an_unknown_optimizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'lion' \(known: adamw, none, sgd, sgd-momentum\)"):
        bytes_per_parameter("lion", torch.float32)
