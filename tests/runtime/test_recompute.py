"""Recomputed layers: the same bits, less memory, and nothing left behind."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import parcompiler as pc
from parcompiler.capture import capture
from parcompiler.capture.clean import simplify
from parcompiler.capture.effects import is_repeatable
from parcompiler.graph import Graph
from parcompiler.lower import Lowered
from parcompiler.options import Options
from parcompiler.problem import Problem
from parcompiler.runtime import recomputed
from parcompiler.runtime.batch import microbatches
from parcompiler.runtime.deferred import Deferral, finish, linear
from parcompiler.runtime.rng import SeededDraws, seeded
from parcompiler.runtime.stage import Stage
from parcompiler.runtime.versions import Versions
from parcompiler.verifier import verify
from tests import zoo
from tests.runtime.ranks import Ranks, divided

WIDTH = 8


class Layer(nn.Module):
    """Two linear maps with dropout; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        inner = F.gelu(linear(F.dropout(x, 0.3), self.up))
        return x + F.dropout(linear(inner, self.down), 0.2)


@pytest.fixture
def layers() -> list[Layer]:
    torch.manual_seed(0)
    return [Layer() for _ in range(3)]


def draws(kind: str) -> AbstractContextManager[object]:
    return SeededDraws(1, 2) if kind == "proof" else seeded(3, torch.device("cpu"))


def results(
    layers: list[Layer], kind: str, *, again: bool, split: bool = False
) -> list[torch.Tensor]:
    """The output, and the gradients of the input and all weights."""
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for layer in layers:
        layer.zero_grad()
    y, deferral = x, Deferral()
    with draws(kind), deferral.forward() if split else nullcontext():
        for layer in layers:
            y = recomputed(layer, y) if again else layer(y)
    if split:
        with deferral.collect() as products:
            y.sum().backward()
        assert len(products) == 2 * len(layers)
        finish(products)
    else:
        y.sum().backward()
    found = [x.grad, *(p.grad for layer in layers for p in layer.parameters())]
    assert all(gradient is not None for gradient in found)
    return [y.detach(), *(gradient for gradient in found if gradient is not None)]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", ["proof", "training"])
def test_a_recomputed_layer_has_the_same_bits(layers: list[Layer], kind: str, split: bool) -> None:
    wanted = results(layers, kind, again=False, split=split)
    found = results(layers, kind, again=True, split=split)
    assert all(map(torch.equal, wanted, found))
    assert [layer.calls for layer in layers] == [3, 3, 3]


def test_the_users_generator_is_left_alone(layers: list[Layer]) -> None:
    before = torch.get_rng_state()
    for kind in ("proof", "training"):
        results(layers, kind, again=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_evaluation_runs_each_layer_once(layers: list[Layer]) -> None:
    with torch.no_grad():
        y = recomputed(layers[0], torch.randn(2, WIDTH))
    assert layers[0].calls == 1
    assert not y.requires_grad


class Pair(Stage):
    """A stage with two layers, recomputed or not."""

    gives = ("y",)

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = recomputed(layer, x) if self.again else layer(x)
        return x


def updated_between(*, again: bool) -> list[torch.Tensor]:
    """The gradients of a micro-batch after whose forward another one updated the weights."""
    stage, versions = Pair(again=again), Versions()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    outputs = []
    for i in range(2):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(i)).requires_grad_()
        with seeded(i, torch.device("cpu")):
            outputs.append((x, versions.forward(stage, 0, i, {"x": x})))
    found = []
    for i, (x, y) in enumerate(outputs):
        y.sum().backward()
        versions.update(stage, 0, i, optimizer.step)
        assert x.grad is not None
        found.append(x.grad)
    return [*found, *(p.detach() for p in stage.parameters())]


def test_a_layer_is_recomputed_with_the_weights_of_its_forward() -> None:
    assert all(map(torch.equal, updated_between(again=False), updated_between(again=True)))


class Living(TorchDispatchMode):
    """Knows which of the memory that was made within it, and not before, is still there."""

    def __init__(self, *before: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before = {tensor.untyped_storage().data_ptr() for tensor in before}
        self.made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage.data_ptr() not in self.before:
                self.made[storage.data_ptr()] = weakref.ref(storage)
        return result

    def nbytes(self) -> int:
        """Bytes of it."""
        alive = (reference() for reference in self.made.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)


def kept(layers: list[Layer], *, again: bool) -> tuple[int, int]:
    """Bytes that are held after a forward for its backward, and after the backward."""
    x = torch.randn(16, WIDTH).requires_grad_()
    weights = (weight for layer in layers for weight in layer.parameters())
    with Living(x, *weights) as living:
        y = x
        for layer in layers:
            y = recomputed(layer, y) if again else layer(y)
        loss = y.sum()
        del y
    before = living.nbytes() - loss.nbytes
    loss.backward()
    return before, living.nbytes() - loss.nbytes


def test_only_what_a_recomputed_layer_reads_is_kept(layers: list[Layer]) -> None:
    value = 16 * WIDTH * 4
    assert kept(layers, again=True) == (2 * value, 0)  # between the layers; x is the caller's
    assert kept(layers, again=False)[0] > 3 * 8 * value


@cache
def graph_of(name: str) -> Graph:
    return simplify(capture(*zoo.build(name)))


def with_all_recomputed(lowered: Lowered) -> Lowered:
    """The program with every block recomputed that can be."""
    stages = tuple(
        replace(
            stage,
            calls=tuple(
                replace(call, recompute=is_repeatable(call.block.nodes)) for call in stage.calls
            ),
        )
        for stage in lowered.stages
    )
    assert any(call.recompute for stage in stages for call in stage.calls)
    changed = replace(lowered, stages=stages, plan=None)  # it is no longer that of its plan
    verify(changed)
    return changed


CASES = [
    (name, schedule)
    for name in ("gpt-dropout", "llama", "resnet", "t5")
    for schedule in ("gpipe", "1f1b", "zb-h1", "pipedream")
    if (name, schedule) != ("t5", "pipedream")  # asynchronous steps take no tied weights
]


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_a_step_with_recomputation_has_the_same_bits(name: str, schedule: str) -> None:
    lowered = divided(graph_of(name), schedule, 2, 3)
    plain, again = Ranks(lowered), Ranks(with_all_recomputed(lowered))
    for ranks in (plain, again):
        for item in ranks.interpreters:
            item.update = lambda: None
    wanted = plain.step()
    assert again.step() == wanted
    for ranks in (plain, again):
        for item in ranks.interpreters:
            item.draws = lambda j, i: SeededDraws(7, 10 * i + j)
    assert again.step() == plain.step()


@pytest.mark.parametrize("name", ["gpt-dropout", "llama", "t5"])
def test_the_predicted_memory_is_what_a_forward_keeps(name: str) -> None:
    """All blocks on one stage: what they keep are the values between them."""
    graph = graph_of(name)
    problem = Problem(graph, pc.Mesh(), Options(microbatches=1))
    priced = problem.priced(1)
    lowered = divided(graph, "1f1b", 1, 1)
    ranks = Ranks(with_all_recomputed(lowered))
    (interpreter,) = ranks.interpreters
    stage = interpreter.stages[0]
    names = frozenset(block.name for block in priced.cut.blocks) & priced.repeatable
    (arguments,) = microbatches(ranks.programs[0], ranks.batch)
    given = (*arguments.values(), *interpreter.tensors.values())
    with Living(*given) as living, seeded(0, torch.device("cpu")):
        loss = stage(**{name: arguments[name] for name in stage.inputs})
    found = living.nbytes() - loss.nbytes
    predicted = sum(priced.recomputing(names).saved)
    prologue = sum(node.meta["val"].nbytes for node in lowered.stages[0].prologue)
    assert predicted <= found <= predicted + prologue
    assert predicted < sum(priced.saved) / 4
