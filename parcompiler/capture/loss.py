"""The model and its loss as one module that returns a scalar.

>>> import torch
>>> loss_of({"loss": torch.tensor(2.0), "logits": torch.zeros(3)})
tensor(2.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from parcompiler.capture.inputs import flat
from parcompiler.errors import CaptureError, InputError

PREFIX = "model."  # the prefix that `WithLoss` adds to every name of the user's model


class WithLoss(nn.Module):
    """Calls the user's model and returns the scalar that training minimises.

    `around` makes the context of the call; `in_float32` casts the loss to float32. `outputs` are
    names of the model's outputs that are returned after the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any], torch.Tensor] | None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        in_float32: bool = False,
        outputs: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.outputs = tuple(outputs)
        self.loss = loss
        self.around = around
        self.in_float32 = in_float32

    def forward(self, *args: object, **kwargs: object) -> Any:
        """The loss of one micro-batch, a scalar; with `outputs` a tuple of it and these."""
        with self.around():
            outputs = self.model(*args, **kwargs)
            loss = loss_of(outputs) if self.loss is None else self.loss(outputs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            message = f"the loss must be a scalar tensor ({shape} returned by the loss callable)"
            raise CaptureError(message)
        loss = loss if loss.dim() == 0 else loss.reshape(())
        loss = loss.float() if self.in_float32 else loss
        return (loss, *kept(outputs, self.outputs)) if self.outputs else loss

    def names(self) -> dict[str, str]:
        """For every name of a parameter or buffer, the first name of the same tensor.

        Those of the model have its names, those of a loss that is a module begin with "loss.".
        Raises CaptureError where both have a tensor of one name.
        """
        first: dict[int, str] = {}
        names: dict[str, str] = {}
        named = (
            *self.named_parameters(remove_duplicate=False),
            *self.named_buffers(remove_duplicate=False),
        )
        for path, tensor in named:
            name = path.removeprefix(PREFIX)
            if name in names:
                message = f"the model and the loss both have a tensor {name!r}: rename one"
                raise CaptureError(message)
            names[name] = first.setdefault(id(tensor), name)
        return names


def kept(outputs: Any, names: Sequence[str]) -> list[torch.Tensor]:
    """The outputs with these names: keys or positions, such as `logits`, `0` or `past.1.0`.

    >>> kept((torch.zeros(()), {"a": torch.ones(1)}), ["1.a"])
    [tensor([1.])]

    Raises InputError for a name that no tensor among the outputs has.
    """
    several = outputs if isinstance(outputs, Mapping | tuple | list) else (outputs,)
    tensors = {key: leaf for key, leaf in flat(several) if isinstance(leaf, torch.Tensor)}
    for name in names:
        if name not in tensors:
            known = ", ".join(map(repr, tensors)) or f"a {type(outputs).__name__}"
            message = f"the model has no output {name!r} to keep: it returns {known}"
            if isinstance(outputs, torch.Tensor):
                alone = "" if outputs.numel() == 1 else "keep it as outputs=['0'], or "
                message = (
                    f"the model returns one tensor, which has no name, and no output {name!r}: "
                    f"{alone}return a dict, such as {{'loss': loss, {name!r}: ...}}"
                )
            raise InputError(message)
    return [tensors[name] for name in names]


def loss_of(outputs: object) -> torch.Tensor:
    """The scalar among a model's outputs: itself, `.loss` or `["loss"]`."""
    candidate = outputs
    if isinstance(outputs, Mapping):
        candidate = outputs.get("loss")
    elif not isinstance(outputs, torch.Tensor):
        candidate = getattr(outputs, "loss", None)
    if isinstance(candidate, torch.Tensor) and candidate.numel() == 1:
        return candidate
    kind = type(outputs).__name__
    if isinstance(outputs, torch.Tensor):
        kind = f"a tensor of shape {tuple(outputs.shape)}"
    message = (
        f"the model returns no scalar loss ({kind}); pass labels so that it does, "
        "loss=callable(outputs) -> scalar, or a module around it that returns the loss"
    )
    raise CaptureError(message)
