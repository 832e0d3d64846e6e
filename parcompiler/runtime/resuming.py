"""The checkpoints of an emitted script: where it resumes, when it saves, and what preemption does.

    SIGTERM or Ctrl-C on any rank ─► the step ends ─► all ranks save ─► exit code 143 or 130

Those are the exit codes of a process ended by the signal (128 + 15), which schedulers restart.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from parcompiler.errors import InputError
from parcompiler.runtime.checkpoint.folder import begun, find
from parcompiler.runtime.checkpoint.saving import check_keep
from parcompiler.runtime.worker import Worker

SIGNALS = (signal.SIGTERM, signal.SIGINT)
AUTO = Path("auto")  # in place of a checkpoint: the newest of the run


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a command line."""
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save", type=path, metavar="DIR", help="save checkpoints into this folder")
    group.add_argument(
        "--every",
        type=positive,
        metavar="N",
        help="save after every N-th step, too; otherwise at the end, and when SIGTERM comes",
    )
    group.add_argument("--keep", type=positive, metavar="K", help="keep the newest K (all)")
    group.add_argument(
        "--resume",
        type=path,
        metavar="auto|PATH",
        help="go on from a checkpoint, or the newest in a folder; auto: from the newest in DIR, "
        "or from the beginning where there is none",
    )
    # The process that started the ranks holds the lock of DIR for them.
    group.add_argument("--locked", action="store_true", help=argparse.SUPPRESS)


def check(options: argparse.Namespace) -> None:
    """Refuse options that no run can have. Raises InputError."""
    check_keep(options.keep)
    for name in ("every", "keep"):
        if getattr(options, name) is not None and options.save is None:
            message = f"--{name} needs --save DIR"
            raise InputError(message)
    if options.resume == AUTO and options.save is None:
        message = "--resume auto needs --save DIR, whose newest checkpoint it takes"
        raise InputError(message)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock a folder for one run at a time. Raises InputError while another holds it.

    The system releases the lock when the process ends in any way. Without locks, or if other
    machines do not see them, two runs are not detected.
    """
    try:
        import fcntl
    except ImportError:  # Windows has none
        yield
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(held)
        raise InputError(_taken(folder)) from error
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(held)


def _taken(folder: Path) -> str:
    """The message where another run holds the lock."""
    return f"another run writes into {folder}: wait until it ends, or give another --save"


class Run:
    """The checkpoints of one worker's training."""

    def __init__(self, worker: Worker, options: argparse.Namespace) -> None:
        self._worker, self._options = worker, options
        self._told = 0  # the signal that asks for the end
        self._saved = -1  # the step of the last checkpoint
        if options.save is not None:
            worker.check_folder(options.save)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """In this context rank 0 holds the lock of the run's folder, unless whoever started the
        ranks does. Collective; raises InputError on all ranks while another run holds it."""
        with ExitStack() as held:
            taken, folder = False, self._options.save
            if folder is not None and self._worker.rank == 0 and not self._options.locked:
                try:
                    held.enter_context(alone(folder))
                except InputError:
                    taken = True
            if folder is not None and self._worker.any_rank(taken):
                raise InputError(_taken(folder))
            yield

    def resume(self) -> None:
        """Load the checkpoint or weights that the options name."""
        source = self._options.resume
        if source == AUTO:
            folder = self._options.save
            exists = self._worker.rank == 0 and begun(folder)
            source = folder if self._worker.any_rank(exists) else None
        if source is not None:
            step = self._worker.load(source)
            self._saved = step
            if self._worker.rank == 0:
                print(f"going on from step {step} of {find(source)}", flush=True)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """In this context the first SIGTERM or SIGINT asks for a checkpoint; a second one ends the
        process."""
        if self._options.save is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}

        def end(number: int, _: object) -> None:
            self._told = number
            for each, handler in before.items():
                signal.signal(each, handler)

        for number in SIGNALS:
            signal.signal(number, end)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def after_step(self) -> None:
        """Save if it is time. Raises SystemExit on all ranks if any got a signal."""
        if self._options.save is None:
            return
        step = self._worker.step_count
        told = max(number for (number,) in self._worker.gather_numbers(self._told))
        if told or (self._options.every is not None and step % self._options.every == 0):
            self._save()
        if told and step < self._options.steps:
            if self._worker.rank == 0:
                print(f"told to end: saved after step {step}", flush=True)
            raise SystemExit(128 + told)

    def end(self) -> None:
        """Save the last steps, unless that is done."""
        if self._options.save is not None and self._saved != self._worker.step_count:
            self._save()

    def _save(self) -> None:
        self._worker.save(self._options.save, keep=self._options.keep)
        self._saved = self._worker.step_count


def _integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """A reader of integers of the command line within bounds."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError as error:
            message = f"must be an integer ({text!r} given)"
            raise argparse.ArgumentTypeError(message) from error
        if number < least:
            message = f"must be at least {least} ({text!r} given)"
            raise argparse.ArgumentTypeError(message)
        if most is not None and number > most:
            message = f"must be at most {most} ({text!r} given)"
            raise argparse.ArgumentTypeError(message)
        return number

    return read


positive, natural = _integer(1), _integer(0)
seed = _integer(0, 2**63 - 1)  # that torch takes


def amount(text: str) -> float:
    """A number of the command line that is not negative, and may be a fraction."""
    number = _real(text)
    if not 0 <= number < math.inf:  # nan is not
        message = f"must be at least 0, and finite ({text!r} given)"
        raise argparse.ArgumentTypeError(message)
    return number


def above_zero(text: str) -> float:
    """A positive number of the command line, which may be a fraction."""
    number = _real(text)
    if not number > 0:  # nan is not
        message = f"must be above 0 ({text!r} given)"
        raise argparse.ArgumentTypeError(message)
    return number


def path(text: str) -> Path:
    """A path of the command line; an empty one would be the current folder."""
    if not text:
        message = "is empty: write . for the current folder"
        raise argparse.ArgumentTypeError(message)
    return Path(text)


def _real(text: str) -> float:
    """A number of the command line."""
    try:
        return float(text)
    except ValueError as error:
        message = f"must be a number ({text!r} given)"
        raise argparse.ArgumentTypeError(message) from error
