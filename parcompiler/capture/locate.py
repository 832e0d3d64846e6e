"""Where in the user's model a capture failed, and what to do about it."""

from __future__ import annotations

import linecache
import traceback
from types import FrameType
from typing import NamedTuple

from torch import nn

from parcompiler.errors import CaptureError

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
    "mask, or move it out of forward"
)
_ADVICE = (
    "torch.export cannot take what this does: write it otherwise, and try "
    "torch.export.export(model, args, kwargs, strict=False) on the module that is named"
)
_ADVICE_BROKEN = "this is no limit of capturing: mend the model or the inputs until the call runs"


class Place(NamedTuple):
    """A module of the model and the line that ran in it."""

    module: str
    line: str


def placed(error: CaptureError, model: nn.Module) -> CaptureError:
    """The same error with the innermost module and line of the model, when they are known."""
    place = _place(error, model)
    return error if place is None else CaptureError(f"{error}\n  {_at(place)}")


def explain(error: Exception, model: nn.Module, *, runs: bool = True) -> CaptureError:
    """A CaptureError that names the innermost module and line of the model in the traceback;
    `runs` says whether the model itself does, on the same inputs."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    place = _place(error, model)
    name = type(model).__name__
    message = f"cannot capture {name}: {text}" if runs else f"{name} fails on these inputs: {text}"
    if place is not None:
        message += f"\n  {_at(place)}"
    advice = _ADVICE_DATA if is_data_dependent(error) else _ADVICE
    return CaptureError(f"{message}\n  {advice if runs else _ADVICE_BROKEN}")


def is_data_dependent(error: Exception) -> bool:
    """Whether tracing failed because values of tensors decide something."""
    kind = f"{type(error).__name__} {error}".lower()
    return any(word in kind for word in _DATA_DEPENDENT)


def _at(place: Place) -> str:
    """A place in words."""
    return f"in module {place.module or '(the model itself)'!r}, {place.line}"


def _place(error: Exception, model: nn.Module) -> Place | None:
    """The innermost frame that runs a method of one of the model's modules."""
    names = {id(module): name for name, module in model.named_modules()}
    found: Place | None = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        first = frame.f_code.co_varnames[:1]  # usually called self
        owner = frame.f_locals.get(first[0]) if first else None
        if id(owner) in names and not _is_plumbing(frame):
            file = frame.f_code.co_filename
            source = linecache.getline(file, number).strip()
            found = Place(names[id(owner)], f'{file}:{number}: "{source}"')
    return found


def _is_plumbing(frame: FrameType) -> bool:
    """Whether a frame is torch calling a module rather than the module's own code."""
    return "/torch/nn/modules/module.py" in frame.f_code.co_filename.replace("\\", "/")
