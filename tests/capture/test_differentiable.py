"""Which values carry gradients, where memory is written in place."""

import torch
from torch import nn

from parcompiler.capture import capture


class Filled(nn.Module):
    """Zeros that are filled through views of them, and then read as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        filled, untouched = torch.zeros_like(y), torch.zeros_like(y)
        for row in range(len(x)):
            filled[row] = y[row]
        return (filled.exp() + untouched.cos()).sum()


def test_what_is_filled_through_views_carries_the_gradient_of_what_fills_it() -> None:
    graph = capture(Filled(), {"x": torch.ones(2, 4)})
    carries = {str(node.target): node.name in graph.differentiable for node in graph.fx_graph.nodes}
    made = [node for node in graph.fx_graph.nodes if "zeros_like" in str(node.target)]
    assert [node.name in graph.differentiable for node in made] == [True, False]
    assert carries["aten.exp.default"]
    assert not carries["aten.cos.default"]


class Rescaled(nn.Module):
    """A weight that is divided in place where no gradient is kept, and used as it then is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight = self.linear.weight.div_(2.0)
            double = self.linear.weight * 2.0
        y: torch.Tensor = x @ weight.clone() + double
        return y.sum()


def test_what_is_updated_without_a_gradient_keeps_the_one_that_it_has() -> None:
    graph = capture(Rescaled(), {"x": torch.ones(4, 4)})
    carries = {str(node.target): node.name in graph.differentiable for node in graph.fx_graph.nodes}
    assert carries["aten.div_.Tensor"]
    assert carries["aten.clone.default"]
    assert carries["aten.matmul.default"]
    assert not carries["aten.mul.Tensor"]
