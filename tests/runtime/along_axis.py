"""What the functions of the runtime do on four ranks, against the whole.

Every rank draws the same random values, takes what the types say that it holds, and calls what the
sharded graph would call. Rank 0 puts values and gradients together and prints, for each case, what
is wrong with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from parcompiler import runtime
from parcompiler.pieces import Shard
from parcompiler.runtime.axis import Axis, within
from parcompiler.runtime.rng import SeededDraws, seeded
from parcompiler.spmd import I, P, Placement, R, S
from parcompiler.spmd.conversions import TABLE
from parcompiler.spmd.runtime_call import conversion_call
from parcompiler.spmd.simulate import agrees, dealt

Check = Callable[[Axis], str]
DUAL = {R: P, P: I, I: I}
CPU = torch.device("cpu")


def main() -> None:
    """All cases on all four ranks, then on pairs of them."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups: Sequence[Any] = [dist.new_group([0, 1, 2, 3]), *map(dist.new_group, ([0, 1], [2, 3]))]
    found = {}
    for n, group in ((4, groups[0]), (2, groups[1 + rank // 2])):
        axis = Axis(rank % n, n, group, CPU)
        with within(axis):
            for name, check in cases():
                torch.manual_seed(0)
                try:
                    found[f"{name} n={n}"] = check(axis)
                except Exception as error:  # whatever it is, it belongs to the case
                    found[f"{name} n={n}"] = f"{type(error).__name__}: {error}"
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, found)
    if rank == 0:
        wrong = {name: max(one[name] for one in every) for name in found}
        print(json.dumps(wrong), flush=True)
    dist.destroy_process_group()


def cases() -> Iterator[tuple[str, Check]]:
    """Every conversion for even, uneven and segmented dimensions, then operators and draws."""
    for row in TABLE:
        for size, segments in ((8, ()), (7, ()), (12, (8, 4))):
            source, target = typed(row.source, 0, segments), typed(row.target, 1, segments)
            name = f"{row.source}-{row.target} {size}{' segments' if segments else ''}"
            yield name, partial(converted, source=source, target=target, size=size)
    yield "S-S of one dimension", partial(converted, source=S(0), target=S(0, (8, 4)), size=12)
    for reduction in ("mean", "sum"):
        for smoothing in (0.0, 0.1):
            for size in (8, 9):
                name = f"cross_entropy {reduction} {smoothing} {size}"
                yield name, partial(classes, size=size, reduction=reduction, smoothing=smoothing)
    for weighted in (False, True):
        yield f"cross_entropy_of_rows {weighted}", partial(rows, weighted=weighted)
    yield "embedding", partial(table, padding=-1)
    yield "embedding with padding", partial(table, padding=6)
    yield "embedding_bag", bags
    yield "attention_of_heads", heads
    yield "complex and bool", kinds
    yield "dropout in a proof", partial(proof, size=8)
    yield "dropout in a proof, uneven", partial(proof, size=7)
    yield "dropout in training", training
    yield "a parameter fans out", fanned
    yield "agreed", lambda axis: "" if axis.agreed(7 + axis.rank) == 7 else "another number"


def typed(kind: str, dim: int, segments: Sequence[int]) -> Placement:
    return S(dim, segments) if kind == "S" else Placement(kind)  # type: ignore[arg-type]


def everywhere(axis: Axis, tensor: torch.Tensor) -> list[torch.Tensor]:
    """What every rank of the line has."""
    parts: list[Any] = [None] * axis.size
    dist.all_gather_object(parts, tensor.detach(), group=axis.group)
    return parts


def converted(axis: Axis, source: Placement, target: Placement, size: int) -> str:
    """One conversion, forward and backward."""
    value, gradient = torch.randn(2, size, size, dtype=torch.float64)
    given, coming = (
        dealt(value, source, axis.size),
        dealt(gradient, DUAL.get(target, target), axis.size),
    )
    own = given[axis.rank].requires_grad_()
    call, args, kwargs, _ = conversion_call(
        source, target, (size, size), value.nbytes, axis.size, carries=True
    )
    result = getattr(runtime, call.name)(own, *args, **kwargs)
    result.backward(coming[axis.rank])
    if not agrees(everywhere(axis, result), target, value):
        return "another value"
    assert own.grad is not None
    back = DUAL.get(source, source)
    return "" if agrees(everywhere(axis, own.grad), back, gradient) else "another gradient"


def compared(
    axis: Axis,
    whole: Sequence[torch.Tensor],
    types: Sequence[Placement],
    expected: Callable[..., torch.Tensor],
    call: Callable[..., torch.Tensor],
    placement: Placement,
) -> str:
    """An operator on pieces against the same on the whole, with the gradients of its operands."""
    leaves = [value.clone().requires_grad_() for value in whole]
    result = expected(*leaves)
    gradient = torch.randn_like(result)
    result.backward(gradient)
    held = [dealt(value, t, axis.size)[axis.rank] for value, t in zip(whole, types, strict=True)]
    own = [value.requires_grad_() for value in held]
    local = call(*own)
    local.backward(dealt(gradient, DUAL.get(placement, placement), axis.size)[axis.rank])
    if not agrees(everywhere(axis, local), placement, result.detach()):
        return "another value"
    for leaf, value, held_as in zip(leaves, own, types, strict=True):
        assert leaf.grad is not None
        assert value.grad is not None
        if not agrees(everywhere(axis, value.grad), DUAL.get(held_as, held_as), leaf.grad):
            return "another gradient"
    return ""


def classes(axis: Axis, size: int, reduction: str, smoothing: float) -> str:
    logits, target = torch.randn(6, size).double() * 9, torch.randint(size, (6,))
    target[2] = -100
    more: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    return compared(
        axis,
        [logits],
        [S(1)],
        lambda x: F.cross_entropy(x, target, **more),
        lambda x: runtime.cross_entropy(x, target, size, **more),
        I,
    )


def rows(axis: Axis, weighted: bool) -> str:
    logits, target = torch.randn(7, 5).double(), torch.randint(5, (7,))
    target[3] = -100
    weight = torch.rand(5).double() if weighted else None
    return compared(
        axis,
        [logits],
        [S(0)],
        lambda x: F.cross_entropy(x, target, weight),
        lambda x: runtime.cross_entropy_of_rows(x, target, weight=weight),
        P,
    )


def table(axis: Axis, padding: int) -> str:
    weight, indices = torch.randn(9, 3).double(), torch.randint(9, (4, 5))
    indices[0, 0] = 6
    return compared(
        axis,
        [weight],
        [S(0)],
        lambda w: torch.embedding(w, indices, padding),
        lambda w: runtime.embedding(indices, w, 9, padding),
        P,
    )


def bags(axis: Axis) -> str:
    weight, indices = torch.randn(9, 3).double(), torch.randint(9, (8,))
    offsets = torch.tensor([0, 2, 5, 8])
    return compared(
        axis,
        [weight],
        [S(0)],
        lambda w: torch.embedding_bag(
            w, indices, offsets, False, 0, False, None, include_last_offset=True
        )[0],
        lambda w: runtime.embedding_bag(indices, w, offsets, 9, include_last_offset=True)[0],
        P,
    )


def heads(axis: Axis) -> str:
    query, key, value = (torch.randn(2, heads, 5, 4).double() for heads in (12, 3, 3))
    return compared(
        axis,
        [query, key, value],
        [S(1), R, R],
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        lambda q, k, v: runtime.attention_of_heads(q, k, v, 12, is_causal=True),
        S(1),
    )


def kinds(axis: Axis) -> str:
    """Dtypes that backends do not know."""
    for whole in (torch.randn(8, 4, dtype=torch.complex128), torch.rand(8, 4) > 0.5):
        own = Shard(0, (8,)).take(whole, axis.size, axis.rank)
        if not torch.equal(runtime.all_gather(own, 0), whole):
            return f"another value of {whole.dtype}"
        there = Shard(1, (4,)).take(whole, axis.size, axis.rank)
        if not torch.equal(runtime.all_to_all(own, 0, 1), there):
            return f"another value of {whole.dtype}"
    return ""


def fanned(axis: Axis) -> str:
    """The gradient of a parameter used in pieces (and whole) is added up over ranks at last."""
    weight = torch.nn.Parameter(torch.randn(3).double())
    pieces, whole = torch.randn(2, axis.size, 3).double(), torch.randn(2, 3).double()
    for i in range(2):
        x = runtime.fan_out(weight) * pieces[i, axis.rank]
        with axis.expecting(more=i == 0):
            (x + weight * whole[i]).sum().backward()
        assert weight.grad is not None
        if i == 0 and not torch.equal(weight.grad, whole[0]):
            return "what ranks differ in was not left for later"
    assert weight.grad is not None
    expected = pieces.sum((0, 1)) + whole.sum(0)
    return "" if torch.allclose(weight.grad, expected, atol=1e-12) else "another gradient"


def proof(axis: Axis, size: int) -> str:
    """In a proof, what is drawn for a piece is a piece of what is drawn for the whole."""
    x = torch.ones(size, 6).t()
    with SeededDraws(0, 0):
        expected = F.dropout(x, 0.5)
    shard = Shard(1, (size,))
    with SeededDraws(0, 0), runtime.own_draws(1, (size,)):
        found = F.dropout(shard.take(x, axis.size, axis.rank), 0.5)
    return "" if torch.equal(found, shard.take(expected, axis.size, axis.rank)) else "another draw"


def training(axis: Axis) -> str:
    """In training, ranks draw alike, but in `own_draws`, which leaves no trace."""
    with seeded(1, CPU):
        alike = [F.dropout(torch.ones(64), 0.5)]
        with runtime.own_draws(0):
            own = F.dropout(torch.ones(64), 0.5)
        alike.append(F.dropout(torch.ones(64), 0.5))
    for part in alike:
        if not all(torch.equal(part, other) for other in everywhere(axis, part)):
            return "other draws"
    parts = everywhere(axis, own)
    differ = all(not torch.equal(parts[0], other) for other in parts[1:])
    return "" if differ else "the same draws"
