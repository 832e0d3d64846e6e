"""A value is gone with the line that takes its name, and never before its last reader."""

import torch
from torch import Tensor, fx, nn

from parcompiler.models import t5
from parcompiler.naming.variables import overwritten
from tests.cost.capture import capture


class Shadowing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x)
        z = y + 1
        y = torch.sin(z)
        a, b = y.chunk(2)
        y = a * b
        return torch.cos(y)


def ends(module: nn.Module, *args: Tensor) -> tuple[tuple[fx.Node, ...], dict[str, list[str]]]:
    """The nodes of a module, and by name of a node those that are gone with it."""
    captured = capture(module, *args)
    arguments = {node: node.name for node in captured.inputs}
    found = overwritten(captured.nodes, arguments, captured.outputs)
    return captured.nodes, {n.name: [item.name for item in items] for n, items in found.items()}


def test_a_value_is_gone_with_the_line_that_takes_its_name() -> None:
    _, gone = ends(Shadowing(), torch.randn(4))
    assert gone == {"sin": ["relu"], "getitem_1": ["chunk"], "mul": ["sin"]}


def test_what_is_gone_has_no_reader_left() -> None:
    config = t5.Config(layers=1, heads=2, hidden=8, vocabulary=16, sequence=4)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    nodes, gone = ends(t5.T5(config), tokens, tokens, tokens)
    place = {node.name: k for k, node in enumerate(nodes)}
    by_name = {node.name: node for node in nodes}
    assert gone
    for node, items in gone.items():
        for item in items:
            assert place[item] < place[node]
            assert all(place[user.name] <= place[node] for user in by_name[item].users)
