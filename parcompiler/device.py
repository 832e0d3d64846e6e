"""What a device can do: its arithmetic, its memory and its links, from a catalogue of JSON files.

>>> a100 = device("a100-80g")
>>> a100.peak(torch.bfloat16), a100.link.seconds(0) == a100.link.latency
(312000000000000.0, True)
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Self

import torch

from parcompiler.errors import InputError


@dataclass(frozen=True, slots=True)
class Link:
    """What carries messages between two ranks: `bandwidth` in B/s one way, `latency` in s."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        """Refuse figures that no link has."""
        _require("bandwidth", self.bandwidth, positive=True)
        _require("latency", self.latency)

    def seconds(self, nbytes: float) -> float:
        """The time of one message in s: latency + bytes / bandwidth."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The fraction of a peak that each kind of work reaches, above 0 and at most 1.

    `matmul`, `attention`, `convolution` and `other` are fractions of the peak arithmetic, by the
    kind of an operation (one element of an `other` counts as one FLOP, also where it is an
    exponential); `bandwidth` is a fraction of the peak memory bandwidth.
    """

    matmul: float
    attention: float
    convolution: float
    other: float
    bandwidth: float

    def __post_init__(self) -> None:
        """Refuse what is no fraction."""
        for item in dataclasses.fields(self):
            _require(item.name, getattr(self, item.name), positive=True, most=1)

    def of(self, kind: str) -> float:
        """The fraction of the peak arithmetic that operations of `kind` reach."""
        fractions = {
            "matmul": self.matmul,
            "attention": self.attention,
            "convolution": self.convolution,
        }
        return fractions.get(kind, self.other)


@dataclass(frozen=True, slots=True)
class Device:
    """The figures of one rank's device.

    `flops` are pairs of dtype name and peak FLOP/s, float32 among them; `memory_bandwidth` is in
    B/s, `memory` in bytes, `launch_overhead` in s per kernel. `link` joins ranks of one node,
    `network` ranks of different nodes. `sources` says where each figure comes from; it does not
    take part in comparisons. Raises InputError for figures that no device has.
    """

    name: str
    flops: tuple[tuple[str, float], ...]
    memory_bandwidth: float
    memory: int
    launch_overhead: float
    efficiency: Efficiency
    link: Link
    network: Link
    sources: tuple[tuple[str, str], ...] = dataclasses.field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        """Sort the pairs, so that equal devices compare equal, and check the figures."""
        object.__setattr__(self, "flops", tuple(sorted(self.flops)))
        object.__setattr__(self, "sources", tuple(sorted(self.sources)))
        for dtype, peak in self.flops:
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                message = f"device figure 'flops.{dtype}' names no dtype of torch"
                raise InputError(message)
            _require(f"flops.{dtype}", peak, positive=True)
        if "float32" not in dict(self.flops):
            message = "device figure 'flops.float32' is missing: other dtypes fall back to it"
            raise InputError(message)
        _require("memory_bandwidth", self.memory_bandwidth, positive=True)
        _require("memory", self.memory, positive=True)
        _require("launch_overhead", self.launch_overhead)

    def peak(self, dtype: torch.dtype) -> float:
        """The peak in FLOP/s for `dtype`; that of float32 where the device lists none."""
        peaks = dict(self.flops)
        return peaks.get(str(dtype).removeprefix("torch."), peaks["float32"])

    def to_json(self) -> str:
        """The device as sorted, indented JSON; `from_json` reads it back."""
        data = dataclasses.asdict(self)
        data["flops"], data["sources"] = dict(self.flops), dict(self.sources)
        return json.dumps(data, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The device that a JSON text describes.

        Raises InputError, naming the figure, when one is missing, unknown, negative or no number.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            message = f"a device file must be JSON ({error})"
            raise InputError(message) from error
        figures = _figures(cls, data, "", optional=("sources",))
        if not isinstance(figures["name"], str):
            message = f"device figure 'name' must be a string ({figures['name']!r} given)"
            raise InputError(message)
        figures["flops"] = tuple(_mapping("flops", figures["flops"]).items())
        figures["sources"] = tuple(_mapping("sources", figures.get("sources", {})).items())
        for name, part in (("efficiency", Efficiency), ("link", Link), ("network", Link)):
            figures[name] = _part(part, figures[name], name)
        return cls(**figures)


def names() -> tuple[str, ...]:
    """The devices of the catalogue, sorted."""
    files = (entry.name for entry in _catalogue().iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))


@cache
def device(name: str) -> Device:
    """The device of that name in the catalogue. Raises InputError for an unknown name."""
    if name not in names():
        message = (
            f"no device {name!r} in the catalogue (known: {', '.join(names())}); "
            "describe another with Device.from_json"
        )
        raise InputError(message)
    return Device.from_json((_catalogue() / f"{name}.json").read_text(encoding="utf-8"))


def _catalogue() -> Traversable:
    return resources.files("parcompiler") / "devices"


def _figures(
    cls: type[Any], data: object, prefix: str, optional: Collection[str] = ()
) -> dict[str, Any]:
    """The fields of `cls` in `data`: all that it must have, none that it does not know."""
    figures = _mapping(prefix.rstrip(".") or "device", data)
    known = [item.name for item in dataclasses.fields(cls)]
    for name in figures:
        if name not in known:
            message = f"unknown device figure '{prefix}{name}' (known: {', '.join(known)})"
            raise InputError(message)
    for name in known:
        if name not in figures and name not in optional:
            message = f"device figure '{prefix}{name}' is missing"
            raise InputError(message)
    return dict(figures)


def _part(cls: type[Any], data: object, name: str) -> Any:
    figures = _figures(cls, data, f"{name}.")
    try:
        return cls(**figures)
    except InputError as error:
        message = str(error).replace("figure '", f"figure '{name}.", 1)
        raise InputError(message) from error


def _mapping(name: str, data: object) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        message = f"device figure '{name}' must be a JSON object ({data!r} given)"
        raise InputError(message)
    return data


def _require(name: str, value: object, *, positive: bool = False, most: float = math.inf) -> None:
    """Refuse `value` unless it is a finite number from 0 (or above 0) to `most`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if 0 <= value <= most and math.isfinite(value) and (value > 0 or not positive):
            return
    wanted = "a number above 0" if positive else "a number of at least 0"
    wanted += f" and at most {most:g}" if math.isfinite(most) else ""
    message = f"device figure '{name}' must be {wanted} ({value!r} given)"
    raise InputError(message)
