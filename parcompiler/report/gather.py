"""Problem, plan, lowered program and timeline -> the parts of a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite

import torch

from parcompiler import prices
from parcompiler.cost import BlockCost, Operation
from parcompiler.graph import Graph, dtype_of, nbytes_of, shape_of
from parcompiler.instruction import COMPUTE, Instruction, Kind
from parcompiler.lower import Lowered, Stage
from parcompiler.plan import Plan, Solution
from parcompiler.problem import Priced, Problem
from parcompiler.report import data, events
from parcompiler.schedules.action import NOWHERE
from parcompiler.timeline import Event, StageCost, Timeline


def model(graph: Graph) -> data.Model:
    """What is trained, on all tensor ranks together."""
    own = [item.whole for item in graph.parameters if not item.buffer]
    return data.Model(
        name=graph.name,
        parameters=sum(item.numel for item in own),
        parameter_bytes=sum(item.nbytes for item in own),
        frozen=sum(item.numel for item in own if not item.trainable),
        dtype=_name(graph.dtype),
        random=graph.random,
        evaluating=graph.modes.outermost,
        dropouts=graph.modes.dropouts,
        norms=graph.modes.norms,
    )


def mesh(problem: Problem) -> data.Mesh:
    """Where it is trained."""
    sizes, dtype = problem.mesh, problem.graph.dtype
    own = [data.Device(one.name, one.memory, one.peak(dtype)) for one in problem.devices]
    return data.Mesh(
        pipeline=sizes.pipeline,
        data=sizes.data,
        tensor=sizes.tensor,
        device=", ".join(dict.fromkeys(one.name for one in own)),
        memory=min(one.memory for one in own),
        peak=sum(one.peak for one in own) / len(own) if len(set(own)) > 1 else own[0].peak,
        devices=() if sizes.is_uniform else tuple(own),
    )


def choices(problem: Problem, plan: Plan, priced: Priced) -> data.Choices:
    """How it is divided; `problem` is that of one tensor rank."""
    assert plan.schedule is not None
    assert plan.granularity is not None
    return data.Choices(
        microbatches=plan.microbatches,
        precision=plan.precision,
        optimizer=plan.optimizer,
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages,
        granularity=plan.granularity,
        blocks=len(priced.cut.blocks),
        templates=len({block.template for block in priced.cut.blocks}),
        recompute=plan.recompute or (),
        without=prices.without_recomputation(problem, plan),
    )


def solver(found: Solution | None) -> data.Solver | None:
    """How far an answer is proved; what the user gave has no bound."""
    if found is None:
        return None
    objective, bound, gap = map(_finite, (found.objective, found.bound, found.gap))
    proved = found.status != "given"
    return data.Solver(found.status, objective, bound if proved else None, gap if proved else None)


def weighed(plan: Plan) -> tuple[data.Weighed, ...]:
    """The schedules that the plan's was chosen from."""
    return tuple(
        data.Weighed(item.schedule, item.virtual_stages, item.seconds, item.reason)
        for item in plan.weighed or ()
    )


def step(
    problem: Problem,
    priced: Priced,
    lowered: Lowered,
    costs: Sequence[StageCost],
    timeline: Timeline,
    everywhere: float,
    own: Priced,
) -> data.Step:
    """The predicted step; `priced` are the blocks of the whole model.

    `everywhere` are the seconds that every rank computes for a micro-batch besides its stages;
    `own` are the blocks of one tensor rank under the plan.
    """
    seconds, ranks = timeline.step_time, [everywhere] * lowered.size
    for stage, cost in zip(lowered.stages, costs, strict=True):
        ranks[stage.rank] += cost.forward + cost.backward
    microbatches, copies = problem.options.microbatches, problem.mesh.data
    flops = (
        microbatches * copies * sum(_flops(c.forward) + _flops(c.backward) for c in priced.costs)
    )
    power = problem.mesh.size * mesh(problem).peak
    even = sum(ranks) / problem.mesh.pipeline
    if own.pace:
        even = sum((*own.forward, *own.backward)) / own.pace + everywhere
    rows, tokens = _rows(problem.graph), _tokens(problem.graph)
    return data.Step(
        seconds=seconds,
        ideal=microbatches * even,
        idle=sum(timeline.bubble) / len(timeline.bubble),
        imbalance=max(ranks) * len(ranks) / sum(ranks) if any(ranks) else 1.0,
        flops=flops,
        mfu=flops / (power * seconds) if seconds else 0.0,
        rows=None if rows is None else rows * microbatches * copies,
        tokens=None if tokens is None else tokens * microbatches * copies,
    )


def stages(lowered: Lowered, priced: Priced, costs: Sequence[StageCost]) -> tuple[data.Stage, ...]:
    """The stages and what one micro-batch costs on each."""
    names = [block.name for block in priced.cut.blocks]
    traced = dict(zip(names, priced.costs, strict=True))
    return tuple(
        _stage(lowered, stage, traced, cost)
        for stage, cost in zip(lowered.stages, costs, strict=True)
    )


def _stage(
    lowered: Lowered, stage: Stage, traced: Mapping[str, BlockCost], cost: StageCost
) -> data.Stage:
    """One stage."""
    blocks = tuple(call.block.name for call in stage.calls)
    tensors = [lowered.graph.by_name[name] for name in stage.tensors]
    own = [item for item in tensors if not item.buffer]
    return data.Stage(
        rank=stage.rank,
        blocks=blocks,
        parameters=sum(item.numel for item in own),
        parameter_bytes=sum(item.nbytes for item in own),
        forward_flops=sum(_flops(traced[name].forward) for name in blocks),
        backward_flops=sum(_flops(traced[name].backward) for name in blocks)
        + sum(_flops(traced[call.block.name].forward) for call in stage.calls if call.recompute),
        forward=float(cost.forward),
        backward=float(cost.backward),
        state=cost.resident,
        activations=cost.saved,
        in_flight=_in_flight(lowered.instructions[stage.rank], stage.index) if stage.trained else 1,
        sent=_sent(lowered, stage),
        sent_back=_sent_back(lowered, stage),
    )


def staleness(lowered: Lowered) -> tuple[data.Stale, ...]:
    """How old the weights of each stage get; nothing where all steps end with their updates."""
    if not lowered.asynchronous:
        return ()
    pairs = zip(prices.staleness(lowered), prices.versions(lowered), strict=True)
    return tuple(
        data.Stale(updates, count, prices.stashed_bytes(lowered, j))
        for j, (updates, count) in enumerate(pairs)
    )


def averaged(lowered: Lowered, timeline: Timeline) -> tuple[data.Averaged, ...]:
    """What each rank sums with its data replicas; nothing where it has none."""
    if lowered.data == 1:
        return ()
    happened = timeline.events
    computed = max((e.end for e in happened if e.instruction.kind in COMPUTE), default=0.0)
    sums: list[list[Event]] = [[] for _ in range(lowered.size)]
    for event in happened:
        if event.instruction.kind is Kind.REDUCE_GRADIENTS:
            sums[event.rank].append(event)
    return tuple(_averaged(lowered, rank, own, computed) for rank, own in enumerate(sums))


def _averaged(lowered: Lowered, rank: int, sums: Sequence[Event], computed: float) -> data.Averaged:
    """What one rank sums, where all ranks have computed by the second `computed`."""
    names = (name for item in lowered.sums if rank in item.ranks for name in item.names)
    return data.Averaged(
        sums=len(sums),
        nbytes=sum(lowered.graph.by_name[name].nbytes for name in names),
        seconds=sum(event.end - event.begin for event in sums),
        exposed=max(0.0, max((event.end for event in sums), default=0.0) - computed),
    )


def ranks(timeline: Timeline) -> tuple[data.Rank, ...]:
    """How idle and how full each rank is."""
    return tuple(
        data.Rank(idle, peak)
        for idle, peak in zip(timeline.bubble, timeline.peak_memory, strict=True)
    )


def values(lowered: Lowered, plan: Plan) -> tuple[data.Value, ...]:
    """What goes between stages, by the stage it leaves; not what the vocabulary gives or takes."""
    cheaper = {name for node, name in lowered.variables.items() if node.name in (plan.sent or ())}
    found = (
        data.Value(
            name=value.name,
            shape=value.shape,
            dtype=_name(value.dtype),
            nbytes=value.nbytes,
            gradient=value.differentiable,
            source=value.producer,
            targets=tuple(j for j in value.consumers if j != NOWHERE),
            cheaper=value.name in cheaper,
        )
        for value in lowered.values.values()
        if value.producer != NOWHERE and value.consumers != (NOWHERE,)
    )
    return tuple(sorted(found, key=lambda value: value.source))


def recomputed(lowered: Lowered) -> tuple[data.Recomputed, ...]:
    """What several stages compute for themselves, of what their blocks read."""
    users: dict[str, list[int]] = defaultdict(list)
    for stage in lowered.stages:
        for name in dict.fromkeys(name for call in stage.calls for name in call.arguments):
            users[name].append(stage.index)
    nodes = {node for stage in lowered.stages for node in stage.prologue}
    return tuple(
        data.Recomputed(
            name, shape_of(node), _name(dtype_of(node)), nbytes_of(node), tuple(users[name])
        )
        for node, name in lowered.variables.items()
        if node in nodes and len(lowered.stages) > 1 and users[name]
    )


def shared(lowered: Lowered) -> tuple[data.Shared, ...]:
    """Parameters on stages with several names, or that several blocks use."""
    blocks: dict[str, list[str]] = defaultdict(list)
    holders: dict[str, list[Stage]] = defaultdict(list)
    for stage in lowered.stages:
        for name in stage.tensors:
            holders[name].append(stage)
        for call in stage.calls:
            for binding in call.block.tensors:
                blocks[binding.name].append(call.block.name)
    return tuple(
        data.Shared(
            name=item.name,
            aliases=item.aliases,
            nbytes=item.nbytes,
            blocks=tuple(blocks[item.name]),
            stages=tuple(stage.index for stage in holders[item.name]),
            ranks=tuple(sorted({stage.rank for stage in holders[item.name]})),
        )
        for item in lowered.graph.parameters
        if not item.buffer and holders[item.name] and (item.aliases or len(blocks[item.name]) > 1)
    )


def unread(graph: Graph) -> tuple[str, ...]:
    """Parameters that no operator reads."""
    read = {operand.name for node in graph.fx_graph.nodes for operand in node.all_input_nodes}
    return tuple(p.name for p in graph.parameters if not p.buffer and p.node not in read)


def estimated(priced: Priced) -> tuple[data.Estimated, ...]:
    """Operators whose cost is a guess, with the blocks that have them."""
    found: dict[str, list[str]] = defaultdict(list)
    for block, cost in zip(priced.cut.blocks, priced.costs, strict=True):
        for operator in cost.estimated:
            found[operator].append(block.template)
    return tuple(
        data.Estimated(operator, tuple(dict.fromkeys(templates)), len(templates))
        for operator, templates in sorted(found.items())
    )


def trail(timeline: Timeline) -> events.Trail:
    """The simulated step."""
    happened = (events.Event(e.rank, e.begin, e.end, str(e.instruction)) for e in timeline.events)
    memory = (tuple(events.Level(*pair) for pair in levels) for levels in timeline.memory)
    return events.Trail(tuple(happened), tuple(memory))


def _flops(operations: Iterable[Operation]) -> float:
    return sum((operation.flops for operation in operations), 0.0)


def _in_flight(instructions: Iterable[Instruction], stage: int) -> int:
    """The most micro-batches whose forward has begun and whose backward has not ended."""
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
    alive = most = 0
    for line in instructions:
        if line.stage == stage:
            alive += change.get(line.kind, 0)
            most = max(most, alive)
    return most


def _sent(lowered: Lowered, stage: Stage) -> int:
    """Bytes of values that a stage gives to other stages' ranks; once to each rank."""
    stages = lowered.stages
    return sum(
        value.nbytes * len({stages[j].rank for j in value.consumers if j != NOWHERE} - {stage.rank})
        for value in lowered.values.values()
        if value.producer == stage.index
    )


def _sent_back(lowered: Lowered, stage: Stage) -> int:
    """Bytes of gradients that a stage gives back; the first user on a rank does it for all."""
    received = (lowered.values[name] for name in stage.receives)
    return sum(
        value.nbytes
        for value in received
        if value.differentiable
        and stage.index not in value.detached
        and value.producer != NOWHERE
        and lowered.stages[value.producer].rank != stage.rank
        and stage.index == min(_users_on(lowered, stage.rank, value.consumers))
    )


def _users_on(lowered: Lowered, rank: int, consumers: Iterable[int]) -> Iterator[int]:
    return (j for j in consumers if lowered.stages[j].rank == rank)


def _rows(graph: Graph) -> int | None:
    """Rows of a micro-batch, when all inputs agree on them."""
    rows = {item.shape[0] for item in graph.inputs if item.shape}
    return rows.pop() if len(rows) == 1 else None


def _tokens(graph: Graph) -> int | None:
    """Tokens of a micro-batch, when one input [rows, sequence] looks up embeddings."""
    nodes = {node.name: node for node in graph.fx_graph.nodes if node.op == "placeholder"}
    embedded = [
        item
        for item in graph.inputs
        if any(user.target is torch.ops.aten.embedding.default for user in nodes[item.node].users)
    ]
    if len(embedded) != 1 or len(embedded[0].shape) != 2:
        return None
    return embedded[0].shape[0] * embedded[0].shape[1]


def _finite(value: float) -> float | None:
    return float(value) if isfinite(value) else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
