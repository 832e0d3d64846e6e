"""What a program says of its plan and model is judged as given: each edited field is found."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import parcompiler as pc
from parcompiler.graph import BatchInput, Graph, Parameter
from parcompiler.lower import Lowered
from parcompiler.models import gpt
from parcompiler.pieces import Shard
from parcompiler.verifier import faults
from tests.verifier.edits import texts, with_value


@cache
def program(tensor: int = 1, data: int = 1) -> pc.Program:
    """Two pipeline ranks; tensor ranks hold the first matrix of each feed-forward in pieces."""
    torch.manual_seed(0)
    config = gpt.Config(layers=2, heads=2, hidden=8, vocabulary=32, sequence=4, tied=False)
    tokens = torch.randint(config.vocabulary, (2, 4))
    pins: Any = {"*.ffn.up.weight": "S(0)"} if tensor > 1 else "auto"
    return pc.compile(
        gpt.GPT(config),
        pc.Mesh(pipeline=2, tensor=tensor, data=data),
        {"tokens": tokens, "labels": tokens},
        microbatches=2,
        schedule="1f1b",
        sharding=pins,
        vocabulary="whole",
        progress=False,
    )


def with_graph(lowered: Lowered, **changes: Any) -> Lowered:
    return replace(lowered, graph=replace(lowered.graph, **changes))


def with_input(graph: Graph, k: int, **changes: Any) -> tuple[BatchInput, ...]:
    edited = replace(graph.inputs[k], **changes)
    return (*graph.inputs[:k], edited, *graph.inputs[k + 1 :])


def with_tensor(graph: Graph, name: str, /, **changes: Any) -> tuple[Parameter, ...]:
    assert name in graph.by_name
    return tuple(
        replace(item, **changes) if item.name == name else item for item in graph.parameters
    )


def keys_swapped(lowered: Lowered) -> Lowered:
    """Tokens are read as labels, labels as tokens: same shapes, same dtypes."""
    first, second = lowered.graph.inputs
    swapped = replace(first, key=second.key), replace(second, key=first.key)
    return with_graph(lowered, inputs=swapped)


MATRIX = "layers.0.ffn.up.weight"
MISTAKES: dict[str, tuple[Callable[[Lowered], Lowered], str]] = {
    "swapped keys": (keys_swapped, "is 'tokens' of the batch, not 'labels'"),
    "one key twice": (
        lambda p: with_graph(p, inputs=with_input(p.graph, 0, key="labels")),
        "2 inputs are 'labels' of the batch",
    ),
    "another shape": (
        lambda p: with_graph(p, inputs=with_input(p.graph, 0, shape=(4, 4))),
        "tokens is torch.int64 (2, 4) (torch.int64 (4, 4) is listed)",
    ),
    "another dtype": (
        lambda p: with_graph(p, inputs=with_input(p.graph, 0, dtype=torch.int32)),
        "(torch.int32 (2, 4) is listed)",
    ),
    "an input less": (
        lambda p: with_graph(p, inputs=p.graph.inputs[1:]),
        "tokens is listed 0 times",
    ),
    "by position": (lambda p: with_graph(p, positional=True), "it is read by position"),
    "a tensor less": (
        lambda p: with_graph(p, parameters=p.graph.parameters[1:]),
        "is listed 0 times",
    ),
    "a frozen parameter": (
        lambda p: with_graph(p, parameters=with_tensor(p.graph, MATRIX, trainable=False)),
        f"{MATRIX} carries a gradient, and is not trained as listed",
    ),
    "a tensor of another shape": (
        lambda p: with_graph(p, parameters=with_tensor(p.graph, MATRIX, shape=(8, 32))),
        f"{MATRIX} is torch.float32 (32, 8) (torch.float32 (8, 32) is listed)",
    ),
    "a tensor under another name": (
        lambda p: with_graph(p, parameters=with_tensor(p.graph, MATRIX, name="head.weight")),
        "2 tensors have the name head.weight",
    ),
    "pieces where there are none": (
        lambda p: with_graph(p, parameters=with_tensor(p.graph, MATRIX, shard=Shard(0, (32,)))),
        f"{MATRIX} is held as pieces along dimension 0 of (32,), not a whole",
    ),
    "an update in place": (
        lambda p: with_graph(p, parameters=with_tensor(p.graph, MATRIX, mutated=True)),
        f"{MATRIX} is not updated in place",
    ),
    "an order in memory": (
        lambda p: with_value(p, next(iter(p.values)), order=(1, 0, 2)),
        "lies in memory as (), and buffers as (1, 0, 2)",
    ),
    "tensor ranks": (lambda p: replace(p, tensor=2), "tensor is 2, and 1 in the plan"),
    "no tensor rank": (lambda p: replace(p, tensor=0), "tensor is 0"),
    "data ranks": (lambda p: replace(p, data=2), "data is 2, and 1 in the plan"),
    "shared states": (lambda p: replace(p, zero=1), "zero is 1, and 0 in the plan"),
    "a negative number of data ranks": (lambda p: replace(p, data=-1), "data is -1"),
    "micro-batches": (lambda p: replace(p, microbatches=3), "microbatches is 3, and 2 in the"),
    "fewer lists": (
        lambda p: replace(p, evaluation=p.evaluation[:1]),
        "2 ranks have a list for training and 1 for evaluation",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_edited_program_is_judged_as_given(mistake: str) -> None:
    edit, message = MISTAKES[mistake]
    lowered = program().lowered
    assert texts(lowered) == []
    assert any(message in text for text in texts(edit(lowered))), texts(edit(lowered))


def other_pieces(lowered: Lowered) -> Iterator[Lowered]:
    """The matrix in pieces of other dimensions, segments and ranks."""
    for shard in (None, Shard(1, (32,)), Shard(0, (16, 16)), Shard(0, (30,))):
        yield with_graph(lowered, parameters=with_tensor(lowered.graph, MATRIX, shard=shard))
    for tensor in (1, 3, 4):
        yield replace(lowered, tensor=tensor, plan=None)


def test_edited_pieces_are_found() -> None:
    lowered = program(tensor=2).lowered
    assert lowered.graph.by_name[MATRIX].shard == Shard(0, (32,))
    assert texts(lowered) == []
    for edited in other_pieces(lowered):
        assert any(MATRIX in text for text in texts(edited)), texts(edited)


def test_edited_data_degrees_are_found() -> None:
    lowered = program(data=2).lowered
    assert texts(lowered) == []
    for data in (0, 1, 3, 4):
        assert any(f"data is {data}" in text for text in texts(replace(lowered, data=data)))
    (bucket, *others) = lowered.buckets
    late = replace(bucket, stage=1 - bucket.stage)
    found = texts(replace(lowered, buckets=(late, *others)))
    assert any(f"waits for stage {late.stage}, which is not on rank" in text for text in found)


def test_recomputing_something_else_than_planned_is_found() -> None:
    lowered = program().lowered
    stage = lowered.stages[0]
    calls = (replace(stage.calls[0], recompute=True), *stage.calls[1:])
    edited = replace(lowered, stages=(replace(stage, calls=calls), *lowered.stages[1:]))
    (fault,) = faults(edited)
    assert str(fault).endswith("is recomputed, unlike in the plan")


def test_verify_runs_the_program_that_is_given() -> None:
    whole = program()
    with pytest.raises(pc.PlanError, match="is 'tokens' of the batch, not 'labels'"):
        replace(whole, lowered=keys_swapped(whole.lowered)).verify()
    with pytest.raises(pc.PlanError, match="data is 2, and 1 in the plan"):
        replace(whole, lowered=replace(whole.lowered, data=2)).verify()
