"""Architectures that nothing was written for compute over pipeline ranks what they compute alone.

The ordinary suite takes a few that stress different things; the sweep takes all.
"""

import re

import pytest

import parcompiler as pc
from tests.architectures import ALL, CHOSEN, REFUSED, build


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


@pytest.mark.parametrize("name", CHOSEN)
def test_a_chosen_architecture_equals_one_process(name: str) -> None:
    check(name, 2)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ALL)
def test_every_architecture_equals_one_process(name: str) -> None:
    check(name, 2, 4)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused_with_its_place(name: str) -> None:
    make, place = REFUSED[name]
    model, inputs, loss = make()
    with pytest.raises(pc.CaptureError) as error:
        pc.compile(model.train(), pc.Mesh(pipeline=2), inputs, loss=loss)
    assert re.search(f"(?s){place}", str(error.value)), str(error.value)
