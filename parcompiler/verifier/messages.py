"""Rules on messages: each has two ends, and both ends see the messages of a channel in one order.

Ranks match messages by their order on the channel and by nothing else (NCCL knows no tags), so two
receives that are swapped give no error but wrong numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from parcompiler.schedules.action import NOWHERE
from parcompiler.verifier.fault import Fault, numbers
from parcompiler.verifier.steps import Channel, Label, Step, Way

TWO_ENDS = "every message is sent and received"
WANTED = "no message is in vain"
ORDERED = "messages keep their order"


def faults(step: Step) -> Iterator[Fault]:
    """All faults of the messages of a step."""
    expected = dict.fromkeys(_expected(step))
    for way in expected:
        yield from _ends(step, way)
    for way in dict.fromkeys((*step.sent, *step.received)):
        if way not in expected:
            yield from _in_vain(step, way)
    for (source, target), channel in step.channels.items():
        yield from _order(source, target, channel)


def _expected(step: Step) -> Iterator[Way]:
    """The messages that the stages need: a value to each other rank, its gradient back."""
    for crossing in step.wiring.crossings:
        if crossing.source != crossing.target:
            yield crossing.source, crossing.target, crossing.name, False
            if crossing.differentiable and step.training:
                yield crossing.target, crossing.source, crossing.name, True


def _ends(step: Step, way: Way) -> Iterator[Fault]:
    """A message that is needed is sent by one rank and received by the other."""
    sent, received = set(step.sent.get(way, ())), set(step.received.get(way, ()))
    source, target, name, gradient = way
    text = f"{name}{'.grad' if gradient else ''}"
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


def _in_vain(step: Step, way: Way) -> Iterator[Fault]:
    """A message that the stages do not need: it would be taken for another one."""
    source, target, name, gradient = way
    text = f"{name}{'.grad' if gradient else ''}"
    reason = _reason(step, way)
    if step.sent.get(way):
        detail = f"rank {source} sends {text} {numbers(step.sent[way])} to rank {target}"
        yield Fault(WANTED, f"{detail}: {reason}")
    if step.received.get(way):
        detail = f"rank {target} receives {text} {numbers(step.received[way])} from rank {source}"
        yield Fault(WANTED, f"{detail}: {reason}")


def _reason(step: Step, way: Way) -> str:
    """Why nobody needs a message."""
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


def _order(source: int, target: int, channel: Channel) -> Iterator[Fault]:
    """Both ends of a channel have its messages in one order; those that lack an end left out."""
    sent = [channel.sends.labels[k] for k in channel.sends.common(channel.receives)]
    received = [channel.receives.labels[k] for k in channel.receives.common(channel.sends)]
    if sent == received:
        return
    k = next(k for k, (a, b) in enumerate(zip(sent, received, strict=True)) if a != b)
    ends = f"{_label(sent[k])} when sent and {_label(received[k])} when received"
    yield Fault(ORDERED, f"rank {source} -> rank {target}: message {k + 1} is {ends}")


def _label(label: Label) -> str:
    """A message as an instruction names it."""
    name, gradient, i = label
    return f"{name}{'.grad' if gradient else ''} mb {i}"
