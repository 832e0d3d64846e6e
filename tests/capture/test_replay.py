"""Equal layers are traced twice and copied: the graph is that of layers traced one by one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from parcompiler.capture import capture, replay
from parcompiler.capture.layer_tracer import LayerTracer
from parcompiler.capture.narrow import capture_in
from parcompiler.capture.replay import describe
from parcompiler.errors import CaptureError
from parcompiler.graph import Graph
from parcompiler.models import gpt
from tests import zoo

LAYERS = 6
LAST = LAYERS - 1
SEEN: list[int] = []


class Layer(nn.Module):
    """A layer; `kind` says what is odd about it."""

    def __init__(self, index: int, kind: str = "") -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.kind, self.index, self.window = kind, index, 2 if index % 2 else None
        self.calls = 0
        self.batch_norm = nn.BatchNorm1d(4) if kind == "updates a buffer" else None

    def forward(self, x: torch.Tensor, mask: torch.Tensor, notes: Any = None) -> Any:
        """x [n, 4] to [n, 4]."""
        x = x + self.up(self.norm(x)).masked_fill(mask, 0.0).relu_()
        if self.kind == "reads its index":
            x = x * (self.index + 1)
        if self.kind == "reads its index by a method of its own":
            x = x * (1 + vars(self)["index"])
        if self.kind == "two kinds" and self.window is not None:
            x = x.roll(self.window, 0)
        if self.kind == "counts its calls":
            self.calls += 1
        if self.kind == "counts in its file":
            SEEN.append(1)
            x = x * len(SEEN)
        if self.batch_norm is not None:
            x = self.batch_norm(x)
        if self.kind == "updates its argument":
            mask.logical_not_()
        if self.kind == "hides what it reads" and object.__getattribute__(self, "index") == LAST:
            x = x * 3
        if self.kind == "fails at the end" and self.index == LAST:
            raise ValueError
        if notes is not None:
            notes.append(x)
        return (x, mask) if self.kind == "returns its argument" else x


def doubled(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


class Stack(nn.Module):
    """Layers under an embedding, with the loss of a tied head."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 4)
        layers = [Layer(index, kind) for index in range(LAYERS)]
        self.layers: Any = nn.ModuleList(layers)
        self.kind = kind
        if kind == "has a hook":
            for layer in layers:
                layer.up.register_forward_hook(doubled)
        if kind == "is tied to the head":
            for layer in layers:
                layer.up.weight = layers[0].up.weight
        if kind == "is another":
            self.layers[3].norm = nn.Identity()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of tokens [n] with labels [n]."""
        x, states = self.table(tokens), []
        mask = torch.zeros(len(tokens), 4, dtype=torch.bool, device=tokens.device)
        notes: list[torch.Tensor] | None = [] if self.kind == "appends to a list" else None
        for _ in range(2 if self.kind == "runs twice" else 1):
            for layer in self.layers:
                x = layer(x, mask, notes)
                x, mask = x if isinstance(x, tuple) else (x, mask)
                states.append(x)
        x = x + sum(states[1:-1]) + sum(notes or [])
        if self.kind == "is called from outside":
            x = self.layers[3].up(x)
        return nn.functional.cross_entropy(x @ self.table.weight.T, labels)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the layers that are copied."""
    found: list[str] = []
    copy = LayerTracer.copy

    def noted(self: LayerTracer, *args: Any) -> Any:
        found.append(next(reversed(self.stack)).rpartition(".")[2])
        return copy(self, *args)

    monkeypatch.setattr(LayerTracer, "copy", noted)
    return found


def batch() -> dict[str, torch.Tensor]:
    return {"tokens": torch.tensor([1, 5, 3]), "labels": torch.tensor([2, 0, 7])}


def one_by_one(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Graph]) -> Graph:
    """The graph without any copies."""
    with monkeypatch.context() as patch:
        patch.setattr(replay, "ENABLED", False)
        return run()


def described(graph: Graph) -> list[Any]:
    """All that the compiler reads of a graph, in values that can be compared."""

    def form(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [form(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return repr(value)
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad

    kept = ("nn_module_stack", "stack_trace", "contexts", "synchronized")
    nodes = [
        [node.name, node.op, str(node.target), repr(node.args), repr(node.kwargs),
         form(node.meta.get("val")), *(repr(node.meta.get(key)) for key in kept)]
        for node in graph.fx_graph.nodes
    ]  # fmt: skip
    described = graph.parameters, graph.inputs, graph.loss.name, graph.differentiable
    return [*nodes, *described, graph.fingerprint, graph.random]


@pytest.mark.parametrize("kind", ["", "runs twice", "is called from outside",
                                  "returns its argument", "is tied to the head"])  # fmt: skip
def test_layers_that_are_equal_are_copied(
    kind: str, copies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = capture(Stack(kind), batch())
    assert copies == ["2", "3", "4"]
    alone = one_by_one(monkeypatch, lambda: capture(Stack(kind), batch()))
    assert described(found) == described(alone)


def test_layers_of_two_kinds_are_copies_of_those_of_their_own(
    copies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = capture(Stack("two kinds"), batch())
    assert copies == ["4"]  # the second of each kind is traced, and the last of all
    alone = one_by_one(monkeypatch, lambda: capture(Stack("two kinds"), batch()))
    assert described(found) == described(alone)


def test_a_layer_that_is_another_is_traced(
    copies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = capture(Stack("is another"), batch())
    assert copies == ["2", "4"]
    alone = one_by_one(monkeypatch, lambda: capture(Stack("is another"), batch()))
    assert described(found) == described(alone)


@pytest.mark.parametrize(
    "kind",
    [
        "reads its index",
        "reads its index by a method of its own",
        "counts its calls",
        "counts in its file",
        "updates a buffer",
        "updates its argument",
        "appends to a list",
        "has a hook",
    ],
)
def test_what_may_differ_is_traced_layer_by_layer(
    kind: str, copies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    SEEN.clear()
    found = capture(Stack(kind), batch())
    assert copies == []
    SEEN.clear()
    alone = one_by_one(monkeypatch, lambda: capture(Stack(kind), batch()))
    assert described(found) == described(alone)


def test_a_last_layer_that_is_no_copy_after_all_has_all_traced_anew(
    copies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = capture(Stack("hides what it reads"), batch())
    assert copies == ["2", "3", "4"]
    alone = one_by_one(monkeypatch, lambda: capture(Stack("hides what it reads"), batch()))
    assert described(found) == described(alone)


def test_a_layer_that_fails_is_named(copies: list[str]) -> None:
    with pytest.raises(CaptureError, match=r"ValueError[^']*'layers\.5'"):
        capture(Stack("fails at the end"), batch())


def test_models_in_16_bits_have_copies_too(
    copies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = gpt.Config(layers=6, heads=2, hidden=16, vocabulary=64, sequence=8, dropout=0.1)
    tokens = torch.randint(config.vocabulary, (2, 9))
    inputs = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    def run() -> Graph:
        return capture_in(torch.bfloat16, gpt.GPT(config), inputs)

    found = run()
    assert len(copies) == 3
    assert described(found) == described(one_by_one(monkeypatch, run))


@pytest.mark.parametrize("name", ["hf-llama", "hf-bert", "hf-opt"])
def test_models_of_transformers_have_copies(
    name: str, copies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(replay, "FEWEST", 4)  # the layers that these have
        found = capture(*zoo.build(name))
    assert copies == ["2"]
    assert described(found) == described(capture(*zoo.build(name)))


def test_modules_are_equal_in_classes_shapes_ties_and_attributes() -> None:
    def pair(tied: bool, *sizes: int) -> nn.Module:
        made = nn.Sequential(*(nn.Linear(size, 2) for size in sizes))
        if tied:
            made[1].weight = made[0].weight
        return made

    def differing(one: nn.Module, other: nn.Module) -> set[tuple[str, str]] | None:
        (structure, ours), (other_structure, theirs) = describe(one), describe(other)
        if structure != other_structure:
            return None
        return {at for at in ours if ours[at] != theirs[at]}

    assert differing(pair(False, 2, 2), pair(False, 2, 2)) == set()
    assert differing(pair(False, 2, 2), pair(True, 2, 2)) is None
    assert differing(pair(False, 2, 2), pair(False, 2, 3)) is None
    assert differing(pair(False, 2, 2), pair(False, 2)) is None
    assert differing(nn.ReLU(), nn.Tanh()) is None
    assert differing(nn.Dropout(0.1), nn.Dropout(0.2)) == {("", "p")}
    assert differing(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)) is None
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert differing(nn.Linear(2, 2), frozen) is None

    def holding(how: Any) -> nn.Module:
        made = nn.Identity()
        vars(made)["how"] = how
        return made

    assert differing(holding(abs), holding(repr)) is None
    assert differing(holding(abs), holding(abs)) == set()
    assert differing(holding([1, "a"]), holding([2, "a"])) == {("", "how")}
    rows, columns = partial(torch.sum, dim=0), partial(torch.sum, dim=1)
    assert differing(holding(rows), holding(partial(torch.sum, dim=0))) == set()
    assert differing(holding(rows), holding(columns)) is None


@pytest.mark.parametrize("name", ["gpt", "llama", "hf-gpt2", "hf-t5", "hf-vit"])
def test_the_switch_changes_no_capture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "FEWEST", 2)
    found = capture(*zoo.build(name))
    alone = one_by_one(monkeypatch, lambda: capture(*zoo.build(name)))
    assert described(found) == described(alone)
