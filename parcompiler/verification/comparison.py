"""Compares the outcome of the ranks with that of the original model, up to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from parcompiler.verification.pool import Outcome

LIMIT = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
ROUNDINGS = 4  # of the model's largest element: a smaller difference does not count
OWN_ROUNDINGS = 4  # times the model's own rounding: allowed for an ill-conditioned model


@dataclass(frozen=True, slots=True)
class Errors:
    """Largest relative errors of one comparison; `bitwise` if all values are equal.

    `compiled_inputs`: the batch repeats the compiled inputs, as the model refused a random one.
    `cause` names a value that cannot be compared, because it is on one side only or not finite; its
    error is infinite. An `asynchronous` program has no error of gradients: its updates have used
    them. `rounding` is the error of the model in one process against itself in float64. It is
    measured, and allowed for, if the limit is exceeded although float64 shows no difference.
    `sizes` names those that differ from the program's. `evaluation` is the error of the loss in
    evaluation mode; None if it is not compared.

    The error of a tensor is its largest absolute difference divided by its largest element. If that
    is so small that four roundings of the largest element among all tensors would exceed the limit,
    the divisor is the element for which they just reach it (gradients that are zero up to rounding,
    such as those of key biases). In 16 bits, where rounding decides whether an element passes a
    ReLU, root mean squares replace largest elements, and the divisor is at least four roundings of
    the largest one. If the limit is still exceeded, the model runs again with another loss scale
    and with weights and gradients moved by one rounding, and a few times the resulting difference
    of a tensor is allowed for as well.
    """

    dtype: str
    loss: float
    gradient: float
    parameter: float
    worst: str
    bitwise: bool
    limit: float
    compiled_inputs: bool = False
    asynchronous: bool = False
    rounding: float = 0.0
    cause: str = ""
    sizes: str = ""
    evaluation: float | None = None

    @property
    def largest(self) -> float:
        """The largest of the errors."""
        return max(self.loss, self.gradient, self.parameter)

    @property
    def ok(self) -> bool:
        """Whether every error is within the limit, or within a few times the model's own
        rounding."""
        return self.largest <= self.allowed

    @property
    def allowed(self) -> float:
        """The largest error that rounding explains."""
        return max(self.limit, OWN_ROUNDINGS * self.rounding)

    def __str__(self) -> str:
        """One line."""
        if self.cause:
            return f"{self.dtype}: {self.cause}"
        how = "bitwise equal" if self.bitwise else f"limit {self.limit:.0e}, worst {self.worst!r}"
        if self.rounding:
            how += f"; the model in one process is {self.rounding:.1e} from itself in float64"
        if self.compiled_inputs:
            how += ", on the compiled inputs: the model takes no random ones"
        if self.sizes:
            how += f"; at {self.sizes}"
        gradients = f"gradients {self.gradient:.1e}"
        if self.asynchronous:
            gradients = "gradients used by the updates"
            how += "; re-enacted in one process"
        return (
            f"{self.dtype}: loss {self.loss:.1e}, {gradients}, parameters after a step "
            f"{self.parameter:.1e} ({how})"
        )


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of `program.verify()`: `native` as the program is, `lifted` in float64.

    `lifted` is None, and `note` says why, when an operator of the model has no float64 kernel.
    `note` also names values that are not compared.
    """

    native: Errors
    lifted: Errors | None
    note: str = ""

    @property
    def decisive(self) -> Errors:
        """The stricter of the two comparisons."""
        return self.native if self.lifted is None else self.lifted

    @property
    def loss_error(self) -> float:
        """Relative error of the loss, in float64 where that runs."""
        return self.decisive.loss

    @property
    def gradient_error(self) -> float:
        """Largest relative error of a gradient, in float64 where that runs.

        It is 0 for an asynchronous program, which has no gradients left to compare.
        """
        return self.decisive.gradient

    @property
    def parameter_error(self) -> float:
        """Largest relative error of a parameter or buffer after one optimizer step."""
        return self.decisive.parameter

    @property
    def evaluation_error(self) -> float | None:
        """Relative error of the loss in evaluation mode, before the step.

        None if it is not compared: the model has no such loss or draws random numbers for it, data
        ranks do not wait for each other, or layers are compiled. It does not count for `ok`.
        """
        return self.decisive.evaluation

    @property
    def worst(self) -> str:
        """The parameter with the largest error."""
        return self.decisive.worst

    @property
    def ok(self) -> bool:
        """Whether the program computes the same as the model."""
        return self.native.ok and (self.lifted is None or self.lifted.ok)

    def __str__(self) -> str:
        """The verdict and a line per comparison."""
        verdict = "ok" if self.ok else "NOT EQUAL to the original model"
        evaluation, error = "", self.evaluation_error
        if error is not None and error > self.decisive.allowed:
            evaluation = (
                f"evaluation: loss {error:.1e} from the model's. Either compile said that "
                "evaluations take branches of training, or a function outside of the model's "
                "classes branches on the mode, or it is a fault of parcompiler. Evaluate by the "
                "model, with worker.gather_state_dict()"
            )
        rows = [f"  {row}" for row in (self.native, self.lifted, evaluation, self.note) if row]
        return "\n".join([f"verified: {verdict}", *rows])


def compare(
    reference: Outcome,
    program: Outcome,
    trained: Collection[str],
    narrow: torch.dtype | None = None,
    again: Outcome | None = None,
) -> Errors:
    """The errors of the ranks against the model; `trained` are the names of trained parameters.

    With a 16-bit dtype `narrow` the limit is for that, although loss and masters are wider. `again`
    is the model with other rounding.
    """
    dtype = narrow or reference.loss.dtype
    again = again or reference
    named = {name: program.state[name] for name in reference.state if name in program.state}
    gradients = dict(
        _differences(reference.gradients, again.gradients, program.gradients, trained, narrow)
    )
    state = dict(_differences(reference.state, again.state, named, trained, narrow))
    loss = _relative(reference.losses, program.losses, 0.0)
    evaluation = None
    if reference.evaluation is not None and program.evaluation is not None:
        evaluation = _relative(reference.evaluation, program.evaluation, 0.0)
    errors = {**state, **gradients}
    causes = [
        _cause({"": loss}, {"": reference.losses}, {"": program.losses}, "the loss"),
        _cause(gradients, reference.gradients, program.gradients, "a gradient of {!r}"),
        _cause(state, reference.state, named, "{!r} after a step"),
    ]
    return Errors(
        dtype=str(dtype).removeprefix("torch."),
        loss=loss,
        gradient=max(gradients.values(), default=0.0),
        parameter=max(state.values(), default=0.0),
        worst=max(errors, key=lambda name: errors[name], default=""),
        bitwise=not any((loss, *errors.values())),
        limit=_limit(dtype),
        cause="; ".join(filter(None, causes)),
        evaluation=evaluation,
    )


def _cause(
    errors: Mapping[str, float],
    reference: Mapping[str, torch.Tensor],
    program: Mapping[str, torch.Tensor],
    subject: str,
) -> str:
    """Why errors are infinite, in words; empty where none is. `subject` is a format for a name."""
    names = sorted(name for name, error in errors.items() if math.isinf(error))
    if not names:
        return ""
    first = subject.format(names[0])
    sides = {"model": reference.get(names[0]), "program": program.get(names[0])}
    present = {side: tensor for side, tensor in sides.items() if tensor is not None}
    broken = [f"in the {side}" for side, t in present.items() if not t.isfinite().all()]
    if len(present) == 1:
        text = f"only the {next(iter(present))} has {first}"
    elif broken:
        text = f"{first} is not finite {' and '.join(broken)}"
    else:
        shapes = " and ".join(f"{tuple(t.shape)}" for t in present.values())
        text = f"{first} is of another shape or size (model and program: {shapes})"
    return text + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _limit(dtype: torch.dtype) -> float:
    """The largest relative error that rounding may explain."""
    return LIMIT.get(dtype.to_real(), 2e-2)


def _differences(
    reference: Mapping[str, torch.Tensor],
    again: Mapping[str, torch.Tensor],
    program: Mapping[str, torch.Tensor],
    trained: Collection[str],
    narrow: torch.dtype | None,
) -> Iterator[tuple[str, float]]:
    """The relative error of each tensor; infinite if one side does not have it.

    Rounding is estimated from the `trained` ones (buffers hold masks of -1e9 and the like), and for
    each tensor by its difference from `again`, the model with other rounding: if few are trained,
    their gradients may be smaller than the rounding of their operands.
    """
    size = _largest if narrow is None else _root_mean_square
    sizes = [(size(reference[n]), reference[n].dtype) for n in trained if n in reference]
    largest, dtype = max(sizes, key=lambda entry: entry[0], default=(0.0, torch.float64))
    if narrow is None:
        floor = ROUNDINGS * torch.finfo(dtype).eps * largest / _limit(dtype)
    else:
        floor = ROUNDINGS * torch.finfo(narrow).eps * largest
    for name in sorted(reference.keys() | program.keys()):
        if name in reference and name in program:
            one, other = reference[name], again[name]
            rounding = 0.0 if one is other else size(_wide(one) - _wide(other))
            least = max(floor, OWN_ROUNDINGS * rounding / _limit(narrow or dtype))
            yield name, _relative(reference[name], program[name], least, size)
        else:
            yield name, math.inf


def _largest(tensor: torch.Tensor) -> float:
    """The largest element, in magnitude."""
    return float(_wide(tensor).abs().max()) if tensor.numel() else 0.0


def _root_mean_square(tensor: torch.Tensor) -> float:
    """The root mean square of the elements."""
    return float(_wide(tensor).abs().square().mean().sqrt()) if tensor.numel() else 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor (booleans too) in the widest dtype of its kind."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _relative(
    reference: torch.Tensor,
    program: torch.Tensor,
    floor: float,
    size: Callable[[torch.Tensor], float] = _largest,
) -> float:
    """The size of the difference over that of the reference, or over `floor` if that is larger."""
    if reference.shape != program.shape:
        return math.inf
    if not reference.numel() or torch.equal(reference, program.to(reference.dtype)):
        return 0.0
    difference = size(_wide(reference) - _wide(program))
    scale = max(size(reference), floor)
    return difference / scale if scale and math.isfinite(difference) else math.inf
