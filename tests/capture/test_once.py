"""What is found out about a graph once: for every mesh, and never for another graph."""

import dataclasses
import os
import subprocess
import sys

import torch
from torch import nn

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


class Kinds(nn.Module):
    """Goes through a set of words, as models with several kinds of layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kinds = nn.Linear(4, 4), ["full", "sliding", "every", "full"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = {kind: torch.cos(x * len(kind)) for kind in set(self.kinds)}
        for kind in self.kinds:
            x = x + self.layer(angles[kind])
        assert isinstance({1}, set)
        return x.sum()


def test_a_fingerprint_does_not_depend_on_the_hashes_of_a_process() -> None:
    code = (
        "import torch; from tests.capture.test_once import Kinds, capture; "
        "print(capture(Kinds(), {'x': torch.ones(2, 4)}).fingerprint)"
    )
    for seed in "012":  # without order, six permutations
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == capture(Kinds(), {"x": torch.ones(2, 4)}).fingerprint
    assert "set" not in globals()


def test_a_second_mesh_is_planned_as_for_a_model_captured_anew() -> None:
    made, inputs = model(4)
    first = pc.compile(made, pc.Mesh(pipeline=2), inputs, microbatches=4, progress=False)
    for mesh in (pc.Mesh(pipeline=2, tensor=2), pc.Mesh(tensor=2, data=2), pc.Mesh(pipeline=4)):
        again = pc.compile(first, mesh, microbatches=4, progress=False)
        anew = pc.compile(made, mesh, inputs, microbatches=4, progress=False)
        assert again.plan.to_json() == anew.plan.to_json()
        assert again.captured is first.captured
