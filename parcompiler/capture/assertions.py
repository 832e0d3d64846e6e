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

Span = tuple[int, int, int, int]  # first line, last line, first column, last column

_TALK = ("warn", "log", "print")  # what a body that only tells the user something calls


def assumed() -> bool | None:
    """The truth value under which the caller's assertion holds; None if it is no assertion.

    `assert x`, and `if x:` where the branch does nothing but raise or warn.
    """
    frame = _asker()
    span = None if frame is None else _span(frame)
    if frame is None or span is None:
        return None
    return _wanted(frame.f_code.co_filename, span)


def _asker() -> FrameType | None:
    """The frame whose code asks for the truth value: below the modes that pass the question on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _passes_on(frame):
        frame = frame.f_back
    return frame


def _passes_on(frame: FrameType) -> bool:
    """Whether a frame belongs to a mode rather than to the code that runs under it."""
    return frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename == __file__


def _span(frame: FrameType) -> Span | None:
    """The place, in the source, of the expression that a frame evaluates."""
    positions = frame.f_code.co_positions()
    line, last, column, end = next(itertools.islice(positions, frame.f_lasti // 2, None))
    if line is None or last is None or column is None or end is None:
        return None
    return line, last, column, end


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    """The syntax of a source file, if it can be read."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None


def _wanted(file: str, span: Span) -> bool | None:
    """The truth value of the expression at `span` that lets execution go on."""
    path = _path(_tree(file), span)
    for depth, node in enumerate(path):
        goal = _goal(node)
        if goal is None:
            continue
        assert isinstance(node, ast.Assert | ast.If)
        if node is path[-1]:  # the interpreter asks on behalf of the statement
            signs = set(_signs(node.test))
            return goal == signs.pop() if len(signs) == 1 else None
        inner = path[depth + 1 :]
        if inner[0] is node.test and all(map(_is_logic, inner[:-1])):
            negations = sum(_is_not(n) for n in inner)
            return goal == (negations % 2 == 0)
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


def _path(tree: ast.AST | None, span: Span) -> list[ast.AST]:
    """The nodes of the syntax that contain `span`, outermost first; empty unless one is just it."""
    path: list[ast.AST] = []
    node = tree
    while node is not None:
        path.append(node)
        if _span_of(node) == span:
            return path
        node = next((n for n in ast.iter_child_nodes(node) if _contains(n, span)), None)
    return []


def _span_of(node: ast.AST) -> Span | None:
    """The place of a node in its source; None for one that has none."""
    if not isinstance(node, ast.stmt | ast.expr):
        return None
    if node.end_lineno is None or node.end_col_offset is None:
        return None
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _contains(node: ast.AST, span: Span) -> bool:
    """Whether a node's place covers another."""
    own = _span_of(node)
    if own is None:
        return False
    return (own[0], own[2]) <= (span[0], span[2]) and (span[1], span[3]) <= (own[1], own[3])


def _is_logic(node: ast.AST) -> bool:
    """Whether the truth of a node follows from that of its operands: `not`, `and`, `or`."""
    return isinstance(node, ast.BoolOp) or _is_not(node)


def _is_not(node: ast.AST) -> bool:
    """Whether a node negates its operand."""
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _harmless(body: list[ast.stmt]) -> bool:
    """Whether statements do nothing but raise or warn."""
    if any(isinstance(statement, ast.Raise) for statement in body[-1:]):
        return True
    return all(isinstance(s, ast.Expr) and _is_talk(s.value) for s in body)


def _is_talk(node: ast.expr) -> bool:
    """Whether an expression only tells the user something."""
    if isinstance(node, ast.Constant):
        return True
    return isinstance(node, ast.Call) and any(word in ast.unparse(node.func) for word in _TALK)
