"""Problem, plan, lowered program and timeline -> the parts of a report."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import accumulate
from math import isfinite
from statistics import fmean

import torch
from torch import fx

from parcompiler import pieces, prices
from parcompiler.capture.prologue import constants
from parcompiler.cost import WHOLE, BlockCost, Operation, hidden_seconds, seconds
from parcompiler.cost.operation import EXCHANGE
from parcompiler.device import Device
from parcompiler.graph import Graph, dtype_of, nbytes_of, shape_of
from parcompiler.instruction import COMPUTE, Instruction, Kind
from parcompiler.lower import Lowered, StageProgram
from parcompiler.passes.zero import DataShare, share_of, tensors
from parcompiler.plan import Plan, Solution
from parcompiler.priced import Priced
from parcompiler.problem import LEVELS, Problem
from parcompiler.report import data, events
from parcompiler.schedules.action import NOWHERE
from parcompiler.spmd.rows import is_zigzag, rows_of
from parcompiler.spmd.runtime_call import NodeCollectives, RuntimeCall
from parcompiler.timeline import StageCost, Timeline, VocabularyCost

FAN_OUT = RuntimeCall("fan_out", shares=True)

# What the passes of the vocabulary and the collectives between them do, by `VocabularyCost`.
PASSES = {
    "embed": "EMBED: look up the rank's rows",
    "embed_reduce": "sum of the rows to the stage that uses them",
    "embed_broadcast": "gradient of the rows to all ranks",
    "embed_backward": "EMBED_BACKWARD: add it to the rank's rows",
    "broadcast": "input x of the head to all ranks",
    "s": "S: the rank's logits and their softmax",
    "normalize": "NORMALIZE: exponentials by the largest logit of all ranks",
    "exchange": "softmax statistics between all ranks",
    "t": "T: gradients of the rank's rows",
    "reduce": "gradient of x to its stage",
}


def model(graph: Graph) -> data.TrainedModel:
    """The model, on all tensor ranks together."""
    parameters = [item.whole for item in graph.parameters if not item.buffer]
    forms = Counter(text for node in graph.fx_graph.nodes for text in node.meta.get("kernel", ()))
    return data.TrainedModel(
        name=graph.name,
        parameters=sum(item.numel for item in parameters),
        parameter_bytes=sum(item.nbytes for item in parameters),
        frozen=sum(item.numel for item in parameters if not item.trainable),
        dtype=_name(graph.dtype),
        random=graph.random,
        evaluating=graph.modes.outermost,
        dropouts=graph.modes.dropouts,
        norms=graph.modes.norms,
        attention=tuple(data.AttentionForm(text, count) for text, count in forms.items()),
    )


def mesh(problem: Problem) -> data.DeviceMesh:
    """The mesh."""
    shape, dtype = problem.mesh, problem.graph.dtype
    devices = [data.RankDevice(one.name, one.memory, one.peak(dtype)) for one in problem.devices]
    return data.DeviceMesh(
        pipeline=shape.pipeline,
        data=shape.data,
        tensor=shape.tensor,
        context=shape.context,
        expert=shape.expert,
        device=", ".join(dict.fromkeys(one.name for one in devices)),
        memory=min(one.memory for one in devices),
        margin=problem.options.memory_margin,
        peak=fmean(one.peak for one in devices) if len(set(devices)) > 1 else devices[0].peak,
        devices=() if shape.is_uniform else tuple(devices),
    )


def choices(
    problem: Problem, plan: Plan, priced: Priced, lowered: Lowered, costs: Sequence[StageCost]
) -> data.Choices:
    """What the plan decides; `problem` is that of one tensor rank."""
    assert plan.schedule is not None
    assert plan.granularity is not None
    served = lowered.updates.way in ("parameter-server", "asynchronous")
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
        selective=plan.selective,
        without=prices.without_recomputation(problem, plan),
        host=_hosted(lowered, costs) if plan.offload else (),
        zero=plan.zero,
        updates=plan.updates,
        server=prices.server_load(problem, lowered) if served else (),
    )


def levels(problem: Problem, plan: Plan) -> tuple[DataShare, ...]:
    """What each level of ZeRO would take; nothing where there is one data rank, or an order of
    which the steps are no prediction."""
    served = plan.updates is not None and plan.updates.way in ("parameter-server", "asynchronous")
    if plan.zero is None or problem.options.asynchronous or served:
        return ()
    return tuple(share_of(problem, plan, level) for level in LEVELS)


def owned(plan: Plan, lowered: Lowered) -> tuple[data.OwnedParameters, ...]:
    """What each data rank gets of the parameters of its rank, where the optimizer takes whole ones:
    as `runtime.zero` deals them."""
    if not lowered.zero or plan.optimizer not in WHOLE:
        return ()
    ties = {item.name: k for k, item in enumerate(sorted(lowered.tied, key=lambda x: x.name))}
    found = []
    for rank in range(lowered.size):
        of_buckets = (n for item in lowered.buckets if rank in item.ranks for n in item.names)
        names = dict.fromkeys((*of_buckets, *(x.name for x in lowered.tied if rank in x.ranks)))
        sizes = {name: lowered.graph.by_name[name].nbytes for name in names}
        homes = {name: k % lowered.data for name, k in ties.items()}
        places = pieces.dealt(sizes, lowered.data, homes)
        for k in range(lowered.data):
            own = sorted((n for n in sizes if places[n] == k), key=lambda n: -sizes[n])
            size = sum(sizes[name] for name in own)
            found.append(data.OwnedParameters(rank, k, size, tuple(own)))
    return tuple(found)


def ranks(problem: Problem, plan: Plan, timeline: Timeline) -> tuple[data.Rank, ...]:
    """What each rank does not compute, and what it holds."""
    pairs = zip(timeline.bubble, timeline.peak_memory, tensors(problem, plan), strict=True)
    return tuple(
        data.Rank(idle, peak, *map(sum, zip(*map(problem.kept_bytes, parts), strict=True)))
        for idle, peak, parts in pairs
    )


def solver(solution: Solution | None) -> data.Solver | None:
    """How far an answer is proved; what the user gave has no bound."""
    if solution is None:
        return None
    proved = solution.status != "given"
    figures = (solution.objective, solution.bound, solution.gap)
    objective, bound, gap = (float(f) if isfinite(f) else None for f in figures)
    return data.Solver(
        solution.status, objective, bound if proved else None, gap if proved else None
    )


def step(
    problem: Problem,
    priced: Priced,
    lowered: Lowered,
    costs: Sequence[StageCost],
    timeline: Timeline,
    everywhere: float,
    rank_priced: Priced,
) -> data.PredictedStep:
    """The predicted step; `priced` are the blocks of the whole model.

    `everywhere` are the seconds that every rank computes for a micro-batch besides its stages;
    `rank_priced` are the blocks of one tensor rank under the plan.
    """
    seconds, ranks = timeline.step_time, [everywhere] * lowered.size
    for stage, cost in zip(lowered.stages, costs, strict=True):
        ranks[stage.rank] += cost.forward + cost.backward
    microbatches = problem.options.microbatches
    batch = microbatches * problem.mesh.data  # micro-batches of a step on all data ranks
    flops = (
        problem.mesh.context
        * batch
        * sum(_flops(c.forward) + _flops(c.backward) for c in priced.costs)
    )
    power = problem.mesh.size * mesh(problem).peak
    even = sum(ranks) / problem.mesh.pipeline
    if rank_priced.pace:
        even = sum((*rank_priced.forward, *rank_priced.backward)) / rank_priced.pace + everywhere
    rows, tokens = _rows(problem.graph), _tokens(problem.graph)
    updates = (e.end - e.begin for e in timeline.events if e.instruction.kind is Kind.UPDATE)
    return data.PredictedStep(
        seconds=seconds,
        period=timeline.period,
        ideal=microbatches * even + sum(updates) / problem.mesh.pipeline,
        idle=fmean(timeline.bubble),
        imbalance=max(ranks) * len(ranks) / sum(ranks) if any(ranks) else 1.0,
        flops=flops,
        mfu=flops / (power * seconds) if seconds else 0.0,
        rows=None if rows is None else rows * batch,
        tokens=None if tokens is None else tokens * batch,
    )


def stages(
    lowered: Lowered, priced: Priced, costs: Sequence[StageCost]
) -> tuple[data.StageSummary, ...]:
    """The stages and what one micro-batch costs on each."""
    names = [block.name for block in priced.cut.blocks]
    traced = dict(zip(names, priced.costs, strict=True))
    summaries = []
    for stage, cost in zip(lowered.stages, costs, strict=True):
        blocks = [traced[call.block.name] for call in stage.calls]
        again = [traced[call.block.name] for call in stage.calls if call.recompute]
        tensors = [lowered.graph.by_name[name] for name in stage.tensors]
        parameters = [item for item in tensors if not item.buffer]
        summary = data.StageSummary(
            rank=stage.rank,
            blocks=tuple(call.block.name for call in stage.calls),
            parameters=sum(item.numel for item in parameters),
            parameter_bytes=sum(item.nbytes for item in parameters),
            forward_flops=sum(_flops(block.forward) for block in blocks),
            backward_flops=sum(_flops(block.backward) for block in blocks)
            + sum(_flops(block.forward) for block in again),
            forward=float(cost.forward),
            backward=float(cost.backward),
            state=cost.resident,
            activations=cost.saved,
            in_flight=_in_flight(lowered.instructions[stage.rank], stage.index),
            sent=_sent(lowered, stage),
            sent_back=_sent_back(lowered, stage),
        )
        summaries.append(summary)
    return tuple(summaries)


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
    computed = max((e.end for e in timeline.events if e.instruction.kind in COMPUTE), default=0.0)
    figures = []
    for rank in range(lowered.size):
        sums = [
            event
            for event in timeline.events
            if event.rank == rank and event.instruction.kind is Kind.REDUCE_GRADIENTS
        ]
        figures.append(
            data.Averaged(
                sums=len(sums),
                nbytes=sum(
                    prices.sent_bytes(lowered, item) for item in lowered.sums if rank in item.ranks
                ),
                seconds=sum(event.end - event.begin for event in sums),
                exposed=max(0.0, max((event.end for event in sums), default=0.0) - computed),
            )
        )
    return tuple(figures)


def values(lowered: Lowered, plan: Plan) -> tuple[data.SentValue, ...]:
    """Values sent between stages, by their source; without those of a spread vocabulary."""
    cheaper = {name for node, name in lowered.variables.items() if node.name in (plan.sent or ())}
    sent = [
        data.SentValue(
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
    ]
    return tuple(sorted(sent, key=lambda value: value.source))


def recomputed(lowered: Lowered) -> tuple[data.Recomputed, ...]:
    """Values of the prologue, which stages compute for themselves."""
    fixed = constants(lowered.graph)
    users: dict[str, list[int]] = defaultdict(list)
    for stage in lowered.stages:
        for name in dict.fromkeys(name for call in stage.calls for name in call.arguments):
            users[name].append(stage.index)
    nodes = {node for stage in lowered.stages for node in stage.prologue}
    return tuple(
        data.Recomputed(
            name,
            shape_of(node),
            _name(dtype_of(node)),
            nbytes_of(node),
            tuple(users[name]),
            once=node in fixed,
        )
        for node, name in lowered.variables.items()
        if node in nodes and len(lowered.stages) > 1 and users[name]
    )


def shared(lowered: Lowered) -> tuple[data.SharedTensor, ...]:
    """Parameters on stages with several names, or that several blocks use."""
    blocks: dict[str, list[str]] = defaultdict(list)
    holders: dict[str, list[StageProgram]] = defaultdict(list)
    for stage in lowered.stages:
        for name in stage.tensors:
            holders[name].append(stage)
        for call in stage.calls:
            for binding in call.block.tensors:
                blocks[binding.name].append(call.block.name)
    return tuple(
        data.SharedTensor(
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
    return tuple(p.name for p in graph.parameters if not p.buffer and p.name in graph.unread)


def estimated(priced: Priced) -> tuple[data.Estimated, ...]:
    """Operators whose cost is a guess, with the blocks that have them."""
    templates: dict[str, list[str]] = defaultdict(list)
    for block, cost in zip(priced.cut.blocks, priced.costs, strict=True):
        for operator in cost.estimated:
            templates[operator].append(block.template)
    return tuple(
        data.Estimated(operator, tuple(dict.fromkeys(blocks)), len(blocks))
        for operator, blocks in sorted(templates.items())
    )


def sharded(plan: Plan) -> tuple[data.Sharded, ...]:
    """How each template's tensors are placed, and which of its nodes are not split."""
    return tuple(
        data.Sharded(shards.template, shards.blocks, shards.tensors, shards.whole)
        for shards in (plan.sharding.templates if plan.sharding else ())
    )


def exchanged(
    priced: Priced, lowered: Lowered, device: Device
) -> tuple[data.TensorCollective, ...]:
    """The collectives of each template, in order; `priced` are the blocks of one tensor rank."""
    trained = set() if lowered.asynchronous else {item.node for item in lowered.graph.parameters}
    counts = Counter(block.template for block in priced.cut.blocks)
    first = {
        block.template: (block, cost)
        for block, cost in zip(priced.cut.blocks[::-1], priced.costs[::-1], strict=True)
    }
    return tuple(
        _timed(collective, first[template][1], device)
        for template, count in counts.items()
        for node in first[template][0].nodes
        for collective in _collectives(node, trained, template, count)
    )


def _timed(
    collective: data.TensorCollective, cost: BlockCost, device: Device
) -> data.TensorCollective:
    """The collective with its seconds: the mean of those alike, which its block has."""
    alike = [
        item
        for item in (cost.backward if collective.backward else cost.forward)
        if (item.kind, item.name) == (EXCHANGE, collective.action)
        and round(item.nbytes) == collective.sent
    ]
    if not alike:
        return collective
    exposed = seconds(alike, device) / len(alike)
    hidden = hidden_seconds(alike, device) / len(alike)
    return dataclasses.replace(collective, seconds=exposed + hidden, exposed=exposed)


def _collectives(
    node: fx.Node, trained: Container[str], template: str, blocks: int
) -> Iterator[data.TensorCollective]:
    """The collectives in a node. Micro-batches add to the gradients of the parameters `trained`,
    so that these are exchanged once a step."""
    exchange = node.meta.get("exchange")
    if not isinstance(exchange, NodeCollectives):
        return
    value = node.all_input_nodes[0]
    for backward, actions in ((False, exchange.forward), (True, exchange.backward)):
        for action, nbytes in actions:
            yield data.TensorCollective(
                template=template,
                blocks=blocks,
                action=action,
                value=value.name,
                shape=shape_of(value),
                sent=round(exchange.sent_by(action, nbytes)),
                backward=backward,
                once=node.target == FAN_OUT and value.name in trained,
                axis=str(node.kwargs.get("axis", "tensor")),
            )


def row_shares(problem: Problem) -> tuple[data.RowShare, ...]:
    """What each context rank has of the inputs."""
    n, inputs = problem.mesh.context, problem.graph.inputs
    rows = rows_of(problem.graph.undivided or problem.graph, "context")
    split = (x for x in inputs if n > 1 and len(x.shape) > 1 and x.shape[1] % n == 0)
    return tuple(
        data.RowShare(x.key, x.shape[1], x.shape[1] // n, is_zigzag(x.shape[1], rows, n))
        for x in split
    )


def vocabulary(
    plan: Plan, lowered: Lowered, cost: VocabularyCost | None
) -> data.VocabularySplit | None:
    """How the vocabulary is computed under a plan; None where nothing was decided about it."""
    choice = plan.vocabulary
    if choice is None:
        return None
    took = {name: getattr(cost, field) for field, name in PASSES.items()} if cost else {}
    return data.VocabularySplit(
        method=choice.method,
        tables=tuple(_tables(lowered)),
        kept=choice.kept,
        weighed=choice.weighed or (),
        passes=tuple(data.PassTime(name, time) for name, time in took.items() if time),
        state=cost.resident if cost else 0,
    )


def _tables(lowered: Lowered) -> Iterator[data.VocabularyTable]:
    """The tables of which every rank has some rows."""
    spread = lowered.vocabulary
    if spread is None:
        return
    uses: dict[str, list[str]] = {item.lookup.weight: ["embedding"] for item in spread.lookups}
    if spread.head:
        uses.setdefault(spread.head.head.weight, []).append("head")
    for name, words in uses.items():
        size, width = lowered.graph.by_name[name].shape
        rows = pieces.rows(size, lowered.size * lowered.tensor)
        yield data.VocabularyTable(name, tuple(words), size, width, rows)


def trail(timeline: Timeline) -> events.Trail:
    """The simulated step."""
    steps = (events.StepEvent(e.rank, e.begin, e.end, str(e.instruction)) for e in timeline.events)
    memory = (tuple(events.Level(*pair) for pair in levels) for levels in timeline.memory)
    return events.Trail(tuple(steps), tuple(memory))


def _flops(operations: Iterable[Operation]) -> float:
    return sum((operation.flops for operation in operations), 0.0)


def _hosted(lowered: Lowered, costs: Sequence[StageCost]) -> tuple[int, ...]:
    """Bytes of each rank that wait in the host's memory, at most."""
    found = [0] * lowered.size
    for stage, cost in zip(lowered.stages, costs, strict=True):
        found[stage.rank] += cost.host * _in_flight(lowered.instructions[stage.rank], stage.index)
    return tuple(found)


def _in_flight(instructions: Iterable[Instruction], stage: int) -> int:
    """The most micro-batches whose forward has begun and whose backward has not ended."""
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
    steps = (change.get(line.kind, 0) for line in instructions if line.stage == stage)
    return max(accumulate(steps), default=0)


def _sent(lowered: Lowered, stage: StageProgram) -> int:
    """Bytes of values that a stage gives to other stages' ranks; once to each rank."""
    stages = lowered.stages
    return sum(
        value.nbytes * len({stages[j].rank for j in value.consumers if j != NOWHERE} - {stage.rank})
        for value in lowered.values.values()
        if value.producer == stage.index
    )


def _sent_back(lowered: Lowered, stage: StageProgram) -> int:
    """Bytes of gradients that a stage gives back; the first user on a rank does it for all."""
    stages = lowered.stages
    received = (lowered.values[name] for name in stage.receives)
    return sum(
        value.nbytes
        for value in received
        if value.differentiable
        and stage.index not in value.detached
        and value.producer != NOWHERE
        and stages[value.producer].rank != stage.rank
        and stage.index == min(j for j in value.consumers if stages[j].rank == stage.rank)
    )


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
