"""What is typed for an option, as the value that `compile` takes.

>>> Mesh().convert("pipeline=4,tensor=2", None, None)
{'pipeline': 4, 'tensor': 2}
>>> Stages().convert("3,4,4,3", None, None), Stages().convert("even", None, None)
((3, 4, 4, 3), 'even')
>>> Rows().convert("2,4", None, None)
(2, 4)
>>> Recompute().convert("layers.*=yes,head=no", None, None)
{'layers.*': True, 'head': False}
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

import click
from click.shell_completion import CompletionItem

AXES = ("pipeline", "tensor", "data")
AUTO = "auto"
ANSWERS = {"yes": True, "no": False, "true": True, "false": False}

# Completed and listed by --help, which do not load torch; tests/cli compares with what is offered.
SCHEDULES = (
    "auto", "search", "naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half",
    "v-min", "pipedream",
)  # fmt: skip
VOCABULARY = ("auto", "whole", "naive", "vocab-1", "vocab-2", "interlaced")
LAUNCHERS = ("torchrun", "slurm", "kubernetes")
COSTS = ("model", "measured")
PRECISIONS = ("fp32", "fp64", "bf16", "fp16")
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum", "none")


class _Word(click.ParamType):  # type: ignore[type-arg]  # generic only in newer releases of click
    """Something typed that has a meaning of its own."""


class Mesh(_Word):
    """Degrees of the axes, as in pipeline=4,tensor=2,data=2; or auto, which leaves them open."""

    name = "auto|AXIS=N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | dict[str, int]:
        """The word, or the degrees by axis."""
        if value == AUTO:
            return AUTO
        found: dict[str, int] = {}
        for part in str(value).split(","):
            axis, sign, count = (word.strip() for word in part.partition("="))
            if axis not in AXES:
                self.fail(f"{part!r} names no axis: write {_example()}", param, ctx)
            if not sign or not re.fullmatch(r"[0-9]{1,15}", count) or int(count) < 1:
                self.fail(f"{part!r} needs a positive integer: write {axis}=2", param, ctx)
            if axis in found:
                self.fail(f"axis {axis!r} is given twice in {value!r}", param, ctx)
            found[axis] = int(count)
        return found

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The axes that are not there yet."""
        head, comma, last = incomplete.rpartition(",")
        left = [axis for axis in AXES if f"{axis}=" not in head]
        found = [CompletionItem(f"{head}{comma}{a}=") for a in left if a.startswith(last)]
        return found if comma else [*_starting((AUTO,), incomplete), *found]


class Stages(_Word):
    """auto, even, or the number of blocks of each stage."""

    name = "auto|even|N,N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | tuple[int, ...]:
        """The word, or the counts."""
        if value in ("auto", "even"):
            return str(value)
        parts = [part.strip() for part in str(value).split(",")]
        if not all(re.fullmatch(r"[0-9]{1,15}", part) and int(part) for part in parts):
            wanted = "auto, even, or the number of blocks of each stage, as in 3,4,4,3"
            self.fail(f"{value!r} is none of {wanted}", param, ctx)
        return tuple(map(int, parts))

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The words."""
        return _starting(("auto", "even"), incomplete)


class Rows(_Word):
    """given, auto, or the rows of micro-batches."""

    name = "given|auto|N,N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | tuple[int, ...]:
        """The word, or the numbers."""
        if value in ("given", AUTO):
            return str(value)
        parts = [part.strip() for part in str(value).split(",")]
        if not all(re.fullmatch(r"[0-9]{1,15}", part) and int(part) for part in parts):
            wanted = "given, auto, or numbers of rows, as in 2,4,8"
            self.fail(f"{value!r} is none of {wanted}", param, ctx)
        return tuple(map(int, parts))

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The words."""
        return _starting(("given", AUTO), incomplete)


class Recompute(_Word):
    """auto, none, full, or blocks by pattern."""

    name = "auto|none|full|PATTERN=yes,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | dict[str, bool]:
        """The word, or whether to recompute by pattern."""
        if value in ("auto", "none", "full"):
            return str(value)
        found: dict[str, bool] = {}
        for part in str(value).split(","):
            pattern, _, answer = (word.strip() for word in part.rpartition("="))
            if not pattern or answer not in ANSWERS:
                wanted = "auto, none, full, or patterns of blocks, as in 'layers.*=yes,head=no'"
                self.fail(f"{part!r} is none of {wanted}", param, ctx)
            found[pattern] = ANSWERS[answer]
        return found

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The words."""
        return _starting(("auto", "none", "full"), incomplete)


class Pin(_Word):
    """A placement for parameters, as in '*.ffn.up.weight=S(0)'."""

    name = "PATTERN=PLACEMENT"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """The pattern and its placement."""
        if isinstance(value, tuple):  # click converts the values of several options twice
            return value
        pattern, sign, placement = (word.strip() for word in str(value).rpartition("="))
        if not sign or not pattern or not placement:
            self.fail(f"{value!r} is no pin: write '*.ffn.up.weight=S(0)'", param, ctx)
        return pattern, placement


class Names(_Word):
    """Several words, as in float32,bfloat16."""

    name = "NAME,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """The words."""
        if isinstance(value, tuple):  # click converts some values twice
            return value
        found = tuple(part.strip() for part in str(value).split(","))
        if not all(found):
            self.fail(f"{value!r} has an empty name: write float32,bfloat16", param, ctx)
        return found


class Listed(_Word):
    """A word that is completed; whether it is offered is said by the compiler, in one place."""

    def __init__(self, name: str, values: Sequence[str]) -> None:
        self.name = name
        self.values = tuple(values)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word as it is."""
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The words; files as well, for one may be meant."""
        return _starting(self.values, incomplete) or [CompletionItem(incomplete, type="file")]


def devices() -> tuple[str, ...]:
    """The names of the catalogue, read without torch."""
    files = (entry.name for entry in (resources.files("parcompiler") / "devices").iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))


def _example() -> str:
    return "pipeline=4,tensor=2,data=2, in any order (an axis left out is 1), or auto"


def _starting(values: Sequence[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(value) for value in values if value.startswith(incomplete)]
