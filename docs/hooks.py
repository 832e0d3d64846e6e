"""What pages have made by the code itself when they are built.

<!-- schedule zb-v -->                     the step of four ranks, as reports draw it
<!-- schedule 1f1b vocabulary=vocab-2 -->  the same with a vocabulary on all ranks
<!-- help plan -->                         what `parcompiler plan --help` prints
<!-- example train_nanogpt -->             a file of examples/
"""

import html
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

import parcompiler as pc
from parcompiler.cli.app import parcompiler
from parcompiler.models import gpt
from parcompiler.report.gantt import gantt

MARKER = re.compile(
    r"^<!-- (schedule|help|example) ([a-z0-9_-]+)((?: \w+=[a-z0-9-]+)*) -->$", re.MULTILINE
)
BOX = re.compile(r"\d?[A-Z]\d?-*|[^A-Z]+?(?=\d?[A-Z]\d?|$)")
RANKS, WIDTH, HELP_WIDTH = 4, 124, 84


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its markers replaced."""
    return MARKER.sub(lambda found: made(*found.groups()), markdown)


def made(kind: str, name: str, options: str) -> str:
    """What stands in the place of one marker."""
    if kind == "help":
        return f"```text\n{help_of(name)}\n```"
    if kind == "example":
        text = (Path(__file__).parent.parent / "examples" / f"{name}.py").read_text()
        return f"```py\n{text}```"
    return schedule(name, **dict(option.split("=") for option in options.split()))


@cache
def help_of(name: str) -> str:
    """The help of a command, and of its own commands."""
    parent = click.Context(parcompiler, info_name="parcompiler")
    command = parcompiler.commands[name]
    texts = [help_in(parent, name, command)]
    if isinstance(command, click.Group):
        group = click.Context(command, info_name=name, parent=parent)
        texts += [help_in(group, *item) for item in command.commands.items()]
    return "\n\n\n".join(texts)


def help_in(parent: click.Context, name: str, command: click.Command) -> str:
    """The help of a command of a group."""
    context = click.Context(
        command, info_name=name, parent=parent, terminal_width=HELP_WIDTH, max_content_width=100
    )
    return command.get_help(context)


@cache
def schedule(name: str, vocabulary: str = "whole", microbatches: str = "6") -> str:
    """A step as HTML: text in spans that the style sheet colours."""
    drawing = gantt(report(name, vocabulary, int(microbatches)), WIDTH)
    assert drawing.lines, f"{name} has no picture"
    rows = []
    for line in drawing.lines:
        rows.append("".join(box for cell in line for box in boxes(cell.style, cell.text)))
    title = html.escape(drawing.title.partition(" of ")[2])
    label = f"{RANKS} ranks, {microbatches} micro-batches"
    rows_html = "\n".join(rows)
    return (
        f'<figure class="schedule"><pre tabindex="0">{rows_html}</pre>'
        f"<figcaption><code>{name}</code>, {label}: {title}</figcaption></figure>"
    )


def boxes(style: str, text: str) -> Iterator[str]:
    """A run of one style, each instruction in it a box of its own.

    Numbers of stages and micro-batches have one digit here, so that 0F10F2 is two.
    """
    for part in BOX.findall(text):
        yield f'<span class="{style}">{html.escape(part)}</span>'


def report(name: str, vocabulary: str, microbatches: int) -> pc.Report:
    """The report of a model whose layers all take the same time, or of a GPT with a large head."""
    with torch.device("meta"):
        model, inputs = stack() if vocabulary == "whole" else language_model()
    mesh = pc.Mesh(pipeline=RANKS, device="h100")
    program = pc.compile(
        model, mesh, inputs, schedule=name, vocabulary=vocabulary, microbatches=microbatches,
        recompute="none", progress=False,
    )  # fmt: skip
    return program.report()


class Stack(nn.Module):
    """Layers alike, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(2 * RANKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of what comes out."""
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def stack() -> tuple[nn.Module, Any]:
    """Eight layers and a micro-batch."""
    return Stack(), (torch.zeros(4096, 4096, requires_grad=True),)


def language_model() -> tuple[nn.Module, Any]:
    """A GPT whose head weighs as much as several layers."""
    config = gpt.Config(
        layers=2 * RANKS, heads=16, hidden=2048, vocabulary=131072, sequence=2048, tied=False
    )
    tokens = torch.zeros(1, 2048, dtype=torch.long)
    return gpt.GPT(config), (tokens, tokens)
