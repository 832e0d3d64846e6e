"""nn.Module -> Graph: `torch.export` (non-strict, not decomposed), then the clean-ups.

model + one micro-batch
    │  WithLoss                    a scalar comes out, whatever the model returns
    ▼
torch.export  ── fails ──► fx.symbolic_trace, then torch.export
    │  clean                       regions inlined, assertions and dead nodes dropped
    ▼
Graph                              parameters, buffers, inputs, loss, nodes with gradients
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from keyword import iskeyword
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from parcompiler.capture import clean
from parcompiler.capture.adaptive import on_all_rows
from parcompiler.capture.bounds import check_tables
from parcompiler.capture.caches import own_caches
from parcompiler.capture.cuttable import make_cuttable
from parcompiler.capture.draws import drawing_with_torch_alone, draws_unknown
from parcompiler.capture.evaluation import add_evaluation, branches
from parcompiler.capture.functions import call_functions, recorded
from parcompiler.capture.grad_modes import marked, noticed
from parcompiler.capture.hooks import hooks_of, without_hooks
from parcompiler.capture.inputs import Batch, arguments, flat, number_lists
from parcompiler.capture.known import Known
from parcompiler.capture.lift import settle_default
from parcompiler.capture.locate import explain, is_data_dependent, placed
from parcompiler.capture.loss import WithLoss
from parcompiler.capture.modes import in_modes
from parcompiler.capture.patches import (
    ONE_THREAD,
    checkpoints_run_once,
    data_detached,
    patched,
    quiet,
    sets_in_order,
    suspended,
    unmoved,
)
from parcompiler.capture.read import check_plain, read
from parcompiler.capture.renewal import renewed
from parcompiler.capture.replay import LayerCopies
from parcompiler.capture.synchronized import alone, computing_as, mark
from parcompiler.capture.untouched import Attribute, check_attributes, restored, untouched, watched
from parcompiler.ctc import ctc_loss
from parcompiler.errors import CaptureError, InputError, ParcompilerError
from parcompiler.graph import Graph, Modes


def capture(
    model: nn.Module,
    inputs: Batch,
    loss: Callable[[Any], torch.Tensor] | None = None,
    *,
    in_float32: bool = False,
    outputs: Sequence[str] = (),
) -> Graph:
    """Capture `model` on one micro-batch of one data rank; the model is not modified.

    `inputs` is a dict of keyword arguments or a tuple of positional ones; values other than tensors
    become constants. The graph is a plain value: compile it for as many meshes as needed. The
    parameters of a loss that is a module are trained too, under names that begin with "loss.";
    `in_float32` casts the loss to float32. `outputs` are names of outputs to keep beside the loss.
    Raises CaptureError with the module path, the source line and advice; InputError for inputs that
    the model's forward does not take, for sparse and nested tensors, for a lazy module before its
    first forward, and for parameters that share memory without being one tensor.
    """
    _check_shapes(model)
    _check_scripts(model)
    _check_memory(model)
    args, kwargs = _on_device_of(model, *arguments(inputs))
    _check_tensors(inputs)
    _check_signature(model, args, kwargs)
    _check_inputs(inputs)
    original = WithLoss(model, loss, in_float32=in_float32, outputs=outputs)
    hooks = hooks_of(original)
    captured = _graph_of(original, inputs, args, kwargs, known := Known())
    unsaved = (item for item in captured.parameters if item.unsaved and item.mutated)
    if known.has_read_fixed and not all(item.dtype.is_floating_point for item in unsaved):
        # The forward updates integers that no state dict has: a value taken for a constant may
        # change in the next step. Capture again without such constants.
        captured = _graph_of(original, inputs, args, kwargs, Known(reads_fixed=False))
    check_tables(captured)

    def recapture(other: Batch) -> Graph:
        with in_modes(model, captured.modes):
            return capture(model, other, loss, in_float32=in_float32, outputs=outputs)

    return replace(captured, hooks=hooks, recapture=recapture)


def _graph_of(
    original: WithLoss, inputs: Batch, args: tuple[Any, ...], kwargs: dict[str, Any], known: Known
) -> Graph:
    """Export the model with its loss, clean up the graph, and read it."""
    exported = _exported(original, args, kwargs, known)
    graph = exported.graph_module.graph
    unfollowed = ""
    if any(module.training for module in original.modules()) and branches(original, graph):
        unfollowed = _follow_modes(exported, original, args, kwargs, known)
    specs = exported.graph_signature.input_specs
    names = {
        kind: {getattr(s.arg, "name", "") for s in specs if s.kind is kind}
        for kind in (InputKind.USER_INPUT, InputKind.BUFFER)
    }
    make_cuttable(graph, *names.values())
    mark(graph, original)
    made = renewed(read(original, exported, graph, inputs, positional=not kwargs))
    return replace(made, modes=replace(made.modes, unfollowed=unfollowed))


def _exported(
    original: WithLoss, args: tuple[Any, ...], kwargs: dict[str, Any], known: Known
) -> torch.export.ExportedProgram:
    """Export the model with its loss, and clean up the graph."""
    changed: set[Attribute] = set()
    with ONE_THREAD:
        with drawing_with_torch_alone(type(original.model).__name__):
            exported = _export(original, args, kwargs, changed, known)
        if changed:
            with computing_as(alone):
                check_attributes(original, args, kwargs)
        graph = exported.graph_module.graph
        clean.inline_regions(graph, exported.graph_module)
        clean.enter_lost_regions(graph)
        call_functions(graph)
    clean.refuse_transforms(graph)
    clean.drop_objects(graph)
    clean.drop_assertions(graph)
    clean.drop_dead(graph)
    clean.settle_sizes(graph)
    clean.make_gradients_whole(graph)
    settle_default(graph)
    return exported


def _follow_modes(
    exported: torch.export.ExportedProgram,
    original: WithLoss,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: Known,
) -> str:
    """Trace the model in evaluation mode too, and let the graph follow the mode. Returns why it
    cannot; it is that of training then."""
    names = tuple(name for name, _ in original.named_modules())
    other = Known(reads_fixed=known.may_read_fixed)
    try:
        with in_modes(original, Modes(names)):
            evaluated = _exported(original, args, kwargs, other)
    except Exception as error:  # whatever a user's model raises: training does not need this
        return "in evaluation mode: " + str(error).partition("\n")[0]
    known.has_read_fixed |= other.has_read_fixed
    try:
        add_evaluation(exported, evaluated, len(original.outputs))
    except CaptureError as error:
        return str(error)
    except Exception as error:  # a fault of ours is said, and stops no training either
        return f"{type(error).__name__}: {error}"
    clean.drop_dead(exported.graph_module.graph)
    return ""


def _on_device_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments on the model's device: a meta model is captured on meta tensors.

    Tensors are distinct: export would take one tensor in two places for one input.
    """
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_meta and device.type != "meta":
            message = (
                f"the inputs are on the meta device, and the parameters of the model on {device}: "
                "give inputs with values, or make the model under torch.device('meta') too"
            )
            raise InputError(message)
        return leaf.detach().to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(move, args), pytree.tree_map(move, kwargs)


def _check_shapes(model: nn.Module) -> None:
    """Refuse tensors without strides, and lazy modules before their first forward."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        check_plain(f"{name!r} of {type(model).__name__}", tensor)
        if is_lazy(tensor):
            message = (
                f"{name!r} of {type(model).__name__} has no shape yet: call the model on a batch "
                "once, then compile it (a lazy module takes its shapes from its first forward)"
            )
            raise InputError(message)


def _check_scripts(model: nn.Module) -> None:
    """Refuse modules compiled by torch.jit, which cannot be divided."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            message = (
                f"{name!r} of {type(model).__name__} is a torch.jit.ScriptModule, whose forward is "
                "no Python: take the module that it was made of"
            )
            raise CaptureError(message)


def _check_memory(model: nn.Module) -> None:
    """Refuse a parameter that shares memory with another tensor: on ranks an update of one would
    not change the other. Strided views of one tensor may be disjoint."""
    named = [*model.named_parameters(), *model.named_buffers()]
    spans: list[tuple[int, int, str, torch.Tensor]] = []
    for name, tensor in named:
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided:
            if tensor.is_contiguous() and tensor.numel() and tensor.data_ptr():
                begin = tensor.data_ptr()
                spans.append((begin, begin + tensor.nbytes, name, tensor))
    end, last = 0, ("", torch.empty(0))
    for begin, behind, name, tensor in sorted(spans, key=lambda item: item[:2]):
        if begin < end and (tensor.requires_grad or last[1].requires_grad):
            message = (
                f"{last[0]!r} and {name!r} of {type(model).__name__} lie in the same memory, so "
                "that an update of one changes the other: let both modules have one nn.Parameter "
                "(b.weight = a.weight), or copy the tensor (.clone())"
            )
            raise InputError(message)
        if behind > end:
            end, last = behind, (name, tensor)


def _check_signature(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse inputs that `model.forward` cannot be called with, before anything is traced."""
    signature = inspect.signature(model.forward)
    for name in kwargs:
        # torch.export writes the names of arguments into source that it runs.
        if not name.isidentifier() or iskeyword(name):
            message = (
                f"the key {name!r} of the inputs cannot be the name of an argument: use the names "
                f"in forward{signature}"
            )
            raise InputError(message)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        message = f"inputs do not fit {type(model).__name__}.forward{signature}: {error}"
        raise InputError(message) from error


def _check_tensors(inputs: Batch) -> None:
    """Refuse lists of numbers where no tensor is given."""
    lists = number_lists(inputs)
    if (lists or (isinstance(inputs, list) and inputs)) and not any(
        hasattr(leaf, "shape") for _, leaf in flat(inputs)
    ):
        kind = f"lists of numbers at {', '.join(map(repr, lists))}" if lists else "numbers"
        message = f"inputs need tensors ({kind} given): torch.tensor makes one of a list"
        raise InputError(message)


def _check_inputs(inputs: Batch) -> None:
    """Refuse arrays that are no tensors, tensors without strides, a micro-batch without rows (a
    step on it could not be costed), and two inputs with one key."""
    seen: set[str] = set()
    for key, leaf in flat(inputs):
        if key in seen:
            message = f"two inputs are {key!r} (keys are joined by dots): rename one of them"
            raise InputError(message)
        seen.add(key)
        if isinstance(leaf, torch.Tensor):
            check_plain(f"the input {key!r}", leaf)
            if leaf.dim() and not leaf.shape[0]:
                shape = tuple(leaf.shape)
                message = f"the input {key!r} has no rows (shape {shape}): give one or more"
                raise InputError(message)
        elif hasattr(leaf, "__array__") and not isinstance(leaf, int | float):
            library = type(leaf).__module__.partition(".")[0]
            message = (
                f"the input {key!r} is a {library}.{type(leaf).__name__}: give a tensor "
                "(torch.as_tensor), or a number of Python for a constant"
            )
            raise InputError(message)


def _export(
    original: WithLoss,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    changed: set[Attribute],
    known: Known,
) -> torch.export.ExportedProgram:
    """Export the model with its loss; when that fails, in other ways (see `_attempts`).

    A model that depends on values of the batch is refused at once: `fx.symbolic_trace` would take
    some branch. If the model does not run at all, the error says that. Adds the attributes that a
    forward has `changed`.
    """
    copied = tried = failed = _copy_of(original)
    first: Exception | None = None
    with (
        warnings.catch_warnings(), quiet(), unmoved(), computing_as(alone), without_hooks(),
        checkpoints_run_once(), data_detached(original),
        recorded(), draws_unknown(type(original.model).__name__),
        _shaped_without_values(), sets_in_order(original),
        restored(original) if copied is original else nullcontext(), known,
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        copies = LayerCopies(copied, known.follows)
        for patch, make in _attempts(original, copied, kwargs, copies, changed):
            try:
                with patch:
                    with own_caches(original):
                        tried = make()
                    known.traces(tried)
                    whole = WithLoss(
                        tried.model,
                        tried.loss,
                        in_float32=original.in_float32,
                        outputs=original.outputs,
                    )
                    # torch compiles intermediate Python code of graphs only when it is called:
                    # hardly any is, and compiling it all takes a third of an export.
                    with _use_lazy_graph_module(True), suspended() as resumed:
                        whole.around = partial(watched, whole, resumed, changed)
                        with noticed() as lost, own_caches(original):
                            exported = torch.export.export(whole, args, kwargs, strict=False)
                        if not lost:
                            return exported
                        with marked(), own_caches(original):
                            return torch.export.export(whole, args, kwargs, strict=False)
            except Exception as error:  # whatever a user's model raises
                if copies.used:  # perhaps because of the copies
                    continue
                if first is None:
                    first, failed = error, tried
                if is_data_dependent(error) or isinstance(error, ParcompilerError):
                    break
    assert first is not None
    if isinstance(first, CaptureError):
        raise placed(first, failed.model) from first
    if isinstance(first, ParcompilerError):
        raise first
    _check_runs(original, args, kwargs)
    raise explain(first, failed.model, kwargs) from first


@contextmanager
def _shaped_without_values() -> Iterator[None]:
    """Losses whose shapes torch takes from values have them from shapes."""
    with patched(nn.AdaptiveLogSoftmaxWithLoss, forward=on_all_rows):
        with patched(torch, ctc_loss=ctc_loss):
            yield


def _check_runs(original: WithLoss, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a model that fails on its inputs in eager mode.

    Errors that come from tensors without data do not count.
    """
    try:
        with untouched(original), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            original(*args, **kwargs)
    except NotImplementedError:
        return
    except Exception as error:  # whatever a user's model raises
        if not is_data_dependent(error):
            lists = number_lists(kwargs or args)
            raise explain(error, original.model, runs=False, lists=lists) from error


def _attempts(
    original: WithLoss,
    copied: WithLoss,
    kwargs: dict[str, Any],
    copies: LayerCopies,
    changed: set[Attribute],
) -> Iterator[tuple[AbstractContextManager[None], Callable[[], WithLoss]]]:
    """The ways to export a model, each a patch of torch and the module to export under it.

    In turn: as it is, with copies of equal layers; without copies; as in eager mode, if the model
    checks for being compiled; with its Python resolved by `fx.symbolic_trace`.
    """

    def resolved() -> WithLoss:
        model = _copy_of(original)
        with watched(model, nullcontext, changed):
            model.model = _symbolically_traced(model.model, kwargs)
        return model

    yield copies.applied(), lambda: copied
    if copies.used:
        copies.used = False
        yield nullcontext(), lambda: _copy_of(original)
    eager = patched(torch.compiler, is_compiling=lambda: False, is_exporting=lambda: False)
    yield eager, lambda: _copy_of(original)
    yield nullcontext(), resolved


def _symbolically_traced(model: nn.Module, kwargs: dict[str, Any]) -> fx.GraphModule:
    """`model` with its Python resolved by `fx.symbolic_trace`; it is exported like any other.

    Symbolic tracing ignores side effects of a forward (assigning attributes, appending to lists),
    which export usually refuses. Arguments other than tensors become constants; submodules stay.
    """
    constants = {k: v for k, v in kwargs.items() if not isinstance(v, torch.Tensor)}
    buffers = {name: (b, b._version, b.clone()) for name, b in model.named_buffers()}
    updated: list[str] = []
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        try:
            module = fx.symbolic_trace(model, concrete_args=constants or None)
        finally:
            for name, (buffer, version, value) in buffers.items():
                if buffer._version != version:
                    updated.append(name)
                    buffer.copy_(value)
        drawn = not torch.equal(before, torch.get_rng_state())
    if updated:
        message = f"the forward updates the buffer {updated[0]!r}, which tracing would leave out"
        raise CaptureError(message)
    if drawn:
        message = "the forward draws random numbers, which tracing would keep for ever"
        raise CaptureError(message)
    return module


def _copy_of(model: WithLoss) -> WithLoss:
    """A copy of `model` with the same tensors, so that names and ties stay the model's.

    A forward may assign attributes and replace modules, and tracing would leave traced tensors in
    the model. A model that cannot be copied is returned as it is.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = tensor
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # copying a user's attributes may raise anything
        return model
