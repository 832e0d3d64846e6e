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


class CutOff(nn.Module):
    """One value that the loss uses with and without its gradient, and others that only lead to a
    detached value, to a choice or to an update of a buffer."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.fourth = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        self.mean.lerp_(self.second(y).detach().mean(0), 0.1)
        filled = torch.zeros_like(y)
        filled[0] = self.third(y.detach())[0]  # written, and nobody reads it afterwards
        with torch.no_grad():
            scale = self.table * 2
        y = torch.where(self.fourth(y) > 0, y, -y)
        total: torch.Tensor = y * y.detach() * scale + self.third(y).round().detach()
        return total.sum()


def test_only_what_leads_to_the_loss_carries_a_gradient_and_is_trained() -> None:
    graph = capture(CutOff(), {"x": torch.ones(2, 4)})
    trained = {item.name for item in graph.parameters if item.trainable}
    assert trained == {"first.weight", "first.bias"}
    model = CutOff()
    model(torch.ones(2, 4)).backward()
    assert trained == {name for name, p in model.named_parameters() if p.grad is not None}
    names = {n.name: str(n.target) for n in graph.fx_graph.nodes if n.op == "call_function"}
    carrying = [target for name, target in names.items() if name in graph.differentiable]
    assert [target.split(".")[1] for target in carrying] == [
        "linear",
        "neg",
        "where",
        "mul",
        "mul",
        "add",
        "sum",
    ]


class Shifted(nn.Module):
    """Layers that add a constant in the form of what carries a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.shift = torch.ones(1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = self.shift.type_as(self.layers[0](x)).expand_as(x) * 2
        for layer in self.layers:
            x = layer(x + shift)
        return x.sum()


def test_what_takes_the_form_of_another_has_none_of_its_gradient() -> None:
    graph = capture(Shifted(), {"x": torch.ones(2, 4)})
    carries = {str(node.target): node.name in graph.differentiable for node in graph.fx_graph.nodes}
    assert not carries["aten.mul.Tensor"]
    assert carries["aten.linear.default"]
