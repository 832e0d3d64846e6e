"""Ring attention: the rows of a rank attend to those of all, whose keys and values go round.

    step          0            1            2              rank r has keys r, then r - 1, ...
    rank 0    k0 ──────┐   k2 ──────┐   k1                 and passes them on while its
    rank 1    k1 ──┐   └─► k0 ──┐   └─► k2                 rows attend to them
    rank 2    k2   └─────► k1   └─────► k0

A rank holds keys and values of one rank at a time, beside those that are arriving (Liu, Zaharia
and Abbeel, arXiv 2310.01889). Results of parts are merged by the logarithms of their sums (Rabe and
Staats, arXiv 2112.05682; FlashAttention, arXiv 2205.14135, section 3.1):

    y = y1 + (y2 - y1) / (1 + exp(s1 - s2))        s = log(exp s1 + exp s2)

The kernel of the backward gets y and s of all keys, and so computes the gradients for any part of
them. Gradients of keys and values follow them round, one step behind, and each rank adds its
summand, until they reach their owner. Planning runs this code too, without data, for its costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Arriving = Callable[[], torch.Tensor]
Rotate = Callable[[torch.Tensor], Arriving]
Attended = tuple[torch.Tensor, torch.Tensor]  # results [..., e], logarithms of sums [...]
Seen = tuple[slice, slice, bool]  # rows, the keys to which they attend, and whether causally

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
WIDEST = 256  # most features of a head in the kernel of accelerators


class RingAttention(torch.autograd.Function):
    """Attention of rank `rank` of `n`: queries [b, heads, rows here, e] to all keys.

    `rotate` begins to send a 1-d tensor to the next rank; it returns a function that waits for the
    one of the previous rank. Under a causal mask rows are in order, or dealt `zigzag` (see
    `pieces`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        place: tuple[int, int],
        rotate: Rotate,
        is_causal: bool,
        zigzag: bool,
        scale: float | None,
    ) -> torch.Tensor:
        (rank, n), pair = place, _packed(key, value)
        total: Attended | None = None
        for step in range(n):
            arriving = rotate(pair) if step < n - 1 else None
            seen = _visible(rank, (rank - step) % n, key.shape[-2], is_causal, zigzag)
            if seen is not None:
                rows, keys, causal = seen
                some = _unpacked(pair, key, value, keys)
                part = attend(query[..., rows, :], *some, causal, scale)
                if total is None:
                    total = widened(part)
                else:
                    merge((total[0][..., rows, :], total[1][..., rows]), part)
            pair = arriving() if arriving else pair
        assert total is not None, "a rank attends to its own keys first"
        result, sums = total
        result = result.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.settings = place, rotate, is_causal, zigzag, scale
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *_ = saved = ctx.saved_tensors  # read once: it may run layers again
        (rank, n), rotate, is_causal, zigzag, scale = ctx.settings
        of_query = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
        gradient = pair = _packed(key, value)
        following: Arriving | None = None  # gradients of the keys that are here
        for step in range(n):
            arriving = rotate(pair) if step < n - 1 else None
            seen = _visible(rank, (rank - step) % n, key.shape[-2], is_causal, zigzag)
            summand = _summand(gradients[0], saved, pair, of_query, seen, scale)
            if following is not None:
                summand += following()
            if step == 0:
                gradient = summand
            else:
                following = rotate(summand)
            pair = arriving() if arriving else pair
        assert following is not None, "a ring has two ranks or more"
        gradient += following()
        return of_query.to(query.dtype), *_unpacked(gradient, key, value, slice(None)), *[None] * 5


def _summand(
    gradient: torch.Tensor,
    saved: Sequence[torch.Tensor],
    pair: torch.Tensor,
    of_query: torch.Tensor,
    seen: Seen | None,
    scale: float | None,
) -> torch.Tensor:
    """The gradients of a pair of keys and values, from the rows that attend to it (`seen`); those
    of the queries are added to `of_query`."""
    summand = torch.zeros_like(pair)
    if seen is not None:
        query, key, value, result, sums = saved
        rows, keys, causal = seen
        some = _unpacked(pair, key, value, keys)
        whole = result[..., rows, :], sums[..., rows]
        gradients = attend_backward(
            gradient[..., rows, :], query[..., rows, :], *some, *whole, causal, scale
        )
        of_query[..., rows, :].add_(gradients[0])
        for one, part in zip(_unpacked(summand, key, value, keys), gradients[1:], strict=True):
            one.copy_(part)
    return summand


def _visible(rank: int, other: int, size: int, is_causal: bool, zigzag: bool) -> Seen | None:
    """The rows of a rank that attend to keys of one, and which of its `size` keys; None if none do.

    With zigzag, both chunks of rows attend to the earlier chunk of ranks before, and the later
    chunk of rows to both chunks of ranks after: all ranks have equal work in every step.
    """
    every, half = slice(None), size // 2
    if other == rank:  # its own chunks are in order, too
        return every, every, is_causal
    if not is_causal or (other < rank and not zigzag):
        return every, every, False
    if not zigzag:
        return None
    return (every, slice(half), False) if other < rank else (slice(half, None), every, False)


def _packed(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Keys and values in one 1-d tensor, which is one message."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpacked(
    pair: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some `keys` and their values from a packed pair, with the shapes of `key` and `value`."""
    first = pair[: key.numel()].view(key.shape)
    return first[..., keys, :], pair[key.numel() :].view(value.shape)[..., keys, :]


def widened(part: Attended) -> Attended:
    """Attention to a part of the keys, in float32 or wider, so that others can be merged in."""
    return part[0].to(torch.promote_types(part[0].dtype, torch.float32)), part[1]


def merge(total: Attended, part: Attended) -> None:
    """Merge the attention to other keys (`part`) into `total`, in place."""
    result, sums = total
    weight = torch.sub(part[1], sums).sigmoid_().unsqueeze(-1)  # exp s2 / (exp s1 + exp s2)
    result.lerp_(part[0].to(result.dtype), weight.to(result.dtype))
    torch.logaddexp(sums, part[1], out=sums)


def lowered(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Operands in the dtype of autocast, which applies only to torch's public functions."""
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device):
        return operands
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in operands)


def has_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether there is a kernel for these operands that returns the logarithms of its sums. It
    takes only shapes [samples, heads, rows, e]."""
    taken = query.device.type == "cpu" or (
        query.dtype.itemsize == 2 and query.shape[-1] % 8 == 0 and query.shape[-1] <= WIDEST
    )
    return (
        taken
        and query.dim() == key.dim() == value.dim() == 4
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[-1] == value.shape[-1]
        and all(x.stride(-1) == 1 for x in (query, key, value))
    )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> Attended:
    """Attention [b, heads, rows, e] and the logarithms of its sums; keys may have fewer heads."""
    if has_kernel(query, key, value):
        kernel = FORWARD if query.device.type == "cpu" else _FLASH
        made = kernel(query, key, value, 0.0, is_causal, scale=scale)
        return made[0], made[1]
    scores, _ = _scores(query, key, is_causal, scale)
    sums = scores.logsumexp(-1)
    return (scores - sums[..., None]).exp() @ _repeated(value, query), sums


def attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    sums: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values; the latter two may be a part of those from which
    `result` and `sums` were computed (arXiv 2205.14135, appendix B.2)."""
    if has_kernel(query, key, value):
        # CUDA's kernel reads the sums as contiguous [b, heads, rows], ignoring their strides.
        operands = gradient, query, key, value, result, sums.contiguous()
        if query.device.type == "cpu":
            made = BACKWARD(*operands, 0.0, is_causal, scale=scale)
        else:
            lengths, seed = (query.shape[-2], key.shape[-2]), query.new_empty(0)
            more = None, None, *lengths, 0.0, is_causal, seed, seed
            made = _FLASH_BACKWARD(*operands, *more, scale=scale)
        return made[0], made[1], made[2]
    scores, factor = _scores(query, key, is_causal, scale)
    weights = (scores - sums[..., None]).exp()
    dy, y = gradient.to(weights.dtype), result.to(weights.dtype)
    of_scores = dy @ _repeated(value, query).mT - (dy * y).sum(-1, keepdim=True)
    of_scores = weights * of_scores * factor
    of_keys, of_values = of_scores.mT @ query.to(weights.dtype), weights.mT @ dy
    groups = (key.shape[-3], -1)
    return (
        (of_scores @ _repeated(key, query)).to(query.dtype),
        of_keys.unflatten(-3, groups).sum(-3).to(key.dtype),
        of_values.unflatten(-3, groups).sum(-3).to(value.dtype),
    )


def _scores(
    query: torch.Tensor, key: torch.Tensor, is_causal: bool, scale: float | None
) -> tuple[torch.Tensor, float]:
    """The scores of queries and keys [b, heads, rows, keys], and their scale."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    keys = _repeated(key, query)
    scores = query.to(keys.dtype) @ keys.mT * factor
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores, factor


def _repeated(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values repeated for each head of queries, in float32 or wider."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.repeat_interleave(query.shape[-3] // x.shape[-3], -3)
