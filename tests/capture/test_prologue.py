"""What every stage may compute for itself: no parameters, no gradient, no chance."""

import operator

import torch
import torch.nn.functional as F
from torch import fx

from parcompiler.capture import capture
from parcompiler.capture.blocks import cut
from parcompiler.capture.effects import Effects
from parcompiler.capture.prologue import cone
from parcompiler.graph import Graph
from tests.distributed.models import ROWS, WIDTH, XY, Counting, Stack


def names(graph: Graph) -> set[str]:
    return {str(node.target) for node in cut(graph, 1).prologue}


class Masked(Stack):
    """A mask of the batch, a table and a draw, each used by all layers."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen = labels > 1
        table = torch.arange(WIDTH).cos()
        noise = torch.randn(ROWS, WIDTH)
        for layer in self.layers:
            x = layer(x) * seen[:, None] + table + noise
        return F.cross_entropy(self.head(x), labels)


def test_masks_and_tables_are_in_it_and_draws_are_not() -> None:
    graph = capture(Masked(), XY)
    found = names(graph)
    assert {"aten.gt.Scalar", "aten.arange.default", "aten.cos.default"} <= found
    assert "aten.randn.default" not in found
    carried = {node.name for node in cut(graph, 1).prologue} & graph.differentiable
    assert not carried


class Written(Stack):
    """Memory that is written between two readers."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(ROWS, WIDTH)
        early = mask + 1.0
        mask[:, 0] = 2.0
        mask.add_(labels[:, None])
        for layer in self.layers:
            x = layer(x) * mask + early
        return F.cross_entropy(self.head(x), labels)


def test_memory_that_is_written_moves_with_its_writers_and_early_readers() -> None:
    graph = capture(Written(), XY)
    parts = cut(graph, 1)
    effects = Effects(graph.fx_graph)
    for node in parts.prologue:
        assert set(effects.writers.get(effects.root(node), ())) <= set(parts.prologue)
    assert {"aten.add_.Tensor", "aten.add.Tensor", "aten.zeros.default"} <= names(graph)


class Blocked(Stack):
    """A constant that takes a parameter's values in."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        memory = torch.zeros(ROWS, WIDTH)
        memory[:, 0] = x.sum(-1)
        memory[:, 1] = self.head.weight.sum()
        for layer in self.layers:
            x = layer(x) + memory
        return F.cross_entropy(self.head(x), labels)


def test_memory_that_a_parameter_is_written_to_stays() -> None:
    assert "aten.zeros.default" not in names(capture(Blocked(), XY))


def test_what_reads_a_buffer_that_changes_stays() -> None:
    graph = capture(Counting(), XY)
    changing = {item.node for item in graph.parameters if item.mutated}
    assert {item.name for item in graph.parameters if item.mutated} == {"calls", "seen"}
    read = {operand.name for node in cut(graph, 1).prologue for operand in node.all_input_nodes}
    assert not read & changing


class Parted(Stack):
    """Two parts of the batch: one goes into a draw alone, the other to all layers."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first, second = x.split([1, WIDTH - 1], -1)
        F.dropout(first)
        for layer in self.layers:
            x = layer(x) * second.mean(-1, keepdim=True)
        return F.cross_entropy(self.head(x), labels)


def test_results_of_a_node_with_several_move_together() -> None:
    graph = capture(Parted(), XY)
    parts = cut(graph, 1)
    assert sum(node.target is operator.getitem for node in parts.prologue) == 2
    read = [node for block in parts.blocks for node in block.inputs]
    assert all(isinstance(node.meta["val"], torch.Tensor) for node in read)
    sent = [n for n in parts.prologue if n.target is operator.getitem][:1]
    for again in (sent, [n for n in parts.prologue if n.name == "mean"]):
        blocks = cut(graph, 1, again).blocks
        assert all(isinstance(n.meta["val"], torch.Tensor) for b in blocks for n in b.inputs)


def test_a_cone_has_the_writers_of_its_memory() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    copied = graph.call_function(torch.ops.aten.clone.default, (x,))
    part = graph.call_function(torch.ops.aten.select.int, (copied, 0, 0))
    update = graph.call_function(torch.ops.aten.zero_.default, (part,))
    total = graph.call_function(torch.ops.aten.sum.default, (copied,))
    effects = Effects(graph)
    assert cone(total, effects) == {total, copied, part, update}
    assert cone(copied, effects) == {copied, part, update}
