"""What a template takes for one micro-batch: by the figures of the device, or by running it."""

from __future__ import annotations

import torch

from parcompiler.cost import BlockCost, seconds
from parcompiler.cost.exchange import EXCHANGE
from parcompiler.cost.timed import Timed, time_block
from parcompiler.device import Device
from parcompiler.errors import InputError
from parcompiler.graph import Block, Graph
from parcompiler.plan import TemplateTime


def modelled(name: str, cost: BlockCost, device: Device) -> TemplateTime:
    """The times of the template `name` by the roofline of `device`."""
    return TemplateTime(
        template=name,
        forward=seconds(cost.forward, device),
        backward=seconds(cost.backward, device),
        weight=seconds(cost.weight, device),
    )


def measured(
    like: TemplateTime,
    cost: BlockCost,
    block: Block,
    graph: Graph,
    device: Device,
    bench: torch.device,
) -> TemplateTime:
    """The times of the template of `block`, measured on `bench`.

    `like` are its modelled times: what ranks exchange is still taken from `device`, and the part of
    the backward that can wait is as large as in the model. Raises InputError where the block cannot
    run here.
    """
    trainable = {item.node for item in graph.parameters if item.trainable}
    timed = Timed(
        nodes=block.nodes,
        outputs=block.outputs,
        parameters=trainable,
        buffers={item.node for item in graph.parameters} - trainable,
        differentiable=graph.differentiable,
        high=_high(graph),
        device=bench,
    )
    try:
        found = time_block(timed)
    except Exception as error:  # whatever an operator has against such data
        message = (
            f"the times of {block.name!r} cannot be measured here ({type(error).__name__}: "
            f"{error}): take costs='model'"
        )
        raise InputError(message) from error
    talking = [
        seconds((one for one in side if one.kind == EXCHANGE), device)
        for side in (cost.forward, cost.backward)
    ]
    backward = found.backward + talking[1]
    return TemplateTime(
        template=like.template,
        forward=found.forward + talking[0],
        backward=backward,
        weight=found.backward * like.weight / like.backward if like.backward else 0.0,
    )


def _high(graph: Graph) -> dict[str, int]:
    """What the integers of the batch are below; where ranks hold pieces, those of the smallest."""
    pieces = max((item.whole.numel // max(1, item.numel) for item in graph.parameters), default=1)
    known = ((item.node, item.high) for item in graph.inputs)
    return {node: max(1, high // pieces) for node, high in known if high is not None}
