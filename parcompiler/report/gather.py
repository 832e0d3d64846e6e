"""Problem, plan, lowered program and timeline -> the parts of a report."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

import torch

from parcompiler import pieces, prices
from parcompiler.capture.prologue import constants
from parcompiler.cost import WHOLE, Operation, hidden_seconds, seconds
from parcompiler.cost.operation import EXCHANGE
from parcompiler.device import Device
from parcompiler.graph import Graph, dtype_of, nbytes_of, shape_of
from parcompiler.instruction import COMPUTE, Kind
from parcompiler.lower import Lowered, StageProgram
from parcompiler.passes.estimate import host_bytes
from parcompiler.passes.exchange import tensors
from parcompiler.passes.zero import DataShare, share_of
from parcompiler.plan import Plan
from parcompiler.priced import Priced
from parcompiler.problem import LEVELS, Problem
from parcompiler.report import data, events
from parcompiler.schedules import staleness as stale
from parcompiler.schedules.action import NOWHERE
from parcompiler.spmd.rows import is_zigzag
from parcompiler.spmd.runtime_call import RuntimeCall
from parcompiler.spmd.sorting import rows_of
from parcompiler.timeline import StageCost, Timeline, VocabularyCost

FAN_OUT = RuntimeCall("fan_out", shares=True)

# Descriptions of the vocabulary's passes and collectives, by field of `VocabularyCost`.
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


def model(graph: Graph, priced: Priced) -> data.TrainedModel:
    """The model, on all tensor ranks together; `priced` are its blocks."""
    parameters = [item.whole for item in graph.parameters if not item.buffer]
    forms = Counter(text for node in graph.fx_graph.nodes for text in node.meta.get("kernel", ()))
    tables = [item for item in parameters if item.looked_up]
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
        templates=len({block.template for block in priced.cut.blocks}),
        row_gradients=data.RowGradients(
            len(tables),
            sum(item.looked_up for item in tables),
            sum(item.shape[0] for item in tables),
        )
        if tables
        else None,
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


def levels(problem: Problem, plan: Plan) -> tuple[DataShare, ...]:
    """The costs of each level of ZeRO; empty with one data rank, or if steps of the plan's order
    cannot be predicted."""
    served = plan.updates is not None and plan.updates.way in ("parameter-server", "asynchronous")
    if plan.zero is None or problem.options.asynchronous or served:
        return ()
    return tuple(share_of(problem, plan, level) for level in LEVELS)


def owned(plan: Plan, lowered: Lowered) -> tuple[data.OwnedParameters, ...]:
    """The parameters of each data rank if the optimizer takes whole ones, as `runtime.zero` deals
    them."""
    if not lowered.zero or plan.optimizer not in WHOLE:
        return ()
    ties = {item.name: k for k, item in enumerate(sorted(lowered.tied, key=lambda x: x.name))}
    rows = []
    for rank in range(lowered.size):
        of_buckets = (n for item in lowered.buckets if rank in item.ranks for n in item.names)
        names = dict.fromkeys((*of_buckets, *(x.name for x in lowered.tied if rank in x.ranks)))
        sizes = {name: lowered.graph.by_name[name].nbytes for name in names}
        homes = {name: k % lowered.data for name, k in ties.items()}
        places = pieces.dealt(sizes, lowered.data, homes)
        for k in range(lowered.data):
            rank_names = sorted((n for n in sizes if places[n] == k), key=lambda n: -sizes[n])
            size = sum(sizes[name] for name in rank_names)
            rows.append(data.OwnedParameters(rank, k, size, tuple(rank_names)))
    return tuple(rows)


def ranks(
    problem: Problem, plan: Plan, lowered: Lowered, timeline: Timeline
) -> tuple[data.Rank, ...]:
    """The idle time and the memory of each rank."""
    without = prices.without_recomputation(problem, plan) or [None] * lowered.size
    host = host_bytes(problem, plan) if plan.offload else [0] * lowered.size
    ranks = []
    for r, parts in enumerate(tensors(problem, plan)):
        parameters, gradients, states = map(
            sum,
            zip((0, 0, 0), *map(problem.kept_bytes, parts), strict=True),  # a rank may have none
        )
        held = parameters, gradients, states, without[r], host[r]
        ranks.append(data.Rank(timeline.bubble[r], timeline.peak_memory[r], *held))
    return tuple(ranks)


def server(problem: Problem, lowered: Lowered) -> tuple[int, ...]:
    """The bytes through a parameter server's link in a step, and those of its states; () without
    one."""
    served = lowered.updates.way in ("parameter-server", "asynchronous")
    return prices.server_load(problem, lowered) if served else ()


def step(
    problem: Problem,
    whole: Priced,
    lowered: Lowered,
    costs: Sequence[StageCost],
    timeline: Timeline,
    everywhere: float,
    rank_priced: Priced,
    updated: Sequence[float],
) -> data.PredictedStep:
    """The predicted step; `whole` are the blocks of the whole model, with all rows of sequences.

    `everywhere` are the seconds of compute on every rank for a micro-batch, besides its stages;
    `rank_priced` are the blocks of one tensor rank under the plan, `updated` the seconds of
    `updates_within`.
    """
    seconds, ranks = timeline.step_time, [everywhere] * lowered.size
    for stage, cost in zip(lowered.stages, costs, strict=True):
        ranks[stage.rank] += cost.forward + cost.backward
    microbatches = problem.options.microbatches
    batch = microbatches * problem.mesh.data  # micro-batches of a step on all data ranks
    flops = batch * sum(_flops(c.forward) + _flops(c.backward) for c in whole.costs)
    power = problem.mesh.size * mesh(problem).peak
    even = sum(ranks) / problem.mesh.pipeline
    if rank_priced.pace:
        even = sum((*rank_priced.forward, *rank_priced.backward)) / rank_priced.pace + everywhere
        even += sum(updated) / problem.mesh.pipeline
    graph = problem.graph.undivided or problem.graph  # context ranks look up pieces of the tokens
    rows, tokens = _rows(graph), _tokens(graph)
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


def updates_within(problem: Problem, lowered: Lowered) -> tuple[float, ...]:
    """Seconds that each stage updates its weights for after every backward, which counts as a part
    of it: 0 unless the schedule is asynchronous."""
    by_name = lowered.graph.by_name
    return tuple(
        sum(problem.update_seconds(by_name[name]) for name in stage.tensors)
        if lowered.asynchronous
        else 0.0
        for stage in lowered.stages
    )


def stages(
    lowered: Lowered, priced: Priced, costs: Sequence[StageCost]
) -> tuple[data.StageSummary, ...]:
    """The stages and their costs for one micro-batch."""
    names = [block.name for block in priced.cut.blocks]
    traced = dict(zip(names, priced.costs, strict=True))
    summaries = []
    for stage, cost in zip(lowered.stages, costs, strict=True):
        blocks = [traced[call.block.name] for call in stage.calls]
        again = [traced[call.block.name] for call in stage.calls if call.recompute]
        tensors = [lowered.graph.by_name[name] for name in stage.tensors]
        parameters = [item for item in tensors if not item.buffer]
        sent, sent_back = _sent(lowered, stage)
        lines = (x for x in lowered.instructions[stage.rank] if x.stage == stage.index)
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
            in_flight=stale.most_alive(lines),
            sent=sent,
            sent_back=sent_back,
        )
        summaries.append(summary)
    return tuple(summaries)


def staleness(lowered: Lowered) -> tuple[data.Stale, ...]:
    """The staleness of each stage's weights; empty if all steps end with their updates."""
    if not lowered.asynchronous:
        return ()
    stages = []
    for stage in lowered.stages:
        program = lowered.instructions[stage.rank], stage.index
        tensors = (lowered.graph.by_name[name] for name in stage.tensors)
        weights = sum(item.nbytes for item in tensors if item.trainable)
        count = stale.versions(*program)
        stages.append(data.Stale(stale.staleness(*program), count, (count - 1) * weights))
    return tuple(stages)


def averaged(lowered: Lowered, timeline: Timeline) -> tuple[data.Averaged, ...]:
    """The sums of each rank with its data replicas; empty without replicas, or if these sum no
    gradients."""
    lines = (line for lines in lowered.instructions for line in lines)
    if lowered.data == 1 or all(line.kind is not Kind.REDUCE_GRADIENTS for line in lines):
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
    """Values sent between stages, by their source; except those of a spread vocabulary."""
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
    """Values of the prologue, which stages compute themselves."""
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


def exchanged(
    priced: Priced, lowered: Lowered, device: Device
) -> tuple[data.TensorCollective, ...]:
    """The collectives of each template, by the nodes that they are in; `priced` are the blocks of
    one tensor rank. Gradients of parameters accumulate over micro-batches, so these are exchanged
    once a step."""
    trained = set() if lowered.asynchronous else {item.node for item in lowered.graph.parameters}
    counts = Counter(block.template for block in priced.cut.blocks)
    first = {block.template: b for b, block in reversed([*enumerate(priced.cut.blocks)])}
    collectives = []
    for template, count in counts.items():
        nodes, cost = priced.cut.blocks[first[template]].nodes, priced.costs[first[template]]
        passes = ((one, side) for side in ("forward", "backward") for one in getattr(cost, side))
        sent = [(one.place, side == "backward", one) for one, side in passes
                if one.kind == EXCHANGE and one.place is not None]  # fmt: skip
        for place, backward, one in sorted(sent, key=lambda item: item[:2]):
            ring = one.name == "rotation"  # keys and values, the last operands
            value = nodes[place].all_input_nodes[-1 if ring else 0]
            exposed = seconds([one], device)
            collectives.append(
                data.TensorCollective(
                    template=template,
                    blocks=count,
                    action=one.name,
                    value=value.name,
                    shape=shape_of(value),
                    sent=round(one.nbytes),
                    backward=backward,
                    once=nodes[place].target == FAN_OUT and value.name in trained,
                    seconds=exposed + hidden_seconds([one], device),
                    exposed=exposed,
                    axis=one.axis,
                )
            )
    return tuple(collectives)


def row_shares(problem: Problem) -> tuple[data.RowShare, ...]:
    """The rows of the inputs on each context rank."""
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
    """How the vocabulary is computed under a plan; None if the plan has no decision about it."""
    if plan.vocabulary is None:
        return None
    took = {name: getattr(cost, field) for field, name in PASSES.items()} if cost else {}
    return data.VocabularySplit(
        tables=tuple(_tables(lowered)),
        passes=tuple(data.NamedTime(name, time) for name, time in took.items() if time),
        state=cost.resident if cost else 0,
    )


def _tables(lowered: Lowered) -> Iterator[data.VocabularyTable]:
    """The tables of which every rank has some rows."""
    spread = lowered.vocabulary
    if spread is None:
        return
    uses: dict[str, list[str]] = {item.layer.weight: ["embedding"] for item in spread.lookups}
    if spread.head:
        uses.setdefault(spread.head.layer.weight, []).append("head")
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


def _sent(lowered: Lowered, stage: StageProgram) -> tuple[int, int]:
    """Bytes of the values that a stage sends to other ranks for a micro-batch, and of the gradients
    that it sends back: for a value, by its first user on a rank."""
    sent = [0, 0]
    for line in lowered.instructions[stage.rank]:
        if line.kind is Kind.SEND and line.microbatch == 0:
            value = lowered.values[line.value or ""]
            users = (j for j in value.consumers if j != NOWHERE)
            readers = (j for j in users if lowered.stages[j].rank == stage.rank)
            if (min(readers) if line.gradient else value.producer) == stage.index:
                sent[line.gradient] += value.nbytes
    return sent[0], sent[1]


def _rows(graph: Graph) -> int | None:
    """Rows of a micro-batch; None if inputs differ."""
    rows = {item.shape[0] for item in graph.inputs if item.shape}
    return rows.pop() if len(rows) == 1 else None


def _tokens(graph: Graph) -> int | None:
    """Tokens of a micro-batch, if exactly one input [rows, sequence] looks up embeddings."""
    nodes = graph.placeholders
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
