"""The options of `compile`, checked against the values that this release offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from parcompiler.capture.narrow import NARROW
from parcompiler.cost.memory import ROW_OPTIMIZERS
from parcompiler.data_updates import DataUpdates
from parcompiler.errors import InputError, offered, shown
from parcompiler.mesh import positive, whole
from parcompiler.schedules import SCHEDULES, Schedule
from parcompiler.spmd.placement import parse

METHODS = ("naive", "vocab-1", "vocab-2", "interlaced")  # for a vocabulary on all ranks
MOST_PASSES = 2**18  # most forwards of all stages in a step; a quarter takes 0.7 GB to plan
PRECISIONS = {
    None: None,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Options:
    """The options on which decisions depend. Raises InputError for a value that is not offered.

    Counts may be any integers (of numpy, say); they are stored as `int`, `stages` as a tuple.
    """

    microbatches: int
    schedule: str | Schedule = "auto"
    virtual_stages: int = 1
    stages: str | Sequence[int] = "auto"
    recompute: str | Mapping[str, bool] = "auto"
    sharding: str | Mapping[str, str] = "auto"
    vocabulary: str = "auto"
    precision: str | None = None
    optimizer: str = "adamw"
    costs: str = "model"
    zero: str | int = "auto"
    updates: str = "all-reduce"
    compression: str | None = None
    every: int | None = None
    outer: str | tuple[float, float] | None = None
    staleness: int | None = None
    compression_rank: int | None = None
    exact: bool = False
    loss_weights: str | None = None
    memory_margin: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values that this release does not offer, before anything is captured."""
        for name in ("microbatches", "virtual_stages"):
            object.__setattr__(self, name, positive(name, getattr(self, name), MOST_PASSES))
        if not isinstance(self.schedule, Schedule):
            offered("schedule", self.schedule, ("auto", "search", *SCHEDULES))
        offered("vocabulary", self.vocabulary, ("auto", "whole", *METHODS))
        offered("precision", self.precision, tuple(PRECISIONS))
        offered("zero", self.zero, ("auto", 0, 1, 2, 3))
        self.data_updates  # noqa: B018 (refuses)
        offered("costs", self.costs, ("model", "measured", "compiled"))
        offered("exact", self.exact, (False, True))
        offered("loss_weights", self.loss_weights, (None, "tokens"))
        object.__setattr__(self, "memory_margin", _margin(self.memory_margin))
        object.__setattr__(self, "stages", _stages(self.stages))
        object.__setattr__(self, "recompute", _recompute(self.recompute))
        object.__setattr__(self, "sharding", _sharding(self.sharding))

    @property
    def data_updates(self) -> DataUpdates:
        """How data ranks combine gradients or weights. Raises InputError for wrong options."""
        return DataUpdates.of(
            self.updates, self.compression, self.every, self.outer, self.staleness,
            self.compression_rank,
        )  # fmt: skip

    @property
    def asynchronous(self) -> bool:
        """Whether the requested schedule updates parameters inside the step."""
        if isinstance(self.schedule, Schedule):
            return self.schedule.asynchronous
        return self.schedule == "pipedream"

    @property
    def takes_rows(self) -> bool:
        """Whether gradients of tables may be only the rows that a step looks up."""
        plain = self.updates == "all-reduce" and self.compression is None and not self.asynchronous
        return (
            plain and self.optimizer in ROW_OPTIMIZERS and self.zero in ("auto", 0)
            and self.narrow is None
        )  # fmt: skip

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that the program computes in; None: the model's own."""
        return PRECISIONS[self.precision]

    @property
    def narrow(self) -> torch.dtype | None:
        """The 16-bit dtype that the model is captured in, for masters in float32; else None."""
        return self.dtype if self.dtype in NARROW else None


def _margin(value: object) -> float:
    """The option `memory_margin`: a fraction of a device's memory."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= float(value) < 1:  # type: ignore[arg-type]
        message = (
            "memory_margin must be the fraction of a device's memory that plans keep free, from 0 "
            f"to below 1 ({shown(value)} given)"
        )
        raise InputError(message)
    return float(value)  # type: ignore[arg-type]


def _stages(value: object) -> str | tuple[int, ...]:
    """The option `stages`: a word, or a positive number of blocks for each stage."""
    if isinstance(value, str):
        offered("stages", value, ("auto", "even"))
        return value
    try:
        counts = [whole(item) for item in value]  # type: ignore[attr-defined]  # or it raises
    except TypeError:
        counts = []
    blocks = tuple(n for n in counts if n is not None and 0 < n <= MOST_PASSES)
    if not blocks or len(blocks) != len(counts):
        message = (
            "stages must be 'auto', 'even' or the number of blocks of each stage, positive "
            f"integers ({shown(value)} given)"
        )
        raise InputError(message)
    return blocks


def _recompute(value: object) -> str | dict[str, bool]:
    """The option `recompute`: a word, or True or False for patterns of block names."""
    if isinstance(value, Mapping):
        if all(isinstance(k, str) and isinstance(v, bool) for k, v in value.items()):
            return dict(value)
    elif isinstance(value, str):
        offered("recompute", value, ("auto", "none", "selective", "full", "offload"))
        return value
    message = (
        "recompute must be 'auto', 'none', 'selective', 'full', 'offload' or a dict such as "
        f"{{'layers.*': True}} ({shown(value)} given)"
    )
    raise InputError(message)


def _sharding(value: object) -> str | dict[str, str]:
    """The option `sharding`: "auto", or placements for patterns of parameter names."""
    if isinstance(value, Mapping):
        if all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
            for pattern, text in value.items():
                placement = parse(text)
                if placement.kind == "P":
                    message = (
                        f"sharding cannot place {pattern!r} as partial sums ('P'): write 'R' or "
                        "'S(0)'"
                    )
                    raise InputError(message)
                if placement.zigzag or placement.sorted:
                    message = (
                        f"sharding cannot place {pattern!r} as {text!r}, which is for rows of a "
                        "batch on context ranks: write 'R' or 'S(0)'"
                    )
                    raise InputError(message)
            return dict(value)
    elif isinstance(value, str):
        offered("sharding", value, ("auto",))
        return value
    message = (
        f"sharding must be 'auto' or a dict such as {{'*.mlp.*': 'S(0)'}} ({shown(value)} given)"
    )
    raise InputError(message)
