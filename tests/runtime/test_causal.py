"""Causal attention of some rows of a sequence is that of the whole, and makes no mask."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from parcompiler.runtime.causal import causal

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class NoMask(TorchDispatchMode):
    """Fails where an operator makes a tensor of booleans."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        assert not isinstance(made, torch.Tensor) or made.dtype != torch.bool, str(func)
        return made


@pytest.mark.parametrize(("heads", "starts"), [*product((4, 2), ((0,), (15,), (5, 10), (0, 15)))])
def test_rows_attend_to_what_is_before_them(
    heads: int, starts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parcompiler.runtime.causal.SPAN", 1)
    generator = torch.Generator().manual_seed(sum(starts))

    def draw(heads: int, rows: int) -> torch.Tensor:
        shape = 2, rows, heads, 8
        drawn = torch.randn(shape, dtype=torch.float64, generator=generator)
        return drawn.transpose(1, 2).requires_grad_()

    query, key, value = operands = draw(4, 20), draw(heads, 20), draw(heads, 20)
    more: dict[str, Any] = {"enable_gqa": heads < 4}
    own = torch.cat([torch.arange(start, start + 5) for start in starts])
    expected = F.scaled_dot_product_attention(*operands, is_causal=True, scale=0.3, **more)
    gradient = torch.zeros_like(expected)
    gradient[..., own, :] = torch.randn(2, 4, len(own), 8, dtype=torch.float64, generator=generator)
    with NoMask():  # type: ignore[no-untyped-call]
        found = causal(query[..., own, :], key, value, starts, scale=0.3, **more)
    torch.testing.assert_close(found, expected[..., own, :], rtol=1e-12, atol=1e-14)
    for there, here in zip(
        torch.autograd.grad(expected, operands, gradient),
        torch.autograd.grad(found, operands, gradient[..., own, :]),
        strict=True,
    ):
        torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-13)


def test_autocast_lowers_what_rows_attend_to() -> None:
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(2, 4, 20, 8, generator=generator) for _ in range(3)]
    query, key, value = operands
    lowered = query.bfloat16(), key.bfloat16(), value.bfloat16()
    expected = F.scaled_dot_product_attention(*lowered, is_causal=True)[..., 5:10, :]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = causal(query[..., 5:10, :], key, value, [5])
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-8)


def test_operands_without_heads_are_traced_and_counted() -> None:
    """On the CPU no kernel takes them before torch 2.14, as on accelerators none of ours does."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 8, 4, generator=generator) for _ in range(3))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 4:]

    def last_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return causal(query, key, value, [4])

    graph = make_fx(last_rows, tracing_mode="fake")(query[:, 4:], key, value)
    torch.testing.assert_close(graph(query[:, 4:], key, value), expected)
    kernel = {FLASH: lambda *shapes, **_: sdpa_flop_count(*shapes[:3])}  # torch does not count it
    with FlopCounterMode(display=False, custom_mapping=kernel) as counter:
        torch.testing.assert_close(last_rows(query[:, 4:], key, value), expected)
    assert counter.get_total_flops() > 0
