"""The collectives of a group, one after another, beside what the rank computes.

    main     S i │ EXCHANGE i │ REDUCE x.grad i │ T i-1 ──────│ FORWARD ─────── │ BACKWARD i
    turns           gather ─────► factors, sum ───────────────►                  ▲ wait

Some of them need what the one before brought. The rank does not wait for that itself: on a CPU a
thread gives each its turn and computes what lies between, on a GPU a stream does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

Started = tuple[Any, dist.Work | None]  # what is there when the work is done
Start = Callable[[], Started]


class Turn(Protocol):
    """Something that was given its turn."""

    def wait(self) -> Any:
        """Come back when it is done, with what it brought."""
        ...


@dataclass(frozen=True, slots=True)
class Here:
    """What needs no waiting for."""

    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The tensor."""
        return self.tensor


class Turns(Protocol):
    """What gives turns, in the order in which it is asked."""

    def give(self, start: Start) -> Turn:
        """Start something once all before it is done, and wait for its work beside the compute."""
        ...

    def flush(self) -> None:
        """Wait until all is done."""
        ...

    def close(self) -> None:
        """Give up what is not done, and let go of its work."""
        ...


def turns_on(device: torch.device, failed: Callable[[Exception], object]) -> Turns:
    """Turns beside the compute of a device. `failed` is told when one fails: the rank may wait for
    something else, which then never comes."""
    return _Stream(device) if device.type == "cuda" else _Thread(failed)


class _Promise:
    """A turn of the thread."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._found: Any = None
        self._error: BaseException | None = None

    def keep(self, found: Any, error: BaseException | None = None) -> None:
        """Say what became of it."""
        self._found, self._error = found, error
        self._done.set()

    def wait(self) -> Any:
        """What it brought; raises what it failed with."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._found


class _Thread:
    """A thread of its own, started when it is needed first. Behind a turn that fails, all do."""

    def __init__(self, failed: Callable[[Exception], object]) -> None:
        self._failed = failed
        self._queue: SimpleQueue[tuple[Start, _Promise] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _Promise | None = None

    def give(self, start: Start) -> Turn:
        """Put it into the queue."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="turns", daemon=True)
            self._thread.start()
        self._last = _Promise()
        self._queue.put((start, self._last))
        return self._last

    def flush(self) -> None:
        """Wait for the last."""
        if self._last is not None:
            self._last.wait()
            self._last = None

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    @torch.no_grad()
    def _run(self) -> None:
        """Take one after another."""
        failure: Exception | None = None
        while (item := self._queue.get()) is not None:
            start, promise = item
            if failure is None:
                try:
                    promise.keep(_taken(start))
                except Exception as error:
                    failure = error
                    promise.keep(None, error)
                    self._failed(error)
            else:
                promise.keep(None, failure)
            del item, start, promise


def _taken(start: Start) -> Any:
    """Start it, and wait for its work."""
    found, work = start()
    if work is not None:
        work.wait()
    return found


class _Event:
    """A turn of the stream."""

    def __init__(self, found: Any, event: torch.cuda.Event) -> None:
        self._found, self._event = found, event

    def wait(self) -> Any:
        """What it brought, for what the current stream does from now on."""
        stream = torch.cuda.current_stream()
        stream.wait_event(self._event)
        for tensor in self._found if isinstance(self._found, tuple) else (self._found,):
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(stream)
        return self._found


class _Stream:
    """A stream of its own; what a turn reads is held until it has been done."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._held: deque[tuple[torch.cuda.Event, Start]] = deque()

    @torch.no_grad()
    def give(self, start: Start) -> Turn:
        """Start it on the stream, behind what the current stream has been given."""
        while self._held and self._held[0][0].query():
            self._held.popleft()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            found, work = start()
            if work is not None:
                work.wait()  # the stream waits, this thread does not
            event = torch.cuda.Event()
            event.record(self._stream)
        self._held.append((event, start))
        return _Event(found, event)

    def flush(self) -> None:
        """Let the current stream wait for all."""
        torch.cuda.current_stream().wait_stream(self._stream)
        self._held.clear()

    def close(self) -> None:
        """Hold nothing."""
        self._held.clear()
