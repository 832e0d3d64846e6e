"""The mesh of devices: how many ranks along each axis, and which rank sits where.

`tensor` is the fastest axis, then `data`, then `pipeline`:

>>> mesh = Mesh(pipeline=2, tensor=2, data=2)
>>> mesh.size, mesh.coordinate(5), mesh.rank(pipeline=1, tensor=1)
(8, Coordinate(pipeline=1, data=0, tensor=1), 5)

A cluster leaves the degrees open:

>>> [(m.pipeline, m.tensor, m.data) for m in Cluster(devices_per_node=4).meshes()]
[(1, 1, 4), (2, 1, 2), (4, 1, 1), (1, 2, 2), (2, 2, 1), (1, 4, 1)]
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import SupportsIndex, TypeGuard

from parcompiler.device import Device, device
from parcompiler.errors import InputError
from parcompiler.grid import Coordinate, Grid

__all__ = ["Cluster", "Coordinate", "Mesh", "whole"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks along the pipeline, tensor and data axes, all on the same kind of device.

    `device` is a name of the catalogue, a `Device`, or the path of a JSON file of one, which is
    read at once. Raises InputError when a degree is no positive integer, the device is unknown, or
    its file describes none.
    """

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    device: str | PathLike[str] | Device = "cpu"

    def __post_init__(self) -> None:
        """Refuse degrees that are no positive integers, and unknown devices."""
        for axis in ("pipeline", "tensor", "data"):
            given = getattr(self, axis)
            degree = whole(given)
            if degree is None or degree < 1:
                message = f"mesh axis {axis!r} needs a positive integer ({given!r} given)"
                raise InputError(message)
            object.__setattr__(self, axis, degree)
        if _is_file(self.device):
            object.__setattr__(self, "device", Device.load(self.device))
        if not isinstance(self.device, str | Device):
            kind = type(self.device).__name__
            message = f"the mesh's device must be a name or a Device ({kind} given)"
            raise InputError(message)
        _ = self.hardware

    @property
    def grid(self) -> Grid:
        """The number of ranks along each axis."""
        return Grid(self.pipeline, self.data, self.tensor)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.grid.size

    @property
    def hardware(self) -> Device:
        """The device's figures."""
        return self.device if isinstance(self.device, Device) else device(str(self.device))

    @property
    def name(self) -> str:
        """The device's name, as plans have it."""
        return self.hardware.name

    def coordinate(self, rank: int) -> Coordinate:
        """Where `rank` sits. Raises InputError outside 0 … size - 1."""
        if not 0 <= rank < self.size:
            message = f"rank {rank} is not in the mesh ({self.size} ranks: 0 to {self.size - 1})"
            raise InputError(message)
        return self.grid.coordinate(rank)

    def rank(self, pipeline: int = 0, data: int = 0, tensor: int = 0) -> int:
        """The rank at a coordinate. Raises InputError when the mesh has no such place."""
        place = {"pipeline": pipeline, "data": data, "tensor": tensor}
        for axis, index in place.items():
            if not 0 <= index < getattr(self, axis):
                degree = getattr(self, axis)
                message = f"no {axis} coordinate {index} in the mesh ({axis}={degree})"
                raise InputError(message)
        return self.grid.rank(pipeline, data, tensor)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices whose mesh is open: `nodes` of `devices_per_node` each.

    `device` is what a `Mesh` takes; its nodes have as many devices as the cluster's. Raises
    InputError when a count is no positive integer, the device is unknown, or its file describes
    none.
    """

    nodes: int = 1
    devices_per_node: int = 8
    device: str | PathLike[str] | Device = "cpu"

    def __post_init__(self) -> None:
        """Refuse counts that are no positive integers, and unknown devices."""
        for name in ("nodes", "devices_per_node"):
            given = getattr(self, name)
            count = whole(given)
            if count is None or count < 1:
                message = f"the cluster's {name!r} must be a positive integer ({given!r} given)"
                raise InputError(message)
            object.__setattr__(self, name, count)
        hardware = Mesh(device=self.device).hardware
        if hardware.devices_per_node != self.devices_per_node:
            own = dataclasses.replace(hardware, devices_per_node=self.devices_per_node)
            object.__setattr__(self, "device", own)
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
        """All meshes of all devices whose tensor ranks share a node; the plainest come first."""
        for tensor in divisors(self.devices_per_node):
            for pipeline in divisors(self.size // tensor):
                data = self.size // tensor // pipeline
                yield Mesh(pipeline=pipeline, tensor=tensor, data=data, device=self.device)


def divisors(count: int) -> list[int]:
    """What divides a count.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [number for number in range(1, count + 1) if count % number == 0]


def _is_file(value: object) -> TypeGuard[str | PathLike[str]]:
    """Whether a device is meant by its file: a path, or a string with the ending of one."""
    return isinstance(value, PathLike) or (isinstance(value, str) and value.endswith(".json"))


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
