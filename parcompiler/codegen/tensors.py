"""The lines that make parameters and buffers, and the table of their names in the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from parcompiler.codegen.layout import remarked, table, wrap
from parcompiler.codegen.literals import literal, string
from parcompiler.graph import Parameter
from parcompiler.pieces import Shard  # noqa: F401 (the doctest's)


def names_table(names: Mapping[str, str]) -> list[str]:
    """The class attribute that maps attributes to the model's names."""
    if not names:
        return []
    rows = [(string(attribute), string(name)) for attribute, name in names.items()]
    return [*table("names = {", rows, "}", 4), ""]


def constructor(lines: Sequence[str]) -> list[str]:
    """`__init__` of these lines; nothing where there are none."""
    if not lines:
        return []
    return ["    def __init__(self) -> None:", "        super().__init__()", *lines, ""]


def tensor_line(attribute: str, item: Parameter) -> str:
    """The line that makes a parameter or buffer, still empty."""
    sizes = ", ".join(map(literal, item.shape)) or "()"
    dtype = "" if item.dtype == torch.float32 else f", dtype={literal(item.dtype)}"
    empty = f"torch.empty({sizes}{dtype})"
    if item.buffer:
        owner, _, name = f"self.{attribute}".rpartition(".")
        line = wrap(f'{owner}.register_buffer("{name}", {empty})', 8)
    else:
        frozen = "" if item.trainable else ", requires_grad=False"
        line = wrap(f"self.{attribute} = nn.Parameter({empty}{frozen})", 8)
    return line if item.shard is None else remarked(line, f"a piece of {whole_shape(item)}")


def whole_shape(item: Parameter) -> str:
    """The shape of which ranks hold pieces.

    >>> shard = Shard(0, (48,))
    >>> whole_shape(Parameter("qkv.weight", "w", (24, 16), torch.float32, shard=shard))
    '48 x 16'
    """
    assert item.shard is not None
    return " x ".join(map(str, item.shard.shape(item.shape)))
