"""What bounds a step: the parts of its busiest rank's time, and the changes that would help most.

    |  arithmetic  |  memory traffic  |  tensor ranks  |  messages  |  optimizer  |   = one step

Seconds of compute instructions are divided by the roofline of the operators in their blocks; those
between them, by what the rank waits for.

A neighbouring mesh, on which the same batch would train faster, is planned as `compile` would. It
has half of the ranks along one axis and twice as many along another. Neighbours that halve an axis
on which the busiest rank loses much time and double a cheap one are tried first.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath

import torch
from torch import fx

from parcompiler.cost import BlockCost, Operation
from parcompiler.cost.operation import EXCHANGE
from parcompiler.cost.roofline import operation_seconds
from parcompiler.device import Device
from parcompiler.errors import ParcompilerError
from parcompiler.instruction import BUCKETED, COMPUTE, GROUP, MESSAGES, SHARDING, Kind
from parcompiler.lower import Lowered
from parcompiler.mesh import AXES, Mesh
from parcompiler.naming.source import frames
from parcompiler.passes import DEFAULT
from parcompiler.passes.decide import decide
from parcompiler.passes.shard.axes import on_axes
from parcompiler.passes.shard.context import LONG, positions
from parcompiler.passes.shard.local import local
from parcompiler.passes.zero import share_of
from parcompiler.plan import Plan
from parcompiler.priced import Priced
from parcompiler.prices import lowered_step
from parcompiler.problem import LEVELS, Problem
from parcompiler.report.data import NamedTime, OptionGain, SourceLine
from parcompiler.schedules import ASYNCHRONOUS, SCHEDULES, stages_per_rank
from parcompiler.timeline import Timeline
from parcompiler.timeline.timeline import BUSY

VOCABULARY, DATA, MESSAGE = "vocabulary", "data ranks", "messages between stages"
OPTIMIZER, WAITING = "optimizer", "waiting for other stages"
PARTS = (
    "arithmetic", "memory traffic", "kernel launches", "tensor ranks", "context ranks",
    "expert ranks", VOCABULARY, DATA, MESSAGE, OPTIMIZER, WAITING,
)  # fmt: skip
WORTH = 0.01  # of the step: smaller gains are below the model's accuracy
SHOWN = 3

# The parts of a step whose seconds are lost to an axis.
LOST = {"data": (DATA,), "pipeline": (WAITING, MESSAGE), "tensor": ("tensor ranks",)}
MORE = {"data": 0.5, "pipeline": 1.0, "tensor": 1.0}  # share of that which twice the ranks add
UNKNOWN = 0.05  # of the step: assumed cost of an axis that has one rank so far
TRIED = 2  # neighbours; planning one takes a fraction of compile

# Reasons for a gap in a rank's compute: the first whose events overlap it.
WAITS = {
    DATA: BUCKETED | SHARDING,
    VOCABULARY: GROUP,
    MESSAGE: MESSAGES,
}


def busiest(timeline: Timeline) -> int:
    """The pipeline coordinate with the smallest idle fraction."""
    return min(range(len(timeline.bubble)), key=timeline.bubble.__getitem__)


def parts(
    lowered: Lowered,
    priced: Priced,
    timeline: Timeline,
    device: Device,
    updates: Sequence[float],
) -> tuple[NamedTime, ...]:
    """The parts of the busiest rank's step, which add up to the whole; longest first.

    `priced` are the blocks of one tensor rank, `device` is that of the rank. `updates` are the
    seconds that each stage updates its weights for within a backward.
    """
    rank = busiest(timeline)
    seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    names = [block.name for block in priced.cut.blocks]
    traced = dict(zip(names, priced.costs, strict=True))
    spent: dict[int, float] = defaultdict(float)
    spans = []
    for event in timeline.events:
        line = event.instruction
        if event.rank != rank or line.kind not in BUSY:
            continue
        spans.append((event.begin, event.end))
        if line.kind in COMPUTE:
            assert line.stage is not None
            update = updates[line.stage] if line.kind is Kind.BACKWARD else 0.0
            spent[line.stage] += event.end - event.begin - update
            seconds[OPTIMIZER] += update
        else:
            name = OPTIMIZER if line.kind is Kind.UPDATE else VOCABULARY
            seconds[name] += event.end - event.begin
    for stage, time in spent.items():
        calls = lowered.stages[stage].calls
        shares = Counter[str]()
        for call in calls:
            shares.update(_shares(traced[call.block.name], device, again=call.recompute))
        for name, share in shares.items():
            seconds[name] += time * share / shares.total()
    for name, time in _waits(timeline, rank, spans):
        seconds[name] += time
    longest = sorted(seconds.items(), key=lambda part: -part[1])
    return tuple(NamedTime(name, time) for name, time in longest if time > 0)


def lines(priced: Priced, device: Device) -> tuple[SourceLine, ...]:
    """The times of lines of the model's source in all blocks of a template, longest first.

    Operators called by a line in torch's own modules count with it; so do its exchanges between
    tensor ranks, and its backward. `priced` are the blocks of one tensor rank.
    """
    blocks = Counter(block.template for block in priced.cut.blocks)
    first = {block.template: b for b, block in reversed([*enumerate(priced.cut.blocks)])}
    total = sum((*priced.forward, *priced.backward)) or 1.0
    rows = []
    for template, b in first.items():
        nodes, cost = priced.cut.blocks[b].nodes, priced.costs[b]
        passes = ((cost.forward, priced.forward[b]), (cost.backward, priced.backward[b]))
        spent: dict[tuple[str, str], tuple[list[float], Counter[str]]] = {}
        for number, (operations, seconds) in enumerate(passes):
            whole = sum(operation_seconds(one, device) for one in operations)
            for one in operations:
                times, kinds = spent.setdefault(_line(nodes, one.place), ([0.0, 0.0], Counter()))
                shares = _split(one, device)
                kinds.update(shares)
                times[number] += sum(shares.values()) * seconds / whole
        for (place, text), ((forward, backward), kinds) in spent.items():
            share = blocks[template] * (forward + backward) / total
            bound = max(kinds, key=lambda kind: kinds[kind])
            rows.append(SourceLine(
                template, blocks[template], place, text, forward, backward, share, bound
            ))  # fmt: skip
    return tuple(sorted(rows, key=lambda line: -line.share))


def _line(nodes: Sequence[fx.Node], place: int | None) -> tuple[str, str]:
    """The innermost line around a node that is not torch's own: its file and number, its text."""
    calls = () if place is None else frames(nodes[place])
    outer = [frame for frame in calls if not frame.is_torch] or calls[-1:]
    if not outer:
        return "", "added by parcompiler"
    return f"{PurePath(outer[-1].file).name}:{outer[-1].line}", outer[-1].text


def _shares(cost: BlockCost, device: Device, *, again: bool) -> Counter[str]:
    """Seconds of a block's operators by what bounds them; the forward runs `again` in a backward
    that recomputes."""
    shares = Counter[str]()
    for operation in (*cost.forward, *cost.backward, *(cost.forward if again else ())):
        shares.update(_split(operation, device))
    return shares


def _split(operation: Operation, device: Device) -> dict[str, float]:
    """An operator's seconds: arithmetic or traffic, whichever is longer, and launch."""
    seconds = operation_seconds(operation, device)
    if operation.kind == EXCHANGE:
        return {f"{operation.axis} ranks": seconds}
    traffic = operation_seconds(replace(operation, nbytes=0.0), device) < seconds
    launch = min(device.launch_overhead, seconds)
    name = "memory traffic" if traffic else "arithmetic"
    return {name: seconds - launch, "kernel launches": launch}


def _waits(
    timeline: Timeline, rank: int, spans: Iterable[tuple[float, float]]
) -> Iterator[tuple[str, float]]:
    """The seconds between compute instructions, by the reason for the gap."""
    going = {
        name: [(e.begin, e.end) for e in timeline.events
               if e.instruction.kind in kinds and rank in (e.rank, e.instruction.peer)]
        for name, kinds in WAITS.items()
    }  # fmt: skip
    end = 0.0
    gaps = []
    for begin, until in (*sorted(spans), (timeline.step_time, timeline.step_time)):
        if begin > end:
            gaps.append((end, begin))
        end = max(end, until)
    for name, busy in going.items():
        left = []
        for gap in gaps:
            for begin, until in sorted(busy):
                low, high = max(gap[0], begin), min(gap[1], until)
                if high > low:
                    yield name, high - low
                    left.append((gap[0], low))
                    gap = high, gap[1]
            left.append(gap)
        gaps = [gap for gap in left if gap[1] > gap[0]]
    yield WAITING, sum(until - begin for begin, until in gaps)


def changes(
    problem: Problem, plan: Plan, times: Iterable[NamedTime], device: Device
) -> tuple[OptionGain, ...]:
    """Changes of one option that would train more samples a second, the best three at most.

    Each is predicted with the plan's stages, so that a plan made for it may be faster still;
    `problem` is that of one tensor rank.
    """
    parts = tuple(times)
    seconds = sum(part.seconds for part in parts)
    weighed = [*_narrowed(problem, plan, parts, device), *_reordered(problem, plan, seconds)]
    return by_gain(change for change in weighed if change.gain > WORTH)[:SHOWN]


def by_gain(gains: Iterable[OptionGain]) -> tuple[OptionGain, ...]:
    """Changes, the best first."""
    return tuple(sorted(gains, key=lambda change: -change.gain))


def _narrowed(
    problem: Problem, plan: Plan, times: Iterable[NamedTime], device: Device
) -> Iterator[OptionGain]:
    """16 bits for a model in 32, if the device is faster in them; halves all traffic."""
    wide, narrow = torch.float32, torch.bfloat16
    slower = device.peak(wide) / device.peak(narrow)
    if problem.graph.dtype != wide or plan.precision not in (None, "fp32") or slower >= 1:
        return
    halved = {
        "memory traffic",
        "tensor ranks",
        "context ranks",
        "expert ranks",
        VOCABULARY,
        MESSAGE,
    }
    narrowed = problem.anew(options=replace(problem.options, precision="bf16"))
    trained = [item for item in problem.graph.parameters if item.trainable]
    update = sum(map(problem.update_seconds, trained)) or 1.0
    with_masters = (
        replace(x, dtype=narrow, has_master=True) if x.dtype == wide else x for x in trained
    )
    scales: dict[str, float] = {
        "arithmetic": slower,
        OPTIMIZER: sum(map(narrowed.update_seconds, with_masters)) / update,
        WAITING: max(slower, 0.5),
        **dict.fromkeys(halved, 0.5),
    }
    before = sum(part.seconds for part in times)
    seconds = sum(part.seconds * scales.get(part.name, 1.0) for part in times)
    yield OptionGain("precision", "bf16", before / seconds - 1, seconds)


def _reordered(problem: Problem, plan: Plan, seconds: float) -> Iterator[OptionGain]:
    """More micro-batches, another schedule, no recomputation, another level of ZeRO.

    Estimated steps are scaled by the ratio of the plan's step, `seconds`, to its estimate."""
    level = plan.zero or 0
    if plan.orders is not None or problem.options.asynchronous or plan.updates is not None:
        return
    before = share_of(problem, plan, level).step
    stages = plan.virtual_stages
    names = [name for name in SCHEDULES if name != plan.schedule and name != ASYNCHRONOUS
             and stages_per_rank(name, stages) == stages]  # fmt: skip
    twice = 2 * plan.microbatches
    trials = [("microbatches", str(twice), replace(plan, microbatches=twice))]
    trials += [("schedule", name, replace(plan, schedule=name)) for name in names]
    if plan.recompute:
        trials.append(("recompute", "none", replace(plan, recompute=(), offload=False)))
    if plan.zero is not None:
        others = (k for k in LEVELS[:-1] if k != level)  # the last needs other memory planning
        trials += [("zero", str(k), replace(plan, zero=k)) for k in others]
    for option, value, trial in trials:
        try:
            share = share_of(problem, trial, trial.zero or 0)
        except ParcompilerError:
            continue  # impossible with these stages or micro-batches
        if share.fits:
            gain = trial.microbatches * before / (plan.microbatches * share.step) - 1
            yield OptionGain(option, value, gain, share.step * seconds / before)


def other_mesh(
    problem: Problem, plan: Plan, parts: Iterable[NamedTime], seconds: float
) -> tuple[OptionGain, ...]:
    """The first neighbour tried that gains more than `WORTH` on a step of `seconds`, if any.

    `problem` is that of the whole model. None is tried if more than the mesh would have to change:
    stages by number, measured costs, context and expert ranks, several devices.
    """
    mesh, options = problem.mesh, problem.options
    chosen = (
        not isinstance(options.stages, str) or plan.orders is not None or plan.updates is not None
    )
    if chosen or problem.bench is not None or not mesh.is_uniform or mesh.context * mesh.expert > 1:
        return ()
    rows = 1 if problem.graph.kept else positions(problem.graph)
    short = rows >= LONG and rows % 2 == 0 and bool(plan.recompute or plan.selective)
    neighbours = _neighbours(mesh, plan.microbatches, parts, seconds, context=short)
    for other, count in itertools.islice(neighbours, TRIED):
        named = replace(options, microbatches=count)
        try:
            trial = on_axes(problem.anew(mesh=other, options=named, explain=False))
            decided = decide(trial, DEFAULT)
            step = lowered_step(local(trial, decided), decided)
        except ParcompilerError:
            continue  # it does not fit, or has more stages than the model has blocks
        if seconds / step - 1 > WORTH:
            degrees = ((axis, getattr(other, axis)) for axis in AXES)
            sizes = ",".join(f"{axis}={degree}" for axis, degree in degrees if degree > 1)
            text = sizes if count == plan.microbatches else f"{sizes} --microbatches {count}"
            return (OptionGain("mesh", text, seconds / step - 1, step),)
    return ()


def _neighbours(
    mesh: Mesh, microbatches: int, parts: Iterable[NamedTime], step: float, *, context: bool
) -> Iterator[tuple[Mesh, int]]:
    """Neighbouring meshes with their micro-batches on a data rank, the most promising first; with
    `context`, also ones with more context ranks."""
    spent = {part.name: part.seconds for part in parts}
    lost = {axis: sum(spent.get(name, 0.0) for name in names) for axis, names in LOST.items()}
    added = {axis: MORE[axis] * seconds if getattr(mesh, axis) > 1 else UNKNOWN * step
             for axis, seconds in lost.items()}  # fmt: skip
    pairs = [*itertools.permutations(LOST, 2), *((axis, "context") for axis in LOST if context)]
    added["context"] = 0.0  # free: they save memory that costs time otherwise
    for less, more in sorted(pairs, key=lambda pair: added[pair[1]] - lost[pair[0]]):
        half, odd = divmod(getattr(mesh, less), 2)
        if odd:
            continue
        other = replace(mesh, **{less: half, more: 2 * getattr(mesh, more)})
        count, rest = divmod(microbatches * mesh.data, other.data)
        if count and not rest:
            yield other, count
