"""`diff` and `report`: the commands that read what others have written."""

from __future__ import annotations

import json
from pathlib import Path

import click

from parcompiler.cli import options, output
from parcompiler.cli.faults import DONE, Settings


@click.command("diff", short_help="Say how two plans differ.")
@click.argument("before", type=options.PATH)
@click.argument("after", type=options.PATH)
@options.common
def diff_command(before: Path, after: Path, form: str) -> int:
    """Say in words how two plans differ, and what that does to time and memory.

    BEFORE and AFTER are files of `plan --json` or `plan --format json`, or exported folders.

    \b
    parcompiler plan model.py:make --mesh pipeline=4 --json a.json
    parcompiler plan model.py:make --mesh pipeline=4 --recompute full --json b.json
    parcompiler diff a.json b.json
    """
    from parcompiler.changes import Comparison, read

    comparison = Comparison.of(read(before), read(after))
    if form == "json":
        output.show_json(comparison.data())
    else:
        output.show(str(comparison))
    return DONE


@click.command("report", short_help="Show the report of an exported folder.")
@click.argument("folder", type=options.PATH)
@options.pictures
@options.common
@click.pass_obj
def report_command(
    settings: Settings, /, folder: Path, html: Path | None, trace: Path | None, form: str
) -> int:
    """Show the report of an exported FOLDER again; the model is not needed.

    \b
    parcompiler report out/
    parcompiler report out/ --html report.html --trace step.trace.json
    """
    from parcompiler.cli.commands import draw
    from parcompiler.loaded import load

    for path in (html, trace):
        output.check_file(path)
    report = load(folder).report()
    draw(report, html, trace, settings)
    if form == "json":
        output.show_json(json.loads(report.to_json()))
    else:
        output.show(str(report))
    return DONE
