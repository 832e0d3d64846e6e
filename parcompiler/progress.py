"""The steps of the compiler on stderr, each named and timed while it works; silent in a pipe.

✓ capture            3.1 s
✓ pass shard         0.9 s
⠋ pass schedule      1.4 s
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class Progress:
    """Names and times each step while it runs, when stderr is a terminal."""

    def __init__(self, wanted: bool) -> None:
        self._bar: Bar | None = None
        if wanted and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar
            from rich.progress import SpinnerColumn, TextColumn

            # standard output is left alone: it may go into a pipe
            self._bar = Bar(
                SpinnerColumn(finished_text="✓"),
                TextColumn("{task.description}", markup=False),
                TextColumn("{task.elapsed:7.1f} s"),
                console=Console(stderr=True),
                redirect_stdout=False,
            )

    def __enter__(self) -> Progress:
        """Start showing."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop showing; the steps and their times stay."""
        if self._bar is not None:
            self._bar.stop()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Show `name` and its seconds while the body runs; a tick once it is done."""
        if self._bar is None:
            yield
            return
        task = self._bar.add_task(name, total=1)
        yield
        self._bar.stop_task(task)  # so that its seconds stay
        self._bar.update(task, completed=1)
