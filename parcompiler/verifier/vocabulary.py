"""Rules on the layers of the vocabulary: what all ranks have is what the graph says, and fits.

The graph has a node for each embedding whose table is in rows, and one for the head with the loss.
The program says beside each which stage uses it or gives what it takes, and which tensors are rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx

from parcompiler.graph import Head, Lookup, Vocabulary
from parcompiler.lower.lowered import Spread
from parcompiler.options import METHODS
from parcompiler.verifier.fault import Fault
from parcompiler.verifier.wiring import Wiring

GIVEN = "all ranks compute what the graph gives them"
USED = "what all ranks compute goes to one rank"
ROWS = "all ranks hold rows of the tensors that they read"
STEADY = "the vocabulary is on all ranks only where parameters stay the same in a step"


def faults(wiring: Wiring) -> Iterator[Fault]:
    """All faults of the layers that are on all ranks, besides those of instruction lists."""
    if wiring.spread is not None:
        yield from _layers(wiring, wiring.spread, wiring.graph.vocabulary or Vocabulary())
        yield from _inputs(wiring, wiring.spread)
        yield from _lookups(wiring)
        yield from _head(wiring)
        yield from _rows(wiring, wiring.spread)
        if wiring.lowered.asynchronous:
            yield Fault(STEADY, "and this step updates them after every backward")


def _layers(wiring: Wiring, spread: Spread, wanted: Vocabulary) -> Iterator[Fault]:
    """The layers are those of the graph, each once, under the names of what they give or take."""
    if spread.method not in METHODS:
        yield Fault(GIVEN, f"there is no method {spread.method!r} (known: {', '.join(METHODS)})")
    found = [item.lookup for item in spread.lookups]
    for item in (*found, *(x for x in wanted.lookups if x not in found)):
        count = found.count(item)
        if count != (item in wanted.lookups):
            times = f"{count} times" if count else "on no rank"
            yield Fault(GIVEN, f"{item.node.name} is looked up {times}")
    if (spread.head.head if spread.head else None) is not wanted.head:
        has = wanted.head.node.name if wanted.head else "none"
        yield Fault(GIVEN, f"their head is not that of the graph ({has})")
    for name, count in Counter(item.value for item in spread.lookups).items():
        if count > 1:
            yield Fault(GIVEN, f"{count} lookups give {name}")
    named = [(item.value, item.lookup.node) for item in spread.lookups]
    named += [(spread.head.value, spread.head.head.x)] if spread.head else []
    for name, node in named:
        if wiring.nodes.get(name) is not node:
            yield Fault(GIVEN, f"{name} stands in the place of {node.name}")


def _inputs(wiring: Wiring, spread: Spread) -> Iterator[Fault]:
    """What a layer takes from the batch is what its indices or targets are computed from."""
    layers: list[tuple[str, tuple[str, ...], fx.Graph]] = [
        (item.value, item.inputs, item.lookup.indices) for item in spread.lookups
    ]
    if spread.head is not None:
        layers.append(("the head", spread.head.inputs, spread.head.head.targets))
    for layer, names, computed in layers:
        wanted = {node.name for node in computed.nodes if node.op == "placeholder"}
        wanted &= wiring.graph.input_nodes
        nodes = [wiring.nodes.get(name) for name in names]
        found = [node.name for node in nodes if node is not None]
        if sorted(found) != sorted(wanted) or len(found) != len(names):
            listed = ", ".join(names) or "nothing"
            reads = ", ".join(sorted(wanted)) or "nothing"
            detail = f"{layer} takes {listed} from the batch, and its graph reads {reads}"
            yield Fault(GIVEN, detail)


def _lookups(wiring: Wiring) -> Iterator[Fault]:
    """What is looked up is summed on the one rank whose stages read it."""
    for name, item in wiring.lookups.items():
        home, readers = wiring.rank_of(item.stage), wiring.readers.get(name, [])
        if item.stage not in readers:
            yield Fault(USED, f"{name} goes to stage {item.stage}, which does not receive it")
        for j in readers:
            rank = wiring.rank_of(j)
            if home is not None and rank != home:
                detail = f"{name} goes to rank {home}, and stage {j} of rank {rank} receives it"
                yield Fault(USED, detail)


def _head(wiring: Wiring) -> Iterator[Fault]:
    """What the head takes comes from the stage that makes it."""
    if wiring.head is not None:
        name, maker = wiring.head.value, wiring.makers.get(wiring.head.value)
        if maker != wiring.head.stage:
            made = "no stage makes" if maker is None else f"stage {maker} makes"
            yield Fault(USED, f"the head takes {name} from stage {wiring.head.stage}; {made} it")


def _rows(wiring: Wiring, spread: Spread) -> Iterator[Fault]:
    """The tensors in rows are those that the layers read, each with the size of its vocabulary."""
    layers: list[Lookup | Head] = [item.lookup for item in spread.lookups]
    layers += [spread.head.head] if spread.head else []
    read = {name for layer in layers for name in _read(layer)}
    for name in sorted(read - wiring.rows):
        yield Fault(ROWS, f"{name} is read and not held")
    for name, count in Counter(spread.tensors).items():
        if count > 1:
            yield Fault(ROWS, f"{name} is listed {count} times")
    if len(spread.tensors) != len(spread.sizes):
        yield Fault(ROWS, f"{len(spread.tensors)} tensors have {len(spread.sizes)} sizes")
    for name, size in zip(spread.tensors, spread.sizes, strict=False):
        tensor = wiring.graph.by_name.get(name)
        if tensor is None:
            yield Fault(ROWS, f"{name} is held, which the model does not have")
        elif name not in read:
            yield Fault(ROWS, f"{name} is held, and no layer of the vocabulary reads it")
        elif size not in tensor.shape:
            yield Fault(ROWS, f"{name} has {size} rows, and the model's is {list(tensor.shape)}")
        elif tensor.mutated:
            yield Fault(ROWS, f"{name} is updated in the forward, and each rank has some of it")


def _read(layer: Lookup | Head) -> Iterator[str]:
    """The tensors of the model that a layer reads."""
    yield layer.weight
    if isinstance(layer, Head):
        yield from filter(None, (layer.bias, layer.class_weight))
