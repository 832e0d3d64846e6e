"""Architectures that nothing was written for compute over pipeline ranks what they compute alone.

The ordinary suite takes a few that stress different things; the sweep takes all, also on tensor,
context and data ranks.
"""

import re
from typing import Any

import pytest

import parcompiler as pc
from parcompiler.capture.effects import draws_in_evaluation
from tests.architectures import ALL, CHOSEN, REFUSED, build

# Of an EncoderDecoderModel with labels: they say that it computes its own loss.
pytestmark = pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces:FutureWarning")


def check(name: str, *pipelines: int) -> None:
    model, inputs, loss = build(name)
    first = pc.Mesh(pipeline=pipelines[0])
    captured = pc.compile(model, first, inputs, loss=loss, schedule="1f1b", microbatches=3)
    for pipeline in pipelines:
        mesh = pc.Mesh(pipeline=pipeline)
        program = pc.compile(captured, mesh, schedule="1f1b", microbatches=3)
        verification = program.verify()
        assert verification.ok, f"{pipeline} stages: {verification}"
        assert verification.native.limit <= 1e-5
        assert verification.lifted is not None, verification.note
        assert verification.loss_error <= 1e-9
        assert max(verification.gradient_error, verification.parameter_error) <= 1e-9
        if not any(map(draws_in_evaluation, program.captured.fx_graph.nodes)):
            assert verification.evaluation_error is not None
            assert verification.evaluation_error <= 1e-9


@pytest.mark.parametrize("name", CHOSEN)
def test_a_chosen_architecture_equals_one_process(name: str) -> None:
    check(name, 2)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ALL)
def test_every_architecture_equals_one_process(name: str) -> None:
    check(name, 2, 4)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        ({"context": 2}, {}),
        ({"tensor": 2, "pipeline": 2}, {}),
        ({"data": 2, "tensor": 2}, {"zero": 3}),
        ({"pipeline": 2, "context": 2}, {}),
        ({"tensor": 2, "context": 2}, {"zero": 2}),
        (
            {"pipeline": 2, "data": 2},
            {"zero": 2, "schedule": "zb-v", "recompute": "selective"},
        ),
        (
            {"pipeline": 2},
            {"recompute": "offload", "schedule": "interleaved", "vocabulary": "vocab-2"},
        ),
    ],
)
def test_every_architecture_equals_one_process_on_other_axes(
    name: str, degrees: Any, options: Any
) -> None:
    model, inputs, loss = build(name)  # which never ran: it is captured in its first forward
    mesh = pc.Mesh(**degrees)
    try:
        program = pc.compile(model, mesh, inputs, loss=loss, microbatches=3, **options)
    except pc.InputError as error:
        assert "context" in degrees, error
        assert "does not divide" in str(error), error  # images have no rows to divide
        return
    verification = program.verify()
    assert verification.ok, str(verification)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused_with_its_place(name: str) -> None:
    make, place = REFUSED[name]
    model, inputs, loss = make()
    with pytest.raises(pc.CaptureError) as error:
        pc.compile(model.train(), pc.Mesh(pipeline=2), inputs, loss=loss)
    assert re.search(f"(?s){place}", str(error.value)), str(error.value)
