"""Constants as Python source that evaluates to exactly the same value.

>>> literal([2, -1, 8]), literal(1e-05), literal(torch.bfloat16), literal("tanh")
('(2, -1, 8)', '1e-05', 'torch.bfloat16', '"tanh"')
>>> literal(-math.inf), literal(torch.device("meta"))
('-float("inf")', 'DEVICE')
"""

import math
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass

import torch
from torch import fx

from parcompiler.errors import InputError
from parcompiler.pieces import Shard  # noqa: F401 (the doctest's)
from parcompiler.spmd.runtime_call import Piece

Operand = Callable[[fx.Node], str]
"""The text that stands for a node: an identifier or ``self.attribute``."""

NAMED = torch.dtype | torch.layout | torch.memory_format  # their repr is their source


def literal(value: object, operand: Operand | None = None) -> str:
    """The source of a constant; `operand` names the nodes in it.

    A list that holds nodes stays a list, any other becomes a tuple. Every device becomes the
    device of the rank: the device of the capture is irrelevant there.
    """
    if isinstance(value, fx.Node) and operand is not None:
        return operand(value)
    if isinstance(value, list | tuple):
        return _sequence(value, operand)
    if isinstance(value, dict):
        items = (f"{literal(k, operand)}: {literal(v, operand)}" for k, v in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, torch.device):
        return "DEVICE"
    if isinstance(value, Piece):
        return f"runtime.piece({value.whole})"
    if isinstance(value, str):
        return string(value)
    if isinstance(value, NAMED):
        return str(value)
    return _number(value)


def construction(item: object, module: str = "", *, keywords: bool = False) -> str:
    """The source of a frozen value, without fields that have their default; any other value as a
    literal.

    Fields without a default go by position unless `keywords` says otherwise.

    >>> print(construction(Shard(1, (8, 4))), construction(Shard(1, (8, 4)), "pc.", keywords=True))
    Shard(1, (8, 4)) pc.Shard(dim=1, sizes=(8, 4))
    """
    if not is_dataclass(item):
        return literal(item)
    texts = [
        f"{'' if field.default is MISSING and not keywords else f'{field.name}='}{literal(value)}"
        for field in fields(item)
        if (value := getattr(item, field.name)) != field.default
    ]
    return f"{module}{type(item).__name__}({', '.join(texts)})"


def string(value: str) -> str:
    r"""A string as data, in double quotes where that needs no escapes.

    >>> print(string("tanh"), string('"; import os'), string("it's\n"))
    "tanh" '"; import os' "it's\n"
    """
    text = str.__repr__(value)
    return text if text.startswith('"') or '"' in text else f'"{text[1:-1]}"'


def real(value: float) -> str:
    """A float by its shortest exact digits; non-finite ones by name.

    >>> print(real(0.1), real(-0.0), real(math.nan), real(-math.inf))
    0.1 -0.0 float("nan") -float("inf")
    """
    if math.isnan(value):
        return 'float("nan")'
    if math.isinf(value):
        return 'float("inf")' if value > 0 else '-float("inf")'
    return float.__repr__(value)


def _number(value: object) -> str:
    """None, a truth value, or a number; anything else has no source."""
    if value is None or value is True or value is False or value is ...:
        return "..." if value is ... else str(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return real(value)
    if isinstance(value, complex):
        return f"complex({real(value.real)}, {real(value.imag)})"
    message = f"a {type(value).__qualname__} cannot be written as Python source"
    raise InputError(message)


def _sequence(values: list[object] | tuple[object, ...], operand: Operand | None) -> str:
    items = [literal(value, operand) for value in values]
    if any(isinstance(value, fx.Node) for value in values):
        return f"[{', '.join(items)}]"
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
