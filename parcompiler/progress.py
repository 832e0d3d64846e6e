"""A progress line on stderr while the compiler works; silent in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.status import Status


class Progress:
    """Names each step while it runs, when stderr is a terminal."""

    def __init__(self, wanted: bool) -> None:
        self._status: Status | None = None
        if wanted and sys.stderr.isatty():
            self._status = Console(stderr=True).status("parcompiler")

    def __enter__(self) -> Progress:
        """Start showing."""
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop showing."""
        if self._status is not None:
            self._status.stop()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Show `name` while the body runs."""
        if self._status is not None:
            self._status.update(f"parcompiler: {name}")
        yield
