"""The mesh of devices: the number of ranks along each axis, and the coordinates of ranks.

`tensor` is the fastest axis, then `context`, `data` and `pipeline`:

>>> mesh = Mesh(pipeline=2, tensor=2, data=2)
>>> mesh.size, mesh.coordinate(5), mesh.rank(pipeline=1, tensor=1)
(8, Coordinate(pipeline=1, data=0, tensor=1, context=0), 5)
>>> mesh = Mesh(data=2, context=4, expert=8)
>>> mesh.size, mesh.coordinate(5), mesh.rank(data=1, context=1)
(8, Coordinate(pipeline=0, data=1, tensor=0, context=1), 5)

The ranks at each pipeline coordinate may have a device of their own:

>>> [device.name for device in Mesh(pipeline=3, device=("h100", "h100", "l40s")).devices]
['h100', 'h100', 'l40s']

A cluster leaves the degrees open:

>>> [(m.pipeline, m.tensor, m.data) for m in Cluster(devices_per_node=4).meshes()]
[(1, 1, 4), (2, 1, 2), (4, 1, 1), (1, 2, 2), (2, 2, 1), (1, 4, 1)]
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import SupportsIndex, TypeGuard

from parcompiler.device import Device, device
from parcompiler.errors import InputError, shown
from parcompiler.grid import Coordinate, Grid

__all__ = ["Cluster", "Coordinate", "Mesh", "whole"]

AXES = "pipeline", "tensor", "context", "expert", "data"
MOST_RANKS = 2**20  # five times those of the largest clusters
MOST_STAGES = 2**14  # more than any model has layers

Named = str | PathLike[str] | Device  # a device: its name in the catalogue, its file, or itself


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks along the axes, and the devices that they compute on.

    Each of the `context` ranks has a piece of every sequence. `expert` ranks, each with a piece of
    the experts, are neighbours among the ranks of the data and context axes, and add no ranks.

    `device` is a name of the catalogue, a `Device`, or the path of a JSON file of one, which is
    read at once; or a sequence of these, one for each pipeline coordinate. Equal devices in a
    sequence are the same mesh as one device. Raises InputError when a degree is no positive
    integer, `expert` does not divide data · context, a device is unknown, its file describes none,
    or a sequence has another length than the pipeline or mixes CPUs with other devices.
    """

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    device: Named | Sequence[Named] = "cpu"
    context: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        """Refuse degrees that are no positive integers, and unknown devices."""
        for axis in AXES:
            most = MOST_STAGES if axis == "pipeline" else MOST_RANKS
            degree = positive(f"mesh axis {axis!r}", getattr(self, axis), most)
            object.__setattr__(self, axis, degree)
        positive("the number of ranks of a mesh", self.size, MOST_RANKS)
        if self.replicas % self.expert:
            message = (
                f"expert ranks are a part of the data and context ranks: expert={self.expert} must "
                f"divide data · context ({self.data} · {self.context} = {self.replicas})"
            )
            raise InputError(message)
        several = _each(self.device, self.pipeline) if _is_listed(self.device) else None
        object.__setattr__(self, "device", several or _read(self.device))

    @property
    def grid(self) -> Grid:
        """The number of ranks along each axis."""
        return Grid(self.pipeline, self.replicas, self.tensor, self.context, self.expert)

    @property
    def replicas(self) -> int:
        """The number of ranks that have the same parameters: data · context."""
        return self.data * self.context

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.grid.size

    @property
    def is_uniform(self) -> bool:
        """Whether all ranks have the same device."""
        return not isinstance(self.device, tuple)

    @property
    def hardware(self) -> Device:
        """The figures of the device of all ranks. Raises InputError where there are several."""
        if isinstance(self.device, tuple):
            message = f"the mesh has several devices ({', '.join(self.name)}): see mesh.devices"
            raise InputError(message)
        return _figures(self.device)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The figures of the device at each pipeline coordinate."""
        if isinstance(self.device, tuple):
            return tuple(map(_figures, self.device))
        return (self.hardware,) * self.pipeline

    @property
    def name(self) -> str | tuple[str, ...]:
        """The device's name, as in plans; for several devices, the name at each coordinate."""
        if isinstance(self.device, tuple):
            return tuple(one.name for one in self.devices)
        return self.hardware.name

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of `rank`. Raises InputError outside 0 … size - 1."""
        number = whole(rank)
        if number is None or not 0 <= number < self.size:
            message = (
                f"rank {shown(rank)} is not in the mesh ({self.size} ranks: 0 to {self.size - 1})"
            )
            raise InputError(message)
        at = self.grid.coordinate(number)
        return dataclasses.replace(at, data=self.grid.batch_of(at.data))

    def rank(self, pipeline: int = 0, data: int = 0, tensor: int = 0, context: int = 0) -> int:
        """The rank at a `pipeline`, `data`, `tensor` and `context` coordinate. Raises InputError
        when the mesh has no such place."""
        place = {"pipeline": pipeline, "data": data, "tensor": tensor, "context": context}
        for axis, coordinate in place.items():
            degree, index = getattr(self, axis), whole(coordinate)
            if index is None or not 0 <= index < degree:
                message = f"no {axis} coordinate {shown(coordinate)} in the mesh ({axis}={degree})"
                raise InputError(message)
        return self.grid.rank(pipeline, data * self.context + context, tensor)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices whose mesh is open: `nodes` of `devices_per_node` each.

    `device` is a single device as for a `Mesh`; the cluster's `devices_per_node` replaces the
    device's. Raises InputError when a count is no positive integer, the device is unknown, or its
    file describes none.
    """

    nodes: int = 1
    devices_per_node: int = 8
    device: Named = "cpu"

    def __post_init__(self) -> None:
        """Refuse counts that are no positive integers, and unknown devices."""
        for name in ("nodes", "devices_per_node"):
            count = positive(f"the cluster's {name!r}", getattr(self, name), MOST_RANKS)
            object.__setattr__(self, name, count)
        positive("the number of devices of a cluster", self.size, MOST_RANKS)
        if _is_listed(self.device):
            message = (
                "a cluster has one kind of device (several given): for several, take a Mesh with "
                "device=(...)"
            )
            raise InputError(message)
        hardware = Mesh(device=self.device).hardware
        if hardware.devices_per_node != self.devices_per_node:
            device = dataclasses.replace(hardware, devices_per_node=self.devices_per_node)
            object.__setattr__(self, "device", device)
        elif _is_file(self.device):
            object.__setattr__(self, "device", hardware)

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def hardware(self) -> Device:
        """The device's figures."""
        return Mesh(device=self.device).hardware

    def meshes(self) -> Iterator[Mesh]:
        """All meshes of all devices whose tensor ranks share a node; the simplest come first."""
        for tensor in divisors(self.devices_per_node):
            for pipeline in divisors(self.size // tensor):
                data = self.size // tensor // pipeline
                yield Mesh(pipeline=pipeline, tensor=tensor, data=data, device=self.device)


def divisors(count: int) -> list[int]:
    """The divisors of a count.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [number for number in range(1, count + 1) if count % number == 0]


def _each(values: Sequence[object], pipeline: int) -> Device | str | tuple[Device | str, ...]:
    """The devices of a sequence, or a single one if all are equal."""
    if len(values) != pipeline:
        message = (
            f"the mesh needs a device for each pipeline coordinate ({len(values)} given, "
            f"pipeline={pipeline})"
        )
        raise InputError(message)
    devices = tuple(map(_read, values))
    known = list(map(_figures, devices))
    if all(one == known[0] for one in known):
        return devices[0]
    if len({one.is_cpu for one in known}) > 1:
        names = ", ".join(one.name for one in known)
        message = f"ranks on CPUs and on other devices cannot exchange messages ({names} given)"
        raise InputError(message)
    return devices


def _read(value: object) -> Device | str:
    """A device, or the name of a known one; a file is read."""
    entry = Device.load(value) if _is_file(value) else value
    if isinstance(entry, str):
        entry = device(entry).name
    if not isinstance(entry, str | Device):
        kind = type(entry).__name__
        message = f"the mesh's device must be a name or a Device ({kind} given)"
        raise InputError(message)
    return entry


def _figures(value: object) -> Device:
    """The figures of a device that may be named."""
    return value if isinstance(value, Device) else device(str(value))


def _is_listed(value: object) -> TypeGuard[Sequence[object]]:
    """Whether several devices are given: a sequence other than a string."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_file(value: object) -> TypeGuard[str | PathLike[str]]:
    """Whether a device is given by its file: a path, or a string that ends in ".json"."""
    return isinstance(value, PathLike) or (isinstance(value, str) and value.endswith(".json"))


def positive(name: str, value: object, most: float = math.inf) -> int:
    """A count that the user gave, of any type of integers, as `int`.

    Raises InputError unless it is from 1 to `most`.
    """
    count = whole(value)
    if count is None or count < 1:
        message = f"{name} must be a positive integer ({shown(value)} given)"
        raise InputError(message)
    if count > most:
        message = f"{name} may be at most {most:,} ({shown(count)} given)"
        raise InputError(message)
    return count


def whole(value: object) -> int | None:
    """An integer of any type (of numpy, say) as `int`; None for anything else, `True` included.

    >>> whole(3), whole(3.0), whole(True)
    (3, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
