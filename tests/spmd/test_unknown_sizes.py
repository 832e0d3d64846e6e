"""Values whose sizes depend on the data, among tensor ranks."""

import torch
from torch import nn

import parcompiler as pc


class Messages(nn.Module):
    """Layers of a graph net: nodes send to each other along the edges that are no loops."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("edges", torch.randint(6, (2, 20)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        edges = self.get_buffer("edges")
        edges = edges[:, edges[0] != edges[1]]
        for layer in self.layers:
            sent = torch.tanh(layer(x)).index_select(0, edges[0])
            target = edges[1].unsqueeze(1).expand_as(sent)
            x = x + x.new_zeros(x.shape).scatter_add(0, target, sent)
        loss: torch.Tensor = x.square().mean()
        return loss


def test_a_value_that_nothing_needs_to_be_done_to_may_have_any_size() -> None:
    inputs = {"x": torch.randn(6, 8)}
    program = pc.compile(Messages(), pc.Mesh(tensor=2), inputs, microbatches=2)
    found = program.verify()
    assert found.ok, str(found)
