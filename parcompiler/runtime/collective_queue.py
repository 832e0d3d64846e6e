"""The collectives of a group, one after another, beside the compute of the rank.

    main     S i │ EXCHANGE i │ REDUCE x.grad i │ T i-1 ──────│ FORWARD ─────── │ BACKWARD i
    queue           gather ─────► factors, sum ───────────────►                  ▲ wait

Some of them need the result of the one before. The main thread does not wait for that: on a CPU
another thread runs them and computes what lies between, on a GPU a stream does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

Started = tuple[Any, dist.Work | None]  # a result, valid when the work is done
Start = Callable[[], Started]


class Pending(Protocol):
    """A result of communication that may not be there yet."""

    def wait(self) -> Any:
        """Wait for the result, and return it."""
        ...


@dataclass(frozen=True, slots=True)
class Receipt:
    """A tensor that is valid after `wait`, or at once where there is no work."""

    tensor: torch.Tensor
    work: dist.Work | None = None

    def wait(self) -> torch.Tensor:
        """Wait for the tensor, and return it."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


@dataclass(slots=True)
class Arrival:
    """A running collective that occupies `nbytes` of memory; the first `wait` calls `then` at its
    end."""

    works: Sequence[Any]
    then: Callable[[], object] | None = None
    nbytes: int = 0

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Wait for it."""
        for work in self.works:
            work.wait()
        then, self.works, self.then = self.then, (), None
        if then is not None:
            with torch.no_grad():
                then()


class _Future(Future[Any]):
    """The result of a collective that the thread runs."""

    def wait(self) -> Any:
        """The result; raises the error that the collective failed with."""
        return self.result()

    def is_completed(self) -> bool:
        """Whether `wait` would return at once, as of a collective of torch."""
        return self.done()


class _Thread:
    """A queue run by a thread, a daemon as it may wait for a lost peer when the process ends.

    It starts when first needed. After a collective that fails, all fail.
    """

    def __init__(self, failed: Callable[[Exception], object]) -> None:
        self._failed = failed
        self._queue: SimpleQueue[tuple[Start, _Future] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _Future | None = None

    def put(self, start: Start) -> Pending:
        """Start a collective once all earlier ones are done; compute continues meanwhile."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="collectives", daemon=True)
            self._thread.start()
        self._last = _Future()
        self._queue.put((start, self._last))
        return self._last

    def flush(self) -> None:
        """Wait until all are done."""
        if self._last is not None:
            self._last.wait()
            self._last = None

    def close(self) -> None:
        """End the thread, after the collectives in the queue."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    @torch.no_grad()
    def _run(self) -> None:
        """Run the collectives one after another."""
        failure: Exception | None = None
        while (entry := self._queue.get()) is not None:
            start, future = entry
            if failure is None:
                try:
                    result, work = start()
                    if work is not None:
                        work.wait()
                    future.set_result(result)
                    del result, work  # nothing is kept while the queue is empty
                except Exception as error:
                    failure = error
                    future.set_exception(error)
                    self._failed(error)
            else:
                future.set_exception(failure)
            del entry, start, future


class _Event:
    """The result of a collective that the stream runs."""

    def __init__(self, result: Any, event: torch.cuda.Event) -> None:
        self._result, self._event = result, event

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return bool(self._event.query())

    def wait(self) -> Any:
        """The result, valid for later work of the current stream."""
        stream = torch.cuda.current_stream()
        stream.wait_event(self._event)
        for tensor in self._result if isinstance(self._result, tuple) else (self._result,):
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(stream)
        return self._result


class _Stream:
    """A queue run by a CUDA stream; the inputs of a collective stay in memory until it is done."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._in_flight: deque[tuple[torch.cuda.Event, Start]] = deque()

    @torch.no_grad()
    def put(self, start: Start) -> Pending:
        """Start a collective on the stream, after all work of the current stream so far."""
        while self._in_flight and self._in_flight[0][0].query():
            self._in_flight.popleft()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result, work = start()
            if work is not None:
                work.wait()  # the stream waits, this thread does not
            event = torch.cuda.Event()
            event.record(self._stream)
        self._in_flight.append((event, start))
        return _Event(result, event)

    def flush(self) -> None:
        """Let the current stream wait for all."""
        torch.cuda.current_stream().wait_stream(self._stream)
        self._in_flight.clear()

    def close(self) -> None:
        """Let go of all inputs."""
        self._in_flight.clear()


CollectiveQueue = _Thread | _Stream


def queue_on(device: torch.device, failed: Callable[[Exception], object]) -> CollectiveQueue:
    """A queue beside the compute of a device. `failed` is called when a collective fails: the rank
    may wait for something else, which then never comes."""
    return _Stream(device) if device.type == "cuda" else _Thread(failed)
