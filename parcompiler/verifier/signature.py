"""Rules on a program's agreement with its plan and model: degrees, stages, inputs and tensors.

The batch is divided by the keys of the inputs, and weights by the pieces of the tensors. So each is
compared with an independent source: the plan, the placeholders of the graph, the batch that the
model was captured on, and the model's own tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import fx

from parcompiler.capture.inputs import arguments, flat
from parcompiler.data_updates import ALL_REDUCE
from parcompiler.graph import Parameter
from parcompiler.lower.lowered import Lowered
from parcompiler.pieces import Shard
from parcompiler.plan import Plan, StageChoice
from parcompiler.spmd.placement import Placement, local_shape, shard_of
from parcompiler.verifier.fault import Fault, repeated
from parcompiler.verifier.wiring import Wiring

COUNTED = "degrees and micro-batches are positive"
PLANNED = "the program is that of its plan"
BATCH = "every input is the tensor of the batch that the model reads"
TENSORS = "every tensor is as the model has it"
PIECES = "tensor ranks hold the pieces that the graph computes with"


def faults(wiring: Wiring) -> Iterator[Fault]:
    """All faults of inputs, tensors and degrees."""
    lowered = wiring.lowered
    counts = {"data": lowered.data, "tensor": lowered.tensor, "microbatches": lowered.microbatches}
    for name, count in counts.items():
        if count < 1:
            yield Fault(COUNTED, f"{name} is {count}")
    if lowered.zero and (lowered.data == 1 or lowered.asynchronous):
        reason = "updates stage by stage" if lowered.asynchronous else "has one data rank"
        yield Fault(COUNTED, f"zero is {lowered.zero}, and the program {reason}")
    if lowered.updates != ALL_REDUCE and (lowered.data == 1 or lowered.asynchronous):
        yield Fault(COUNTED, f"data ranks have {lowered.updates}, and the program none, or UPDATEs")
    if lowered.plan is not None:
        yield from _planned(lowered, lowered.plan)
    placeholders = [n for n in wiring.graph.fx_graph.nodes if n.op == "placeholder"]
    yield from _listed(wiring, placeholders)
    nodes = {node.name: node for node in placeholders}
    yield from _inputs(wiring, nodes)
    for item in wiring.graph.parameters:
        if item.node in nodes:
            yield from _tensor(wiring, item, nodes[item.node])
            if lowered.tensor >= 1:
                yield from _pieces(wiring, item, nodes[item.node])


def _planned(lowered: Lowered, plan: Plan) -> Iterator[Fault]:
    """Degrees, stages and recomputed blocks are those of the plan."""
    pairs = {
        "pipeline": (lowered.size, plan.mesh.pipeline),
        "tensor": (lowered.tensor, plan.mesh.tensor),
        "data": (lowered.data, plan.mesh.replicas),
        "context": (lowered.context, plan.mesh.context),
        "expert": (lowered.expert, plan.mesh.expert),
        "microbatches": (lowered.microbatches, plan.microbatches),
        "zero": (lowered.zero, plan.zero or 0),
        "updates": (lowered.updates, plan.updates or ALL_REDUCE),
    }
    for name, (actual, wanted) in pairs.items():
        if actual != wanted:
            yield Fault(PLANNED, f"{name} is {actual}, and {wanted} in the plan")
    again = frozenset(plan.recompute or ())
    for stage in lowered.stages:
        for call in stage.calls:
            asked = call.block.name in again
            for word, has, wanted in (
                ("recomputed", call.recompute, asked and not plan.offload),
                ("offloaded", call.offload, asked and plan.offload),
            ):
                if has != wanted:
                    verb = "is" if has else "is not"
                    yield Fault(PLANNED, f"{call.block.name} {verb} {word}, unlike in the plan")
            if call.again and not plan.selective:
                yield Fault(PLANNED, f"{call.block.name} runs operators again, unlike in the plan")
    wanted = [*plan.stages] if plan.stages else []
    listed_stages = _joined(lowered.choices, wanted) if lowered.zero == 3 else [*lowered.choices]
    if len(listed_stages) != len(wanted):
        yield Fault(PLANNED, f"stages is {len(listed_stages)}, and {len(wanted)} in the plan")
    for j, (lowered_stage, choice) in enumerate(zip(listed_stages, wanted, strict=False)):
        if lowered_stage != choice:
            listed, other = ", ".join(lowered_stage.blocks), ", ".join(choice.blocks)
            detail = (
                f"stage {j} has {listed} on rank {lowered_stage.rank}, and {other} on {choice.rank}"
            )
            yield Fault(PLANNED, f"{detail} in the plan")


def _joined(units: Iterable[StageChoice], plan: Sequence[StageChoice]) -> list[StageChoice]:
    """Units joined to the stages of a plan: neighbours on a rank, up to a stage's number of blocks.

    >>> units = [StageChoice(("a",), 0), StageChoice(("b", "c"), 0), StageChoice(("d",), 1)]
    >>> _joined(units, [StageChoice(("a", "b", "c"), 0), StageChoice(("d",), 1)])
    [StageChoice(blocks=('a', 'b', 'c'), rank=0), StageChoice(blocks=('d',), rank=1)]
    """
    joined: list[StageChoice] = []
    for unit in units:
        last = joined[-1] if joined else None
        size = len(plan[len(joined) - 1].blocks) if 0 < len(joined) <= len(plan) else 0
        if last is not None and last.rank == unit.rank and len(last.blocks) < size:
            joined[-1] = StageChoice((*last.blocks, *unit.blocks), unit.rank)
        else:
            joined.append(unit)
    return joined


def _listed(wiring: Wiring, placeholders: list[fx.Node]) -> Iterator[Fault]:
    """Each placeholder is one input or one tensor."""
    graph = wiring.graph
    inputs, tensors = ([item.node for item in items] for items in (graph.inputs, graph.parameters))
    counts = Counter([*inputs, *tensors])
    for node in placeholders:
        if counts[node.name] != 1:
            yield Fault(TENSORS, f"{node.name} is listed {counts[node.name]} times")
    known = {node.name for node in placeholders}
    for rule, names in ((BATCH, inputs), (TENSORS, tensors)):
        for name in names:
            if name not in known:
                yield Fault(rule, f"{name} is listed, and the graph has none")
    for key, count in repeated(item.key for item in graph.inputs):
        yield Fault(BATCH, f"{count} inputs are {key!r} of the batch")
    for name, count in repeated(item.name for item in graph.parameters):
        yield Fault(TENSORS, f"{count} tensors have the name {name}")


def _inputs(wiring: Wiring, nodes: dict[str, fx.Node]) -> Iterator[Fault]:
    """Inputs have the keys, shapes and dtypes of the batch that the model was captured on."""
    graph = wiring.graph
    if graph.sample is not None:
        if graph.positional != (not arguments(graph.sample)[1]):
            yield Fault(BATCH, "it is read by position, and the model by name, or the other way")
        keys = [key for key, leaf in flat(graph.sample) if isinstance(leaf, torch.Tensor)]
        free = [name for name in nodes if name not in graph.by_node]
        wanted = dict(zip(free, keys, strict=False))
        for item in graph.inputs:
            if wanted.get(item.node, item.key) != item.key:
                detail = f"{item.node} is {wanted[item.node]!r} of the batch, not {item.key!r}"
                yield Fault(BATCH, detail)
    for item in graph.inputs:
        if item.node in nodes and (item.shape, item.dtype) != _form(nodes[item.node]):
            shape, dtype = _form(nodes[item.node])
            listed = f"{item.dtype} {item.shape} is listed"
            yield Fault(BATCH, f"{item.key} is {dtype} {shape} ({listed})")


def _tensor(wiring: Wiring, item: Parameter, node: fx.Node) -> Iterator[Fault]:
    """A tensor has the shape of its node and, as a whole, of the model's own."""
    if (item.shape, item.dtype) != _form(node):
        shape, dtype = _form(node)
        yield Fault(
            TENSORS, f"{item.name} is {dtype} {shape} ({item.dtype} {item.shape} is listed)"
        )
    if item.trainable and item.buffer:
        yield Fault(TENSORS, f"{item.name} is a buffer, and buffers are not trained")
    if not item.trainable and node.name in wiring.graph.differentiable:
        yield Fault(TENSORS, f"{item.name} carries a gradient, and is not trained as listed")
    if item.mutated != (node in wiring.effects.writers):
        is_it, listed = ("not ", "it is") if item.mutated else ("", "it is not")
        yield Fault(TENSORS, f"{item.name} is {is_it}updated in place ({listed}, as listed)")


def _pieces(wiring: Wiring, item: Parameter, node: fx.Node) -> Iterator[Fault]:
    """A piece is the one of the model's tensor with which the graph of one rank computes."""
    placement: Placement = node.meta.get("placements", (None,))[0] or Placement("R")
    original = wiring.graph.tensors.get(item.name)
    whole = tuple(node.meta.get("whole", node.meta["val"]).shape)
    if item.experts:
        if item.experts != whole[0] * wiring.lowered.expert:
            yield Fault(PIECES, f"{item.name} is no piece of {item.experts} experts ({whole})")
    every = (item.experts, *whole[1:]) if item.experts else whole
    if original is not None and tuple(original.shape) != every:
        yield Fault(TENSORS, f"{item.name} is {tuple(original.shape)} in the model, not {every}")
    wanted: Shard | None = None
    if placement.kind == "S":
        wanted = shard_of(placement, whole[placement.dim])
    if item.shard != wanted:
        yield Fault(PIECES, f"{item.name} is held as {_placed(item.shard)}, not {_placed(wanted)}")
    local = local_shape(whole, placement, wiring.lowered.tensor)
    if local != _form(node)[0]:
        ranks = f"{wiring.lowered.tensor} tensor ranks"
        yield Fault(
            PIECES, f"{item.name} is {_form(node)[0]}, which is no piece of {ranks} ({local})"
        )


def _form(node: fx.Node) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a placeholder."""
    value: torch.Tensor = node.meta["val"]
    return tuple(value.shape), value.dtype


def _placed(shard: Shard | None) -> str:
    """A piece in words.

    >>> _placed(None), _placed(Shard(0, (8, 4)))
    ('a whole', 'pieces along dimension 0 of (8, 4)')
    """
    return "a whole" if shard is None else f"pieces along dimension {shard.dim} of {shard.sizes}"
