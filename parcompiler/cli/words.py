"""Parses option texts into the values that `compile` takes.

>>> degrees("pipeline=4,tensor=2"), degrees("auto")
({'pipeline': 4, 'tensor': 2}, 'auto')
>>> STAGES.parse("3,4,4,3"), STAGES.parse("even"), ROWS.parse("2,4")
((3, 4, 4, 3), 'even', (2, 4))
>>> patterns("layers.*=yes,head=no"), pin("*.ffn.up.weight=S(0)")
({'layers.*': True, 'head': False}, ('*.ffn.up.weight', 'S(0)'))
>>> names("float32, bfloat16")
('float32', 'bfloat16')
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import click
from click.shell_completion import CompletionItem

AXES = ("pipeline", "tensor", "context", "expert", "data")
AUTO = "auto"
HF = "hf:"  # prefix of a MODEL that is a configuration of transformers
ANSWERS = {"yes": True, "no": False, "true": True, "false": False}

# For completion and --help, which do not load torch; tests/cli compares with the real lists.
SCHEDULES = (
    "auto", "search", "naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half",
    "v-min", "pipedream",
)  # fmt: skip
VOCABULARY = ("auto", "whole", "naive", "vocab-1", "vocab-2", "interlaced")
LAUNCHERS = ("torchrun", "slurm", "kubernetes")
COSTS = ("model", "measured", "compiled")
LOSS_WEIGHTS = ("tokens",)
ZERO = ("auto", "0", "1", "2", "3")
UPDATES = ("all-reduce", "parameter-server", "asynchronous", "local")
COMPRESSIONS = ("bf16", "fp16", "powersgd")
OUTER = ("nesterov", "average")
PRECISIONS = ("fp32", "fp64", "bf16", "fp16")
OPTIMIZERS = ("adagrad", "adamw", "muon", "sgd", "sgd-momentum", "none")


class Typed(click.ParamType):  # type: ignore[type-arg]  # generic only in newer releases of click
    """An option whose text `parse` reads; its ValueError becomes the error message.

    `complete` lists the possible words for a beginning.
    """

    def __init__(
        self,
        name: str,
        parse: Callable[[str], Any],
        complete: Callable[[str], Sequence[str]] = lambda _: (),
        *,
        files: bool = False,
    ) -> None:
        self.name, self.parse, self.complete, self.files = name, parse, complete, files

    def get_metavar(self, param: click.Parameter, *_: Any, **__: Any) -> str | None:
        """The name of an option unchanged; click would capitalize it."""
        return self.name if isinstance(param, click.Option) else None

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value. Raises a usage error."""
        if not isinstance(value, str):  # click converts some values twice
            return value
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The words with this beginning; files if there are none and a file is allowed."""
        words = [word for word in self.complete(incomplete) if word.startswith(incomplete)]
        if self.files and not words:
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(word) for word in words]


def listed(name: str, words: Sequence[str]) -> Typed:
    """One of `words`, or a file; the compiler, not the option, refuses others."""
    return Typed(name, str, lambda _: words, files=True)


def degrees(text: str) -> str | dict[str, int]:
    """The degrees by axis, or auto. Raises ValueError."""
    if text == AUTO:
        return AUTO
    degrees: dict[str, int] = {}
    for part in text.split(","):
        axis, _, count = (word.strip() for word in part.partition("="))
        if axis not in AXES:
            example = "pipeline=4,tensor=2,data=2, in any order (an axis left out is 1), or auto"
            message = f"{part!r} is not AXIS=N: write {example}"
            raise ValueError(message)
        if not _is_count(count):
            message = f"{part!r} needs a positive integer: write {axis}=2"
            raise ValueError(message)
        if axis in degrees:
            message = f"axis {axis!r} is given twice in {text!r}"
            raise ValueError(message)
        degrees[axis] = int(count)
    return degrees


def _axes(incomplete: str) -> list[str]:
    """Completions of a mesh with each axis that it does not have yet."""
    head, comma, _ = incomplete.rpartition(",")
    axes = [f"{head}{comma}{axis}=" for axis in AXES if f"{axis}=" not in head]
    return axes if comma else [AUTO, *axes]


def counts(name: str, words: Sequence[str], wanted: str) -> Typed:
    """An option with one of `words`, or several counts."""

    def parse(text: str) -> str | tuple[int, ...]:
        parts = [part.strip() for part in text.split(",")]
        if text not in words and not all(map(_is_count, parts)):
            message = f"{text!r} is none of {', '.join(words)}, or {wanted}"
            raise ValueError(message)
        return text if text in words else tuple(map(int, parts))

    return Typed(name, parse, lambda _: words)


def patterns(text: str) -> str | dict[str, bool]:
    """Whether to recompute, by pattern of blocks, or one of the words. Raises ValueError."""
    if text in _RECOMPUTED:
        return text
    answers: dict[str, bool] = {}
    for part in text.split(","):
        pattern, _, answer = (word.strip() for word in part.rpartition("="))
        if not pattern or answer not in ANSWERS:
            wanted = (
                f"{', '.join(_RECOMPUTED)}, or patterns of blocks, as in 'layers.*=yes,head=no'"
            )
            message = f"{part!r} is none of {wanted}"
            raise ValueError(message)
        answers[pattern] = ANSWERS[answer]
    return answers


def pin(text: str) -> tuple[str, str]:
    """A pattern of parameters and their placement. Raises ValueError."""
    pattern, _, placement = (word.strip() for word in text.rpartition("="))
    if not pattern or not placement:
        message = f"{text!r} is no pin: write '*.ffn.up.weight=S(0)'"
        raise ValueError(message)
    return pattern, placement


def names(text: str) -> tuple[str, ...]:
    """Several words. Raises ValueError."""
    words = tuple(part.strip() for part in text.split(","))
    if not all(words):
        message = f"{text!r} has an empty name: write float32,bfloat16"
        raise ValueError(message)
    return words


def source(text: str) -> str:
    """What a run goes on from: auto, no, or a path. Raises ValueError."""
    if not text:
        message = "'' is no path (it is empty): write auto, no, or the path of a checkpoint"
        raise ValueError(message)
    return text


def devices() -> tuple[str, ...]:
    """The names of the catalogue, read without torch."""
    files = (entry.name for entry in (resources.files("parcompiler") / "devices").iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))


def _is_count(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,15}", text)) and int(text) > 0


_RECOMPUTED = ("auto", "none", "selective", "full", "offload")

MESH = Typed("auto|AXIS=N,...", degrees, _axes)
STAGES = counts(
    "auto|even|N,N,...", ("auto", "even"), "the number of blocks of each stage, as in 3,4,4,3"
)
ROWS = counts("given|auto|N,N,...", ("given", AUTO), "numbers of rows, as in 2,4,8")
RECOMPUTE = Typed("WORD|PATTERN=yes,...", patterns, lambda _: _RECOMPUTED)
PIN = Typed("PATTERN=PLACEMENT", pin)
RESUME = Typed("auto|no|PATH", source, lambda _: ("auto", "no"), files=True)
NAMES = Typed("DTYPE,...", names)
DEVICE = listed("NAME|FILE", devices())
