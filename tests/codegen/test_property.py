"""Random small models, divided at random: the emitted stages compute what the graph computes.

No processes: the stage classes are called one after the other, as the ranks would call them. Loss
and gradients are equal bit for bit to those of the captured graph, run node by node.
"""

import itertools
from collections.abc import Sequence
from operator import attrgetter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

from parcompiler.capture.blocks import cut, levels
from parcompiler.codegen.modules import stage_classes
from parcompiler.graph import Graph
from parcompiler.lower import Lowered
from parcompiler.runtime import Stage
from tests.codegen import models
from tests.codegen.emitting import graph_of, lowered_by

ROWS, WIDTH = 2, 4
KINDS = ("linear", "relu", "add", "cat", "norm", "scale", "split", "inplace")

Recipe = tuple[tuple[str, int], ...]  # for each layer what it does, and how far back it looks


class Layer(nn.Module):
    """One of a few functions of the running value and of one from some layers ago."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.dense = nn.Linear(WIDTH * 2 if kind == "cat" else WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        if self.kind == "relu":
            x = F.relu(self.dense(x))
        elif self.kind == "add":
            x = x + self.dense(skipped)
        elif self.kind == "cat":
            x = self.dense(torch.cat([x, skipped], dim=-1))
        elif self.kind == "norm":
            x = self.norm(x) * skipped + self.dense(x)
        elif self.kind == "scale":
            with torch.no_grad():
                size = x.abs().mean(dim=-1, keepdim=True) + 1.0
            x = self.dense(x / size) - skipped
        elif self.kind == "split":
            first, second = self.dense(x).chunk(2, dim=-1)
            x = torch.cat([second * first, first], dim=-1) + skipped
        elif self.kind == "inplace":
            x = self.dense(x).add_(skipped).relu_()
        else:
            x = self.dense(x)
        return x


class Model(nn.Module):
    """Layers in a row, each of which may look back over others."""

    def __init__(self, recipe: Recipe, shared: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(7, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for kind, _ in recipe)
        self.back = [back for _, back in recipe]
        self.order = [min(i, 1) if shared else i for i in range(len(recipe))]
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        mask = (tokens > 2).unsqueeze(-1).float()
        values = [self.words(tokens) * mask]
        for index, back in zip(self.order, self.back, strict=True):
            skipped = values[max(0, len(values) - 1 - back)]
            values.append(self.layers[index](values[-1], skipped) * mask)
        return F.cross_entropy(self.head(values[-1]).flatten(end_dim=1), labels.flatten())


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 7, (ROWS, 5), generator=generator)
    return {"tokens": tokens, "labels": tokens % 3}


def whole(graph: Graph, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the captured graph, run by `fx.Interpreter`; contexts are obeyed."""
    tensors = {name: t.detach().clone() for name, t in graph.tensors.items()}
    for item in graph.parameters:
        tensors[item.name].requires_grad_(item.trainable)
    by_node = {item.node: tensors[item.name] for item in graph.parameters}
    by_node |= {item.node: inputs[item.key] for item in graph.inputs}
    names = [node.name for node in graph.fx_graph.nodes if node.op == "placeholder"]
    interpreter = Obedient(fx.GraphModule({}, graph.fx_graph))
    loss = interpreter.run(*(by_node[name] for name in names))
    loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward()
    return loss.detach(), {n: t.grad for n, t in tensors.items() if t.grad is not None}


class Obedient(fx.Interpreter):
    """Runs a graph whose nodes remember that they stood under `no_grad`."""

    def run_node(self, n: fx.Node) -> object:
        """One node, with or without gradients."""
        modes = [context[0] for context in n.meta.get("contexts", ())]
        with torch.set_grad_enabled("no_grad" not in modes):
            return super().run_node(n)


def divided(lowered: Lowered, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the emitted stages, called one after the other in one process.

    Values are cut from one another as between ranks, and gradients handed back in turn.
    """
    made: dict[int, Stage] = {}
    for rank in range(lowered.size):
        made |= {j: kind() for j, kind in stage_classes(lowered, rank, "cpu").items()}
    copies = copies_of(made)
    own = {name: first for name, (first, *_) in copies.items()}
    with torch.no_grad():
        for name, parts in copies.items():
            for tensor in parts:
                tensor.copy_(lowered.graph.tensors[name])
    known = {item.key: inputs[item.key] for item in lowered.graph.inputs}
    taken: dict[tuple[int, str], Tensor] = {}
    outputs: dict[int, dict[str, Tensor]] = {}
    made_by: dict[str, int] = {}
    for j in sorted(made):
        stage = made[j]
        arguments = {name: known[name] for name in stage.inputs}
        for name in stage.receives:
            value = lowered.values[name]
            leaf = outputs[made_by[name]][name].detach().requires_grad_(value.differentiable)
            taken[j, name] = arguments[name] = leaf
        found = stage(**arguments)
        found = found if isinstance(found, tuple) else (found,)
        outputs[j] = dict(zip((*stage.gives, "loss"), found, strict=False))
        made_by |= dict.fromkeys(stage.gives, j)
    for j in sorted(made, reverse=True):
        backward(j, outputs[j], taken)
    loss = outputs[max(made)]["loss"]
    for name, parts in copies.items():
        if len(parts) > 1:
            own[name].grad = sum_of([p.grad for p in parts if p.grad is not None])
    return loss.detach(), {n: t.grad for n, t in own.items() if t.grad is not None}


def backward(j: int, outputs: dict[str, Tensor], taken: dict[tuple[int, str], Tensor]) -> None:
    """The gradients of one stage from those of the stages that took its values."""
    roots, gradients = [], []
    for name, value in outputs.items():
        parts = [
            t.grad for (k, n), t in taken.items() if n == name and k > j and t.grad is not None
        ]
        if name == "loss":
            roots.append(value)
            gradients.append(torch.ones_like(value))
        elif parts and value.requires_grad:
            roots.append(value)
            gradients.append(sum_of(parts))
    if roots:
        torch.autograd.backward(roots, gradients)


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """Parts added up in order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def copies_of(made: dict[int, Stage]) -> dict[str, list[Tensor]]:
    """Each stage's copy of the tensors of the model, by name."""
    found: dict[str, list[Tensor]] = {}
    for j in sorted(made):
        attributes = {name: attribute for attribute, name in made[j].tensor_names().items()}
        for name, attribute in attributes.items():  # one of those that share the tensor
            found.setdefault(name, []).append(attrgetter(attribute)(made[j]))
    return found


def consecutive(blocks: Sequence[str], ends: Sequence[int]) -> list[list[str]]:
    """The blocks between cuts."""
    bounds = [0, *ends, len(blocks)]
    return [list(blocks[a:b]) for a, b in itertools.pairwise(bounds)]


recipes = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 3)), min_size=2, max_size=6
).map(tuple)


@settings(
    max_examples=30,
    derandomize=True,
)
@given(recipe=recipes, shared=st.booleans(), data=st.data())
def test_emitted_stages_equal_the_graph(recipe: Recipe, shared: bool, data: st.DataObject) -> None:
    torch.manual_seed(0)
    graph = graph_of(Model(recipe, shared).double(), batch())
    level = data.draw(st.sampled_from(list(levels(graph))))
    blocks = [block.name for block in cut(graph, level).blocks]
    most = min(4, len(blocks))
    count = data.draw(st.integers(2, most)) - 1
    places = st.lists(st.integers(1, len(blocks) - 1), min_size=count, max_size=count, unique=True)
    stages = consecutive(blocks, sorted(data.draw(places)))
    lowered = lowered_by(graph, stages, granularity=level)
    check_equal(graph, lowered, batch())


@pytest.mark.parametrize("ends", [[1], [3], [2, 4]])
def test_a_shared_layer_in_a_loop_equals_the_graph(ends: list[int]) -> None:
    graph = graph_of(models.Albert().double(), models.tokens())
    blocks = [block.name for block in cut(graph, 1).blocks]
    check_equal(graph, lowered_by(graph, consecutive(blocks, ends)), models.tokens())


def check_equal(graph: Graph, lowered: Lowered, inputs: dict[str, Tensor]) -> None:
    """Loss and gradients agree; bit for bit unless a gradient is added up in other orders."""
    loss, gradients = whole(graph, inputs)
    found, others = divided(lowered, inputs)
    assert torch.equal(loss, found)
    assert gradients.keys() == others.keys()
    several = any(len(value.consumers) > 1 for value in lowered.values.values()) or lowered.tied
    for name, gradient in gradients.items():
        if several:
            torch.testing.assert_close(others[name], gradient, rtol=1e-12, atol=1e-14)
        else:
            assert torch.equal(others[name], gradient), name
