"""When every instruction runs and what memory it takes: a simulation of what the runtime executes.

Each rank executes its list in order. A SEND does not hold its rank up: messages travel beside the
compute, one after the other on each directed link between two ranks. So do sums of gradients, one
after the other on each rank. Data replicas do the same at the same time: one of them is simulated.

    rank 0  F0 F1 .. .. .. B0 .. B1
    0 -> 1  .. x0 x1                    [1] the SEND after F0 begins when F0 ends
    rank 1  .. .. F0 B0 F1 B1           [2] F0 begins when x0 has arrived
    1 -> 0  .. .. .. .. g0 .. g1        [3] B0 of rank 0 waits for the gradient of x0

So each moment is the latest of a few earlier ones, and one walk over the lists finds them all: a
rank that needs a message that was not sent yet is put aside until it is. Time and memory of the
simulation grow with the number of instructions.

>>> from parcompiler.instruction import parse
>>> first = "FORWARD stage 0 mb 0; SEND x mb 0 to 1; RECV x.grad mb 0 from 1; BACKWARD stage 0 mb 0"
>>> last = "RECV x mb 0 from 0; FORWARD stage 1 mb 0; BACKWARD stage 1 mb 0; SEND x.grad mb 0 to 0"
>>> lists = [parse(text.replace("; ", "\\n")) for text in (first, last)]
>>> cost = StageCost(forward=1.0, backward=2.0, resident=100, saved=10)
>>> print(simulate(lists, [0, 1], [cost, cost], {"x": 4}, lambda value, source, target: 1.0))
step 8 s, 62.5 % idle, at most 118 B on a rank
rank 0   62.5 %        118 B  F0------........................................B0--------------
rank 1   62.5 %        114 B  ................F0------B0--------------........................
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING

from parcompiler.errors import InputError
from parcompiler.instruction import EMBEDDING, HEAD, Instruction, Kind
from parcompiler.schedules.timing import StageCost
from parcompiler.schedules.vocabulary_cost import VocabularyCost
from parcompiler.simulator.step import Prices, Step
from parcompiler.simulator.timeline import Timeline, critical_path, idle, levels
from parcompiler.simulator.uses import Ends, program

if TYPE_CHECKING:
    from parcompiler.lower import Lowered


def free(*_: object) -> float:
    """The time of communication that takes none."""
    return 0.0


def simulate(
    instructions: Sequence[Sequence[Instruction]],
    stage_rank: Sequence[int],
    costs: Sequence[StageCost],
    message_bytes: Mapping[str, int],
    message_seconds: Callable[[str, int, int], float] = free,
    *,
    collective_seconds: Callable[[Instruction], float] = free,
    stages: Sequence[Ends] | None = None,
    vocabulary: VocabularyCost | None = None,
) -> Timeline:
    """Execute one list per rank; stage j is on rank `stage_rank[j]` and costs `costs[j]`.

    `message_seconds(value, source, target)` is the time, latency included, for which a message of
    `message_bytes[value]` occupies the link from rank `source` to rank `target`. A collective
    takes `collective_seconds(instruction)` from when the last of its ranks has reached it; sums of
    gradients hold up nothing but the end of the step.

    With `stages`, an instruction waits for the messages that its stage receives or gives. Without,
    it waits for all of its micro-batch and direction that were posted before it and not used yet,
    which is the same when every rank has one stage.

    `vocabulary` says what the layers that all ranks share cost. Their collectives run one after the
    other, beside the compute, from when the last rank has reached their line.

    Raises PlanError that names a BACKWARD without its FORWARD, or the instructions at which the
    ranks wait for each other.
    """
    if len(costs) != len(stage_rank):
        message = f"every stage needs a cost ({len(stage_rank)} stages, {len(costs)} costs)"
        raise InputError(message)
    _check_vocabulary(instructions, vocabulary)
    programs = [program(rank, lines, stages) for rank, lines in enumerate(instructions)]
    embedded = {x.value for lines in instructions for x in lines if x.kind is Kind.EMBED}
    prices = Prices(
        costs,
        message_bytes,
        cache(message_seconds),
        collective_seconds,
        vocabulary or VocabularyCost(),
        max(1, len(embedded)),
    )
    step = Step(programs, prices)
    step.run()
    end = max((event.end for event in step.events), default=0.0)
    for rank, size in enumerate(_updates(step, stage_rank)):
        step.changes[rank].append((end, size))
    return _timeline(step, end, _early(len(programs), stage_rank, prices))


def simulate_lowered(
    lowered: Lowered,
    costs: Sequence[StageCost],
    seconds: Callable[[str, int, int], float] = free,
    *,
    collective_seconds: Callable[[Instruction], float] = free,
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
        stages=lowered.stages,
        vocabulary=vocabulary,
    )


def _check_vocabulary(
    instructions: Sequence[Sequence[Instruction]], vocabulary: VocabularyCost | None
) -> None:
    """Raise InputError for layers of the vocabulary without a cost."""
    if vocabulary is not None:
        return
    shared = HEAD | EMBEDDING
    found = next((line for lines in instructions for line in lines if line.kind in shared), None)
    if found is not None:
        message = f"what all ranks do for the vocabulary needs a cost ({found}, no vocabulary=...)"
        raise InputError(message)


def _early(ranks: int, stage_rank: Sequence[int], prices: Prices) -> list[int]:
    """Bytes that each rank holds from the begin of the step."""
    early = [prices.vocabulary.resident] * ranks
    for rank, cost in zip(stage_rank, prices.costs, strict=True):
        early[rank] += cost.early
    return early


def _updates(step: Step, stage_rank: Sequence[int]) -> list[int]:
    """Bytes that each rank takes more in the optimizer's step, which follows where stages have
    gone back."""
    updates = [step.prices.vocabulary.update if step.made.of else 0] * len(step.programs)
    for j in step.made.of:
        updates[stage_rank[j]] += step.prices.costs[j].update
    return updates


def _timeline(step: Step, step_time: float, early: Sequence[int]) -> Timeline:
    """What a finished step amounts to."""
    memory = tuple(levels(*pair) for pair in zip(early, step.changes, strict=True))
    return Timeline(
        step_time=step_time,
        bubble=idle(step.events, step_time, len(early)),
        peak_memory=tuple(max(size for _, size in held) for held in memory),
        events=tuple(sorted(step.events, key=attrgetter("begin", "rank"))),
        critical_path=critical_path(step.events, step.causes),
        memory=memory,
    )
