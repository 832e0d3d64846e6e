"""What reads memory reads what the model has there, wherever its operand comes from."""

from typing import Any

import pytest
import torch
from torch import fx, nn

from parcompiler.capture import capture

aten = torch.ops.aten


class Windows(nn.Module):
    """Overlapping windows over memory in which the sequence comes first, as Longformer's."""

    def __init__(self, places: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.places = places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).permute(self.places)
        return (x.as_strided((2, 2, 8), (8, 4, 1)).cumsum(0) ** 2).sum()


class Elsewhere(fx.Interpreter):
    """Gives operators that are not views results in another order in memory."""

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        return made.contiguous() if n.target is aten.permute.default and not self.seen(n) else made

    def seen(self, node: fx.Node) -> bool:
        """Whether the node only puts memory back in order."""
        return all(user.target is aten.as_strided.default for user in node.users)


@pytest.mark.parametrize("places", [(0, 1, 2), (1, 0, 2), (2, 0, 1)])
def test_windows_are_those_of_the_model(places: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = Windows(places), torch.randn(3, 2, 4)
    graph = capture(model, (x,))
    values = [graph.tensors[item.name] for item in graph.parameters]
    found = Elsewhere(fx.GraphModule({}, graph.fx_graph)).run(*values, x)[0]
    assert torch.equal(found, model(x))
