"""The base of emitted stages: inputs, results, and the model's names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from parcompiler.again import RunningAgain
from parcompiler.runtime.offload import transfers


class Layer(nn.Module):
    """The base of emitted layers. Attributes have the names of the model; for others, tensors or
    modules, `names` has the model's name, relative to the layer if it starts with a dot."""

    names: ClassVar[Mapping[str, str]] = {}


class Stage(nn.Module):
    """The base of emitted stages.

    `inputs` are tensors of the batch and `receives` values of earlier stages: the arguments of
    forward. `gives` are its results, in order; after them come the loss if `loss` is true, and the
    outputs of the model that it `keeps`. `random` says that some operator draws random numbers,
    `again` that some run again in the backward. `scopes` maps the path of each block in this module
    to its path in the user's model.
    """

    inputs: ClassVar[tuple[str, ...]] = ()
    receives: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    keeps: ClassVar[tuple[str, ...]] = ()
    loss: ClassVar[bool] = False
    random: ClassVar[bool] = False
    again: bool = False
    names: ClassVar[Mapping[str, str]] = {}
    scopes: ClassVar[Mapping[str, str]] = {}
    once: tuple[torch.Tensor, ...] = ()  # what `constants` returned
    _versions: list[int] | None = None  # of the buffers then, behind the mode

    def constants(self) -> tuple[torch.Tensor, ...]:
        """Values that depend on nothing but the stage's own buffers: positions, tables."""
        return ()

    def prepare(self) -> None:
        """Compute the constants: before the first forward, and again once a buffer or the mode has
        changed."""
        buffers = (buffer for buffer in self._buffers.values() if buffer is not None)
        versions = [self.training, *(buffer._version for buffer in buffers)]
        if versions != self._versions:
            with torch.inference_mode(mode=False), torch.no_grad():
                self.once, self._versions = self.constants(), versions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward, after `prepare`."""
        self.prepare()
        with transfers(), RunningAgain() if self.again else nullcontext():
            return super().__call__(*args, **kwargs)

    def tensor_names(self) -> dict[str, str]:
        """Attribute path in this module -> name in the user's model, for every tensor."""
        names = dict(self.names)
        for path, scope in self.scopes.items():
            block = self.get_submodule(path)
            assert isinstance(block, Layer)
            parameters = block.named_parameters(remove_duplicate=False)
            buffers = block.named_buffers(remove_duplicate=False)
            for place, _ in (*parameters, *buffers):
                names[f"{path}.{place}"] = name_in_model(place, block.names, scope)
        return names


def name_in_model(place: str, names: Mapping[str, str], scope: str) -> str:
    """The model's name for an attribute of a layer that the model calls `scope`.

    >>> name_in_model("attention.qkv.weight", {}, "h.3")
    'h.3.attention.qkv.weight'
    >>> name_in_model("mlp_0.bias", {"mlp_0": ".mlp.0"}, "h.3")
    'h.3.mlp.0.bias'
    """
    known, rest = place, ""
    while known not in names:
        known, dot, last = known.rpartition(".")
        rest = f".{last}{rest}"
        if not dot:
            return f"{scope}{rest}" if scope else place
    name = names[known]
    return f"{scope if name.startswith('.') else ''}{name}{rest}"


class Unfilled(TorchFunctionMode):
    """In this context modules are made uninitialized, as weights are loaded.

    That draws no random numbers, and is fast for large modules.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Skip the functions of torch.nn.init."""
        options = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return options["tensor"] if "tensor" in options else args[0]
        return func(*args, **options)
