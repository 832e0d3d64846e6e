"""What a template takes for one micro-batch: by the figures of the device, or by running it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from parcompiler.cost import BlockCost, seconds
from parcompiler.cost.operation import EXCHANGE, Operation
from parcompiler.cost.timed import Timed, time_block
from parcompiler.device import Device
from parcompiler.errors import InputError
from parcompiler.graph import Block, Graph
from parcompiler.mesh import Mesh
from parcompiler.plan import TemplateTime, VocabularyTime


class Bench(Protocol):
    """What runs on this machine for `costs="measured"`; `bench.local` has it."""

    @property
    def device(self) -> torch.device:
        """Where blocks run."""
        ...

    def exchanged(self, exchanges: Sequence[Operation], between: float) -> float | None:
        """Seconds that a tensor rank spends in `exchanges`, computing for `between` s before each.

        None where so many ranks cannot be busy at once here.
        """
        ...

    def vocabulary(self, graph: Graph, ranks: int, method: str) -> VocabularyTime:
        """What the passes take on one of `ranks` ranks that share the graph's vocabulary."""
        ...


def modelled(name: str, cost: BlockCost, device: Device) -> TemplateTime:
    """The times of the template `name` by the roofline of `device`."""
    return TemplateTime(
        template=name,
        forward=seconds(cost.forward, device),
        backward=seconds(cost.backward, device),
        weight=seconds(cost.weight, device),
    )


def modelled_on(mesh: Mesh, costs: Mapping[str, BlockCost]) -> list[dict[str, TemplateTime]]:
    """The times of templates, by name, on the device of the mesh; of several on each rank's."""
    known = {
        device: {name: modelled(name, cost, device) for name, cost in costs.items()}
        for device in set(mesh.devices)
    }
    return [known[device] for device in ([mesh.hardware] if mesh.is_uniform else mesh.devices)]


def measured(
    like: TemplateTime,
    cost: BlockCost,
    block: Block,
    graph: Graph,
    device: Device,
    bench: Bench,
) -> TemplateTime:
    """The times of the template of `block`, measured on `bench`.

    `like` are its modelled times: the part of the backward that can wait is as large as in the
    model, and what ranks exchange is taken from `device` where the bench has no room for them.
    Raises InputError where the block cannot run here.
    """
    trainable = {item.node for item in graph.parameters if item.trainable}
    timed = Timed(
        nodes=block.nodes,
        outputs=block.outputs,
        parameters=trainable,
        buffers={item.node for item in graph.parameters} - trainable,
        differentiable=graph.differentiable,
        high=_high(graph),
        device=bench.device,
    )
    with _named(repr(block.name)):
        found = time_block(timed)
        talking = [
            _exchanged(*side, device, bench)
            for side in ((cost.forward, found.forward), (cost.backward, found.backward))
        ]
    return TemplateTime(
        template=like.template,
        forward=found.forward + talking[0],
        backward=found.backward + talking[1],
        weight=found.backward * like.weight / like.backward if like.backward else 0.0,
    )


def measured_vocabulary(graph: Graph, ranks: int, method: str, bench: Bench) -> VocabularyTime:
    """The times of the passes of the graph's vocabulary. Raises InputError as `measured` does."""
    with _named("the vocabulary"):
        return bench.vocabulary(graph, ranks, method)


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Within it, whatever an operator has against such data says what it was that ran.

    So do processes that cannot be started.
    """
    try:
        yield
    except Exception as error:
        message = (
            f"the times of {what} cannot be measured here ({type(error).__name__}: {error}): "
            "take costs='model'"
        )
        raise InputError(message) from error


def _exchanged(
    operations: Iterable[Operation], computed: float, device: Device, bench: Bench
) -> float:
    """Seconds of what tensor ranks exchange among `computed` s of work: measured, or modelled."""
    exchanges = [one for one in operations if one.kind == EXCHANGE]
    if not exchanges:
        return 0.0
    found = bench.exchanged(exchanges, computed / len(exchanges))
    return seconds(exchanges, device) if found is None else found


def _high(graph: Graph) -> dict[str, int]:
    """What the integers of the batch are below; where ranks hold pieces, those of the smallest."""
    pieces = max((item.whole.numel // max(1, item.numel) for item in graph.parameters), default=1)
    known = ((item.node, item.high) for item in graph.inputs)
    return {node: max(1, high // pieces) for node, high in known if high is not None}
