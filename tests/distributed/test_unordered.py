"""Compiled ranks that would wait for each other within their layers do not start."""

from pathlib import Path

import torch
from torch import nn

import parcompiler as pc
from tests.distributed import forked, unordered


class Whole(nn.Module):
    """The head is computed on all rows, and one rank alone has the gradient of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        loss: torch.Tensor = self.head(x.flatten(1)).logsumexp(1).mean()
        return loss


def test_compiled_ranks_that_exchange_in_another_order_do_not_start(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(2, 4, 6)}
    program = pc.compile(Whole(), pc.Mesh(context=2), inputs, microbatches=2, progress=False)
    text = forked.run(2, unordered.main, str(program.export(tmp_path / "program")))
    assert text.count("started") == 2
    assert text.count("ranks 0 and 1 would exchange in different orders within compiled") == 2
    for rank, side in enumerate(("backward", "forward")):
        assert f"rank {rank}: Head of stage_0.py, {side}: context reduce_scatter" in text
