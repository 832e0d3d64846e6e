"""The figures of a device: arithmetic, memory and links, from a catalogue of JSON files.

>>> a100 = device("a100-80g")
>>> a100.peak(torch.bfloat16), a100.link.seconds(0) == a100.link.latency
(312000000000000.0, True)
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from os import PathLike
from typing import Any, Self

import torch

from parcompiler import documents, figures
from parcompiler.efficiency import Efficiency, curves_of
from parcompiler.errors import InputError, shown

__all__ = ["Device", "Efficiency", "Link", "device", "names"]

DEVICES_PER_NODE = 8  # as on the boards of most vendors; a file may say otherwise


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two ranks: `bandwidth` in B/s one way, `latency` in s."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        """Refuse impossible figures."""
        figures.number("bandwidth", self.bandwidth, positive=True)
        figures.number("latency", self.latency, most=figures.LONGEST)

    def seconds(self, nbytes: float) -> float:
        """The time of one message in s: latency + bytes / bandwidth."""
        return self.latency + nbytes / self.bandwidth

    def at(self, fraction: float) -> Link:
        """The link with a fraction of its bandwidth."""
        return Link(self.bandwidth * fraction, self.latency)


@dataclass(frozen=True, slots=True)
class Device:
    """The figures of one rank's device.

    `flops` are pairs of dtype name and peak FLOP/s, float32 among them; `memory_bandwidth` is in
    B/s, `memory` in bytes, `launch_overhead` in s per kernel. `link` joins ranks of one node,
    which has `devices_per_node`, `network` ranks of different nodes, `host` joins a device and its
    node's memory of `host_memory` bytes (None: not known). `multiprocessors` is the number of units
    that compute tiles of products, one each at a time (0: not known). `sources` has the source of
    each figure, and is ignored in comparisons. Raises InputError for impossible figures.
    """

    name: str
    flops: tuple[tuple[str, float], ...]
    memory_bandwidth: float
    memory: int
    launch_overhead: float
    efficiency: Efficiency
    link: Link
    network: Link
    devices_per_node: int = DEVICES_PER_NODE
    multiprocessors: int = 0
    host: Link | None = None
    host_memory: int | None = None
    sources: tuple[tuple[str, str], ...] = dataclasses.field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        """Sort the pairs, so that equal devices compare equal, and check the figures."""
        kinds = {"name": str, "efficiency": Efficiency, "link": Link, "network": Link}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                wanted = "a string" if kind is str else f"of type {kind.__name__}"
                message = f"device figure {name!r} must be {wanted} "
                message += f"({shown(getattr(self, name))} given)"
                raise InputError(message)
        if not self.name.strip():
            message = f"device figure 'name' must be a name ({self.name!r} given)"
            raise InputError(message)
        object.__setattr__(self, "flops", figures.pairs("flops", self.flops))
        object.__setattr__(self, "sources", figures.pairs("sources", self.sources))
        for dtype, peak in self.flops:
            if not figures.is_dtype(dtype):
                message = f"device figure 'flops.{dtype}' names no dtype of torch"
                raise InputError(message)
            figures.number(f"flops.{dtype}", peak, positive=True)
        if "float32" not in dict(self.flops):
            message = "device figure 'flops.float32' is missing: other dtypes fall back to it"
            raise InputError(message)
        figures.number("memory_bandwidth", self.memory_bandwidth, positive=True)
        figures.number("memory", self.memory, positive=True)
        figures.number("launch_overhead", self.launch_overhead, most=figures.LONGEST)
        figures.number("devices_per_node", self.devices_per_node, positive=True)
        figures.number("multiprocessors", self.multiprocessors)
        if self.host_memory is not None:
            figures.number("host_memory", self.host_memory, positive=True)
        for name in ("memory", "host_memory", "devices_per_node", "multiprocessors"):
            if (figure := getattr(self, name)) is None:
                continue
            if figure != int(figure):
                message = f"device figure {name!r} must be a whole number ({figure!r} given)"
                raise InputError(message)
            object.__setattr__(self, name, int(figure))  # 8e10 is a number of bytes, too

    @property
    def is_cpu(self) -> bool:
        """Whether ranks of a plan for it compute on the CPU, by the rule of `runtime.joining`."""
        return self.name == "cpu" or self.name.startswith("cpu-")

    def peak(self, dtype: torch.dtype) -> float:
        """The peak in FLOP/s for `dtype`; that of float32 where the device lists none."""
        peaks = dict(self.flops)
        return peaks.get(str(dtype).removeprefix("torch."), peaks["float32"])

    def named(self, dtype: torch.dtype) -> str:
        """The dtype under which the device lists its figures for `dtype`: its own or float32."""
        name = str(dtype).removeprefix("torch.")
        return name if name in dict(self.flops) else "float32"

    def to_json(self) -> str:
        """The device as sorted, indented JSON; `from_json` reads it back."""
        data = dataclasses.asdict(self)
        data["flops"], data["sources"] = dict(self.flops), dict(self.sources)
        data["efficiency"] = self.efficiency.to_data()
        for name in ("host", "host_memory"):
            if data[name] is None:
                del data[name]
        return json.dumps(data, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The device that a JSON text describes.

        Raises InputError, naming the figure, when one is missing, unknown, negative or no number.
        """
        data = documents.parse(text, "device")
        optional = "devices_per_node", "multiprocessors", "host", "host_memory", "sources"
        values = figures.fields(cls, data, "", optional)
        values["flops"] = tuple(figures.mapping("flops", values["flops"]).items())
        values["sources"] = tuple(figures.mapping("sources", values.get("sources", {})).items())
        parts = {"efficiency": Efficiency, "link": Link, "network": Link, "host": Link}
        for name in values.keys() & parts:
            values[name] = _part(parts[name], values[name], name)
        return cls(**values)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """The device that a JSON file describes, such as `parcompiler calibrate` writes.

        Raises InputError, naming file and figure, when it cannot be read or does not describe a
        device.
        """
        text = documents.text_of(path)
        try:
            return cls.from_json(text)
        except InputError as error:
            message = f"{path}: {error}"
            raise InputError(message) from error


def names() -> tuple[str, ...]:
    """The devices of the catalogue, sorted."""
    files = (entry.name for entry in _catalogue().iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))


@cache
def device(name: str) -> Device:
    """The device of that name, in any case. Raises InputError for a name not in the catalogue."""
    known = name.lower()
    if known not in names():
        message = (
            f"no device {shown(name)} in the catalogue (known: {', '.join(names())}); "
            "describe another in a JSON file (Device.load)"
        )
        raise InputError(message)
    return Device.from_json((_catalogue() / f"{known}.json").read_text(encoding="utf-8"))


def _catalogue() -> Traversable:
    return resources.files("parcompiler") / "devices"


def _part(cls: type[Any], data: object, name: str) -> Any:
    """The efficiency or a link, from its JSON."""
    values = figures.fields(cls, data, f"{name}.", optional=("curves",))
    if "curves" in values:
        values["curves"] = curves_of(values["curves"])
    try:
        return cls(**values)
    except InputError as error:
        message = str(error).replace("figure '", f"figure '{name}.", 1)
        raise InputError(message) from error
