"""Costs of the stages, messages and collectives of a lowered plan, for the simulator."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

from parcompiler.cost import collective
from parcompiler.cost.vocabulary import parameters_held
from parcompiler.data_updates import ALL_REDUCE
from parcompiler.graph import Parameter
from parcompiler.instruction import Instruction, Kind, is_of_experts
from parcompiler.lower import lower
from parcompiler.lower.lowered import Bucket, Lowered, TiedTensor
from parcompiler.passes.estimate import costs, estimate
from parcompiler.passes.spread import vocabulary_cost
from parcompiler.plan import Plan
from parcompiler.problem import Problem
from parcompiler.schedules.action import NOWHERE
from parcompiler.timeline import StageCost, Timeline, VocabularyCost, free, simulate

FEW = 4  # micro-batches per rank: with 2, steps of two stages on a rank come out 3 % too short


def simulated(problem: Problem, plan: Plan, lowered: Lowered) -> Timeline:
    """The simulated step of a lowered plan; `problem` is that of a rank."""
    return simulate_lowered(
        lowered,
        stage_costs(problem, plan, lowered),
        message_seconds(problem, lowered),
        collective_seconds=collective_seconds(problem, lowered),
        left_seconds=left_seconds(problem, plan, lowered),
        vocabulary=vocabulary_cost(problem, plan),
    )


def lowered_step(problem: Problem, plan: Plan) -> float:
    """Seconds of the lowered step of a plan; `problem` is that of a rank. Of many micro-batches
    only a few are simulated, and the time of the others is extrapolated from the last of these."""
    assert plan.granularity is not None, "the passes decide it"
    cut = problem.priced(plan.granularity).cut

    def step(microbatches: int) -> float:
        few = replace(plan, microbatches=microbatches)
        return simulated(problem, few, lower(problem.graph, few, cut)).step_time

    m, ranks = plan.microbatches, plan.mesh.pipeline
    few = FEW * ranks + m % ranks
    if m <= few + ranks or plan.orders is not None:
        return step(m)
    first, second = step(few), step(few + ranks)
    return second + (second - first) * (m - few - ranks) / ranks


def simulate_lowered(
    lowered: Lowered,
    costs: Sequence[StageCost],
    seconds: Callable[[str, int, int], float] = free,
    *,
    collective_seconds: Callable[[Instruction], float] = free,
    left_seconds: Callable[[Instruction], float] = free,
    evaluation: bool = False,
    vocabulary: VocabularyCost | None = None,
) -> Timeline:
    """The training step of a lowered program, or its evaluation; `costs[j]` is that of stage j.

    `seconds(value, source, target)` is the time of a message from rank to rank. Raises as
    `simulate` does.
    """
    sizes = {name: value.nbytes for name, value in lowered.values.items()}
    return simulate(
        lowered.evaluation if evaluation else lowered.instructions,
        [stage.rank for stage in lowered.stages],
        costs,
        sizes,
        seconds,
        collective_seconds=collective_seconds,
        left_seconds=left_seconds,
        stages=lowered.stages,
        vocabulary=vocabulary,
    )


def stage_costs(problem: Problem, plan: Plan, lowered: Lowered) -> tuple[StageCost, ...]:
    """Seconds and bytes of one micro-batch on each lowered stage, which may be a unit."""
    divided = replace(plan, stages=lowered.choices)
    stages = costs(problem, divided, [stage.tensors for stage in lowered.stages])
    if not any(
        line.kind is Kind.GATHER_PARAMETERS for lines in lowered.instructions for line in lines
    ):
        return stages
    moments = _ready_seconds(problem, divided, lowered)
    return tuple(replace(cost, ready=moment) for cost, moment in zip(stages, moments, strict=True))


def _ready_seconds(problem: Problem, plan: Plan, lowered: Lowered) -> Iterator[float]:
    """For each stage, the earliest start of its first forward, in seconds after the optimizer's
    step, with which the parameters of each block are gathered before the block runs."""
    seconds = collective_seconds(problem, lowered)
    names = {item.label: item.names for item in lowered.shared}
    priced = problem.at_zero("auto").under(plan)
    number = {block.name: b for b, block in enumerate(priced.cut.blocks)}
    rows = lowered.vocabulary.tensors if lowered.vocabulary else ()
    for stage in lowered.stages:
        coming, arrivals = 0.0, dict[str, float]()
        for line in lowered.instructions[stage.rank]:
            if line.kind is Kind.GATHER_PARAMETERS:
                coming += seconds(line)
                arrivals |= dict.fromkeys(names[line.value or ""], coming)
        forward, done = priced.on(stage.rank).forward, 0.0
        ready = max((arrivals.get(name, 0.0) for name in rows), default=0.0)
        for call in stage.calls:
            for binding in call.block.tensors:
                ready = max(ready, arrivals.get(binding.name, 0.0) - done)
            done += forward[number[call.block.name]]
        yield ready


def without_recomputation(problem: Problem, plan: Plan) -> tuple[int, ...]:
    """Peak bytes of each rank if the plan recomputed nothing; empty if it recomputes nothing."""
    if not plan.recompute:
        return ()
    return estimate(problem, replace(plan, recompute=())).peak_memory


def collective_seconds(problem: Problem, lowered: Lowered) -> Callable[[Instruction], float]:
    """A function from an instruction to the seconds of its sum or gather over data ranks; 0 for
    other instructions.

    Where data ranks share out updates, a bucket is reduce-scattered. Averages of weights that are
    not made in every step count with their share of a step.
    """
    sums = {item.label: item for item in lowered.shared}
    by_name, updates = _held(lowered), lowered.updates
    known: dict[Hashable, float] = {}  # equal for all micro-batches

    def seconds(line: Instruction) -> float:
        key = line.kind, line.stage, line.value, line.ranks
        if key not in known:
            known[key] = asked(line)
        return known[key]

    def asked(line: Instruction) -> float:
        if line.kind is Kind.UNSHARD:
            assert line.stage is not None
            held = [by_name[name] for name in lowered.stages[line.stage].tensors]
            taken = 0.0
            for expert in (None, 0):
                items = [x for x in held if bool(x.experts) == (expert == 0)]
                nbytes = sum(item.nbytes for item in items if problem.sharers(item) > 1)
                group = lowered.grid.replicas(line.ranks, expert=expert)
                if nbytes:
                    taken += collective.joined(problem.mesh, "all-gather", nbytes, group)
            return taken
        item = sums.get(line.value or "")
        if item is None or lowered.data == 1:
            return 0.0
        nbytes, action = sent_bytes(lowered, item), "all-reduce"
        if updates.separate and line.kind is Kind.REDUCE_GRADIENTS:  # of one data rank
            ranks = tuple(lowered.grid.rank(position) for position in line.ranks)
            return collective.joined(problem.mesh, action, nbytes, ranks)
        if line.kind is Kind.GATHER_PARAMETERS:
            nbytes = sum(by_name[name].nbytes for name in item.names)
            action = "all-gather"
            if updates.way == "parameter-server":
                return server_seconds(problem, lowered, line, nbytes)
        elif updates.way == "parameter-server" and item in lowered.buckets:
            return server_seconds(problem, lowered, line, nbytes)
        elif lowered.zero and item in lowered.buckets:
            action = "reduce-scatter"
        if line.kind is Kind.PUSH_PULL:
            weights = sum(by_name[name].nbytes for name in item.names)
            return sum(server_seconds(problem, lowered, line, each) for each in (nbytes, weights))
        ranks = lowered.grid.replicas(line.ranks, expert=0 if is_of_experts(line) else None)
        rounds = updates.every if line.kind is Kind.AVERAGE_PARAMETERS else 1
        if line.kind is Kind.AVERAGE_PARAMETERS:
            averaged = [by_name[name] for name in item.names]  # their masters, where there are some
            nbytes = sum(x.numel * x.wide_dtype.itemsize for x in averaged)
        return collective.joined(problem.mesh, action, nbytes, ranks) / rounds

    return seconds


def left_seconds(problem: Problem, plan: Plan, lowered: Lowered) -> Callable[[Instruction], float]:
    """A function from the sum of a bucket to the seconds of its stage's backward that are left when
    its gradients are final: those of the blocks before the first that reads one of its tensors."""
    priced = problem.at_zero("auto").under(plan)
    names = [block.name for block in priced.cut.blocks]
    left: dict[str, float] = {}
    for bucket in lowered.buckets:
        if bucket.stage != NOWHERE:
            stage = lowered.stages[bucket.stage]
            backward = dict(zip(names, priced.on(stage.rank).backward, strict=True))
            left[bucket.label] = 0.0
            for call in stage.calls:
                if not {item.name for item in call.block.tensors}.isdisjoint(bucket.names):
                    break
                left[bucket.label] += backward[call.block.name]
    return lambda line: left.get(line.value or "", 0.0)


def server_seconds(problem: Problem, lowered: Lowered, line: Instruction, nbytes: int) -> float:
    """Seconds in which the bytes that the other data ranks send to the first of them, or get from
    it, go through its link one after another."""
    first, *others = lowered.grid.replicas(line.ranks, expert=0 if is_of_experts(line) else None)
    each = (collective.joined(problem.mesh, "broadcast", nbytes, [first, r]) for r in others)
    return sum(each)


def server_load(problem: Problem, lowered: Lowered) -> tuple[int, int]:
    """Bytes through the link of the fullest server in a step, in both directions; and bytes of its
    optimizer states and masters, which the other data ranks do not have."""
    by_name, loads = _held(lowered), [(0, 0)]
    for rank in range(lowered.size):
        items = [by_name[n] for item in lowered.shared if rank in item.ranks for n in item.names]
        states = sum(item.numel * problem.bytes_of(item)[2] for item in items)
        both = (((problem.sharers(x) - 1) * (x.gradient_nbytes + x.nbytes)) for x in items)
        loads.append((sum(both), states))
    return max(loads)


def sent_bytes(lowered: Lowered, item: TiedTensor | Bucket) -> int:
    """Bytes of a sum of gradients as sent between ranks; only buckets are compressed."""
    updates = ALL_REDUCE if isinstance(item, TiedTensor) else lowered.updates
    tensors = _held(lowered)
    return sum(tensors[name].summed_nbytes(updates) for name in item.names)


def _held(lowered: Lowered) -> Mapping[str, Parameter]:
    """The tensors by name, in the size in which a rank holds them."""
    return parameters_held(lowered.graph, lowered.size * lowered.tensor)


def message_seconds(problem: Problem, lowered: Lowered) -> Callable[[str, int, int], float]:
    """A function from a message (value, source, target) to its seconds on the link of its ranks.

    Where a value goes to several ranks, the slowest of their links counts for all.
    """
    rank = [stage.rank for stage in lowered.stages]
    seconds: dict[str, float] = {}
    for name, value in lowered.values.items():
        users = [rank[j] for j in value.consumers if j != NOWHERE]
        home = rank[value.producer] if value.producer != NOWHERE else None
        links = [] if home is None else [(home, user) for user in users]
        seconds[name] = collective.message(problem.mesh, links, value.nbytes)
    return lambda value, source, target: seconds[value]
