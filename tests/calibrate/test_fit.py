"""Seconds of an imagined machine give its figures back."""

import dataclasses

import pytest
import torch

from parcompiler.calibrate.catalogue import LAYER, LONE, ladders
from parcompiler.calibrate.exchange import ExchangeTimes, RankExchange
from parcompiler.calibrate.fit import WorkTime, fit
from parcompiler.calibrate.work import Workload
from parcompiler.cost import Operation, seconds
from parcompiler.device import Device, Link, device
from tests.calibrate.machines import CORE

LONE_SECONDS, LAYER_SECONDS = 1e-6, 5e-6  # of a kernel
SPEED, COPIED = 1e9, 1e10  # FLOP/s and B/s of the imagined machine, where sizes are large
NOTHING = ExchangeTimes()


def rate(work: Workload, size: float) -> float:
    """Slow with small sizes, and half as fast in float64."""
    fastest = COPIED if work.kind == "copy" else SPEED
    return fastest * size / (size + 1e5) / (work.dtype.itemsize / 4)


def imagined(work: Workload) -> WorkTime:
    counted = work.counted()
    kernels = {LONE: LONE_SECONDS, LAYER: LAYER_SECONDS}
    if work.name in kernels:
        return WorkTime(work, counted, kernels[work.name] * counted.kernels)
    size = counted.nbytes if work.kind == "copy" else counted.flops
    busy = counted.calls * size / rate(work, size)
    return WorkTime(work, counted, busy + LONE_SECONDS * counted.kernels)


WORKS = [rung for ladder in ladders([torch.float32, torch.float64], most=4) for rung in ladder]
MEASURED = [imagined(work) for work in WORKS]


@pytest.fixture(scope="module")
def found() -> Device:
    return fit(MEASURED, NOTHING, CORE, "cpu-imagined", device("cpu"), nominal=False)


def test_peaks_and_overhead_are_those_of_the_machine(found: Device) -> None:
    assert found.peak(torch.float32) == pytest.approx(SPEED, rel=0.01)
    assert found.peak(torch.float64) == pytest.approx(SPEED / 2, rel=0.01)
    assert found.launch_overhead == pytest.approx(LAYER_SECONDS)
    assert (found.memory, found.devices_per_node, found.name) == (2**34, 4, "cpu-imagined")


@pytest.mark.parametrize("kind", ["matmul", "attention", "convolution", "aten.gelu.default"])
def test_the_roofline_says_of_each_size_what_was_measured(found: Device, kind: str) -> None:
    own = [one for one in MEASURED if one.work.kind == kind]
    assert own
    for one in own:
        operation = Operation(kind, kind, one.counted.flops, 0.0, one.work.dtype)
        busy = seconds([operation], found) - found.launch_overhead
        measured = one.seconds - LONE_SECONDS * one.counted.kernels
        assert busy * one.counted.calls == pytest.approx(measured)


def test_the_longest_copy_is_the_bandwidth(found: Device) -> None:
    copies = [one for one in MEASURED if one.work.kind == "copy"]
    longest = copies[-1].counted.nbytes
    assert found.memory_bandwidth == pytest.approx(rate(copies[-1].work, longest))
    assert found.efficiency.traffic(longest) == found.efficiency.bandwidth == 1
    assert found.efficiency.traffic(1.0) < 0.5


def test_an_operator_without_a_curve_is_like_the_others(found: Device) -> None:
    other = Operation("aten.erf.default", "other", 65536.0, 0.0, torch.float32)
    gelu = dataclasses.replace(other, name="aten.gelu.default")
    assert seconds([other], found) == pytest.approx(seconds([gelu], found), rel=0.05)


def test_a_work_that_is_all_overhead_says_nothing() -> None:
    short = [
        dataclasses.replace(one, seconds=1.1 * LONE_SECONDS * one.counted.kernels)
        if one.work.kind == "matmul"
        else one
        for one in MEASURED
    ]
    like = device("cpu")
    found = fit(short, NOTHING, CORE, "cpu-imagined", like, nominal=False)
    assert not [curve for curve in found.efficiency.curves if curve.kind == "matmul"]
    assert found.efficiency.matmul == like.efficiency.matmul


def test_what_is_not_measured_is_as_the_other_device_and_says_so(found: Device) -> None:
    like, sources = device("cpu"), dict(found.sources)
    assert (found.link, found.network) == (like.link, like.network)
    assert found.peak(torch.bfloat16) == like.peak(torch.bfloat16)
    assert sources["link.latency"].startswith("not measured, as cpu: measured with gloo")
    assert sources["flops.bfloat16"].startswith("not measured, as cpu: ")
    assert sources["flops.float32"].startswith("measured on core, threads: 1, torch ")


def test_every_figure_has_a_source(found: Device) -> None:
    named = {name.partition(".")[0] for name, _ in found.sources}
    assert named == {item.name for item in dataclasses.fields(found)} - {
        "name",
        "sources",
        "multiprocessors",
        "host",  # a CPU has none
        "host_memory",
    }
    assert Device.from_json(found.to_json()) == found


def test_a_known_gpu_keeps_the_peaks_of_its_vendor() -> None:
    h100 = device("h100")
    found = fit(MEASURED, NOTHING, CORE, "h100-measured", h100, nominal=True)
    assert (found.flops, found.memory_bandwidth) == (h100.flops, h100.memory_bandwidth)
    product = next(one for one in reversed(MEASURED) if one.work.kind == "matmul")
    operation = Operation("", "matmul", product.counted.flops, 0.0, product.work.dtype)
    busy = seconds([operation], found) - found.launch_overhead
    assert 3 * busy == pytest.approx(product.seconds - 3 * LONE_SECONDS)


def told(action: str, place: str, seconds: dict[int, float]) -> list[tuple[RankExchange, float]]:
    return [(RankExchange(action, place, nbytes, (0, 1)), s) for nbytes, s in seconds.items()]


def test_latency_is_of_the_shortest_message_and_bandwidth_of_the_longest() -> None:
    messages = told("message", "link", {1: 0.5, 100: 0.75, 1000: 10.5})
    far = told("message", "network", {1: 1.0, 1000: 101.0})
    exchanged = ExchangeTimes((*messages, *far))
    assert exchanged.link("link") == Link(bandwidth=100.0, latency=0.5)
    assert exchanged.link("network") == Link(bandwidth=10.0, latency=1.0)


def test_a_collective_takes_on_the_found_device_what_it_took() -> None:
    messages = told("message", "link", {1: 0.5, 1000: 10.5})
    collectives = told("all-reduce", "link", {1: 0.51, 100: 4.5, 1000: 20.5})
    exchanged = ExchangeTimes((*messages, *collectives))
    found = fit(MEASURED, exchanged, CORE, "cpu-imagined", device("cpu"), nominal=False)
    assert dict(found.sources)["link.bandwidth"].startswith("measured on core")
    assert dict(found.sources)["network.bandwidth"].startswith("not measured")
    for exchange, took in collectives[1:]:  # the first is all latency
        operation = Operation("all-reduce", "exchange", 0.0, exchange.sent, torch.float32)
        assert seconds([operation], found) == pytest.approx(took)
