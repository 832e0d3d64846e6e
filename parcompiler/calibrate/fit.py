"""Measured seconds -> the figures of a device.

A kernel takes overhead + flops / (peak · fraction). The overhead of a single kernel is measured
separately and subtracted; the rest gives a rate. The peak of a dtype is the fastest rate (or the
vendor's, where the device is known), the fraction at a size is the rate there over the peak.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parcompiler.calibrate.catalogue import COPY, LAYER, LONE
from parcompiler.calibrate.exchange import ExchangeTimes
from parcompiler.calibrate.machine import Machine
from parcompiler.calibrate.work import Counted, Workload
from parcompiler.device import Device
from parcompiler.efficiency import ANY, Curve, Efficiency

KINDS = ("matmul", "attention", "convolution")
LEAST_SHARE = 1 / 3  # of the time that must remain without overhead; less is mostly noise


@dataclass(frozen=True, slots=True)
class WorkTime:
    """A workload, its counts in the cost model, and its seconds."""

    work: Workload
    counted: Counted
    seconds: float


@dataclass(frozen=True, slots=True)
class Rate:
    """`rate` FLOP/s (or B/s) of one call of `size` FLOPs (or bytes)."""

    kind: str
    dtype: str
    size: float
    rate: float


def fit(
    measured: Sequence[WorkTime],
    exchanged: ExchangeTimes,
    machine: Machine,
    name: str,
    like: Device,
    nominal: bool,
) -> Device:
    """The device; figures that were not measured are those of `like`. `nominal` takes its peaks as
    well."""
    overheads = {one.work.name: one.seconds / one.counted.kernels for one in measured}
    lone = overheads.get(LONE, 0.0)
    rates = [rate for one in measured if (rate := _rate(one, lone)) is not None]
    arithmetic = [rate for rate in rates if rate.kind != COPY]
    copies = [rate for rate in rates if rate.kind == COPY]
    peaks = _peaks(arithmetic, like, nominal)
    bandwidth = like.memory_bandwidth
    if copies:
        longest = max(copies, key=lambda rate: rate.size).rate  # beyond all caches
        bandwidth = max(longest, bandwidth) if nominal else longest
    efficiency = _efficiency(arithmetic, copies, peaks, bandwidth, like.efficiency)
    link = exchanged.link("link") or like.link
    collectives = tuple(
        Curve(action, ANY, tuple(points)) for action, points in exchanged.reached(link).items()
    )
    device = Device(
        name=name,
        flops=tuple(peaks.items()),
        memory_bandwidth=bandwidth,
        memory=machine.memory,
        launch_overhead=overheads.get(LAYER, like.launch_overhead),
        efficiency=dataclasses.replace(efficiency, curves=(*efficiency.curves, *collectives)),
        link=link,
        network=exchanged.link("network") or like.network,
        devices_per_node=machine.devices_per_node,
        host=like.host,
        host_memory=like.host_memory,
    )
    return dataclasses.replace(device, sources=_sources(device, like, machine, rates, exchanged))


def _rate(one: WorkTime, lone: float) -> Rate | None:
    """The rate without the overhead; None if the overhead dominates."""
    if one.work.name in (LONE, LAYER):
        return None
    net = one.seconds - lone * one.counted.kernels
    if net < LEAST_SHARE * one.seconds:
        return None
    size = one.counted.nbytes if one.work.kind == COPY else one.counted.flops
    dtype = str(one.work.dtype).removeprefix("torch.")
    return Rate(one.work.kind, dtype, size, size * one.counted.calls / net)


def _peaks(rates: Sequence[Rate], like: Device, nominal: bool) -> dict[str, float]:
    """The peak by dtype: the fastest rate; that of `like` if nothing was measured."""
    peaks: dict[str, float] = {}
    for rate in rates:
        peaks[rate.dtype] = max(peaks.get(rate.dtype, 0.0), rate.rate)
    for dtype, peak in like.flops:
        if nominal or dtype not in peaks:
            peaks[dtype] = max(peak, peaks.get(dtype, 0.0))
    return peaks


def _efficiency(
    rates: Sequence[Rate],
    copies: Sequence[Rate],
    peaks: Mapping[str, float],
    bandwidth: float,
    like: Efficiency,
) -> Efficiency:
    """Fractions of the peaks: curves by size, and for each kind the fraction at the largest
    size."""
    shares = [dataclasses.replace(rate, rate=rate.rate / peaks[rate.dtype]) for rate in rates]
    kinds = sorted({(rate.kind, rate.dtype) for rate in shares})
    curves = [
        Curve(kind, dtype, _points(r for r in shares if (r.kind, r.dtype) == (kind, dtype)))
        for kind, dtype in kinds
    ]
    curves += _others(curves)
    ends = {
        kind: [curve.points[-1][1] for curve in curves if curve.kind == kind]
        for kind in (*KINDS, "other")
    }
    scalars: dict[str, Any] = {k: statistics.median(last) for k, last in ends.items() if last}
    if copies:
        points = _points(dataclasses.replace(r, rate=r.rate / bandwidth) for r in copies)
        curves.append(Curve("bandwidth", ANY, points))
        scalars["bandwidth"] = min(1.0, points[-1][1])
    return dataclasses.replace(like, **scalars, curves=tuple(curves))


def _points(rates: Iterable[Rate]) -> tuple[tuple[float, float], ...]:
    """Pairs of size and rate, ascending; of two rates at one size the faster."""
    return tuple(dict(sorted((rate.size, rate.rate) for rate in rates)).items())


def _others(curves: Sequence[Curve]) -> list[Curve]:
    """Curves for operators without their own: medians of the others' curves."""
    others = []
    for dtype in sorted({curve.dtype for curve in curves}):
        operators = [c for c in curves if c.dtype == dtype and c.kind.startswith("aten.")]
        sizes = sorted({size for curve in operators for size, _ in curve.points})
        points = ((size, statistics.median(c.at(size) for c in operators)) for size in sizes)
        if operators:
            others.append(Curve("other", dtype, tuple(points)))
    return others


def _sources(
    device: Device, like: Device, machine: Machine, rates: Sequence[Rate], exchanged: ExchangeTimes
) -> tuple[tuple[str, str], ...]:
    """The source of each figure: measured here, or that of `like`."""
    source = f"measured on {machine.label}"
    kept = dict(like.sources)
    dtypes, kinds = {rate.dtype for rate in rates}, {rate.kind for rate in rates}

    def of(figure: str, measured: bool, how: str) -> tuple[str, str]:
        other = f"not measured, as {like.name}: {kept.get(figure, 'no source')}"
        return figure, f"{source}: {how}" if measured else other

    fastest = "the fastest of products, attention and convolutions"
    known = dict(like.flops)
    sources = [
        of(f"flops.{dtype}", dtype in dtypes and known.get(dtype) != peak, fastest)
        for dtype, peak in device.flops
    ]
    copied = COPY in kinds
    largest = "the largest size of each dtype, the median"
    sources += [of(f"efficiency.{kind}", kind in kinds, largest) for kind in KINDS]
    small = any(kind.startswith("aten.") for kind in kinds)
    sources += [
        of("efficiency.other", small, "the largest size of each dtype, operators' median"),
        of("efficiency.bandwidth", copied, "the longest copy"),
        of("memory_bandwidth", copied and device.memory_bandwidth != like.memory_bandwidth,
           "the longest copy"),
        of("launch_overhead", device.launch_overhead != like.launch_overhead,
           "a small layer forward and backward, divided by its kernels"),
        ("memory", f"{machine.model}: what one of {machine.devices_per_node} ranks has"),
        ("devices_per_node", f"{machine.model}: counted"),
    ]  # fmt: skip
    if device.efficiency.curves:
        sources.append(("efficiency.curves", f"{source}: by size, without launching"))
    fabric = f"measured on {machine.fabric}: messages of growing sizes between two ranks"
    for place in ("link", "network"):
        for figure in (f"{place}.latency", f"{place}.bandwidth"):
            sources.append((figure, fabric) if exchanged.link(place) else of(figure, False, ""))
    if device.host is not None:
        sources += [of(f"host.{figure}", False, "") for figure in ("latency", "bandwidth")]
    return tuple(sources)
