"""What the user's source says about a node: the statements around it and the names they assign.

A captured node remembers the stack of calls that made it, each with its line:

    model.py   x = layer(x)
    model.py   qkv = self.qkv(x).view(batch, sequence, heads, -1)
    torch      return F.linear(input, self.weight, self.bias)

The value of this `linear` is not what the second line assigns, since a `view` of the same line
follows; but it leads to it.
"""

from __future__ import annotations

import ast
import operator
import re
from functools import lru_cache
from typing import NamedTuple

from torch import fx

from parcompiler.capture import loss
from parcompiler.capture.blocks import steps
from parcompiler.capture.templates import identifier

_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)')
_FAR = 16  # operators of one line that are looked through


class Frame(NamedTuple):
    """One call on the stack: where it stands and the text of its line."""

    file: str
    line: int
    function: str
    text: str

    @property
    def is_torch(self) -> bool:
        """Whether the line is one of torch's own modules."""
        return "/torch/" in self.file.replace("\\", "/")


class _Assignment(NamedTuple):
    """A variable, and the number of outer frames up to the statement that assigns it."""

    name: str
    depth: int


def frames(node: fx.Node) -> tuple[Frame, ...]:
    """The calls around a node, outermost first; none when it was made otherwise."""
    return _frames(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=4096)
def _frames(trace: str) -> tuple[Frame, ...]:
    """The frames of a stack trace, without that of our own wrapper of the model."""
    found: list[Frame] = []
    for line in trace.splitlines():
        match = _FRAME.fullmatch(line.strip())
        if match is not None:
            found.append(Frame(match["file"], int(match["line"]), match["function"], ""))
        elif found and not found[-1].text:
            found[-1] = found[-1]._replace(text=line.strip())
    return tuple(frame for frame in found if frame.file != loss.__file__)


def assigned_name(node: fx.Node) -> str | None:
    """The variable that the user's source assigns this node's value to, if a line shows one.

    `q, k, v = x.split(n)` names the three pieces, `h = self.norm(x)` what the norm returns.
    """
    found = _assignment(node)
    return None if found is None else found.name


def chained_name(node: fx.Node) -> str | None:
    """The variable of the line that a node's value is the beginning of.

    In `h = self.norm(x).relu()` the value of the norm goes on into `h`.
    """
    trace = frames(node)
    for _ in range(_FAR):
        following = next((u for u in node.users if _receiver(u) is node), None)
        if following is None or _dtype(following) != _dtype(node):
            return None
        node = following
        found = _assignment(node)
        if found is not None:
            same = frames(node)[: found.depth] == trace[: found.depth]
            return found.name if same else None
    return None


def module_name(node: fx.Node) -> str | None:
    """The name of the module that a node's value leaves, if it has one of its own."""
    stack = steps(node)
    if not stack or any(steps(user)[: len(stack)] == stack for user in node.users):
        return None
    name = stack[-1].path.rpartition(".")[2]
    return None if name.isdigit() else identifier(name)


def _assignment(node: fx.Node) -> _Assignment | None:
    """The innermost statement that assigns a node's value to a variable."""
    trace = frames(node)
    for depth in range(len(trace), 0, -1):
        if any(frames(user)[:depth] == trace[:depth] for user in node.users):
            return None  # the value is used within the line
        frame = trace[depth - 1]
        name = None if frame.is_torch else _target(frame.text, node)
        if name is not None:
            return _Assignment(name, depth)
        if not frame.is_torch and not frame.text.startswith("return"):
            return None
    return None


@lru_cache(maxsize=4096)
def _targets(text: str) -> tuple[ast.expr | None, bool]:
    """What a line assigns to, and whether that is a single target."""
    left, equals, right = text.partition(" = ")
    if not equals or right.startswith("="):
        return None, False
    try:
        return ast.parse(left.partition(":")[0].strip(), mode="eval").body, True
    except (SyntaxError, ValueError):
        return None, False


def _target(text: str, node: fx.Node) -> str | None:
    """The variable that a line assigns a node's value to."""
    target, _ = _targets(text)
    if isinstance(target, ast.Tuple):
        index = node.args[1] if node.target is operator.getitem else None
        if not isinstance(index, int) or index >= len(target.elts):
            return None
        target = target.elts[index]
    if not isinstance(target, ast.Name) or target.id.strip("_") == "":
        return None
    return identifier(target.id)


def _receiver(node: fx.Node) -> fx.Node | None:
    """The value that an operator works on: its first operand that is no parameter or input."""
    return next((item for item in node.all_input_nodes if item.op != "placeholder"), None)


def _dtype(node: fx.Node) -> object:
    """The dtype of a node's value; None when it is no tensor."""
    return getattr(node.meta.get("val"), "dtype", None)
