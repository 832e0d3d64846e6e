"""Chooses names of local variables, preferring names from the user's source.

    x = self.dropout(self.attention(x))       source
    attention = F.linear(y, ...)              the module that the value leaves
    x = F.dropout(attention, 0.1)             the variable that the line assigns

A captured node remembers the stack of calls that made it, each with its line:

    model.py   x = layer(x)
    model.py   qkv = self.qkv(x).view(batch, sequence, heads, -1)
    torch      return F.linear(input, self.weight, self.bias)

The value of this `linear` is not assigned by the second line, since a `view` of the same line
follows; but it leads to the assigned value.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import fx

from parcompiler.capture import loss
from parcompiler.capture.blocks import steps
from parcompiler.capture.effects import overload_name
from parcompiler.capture.templates import identifier
from parcompiler.spmd.runtime_call import is_conversion

_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)')
_FAR = 16  # operators of one line to follow

# Operators that reshape, convert or choose their operand: the result may keep its name.
FORMS = frozenset(
    "view reshape transpose permute unsqueeze squeeze expand flatten unflatten contiguous to t "
    "_unsafe_view clone by_mode".split()
)


# Operators whose names mean something else in Python, or little to a reader.
_SPOKEN = (
    "__and__:both __or__:either abs:magnitude add:total all:every any:found "
    "bitwise_and:both bitwise_not:inverse bitwise_or:either cat:joined chunk:chunks "
    "cross_entropy_loss:loss div:ratio eq:equal full:filled ge:at_least getitem:item "
    "gt:above index:picked le:at_most logical_and:both logical_not:inverse "
    "logical_or:either lt:below masked_fill:masked max:largest min:smallest mul:product "
    "ne:differs neg:negative pad:padded pow:power round:rounded rsub:difference "
    "scaled_dot_product_attention:attention select:item slice:part split:parts "
    "stack:stacked sub:difference sum:total to:cast where:chosen "
)
_WORDS = {name: word for name, _, word in (pair.partition(":") for pair in _SPOKEN.split())}


class Frame(NamedTuple):
    """One call on the stack: its place and the text of its line."""

    file: str
    line: int
    function: str
    text: str

    @property
    def is_torch(self) -> bool:
        """Whether the line is one of torch's own modules."""
        return "/torch/" in self.file.replace("\\", "/")


class _Assignment(NamedTuple):
    """A variable, and the depth of the stack at the statement that assigns it."""

    name: str
    depth: int


def frames(node: fx.Node) -> tuple[Frame, ...]:
    """The calls around a node, outermost first; empty if it was not traced."""
    return _frames(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=4096)
def _frames(trace: str) -> tuple[Frame, ...]:
    """The frames of a stack trace, without that of our wrapper of the model."""
    frames: list[Frame] = []
    for line in trace.splitlines():
        match = _FRAME.fullmatch(line.strip())
        if match is not None:
            frames.append(Frame(match["file"], int(match["line"]), match["function"], ""))
        elif frames and not frames[-1].text:
            frames[-1] = frames[-1]._replace(text=line.strip())
    return tuple(frame for frame in frames if frame.file != loss.__file__)


def assigned_name(node: fx.Node) -> str | None:
    """The variable that the user's source assigns this node's value to, if a line shows one.

    `q, k, v = x.split(n)` names the three pieces, `h = self.norm(x)` the result of the norm.
    """
    assignment = _assignment(node)
    return None if assignment is None else assignment.name


def chained_name(node: fx.Node) -> str | None:
    """The variable that a line assigns after more operators on a node's value.

    In `h = self.norm(x).relu()` the value of the norm leads to `h`.
    """
    first = node
    for _ in range(_FAR):
        following = next((u for u in node.users if _receiver(u) is node), None)
        if following is None or not _is_alike(following, node):
            return None
        node = following
        assignment = _assignment(node)
        if assignment is not None:
            return assignment.name if _shares(node, first, assignment.depth) else None
    return None


def module_name(node: fx.Node) -> str | None:
    """The name of the module whose result a node is, if it has one."""
    stack = steps(node)
    if not stack or any(steps(user)[: len(stack)] == stack for user in node.users):
        return None
    name = stack[-1].path.rpartition(".")[2]
    return None if name.isdigit() else identifier(name)


def spoken_name(node: fx.Node) -> str | None:
    """The natural name of a node's value: its variable, or the module whose result it is."""
    return assigned_name(node) or chained_name(node) or module_name(node)


def _assignment(node: fx.Node) -> _Assignment | None:
    """The innermost statement that assigns a node's value to a variable."""
    trace = frames(node)
    for depth in range(len(trace), 0, -1):
        # Readers of the value, in this graph or in the one it was rewritten from.
        readers = (*node.users, *node.meta.get("readers", ()))
        if any(_shares(user, node, depth) for user in readers):
            return None  # the value is used within the line
        frame = trace[depth - 1]
        name = None if frame.is_torch else _target(frame.text, node, depth)
        if name is not None:
            return _Assignment(name, depth)
        if not frame.is_torch and not frame.text.startswith("return"):
            return None
    return None


@lru_cache(maxsize=4096)
def _assigned(text: str) -> ast.expr | None:
    """The target of a line, if it is an assignment."""
    left, equals, right = text.partition(" = ")
    if not equals or right.startswith("="):
        return None
    try:
        return ast.parse(left.partition(":")[0].strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None


def _target(text: str, node: fx.Node, depth: int) -> str | None:
    """The variable that a line assigns a node's value to."""
    target = _assigned(text)
    if isinstance(target, ast.Tuple):
        index = node.args[1] if node.target is operator.getitem else None
        if not isinstance(index, int):
            return _kept_name(node, depth, target)
        if index >= len(target.elts):
            return None
        target = target.elts[index]
    if not isinstance(target, ast.Name) or target.id.strip("_") == "":
        return None
    return identifier(target.id)


def _kept_name(node: fx.Node, depth: int, target: ast.Tuple) -> str | None:
    """In `q, k = rotated(q, k)`, the variable that a value is computed from, if it is
    reassigned."""
    first = node
    for _ in range(_FAR):
        before = _receiver(node)
        if before is None:
            return None
        node = before
        if not _shares(node, first, depth):
            name = assigned_name(node)
            names = [identifier(item.id) for item in target.elts if isinstance(item, ast.Name)]
            return name if name in names else None
    return None


def _shares(node: fx.Node, other: fx.Node, depth: int) -> bool:
    """Whether two nodes come from the same execution of a statement, in the frame at `depth`.

    A layer that is called twice executes the same lines in different calls of the module.
    """
    trace = frames(node)[:depth]
    inside = max(0, sum(frame.function == "forward" for frame in trace) - 1)
    return trace == frames(other)[:depth] and steps(node)[:inside] == steps(other)[:inside]


def _receiver(node: fx.Node) -> fx.Node | None:
    """The main operand of an operator: the first that is no parameter or input."""
    return next((item for item in node.all_input_nodes if item.op != "placeholder"), None)


def _is_alike(following: fx.Node, node: fx.Node) -> bool:
    """Whether a value may share the name of one computed from it: a loss is no `logits`."""
    after, before = following.meta.get("val"), node.meta.get("val")
    if not isinstance(after, torch.Tensor) or not isinstance(before, torch.Tensor):
        return False
    same = after.ndim == before.ndim or overload_name(following) in FORMS
    return same and after.dtype == before.dtype


def candidate_names(node: fx.Node, operand: str | None, index: int | None = None) -> Iterator[str]:
    """Names for a node's value, best first; `operand` is the name of its first operand.

    For a part of a tuple `index` is given, and the operand of the tuple. The last name takes a
    number if none is free.
    """
    assigned = assigned_name(node)
    if operand is not None and is_conversion(node):
        yield operand  # the same value in another placement
    if assigned is not None:
        yield assigned
    if operand is not None and index is not None:
        yield f"{operand}_{index + 1}"  # q_1, q_2 = q.chunk(2)
    for name in (module_name(node), chained_name(node)):
        if name is not None:
            yield name
    if operand is not None and overload_name(node) in FORMS:
        yield operand
    if assigned is not None:
        yield assigned
    else:  # a word for the operator's result
        name = overload_name(node) or getattr(node.target, "__name__", "item")
        word = _WORDS.get(name) or _WORDS.get(name.rstrip("_")) or name.strip("_")
        yield identifier(word)
