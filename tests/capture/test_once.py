"""What is found out about a graph once: for every mesh, and never for another graph."""

import dataclasses

import torch

import parcompiler as pc
from parcompiler.capture import capture
from parcompiler.capture.blocks import cut, levels
from parcompiler.capture.clean import simplify
from parcompiler.models import gpt


def model(layers: int) -> tuple[gpt.GPT, dict[str, torch.Tensor]]:
    """A small model and a micro-batch."""
    torch.manual_seed(0)
    config = gpt.Config(layers=layers, heads=2, hidden=16, vocabulary=64, sequence=8)
    tokens = torch.randint(config.vocabulary, (2, 9))
    return gpt.GPT(config), {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def test_a_graph_that_is_replaced_knows_nothing_of_the_one_before() -> None:
    graph = capture(*model(2))
    assert simplify(graph) is simplify(graph)
    assert cut(graph, 1) is cut(graph, 1)
    assert levels(graph) == levels(dataclasses.replace(graph))
    other = dataclasses.replace(graph, differentiable=frozenset())
    assert other.once("levels", lambda: "asked anew") == "asked anew"


def test_a_second_mesh_is_planned_as_for_a_model_captured_anew() -> None:
    made, inputs = model(4)
    first = pc.compile(made, pc.Mesh(pipeline=2), inputs, microbatches=4, progress=False)
    for mesh in (pc.Mesh(pipeline=2, tensor=2), pc.Mesh(tensor=2, data=2), pc.Mesh(pipeline=4)):
        again = pc.compile(first, mesh, microbatches=4, progress=False)
        anew = pc.compile(made, mesh, inputs, microbatches=4, progress=False)
        assert again.plan.to_json() == anew.plan.to_json()
        assert again.captured is first.captured
