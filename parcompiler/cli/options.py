"""The options that several commands share, with help texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import starmap
from typing import Any, TypeVar

import click

from parcompiler.cli import words
from parcompiler.cli.output import Settings
from parcompiler.errors import path_of

Command = TypeVar("Command", bound=Callable[..., Any])
Decorator = Callable[[Command], Command]


MOST = 2**31 - 1  # of counts: sizes and steps beyond overflow somewhere

PATH = words.Typed("PATH", path_of, files=True)
SEED = click.IntRange(min=0, max=2**63 - 1)  # of torch.manual_seed


class Count(click.IntRange):
    """An integer from `min` to MOST; --help shows only the lower bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number. Raises a usage error."""
        number = super().convert(value, param, ctx)
        if number > MOST:
            self.fail(f"{value} is more than {MOST:,}.", param, ctx)
        return number


class Real(click.FloatRange):
    """A number within bounds, and `finite` unless that is False; click's range takes nan, too."""

    def __init__(
        self, min: float | None = None, max: float | None = None, *, min_open: bool = False,
        max_open: bool = False, finite: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(min, max, min_open, max_open)
        self.finite = finite

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number. Raises a usage error."""
        number = super().convert(value, param, ctx)
        if math.isnan(number) or (self.finite and math.isinf(number)):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


COUNT = Count(min=1)
NUMBER = Count(min=0)
AMOUNT = Real(min=0)


def _set(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Store --debug or --quiet in the settings for `run` and every command."""
    settings = context.find_root().obj
    assert isinstance(settings, Settings)
    if value:
        setattr(settings, str(parameter.name), True)


def _together(*options: Decorator[Any]) -> Decorator[Any]:
    """Options in the order in which --help lists them."""

    def decorated(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


# For every command.
remarks = _together(
    click.option(
        "-q", "--quiet", is_flag=True, expose_value=False, callback=_set, is_eager=True,
        help="No progress and no remarks on standard error.",
    ),
    click.option(
        "--debug", is_flag=True, expose_value=False, callback=_set, is_eager=True,
        help="Show the traceback of an error.",
    ),
)  # fmt: skip
common = _together(
    click.option(
        "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True,
        help="What goes to standard output: text for people, JSON for scripts.",
    ),
    remarks,
)  # fmt: skip

# Files for a report.
pictures = _together(
    click.option("--details", is_flag=True, help="Print all tables of the report."),
    click.option("--html", type=PATH, help="Write the report as a page: one file."),
    click.option(
        "--trace", type=PATH, help="Write the simulated step as a trace for ui.perfetto.dev."
    ),
)

# The model, and all options for its plan: option, type, help.
_PLANNING: tuple[tuple[str, Any, str], ...] = (
    ("--mesh", words.MESH,
     "Ranks along each axis, such as pipeline=4,tensor=2,data=2; an axis left "
     "out is 1. auto weighs all meshes of --nodes of --devices-per-node. Needed, unless "
     "--plan says it."),
    ("--nodes", COUNT,
     "Nodes of the cluster, for --mesh auto. Default: 1."),
    ("--devices-per-node", COUNT,
     "Devices of a node, for --mesh auto. Default: as many as the device's file "
     "says, 8 for most."),
    ("--device", words.DEVICE,
     f"What every rank is: {', '.join(words.devices())}, or a JSON file with the "
     "figures of another (pc.Device). Or one for each pipeline coordinate, such as "
     "h100,h100,l40s. Default: cpu."),
    ("--microbatches", COUNT,
     "Micro-batches of a step on each data rank. More of them keep a pipeline busier. Default: 4 "
     "for each pipeline rank. With --mesh auto: those of all data ranks together, by default 4 "
     "for each device."),
    ("--microbatch", words.ROWS,
     "With --mesh auto: also try micro-batches of these numbers of rows, where a step keeps its "
     "rows; auto: 1, 2, 4, 8 and so on. Default: given, the rows of the model's inputs."),
    ("--schedule", words.listed("NAME|FILE", words.SCHEDULES),
     f"{', '.join(words.SCHEDULES)}; or a CSV of torch.distributed.pipelining. "
     "auto is the fastest that fits, search finds an order for this model."),
    ("--virtual-stages", COUNT,
     "Stages on each rank, for --schedule interleaved."),
    ("--vocabulary", words.listed("METHOD", words.VOCABULARY),
     f"Where embedding and head are computed: {', '.join(words.VOCABULARY)}. "
     "whole leaves them on one stage, the others spread them over the pipeline."),
    ("--stages", words.STAGES,
     "auto divides by predicted time and memory, even gives each stage equally "
     "many layers; or the number of blocks of each."),
    ("--recompute", words.RECOMPUTE,
     "Which blocks run again in their backward instead of keeping activations: "
     "auto (what memory forces), none, selective (their norms, gates and gathers), full, "
     "offload (as selective, and what is kept waits in the host's memory), "
     "or patterns: 'layers.*=yes,head=no'."),
    ("--zero", words.listed("LEVEL", words.ZERO),
     "What data ranks share out: 0 nothing, 1 optimizer states and masters, 2 gradients "
     "too, 3 parameters too; auto by predicted time under memory. Default: auto."),
    ("--updates", words.listed("NAME", words.UPDATES),
     "How data ranks bring together what they learn: all-reduce averages gradients, "
     "parameter-server lets one rank of each data row update for all, asynchronous "
     "lets none wait for the others, local averages weights. Default: all-reduce."),
    ("--staleness", NUMBER,
     "With --updates asynchronous: steps that a data rank may be ahead of the "
     "slowest. Default: 2."),
    ("--average-every", COUNT,
     "With --updates local: steps from one average to the next. Default: 16."),
    ("--outer", words.listed("NAME", words.OUTER),
     "With --updates local: the optimizer that takes each average as a step. Default: nesterov, "
     "with a learning rate of 0.7 and a momentum of 0.9."),
    ("--compression", words.listed("NAME", words.COMPRESSIONS),
     "Compression of gradients between data ranks: bf16, fp16, or powersgd (two factors for each "
     "matrix, with error feedback). Default: none."),
    ("--compression-rank", COUNT,
     "Rank of the factors of --compression powersgd. Default: 4."),
    ("--shard", words.PIN,
     "Pin how tensor ranks hold parameters: '*.ffn.up.weight=S(0)' splits along dimension 0, R "
     "keeps whole. May be repeated; the compiler decides the rest."),
    ("--precision", words.listed("NAME", words.PRECISIONS),
     "fp32, fp64, or bf16 and fp16 with masters in float32. Default: the model's "
     "own."),
    ("--exact", bool,
     "Keep the model's own operators, also where attention has a kernel that differs by rounding "
     "alone."),
    ("--loss-weights", words.listed("WORD", words.LOSS_WEIGHTS),
     "tokens: the loss of a step is the mean over all targets that count in its "
     "micro-batches and data ranks. Default: the mean of the micro-batches' means."),
    ("--costs", words.listed("WORD", words.COSTS),
     "Where the times of blocks come from: model (the device's figures), measured "
     "(each distinct block, the passes of a spread vocabulary and what tensor ranks "
     "exchange are run on this machine), or compiled (likewise, by torch.compile's "
     "compiler). Default: model."),
    ("--optimizer", words.listed("NAME", words.OPTIMIZERS),
     f"The optimizer whose states count in the memory of a plan: {', '.join(words.OPTIMIZERS)}. "
     "Default: adamw."),
    ("--memory-margin", Real(0, 1, max_open=True),
     "Part of each device's memory that plans keep free, such as 0.05. Default: 0."),
    ("--plan", PATH,
     "Decide nothing, take this plan: a file of `plan --json`, perhaps edited, or "
     "an exported folder. Options besides it must agree with it."),
    ("--checkpoint", PATH,
     "Compile what this checkpoint's run was compiled from (a folder: its newest) for another "
     "mesh, with as many samples in a step. Options given here replace those of the run; MODEL is "
     "needed where Python makes the model."),
    ("--sequence", COUNT,
     "Tokens in a row of a micro-batch, for hf: models. Default: the longest of "
     "the model, at most 2048."),
    ("--rows", COUNT,
     "Rows of a micro-batch, for hf: models. Default: 1."),
)  # fmt: skip
_PARAMETERS = {
    "--shard": ["pins"],
    "--plan": ["plan_path"],
}  # where the name alone is unclear


def _option(name: str, kind: Any, text: str) -> Decorator[Any]:
    """Make an option of the table."""
    if kind is bool:
        return click.option(name, is_flag=True, default=None, help=text)
    metavar = "N" if kind in (COUNT, NUMBER) else "FILE" if kind is PATH else None
    return click.option(
        name, *_PARAMETERS.get(name, ()), type=kind, metavar=metavar, multiple=kind is words.PIN,
        help=text,
    )  # fmt: skip


planning = _together(
    # A checkpoint may have it.
    click.argument("model", metavar="MODEL", type=words.listed("MODEL", ()), required=False),
    *starmap(_option, _PLANNING),
)
