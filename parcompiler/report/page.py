"""The text of a report as HTML: a page of its own, and a piece for notebooks."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from rich.terminal_theme import TerminalTheme

from parcompiler.report.names import clean
from parcompiler.report.overview import title
from parcompiler.report.render import recorded

if TYPE_CHECKING:
    from parcompiler.report.report import Report

WIDTH = 120

# Tones that can be read on white and on black: the page takes both from the reader's system.
_BLACK, _RED, _GREEN, _YELLOW = (64, 64, 64), (214, 69, 65), (38, 145, 85), (176, 125, 20)
_BLUE, _MAGENTA, _CYAN, _WHITE = (58, 128, 210), (168, 85, 199), (31, 145, 160), (160, 160, 160)
_TONES = [_BLACK, _RED, _GREEN, _YELLOW, _BLUE, _MAGENTA, _CYAN, _WHITE]
TONES = TerminalTheme((255, 255, 255), (0, 0, 0), _TONES, _TONES)

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 2em auto; width: fit-content; max-width: 96vw; }}
pre {{ font: 14px/1.35 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  overflow-x: auto; }}
{stylesheet}</style>
</head>
<body>
<pre>{code}</pre>
</body>
</html>
"""
FRAGMENT = '<pre style="line-height: 1.35; overflow-x: auto">{code}</pre>'


def page(report: Report) -> str:
    """A page that needs no other file."""
    console = recorded(report, WIDTH)
    return PAGE.format(
        title=html.escape(clean(title(report))),
        stylesheet=console.export_html(theme=TONES, code_format="{stylesheet}", clear=False),
        code=console.export_html(theme=TONES, code_format="{code}"),
    )


def fragment(report: Report) -> str:
    """The same for the middle of another page."""
    console = recorded(report, WIDTH)
    return console.export_html(theme=TONES, code_format=FRAGMENT, inline_styles=True)
