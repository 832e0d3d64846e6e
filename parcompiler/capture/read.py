"""An exported program -> Graph: reads off parameters, buffers, inputs and the loss."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, InputSpec
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from parcompiler.capture.bounds import high, high_of_example
from parcompiler.capture.buffers import computed
from parcompiler.capture.clean import where
from parcompiler.capture.effects import Effects, is_random
from parcompiler.capture.gradients import differentiable
from parcompiler.capture.inputs import Batch, flat
from parcompiler.capture.loss import PREFIX, WithLoss
from parcompiler.capture.modes import modes_of
from parcompiler.errors import CaptureError, InputError
from parcompiler.graph import BatchInput, Graph, Parameter, dtype_of, shape_of


def read(
    whole: WithLoss,
    exported: torch.export.ExportedProgram,
    graph: fx.Graph,
    sample: Batch,
    positional: bool,
) -> Graph:
    """The `Graph` of a cleaned graph. Raises CaptureError if the model holds an object that is no
    tensor."""
    placeholders = _Placeholders(whole, exported, graph)
    remaining = iter(flat(sample))
    for spec in exported.graph_signature.input_specs:
        node = placeholders.nodes.get(getattr(spec.arg, "name", ""))
        if spec.kind is InputKind.USER_INPUT:
            placeholders.add_input(node, *next(remaining))
        elif node is None or spec.target is None:
            message = f"the model holds an object that is no tensor ({spec.target})"
            raise CaptureError(message)
        else:
            placeholders.add_parameter(node, spec, spec.target)
    loss = _loss(graph, whole.outputs)
    trainable = {item.node for item in placeholders.parameters.values() if item.trainable}
    carrying = differentiable(graph, trainable, loss)
    _check_trained(trainable, carrying, loss)
    parameters = [
        dataclasses.replace(item, trainable=item.node in trainable & carrying)
        for item in placeholders.parameters.values()
    ]
    unsaved = [name for item in parameters for name in item.unsaved]
    return Graph(
        name=type(whole.model).__name__,
        fx_graph=graph,
        parameters=tuple(parameters),
        inputs=tuple(placeholders.inputs),
        loss=loss,
        outputs=whole.outputs,
        tensors=placeholders.tensors | computed(whole.model, unsaved),
        differentiable=carrying,
        sample=sample,
        fingerprint=fingerprint(graph, {item.node: item.name for item in parameters}),
        positional=positional,
        random=any(is_random(node) for node in graph.nodes),
        modes=modes_of(whole.model),
    )


class _Placeholders:
    """The meaning of the placeholders of an exported program."""

    def __init__(
        self, whole: WithLoss, exported: torch.export.ExportedProgram, graph: fx.Graph
    ) -> None:
        self.parameters: dict[str, Parameter] = {}
        self.inputs: list[BatchInput] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
        self._exported, self._graph, self._model = exported, graph, whole.model
        self._names = whole.names()
        self._aliases: dict[str, list[str]] = {}
        for alias, name in sorted(self._names.items()):
            if alias != name:
                self._aliases.setdefault(name, []).append(alias)
        self._mutated = set(Effects(graph).writers)
        self._saved: set[str] = set()  # names in the model's state dict
        for path, module in whole.model.named_modules(remove_duplicate=False):
            leaves = {*module._parameters, *module._buffers} - module._non_persistent_buffers_set
            self._saved |= {f"{path}.{leaf}" if path else leaf for leaf in leaves}

    def add_input(self, node: fx.Node | None, key: str, example: Any) -> None:
        """A value of the batch."""
        if node is not None and isinstance(node.meta.get("val"), torch.Tensor):
            bound = high(node) or high_of_example(example)
            label = _label(self._model, key)
            self.inputs.append(
                BatchInput(key, node.name, shape_of(node), dtype_of(node), bound, label)
            )
        elif node is not None:
            self._graph.erase_node(node)  # a constant, already in the graph

    def add_parameter(self, node: fx.Node, spec: InputSpec, target: str) -> None:
        """A parameter, buffer or lifted constant."""
        source = target.removeprefix(PREFIX)
        name = self._names.get(source, source)
        known = self.parameters.get(name)
        if known is not None:  # a tied tensor, seen before
            node.replace_all_uses_with(self.nodes[known.node])
            self._graph.erase_node(node)
            return
        state = self._exported.state_dict
        tensor = state[target] if target in state else self._exported.constants[target]
        if not isinstance(tensor, torch.Tensor):  # e.g. a torch.Generator
            message = (
                f"the forward uses an object that is not a tensor ({type(tensor).__name__}): draw "
                "random numbers from torch's own generator (leave out generator=), and make other "
                "objects outside of forward"
            )
            raise CaptureError(message)
        check_plain(f"{name!r} of {type(self._model).__name__}", tensor)
        self.tensors[name] = tensor
        aliases = self._aliases.get(name, ())
        self.parameters[name] = Parameter(
            name=name,
            node=node.name,
            shape=shape_of(node),
            dtype=dtype_of(node),
            trainable=spec.kind is InputKind.PARAMETER and tensor.requires_grad,
            buffer=spec.kind is not InputKind.PARAMETER,
            mutated=node in self._mutated,
            aliases=tuple(aliases),
            unsaved=tuple(each for each in (name, *aliases) if each not in self._saved),
        )


def check_plain(subject: str, tensor: torch.Tensor) -> None:
    """Refuse sparse, nested and wrapper tensors, whose rows cannot be taken, sent or saved."""
    if tensor.is_nested:
        message = f"{subject} is a nested tensor: pad it, and give a mask beside it"
        raise InputError(message)
    if tensor.layout is not torch.strided:
        message = (
            f"{subject} has the layout {tensor.layout}: make it dense (.to_dense()), or keep "
            "tensors of its indices and values, and let the forward make it of these "
            "(torch.sparse_coo_tensor)"
        )
        raise InputError(message)
    if is_traceable_wrapper_subclass(tensor):
        message = (
            f"{subject} is a {type(tensor).__name__}, which is made of other tensors: compile the "
            "model before it is sharded (fully_shard, parallelize_module) or quantized"
        )
        raise InputError(message)


def _loss(graph: fx.Graph, outputs: Sequence[str]) -> fx.Node:
    """The loss; afterwards the graph returns only the loss and the kept outputs."""
    output: Any = graph.output_node()
    loss, *others = output.args[0]
    kept = others[: len(outputs)]
    for name, node in zip(outputs, kept, strict=True):
        if not isinstance(node, fx.Node) or node.op == "placeholder":
            message = f"the output {name!r} is not computed by the model (an input, or a constant)"
            raise InputError(message)
    output.args = ((loss, *kept),)
    if not isinstance(loss, fx.Node):
        message = "the loss does not depend on the model or its inputs (a constant)"
        raise CaptureError(message)
    return loss


def _check_trained(trainable: set[str], carrying: Collection[str], loss: fx.Node) -> None:
    """Refuse a loss that trains nothing."""
    if not trainable:
        message = "no parameter is trained: all have requires_grad=False, or there is none"
        raise CaptureError(message)
    if loss.name not in carrying:
        kind = dtype_of(loss)
        why = f"it is {kind}" if not kind.is_floating_point else "detached, or under no_grad"
        message = (
            f"the loss has no gradient ({why}; {len(trainable)} parameters are to be trained): "
            f"return one that depends on them; {where(loss)}"
        )
        raise CaptureError(message)


def _label(model: nn.Module, key: str) -> str:
    """The argument of the model's forward that a key of the batch fills."""
    if not key.isdigit():
        return key
    names = [
        name
        for name, item in inspect.signature(model.forward).parameters.items()
        if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)
    ]
    return names[int(key)] if int(key) < len(names) else f"input_{key}"


def fingerprint(graph: fx.Graph, names: dict[str, str]) -> str:
    """A digest of operators, wiring, shapes and parameter names: equal for equal models."""
    number = {node: index for index, node in enumerate(graph.nodes)}
    digest = hashlib.sha256()
    for node in graph.nodes:
        value = node.meta.get("val")
        shape = (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
        arguments = fx.map_arg((node.args, node.kwargs), lambda item: f"%{number[item]}")
        # Parameters by their names: node names have lost the dots.
        line = (
            node.op,
            str(node.target) if node.op == "call_function" else names.get(node.name),
            arguments,
            shape,
        )
        digest.update(repr(line).encode())
    return digest.hexdigest()[:16]
