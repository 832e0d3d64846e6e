"""What of an exported graph runs: what the loss and the buffers depend on, updates in place too."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import parcompiler as pc
from parcompiler.capture import capture
from parcompiler.graph import Graph
from tests.distributed.models import CLASSES, WIDTH, XY, Stack


def operators(graph: Graph) -> list[str]:
    nodes = [node for node in graph.fx_graph.nodes if node.op == "call_function"]
    return [str(getattr(node.target, "_opname", node.target)) for node in nodes]


class Measured(Stack):
    """Returns probabilities, which nothing uses, beside an accuracy without a gradient."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        y = self.head(self.layers[0](x))
        probabilities = y.softmax(-1)
        with torch.no_grad():
            accuracy = (y.argmax(-1) == labels).float().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            also = F.linear(y, y)
        outputs = {"probabilities": probabilities, "accuracy": accuracy, "also": also}
        return {"loss": F.cross_entropy(y, labels), **outputs}


def test_what_is_returned_beside_a_region_and_not_used_is_dropped() -> None:
    assert operators(capture(Measured(), XY)) == ["linear", "linear", "cross_entropy_loss"]


class Watching(Stack):
    """Running statistics of what the loss does not use, after an update of it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scaled = x * 1.5
        F.relu(scaled, inplace=True)
        self.norm(scaled)
        scaled.mul_(2.0)  # nobody reads that
        return F.cross_entropy(self.head(self.layers[0](x)), labels)


def test_what_leads_to_an_update_of_a_buffer_stays_and_what_is_updated_for_nobody_goes() -> None:
    names = operators(capture(Watching(), XY))
    assert names[:4] == ["mul", "relu_", "add_", "batch_norm"]
    assert "mul_" not in names


class Unused(Stack):
    """An embedding that only memory reads which nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros_like(x)
        rows += self.embed(labels)
        (rows + 1).mul_(rows)
        return super().forward(x, labels)


def test_an_embedding_for_nobody_is_dropped_and_not_spread() -> None:
    assert operators(capture(Unused(), XY)) == operators(capture(Stack(), XY))
    program = pc.compile(Unused(), pc.Mesh(pipeline=2), XY, vocabulary="vocab-1")
    assert program.lowered.vocabulary is None or not program.lowered.vocabulary.lookups
