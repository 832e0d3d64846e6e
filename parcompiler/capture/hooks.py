"""Hooks on gradients: elementwise hooks of parameters are carried over.

A parameter's hook runs once a step on the ranks, on the gradient of the mean loss of the whole
batch, as it would in one process with one backward from that loss. It must be elementwise, so that
ranks can apply it to their pieces of the gradient:

>>> model = nn.Linear(2, 2)
>>> _ = model.weight.register_hook(lambda gradient: gradient.clamp(-1, 1) * 2)
>>> (hook,) = hooks_of(WithLoss(model, None)).values()
>>> [str(node.target) for node in hook.graph.nodes if node.op == "call_function"]
['aten.clamp.default', 'aten.mul.Tensor']

All others are refused by name. Hooks on forwards are traced and become part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules import module as of_all

from parcompiler.capture.loss import PREFIX, WithLoss
from parcompiler.capture.patches import patched
from parcompiler.errors import CaptureError
from parcompiler.graph import Hook

_ADVICE = {
    "register_hook": "do it after worker.step",
    "register_post_accumulate_grad_hook": "do it in the optimizer, or after worker.step",
    "register_full_backward_hook": "write a torch.autograd.Function with this backward",
}
_OF_ELEMENTS = frozenset("alias detach zeros_like ones_like full_like scalar_tensor".split())


def hooks_of(whole: WithLoss) -> dict[str, Hook]:
    """The hooks on gradients of parameters, by name.

    Raises CaptureError that names the parameter or module, and the hook with its place, for hooks
    of other kinds.
    """
    hooks_by_name = {}
    for path, parameter in whole.named_parameters():
        name = path.removeprefix(PREFIX)
        after = getattr(parameter, "_post_accumulate_grad_hooks", None)
        _refuse(repr(name), after, "register_post_accumulate_grad_hook")
        hooks = tuple((parameter._backward_hooks or {}).values())
        if hooks and parameter.requires_grad:
            hooks_by_name[name] = _hook(name, parameter, hooks)
    for path, module in whole.named_modules():
        for registered in (module._backward_hooks, module._backward_pre_hooks):
            owner = f"module {path.removeprefix(PREFIX)!r}"
            _refuse(owner, registered, "register_full_backward_hook")
    for registered in (of_all._global_backward_hooks, of_all._global_backward_pre_hooks):
        _refuse("every module", registered, "register_full_backward_hook")
    return hooks_by_name


def _hook(name: str, parameter: nn.Parameter, hooks: tuple[Callable[..., Any], ...]) -> Hook:
    """The hooks of one parameter, one after another, as a graph."""

    def run(gradient: torch.Tensor) -> torch.Tensor:
        for hook in hooks:
            gradient = hook(gradient)
            if not isinstance(gradient, torch.Tensor):
                message = "it returns no tensor, so it does something else"
                raise TypeError(message)
        return gradient

    like = torch.empty_like(parameter.detach())
    traced: fx.GraphModule | None = None
    trace: Any = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)
    try:
        traced, again = (trace(like) for _ in range(2))
        assert traced is not None
        reason = _unfit(traced.graph, like)
        if not reason and str(traced.code) != str(again.code):
            reason = "it computes something else when it runs again"
    except Exception as error:  # whatever a user's hook raises
        reason = str(error).splitlines()[0][:200]
    if traced is None or reason:
        places = ", ".join(map(place, hooks))
        message = (
            f"{name!r} has a hook that cannot run on the ranks, which hold pieces of gradients "
            f"({reason}; register_hook: {places}): write it as arithmetic of each element with "
            f"numbers, or {_ADVICE['register_hook']}"
        )
        raise CaptureError(message)
    return Hook(traced.graph, tuple(place(hook, short=True) for hook in hooks))


def _unfit(graph: fx.Graph, like: torch.Tensor) -> str:
    """Why a graph is not an elementwise function; "" if it is one."""
    for node in graph.nodes:
        if node.op == "get_attr":
            return "it reads a tensor besides the gradient"
        if node.op == "call_function":
            target = node.target
            if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
                return f"{target} changes a tensor in place"
            known = torch.Tag.pointwise in target.tags or target._opname in _OF_ELEMENTS
            if not known or torch.Tag.nondeterministic_seeded in target.tags:
                return f"{target} is not arithmetic of elements"
    result: Any = graph.output_node().args[0]
    value = result.meta["val"]
    if (value.shape, value.dtype) != (like.shape, like.dtype):
        return f"it returns {value.dtype} {tuple(value.shape)}"
    return ""


def _refuse(owner: str, hooks: Mapping[int, Any] | None, kind: str) -> None:
    """Raise if there are hooks."""
    for hook in (hooks or {}).values():
        message = (
            f"{owner} has a hook that would not run on the ranks ({kind}: {place(hook)}): remove "
            f"it, or {_ADVICE[kind]}"
        )
        raise CaptureError(message)


def place(hook: Any, *, short: bool = False) -> str:
    """A function's name, file and line; `short`: without the folder of the file."""
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    code = getattr(hook, "__code__", None)
    if code is None:
        return str(name)
    file = Path(code.co_filename).name if short else code.co_filename
    return f"{name}, {file}:{code.co_firstlineno}"


def without_hooks() -> AbstractContextManager[None]:
    """In this context, a forward that registers a hook on a tensor raises CaptureError."""

    def refusing(name: str) -> Any:
        def register(self: torch.Tensor, hook: Any) -> None:
            message = (
                f"the forward registers a hook on a tensor, which would not run on the ranks "
                f"({name}: {place(hook)}): leave it out, or write a torch.autograd.Function with "
                "this backward"
            )
            raise CaptureError(message)

        return register

    names = ("register_hook", "register_post_accumulate_grad_hook")
    return patched(torch.Tensor, **{name: refusing(name) for name in names})
