"""The time of operators on a device: each is bound by its arithmetic or by its memory traffic.

The roofline model of Williams, Waterman and Patterson (2009), with a fraction of each peak that is
reached in practice, by size where the device knows that, and an overhead per kernel.

>>> import torch
>>> from parcompiler.device import device
>>> product = Operation("aten.mm.default", "matmul", flops=2e9, nbytes=1e6, dtype=torch.float32)
>>> round(seconds([product], device("cpu")), 4)
0.0186
"""

from __future__ import annotations

from collections.abc import Iterable

from parcompiler.cost import collective, tiles
from parcompiler.cost.operation import EXCHANGE, Operation
from parcompiler.device import Device


def seconds(operations: Iterable[Operation], device: Device) -> float:
    """The time in s of `operations` one after another on `device`."""
    return sum(operation_seconds(operation, device) for operation in operations)


def operation_seconds(operation: Operation, device: Device) -> float:
    """max(computed / (peak · efficiency), bytes / (bandwidth · efficiency)) + overhead, in s.

    The efficiency of an operator is that of its curve, else of its kind; for matrix products on a
    device with a known number of multiprocessors, times the share that their tiles reach. A
    collective takes the time of the links between its ranks (see `collective`), less that of the
    operations beside it.
    """
    reached = device.efficiency
    if operation.kind == EXCHANGE:
        return max(0.0, exchange_seconds(operation, device) - seconds(operation.beside, device))
    bandwidth = device.memory_bandwidth * reached.traffic(operation.nbytes)
    computed = operation.computed / (device.peak(operation.dtype) * _fraction(operation, device))
    return max(computed, operation.nbytes / bandwidth) + device.launch_overhead


def _fraction(operation: Operation, device: Device) -> float:
    """The share of the peak that the arithmetic of an operation reaches."""
    dtype = device.named(operation.dtype)
    name, kind, flops = operation.name, operation.kind, operation.computed
    measured = device.efficiency.arithmetic(name, kind, dtype, flops)
    if measured is not None:
        return measured
    fraction, number = device.efficiency.of(operation.kind), device.multiprocessors
    if operation.products and number:
        peak = device.peak(operation.dtype) * fraction / number
        return fraction * tiles.reached(operation.products, number, peak)
    return fraction


def hidden_seconds(operations: Iterable[Operation], device: Device) -> float:
    """The time in s of the collectives among `operations` that operations beside them hide."""
    return sum(
        min(exchange_seconds(one, device), seconds(one.beside, device))
        for one in operations
        if one.beside
    )


def exchange_seconds(operation: Operation, device: Device) -> float:
    """The time in s of a collective of the tensor axis by itself, or of a message."""
    action, nbytes, n = operation.name, operation.nbytes, operation.ranks
    if n < 2:
        return device.link.seconds(nbytes / device.efficiency.exchange(action, nbytes))
    whole = collective.whole(action, nbytes, n)
    return collective.seconds(
        action, whole, collective.neighbours(n, device, operation.apart), device
    )
