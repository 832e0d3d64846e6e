"""Rules on communication: messages have two ends, collectives all of their ranks, in one order.

Messages are matched by their order on the channel only (NCCL has no tags), so two swapped receives
give wrong numbers without an error. Collectives of a group are matched by their order too; two that
are swapped on one rank would add the gradients of different tensors. A bucket is summed by one rank
here, together with its data replicas, which have the same list; after every micro-batch if they
keep pieces of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from parcompiler.instruction import Kind
from parcompiler.lower.lowered import Bucket, TiedTensor
from parcompiler.schedules.action import NOWHERE
from parcompiler.verifier.fault import Fault, numbers, ranks
from parcompiler.verifier.steps import Channel, StepIndex, Way, behind, named

TWO_ENDS = "every message is sent and received"
WANTED = "no message is in vain"
MESSAGES = "messages keep their order"
REDUCED = "every copy of a parameter is reduced"
COLLECTIVES = "collectives keep their order"
SHARED = "every rank gets the loss"
GATHERED = "every rank gets what its data ranks update"


def faults(step: StepIndex) -> Iterator[Fault]:
    """All faults of the messages and collectives of a step."""
    expected = dict.fromkeys(_expected(step))
    for way in expected:
        yield from _ends(step, way)
    for way in dict.fromkeys((*step.sent, *step.received)):
        if way not in expected:
            yield from _in_vain(step, way)
    for (source, target), channel in step.channels.items():
        yield from _message_order(source, target, channel)
    if step.training:
        lowered = step.wiring.lowered
        sums = {item.label: item for item in lowered.sums}
        for item in sums.values():
            for rank in (rank for rank in item.ranks if 0 <= rank < len(step.lists)):
                yield from _never(step, rank, item)
        for rank in range(len(step.lists)):
            yield from _wrong(step, rank, sums)
            if behind(lowered) is not None:
                updated = lowered.buckets if lowered.zero > 1 else lowered.shared
                if lowered.zero == 3:  # after the step ranks have pieces of it
                    updated = tuple(x for x in lowered.buckets if x.stage == NOWHERE)
                yield from _gathered(step, rank, {item.label: item for item in updated})
        for group in dict.fromkeys(item.ranks for item in sums.values()):
            yield from _collective_order(step, group)
    yield from _shares(step)


# Messages


def _expected(step: StepIndex) -> Iterator[Way]:
    """The messages that the stages need: a value to each other rank, its gradient back."""
    for crossing in step.wiring.crossings:
        if crossing.source != crossing.target:
            yield crossing.source, crossing.target, crossing.name, False
            if crossing.differentiable and step.training:
                yield crossing.target, crossing.source, crossing.name, True


def _ends(step: StepIndex, way: Way) -> Iterator[Fault]:
    """A message that is needed is sent by one rank and received by the other."""
    sent, received = set(step.sent.get(way, ())), set(step.received.get(way, ()))
    source, target, name, gradient = way
    text = named(name, gradient)
    neither = set(step.microbatches) - sent - received
    if received - sent:
        detail = f"rank {source} never sends {text} {numbers(received - sent)}"
        yield Fault(TWO_ENDS, f"{detail} to rank {target}, which receives it")
    if sent - received:
        detail = f"rank {target} never receives {text} {numbers(sent - received)}"
        yield Fault(TWO_ENDS, f"{detail} from rank {source}, which sends it")
    if neither:
        detail = f"{text} {numbers(neither)} never goes from rank {source} to rank {target}"
        yield Fault(TWO_ENDS, f"{detail}, which needs it")


def _in_vain(step: StepIndex, way: Way) -> Iterator[Fault]:
    """A message that no stage needs, which would be taken for another one."""
    source, target, name, gradient = way
    text, reason = named(name, gradient), _reason(step, way)
    if step.sent.get(way):
        detail = f"rank {source} sends {text} {numbers(step.sent[way])} to rank {target}"
        yield Fault(WANTED, f"{detail}: {reason}")
    if step.received.get(way):
        detail = f"rank {target} receives {text} {numbers(step.received[way])} from rank {source}"
        yield Fault(WANTED, f"{detail}: {reason}")


def _reason(step: StepIndex, way: Way) -> str:
    """Why a message is not needed."""
    source, target, name, gradient = way
    maker = step.wiring.makers.get(name)
    if maker is None:
        return f"no stage makes {name}"
    if maker == NOWHERE:
        return f"all ranks make {name} together"
    home = step.wiring.stages[maker].rank
    ways = [(crossing.name, crossing.target) for crossing in step.wiring.crossings]
    if gradient and not step.training:
        return "there are no gradients"
    if gradient and not step.wiring.differentiable(name):
        return f"{name} carries no gradient"
    if gradient and target == home and (name, source) in ways:
        return f"what rank {source} makes of {name} does not lead to the loss"
    made, used = (target, source) if gradient else (source, target)
    if home != made:
        return f"rank {home} makes {name}, not rank {made}"
    return f"no stage of rank {used} receives {name}"


def _message_order(source: int, target: int, channel: Channel) -> Iterator[Fault]:
    """Both ends of a channel have its messages in one order, apart from those that lack an end."""
    sent = [channel.sends.labels[k] for k in channel.sends.common(channel.receives)]
    received = [channel.receives.labels[k] for k in channel.receives.common(channel.sends)]
    if sent == received:
        return
    k = next(k for k, (a, b) in enumerate(zip(sent, received, strict=True)) if a != b)
    labels = (f"{named(name, gradient)} mb {i}" for name, gradient, i in (sent[k], received[k]))
    ends = "{} when sent and {} when received".format(*labels)
    yield Fault(MESSAGES, f"rank {source} -> rank {target}: message {k + 1} is {ends}")


# Collectives


def _tensors(item: TiedTensor | Bucket) -> str:
    """The tensors of a sum."""
    first, *others = item.names or ("nothing",)
    return f"{first} and {len(others)} more" if others else first


def _never(step: StepIndex, rank: int, item: TiedTensor | Bucket) -> Iterator[Fault]:
    """A sum is made once at the end, or after every micro-batch if it goes to pieces."""
    start = f"rank {rank} never sums {item.label} ({_tensors(item)})"
    if isinstance(item, TiedTensor) or step.wiring.lowered.zero < 2:
        if item.label not in step.reductions[rank]:
            yield Fault(REDUCED, start)
    elif missing := set(step.microbatches) - set(step.scatters[rank].get(item.label, ())):
        yield Fault(REDUCED, f"{start} for {numbers(missing)}")


def _wrong(step: StepIndex, rank: int, sums: Mapping[str, TiedTensor | Bucket]) -> Iterator[Fault]:
    """A rank takes part in sums that exist, with the ranks that belong to them."""
    exchanges = [*step.reductions[rank].items()]
    exchanges += [(n, at) for n, places in step.scatters[rank].items() for at in places.values()]
    for label, position in exchanges:
        line, item = step.at(rank, position), sums.get(label)
        pieces = isinstance(item, Bucket) and step.wiring.lowered.zero > 1
        if item is None:
            yield Fault(REDUCED, f"rank {rank}: {line}: no tensor has this label")
        elif pieces != (line.microbatch is not None):
            kept = "pieces" if pieces else "a whole"
            yield Fault(REDUCED, f"rank {rank}: {line}: its gradients are kept as {kept}")
        elif line.ranks != item.ranks:
            yield Fault(REDUCED, f"rank {rank}: {line}: {_tensors(item)} is on {ranks(item.ranks)}")


def _gathered(
    step: StepIndex, rank: int, sums: Mapping[str, TiedTensor | Bucket]
) -> Iterator[Fault]:
    """A rank gathers, at the end, the tensors of whose gradients its data replicas have parts:
    parameters change after the step."""
    for label, item in sums.items():
        if rank in item.ranks and label not in step.gathers[rank]:
            yield Fault(GATHERED, f"rank {rank} never gathers {label} ({_tensors(item)})")
    end = len(step.lists[rank]) - len(step.gathers[rank])
    for label, position in step.gathers[rank].items():
        line = step.at(rank, position)
        if label not in sums or rank not in sums[label].ranks or line.ranks != (rank,):
            yield Fault(GATHERED, f"rank {rank}: {line}: its data replicas have no such part")
        if position < end:
            yield Fault(GATHERED, f"rank {rank}: {line} stands before the end of the step")


def _collective_order(step: StepIndex, group: tuple[int, ...]) -> Iterator[Fault]:
    """The ranks of a group sum the same tensors one after the other."""
    orders: dict[int, list[str]] = {}
    for rank in (rank for rank in group if 0 <= rank < len(step.lists)):
        places = sorted((place, label) for label, place in step.reductions[rank].items())
        orders[rank] = [label for place, label in places if step.at(rank, place).ranks == group]
    common = set.intersection(*map(set, orders.values())) if orders else set()
    lists = [(rank, [x for x in labels if x in common]) for rank, labels in orders.items()]
    for rank, labels in lists[1:]:
        home, expected = lists[0]
        if labels != expected:
            first, other = ", ".join(expected), ", ".join(labels)
            yield Fault(COLLECTIVES, f"rank {home} sums {first}, and rank {rank} sums {other}")


def _shares(step: StepIndex) -> Iterator[Fault]:
    """Every rank is given the loss, by the rank that has it."""
    wiring = step.wiring
    home = next((stage.rank for stage in wiring.stages if stage.loss is not None), None)
    if wiring.head is not None:  # then every rank has it; the rank before the head shares it
        home = wiring.rank_of(wiring.head.stage)
    for rank, position in enumerate(step.shares):
        if position is None:
            yield Fault(SHARED, f"rank {rank} has no {Kind.SHARE_LOSS}")
            continue
        line = step.at(rank, position)
        if line.peer != home:
            yield Fault(SHARED, f"rank {rank}: {line}: the loss is on rank {home}")
