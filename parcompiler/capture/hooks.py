"""Hooks on gradients, which a captured graph does not have: autograd on the ranks runs none.

Hooks on forwards are part of the graph: what they compute is traced.

>>> model = nn.Linear(2, 2)
>>> _ = model.weight.register_hook(lambda gradient: gradient * 2)
>>> check_hooks(model)  # doctest: +ELLIPSIS
Traceback (most recent call last):
parcompiler.errors.CaptureError: 'weight' has a hook that would not run on the ranks (...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all

from parcompiler.capture.loss import PREFIX
from parcompiler.errors import CaptureError

_ADVICE = {
    "register_hook": "scale or mask what the forward returns",
    "register_post_accumulate_grad_hook": "do it in the optimizer, or after worker.step",
    "register_full_backward_hook": "write a torch.autograd.Function with this backward",
}


def check_hooks(model: nn.Module) -> None:
    """Refuse hooks that parameters, buffers and modules have on their gradients.

    Raises CaptureError that names the tensor or module, and the hook with its place.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        name = name.removeprefix(PREFIX)
        _refuse(f"{name!r}", tensor._backward_hooks, "register_hook")
        hooks = getattr(tensor, "_post_accumulate_grad_hooks", None)
        _refuse(f"{name!r}", hooks, "register_post_accumulate_grad_hook")
    for name, module in model.named_modules():
        for hooks in (module._backward_hooks, module._backward_pre_hooks):
            _refuse(f"module {name.removeprefix(PREFIX)!r}", hooks, "register_full_backward_hook")
    for hooks in (of_all._global_backward_hooks, of_all._global_backward_pre_hooks):
        _refuse("every module", hooks, "register_full_backward_hook")


def _refuse(owner: str, hooks: Mapping[int, Any] | None, kind: str) -> None:
    """Raise if there are hooks."""
    for hook in (hooks or {}).values():
        message = (
            f"{owner} has a hook that would not run on the ranks ({kind}: {place(hook)}): remove "
            f"it, or {_ADVICE[kind]}"
        )
        raise CaptureError(message)


def place(hook: Any) -> str:
    """What a function is called, and where it stands."""
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    code = getattr(hook, "__code__", None)
    return name if code is None else f"{name}, {code.co_filename}:{code.co_firstlineno}"


@contextmanager
def without_hooks() -> Iterator[None]:
    """Within it, a forward that registers a hook on a tensor raises CaptureError."""
    names = ("register_hook", "register_post_accumulate_grad_hook")
    before = {name: getattr(torch.Tensor, name) for name in names}

    def refused(name: str) -> Any:
        def register(self: torch.Tensor, hook: Any) -> None:
            message = (
                f"the forward registers a hook on a tensor, which would not run on the ranks "
                f"({name}: {place(hook)}): leave it out, or write a torch.autograd.Function with "
                "this backward"
            )
            raise CaptureError(message)

        return register

    for name in names:
        setattr(torch.Tensor, name, refused(name))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(torch.Tensor, name, method)
