"""Seconds on a device, and bytes per parameter."""

import dataclasses

import pytest
import torch

from parcompiler.cost import OPTIMIZERS, Operation, bytes_per_parameter, seconds
from parcompiler.cost.operation import EXCHANGE
from parcompiler.device import Device, Efficiency, Link
from parcompiler.efficiency import Curve
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
    assert sizes == {
        "adagrad": 12,
        "adamw": 16,
        "muon": 12,
        "none": 8,
        "sgd": 8,
        "sgd-momentum": 12,
    }
    assert bytes_per_parameter("adamw", torch.float64) == 32
    assert bytes_per_parameter("adamw", torch.bfloat16, trainable=False) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_and_the_states_of_16_bits_are_float32(dtype: torch.dtype) -> None:
    sizes = {name: bytes_per_parameter(name, dtype, masters=True) for name in OPTIMIZERS}
    assert sizes == {
        "adagrad": 14,
        "adamw": 18,
        "muon": 14,
        "none": 10,
        "sgd": 10,
        "sgd-momentum": 14,
    }
    assert bytes_per_parameter("adamw", dtype) == 8
    assert bytes_per_parameter("adamw", dtype, trainable=False, masters=True) == 2


def test_an_unknown_optimizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        InputError, match=r"'lion' \(known: adagrad, adamw, muon, none, sgd, sgd-momentum\)"
    ):
        bytes_per_parameter("lion", torch.float32)


def on(*curves: Curve) -> Device:
    """The toy with efficiencies by size."""
    return dataclasses.replace(
        DEVICE, efficiency=dataclasses.replace(DEVICE.efficiency, curves=curves)
    )


def test_a_curve_says_the_fraction_by_size_and_dtype() -> None:
    device = on(Curve("matmul", "float32", ((10, 0.1), (1000, 0.5))))
    small, middle, large = (operation("matmul", n, 0, torch.float32) for n in (1, 100, 10_000))
    assert seconds([small], device) == 1 / 10 + 0.25
    assert seconds([middle], device) == pytest.approx(100 / 30 + 0.25)
    assert seconds([large], device) == 10_000 / 50 + 0.25
    other = operation("matmul", 100, 0, torch.bfloat16)
    assert seconds([other], device) == seconds([other], DEVICE)


def test_a_dtype_without_a_peak_has_peak_and_curve_of_float32() -> None:
    device = on(Curve("other", "float32", ((1, 0.2),)))
    assert seconds([operation("other", 100, 0, torch.int64)], device) == 100 / 20 + 0.25


def test_the_curve_of_an_operator_goes_before_that_of_its_kind() -> None:
    kind, own = Curve("other", "any", ((1, 0.1),)), Curve("aten.gelu.default", "any", ((1, 0.5),))
    gelu = Operation("aten.gelu.default", "other", 100, 0, torch.float32)
    assert seconds([gelu], on(kind, own)) == 100 / 50 + 0.25
    assert seconds([gelu], on(kind)) == 100 / 10 + 0.25


def test_short_traffic_may_beat_the_memory_from_within_a_cache() -> None:
    device = on(Curve("bandwidth", "any", ((40, 2.0), (4000, 0.5))))
    assert seconds([operation("other", 0, 40, torch.float32)], device) == 40 / 40 + 0.25


def test_a_collective_reaches_its_part_of_the_link() -> None:
    device = on(Curve("all-reduce", "any", ((16, 0.5),)))
    exchange = Operation("all-reduce", EXCHANGE, 0.0, 16, torch.float32)
    assert seconds([exchange], device) == 1 + 16 / 4
    assert seconds([exchange], DEVICE) == DEVICE.link.seconds(16)


def test_curves_survive_the_round_trip_in_any_order() -> None:
    one, two = Curve("matmul", "any", ((1, 0.25),)), Curve("attention", "any", ((1, 0.5), (2, 1)))
    assert on(one, two) == on(two, one) == Device.from_json(on(one, two).to_json())


def test_two_curves_of_one_kind_and_dtype_are_refused() -> None:
    curve = Curve("matmul", "any", ((1, 0.25),))
    with pytest.raises(InputError, match="two curves of one kind and dtype"):
        on(curve, curve)
