"""Data ranks that do not wait for each other: a server for each row, and one order of arrivals.

    data 1   step 0 ──► bell, gradient            step 1 on what it got ──► ...
                            │         ▲ weights
    data 0   server  [1] ───▼── [2] ──┘ [3]       order of arrivals: 1, 0, 1, ...
                            ▲         │ weights
    data 0   step 0 ────────┘         └─► step 1 ...

The first rank of each data row has the weights, the states of the optimizer, and a thread that is
the server of the row (Dean et al. 2012, Downpour SGD). [1] The server of rank 0 decides in which
order the steps of the data ranks count, and tells the others, so that all rows and stages have one
order: a version of the weights is that of the whole model, and tensor ranks and tied tensors agree.
[2] A gradient is applied to the weights as they are then, with the options of its rank's optimizer.
[3] A data rank gets the weights after its own update or, if it is more than `staleness` steps ahead
of the slowest, after the update that brings it back within that bound (Ho et al. 2013, stale
synchronous parallel). So everything follows from the order of arrivals, which is recorded: one
process can repeat a run to the bit.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import nn

from parcompiler.runtime.axis import flattened, unflattened
from parcompiler.runtime.channels import Channels
from parcompiler.runtime.failure import Watch
from parcompiler.runtime.mixed_precision import Masters, wide_dtype
from parcompiler.runtime.program import RankProgram

GRACE = 2.0  # s that threads have to end
POLL = 0.2  # s between two checks whether the run has failed
SETTLED = -1  # in the record: all data ranks get the weights as they are
END = -1  # in the messages of servers: no data rank steps any more
BELL, ORDER, HEADER, GRADIENT, WEIGHTS = range(10, 15)  # tags
GOES_ON, LEAVES = 1, 0  # contents of a bell


class Serving:
    """The steps of one rank through the servers.

    `parameters` are the trained ones, by name; `masters` are used by a server. On rank 0 `record`
    lists the data ranks in the order of their steps.
    """

    def __init__(
        self,
        program: RankProgram,
        parameters: Mapping[str, nn.Parameter],
        masters: Masters,
        channels: Channels,
        watch: Watch,
        failed: Callable[[Exception], object],
        timeout: float,
    ) -> None:
        at, grid = program.coordinate, program.grid
        self._program, self._parameters, self._masters = program, parameters, masters
        self._channels, self._watch, self._failed = channels, watch, failed
        self._timeout = timeout
        self._leads, self._serves = program.rank == 0, at.data == 0
        self._home = grid.rank(at.pipeline, 0, at.tensor)
        self._ranks = grid.replicas((at.pipeline,), at.tensor)
        self._servers = [
            grid.rank(q, 0, t) for q in range(grid.pipeline) for t in range(grid.tensor)
        ]
        self._dtypes = list(dict.fromkeys(p.dtype for p in parameters.values()))
        self._clocks = [0] * program.data
        self._waiting: set[int] = set()
        self._lock = threading.Lock()
        self._bells: SimpleQueue[tuple[int, int] | Exception] = SimpleQueue()
        self._own: SimpleQueue[list[torch.Tensor]] = SimpleQueue()
        self._released: SimpleQueue[Exception | None] = SimpleQueue()
        self._stepper: torch.optim.Optimizer | None = None
        self._options: list[tuple[int, Any]] = []
        self.record = array("h")
        # The work of the server must not stand behind collectives of the main thread, in which
        # other ranks join only when this server has answered them.
        on_cuda = channels.device.type == "cuda"
        self._stream = torch.cuda.Stream(channels.device) if on_cuda else None
        self._thread = threading.Thread(target=self._serve, name="server", daemon=True)
        if self._serves:
            self._thread.start()
        self._listeners = [
            threading.Thread(target=self._listen, args=(r,), name="bell", daemon=True)
            for r in range(1, program.data)
            if self._leads
        ]
        for listener in self._listeners:
            listener.start()

    # Called by the main thread.

    def step_by(
        self, make: Callable[[], torch.optim.Optimizer], user: torch.optim.Optimizer
    ) -> None:
        """Let the server step with its own optimizer, which shares states and hooks with the
        user's."""
        self._options = [*_places(user)]  # before schedulers add theirs
        self._follow()
        if self._serves:
            self._stepper = make()
            self._stepper.state = user.state
            self._stepper._optimizer_step_pre_hooks = user._optimizer_step_pre_hooks
            self._stepper._optimizer_step_post_hooks = user._optimizer_step_post_hooks

    def exchange(self, optimizer: torch.optim.Optimizer, factor: torch.Tensor) -> None:
        """Send the server the gradients of a step, which it multiplies by `factor` in a 16-bit
        program, and the options of this rank's optimizer; then wait for the weights."""
        message = [self._header(optimizer, factor), *self._flat(self._gradients())]
        for parameter in self._parameters.values():
            parameter.grad = None
        if self._channels.is_first:
            self._ring(GOES_ON)
        if self._serves:
            self._own.put(message)
            self._await_release()
            with self._lock:
                _step_of_nothing(optimizer)
            return
        for tag, tensor in zip((HEADER, *[GRADIENT] * len(message)), message, strict=False):
            self._channels.send_beside(tensor, self._home, tag)
        weights = self._flat({name: p.detach() for name, p in self._parameters.items()})
        for tensor in weights:
            self._channels.receive_beside(tensor, self._home, WEIGHTS)
        self._fill(weights)
        _step_of_nothing(optimizer)

    @torch.no_grad()
    def settle(self) -> None:
        """Once all ranks are here, give all data ranks the current weights. A collective."""
        self._channels.gather_numbers(0)
        if self._serves:
            self._masters.write()
        named = {name: p.detach() for name, p in self._parameters.items()}
        weights = [tensor.to(self._channels.device) for tensor in self._flat(named)]
        for tensor in weights:
            self._channels.give(tensor, self._ranks, 0).wait()
        self._fill(weights)
        if self._leads and (not self.record or self.record[-1] != SETTLED):
            self.record.append(SETTLED)

    def finish(self) -> str:
        """Take no more steps; a server goes on until all data ranks are finished, or the run has
        failed. Returns an error text if none has stepped for too long though some are not
        closed."""
        if self._channels.is_first and not self._watch.cause:
            self._ring(LEAVES)
        made, since = sum(self._clocks), time.monotonic()
        while self._thread.is_alive() and not self._watch.cause:
            self._thread.join(POLL)
            if made != sum(self._clocks):
                made, since = sum(self._clocks), time.monotonic()
            elif time.monotonic() > since + self._timeout:
                steps = ", ".join(f"{r}: {n}" for r, n in enumerate(self._clocks))
                return (
                    f"the server waited {self._timeout:g} s for data ranks that neither step nor "
                    f"close their workers (steps by data rank: {steps})"
                )
        return ""

    def abandon(self) -> None:
        """End the threads of a worker that was not closed: a thread that still receives when Python
        exits would abort the process."""
        self._channels.abort()
        for thread in (self._thread, *self._listeners):
            if thread.is_alive():
                thread.join(GRACE)

    def _await_release(self) -> None:
        """Wait for this rank's server. Raises its error, or the cause of the run's failure."""
        while True:
            try:
                error = self._released.get(timeout=POLL)
            except Empty:
                if not self._watch.cause:
                    continue
                error = RuntimeError("the server of this rank lost its connection")
            if error is not None:
                raise error
            return

    def restore(self, _: str, record: torch.Tensor) -> None:
        """Continue from the record of a checkpoint, or an empty one, with other weights."""
        self.record = array("h", record.tolist())
        self._follow()

    def _follow(self) -> None:
        """Let the server see what the main thread has written."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._channels.device))

    # Run by threads.

    def _listen(self, r: int) -> None:
        """Queue the bells of data rank `r`."""
        try:
            bell = torch.full((1,), GOES_ON)
            while int(bell) == GOES_ON:
                self._channels.receive_beside(bell, self._program.grid.rank(0, r, 0), BELL)
                self._bells.put((r, int(bell)))
        except Exception as error:
            self._bells.put(error)

    @torch.no_grad()
    def _serve(self) -> None:
        """Apply the updates of one data rank after another."""
        try:
            with torch.cuda.stream(self._stream):  # None: on a CPU
                for r in self._arriving():
                    self._update(r)
        except Exception as error:
            self._failed(error)
            self._released.put(error)

    def _arriving(self) -> Iterator[int]:
        """The data ranks in the order of their steps."""
        if not self._leads:
            order = torch.zeros(1, dtype=torch.int64)
            while True:
                self._channels.receive_beside(order, 0, ORDER)
                if int(order) == END:
                    return
                yield int(order)
        left = 0
        while left < self._program.data:
            bell = self._bells.get()
            if isinstance(bell, Exception):
                raise bell
            if bell[1] == LEAVES:
                left += 1
                continue
            self._tell(bell[0])
            self.record.append(bell[0])
            yield bell[0]
        self._tell(END)

    def _tell(self, number: int) -> None:
        """Send the other servers a data rank, SETTLED or END."""
        for rank in self._servers[1:]:
            self._channels.send_beside(torch.tensor([number]), rank, ORDER)

    def _update(self, r: int) -> None:
        """Step with the gradients of data rank `r`; send weights to the data ranks that this
        releases."""
        if r == 0:
            message = self._own.get()
        else:
            # The main thread may be in a backward: no gradient of its parameters may be looked at.
            numbers = 1 + len(self._parameters) + len(self._options)
            named = self._parameters.items()
            flats = self._flat({n: p.new_empty(p.shape, dtype=wide_dtype(p)) for n, p in named})
            message = [torch.zeros(numbers, dtype=torch.float64), *flats]
            for tag, tensor in zip((HEADER, *[GRADIENT] * len(flats)), message, strict=True):
                self._channels.receive_beside(tensor, self._ranks[r], tag)
        assert self._stepper is not None, "a gradient comes from a rank that has an optimizer"
        with self._lock:
            self._take(message)
            self._stepper.step()
            self._stepper.zero_grad()
        self._clocks[r] += 1
        self._waiting.add(r)
        for k in released(self._clocks, self._waiting, self._program.updates.staleness):
            if k == 0:
                self._masters.write()
                if self._stream is not None:
                    self._stream.synchronize()
                self._released.put(None)
                continue
            weights = {n: self._masters.by_name[n].to(p.dtype) for n, p in self._parameters.items()}
            for tensor in self._flat(weights):
                self._channels.send_beside(tensor, self._ranks[k], WEIGHTS)

    # Messages: a header of float64 numbers, and for each dtype one tensor.

    def _gradients(self) -> dict[str, torch.Tensor]:
        """The gradients by name, zeros for parameters without."""
        named = self._parameters.items()
        return {
            n: torch.zeros_like(p, dtype=wide_dtype(p)) if p.grad is None else p.grad
            for n, p in named
        }

    def _header(self, optimizer: torch.optim.Optimizer, factor: torch.Tensor) -> torch.Tensor:
        """The factor, flags of parameters with gradients, and the numeric options of the
        optimizer."""
        present = [float(p.grad is not None) for p in self._parameters.values()]
        numbers = [_number(optimizer.param_groups[k], key) for k, key in self._options]
        return torch.tensor([float(factor), *present, *numbers], dtype=torch.float64)

    def _take(self, message: Sequence[torch.Tensor]) -> None:
        """Set gradients of masters and options of the server's optimizer from a message."""
        factor, *numbers = message[0].tolist()
        present, options = numbers[: len(self._parameters)], numbers[len(self._parameters) :]
        pieces = self._pieces(message[1:])
        for is_present, (name, gradient) in zip(present, pieces.items(), strict=True):
            if is_present:
                master = self._masters.by_name[name]
                master.grad = gradient.to(master.dtype, copy=True)
                if self._program.narrow is not None:
                    master.grad.mul_(factor)
        assert self._stepper is not None
        for (k, key), number in zip(self._options, options, strict=True):
            _set(self._stepper.param_groups[k], key, number)

    def _flat(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Tensors by name, in the order of the parameters, as one for each dtype, on the CPU."""
        named = self._parameters.items()
        by_dtype = ([tensors[n] for n, p in named if p.dtype == dtype] for dtype in self._dtypes)
        return [flattened(same).cpu() for same in by_dtype]

    def _pieces(self, flats: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Inverse of `_flat`: the tensors by name."""
        pieces = dict[str, torch.Tensor]()
        for dtype, flat in zip(self._dtypes, flats, strict=True):
            same = {n: p.detach() for n, p in self._parameters.items() if p.dtype == dtype}
            tensors = unflattened(flat.to(self._channels.device), same.values())
            pieces |= dict(zip(same, tensors, strict=True))
        return {name: pieces[name] for name in self._parameters}

    @torch.no_grad()
    def _fill(self, weights: Sequence[torch.Tensor]) -> None:
        """Copy received weights into the parameters."""
        for name, piece in self._pieces(weights).items():
            self._parameters[name].copy_(piece)

    def _ring(self, bell: int) -> None:
        """Tell rank 0 that this data rank has made a step, or makes no more."""
        if self._leads:
            self._bells.put((0, bell))
        else:
            self._channels.send_beside(torch.tensor([bell]), 0, BELL)


def released(clocks: Sequence[int], waiting: set[int], staleness: int) -> list[int]:
    """Take the data ranks that may go on (within `staleness` of the slowest) out of `waiting`.

    >>> waiting = {0, 1}
    >>> released([3, 1, 0], waiting, 2), waiting
    ([1], {0})
    """
    released_ranks = sorted(k for k in waiting if clocks[k] - min(clocks) <= staleness)
    waiting.difference_update(released_ranks)
    return released_ranks


def _step_of_nothing(optimizer: torch.optim.Optimizer) -> None:
    """An empty optimizer step, which schedulers expect; hooks run on the server only."""
    before, behind = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
    try:
        optimizer.step()
    finally:
        optimizer._optimizer_step_pre_hooks = before
        optimizer._optimizer_step_post_hooks = behind


def _places(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Any]]:
    """Group and key of each numeric option of an optimizer."""
    for k, group in enumerate(optimizer.param_groups):
        for key in sorted(group.keys() - {"params"}):
            value = group[key]
            if isinstance(value, tuple):
                yield from ((k, (key, n)) for n, one in enumerate(value) if _is_number(one))
            elif _is_number(value):
                yield k, key


def _is_number(value: object) -> bool:
    return isinstance(value, torch.Tensor | int | float) and not isinstance(value, bool)


def _number(group: Mapping[str, Any], key: Any) -> float:
    """The numeric option at a key of `_places`."""
    return float(group[key[0]][key[1]] if isinstance(key, tuple) else group[key])


def _set(group: dict[str, Any], key: Any, number: float) -> None:
    """Set the numeric option at a key of `_places`."""
    if isinstance(key, tuple):
        name, k = key
        group[name] = (*group[name][:k], number, *group[name][k + 1 :])
    elif isinstance(group[key], torch.Tensor):
        group[key].fill_(number)
    else:
        group[key] = type(group[key])(number)
