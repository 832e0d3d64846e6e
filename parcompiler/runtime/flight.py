"""The flight recorder of a rank: its last instructions, where its thread is now, and since when.

    main     FORWARD stage 0 mb 2 │ SEND h mb 2 to 1 │ RECV h.grad mb 0 from 1 ─ ─ waits ─ ─ ─ ─ >
    watch    ·              ·              ·  position: waiting at 'RECV ...' since 20:01:02

Noting an instruction appends it to a ring buffer, in less than a microsecond. Whether the thread
computes or waits for other ranks, and in whose code, is read off its stack on demand, once it has
been in one entry for long. The stack of a running thread must not be read: Python 3.11 crashes
where a frame is read while its locals are freed, and freeing tensors lets other threads run.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType

import torch

from parcompiler.instruction import Instruction

RECENT = 1000  # entries that are kept
STILL = 0.1  # s in one entry after which a stack may be read when the run ends anyway
_RUNTIME, _TORCH = str(Path(__file__).parent), str(Path(torch.__file__).parent)
_LIBRARY = sysconfig.get_path("stdlib")
_MESSAGING = (  # a thread that stays in these waits for other ranks
    f"{_TORCH}/distributed/",
    *(f"{_RUNTIME}/{name}.py" for name in ("axis", "channels", "collective_queue", "failure")),
    *(f"{_RUNTIME}/{name}.py" for name in ("asynchronous", "reduction", "zero")),
)


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is: `at` an instruction ("": at none) `since` seconds of the epoch, and whether
    it `waits` for other ranks. `code` is the innermost line that is neither torch's nor the
    runtime's."""

    at: str = ""
    since: float = 0.0
    waits: bool = False
    code: str = ""

    @property
    def seconds(self) -> float:
        """Seconds from `since` until now."""
        return time.time() - self.since

    def __str__(self) -> str:
        waiting = "waiting " if self.waits else ""
        at = f"at '{self.at}' " if self.at else ""
        code = f", in {self.code}" if self.code and not self.waits else ""
        return f"{waiting}{at}since {clock(self.since)}{code}"


class FlightRecorder:
    """The last instructions of a rank. When the run fails they are written into `folder`, if there
    is one."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._ring: deque[tuple[float, Instruction | str, bool]] = deque(maxlen=RECENT)
        self._thread = threading.get_ident()
        self.called = "its start"  # the call that the thread is in, or was in last
        self._computed = 0.0  # when the thread was last seen computing
        self.note("start")

    def note(self, line: Instruction | str, awaited: bool = False) -> None:
        """The rank begins an instruction, or a part of a call; `awaited`: it waits for what an
        earlier instruction has started."""
        self._ring.append((time.monotonic(), line, awaited))

    def call(self, text: str) -> None:
        """The calling thread begins a call, or continues it."""
        self._thread = threading.get_ident()
        self.called = text
        self.note(text)

    @property
    def current(self) -> Instruction | None:
        """The instruction that the rank is in, if it is in one."""
        line = self._ring[-1][1]
        return None if isinstance(line, str) else line

    @property
    def place(self) -> str:
        """Where this rank is: at an instruction, or in a call that is at none."""
        return f"in {self.called}" if self.current is None else f"at '{self.current}'"

    def position(self, after: float = STILL) -> Position:
        """Where the thread of the rank is now, and since when. Its stack is read once it has been
        in one entry for `after` seconds; before, the entry alone says whether it waits. A wait in
        an instruction that computes counts from when the thread was last seen to compute."""
        begin, line, awaited = self._ring[-1]
        frame, now = self._frame(after), time.monotonic()
        waits, code = (awaited, "") if frame is None else _reading(frame)
        if frame is not None and not waits:
            self._computed = now
        since = max(begin, self._computed) if waits else begin
        at = "" if isinstance(line, str) else str(line)
        return Position(at, time.time() - (now - since), waits, code)

    def write(self, rank: int, cause: str) -> Path | None:
        """Write position, cause and instructions into the folder, under the rank's number. Returns
        the file; None if there is no folder or it cannot be written."""
        if self.folder is None:
            return None
        path = Path(self.folder) / f"rank_{rank}.txt"
        frame = self._frame(STILL)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "  (running)\n"
        now = clock(time.time(), "%Y-%m-%d %H:%M:%S")
        head = f"rank {rank}, {now}: {cause}\n\nThe stack of its thread:\n{stack}\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{head}When its last instructions began, and their seconds:\n{self}\n")
        except OSError:
            return None
        return path

    def _frame(self, after: float) -> FrameType | None:
        """The innermost frame of the thread; None while it must not be read."""
        stands = time.monotonic() - self._ring[-1][0] >= after
        if stands or self._thread == threading.get_ident():
            return sys._current_frames().get(self._thread)
        return None

    def __str__(self) -> str:
        """The instructions, one a line, the newest last."""
        entries, offset = [*self._ring], time.time() - time.monotonic()
        ends = [*(begin for begin, _, _ in entries[1:]), time.monotonic()]
        lines = [f"{'await ' if awaited else ''}{line}" for _, line, awaited in entries]
        return "\n".join(
            f"{clock(begin + offset, '%H:%M:%S.%f')} {end - begin:11.6f}  {line}"
            for (begin, _, _), end, line in zip(entries, ends, lines, strict=True)
        )


def clock(epoch: float, form: str = "%H:%M:%S") -> str:
    """Seconds of the epoch as this machine's time of day."""
    return datetime.fromtimestamp(epoch).astimezone().strftime(form)


def _reading(frame: FrameType | None) -> tuple[bool, str]:
    """Whether a thread waits for other ranks, and the innermost line of others' code."""
    waits: bool | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        library = file.startswith((f"{_LIBRARY}/", "<")) and "site-packages" not in file
        if waits is None and not library:
            waits = file.startswith(_MESSAGING)
        if not library and not file.startswith((f"{_RUNTIME}/", f"{_TORCH}/")):
            code = f"{frame.f_code.co_qualname} ({Path(file).name}:{frame.f_lineno})"
            return bool(waits), code
        frame = frame.f_back
    return bool(waits), ""
