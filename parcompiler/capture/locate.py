"""Where in the user's model a capture failed, and what to do about it."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from parcompiler import errors
from parcompiler.errors import CaptureError

_NONE: Mapping[str, Any] = MappingProxyType({})
_PACKAGES = tuple(Path(file).parent for file in (torch.__file__, errors.__file__))
_PYTHON = sysconfig.get_path("stdlib")
_DATA_DEPENDENT = (
    "data-dependent",
    "datadependent",
    "data dependent",
    "item()",
    "nonzero",
    "unbacked",
    "tolist",
    "_local_scalar_dense",
    "dynamicoutputshape",
)
_ADVICE_DATA = (
    "control flow or a shape depends on the values of tensors: write it with torch.where or a "
    "mask, or move it out of forward. An input that is the same in every step (sizes of images) "
    "can be a constant: give it as a list of numbers, or let a module around the model make the "
    "tensor"
)
_ADVICE_FIXED = """
  If {name} is the same in every step, make it a constant, and give the other inputs alone:
    class Fixed(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, **inputs):
            return self.model({name}=torch.tensor({values}), **inputs)
  What a model computes from tokens in Python (position_ids of Qwen-VL) must be an input."""
_OTHER_ADVICE = {  # by a word in the error or in the named line
    "functorch": (
        "transforms of torch.func (grad, vjp, jvp, vmap) in a forward cannot be divided: write the "
        "derivative out, or as a torch.autograd.Function"
    ),
    "fake tensor in the exported program constant": (
        "torch.export loses what made a tensor: a forward that asks for gradients itself "
        "(torch.autograd.grad, backward) cannot be divided; write the derivative out"
    ),
    "data is not allocated yet": (
        "a tensor or an index is made of a list of tensors, which reads their values: make it "
        "with torch.stack (its size may not depend on values either)"
    ),
    "torch/nn/modules/rnn.py": (
        "packed sequences have lengths that are values of a tensor: they cannot be divided; give "
        "the layer padded rows, and mask what it makes of the padding"
    ),
    "float(self.num_batches_tracked)": (
        "a batch norm with momentum=None weighs a batch by a count, which is the value of a "
        "tensor: give it a momentum (torch.nn.BatchNorm2d(..., momentum=0.1))"
    ),
    "module_dropout": (
        "LoHa and LoKr of peft drop adapters by chance, and draw a number for that even where "
        "module_dropout is 0. To train them without that, put the adapters into evaluation mode "
        "before compiling:\n"
        "    for layer in model.modules():\n"
        "        if hasattr(layer, 'module_dropout'):\n"
        "            layer.eval()"
    ),
    "layerdrop": "layers are dropped by chance: set {layerdrop} in the configuration",
    "skip_the_layer": "layers are dropped by chance: set {layerdrop} in the configuration",
    "torch.rand": (
        "the forward takes one way or another by a random number, and a program takes the same way "
        "in every step: choose one, or draw a mask and multiply with it (as dropout does)"
    ),
}
_ADVICE = (
    "torch.export cannot trace this line: write it another way, and try "
    "torch.export.export(model, args, kwargs, strict=False) on the module that is named"
)
_ADVICE_BROKEN = (
    "the model fails so without the compiler, too: change it or the inputs until model(...) runs "
    "on them"
)
_ADVICE_LISTS = (
    "these inputs are lists of numbers, which the model gets as lists: {named}; where it takes a "
    "tensor, give one (torch.tensor)"
)


def placed(error: CaptureError, model: nn.Module) -> CaptureError:
    """A CaptureError that also names the innermost module and line of the model, if known."""
    place = _place(error, model)
    return CaptureError(f"{error}\n  {place}") if place else error


def explain(
    error: Exception,
    model: nn.Module,
    inputs: Mapping[str, Any] = _NONE,
    *,
    runs: bool = True,
    lists: Sequence[str] = (),
) -> CaptureError:
    """A CaptureError that names the innermost module and line of the model in the traceback;
    `inputs` are the named ones, `runs` says whether the model runs on these inputs in eager mode,
    `lists` are the keys of inputs that are lists of numbers."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    place, name = _place(error, model), type(model).__name__
    message = f"cannot capture {name}: {text}" if runs else f"{name} fails on these inputs: {text}"
    if place:
        message += f"\n  {place}"
    advice = _ADVICE_DATA + _fixed(inputs) if is_data_dependent(error) else _ADVICE
    known = (text for word, text in _OTHER_ADVICE.items() if word in message)
    advice = next(known, advice).format(layerdrop=_layerdrop(model))
    if not runs:
        named = ", ".join(map(repr, lists))
        advice = _ADVICE_LISTS.format(named=named) if lists else _ADVICE_BROKEN
    return CaptureError(f"{message}\n  {advice}")


def _fixed(inputs: Mapping[str, Any]) -> str:
    """Advice for an input with a few integers a row, such as image sizes: make it a constant."""
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dim() == 2:
            rows, columns = value.shape
            if 1 < columns < 5:
                shown = value.tolist() if rows < 5 and not value.is_meta else "[...]"
                return _ADVICE_FIXED.format(name=name, values=shown)
    return ""


def _layerdrop(model: nn.Module) -> str:
    """The settings of a model's configuration to change so that no layer is dropped."""
    settings = getattr(getattr(model, "config", None), "__dict__", {})
    names = [name for name, value in settings.items() if name.endswith("layerdrop") and value]
    return ", ".join(f"{name}=0" for name in names or ["layerdrop"])


def is_data_dependent(error: Exception) -> bool:
    """Whether tracing failed because something depends on values of tensors."""
    text = f"{type(error).__name__} {error}".lower()
    return any(word in text for word in _DATA_DEPENDENT)


def _place(error: Exception, model: nn.Module) -> str:
    """The module and line of the innermost frame that runs a method of one of the model's modules,
    rather than torch calling it, and the line of the function that it calls, if that is where it
    failed; "" if there is none."""
    # For a module with two names torch runs proxies, which share its __dict__.
    names = {id(vars(module)): name for name, module in model.named_modules()}
    place = called = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        first = frame.f_code.co_varnames[:1]  # usually called self
        owner = id(getattr(frame.f_locals.get(first[0]), "__dict__", None)) if first else None
        line = f'{file}:{number}: "{linecache.getline(file, number).strip()}"'
        if owner in names and "/torch/nn/modules/module.py" not in file.replace("\\", "/"):
            module = names[owner] or "(the model itself)"
            place, called = f"in module {module!r}, {line}", ""
        elif place and _is_of_user(file):
            called = f"\n  there, {line}"
    return place + called


def _is_of_user(file: str) -> bool:
    """Whether a source file belongs to neither torch nor Python nor this package."""
    path = Path(file)
    if not path.is_absolute() or any(map(path.is_relative_to, _PACKAGES)):
        return False
    return "site-packages" in path.parts or not path.is_relative_to(_PYTHON)
