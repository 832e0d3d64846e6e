"""Breaks long lines of Python the way common formatters do.

>>> print(wrap("x = torch.cat([a, b], dim=1)", indent=4))
    x = torch.cat([a, b], dim=1)
>>> print(wrap('def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:', 0, 50))
def forward(
    self, hidden_states: Tensor
) -> tuple[Tensor, ...]:
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from parcompiler.codegen.quoting import WIDTH

_STRING = r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'"""
_POWER = r"(?<![\w.)\]])(?P<base>[\w.]+) \*\* (?P<exponent>-?[\w.]+)(?![\w.(\[])"
_TOKENS = re.compile(rf"{_STRING}|{_POWER}|(?<=\d)e\+(?=\d)")


def wrap(line: str, indent: int = 0, width: int = WIDTH) -> str:
    """One logical line, broken at a bracket when it is wider than the page.

    The contents of the bracket go on one line of their own; if that is too wide as well, or the
    bracket makes a tuple, list or dict, every part goes on its own line.
    """
    pad, line = " " * indent, tidy(line)
    if indent + len(line) <= width:
        return pad + line
    opening = _opening(line)
    if opening is None or indent + opening >= width:
        return _parenthesized(line, indent, width)
    closing = _closing(line, opening)
    inner, tail = line[opening + 1 : closing], line[closing:]
    before = line[max(opening - 1, 0)]  # of arguments or an index, not of a tuple, list or dict
    calls = opening > 0 and (before.isalnum() or before in "_)]")
    one = indent + 4 + len(inner) <= width and calls and inner[-1:] != ","
    parts = split(inner)
    bare = len(parts) == 1 and (parts[0].startswith(("*", "for ")) or " for " in parts[0])
    comma = "" if one or bare else ","
    rows = [wrap(inner, indent + 4, width)] if one else []
    rows = rows or [wrap(f"{part}{comma}", indent + 4, width) for part in parts]
    return "\n".join([pad + line[: opening + 1], *rows, pad + tail])


def remarked(line: str, remark: str) -> str:
    """A line with a trailing comment, if it is one line and both fit the page."""
    whole = f"{line}  # {remark}"
    return line if not remark or "\n" in line or len(whole) > WIDTH else whole


def tidy(text: str) -> str:
    """`x ** 2` and `1e+38` as formatters write them.

    >>> print(tidy("x ** -0.5 + (-2) ** y * 1e+38"), tidy("f('a ** b')"))
    x**-0.5 + (-2) ** y * 1e38 f('a ** b')
    """

    def write(match: re.Match[str]) -> str:
        if match["base"] is not None:
            return f"{match['base']}**{match['exponent']}"
        return "e" if match[0] == "e+" else match[0]

    return _TOKENS.sub(write, text)


def table(opening: str, rows: Sequence[tuple[str, str]], closing: str, indent: int) -> list[str]:
    """A dict with a line per entry; keys and values are source."""
    pad = " " * indent
    lines = [_entry(key, value, indent + 4) for key, value in rows]
    return [f"{pad}{opening}", *lines, f"{pad}{closing}"]


def _entry(key: str, value: str, indent: int) -> str:
    """One line of a dict; a string that is too long for it gets a line of its own."""
    pad, line = " " * indent, f"{key}: {value},"
    if indent + len(line) > WIDTH and value.startswith(('"', "'")):
        return f"{pad}{key}: (\n{pad}    {value}\n{pad}),"
    return wrap(line, indent)


def split(text: str) -> list[str]:
    """The parts of `text` between commas that stand outside brackets and strings."""
    parts, depth, start = [], 0, 0
    for index, char in _code(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    rest = text[start:].strip()
    return [*parts, rest] if rest else parts


def _parenthesized(line: str, indent: int, width: int) -> str:
    """Break a line without a bracket to break at: its right side goes in parentheses."""
    pad = " " * indent
    head, equals, value = line.partition(" = ")
    if line.startswith("return "):
        head, equals, value = "return", " ", line.removeprefix("return ")
    if not equals:
        return pad + line
    parts = split(value)
    if len(parts) == 1:
        return f"{pad}{head}{equals}(\n{wrap(value, indent + 4, width)}\n{pad})"
    rows = "\n".join(f"{pad}    {part}," for part in parts)
    return f"{pad}{head}{equals}(\n{rows}\n{pad})"


def _opening(line: str) -> int | None:
    """The bracket to break at: that of a `def`, else the last one at the outermost level."""
    if line.startswith("return ") and len(split(line)) > 1:
        return None
    depth, opening = 0, None
    for index, char in _code(line):
        if char in "([{":
            if depth == 0 and line[index + 1 : index + 2] not in ")]}":
                opening = index
                if line.startswith("def "):
                    return opening
            depth += 1
        elif char in ")]}":
            depth -= 1
    if opening is None or line[_closing(line, opening) + 1 :].strip(" ,:"):
        return None  # not the end of the line
    return opening


def _closing(line: str, opening: int) -> int:
    """Where the bracket that opens at `opening` closes."""
    depth = 0
    for index, char in _code(line):
        if index >= opening:
            depth += (char in "([{") - (char in ")]}")
            if depth == 0:
                return index
    return len(line)


def _code(text: str) -> Iterator[tuple[int, str]]:
    """The characters of `text` outside of string literals, with their indices."""
    quote, escaped = "", False
    for index, char in enumerate(text):
        if quote:
            closes = char == quote and not escaped
            escaped = char == "\\" and not escaped
            quote = "" if closes else quote
        elif char in "\"'":
            quote = char
        else:
            yield index, char
