"""The base of emitted stages: what goes in and out, and the model's names of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn


class Block(nn.Module):
    """The base of emitted layers. `names` gives for each attribute the tensor's name in the model,
    relative to the layer when it starts with a dot."""

    names: ClassVar[Mapping[str, str]] = {}


class Stage(nn.Module):
    """The base of emitted stages.

    `inputs` are tensors of the batch and `receives` values of earlier stages: the arguments of
    forward. `gives` are its results, in order; the loss comes behind them where `loss` is true.
    `random` says that some operator draws random numbers.
    `scopes` maps the path of each block in this module to its path in the user's model.
    """

    inputs: ClassVar[tuple[str, ...]] = ()
    receives: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    loss: ClassVar[bool] = False
    random: ClassVar[bool] = False
    names: ClassVar[Mapping[str, str]] = {}
    scopes: ClassVar[Mapping[str, str]] = {}

    def tensor_names(self) -> dict[str, str]:
        """Attribute path in this module -> name in the user's model, for every tensor."""
        found = dict(self.names)
        for path, scope in self.scopes.items():
            block = self.get_submodule(path)
            assert isinstance(block, Block)
            for attribute, name in block.names.items():
                found[f"{path}.{attribute}"] = scope + name if name.startswith(".") else name
        return found
