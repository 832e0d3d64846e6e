"""What the user asked of `compile`, checked: each option with the values that this release has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from parcompiler.errors import InputError
from parcompiler.mesh import whole
from parcompiler.schedules import SCHEDULES

PRECISIONS = {None: None, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, slots=True)
class Options:
    """The options that decisions depend on. Raises InputError for a value that is not offered.

    Counts may be any integers (of numpy, say); they are kept as `int`, `stages` as a tuple.
    """

    microbatches: int
    schedule: str = "auto"
    stages: str | Sequence[int] = "auto"
    precision: str | None = None
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        """Refuse what this release cannot do, before anything is captured."""
        count = whole(self.microbatches)
        if count is None or count < 1:
            message = f"microbatches must be a positive integer ({self.microbatches!r} given)"
            raise InputError(message)
        object.__setattr__(self, "microbatches", count)
        offered("schedule", self.schedule, ("auto", *SCHEDULES))
        offered("precision", self.precision, tuple(PRECISIONS))
        object.__setattr__(self, "stages", _stages(self.stages))

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that the program computes in; None: the model's own."""
        return PRECISIONS[self.precision]


def _stages(given: object) -> str | tuple[int, ...]:
    """The option `stages`: a word, or a positive number of blocks for each stage."""
    if isinstance(given, str):
        offered("stages", given, ("auto", "even"))
        return given
    counts = [whole(item) for item in given] if isinstance(given, Iterable) else []
    positive = tuple(n for n in counts if n is not None and n > 0)
    if not positive or len(positive) != len(counts):
        message = (
            "stages must be 'auto', 'even' or the number of blocks of each stage, positive "
            f"integers ({given!r} given)"
        )
        raise InputError(message)
    return positive


def offered(name: str, value: object, values: Sequence[object]) -> None:
    """Raise InputError unless `value` is one of `values`."""
    if not any(value == known and type(value) is type(known) for known in values):
        known = ", ".join(map(repr, values))
        message = f"{name} must be one of {known} ({value!r} given)"
        raise InputError(message)
