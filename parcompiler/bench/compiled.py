"""A block as `worker(compiled=True)` runs it: a compiled layer of the runtime, with its extras."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from parcompiler.cost.times import TimedBlock
from parcompiler.graph import tensors_of
from parcompiler.runtime.compiled import build
from parcompiler.runtime.compiled.layers import (
    CompiledLayer,
    Surroundings,
    Template,
    find_extras,
)
from parcompiler.runtime.compiled.tracing import TensorForm
from parcompiler.runtime.stage import Layer


class CompiledBlock:
    """A block whose forward and backward are compiled. Raises whatever the compiler raises."""

    def __init__(self, block: TimedBlock) -> None:
        build.check_compiler(block.device)
        self.block, self.device = block, block.device
        self._layer = layer = _BlockLayer(block)
        call, around = CompiledLayer(layer), Surroundings(block.device)
        arguments, tensors = layer.arguments(), call.tensors()
        forms = tuple(map(TensorForm.of, arguments)), tuple(map(TensorForm.of, tensors))
        template = Template("measured", layer, *forms, around)
        with FakeTensorMode(allow_non_fake_inputs=True), around.active():
            find_extras(template, [form.empty(block.device) for form in forms[0]], tensors)
        template.function = build.compiled(template)
        call.templates.append(template)

    def forward(self) -> Any:
        """The outputs of the block."""
        with torch.enable_grad():
            return self._layer(*self._layer.arguments())

    def backward(self, outputs: Any) -> None:
        """Run the backward of `outputs`; gradients accumulate in the parameters."""
        self.block.backward(outputs)


class _BlockLayer(Layer):
    """The nodes of a block as a layer that owns the tensors of the model that it reads."""

    def __init__(self, block: TimedBlock) -> None:
        super().__init__()
        self._block = block
        self._state, self._state_like = pytree.tree_flatten([*block.state.values()])
        for k, value in enumerate(self._state):
            if not isinstance(value, torch.Tensor):
                continue
            if value.requires_grad:
                self.register_parameter(f"tensor_{k}", nn.Parameter(value.detach()))
            else:
                self.register_buffer(f"tensor_{k}", value)

    def arguments(self) -> list[torch.Tensor]:
        """The block's inputs for a micro-batch."""
        return [*tensors_of([*self._block.values_received().values()])]

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the nodes: all tensors among the outputs."""
        block = self._block
        state = [getattr(self, f"tensor_{k}", value) for k, value in enumerate(self._state)]
        values = dict(zip(block.state, pytree.tree_unflatten(state, self._state_like), strict=True))
        leaves, like = pytree.tree_flatten([*block.received.values()])
        left = iter(arguments)
        leaves = [next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        values |= zip(block.received, pytree.tree_unflatten(leaves, like), strict=True)
        block.run(values)
        return tuple(t for node in block.outputs for t in tensors_of(values[node]))
