"""Functions with a cache neither lend tensors to a trace nor keep those of one."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import parcompiler as pc

WIDTH = 4


@functools.lru_cache(maxsize=4)
def table(width: int) -> torch.Tensor:
    return torch.arange(width).float().mul(0.1).sin()


def cached_but_not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers decorates methods: a trace computes, all else goes through a cache."""
    cached = functools.cache(function)

    @functools.wraps(function)
    def decide(*args: Any) -> Any:
        compiling = torch.compiler.is_compiling() or torch.compiler.is_exporting()
        return function(*args) if compiling else cached(*args)

    return decide


class Cached(nn.Module):
    """Two layers, and between them a table that is computed once."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    @functools.cache  # noqa: B019
    def of_a_method(self, width: int) -> torch.Tensor:
        return torch.arange(width).float().mul(0.1).sin()

    @staticmethod
    @functools.cache
    def of_a_static_method(width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.arange(width, dtype=dtype).mul(0.1).sin()

    @cached_but_not_compiled
    def of_a_wrapper(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.arange(width, dtype=dtype).mul(0.1).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        if self.how == "function":
            found = table(WIDTH)
        elif self.how == "method":
            found = self.of_a_method(WIDTH)
        elif self.how == "static method":
            found = self.of_a_static_method(WIDTH, x.dtype)
        else:
            found = self.of_a_wrapper(WIDTH, x.dtype)
        loss: torch.Tensor = self.after(x * found).square().mean()
        return loss


@pytest.mark.parametrize("how", ["function", "method", "static method", "wrapper"])
@pytest.mark.parametrize("ran", [False, True])
def test_a_cached_table_is_computed_by_the_ranks(how: str, ran: bool) -> None:
    torch.manual_seed(0)
    table.cache_clear()
    Cached.of_a_static_method.cache_clear()
    model, x = Cached(how), torch.randn(2, WIDTH)
    before = model(x) if ran else None
    program = pc.compile(model, pc.Mesh(pipeline=2), (x,), microbatches=2)
    assert not any(item.buffer for item in program.captured.parameters)
    verification = program.verify()
    assert verification.loss_error <= 1e-12
    assert verification.gradient_error <= 1e-12, verification
    after = model(x)  # with tensors of its own, in its own precision
    assert after.dtype == torch.float32
    assert before is None or torch.equal(after, before)
