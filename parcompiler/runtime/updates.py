"""From gradients to parameters on one rank: unscale, clip, optimizer, masters.

begin ─► backward of loss * scale ─► clip ─► finite? ─ yes ─► optimizer ─► 16-bit parameters
                                                └───── no: all ranks skip the step together

The norm is that of all gradients of the model, from ranks that hold copies and pieces of them:

    rank 0   a: piece   b: whole   t: tied      a rank counts its piece of a tensor, its rows of the
    rank 1   a: piece   b ✗        t ✗          vocabulary without padding, and what all ranks of a
    rank 2   c          t ✗                     tensor-parallel or data group, or a tie, have alike
                                                if it is the first

One number is summed over all ranks, and every rank has the same norm to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from parcompiler.errors import InputError, shown
from parcompiler.instruction import Kind
from parcompiler.runtime.asynchronous import Serving
from parcompiler.runtime.flight import FlightRecorder
from parcompiler.runtime.groups import (
    GroupOf,
    Groups,
    Patterns,
    check_kind,
    check_takes_rows,
    is_coupling,
)
from parcompiler.runtime.mixed_precision import LossScale, Masters, sum_in_float32
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.rounds import Rounds
from parcompiler.runtime.vocabulary import VocabularyRows
from parcompiler.runtime.zero import ELEMENTWISE, DataParts, is_elementwise

EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_


class Updates:
    """The optimizer of one rank, over its `parameters` by name.

    `total` sums a tensor over all ranks in place. `norm` is that of this step's gradients before
    clipping, once it is known; `scale` is that of the loss, for float16. `updated` are the
    parameters that this rank updates, itself or through masters: with `parts` these are rows. The
    caller sets `rounds`, where data ranks step by themselves, or `serving`, where a server does.
    """

    def __init__(
        self,
        program: RankProgram,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device,
        total: Callable[[torch.Tensor], None],
        parts: DataParts | None = None,
        flight: FlightRecorder | None = None,
    ) -> None:
        self._parts = parts
        self._flight = flight or FlightRecorder()
        self.scale = LossScale() if program.narrow == torch.float16 else None
        self.norm: torch.Tensor | None = None
        self._program, self._parameters = program, parameters
        # Gradients of parameters in `parts` are accumulated there.
        in_pieces = parts.parameters if parts is not None and parts.level > 1 else {}
        sum_in_float32(
            parameter
            for name, parameter in self.trained().items()
            if parameter.dtype == program.narrow and name not in in_pieces
        )
        self._share_out()
        self._device, self._total = device, total
        self._optimizer: torch.optim.Optimizer | None = None
        self._max_norm: float | None = None
        self.error_if_nonfinite = False
        self.handed_out = False  # parameters, which the user may write to
        self._pushes = [x for x in program.instructions if x.kind is Kind.PUSH_PULL]
        self._factor = self._ones()  # times `grad` is the gradient, with masters
        self._agree = self._ones().bool()  # whether all ranks have the same scale
        self.rounds: Rounds | None = None
        self.serving: Serving | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer. Raises InputError where there is none."""
        if self._optimizer is None:
            message = "call worker.set_optimizer(torch.optim.AdamW, lr=...) before train_step"
            raise InputError(message)
        return self._optimizer

    def options(self) -> dict[str, str]:
        """What the optimizer's groups are set to, by group and name, where all ranks with the same
        parameters must have the same: not where data ranks train on their own for a while."""
        if self._optimizer is None or self.rounds is not None or self.serving is not None:
            return {}
        return {
            f"{name!r} of group {number}": repr(
                value.tolist() if isinstance(value, torch.Tensor) else value
            )
            for number, group in enumerate(self._optimizer.param_groups)
            for name, value in group.items()
            if isinstance(value, bool | int | float | str | tuple | torch.Tensor)
        }

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange norms or finiteness in `apply`."""
        return self.scale is not None or self._max_norm is not None or self.error_if_nonfinite

    def set_optimizer(
        self,
        kind: Callable[..., torch.optim.Optimizer],
        max_norm: float | None,
        options: Mapping[str, Any],
        *,
        error_if_nonfinite: bool = False,
        elementwise: bool | None = None,
        groups: Patterns | GroupOf | None = None,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
    ) -> torch.optim.Optimizer:
        """Make the optimizer; every step clips the gradients to `max_norm` if there is one.
        `elementwise` says whether it works element by element (None: by its class); `gather`
        returns the values of all ranks, which agree on `groups`."""
        check_kind(kind)
        if tables := sorted(self.trained().keys() & self._program.row_gradients.keys()):
            check_takes_rows(kind, tables, options)
        elementwise = is_elementwise(kind) if elementwise is None else elementwise
        if not elementwise:
            self._check_whole(kind)
        if max_norm is not None:
            max_norm = _checked_norm(max_norm)
        if self._program.asynchronous and (max_norm is not None or error_if_nonfinite):
            message = "pipedream updates stage by stage: its gradients have no common norm"
            raise InputError(message)
        if not elementwise:
            self._check_coupling(kind, options)
        groups_here = Groups(groups, self.trained(), gather)
        if self._parts is not None and not self._parts.suits(elementwise=elementwise):
            self._turn(self._parts)

        def make() -> torch.optim.Optimizer:
            optimizer = kind(groups_here.made(self.weights()), **options)
            if not isinstance(optimizer, torch.optim.Optimizer):
                message = f"an optimizer is needed: {kind!r} makes {shown(optimizer)}"
                raise InputError(message)
            optimizer.register_step_pre_hook(_lay_out_gradients)
            return optimizer

        self._optimizer = make()
        if self.serving is not None:
            self.serving.step_by(make, self._optimizer)
        self._max_norm = max_norm
        self.error_if_nonfinite = error_if_nonfinite
        return self._optimizer

    def begin(self) -> float:
        """Begin a step without gradients; returns the scale of the loss."""
        self._free()
        self.norm = None
        if self.rounds is not None:
            self.rounds.begin()
        scale = 1.0 if self.scale is None else self.scale.value
        self._factor = self._ones() / scale
        return scale

    def adopt(self) -> None:
        """Copy what the user has written into masters to 16-bit parameters, or the other way round.
        (With a server parameters are copies of its masters.)"""
        if self.serving is None:
            self.masters.adopt(parameters=self.handed_out)

    @torch.no_grad()
    def swap(self, key: str) -> None:
        """Swap the weights with a state that the optimizer has of each. A collective of the data
        ranks where each has rows of them. Raises InputError where no weight has that state."""
        states, swapped = self.optimizer.state, False
        for weight in self.weights().values():
            if key in states.get(weight, {}):
                before = weight.detach().clone()
                weight.copy_(states[weight][key])
                states[weight][key].copy_(before)
                swapped = True
        if not swapped and self.weights():
            message = f"the optimizer has no state {key!r} of the parameters of this rank"
            raise InputError(message)
        self.masters.write()
        for line in () if self._parts is None else self._parts.gather():
            self._flight.note(line)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients of the model to a norm. Returns the norm before. A collective."""
        max_norm = _checked_norm(max_norm)
        size = self._measured()
        coefficient = (max_norm / (size + EPSILON)).clamp(max=1.0)
        if self._program.narrow is None:
            for _, gradient in self._raw():
                gradient.mul_(coefficient)
        else:  # do not round 16-bit gradients again
            self._factor = self._factor * coefficient
        return size

    def apply(self) -> bool:
        """Update the parameters by the gradients of the step, and free the gradients.

        Returns whether they were updated, which is the same on all ranks.
        """
        optimizer = self.optimizer
        self.adopt()
        if self._max_norm is not None:
            self.clip(self._max_norm)
        good = self._is_good()
        if good and self.serving is not None:
            for line in self._pushes:
                self._flight.note(line)
            self.serving.exchange(optimizer, self._factor)
            self._free()
            return good
        if good:
            if self._program.narrow is not None:
                self.masters.take_gradients(self._factor)
            optimizer.step()
            for line in () if self.rounds is None else self.rounds.end():
                self._flight.note(line)
            self.masters.write()
        optimizer.zero_grad(set_to_none=True)
        self._free()
        for line in self._parts.gather() if good and self._parts is not None else ():
            self._flight.note(line)
        return good

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank that are trained, by name."""
        return {name: p for name, p in self._parameters.items() if p.requires_grad}

    def weights(self) -> dict[str, nn.Parameter]:
        """The tensors that the optimizer changes, by name: masters where there are some."""
        masters = self.masters.by_name
        updated = {name: masters.get(name, p) for name, p in self.updated.items()}
        return {name: weight for name, weight in updated.items() if weight.requires_grad}

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of `updated`, by name: unscaled, dense, and in float32 in a 16-bit
        program."""
        if self._program.narrow is None:
            return {name: g.to_dense() if g.is_sparse else g for name, g in self._raw()}
        wide = ((n, g.to(torch.promote_types(g.dtype, torch.float32))) for n, g in self._raw())
        return {name: (gradient * self._factor).to(gradient.dtype) for name, gradient in wide}

    def in_pieces(self, name: str) -> bool:
        """Whether each data rank has rows of a parameter, and nothing else of it."""
        return self._parts is not None and name in self._parts.in_pieces

    @torch.no_grad()
    def _turn(self, parts: DataParts) -> None:
        """Switch between sharing parameters out whole and in rows; masters keep their values."""
        before, narrow = self.masters.by_name, self._program.narrow
        trained = (n for n, p in parts.parameters.items() if p.dtype == narrow and p.requires_grad)
        wholes = parts.joined(before, dict.fromkeys(trained, torch.float32))
        parts.turn()
        self._share_out()
        for name, master in self.masters.by_name.items():
            shared = name in parts.parameters
            master.copy_(parts.rows(name, wholes[name]) if shared else before[name])

    def _check_whole(self, kind: Callable[..., torch.optim.Optimizer]) -> None:
        """Raise InputError where an optimizer would take a piece of a parameter for the whole."""
        program, trained = self._program, self.trained()
        pieces = sorted(name for name in trained if name in program.pieces)
        if pieces:
            message = (
                f"{getattr(kind, '__name__', kind)} is not known to work element by element, and "
                f"this rank has only pieces of {len(pieces)} parameters ({pieces[0]}), so that it "
                "would train otherwise than one process does: take one of torch.optim that does "
                f"({', '.join(sorted(ELEMENTWISE))}), pass elementwise=True if yours does, or "
                "compile with tensor=1, expert=1 and vocabulary='whole'"
            )
            raise InputError(message)

    def _check_coupling(
        self, kind: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]
    ) -> None:
        """Raise InputError where an optimizer computes something over all parameters, and ranks
        have different ones."""
        program, grid = self._program, self._program.grid
        several = grid.pipeline * grid.tensor * program.expert > 1 or self._parts is not None
        if several and is_coupling(kind, options):
            message = (
                f"{getattr(kind, '__name__', kind)} computes something over all of its parameters "
                "together, and each rank has only some of them: compile with data ranks alone and "
                "zero=0, or take an optimizer that updates each parameter by itself"
            )
            raise InputError(message)

    def _is_good(self) -> bool:
        """Whether to make the step, the same on all ranks; updates the scale. Raises InputError on
        all ranks if their scales differ, as gradients would be of different losses."""
        if self.scale is None and not self.error_if_nonfinite:
            return True
        size = self._measured() if self.norm is None else self.norm
        self.norm = size
        both = (size.isfinite() + 2 * self._agree).item()  # the host waits once
        finite = both % 2 == 1
        if self.scale is not None:
            if both < 2:
                message = (
                    f"loss_scale is {self.scale.value:g} on this rank and another one on others: "
                    "set it on all ranks alike"
                )
                raise InputError(message)
            self.scale.update(finite)
        return finite

    def _measured(self) -> torch.Tensor:
        """The 2-norm of the model's current gradients, a float64 scalar; the first one of a step is
        kept in `norm`. A collective.

        Each tensor's norm is computed in float32 (float64 for float64), their squares are added in
        float64. Rows that pad a vocabulary have zeros where data ranks have rows of their own.
        """
        program, rows = self._program, VocabularyRows(self._program)
        parts = () if self._parts is None else self._parts.parts
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for name, gradient in self._raw():
            shared = name in parts
            if _counts(program, name, part=shared):
                part = gradient if shared else rows.unpadded(name, gradient)
                part = part.coalesce().values() if part.is_sparse else part
                wide = torch.promote_types(part.dtype, torch.float32)
                squares += torch.linalg.vector_norm(part, dtype=wide).double().square()
        self._total_of(squares)
        size = squares.sqrt() if program.narrow is None else squares.sqrt() * self._factor
        self.norm = size if self.norm is None else self.norm
        return size

    def _total_of(self, squares: torch.Tensor) -> None:
        """Sum the squares over all ranks, in place, and note whether their scales are equal."""
        if self.scale is None:
            self._total(squares)
            return
        sums = squares.new_tensor([0.0, self.scale.value, 1.0])
        sums[0] = squares
        self._total(sums)
        squares.copy_(sums[0])
        self._agree = (sums[1] / sums[2] / self.scale.value - 1).abs() < 1e-9

    def _raw(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The gradients that backwards have made, by name."""
        for name, parameter in self.updated.items():
            if parameter.grad is not None:
                yield name, parameter.grad

    def _share_out(self) -> None:
        """Set `updated` to the parameters, or rows of them, that this rank updates, and make their
        masters."""
        self.updated = dict(self._parameters)
        if self._parts is not None:
            for name in self._parts.parameters:
                del self.updated[name]
            self.updated |= self._parts.parts
        served = self._program.updates.way == "asynchronous"
        serves = self._program.coordinate.data == 0 if served else None
        self.masters = Masters(self._program.narrow, self.updated, serves)

    def _free(self) -> None:
        """Free all gradients."""
        for parameter in (*self._parameters.values(), *self.updated.values()):
            parameter.grad = None

    def _ones(self) -> torch.Tensor:
        """The factor one."""
        return torch.ones((), dtype=torch.float64, device=self._device)


def _counts(program: RankProgram, name: str, *, part: bool) -> bool:
    """Whether this rank's copy or piece of a tensor counts in the norm; `part`: it is rows that no
    other data rank has."""
    at = program.coordinate
    first = at.data < program.expert if name in program.experts else not at.data
    if not first and not part and not program.updates.separate:
        return False
    if name in program.rows:
        return True
    first = at.pipeline == min(program.ties.get(name, (at.pipeline,)))
    return first and (at.tensor == 0 or name in program.shards)


@torch.no_grad()
def _lay_out_gradients(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Give gradients the strides of their parameters: the fused steps of torch.optim read the
    memory of both in order, whatever their strides are (in torch 2.13)."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided:
            continue
        if gradient.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(gradient)


def _checked_norm(max_norm: object) -> float:
    """The user's `max_norm`. Raises InputError unless it is a positive number."""
    number = isinstance(max_norm, int | float) and not isinstance(max_norm, bool)
    if not number or math.isnan(float(max_norm)) or float(max_norm) <= 0:  # type: ignore[arg-type]
        message = f"max_norm must be a positive number ({max_norm!r} given)"
        raise InputError(message)
    return float(max_norm)  # type: ignore[arg-type]
