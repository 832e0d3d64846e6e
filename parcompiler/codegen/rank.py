"""The script of a rank: its title, its modules, its instruction list.

rank_0.py   for ranks 0 to 3: the program of pipeline coordinate 0; the process's RANK
rank_4.py   for ranks 4 to 7  tells which rank it is
rank_5.py   says who rank 5 is, and runs rank_4.py
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import fx

from parcompiler.capture.effects import effects_of
from parcompiler.capture.inputs import flat
from parcompiler.capture.synchronized import is_synchronized
from parcompiler.codegen.layout import table, wrap
from parcompiler.codegen.listing import written
from parcompiler.codegen.literals import construction, literal, string
from parcompiler.codegen.quoting import WIDTH, docstring, paragraph
from parcompiler.data_updates import ALL_REDUCE
from parcompiler.graph import Graph
from parcompiler.instruction import MESSAGES
from parcompiler.lower.lowered import Lowered
from parcompiler.pieces import Shard, own_rows
from parcompiler.report.names import numbers
from parcompiler.runtime.program import (
    PLAIN,
    Input,
    KeptOutput,
    RankProgram,
    Tied,
    Value,
    channels_of,
    digest_of,
    on_rank,
)
from parcompiler.spmd.placement import R, shard_of

_SCRIPT = '''"""{title}

Started by `torchrun --nproc-per-node {size} main.py` as {process}.
"""

from datetime import timedelta
from pathlib import Path

import torch

{imports}

{stage_imports}

{tables}
{step}
INSTRUCTIONS = """
{instructions}
"""

# One evaluation: forwards only.
EVALUATION = """
{evaluation}
"""

{program}


def worker(timeout: timedelta | float = TIMEOUT, compiled: bool = {compiled}) -> Worker:
    """This rank, with the weights beside this file. A wait for other ranks may take `timeout`
    seconds; `compiled` runs layers through torch.compile's compiler."""
{worker}


if __name__ == "__main__":
    run(worker)
'''

_FURTHER_SCRIPT = '''"""{title}

{facts}

Started by `torchrun --nproc-per-node {size} main.py` as the process with RANK={rank}.
"""

from parcompiler.runtime import run

from rank_{first} import worker

if __name__ == "__main__":
    run(worker)
'''

_TITLES = {
    "inputs": "The tensors of one micro-batch: their key in the batch, shape and dtype.",
    "constants": "Values of a batch that are no tensors: all steps are computed with these.",
    "values": "The tensors between stages, for one micro-batch. A gradient comes back for each but "
    "those with differentiable=False.",
    "tied": "Tensors that several ranks hold: their gradients are summed.",
    "buckets": "The tensors whose gradients are summed together over the data ranks.",
    "shards": "Tensors of which each tensor rank holds a piece: the split dimension and its size.",
    "experts": "Tensors of which each expert rank holds a piece: the number of experts.",
    "rows": "Tensors of which every rank of a pipeline holds some rows: the number of all rows.",
    "row_gradients": "Tables whose gradients are the rows that a step looks up, so many on a rank.",
    "aliases": "Further names of tied tensors.",
    "outputs": "Outputs of the model that predictions return: their values, and who makes them.",
}
_TIED_OVER_DATA = (
    "Tensors that several pipeline coordinates hold: their gradients are summed over all ranks "
    "there."
)
_UNSAVED = "Tensors that the model's state dict lacks: constants, buffers that are not persistent."
_STEP = "One training step. A receive is only posted where it stands; its first use waits for it."
_PEERS = (
    " Peers and groups are pipeline coordinates: for this process, coordinate q is rank "
    "q * {copies} + RANK % {copies}"
)
_PEERS_OF_ROWS = ", and the first of its tensor ranks where all ranks of a pipeline take part"
_PEERS_OF_DATA = "; gradients are summed over the ranks of all data coordinates there"


def rank_program(lowered: Lowered, rank: int, device: str) -> RankProgram:
    """The program that the runtime executes for one rank; its script contains the same value."""
    graph, grid = lowered.graph, lowered.grid
    at = grid.coordinate(rank)
    position = at.pipeline
    lists, spread = lowered.instructions, lowered.vocabulary
    stages = tuple(stage.index for stage in lowered.on_rank(position))
    return RankProgram(
        rank=rank,
        size=grid.size,
        device=device,
        microbatches=lowered.microbatches,
        digest=digest_of(lists, graph.fingerprint, *_distinguishing(lowered)),
        loss=graph.loss.meta["val"].dtype,
        inputs={
            lowered.variables[graph.placeholders[item.node]]: Input(
                item.key, item.shape, item.dtype, item.high
            )
            for item in graph.inputs
        },
        values={
            name: Value(
                tuple(
                    size if shard is None else shard.length(grid.tensor, at.tensor)
                    for size, shard in _dimensions(lowered, name)
                ),
                value.dtype,
                value.differentiable and not {*stages} & {*value.detached},
                value.order,
            )
            for name, value in lowered.values.items()
        },
        tied={item.label: Tied(item.name, item.ranks) for item in lowered.tied},
        buckets={item.label: item.names for item in lowered.buckets if position in item.ranks},
        channels=channels_of(lists),
        stages=stages,
        instructions=on_rank(lists[position], at, grid, lowered.updates),
        evaluation=on_rank(lowered.evaluation[position], at, grid),
        aliases={alias: item.name for item in graph.parameters for alias in item.aliases},
        positional=graph.positional,
        data=grid.data,
        tensor=grid.tensor,
        context=grid.context,
        expert=grid.expert,
        shards={item.name: item.shard for item in graph.parameters if item.shard is not None},
        experts={item.name: item.experts for item in graph.parameters if item.experts},
        asynchronous=lowered.asynchronous,
        zero=lowered.zero,
        updates=lowered.updates,
        synchronized=grid.data > 1 and is_synchronized(graph.fx_graph),
        rows=spread.tensors if spread is not None else {},
        narrow=graph.narrow,
        unsaved=tuple(name for item in graph.parameters for name in item.unsaved),
        updated=graph.updates_weights,
        outputs={name: _kept(lowered, name, node) for name, node in graph.kept.items()},
        row_gradients={x.name: x.looked_up // grid.data for x in graph.parameters if x.looked_up},
        constants=_constants(graph),
    )


def _kept(lowered: Lowered, name: str, node: fx.Node) -> KeptOutput:
    """A kept output: the stage that makes it, and its placement on tensor ranks."""
    graph, value = lowered.graph, lowered.variables[node]
    whole: torch.Tensor = node.meta.get("whole", node.meta["val"])
    (placement,) = node.meta.get("placements", (R,))
    shard = None
    if placement.kind == "S":
        shard = shard_of(placement, whole.shape[placement.dim])
    read = effects_of(graph).behind([node])
    inputs = (n for n in graph.fx_graph.nodes if n in read and n.name in graph.input_nodes)
    head = None if graph.vocabulary is None else graph.vocabulary.head
    functions, dtype = ({} if head is None else head.outputs).get(name, (None, whole.dtype))
    return KeptOutput(
        value=value,
        home=next(stage.rank for stage in lowered.stages if value in stage.keeps),
        shape=tuple(whole.shape),
        dtype=dtype,
        inputs=tuple(lowered.variables[n] for n in inputs),
        dim=None if shard is None else shard.dim,
        sizes=() if shard is None else shard.sizes,
        partial=placement.kind == "P",
        head="" if functions is None else "logits" if functions else "product",
    )


def _dimensions(lowered: Lowered, name: str) -> list[tuple[int, Shard | None]]:
    """The sizes of a value between stages, with the shard of a dimension that is split unevenly."""
    dimensions: list[tuple[int, Shard | None]] = [
        (size, None) for size in lowered.values[name].shape
    ]
    for node in (node for node, variable in lowered.variables.items() if variable == name):
        if "whole" not in node.meta:
            continue
        (placement,) = node.meta["placements"]
        if placement.kind == "S":
            whole: int = node.meta["whole"].shape[placement.dim]
            shard = shard_of(placement, whole)
            even = shard.even(lowered.tensor)
            size = shard.length(lowered.tensor, 0)
            dimensions[placement.dim] = (size, None if even else shard)
    return dimensions


def _distinguishing(lowered: Lowered) -> Iterator[str]:
    """Properties that distinguish programs with equal lists: copies, updates of data ranks,
    hooks."""
    if lowered.grid.copies > 1:
        yield str(lowered.grid)
    if lowered.updates != ALL_REDUCE:
        yield str(lowered.updates)
    if lowered.graph.counts is not None:
        yield "tokens"
    yield from (f"{name}\n{hook.graph}" for name, hook in lowered.graph.hooks.items())


def rank_script(lowered: Lowered, program: RankProgram, *, compiled: bool = False) -> str:
    """The text of `rank_N.py` for the first rank N at a pipeline coordinate; all there run it.

    `compiled` is the script's default for compiling layers.
    """
    position, copies = program.coordinate.pipeline, program.grid.copies
    stages = lowered.on_rank(position)
    tables = "\n".join(_tables(lowered, program))
    values = ("Input", "KeptOutput", "Shard", "Tied", "Value")
    names = [name for name in values if f"{name}(" in tables]
    names += ["RankProgram", "Worker", "run", *["rank_among"] * (copies > 1)]
    names += ["DataUpdates"] * (program.updates != ALL_REDUCE)
    modules = [f"from stage_{s.index} import Stage{s.index}" for s in stages]
    modules += ["from vocabulary import Vocabulary"] if program.rows else []
    modules += ["from hooks import HOOKS"] if lowered.graph.hooks else []
    modules += ["from counts import counted"] if lowered.graph.counts is not None else []
    classes = ", ".join(f"{stage.index}: Stage{stage.index}" for stage in stages)
    arguments = f"PROGRAM, {{{classes}}}, folder=Path(__file__).parent"
    arguments += ", vocabulary=Vocabulary" if program.rows else ""
    arguments += ", hooks=HOOKS" if lowered.graph.hooks else ""
    arguments += ", counted=counted" if lowered.graph.counts is not None else ""
    return _SCRIPT.format(
        title=_title(lowered, program, shared=copies > 1),
        size=program.size,
        process=f"{'a process' if copies > 1 else 'the process'} with RANK={_ranks(program)}",
        imports=_imports(["TIMEOUT", *sorted(names)]),
        stage_imports="\n".join(modules),
        tables=tables,
        step=_step(program),
        instructions=written(lowered.instructions[position], sections=True),
        evaluation=written(lowered.evaluation[position]),
        program=wrap(f"PROGRAM = RankProgram.parsed({', '.join(_fields(program))},)"),
        compiled=compiled,
        worker=wrap(f"return Worker({arguments}, timeout=timeout, compiled=compiled)", 4),
    )


def further_script(lowered: Lowered, program: RankProgram) -> str:
    """The text of `rank_N.py` for a rank that is not the first at its pipeline coordinate."""
    peers = {x.peer for x in program.instructions if x.kind in MESSAGES and x.peer is not None}
    groups = dict.fromkeys(x.ranks for x in program.instructions if x.ranks)
    first = program.grid.rank(program.coordinate.pipeline)
    facts = f"It runs `rank_{first}.py`"
    if peers:
        facts += f", exchanges values with rank{'s' * (len(peers) > 1)} {numbers(sorted(peers))}"
    if groups:
        facts += f", sums gradients over ranks {' and '.join(map(numbers, groups))}"
    return _FURTHER_SCRIPT.format(
        title=_title(lowered, program),
        facts=paragraph(f"{facts}."),
        size=program.size,
        rank=program.rank,
        first=first,
    )


def _title(lowered: Lowered, program: RankProgram, *, shared: bool = False) -> str:
    """The title of a rank, or of the ranks that share a script."""
    at = program.coordinate
    stages = [stage.index for stage in lowered.on_rank(at.pipeline)]
    duty = f"stage{'s' * (len(stages) > 1)} {numbers(stages)}"
    who = f"Ranks {_ranks(program)}" if shared else f"Rank {program.rank}"
    text = f"{who} of {program.size}: {duty} of {docstring(lowered.graph.name)}"
    for name, place, count in (
        ("tensor rank", at.tensor, program.tensor),
        ("context rank", at.context, program.context),
        ("data coordinate", program.batch, program.grid.batches),
    ):
        if count > 1:
            text += f", {name}s 0 to {count - 1}" if shared else f", {name} {place} of {count}"
    if program.rows:
        text += f", with {_own_rows(program, shared=shared)}"
    return paragraph(f"{text}.")


def _ranks(program: RankProgram) -> str:
    """The ranks at a pipeline coordinate."""
    first, copies = program.grid.rank(program.coordinate.pipeline), program.grid.copies
    return f"{first} to {first + copies - 1}" if copies > 1 else str(first)


def _imports(names: list[str]) -> str:
    """The line that imports the verbs of the runtime."""
    line = f"from parcompiler.runtime import {', '.join(names)}"
    rows = "".join(f"    {name},\n" for name in names)
    return line if len(line) <= WIDTH else f"from parcompiler.runtime import (\n{rows})"


def _step(program: RankProgram) -> str:
    """The comment above the instructions."""
    text = _STEP
    if program.grid.copies > 1:
        text += _PEERS.format(copies=program.grid.copies)
        text += _PEERS_OF_ROWS if program.rows and program.tensor > 1 else ""
        text += f"{_PEERS_OF_DATA if program.data > 1 else ''}."
    return _comment(text)


def _comment(text: str) -> str:
    """A comment of as many lines as it takes."""
    return textwrap.fill(text, WIDTH, initial_indent="# ", subsequent_indent="# ")


def _constants(graph: Graph) -> dict[str, object]:
    """The non-tensor values of the inputs that the model was captured on, by key."""
    leaves = () if graph.sample is None else flat(graph.sample)
    return {key: leaf for key, leaf in leaves if isinstance(leaf, PLAIN)}


def _own_rows(program: RankProgram, *, shared: bool) -> str:
    """Which rows of the vocabulary a rank holds, in words."""
    ranks = program.grid.plane(program.coordinate.data)
    words = []
    for size in dict.fromkeys(program.rows.values()):
        span = own_rows(size, len(ranks), ranks.index(program.rank))
        which = f"rows {span.start} to {span.start + span.size - 1}" if span.size else "no rows"
        words.append(f"{'rows' if shared else which} of a vocabulary of {size}")
    return " and ".join(words)


def _tables(lowered: Lowered, program: RankProgram) -> Iterator[str]:
    """The tables of inputs, values and the like, without empty ones."""
    if program.grid.copies > 1:
        first, copies = program.grid.rank(program.coordinate.pipeline), program.grid.copies
        yield f"RANK = rank_among(range({first}, {first + copies}))  # the rank of this process\n"
    for field, title in _TITLES.items():
        rows = [
            (string(key), _entry(lowered, key, item))
            for key, item in getattr(program, field).items()
        ]
        if rows:
            over_data = field == "tied" and program.data > 1
            comment = _comment(_TIED_OVER_DATA if over_data else title)
            lines = table(f"{field.upper()} = {{", rows, "}", 0)
            yield "\n".join([comment, *lines, ""])
    if program.unsaved:
        yield "\n".join([_comment(_UNSAVED), wrap(f"UNSAVED = {literal(program.unsaved)}"), ""])


def _fields(program: RankProgram) -> Iterator[str]:
    """The fields of the program as arguments, without those that have their default."""
    constants = {"instructions", "evaluation", "unsaved", *_TITLES}
    constants |= {"rank"} if program.grid.copies > 1 else set()
    for field in fields(program):
        value = getattr(program, field.name)
        if value != field.default and value != {}:
            text = field.name.upper() if field.name in constants else construction(value)
            yield f"{field.name}={text}"


def _entry(lowered: Lowered, name: str, item: object) -> str:
    """An entry of a table; a size that differs between tensor ranks is computed from RANK."""
    text = construction(item)
    if not isinstance(item, Value):
        return text
    sizes = [
        str(size)
        if shard is None
        else f"{construction(shard)}.length({lowered.tensor}, RANK % {lowered.tensor})"
        for size, shard in _dimensions(lowered, name)
    ]
    shape = f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"
    return text.replace(literal(tuple(item.shape)), shape, 1)
