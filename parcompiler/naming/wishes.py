"""What a local variable should be called: names from the user's source come first.

x = self.dropout(self.attention(x))       source
attention = F.linear(y, ...)              the module that the value leaves
x = F.dropout(attention, 0.1)             the variable that the line assigns
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from parcompiler.capture.effects import overload_name
from parcompiler.capture.templates import identifier
from parcompiler.naming.source import FORMS, assigned_name, chained_name, module_name
from parcompiler.spmd.exchange import is_conversion

# Operators whose names mean something else to Python, or little to a reader.
WORDS = {
    "__and__": "both",
    "__or__": "either",
    "abs": "magnitude",
    "add": "total",
    "all": "every",
    "any": "found",
    "bitwise_and": "both",
    "bitwise_not": "inverse",
    "bitwise_or": "either",
    "cat": "joined",
    "chunk": "chunks",
    "cross_entropy_loss": "loss",
    "div": "ratio",
    "eq": "equal",
    "full": "filled",
    "ge": "at_least",
    "getitem": "item",
    "gt": "above",
    "index": "picked",
    "le": "at_most",
    "logical_and": "both",
    "logical_not": "inverse",
    "logical_or": "either",
    "lt": "below",
    "masked_fill": "masked",
    "max": "largest",
    "min": "smallest",
    "mul": "product",
    "ne": "differs",
    "neg": "negative",
    "pad": "padded",
    "pow": "power",
    "round": "rounded",
    "rsub": "difference",
    "scaled_dot_product_attention": "attention",
    "select": "item",
    "slice": "part",
    "split": "parts",
    "stack": "stacked",
    "sub": "difference",
    "sum": "total",
    "to": "cast",
    "where": "chosen",
}


def wishes(node: fx.Node, operand: str | None, index: int | None = None) -> Iterator[str]:
    """Names for a node's value, best first; `operand` is what its first operand is called.

    A part of a tuple is given its `index`, and the operand that the tuple was made from. The last
    name takes a number when none is free.
    """
    own = assigned_name(node)
    if operand is not None and is_conversion(node):
        yield operand  # the same value, held in another way
    if own is not None:
        yield own
    if operand is not None and index is not None:
        yield f"{operand}_{index + 1}"  # q_1, q_2 = q.chunk(2)
    for name in (module_name(node), chained_name(node)):
        if name is not None:
            yield name
    if operand is not None and overload_name(node) in FORMS:
        yield operand
    yield own or operator_name(node)


def operator_name(node: fx.Node) -> str:
    """A word for what an operator returns."""
    name = overload_name(node) or getattr(node.target, "__name__", "item")
    known = WORDS.get(name) or WORDS.get(name.rstrip("_")) or name.strip("_")
    return identifier(known)
