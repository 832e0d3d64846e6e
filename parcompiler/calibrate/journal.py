"""Measurements on disk, line by line as they are made: an interrupted run loses nothing.

    {"machine": "…", "seconds": 0.0021, "work": "matmul float32 512x512 512x512"}

Lines of other machines are kept but not used; a line cut off by an interruption is ignored.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from parcompiler import documents
from parcompiler.errors import InputError


class Journal:
    """The measurements of one machine in a file."""

    def __init__(self, path: Path, machine: str, *, fresh: bool = False) -> None:
        """Read the file; `fresh` forgets its measurements. Raises InputError when it cannot be
        read."""
        self.path, self.machine = path, machine
        self._seconds: dict[str, float] = {}
        try:
            if fresh:
                path.unlink(missing_ok=True)
            text = documents.text_of(path) if path.exists() else ""
        except (OSError, InputError) as error:
            message = f"cannot read the measurements in {path} ({error}): move the file away"
            raise InputError(message) from error
        for line in text.splitlines():
            self._read(line)
        self._torn = bool(text) and not text.endswith("\n")

    def get(self, work: str) -> float | None:
        """The seconds of a workload; None if not measured."""
        return self._seconds.get(work)

    def __len__(self) -> int:
        """The number of measurements of this machine."""
        return len(self._seconds)

    def add(self, work: str, seconds: float) -> None:
        """Add a measurement; it is on disk when this returns."""
        line = {"machine": self.machine, "work": work, "seconds": seconds}
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write("\n" * self._torn + json.dumps(line, sort_keys=True) + "\n")
        self._torn = False
        self._seconds[work] = seconds

    def _read(self, line: str) -> None:
        try:
            entry = documents.parse(line, "measurement")
        except InputError:
            return
        match entry:
            case {"machine": self.machine, "work": str(work), "seconds": float(seconds)}:
                if math.isfinite(seconds) and seconds > 0:
                    self._seconds[work] = seconds
