"""The script of one rank: who it is, its modules, its instruction list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from parcompiler.capture.synchronized import is_synchronized
from parcompiler.codegen.layout import table, wrap
from parcompiler.codegen.listing import columns
from parcompiler.codegen.literals import literal, string
from parcompiler.codegen.quoting import docstring
from parcompiler.graph import Graph
from parcompiler.grid import Coordinate, Grid
from parcompiler.instruction import TRANSFERS, Instruction
from parcompiler.lower.lowered import Lowered
from parcompiler.pieces import Shard, own_rows
from parcompiler.runtime.program import Input, RankProgram, Tied, Value, channels_of, digest_of
from parcompiler.spmd.placement import local_shape

_SCRIPT = '''"""Rank {rank} of {size}: {stages} of {model}{replica}.

Started by `torchrun --nproc-per-node {size} main.py` as the process with RANK={rank}.
"""

from datetime import timedelta
from pathlib import Path

import torch

from parcompiler.runtime import {imports}

{stage_imports}

{tables}
# One training step. A receive is only posted where it stands; its first use waits for it.
INSTRUCTIONS = """
{instructions}
"""

# One evaluation: forwards only.
EVALUATION = """
{evaluation}
"""

{program}


def worker(timeout: timedelta | float = TIMEOUT) -> Worker:
    """This rank, with the weights beside this file; `timeout` is for waits, in seconds."""
{worker}


if __name__ == "__main__":
    run(worker)
'''

_INPUTS = "# The tensors of a batch, for one micro-batch: their key in the batch, shape, dtype."
_VALUES = (
    "# The tensors between stages, for one micro-batch; gradients come back unless it says not."
)
_TIED = "# Tensors that several ranks hold: their gradients are summed."
_TIED_OVER_DATA = (
    "# Tensors that several pipeline coordinates hold: their gradients are summed over all ranks "
    "there."
)
_BUCKETS = "# The tensors whose gradients are summed together over the data ranks."
_SHARDS = (
    "# Tensors that the tensor ranks hold in pieces: along which dimension, and its size on the "
    "whole."
)
_ROWS = "# Tensors that all ranks of a pipeline hold rows of: how many there are on the whole."
_ALIASES = "# Further names of tied tensors."
_UNSAVED = (
    "# Tensors that the model's state dict has not: constants, buffers that are not persistent."
)


def rank_program(lowered: Lowered, rank: int, device: str) -> RankProgram:
    """The value that the runtime executes for one rank; the script writes the same down."""
    graph, grid = lowered.graph, lowered.grid
    at = grid.coordinate(rank)
    own = at.pipeline
    placeholders = {node.name: node for node in graph.fx_graph.nodes if node.op == "placeholder"}
    lists = lowered.instructions
    shapes = _shapes(lowered, at.tensor)
    stages = tuple(stage.index for stage in lowered.on_rank(own))
    return RankProgram(
        rank=rank,
        size=grid.size,
        device=device,
        microbatches=lowered.microbatches,
        digest=digest_of(lists, graph.fingerprint, *_replicated(grid), *_hooked(graph)),
        loss=graph.loss.meta["val"].dtype,
        inputs={
            lowered.variables[placeholders[item.node]]: Input(
                item.key, item.shape, item.dtype, item.high
            )
            for item in graph.inputs
        },
        values={
            name: Value(
                shapes[name],
                value.dtype,
                value.differentiable and not {*stages} & {*value.detached},
                value.order,
            )
            for name, value in lowered.values.items()
        },
        tied={item.label: Tied(item.name, item.ranks) for item in lowered.tied},
        buckets={item.label: item.names for item in lowered.buckets if own in item.ranks},
        channels=channels_of(lists),
        stages=stages,
        instructions=on_rank(lists[own], at, grid),
        evaluation=on_rank(lowered.evaluation[own], at, grid),
        aliases={alias: item.name for item in graph.parameters for alias in item.aliases},
        positional=graph.positional,
        data=grid.data,
        tensor=grid.tensor,
        shards={item.name: item.shard for item in graph.parameters if item.shard is not None},
        asynchronous=lowered.asynchronous,
        synchronized=grid.data > 1 and is_synchronized(graph.fx_graph),
        rows=_rows(lowered),
        narrow=graph.narrow,
        unsaved=tuple(name for item in graph.parameters for name in item.unsaved),
    )


def _rows(lowered: Lowered) -> dict[str, int]:
    """The tensors that all ranks hold rows of, and how many rows each has."""
    spread = lowered.vocabulary
    return {} if spread is None else dict(zip(spread.tensors, spread.sizes, strict=True))


def _shapes(lowered: Lowered, tensor: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the values between stages, as a tensor coordinate has them."""
    found = {name: value.shape for name, value in lowered.values.items()}
    for node, name in lowered.variables.items():
        if name in found and "whole" in node.meta:
            (placement,) = node.meta["placements"]
            whole = tuple(node.meta["whole"].shape)
            found[name] = local_shape(whole, placement, lowered.tensor, tensor)
    return found


def on_rank(lines: Iterable[Instruction], at: Coordinate, grid: Grid) -> tuple[Instruction, ...]:
    """The list of a pipeline coordinate as that of the rank at `at`.

    A peer is the rank at the peer's pipeline coordinate and this rank's other ones, but the first
    of its tensor line where all ranks of a pipeline take part; a group that sums gradients has the
    ranks of all data coordinates.
    """
    if grid.copies == 1:
        return tuple(lines)
    return tuple(
        replace(
            line,
            peer=None if line.peer is None else _peer(line, line.peer, at, grid),
            ranks=grid.replicas(line.ranks, at.tensor),
        )
        for line in lines
    )


def _peer(line: Instruction, position: int, at: Coordinate, grid: Grid) -> int:
    """The rank that a line names by its pipeline coordinate."""
    return grid.rank(position, at.data, 0 if line.kind in TRANSFERS else at.tensor)


def _replicated(grid: Grid) -> Iterator[str]:
    """What distinguishes a program from the same with one rank at each pipeline coordinate."""
    if grid.copies > 1:
        yield str(grid)


def _hooked(graph: Graph) -> Iterator[str]:
    """What distinguishes a program whose model changes gradients."""
    yield from (f"{name}\n{hook.graph}" for name, hook in graph.hooks.items())


def rank_script(lowered: Lowered, program: RankProgram) -> str:
    """The text of `rank_N.py`."""
    at = program.coordinate
    stages = lowered.on_rank(at.pipeline)
    imports = ["Input", "RankProgram", "Worker", "run"]
    imports += ["Value"] if program.values else []
    imports += ["Tied"] if program.tied else []
    imports += ["Shard"] if program.shards else []
    classes = ", ".join(f"{stage.index}: Stage{stage.index}" for stage in stages)
    modules = [f"from stage_{s.index} import Stage{s.index}" for s in stages]
    modules += ["from vocabulary import Vocabulary"] if program.rows else []
    modules += ["from hooks import HOOKS"] if lowered.graph.hooks else []
    arguments = f"PROGRAM, {{{classes}}}, folder=Path(__file__).parent"
    arguments += ", vocabulary=Vocabulary" if program.rows else ""
    arguments += ", hooks=HOOKS" if lowered.graph.hooks else ""
    arguments += ", timeout=timeout"
    return _SCRIPT.format(
        rank=program.rank,
        size=program.size,
        model=docstring(lowered.graph.name),
        stages=f"stage {', '.join(str(stage.index) for stage in stages)}",
        replica=_replica(program),
        imports=", ".join(["TIMEOUT", *sorted(imports)]),
        stage_imports="\n".join(modules),
        tables="\n".join(_tables(program)),
        instructions=columns(program.instructions),
        evaluation=columns(program.evaluation),
        program=wrap(f"PROGRAM = RankProgram.parsed({', '.join(_fields(program))},)"),
        worker=wrap(f"return Worker({arguments})", 4),
    )


def _replica(program: RankProgram) -> str:
    """What tells a rank from the others at its pipeline coordinate."""
    at, words = program.coordinate, ""
    if program.tensor > 1:
        words += f", piece {at.tensor} of {program.tensor}"
    if program.rows:
        words += f", with {_own_rows(program)}"
    return words + (f" on batches of data coordinate {at.data}" if program.data > 1 else "")


def _own_rows(program: RankProgram) -> str:
    """Which rows of the vocabulary a rank holds, in words."""
    ranks = program.grid.plane(program.coordinate.data)
    words = []
    for size in dict.fromkeys(program.rows.values()):
        own = own_rows(size, len(ranks), ranks.index(program.rank))
        which = f"rows {own.start} to {own.start + own.size - 1}" if own.size else "no rows"
        words.append(f"{which} of a vocabulary of {size}")
    return " and ".join(words)


def _tables(program: RankProgram) -> Iterator[str]:
    """The tables of what goes in and out, those that have a row."""
    tied = {label: _tied(item) for label, item in program.tied.items()}
    yield from _table(_INPUTS, "INPUTS", {n: _input(item) for n, item in program.inputs.items()})
    yield from _table(_VALUES, "VALUES", {n: _value(item) for n, item in program.values.items()})
    yield from _table(_TIED if program.data == 1 else _TIED_OVER_DATA, "TIED", tied)
    buckets = {label: literal(names) for label, names in program.buckets.items()}
    yield from _table(_BUCKETS, "BUCKETS", buckets)
    shards = {name: _shard(item) for name, item in program.shards.items()}
    yield from _table(_SHARDS, "SHARDS", shards)
    yield from _table(_ROWS, "ROWS", {n: literal(size) for n, size in program.rows.items()})
    yield from _table(_ALIASES, "ALIASES", {a: string(n) for a, n in program.aliases.items()})
    if program.unsaved:
        yield "\n".join([_UNSAVED, wrap(f"UNSAVED = {literal(program.unsaved)}"), ""])


def _table(title: str, name: str, rows: Mapping[str, str]) -> Iterator[str]:
    """A dict with a line per entry, under a comment; nothing when it is empty."""
    if rows:
        quoted = [(string(key), value) for key, value in rows.items()]
        yield "\n".join([title, *table(f"{name} = {{", quoted, "}", 0), ""])


def _fields(program: RankProgram) -> Iterator[str]:
    """The fields of the program, without those that say nothing."""
    yield f"rank={program.rank}"
    yield f"size={program.size}"
    yield f"device={literal(program.device)}"
    yield f"microbatches={program.microbatches}"
    yield f"digest={literal(program.digest)}"
    yield f"loss={literal(program.loss)}"
    if program.data > 1:
        yield f"data={program.data}"
    if program.tensor > 1:
        yield f"tensor={program.tensor}"
    for name in ("inputs", "values", "tied", "buckets", "shards", "rows", "aliases", "unsaved"):
        if getattr(program, name):
            yield f"{name}={name.upper()}"
    if program.channels:
        yield f"channels={literal(program.channels)}"
    yield f"stages={literal(program.stages)}"
    yield "instructions=INSTRUCTIONS"
    yield "evaluation=EVALUATION"
    if program.positional:
        yield "positional=True"
    if program.asynchronous:
        yield "asynchronous=True"
    if program.synchronized:
        yield "synchronized=True"
    if program.narrow is not None:
        yield f"narrow={literal(program.narrow)}"


def _input(item: Input) -> str:
    """An input as the script writes it."""
    more = "" if item.high is None else f", high={item.high}"
    return f"Input({literal(item.key)}, {literal(tuple(item.shape))}, {literal(item.dtype)}{more})"


def _value(value: Value) -> str:
    """A value as the script writes it."""
    more = "" if value.differentiable else ", differentiable=False"
    more += f", order={literal(value.order)}" if value.order else ""
    return f"Value({literal(tuple(value.shape))}, {literal(value.dtype)}{more})"


def _tied(item: Tied) -> str:
    """A tied tensor as the script writes it."""
    return f"Tied({literal(item.name)}, {literal(item.ranks)})"


def _shard(item: Shard) -> str:
    """How a tensor is split, as the script writes it."""
    return f"Shard({item.dim}, {literal(item.sizes)})"
