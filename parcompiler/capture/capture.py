"""nn.Module -> Graph: `torch.export` (non-strict, not decomposed), then the clean-ups.

model + one micro-batch
    │  WithLoss                    a scalar comes out, whatever the model returns
    ▼
torch.export  ── fails ──► fx.symbolic_trace, then torch.export
    │  clean                       regions inlined, assertions and dead nodes dropped
    ▼
Graph                              parameters, buffers, inputs, loss, who carries gradients
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from keyword import iskeyword
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from parcompiler.capture import clean
from parcompiler.capture.adaptive import computing_all_rows
from parcompiler.capture.beneath import set_aside
from parcompiler.capture.bounds import high, high_of_example
from parcompiler.capture.cuttable import make_cuttable
from parcompiler.capture.effects import Effects, is_random, mutated_operands
from parcompiler.capture.functions import call_functions, kept_whole
from parcompiler.capture.guise import as_if_eager, compiled_late, quiet, unmoved
from parcompiler.capture.inputs import Batch, arguments, flat
from parcompiler.capture.known import Known
from parcompiler.capture.layout import keep_memory
from parcompiler.capture.locate import explain, is_data_dependent, placed
from parcompiler.capture.loss import PREFIX, WithLoss
from parcompiler.capture.replay import Replay, replaying
from parcompiler.capture.synchronized import alone, computing_as, mark
from parcompiler.capture.trace import shared, traced
from parcompiler.errors import CaptureError, InputError, ParcompilerError
from parcompiler.graph import Graph, Input, Parameter, dtype_of, shape_of


def capture(
    model: nn.Module, inputs: Batch, loss: Callable[[Any], torch.Tensor] | None = None
) -> Graph:
    """Capture `model` on one micro-batch of one data rank; the model is not modified.

    `inputs` is a dict of keyword arguments or a tuple of positional ones; values that are no
    tensors become constants. The graph is a plain value: compile it for as many meshes as needed.
    Raises CaptureError with the module path, the source line and advice; InputError for inputs
    that the model's forward does not take.
    """
    args, kwargs = _on_device_of(model, *arguments(inputs))
    _check_signature(model, args, kwargs)
    exported = _export(model, loss, args, kwargs)
    graph = exported.graph_module.graph
    clean.inline_regions(graph, exported.graph_module)
    call_functions(graph)
    _check_operators(graph)
    clean.drop_assertions(graph)
    clean.drop_dead(graph)
    keep_memory(graph)
    make_cuttable(graph, _input_nodes(exported))
    mark(graph, WithLoss(model, loss))
    return _graph(model, exported, graph, inputs, positional=not kwargs)


def _on_device_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments on the model's device: a meta model is captured on meta tensors.

    Each is a tensor of its own: export would take one tensor in two places for one input.
    """
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device

    def move(leaf: Any) -> Any:
        return leaf.detach().to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(move, args), pytree.tree_map(move, kwargs)


def _check_signature(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse inputs that `model.forward` cannot be called with, before anything is traced."""
    signature = inspect.signature(model.forward)
    for name in kwargs:
        # torch.export writes the names of arguments into source that it runs.
        if not name.isidentifier() or iskeyword(name):
            message = f"the key {name!r} of the inputs is no name of an argument: put it in a dict"
            raise InputError(message)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        message = f"inputs do not fit {type(model).__name__}.forward{signature}: {error}"
        raise InputError(message) from error


def _export(
    model: nn.Module,
    loss: Callable[[Any], torch.Tensor] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.export.ExportedProgram:
    """Export the model with its loss; when that fails, in other ways (see `_attempts`).

    What depends on the values of the batch is refused at once: `fx.symbolic_trace` would take the
    branch that values of its own decide.
    """
    own = tried = failed = shared(model)
    first: Exception | None = None
    with (
        warnings.catch_warnings(), quiet(), unmoved(), kept_whole(), computing_as(alone),
        computing_all_rows(), Known() as known,
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        replay = Replay(own, known.follows)
        for attempt in _attempts(model, own, kwargs, replay):
            try:
                with attempt as tried, compiled_late(), set_aside() as beneath:
                    whole = WithLoss(tried, loss, beneath)
                    return torch.export.export(whole, args, kwargs, strict=False)
            except Exception as error:  # whatever a user's model raises
                if replay.used:  # perhaps because of that
                    continue
                if first is None:
                    first, failed = error, tried
                if is_data_dependent(error) or isinstance(error, ParcompilerError):
                    break
    assert first is not None
    if isinstance(first, CaptureError):
        raise placed(first, failed) from first
    raise first if isinstance(first, ParcompilerError) else explain(first, failed) from first


def _attempts(
    model: nn.Module, own: nn.Module, kwargs: dict[str, Any], replay: Replay
) -> Iterator[AbstractContextManager[nn.Module]]:
    """The model as it is, layers that are equal traced once, else each; where it leaves out steps
    when it is compiled, as in eager mode; and with its Python resolved by `fx.symbolic_trace`."""
    yield replaying(replay, own)
    if replay.used:
        replay.used = False
        yield nullcontext(shared(model))
    yield _eager(model)
    yield _resolved(model, kwargs)


@contextmanager
def _eager(model: nn.Module) -> Iterator[nn.Module]:
    """A copy of the model that is told that nothing is being compiled."""
    with as_if_eager():
        yield shared(model)


@contextmanager
def _resolved(model: nn.Module, kwargs: dict[str, Any]) -> Iterator[nn.Module]:
    """A copy of the model, traced."""
    yield traced(model, kwargs)


def _check_operators(graph: fx.Graph) -> None:
    """Refuse nodes that no stage could run: only operators and `getitem` may be left."""
    for node in graph.nodes:
        if node.op == "get_attr" and node.users:
            message = f"a sub-graph or object is part of the graph: {clean.where(node)}"
            raise CaptureError(message)
        if node.op == "get_attr":
            graph.erase_node(node)


def _graph(
    model: nn.Module,
    exported: torch.export.ExportedProgram,
    graph: fx.Graph,
    sample: Batch,
    positional: bool,
) -> Graph:
    """Read parameters, inputs and loss off the exported program."""
    mutated = set(Effects(graph).writers)
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    names = _canonical_names(model)
    parameters: dict[str, Parameter] = {}
    inputs: list[Input] = []
    tensors: dict[str, torch.Tensor] = {}
    remaining = iter(flat(sample))
    for spec in exported.graph_signature.input_specs:
        node = (
            nodes[spec.arg.name] if hasattr(spec.arg, "name") and spec.arg.name in nodes else None
        )
        if spec.kind is InputKind.USER_INPUT:
            key, example = next(remaining)
            if node is not None and isinstance(node.meta.get("val"), torch.Tensor):
                bound = high(node) or high_of_example(example)
                label = _label(model, key)
                inputs.append(Input(key, node.name, shape_of(node), dtype_of(node), bound, label))
            elif node is not None:
                graph.erase_node(node)  # a constant: already burnt in
            continue
        if node is None or spec.target is None:
            message = f"the model holds an object that is no tensor ({spec.target})"
            raise CaptureError(message)
        source = spec.target.removeprefix(PREFIX)
        name = names.get(source, source)
        known = parameters.get(name)
        if known is not None:  # a tied tensor that arrives twice
            node.replace_all_uses_with(nodes[known.node])
            graph.erase_node(node)
            continue
        tensors[name] = _tensor(exported, spec.target)
        parameters[name] = Parameter(
            name=name,
            node=node.name,
            shape=shape_of(node),
            dtype=dtype_of(node),
            trainable=spec.kind is InputKind.PARAMETER and tensors[name].requires_grad,
            buffer=spec.kind is not InputKind.PARAMETER,
            mutated=node in mutated,
            aliases=tuple(sorted(a for a, first in names.items() if first == name and a != name)),
        )
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    loss = output.args[0][0]
    output.args = ((loss,),)
    if not isinstance(loss, fx.Node):
        message = "the loss does not depend on the model or its inputs (a constant)"
        raise CaptureError(message)
    trainable = {item.node for item in parameters.values() if item.trainable}
    return Graph(
        name=type(model).__name__,
        fx_graph=graph,
        parameters=tuple(parameters.values()),
        inputs=tuple(inputs),
        loss=loss,
        tensors=tensors,
        differentiable=differentiable(graph, trainable),
        sample=sample,
        fingerprint=fingerprint(graph, {item.node: name for name, item in parameters.items()}),
        positional=positional,
        random=any(is_random(node) for node in graph.nodes),
    )


def _input_nodes(exported: torch.export.ExportedProgram) -> set[str]:
    """The placeholders of tensors of the batch."""
    specs = exported.graph_signature.input_specs
    return {s.arg.name for s in specs if s.kind is InputKind.USER_INPUT and hasattr(s.arg, "name")}


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


def _tensor(exported: torch.export.ExportedProgram, target: str) -> torch.Tensor:
    """The tensor of a parameter, buffer or lifted constant."""
    if target in exported.state_dict:
        tensor: torch.Tensor = exported.state_dict[target]
        return tensor
    constant = exported.constants[target]
    assert isinstance(constant, torch.Tensor)
    return constant


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """For every name of a parameter or buffer, the first name of the same tensor."""
    first: dict[int, str] = {}
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


_NO_GRADIENT = frozenset(
    "detach zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones "
    "new_empty new_full bernoulli".split()
)


def differentiable(graph: fx.Graph, trainable: set[str]) -> frozenset[str]:
    """Names of the nodes that carry gradients: floating, and reached from a trainable parameter."""
    found, effects = set(trainable), Effects(graph)
    for node in graph.nodes:
        if node.op != "call_function" or not _is_floating(node):
            continue
        contexts = node.meta.get("contexts", ())
        modes = [context[0] for context in contexts if context[0].endswith("_grad")]
        if modes and modes[-1] == "no_grad":
            # What is updated in place there is the tensor that it was, and is used as such.
            if any(operand.name in found for operand in mutated_operands(node)):
                found.add(node.name)
            continue
        if getattr(node.target, "_opname", "") in _NO_GRADIENT:
            continue
        if any(operand.name in found for operand in node.all_input_nodes):
            found.add(node.name)
            # An update in place makes its target carry the gradient too, with what that is a view
            # of and the other views: `y = zeros(...)`, `y[0] = x` and `y` again.
            for operand in mutated_operands(node):
                found.update(_in_memory_of(operand, graph, effects))
    return frozenset(found)


def _in_memory_of(updated: fx.Node, graph: fx.Graph, effects: Effects) -> Iterator[str]:
    """The names of the floating nodes, no placeholders, that lie in the memory of one."""
    root = effects.root(updated)
    for node in graph.nodes:
        if node.op == "call_function" and effects.root(node) is root and _is_floating(node):
            if getattr(node.target, "_opname", "") != "detach":
                yield node.name


def _is_floating(node: fx.Node) -> bool:
    """Whether a node yields a floating or complex tensor, or several of which one is."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    return any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)


def fingerprint(graph: fx.Graph, names: dict[str, str]) -> str:
    """A digest of operators, wiring, shapes and parameter names: equal for equal models."""
    number = {node: index for index, node in enumerate(graph.nodes)}
    digest = hashlib.sha256()
    for node in graph.nodes:
        value = node.meta.get("val")
        shape = (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
        arguments = fx.map_arg((node.args, node.kwargs), lambda item: f"%{number[item]}")
        # Node names of parameters repeat their names with dots lost; the names say it better.
        line = (
            node.op,
            str(node.target) if node.op == "call_function" else names.get(node.name),
            arguments,
            shape,
        )
        digest.update(repr(line).encode())
    return digest.hexdigest()[:16]
