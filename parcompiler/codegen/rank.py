"""The script of one rank: who it is, its modules, its instruction list."""

from __future__ import annotations

from collections.abc import Iterator

from parcompiler.codegen.literals import literal
from parcompiler.instruction import listing
from parcompiler.lower.lowered import Lowered
from parcompiler.runtime.program import Input, RankProgram, Tied, Value, channels_of, digest_of

_SCRIPT = '''"""Rank {rank} of {size}: {stages} of {model}.

Started by `torchrun --nproc-per-node {size} main.py` as the process with RANK={rank}.
"""

from pathlib import Path

import torch

from parcompiler.runtime import {imports}
{stage_imports}

# The tensors of a batch, for one micro-batch: where they stand in the batch, shape, dtype.
INPUTS = {inputs}

# The tensors between stages, for one micro-batch: shape, dtype, whether a gradient comes back.
VALUES = {values}
{tied}
# One training step. A receive is only posted where it stands; its first use waits for it.
INSTRUCTIONS = """
{instructions}
"""

# One evaluation: forwards only.
EVALUATION = """
{evaluation}
"""

PROGRAM = RankProgram.parsed(
    rank={rank},
    size={size},
    device={device},
    microbatches={microbatches},
    digest={digest},
    loss={loss},
    inputs=INPUTS,
    values=VALUES,
    tied={tied_name},
    channels={channels},
    stages={stage_numbers},
    instructions=INSTRUCTIONS,
    evaluation=EVALUATION,
    aliases={aliases},
    positional={positional},
)


def worker() -> Worker:
    """This rank, with the weights beside this file."""
    return Worker(PROGRAM, {{{stages_map}}}, stored(Path(__file__).parent / "weights", PROGRAM))


if __name__ == "__main__":
    run(worker())
'''


def rank_program(lowered: Lowered, rank: int, device: str) -> RankProgram:
    """The value that the runtime executes for one rank; the script writes the same down."""
    graph = lowered.graph
    placeholders = {node.name: node for node in graph.fx_graph.nodes if node.op == "placeholder"}
    lists = lowered.instructions
    return RankProgram(
        rank=rank,
        size=lowered.size,
        device=device,
        microbatches=lowered.microbatches,
        digest=digest_of(lists, graph.fingerprint),
        loss=graph.loss.meta["val"].dtype,
        inputs={
            lowered.variables[placeholders[item.node]]: Input(
                item.key, item.shape, item.dtype, item.high
            )
            for item in graph.inputs
        },
        values={
            name: Value(value.shape, value.dtype, value.differentiable)
            for name, value in lowered.values.items()
        },
        tied={item.label: Tied(item.name, item.ranks) for item in lowered.tied},
        channels=channels_of(lists),
        stages=tuple(stage.index for stage in lowered.on_rank(rank)),
        instructions=lists[rank],
        evaluation=lowered.evaluation[rank],
        aliases={alias: item.name for item in graph.parameters for alias in item.aliases},
        positional=graph.positional,
    )


def rank_script(lowered: Lowered, program: RankProgram) -> str:
    """The text of `rank_N.py`."""
    stages = lowered.on_rank(program.rank)
    imports = ["Input", "RankProgram", "Worker", "run", "stored"]
    imports += ["Value"] if program.values else []
    imports += ["Tied"] if program.tied else []
    numbers = ", ".join(str(stage.index) for stage in stages)
    return _SCRIPT.format(
        rank=program.rank,
        size=program.size,
        model=lowered.graph.name,
        stages=f"stage {numbers}",
        imports=", ".join(sorted(imports)),
        stage_imports="\n".join(f"from stage_{s.index} import Stage{s.index}" for s in stages),
        inputs=_table((n, _input(i)) for n, i in program.inputs.items()),
        values=_table((n, _value(v)) for n, v in program.values.items()),
        tied=_tied(program),
        tied_name="TIED" if program.tied else "{}",
        instructions=listing(program.instructions),
        evaluation=listing(program.evaluation),
        device=literal(program.device),
        microbatches=program.microbatches,
        digest=literal(program.digest),
        loss=program.loss,
        channels=literal(program.channels),
        stage_numbers=literal(program.stages),
        aliases=_table(((a, literal(n)) for a, n in program.aliases.items()), indent=4),
        positional=program.positional,
        stages_map=", ".join(f"{s.index}: Stage{s.index}" for s in stages),
    )


def _input(item: Input) -> str:
    """An input as the script writes it."""
    more = "" if item.high is None else f", high={item.high}"
    return f"Input({literal(item.key)}, {_shape(item)}, {item.dtype}{more})"


def _value(value: Value) -> str:
    """A value as the script writes it."""
    more = "" if value.differentiable else ", differentiable=False"
    return f"Value({_shape(value)}, {value.dtype}{more})"


def _shape(item: Input | Value) -> str:
    """A shape as a tuple."""
    return literal(tuple(item.shape))


def _tied(program: RankProgram) -> str:
    """The table of tied tensors, when there are any."""
    if not program.tied:
        return ""
    rows = _table(
        (n, f"Tied({literal(t.name)}, {literal(t.ranks)})") for n, t in program.tied.items()
    )
    return f"\n# Tensors that several ranks hold: their gradients are summed.\nTIED = {rows}\n"


def _table(rows: Iterator[tuple[str, str]], indent: int = 0) -> str:
    """A dict literal with a line per entry."""
    pad = " " * indent
    lines = [f"{pad}    {literal(key)}: {value}," for key, value in rows]
    return "\n".join(["{", *lines, pad + "}"]) if lines else "{}"
