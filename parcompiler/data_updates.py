"""How data ranks combine gradients or weights: `updates` and `compression` of `compile`.

    all-reduce          gradients are averaged, and every rank makes the same update
    parameter-server    one rank of each data row gets the gradients, updates, and sends parameters
    asynchronous        likewise, but no rank waits for the others: bounded staleness
    local               every rank updates by itself; weights are averaged every few steps

>>> DataUpdates.of("local", every=50)
DataUpdates(way='local', compression=None, rank=0, every=50, outer=(0.7, 0.9), staleness=0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parcompiler.errors import InputError, offered, shown

WAYS = ("all-reduce", "parameter-server", "asynchronous", "local")
COMPRESSIONS = ("bf16", "fp16", "powersgd")
OUTER = {"average": (1.0, 0.0), "nesterov": (0.7, 0.9)}  # learning rate and momentum
EVERY = 16  # steps from one average to the next
STALENESS = 2  # steps that a data rank may be ahead of the slowest
RANK = 4  # of the factors of a matrix: the largest of arXiv 1905.13727


@dataclass(frozen=True, slots=True)
class DataUpdates:
    """The way of the data axis, with its options; options of other ways are 0 or ().

    `rank` is that of PowerSGD's factors. Weights are averaged after `every` so many steps; `outer`
    are learning rate and momentum of the outer optimizer, for which an average is a step.
    `staleness` is the number of steps that a data rank may be ahead of the slowest. Raises
    InputError for impossible values.
    """

    way: str = "all-reduce"
    compression: str | None = None
    rank: int = 0
    every: int = 0
    outer: tuple[float, ...] = ()
    staleness: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible values, and options of other ways."""
        offered("updates", self.way, WAYS)
        offered("compression", self.compression, (None, *COMPRESSIONS))
        local, powersgd = self.way == "local", self.compression == "powersgd"
        _count("every", self.every, 1, "updates='local'", applies=local)
        _count("compression_rank", self.rank, 1, "compression='powersgd'", applies=powersgd)
        applies = self.way == "asynchronous"
        _count("staleness", self.staleness, 0, "updates='asynchronous'", applies=applies)
        _owned("outer", self.outer or None, "updates='local'", applies=local)
        if local and not _is_outer(self.outer):
            message = (
                "outer must be 'average', 'nesterov', or a learning rate above 0 and a momentum "
                f"from 0 to below 1 ({shown(self.outer)} given)"
            )
            raise InputError(message)
        if self.compression is not None and self.way != "all-reduce":
            message = (
                f"compression={self.compression!r} is for the gradients that an all-reduce sums, "
                f"and updates={self.way!r} has no all-reduce: leave one of them out"
            )
            raise InputError(message)

    @classmethod
    def of(
        cls,
        updates: str = "all-reduce",
        compression: str | None = None,
        every: int | None = None,
        outer: str | tuple[float, float] | None = None,
        staleness: int | None = None,
        compression_rank: int | None = None,
    ) -> DataUpdates:
        """The value for options of `compile`; None is the default of each."""
        local, powersgd = updates == "local", compression == "powersgd"
        _owned("every", every, "updates='local'", applies=local)
        _owned("compression_rank", compression_rank, "compression='powersgd'", applies=powersgd)
        _owned("staleness", staleness, "updates='asynchronous'", applies=updates == "asynchronous")
        _owned("outer", outer, "updates='local'", applies=local)
        settings: object = ("nesterov" if local else ()) if outer is None else outer
        settings = OUTER.get(settings, settings) if isinstance(settings, str) else settings
        numbers = list[Any](settings if isinstance(settings, tuple | list) else (settings,))
        return cls(
            updates,
            compression,
            (RANK if powersgd else 0) if compression_rank is None else compression_rank,
            (EVERY if local else 0) if every is None else every,
            tuple(float(x) if type(x) is int else x for x in numbers),
            (STALENESS if updates == "asynchronous" else 0) if staleness is None else staleness,
        )

    @property
    def options(self) -> dict[str, Any]:
        """The options of `compile` for which `of` returns this value."""
        counts = {"every": self.every, "outer": self.outer, "compression_rank": self.rank}
        options: dict[str, Any] = {name: value for name, value in counts.items() if value}
        if self.way == "asynchronous":
            options["staleness"] = self.staleness
        return {"updates": self.way, "compression": self.compression, **options}

    @property
    def separate(self) -> bool:
        """Whether each data rank steps with its own gradients."""
        return self.way in ("asynchronous", "local")

    @property
    def kept(self) -> int:
        """The number of tensors like each weight that are kept besides the optimizer's states:
        anchor and momentum of rounds, the error of PowerSGD, the weights of an asynchronous server
        and a received message."""
        if self.way != "local" or self.averages:
            return 2 if self.way == "asynchronous" else int(self.compression == "powersgd")
        return 2 if self.outer[1] else 1

    @property
    def averages(self) -> bool:
        """Whether a round ends with the plain average of the weights."""
        return self.outer == OUTER["average"]


def _is_outer(numbers: Sequence[object]) -> bool:
    """Whether these are a learning rate and a momentum with which weights follow their averages."""
    match numbers:
        case float(rate), float(momentum):
            return 0 < rate < math.inf and 0 <= momentum < 1
    return False


def _count(name: str, value: object, least: int, owner: str, *, applies: bool) -> None:
    """Raise InputError unless a number is at least `least`, or 0 where its option is off."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least * applies:
        message = f"{name} must be an integer, {least} or more ({shown(value)} given)"
        raise InputError(message)
    _owned(name, value or None, owner, applies=applies)


def _owned(name: str, value: object, owner: str, *, applies: bool) -> None:
    """Raise InputError for a value of an option that does not apply."""
    if value is not None and not applies:
        message = f"{name} is for {owner} ({name}={shown(value)} given): leave it out"
        raise InputError(message)


ALL_REDUCE = DataUpdates()  # of whole gradients: the default


def is_factored(shape: Sequence[int], rank: int) -> bool:
    """Whether the factors of a gradient are smaller than the gradient.

    >>> is_factored((64, 64), 4), is_factored((64,), 4), is_factored((4, 64), 4)
    (True, False, False)
    """
    n, m = shape[0] if shape else 1, math.prod(shape[1:])
    return len(shape) > 1 and (n + m) * rank < n * m
