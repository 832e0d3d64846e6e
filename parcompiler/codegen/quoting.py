r"""Names from a model in comments, docstrings and Markdown: shown, and harmless.

>>> print(comment("attn\nimport os"), docstring('x"; import os; "'))
attn?import os x'; import os; '
>>> print(markdown("a|b <script> `c`"))
`a/b <script> 'c'`
"""

from __future__ import annotations

import textwrap

WIDTH = 100
LONGEST = 90  # of a name from a model; the rest of it is dropped


def comment(text: str) -> str:
    """Any text as a comment on one line."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def docstring(text: str) -> str:
    """Any text as the inside of a docstring on one line."""
    return _inside(comment(text))


def paragraph(text: str, indent: int = 0) -> str:
    """Any text as the inside of a docstring, broken into lines."""
    shown = _inside("".join(char if char.isprintable() else "?" for char in text))
    quotes = " " * 3  # before the first line and after the last
    lines = textwrap.wrap(shown, WIDTH - indent - 3, initial_indent=quotes, break_on_hyphens=False)
    return f"\n{' ' * indent}".join(lines).strip()


def _inside(text: str) -> str:
    """Text without quotes and backslashes, which could end a docstring."""
    return text.replace("\\", "/").replace('"', "'")


def markdown(text: str) -> str:
    """Any text as code in a table of Markdown, where neither HTML nor markup is read."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return "`" + (shown.replace("`", "'").replace("|", "/").strip() or " ") + "`"


def fenced(text: str) -> str:
    """Any text as the inside of a block of code in Markdown: no line of it can end the block."""
    return text.replace("```", "'''").replace("~~~", "---")
