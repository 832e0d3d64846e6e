"""The fraction of a peak that each kind of work reaches, by size and dtype if known.

>>> curve = Curve("matmul", "float32", ((1e6, 0.2), (1e8, 0.6)))
>>> curve.at(1e5), round(curve.at(1e7), 3), curve.at(1e12)
(0.2, 0.4, 0.6)
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from parcompiler import figures
from parcompiler.errors import InputError

ANY = "any"  # the dtype of a curve for all dtypes

# Exchanges and cached traffic may exceed the nominal bandwidth.
_WITHIN_PEAK = ("matmul", "attention", "convolution", "other")
COLLECTIVES = tuple(
    "all-reduce all-gather reduce-scatter all-to-all rotation broadcast reduce".split()
)
KINDS = (*_WITHIN_PEAK, "bandwidth", *COLLECTIVES, "message", "link", "network")


@dataclass(frozen=True, slots=True)
class Curve:
    """The fraction by size: `points` are pairs of size and fraction, sizes ascending.

    `kind` is a kind of operation, or the full name of an operator ("aten.gelu.default"), with the
    FLOPs of one call as size; or "bandwidth", a collective ("all-reduce"), a "message", the "link"
    or the "network" for all exchanges, with bytes as size. `dtype` is the name of a torch dtype, or
    "any". Raises InputError for an invalid curve.
    """

    kind: str
    dtype: str
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        """Refuse names that no operation has, sizes that do not ascend, and impossible
        fractions."""
        name = f"efficiency.curves.{self.kind}.{self.dtype}"
        if self.kind not in KINDS and "." not in self.kind:  # the full name of an operator has one
            message = f"device figure '{name}' names no kind of work (known: {', '.join(KINDS)}, "
            message += "and operators such as aten.gelu.default)"
            raise InputError(message)
        if self.dtype != ANY and not figures.is_dtype(self.dtype):
            message = f"device figure '{name}' names no dtype of torch, nor {ANY!r}"
            raise InputError(message)
        if not self.points:
            message = f"device figure '{name}' must have a pair of size and fraction (none given)"
            raise InputError(message)
        is_within = self.kind in _WITHIN_PEAK or self.kind.startswith("aten.")
        most = 1 if is_within else figures.FASTEST
        for size, fraction in self.points:
            figures.number(name, size, positive=True)
            figures.number(name, fraction, positive=True, most=most)
        sizes = [size for size, _ in self.points]
        if sizes != sorted(set(sizes)):
            message = f"device figure '{name}' must have ascending sizes ({sizes} given)"
            raise InputError(message)

    def at(self, size: float) -> float:
        """The fraction at `size`: linear in the logarithm of the size, constant outside."""
        right = bisect.bisect_left(self.points, (size, -math.inf))
        if right == 0:
            return self.points[0][1]
        if right == len(self.points):
            return self.points[-1][1]
        (low, before), (high, after) = self.points[right - 1 : right + 1]
        along = math.log(size / low) / math.log(high / low)
        return before + along * (after - before)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The fraction of a peak that each kind of work reaches, above 0 and at most 1.

    `matmul`, `attention`, `convolution` and `other` are fractions of the peak arithmetic, by the
    kind of an operation (one element of an `other` counts as one FLOP, even for an exponential);
    `bandwidth` is a fraction of the peak memory bandwidth. A curve takes precedence over these.
    """

    matmul: float
    attention: float
    convolution: float
    other: float
    bandwidth: float
    curves: tuple[Curve, ...] = ()
    _by_name: Mapping[tuple[str, str], Curve] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse fractions outside of (0, 1] and duplicate curves; sort the curves."""
        for name in self._fractions():
            figures.number(name, getattr(self, name), positive=True, most=1)
        ordered = sorted(self.curves, key=lambda curve: (curve.kind, curve.dtype))
        object.__setattr__(self, "curves", tuple(ordered))
        by_name = {(curve.kind, curve.dtype): curve for curve in ordered}
        object.__setattr__(self, "_by_name", by_name)
        if len(by_name) < len(ordered):
            message = "device figure 'efficiency.curves' has two curves of one kind and dtype"
            raise InputError(message)

    def of(self, kind: str) -> float:
        """The fraction of the peak arithmetic that operations of `kind` reach."""
        known = kind in ("matmul", "attention", "convolution")
        fraction: float = getattr(self, kind) if known else self.other
        return fraction

    def arithmetic(self, name: str, kind: str, dtype: str, flops: float) -> float | None:
        """The fraction for one operation, by the curve of its name, else of its kind; None without
        one."""
        if not self.curves:  # the usual case, tested for every operation
            return None
        curve = self._curve(name, dtype) or self._curve(kind, dtype)
        return None if curve is None else curve.at(flops)

    def traffic(self, nbytes: float) -> float:
        """The fraction of the peak memory bandwidth that an operation moving `nbytes` reaches."""
        curve = self._curve("bandwidth", ANY)
        return self.bandwidth if curve is None else curve.at(nbytes)

    def exchange(self, action: str, nbytes: float, link: str = "") -> float:
        """The fraction of a link's bandwidth that a collective reaches: by its own curve, else by
        the `link`'s, else 1.

        `nbytes` are the bytes that each rank sends.
        """
        curve = self._curve(action, ANY) or self._curve(link, ANY)
        return 1.0 if curve is None else curve.at(nbytes)

    def measured(self, action: str) -> bool:
        """Whether there is a curve for a collective."""
        return self._curve(action, ANY) is not None

    def to_data(self) -> dict[str, Any]:
        """JSON data: curves by kind and dtype, without empty entries."""
        data: dict[str, Any] = {name: getattr(self, name) for name in self._fractions()}
        for curve in self.curves:
            kinds = data.setdefault("curves", {}).setdefault(curve.kind, {})
            kinds[curve.dtype] = [list(point) for point in curve.points]
        return data

    def _curve(self, kind: str, dtype: str) -> Curve | None:
        return self._by_name.get((kind, dtype)) or self._by_name.get((kind, ANY))

    @classmethod
    def _fractions(cls) -> list[str]:
        names = (item.name for item in dataclasses.fields(cls) if item.init)
        return [name for name in names if name != "curves"]


def curves_of(data: object) -> tuple[Curve, ...]:
    """The curves in JSON data, by kind and dtype. Raises InputError for invalid ones."""
    curves = []
    for kind, dtypes in figures.mapping("efficiency.curves", data).items():
        for dtype, points in figures.mapping(f"efficiency.curves.{kind}", dtypes).items():
            pairs: list[Any] = points if isinstance(points, list) else [None]
            if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
                name = f"efficiency.curves.{kind}.{dtype}"
                message = f"device figure '{name}' must be a list of pairs of size and fraction"
                raise InputError(message)
            curves.append(Curve(kind, dtype, tuple((size, fraction) for size, fraction in pairs)))
    return tuple(curves)
