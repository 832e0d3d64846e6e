"""Rules on a vocabulary that all ranks share: its layers, and its instructions in a step.

The graph has a node for each embedding whose table is in rows, and one for the head with the loss.
The program adds the stage that uses a lookup or makes the head's input, and the tensors in rows.

All ranks have the same lines for the layers of the vocabulary, once for every micro-batch. On a
rank, the left column must come before the right one; e is an embedded value, used on rank Z, and x
the input of the head, from rank L:

    EMBED e                                    REDUCE e to Z
    REDUCE e                  (on Z)           FORWARD of each stage that reads it
    BACKWARD of each of them  (on Z)           BROADCAST e.grad from Z
    BROADCAST e.grad                           EMBED_BACKWARD e
    FORWARD of the maker      (on L)           BROADCAST x from L
    BROADCAST x                                S
    S                                          EXCHANGE maximum, or statistics
    EXCHANGE maximum                           NORMALIZE
    NORMALIZE                                  EXCHANGE sum
    EXCHANGE sum or statistics                 T;  "vocab-2": and REDUCE x.grad
    T                         ("vocab-2": no)  REDUCE x.grad to L
    REDUCE x.grad             (on L)           BACKWARD of the maker
    EXCHANGE sum or statistics                 SHARE_LOSS

As all ranks run the collectives in one order, whatever precedes a collective on one rank is done
before the users of it, or of a later one, on another. S and T need not take the micro-batches in
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import fx

from parcompiler.graph import VocabularyLayers
from parcompiler.instruction import GROUP, TRANSFERS, Kind
from parcompiler.lower.lowered import Spread
from parcompiler.options import METHODS
from parcompiler.verifier.fault import Fault, numbers, repeated
from parcompiler.verifier.steps import Pair, Phase, Places, StepIndex
from parcompiler.verifier.wiring import Wiring

GIVEN = "all ranks compute what the graph gives them"
USED = "what all ranks compute goes to one rank"
ROWS = "all ranks hold rows of the tensors that they read"
STEADY = "the vocabulary is on all ranks only where parameters stay the same in a step"
ONCE = "every rank does its part of the vocabulary"
WANTED = "no part of the vocabulary is in vain"
PEERS = "what all ranks have together goes from and to the right rank"
ORDERED = "collectives keep their order"

EXCHANGES = {  # after S, and after NORMALIZE if there is one
    "naive": ("maximum", "sum"),
    "interlaced": ("maximum", "sum"),
    "vocab-1": ("statistics",),
    "vocab-2": ("statistics",),
}


def layer_faults(wiring: Wiring) -> Iterator[Fault]:
    """All faults of the layers on all ranks; those of instruction lists are found by `faults`."""
    if wiring.spread is not None:
        yield from _layers(wiring, wiring.spread, wiring.graph.vocabulary or VocabularyLayers())
        yield from _batch_inputs(wiring, wiring.spread)
        yield from _lookup_homes(wiring)
        yield from _head_input(wiring)
        yield from _held_rows(wiring, wiring.spread)
        if wiring.lowered.asynchronous:
            yield Fault(STEADY, "and this step updates them after every backward")


def _layers(wiring: Wiring, spread: Spread, wanted: VocabularyLayers) -> Iterator[Fault]:
    """The layers are those of the graph, each once, under the names of their results or inputs."""
    if spread.method not in METHODS:
        yield Fault(GIVEN, f"there is no method {spread.method!r} (known: {', '.join(METHODS)})")
    lookups = [item.layer for item in spread.lookups]
    for item in (*lookups, *(x for x in wanted.lookups if x not in lookups)):
        count = lookups.count(item)
        if count != (item in wanted.lookups):
            times = f"{count} times" if count else "on no rank"
            yield Fault(GIVEN, f"{item.node.name} is looked up {times}")
    if (spread.head.layer if spread.head else None) is not wanted.head:
        has = wanted.head.node.name if wanted.head else "none"
        yield Fault(GIVEN, f"their head is not that of the graph ({has})")
    for name, count in repeated(item.value for item in spread.lookups):
        yield Fault(GIVEN, f"{count} lookups give {name}")
    named = [(item.value, item.layer.node) for item in spread.lookups]
    named += [(spread.head.value, spread.head.layer.x)] if spread.head else []
    for name, node in named:
        if wiring.nodes.get(name) is not node:
            yield Fault(GIVEN, f"{name} stands in the place of {node.name}")


def _batch_inputs(wiring: Wiring, spread: Spread) -> Iterator[Fault]:
    """A layer takes from the batch the tensors that its indices or targets are computed from."""
    layers: list[tuple[str, tuple[str, ...], fx.Graph]] = [
        (item.value, item.inputs, item.layer.indices) for item in spread.lookups
    ]
    if spread.head is not None:
        layers.append(("the head", spread.head.inputs, spread.head.layer.targets))
    for layer, names, computed in layers:
        wanted = {node.name for node in computed.nodes if node.op == "placeholder"}
        wanted &= wiring.graph.input_nodes
        nodes = [wiring.nodes.get(name) for name in names]
        known = [node.name for node in nodes if node is not None]
        if sorted(known) != sorted(wanted) or len(known) != len(names):
            listed = ", ".join(names) or "nothing"
            reads = ", ".join(sorted(wanted)) or "nothing"
            detail = f"{layer} takes {listed} from the batch, and its graph reads {reads}"
            yield Fault(GIVEN, detail)


def _lookup_homes(wiring: Wiring) -> Iterator[Fault]:
    """Looked-up values are summed on the one rank whose stages read them."""
    for name, item in wiring.lookups.items():
        home, readers = wiring.rank_of(item.stage), wiring.readers.get(name, [])
        if item.stage not in readers:
            yield Fault(USED, f"{name} goes to stage {item.stage}, which does not receive it")
        for j in readers:
            rank = wiring.rank_of(j)
            if home is not None and rank != home:
                detail = f"{name} goes to rank {home}, and stage {j} of rank {rank} receives it"
                yield Fault(USED, detail)


def _head_input(wiring: Wiring) -> Iterator[Fault]:
    """The head's input comes from the stage that makes it."""
    if wiring.head is not None:
        name, maker = wiring.head.value, wiring.makers.get(wiring.head.value)
        if maker != wiring.head.stage:
            made = "no stage makes" if maker is None else f"stage {maker} makes"
            yield Fault(USED, f"the head takes {name} from stage {wiring.head.stage}; {made} it")


def _held_rows(wiring: Wiring, spread: Spread) -> Iterator[Fault]:
    """The tensors in rows are those that the layers read, each with the size of its vocabulary."""
    read = {name for item in spread.all for name in item.layer.tensors}
    for name in sorted(read - wiring.rows):
        yield Fault(ROWS, f"{name} is read and not held")
    for name, size in spread.tensors.items():
        tensor = wiring.graph.by_name.get(name)
        if tensor is None:
            yield Fault(ROWS, f"{name} is held, which the model does not have")
        elif name not in read:
            yield Fault(ROWS, f"{name} is held, and no layer of the vocabulary reads it")
        elif size not in tensor.shape:
            yield Fault(ROWS, f"{name} has {size} rows, and the model's is {list(tensor.shape)}")
        elif tensor.mutated:
            yield Fault(ROWS, f"{name} is updated in the forward, and each rank has some of it")


# In a step


class Dependency(NamedTuple):
    """On `rank`, a collective depends on the instructions at `before`; those at `after` use its
    result."""

    rank: int
    collective: Phase
    before: Places
    after: Places


def faults(step: StepIndex) -> Iterator[Fault]:
    """All faults of the vocabulary's instructions; their order against the stages' is elsewhere."""
    if step.wiring.spread is None:
        return
    expected = list(phases(step))
    for rank, present in enumerate(step.parts):
        for part in expected:
            missing = set(step.microbatches) - set(present.get(part, ()))
            if missing:
                yield Fault(ONCE, f"rank {rank} has no {part} {numbers(missing)}")
        for part, places in present.items():
            if part not in expected:
                detail = f"rank {rank}: {part} {numbers(places)}: {_reason(step, part)}"
                yield Fault(WANTED, detail)
            elif part.kind in TRANSFERS:
                yield from _peers(step, rank, part, places)
    yield from _order(step)


def phases(step: StepIndex) -> Iterator[Phase]:
    """The phases that every rank has for each micro-batch."""
    wiring, training = step.wiring, step.training
    for name in wiring.lookups:
        yield Phase(Kind.EMBED, name)
        yield Phase(Kind.REDUCE, name)
        if training and wiring.differentiable(name):
            yield Phase(Kind.BROADCAST, name, gradient=True)
            yield Phase(Kind.EMBED_BACKWARD, name)
    if wiring.head is not None:
        yield Phase(Kind.BROADCAST, wiring.head.value)
        yield Phase(Kind.S)
        first, *second = exchanges(step)
        yield first
        if second:
            yield Phase(Kind.NORMALIZE)
            yield from second
        if training:
            yield Phase(Kind.T)
            yield Phase(Kind.REDUCE, wiring.head.value, gradient=True)


def exchanges(step: StepIndex) -> list[Phase]:
    """The exchanges of the head: one, or two with NORMALIZE between."""
    spread = step.wiring.spread
    names = EXCHANGES.get(spread.method if spread else "", ("statistics",))
    return [Phase(Kind.EXCHANGE, name) for name in names]


def dependencies(step: StepIndex) -> Iterator[Dependency]:
    """The table above, from the point of view of each collective."""
    wiring, every = step.wiring, range(len(step.lists))
    for name, item in wiring.lookups.items():
        total = Phase(Kind.REDUCE, name)
        gradient = Phase(Kind.BROADCAST, name, gradient=True)
        home = wiring.rank_of(item.stage)
        for j in wiring.readers.get(name, ()):
            if home is not None and wiring.rank_of(j) == home:
                yield Dependency(home, total, {}, step.computed[Kind.FORWARD, j])
                yield Dependency(home, gradient, step.back[j], {})
        for rank in every:
            yield Dependency(rank, total, step.places(rank, Phase(Kind.EMBED, name)), {})
            embed_backward = step.places(rank, Phase(Kind.EMBED_BACKWARD, name))
            yield Dependency(rank, gradient, {}, embed_backward)
    if wiring.head is None:
        return
    stage, home = wiring.head.stage, wiring.rank_of(wiring.head.stage)
    taken = Phase(Kind.BROADCAST, wiring.head.value)
    returned = Phase(Kind.REDUCE, wiring.head.value, gradient=True)
    if home is not None:
        yield Dependency(home, taken, step.computed[Kind.FORWARD, stage], {})
        if step.training:
            yield Dependency(home, returned, {}, step.back[stage])
    first, *second = exchanges(step)
    last = second[-1] if second else first
    early = wiring.spread is not None and wiring.spread.method == "vocab-2"  # x.grad before T
    for rank, share in enumerate(step.shares):
        s, normalize, t = (
            step.places(rank, Phase(kind)) for kind in (Kind.S, Kind.NORMALIZE, Kind.T)
        )
        yield Dependency(rank, taken, {}, s)
        yield Dependency(rank, first, s, normalize)
        for part in second:
            yield Dependency(rank, part, normalize, {})
        yield Dependency(rank, last, {}, t)
        if share is not None:
            yield Dependency(rank, last, {}, dict.fromkeys(step.microbatches, share))
        yield Dependency(rank, returned, step.places(rank, last) if early else t, {})


def pairs(step: StepIndex) -> Iterator[Pair]:
    """The order around collectives: after their operands, before their users."""
    for rank, collective, before, after in dependencies(step):
        places = step.places(rank, collective)
        yield Pair(rank, before, places)
        yield Pair(rank, places, after)


def sequences(step: StepIndex) -> list[list[tuple[Phase, int]]]:
    """The collectives of the vocabulary on each rank, in order, without those that some rank
    lacks."""
    by_rank = [
        {(part, i): place for part, places in parts.items() if part.kind in GROUP
         for i, place in places.items()}
        for parts in step.parts
    ]  # fmt: skip
    common = set.intersection(*map(set, by_rank)) if by_rank else set()
    return [sorted(common & set(places), key=places.__getitem__) for places in by_rank]


def _peers(step: StepIndex, rank: int, part: Phase, places: Places) -> Iterator[Fault]:
    """A collective names the rank of the stage that uses its result, or makes its operand."""
    wiring = step.wiring
    lookup, head = wiring.lookups.get(part.value), wiring.head
    j = lookup.stage if lookup else head.stage if head else -1
    home = wiring.rank_of(j)
    wrong = [i for i, place in places.items() if step.at(rank, place).peer != home]
    if wrong:
        line = step.at(rank, places[wrong[0]])
        more = f" (and so for {numbers(wrong[1:])})" if wrong[1:] else ""
        yield Fault(PEERS, f"rank {rank}: {line}: stage {j} is on rank {home}{more}")


def _order(step: StepIndex) -> Iterator[Fault]:
    """All ranks meet in one order."""
    first, *others = sequences(step)
    for rank, other in enumerate(others, start=1):
        if other != first:
            k = next(k for k, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
            ends = [f"{part} mb {i}" for part, i in (first[k], other[k])]
            detail = f"number {k + 1} of the vocabulary is {ends[0]} on rank 0"
            yield Fault(ORDERED, f"{detail} and {ends[1]} on rank {rank}")


def _reason(step: StepIndex, part: Phase) -> str:
    """Why a phase is not needed."""
    wiring = step.wiring
    method = wiring.spread.method if wiring.spread else ""
    known = {*wiring.lookups, *([wiring.head.value] if wiring.head else [])}
    if part.kind is Kind.EXCHANGE:
        wanted = " and ".join(item.value for item in exchanges(step))
        return f"{method!r} exchanges {wanted}" if wiring.head else "the head is on a stage"
    if part.kind is Kind.NORMALIZE and wiring.head:
        return f"{method!r} has no such part"
    if not part.value:
        return "the head is on a stage"
    if part.value not in known:
        return f"the ranks have no {part.value} together"
    if part.gradient and not wiring.differentiable(part.value):
        return f"{part.value} carries no gradient"
    return f"{part.value} is {'looked up' if part.value in wiring.lookups else 'for the head'}"
