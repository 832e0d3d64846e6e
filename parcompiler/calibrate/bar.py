"""How far the measuring is, as a bar on stderr when that is a terminal; silent in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Step = Callable[[int, str], None]  # shows how many works are done, and which comes next


@contextmanager
def bar(total: int, wanted: bool) -> Iterator[Step]:
    """Show a bar of `total` works while the body runs."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda done, next_work: None
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    # standard output stays that of the program: what is printed there may go into a pipe
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=False) as shown:
        task = shown.add_task("", total=total)
        yield lambda done, next_work: shown.update(task, completed=done, description=next_work)
