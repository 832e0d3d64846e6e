"""Rules found by execution, for operators without a written rule.

The operator runs on small random tensors, whole and on n simulated ranks, with its operands split
along every combination of dimensions. Where results and gradients of the ranks make up the whole,
as pieces or summands, there is a strategy. This must also hold on -1, 0 and 1, which some operators
compare with (targets of margin losses), as on other numbers they may be constant; and on large
numbers and gradients, as operators with a limit (a norm) may be the identity below it.

>>> from parcompiler.spmd.simulate import example
>>> call = example(torch.ops.aten.cdist.default, torch.ones(4, 1, 3), torch.ones(4, 1, 3))
>>> print(*discovered(call, n=2), sep="; ")
S(0) S(0) -> S(0)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from parcompiler.capture.effects import is_random
from parcompiler.graph import is_floating
from parcompiler.spmd.call import NodeCall, Shape, written
from parcompiler.spmd.placement import P, Placement, R, S
from parcompiler.spmd.simulate import agrees, attempt, example, faults
from parcompiler.spmd.strategy import Strategy

LARGEST = 1 << 12  # elements of an operand that is tried at full size
MOST = 1 << 10  # combinations of splits that are tried
TRIALS = 4  # on values of each kind: in one trial summands may be right by chance
LARGE = 1e3  # size of numbers and gradients above a limit

Make = Callable[[Shape, torch.dtype, torch.Generator], torch.Tensor]

_known: dict[tuple[Any, ...], tuple[Strategy, ...]] = {}


def discovered(call: NodeCall, n: int) -> tuple[Strategy, ...]:
    """The strategies that split a call, found by trial; none if it cannot be tried.

    Operators with integer operands are not tried, as these may be indices into memory, nor are
    torch's private ones (such as `native_batch_norm`): neither check their arguments. Results are
    cached by operator, other arguments, and shapes.
    """
    if not call.is_plain or is_random(call.node) or written(call) or is_unchecked(call):
        return ()
    operands = {operand.argument for operand in call.operands}
    constants = [(k, v) for k, v in call.arguments.items() if k not in operands]
    types = call.shapes, _dtypes(call), call.gradients
    key = (n, str(call.node.target), str(constants), *types)
    if key not in _known:
        kinds = itertools.product((_random, _large, _signs), range(TRIALS))
        trials = [trial for make, seed in kinds if (trial := _trial(call, n, make, seed))]
        _known[key] = tuple(_strategies(trials, n)) if trials else ()
    shapes = *call.shapes, *call.result_shapes  # strategies come from small tensors
    return tuple(
        x
        for x in _known[key]
        if all(
            p.kind != "S" or shape[p.dim] % n == 0 for p, shape in zip(x.types, shapes, strict=True)
        )
    )


def is_unchecked(call: NodeCall) -> bool:
    """Whether a kernel may read or write anywhere when its arguments do not fit together."""
    private = call.name.startswith(("aten::_", "aten::native_")) or call.base == "as_strided"
    return private or any(
        not is_floating(o.value) and o.value.dtype != torch.bool for o in call.operands
    )


def _dtypes(call: NodeCall) -> tuple[torch.dtype, ...]:
    return tuple(operand.value.dtype for operand in call.operands)


def _trial(call: NodeCall, n: int, make: Make, seed: int) -> NodeCall | None:
    """The call on random values; None if it fails or yields other shapes or dtypes, or if few
    results are finite or all are equal (zeros are a sum of any summands).

    Large operands are shrunk, equal sizes equally throughout the call.
    """
    shapes, sizes = call.shapes, dict[int, int]()
    if any(prod(shape) > LARGEST for shape in shapes):
        distinct = sorted({size for shape in shapes for size in shape if size > 1})
        sizes = {size: n * k + (size % n > 0) for k, size in enumerate(distinct, start=1)}
        shapes = tuple(tuple(sizes.get(size, size) for size in shape) for shape in shapes)
        if any(prod(shape) > LARGEST for shape in shapes):
            return None
    try:
        trial = on_random(call, shapes, make, seed)
    except Exception:  # an operator may raise anything on such tensors
        return None
    expected = tuple(tuple(sizes.get(size, size) for size in s) for s in call.result_shapes)
    tells = all(result.numel() and _tells(result) for result in trial.results)
    return trial if trial.result_shapes == expected and tells else None


def _tells(result: torch.Tensor) -> bool:
    if not is_floating(result):
        return True
    finite = result[result.isfinite()]
    if 2 * finite.numel() < result.numel():
        return False
    return bool((finite != finite[0]).any()) if finite.numel() > 1 else bool((finite != 0).all())


def on_random(
    call: NodeCall, shapes: Sequence[Shape], make: Make | None = None, seed: int = 0
) -> NodeCall:
    """The call on random values of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    values = iter(
        [
            (make or _random)(shape, dtype, generator).requires_grad_(carries)
            for shape, dtype, carries in zip(shapes, _dtypes(call), call.gradients, strict=True)
        ]
    )
    arguments: Any = (call.node.args, call.node.kwargs)
    args, kwargs = fx.map_arg(arguments, lambda _: next(values))
    assert callable(call.node.target), "a function"
    return example(call.node.target, *args, **kwargs)


def _random(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex128)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _large(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random values, numbers of the order of `LARGE`."""
    value = _random(shape, dtype, generator)
    return value * LARGE if value.is_floating_point() or value.is_complex() else value


def _signs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random values, numbers from -1, 0 and 1."""
    if not dtype.is_floating_point:
        return _random(shape, dtype, generator)
    return torch.randint(-1, 2, shape, generator=generator).double()


def _strategies(trials: Sequence[NodeCall], n: int) -> Iterator[Strategy]:
    """All splits of the operands for which values and gradients of the ranks make up the whole."""
    call = trials[0]
    choices: list[list[Placement]] = []
    for value in (operand.value for operand in call.operands):  # whole, in pieces, in summands
        splits = [S(dim) for dim, size in enumerate(value.shape) if size and size % n == 0]
        choices.append([R, *splits, *([P] if value.dtype.is_floating_point else [])])
    if prod(map(len, choices)) > MOST:
        return
    for inputs in itertools.product(*choices):
        if all(placement == R for placement in inputs):
            continue
        outputs = _outputs(call, inputs, n)
        if outputs is None:
            continue
        strategy = Strategy(inputs, outputs)
        sizes = (1.0, LARGE)  # of incoming gradients
        if not any(
            _checked(faults, trial, strategy, n, size) for trial in trials for size in sizes
        ):
            yield strategy


def _outputs(call: NodeCall, inputs: tuple[Placement, ...], n: int) -> tuple[Placement, ...] | None:
    """The types of the results on the ranks, if each has one."""
    ranks = _checked(attempt, call, inputs, n)
    if not ranks:
        return None
    outputs = []
    for place, whole in enumerate(call.results):
        parts = [results[place] for results in ranks]
        candidates = (R, *(S(d) for d in range(whole.dim())), *[P] * (whole.dtype != torch.bool))
        fitting = (c for c in candidates if _checked(agrees, parts, c, whole))
        placement = next(fitting, None)
        if placement is None:
            return None
        outputs.append(placement)
    return tuple(outputs)


def _checked(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a trial; if it fails, a fault or None."""
    try:
        return function(*args)
    except Exception:  # an operator may raise anything on such pieces
        return ["it does not run"] if function is faults else None
