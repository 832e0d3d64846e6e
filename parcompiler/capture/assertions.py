"""Recognises, from the frame that asks, that a truth value only decides whether to raise or warn.

>>> statement = ast.parse("if not ok.all(): raise ValueError").body[0]
>>> isinstance(statement, ast.If) and _harmless(statement.body)
True
"""

from __future__ import annotations

import ast
import itertools
import linecache
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import FrameType

Position = tuple[int, int]  # line and column

_TALK = ("warn", "log", "print")  # what a body that only tells the user something calls


def assumed() -> bool | None:
    """The truth value under which the caller's assertion holds; None if it is no assertion.

    `assert x`, and `if x:` where the branch does nothing but raise or warn.
    """
    frame: FrameType | None = sys._getframe(1)
    # Below the modes that pass the question on.
    while frame is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back
    if frame is None:
        return None
    positions = frame.f_code.co_positions()
    line, last, column, end = next(itertools.islice(positions, frame.f_lasti // 2, None))
    if line is None or last is None or column is None or end is None:
        return None
    return _wanted(frame.f_code.co_filename, (line, column), (last, end))


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    """The syntax of a source file, if it can be read."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None


def _wanted(file: str, start: Position, end: Position) -> bool | None:
    """The truth value of the expression between two positions that lets execution go on."""
    path = _path(_tree(file), start, end)
    for depth, node in enumerate(path):
        goal = _goal(node)
        if goal is None:
            continue
        assert isinstance(node, ast.Assert | ast.If)
        if node is path[-1]:  # the interpreter asks on behalf of the statement
            signs = set(_signs(node.test))
            return goal == signs.pop() if len(signs) == 1 else None
        inner = path[depth + 1 :]
        logic = all(isinstance(n, ast.BoolOp) or _negates(n) for n in inner[:-1])
        if inner[0] is node.test and logic:
            return goal == (sum(map(_negates, inner)) % 2 == 0)
    return None


def _goal(node: ast.AST) -> bool | None:
    """The outcome of a test that lets execution go on; None when either may."""
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.If) and _harmless(node.body):
        return False
    if isinstance(node, ast.If) and node.orelse and _harmless(node.orelse):
        return True
    return None


def _signs(test: ast.expr) -> Iterator[bool]:
    """For each operand of a test whether it stands there as it is (or negated)."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _signs(value)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from (not sign for sign in _signs(test.operand))
    else:
        yield True


def _path(tree: ast.AST | None, start: Position, end: Position) -> list[ast.AST]:
    """The nodes of the syntax around two positions, outermost first; empty unless one is just
    between them."""
    path: list[ast.AST] = []
    node = tree
    while node is not None:
        path.append(node)
        if _extent(node) == (start, end):
            return path
        extents = ((child, _extent(child)) for child in ast.iter_child_nodes(node))
        node = next((n for n, e in extents if e and e[0] <= start and end <= e[1]), None)
    return []


def _extent(node: ast.AST) -> tuple[Position, Position] | None:
    """Where a node begins and ends in its source; None for one that has no place there."""
    if not isinstance(node, ast.stmt | ast.expr):
        return None
    if node.end_lineno is None or node.end_col_offset is None:
        return None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _negates(node: ast.AST) -> bool:
    """Whether a node is a `not`."""
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _harmless(body: list[ast.stmt]) -> bool:
    """Whether statements do nothing but raise, or tell the user something."""
    if any(isinstance(statement, ast.Raise) for statement in body[-1:]):
        return True
    values = [s.value if isinstance(s, ast.Expr) else None for s in body]
    calls = [value for value in values if not isinstance(value, ast.Constant)]
    return all(
        isinstance(call, ast.Call) and any(word in ast.unparse(call.func) for word in _TALK)
        for call in calls
    )
