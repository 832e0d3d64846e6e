"""Parameter groups by name train as those of one process, whatever each rank holds of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import parcompiler as pc
from parcompiler.verification.pool import Job, pool
from tests import zoo

GROUPS: list[tuple[str, dict[str, float]]] = [
    ("*.bias", {"weight_decay": 0.0}),
    ("*norm*", {"weight_decay": 0.0}),
    ("layers.1.*.weight", {"lr": 3e-2}),
]
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("gpt-tied", {"pipeline": 2}, {"schedule": "zb-h1", "vocabulary": "vocab-2"}, "AdamW"),
    ("gpt", {"tensor": 2}, {}, "AdamW"),
    ("gpt-tied", {"pipeline": 2, "data": 2}, {"zero": 1, "vocabulary": "whole"}, "AdamW"),
    ("gpt", {"data": 2}, {"zero": 2}, "Adafactor"),
    ("gpt", {"data": 2}, {"zero": 3}, "SGD"),
    ("gpt", {"data": 2}, {"updates": "parameter-server"}, "AdamW"),
]
MICROBATCHES = 2


def chosen(name: str) -> dict[str, float]:
    """The options of a parameter as somebody would write them."""
    if name.startswith("layers.1.") and name.endswith(".weight"):
        return {"lr": 3e-2}
    return {"weight_decay": 0.0} if name.endswith(".bias") or "norm" in name else {}


@pytest.mark.parametrize(("name", "mesh", "options", "optimizer"), CASES)
def test_groups_by_name_are_those_of_one_process(
    name: str, mesh: dict[str, Any], options: dict[str, Any], optimizer: str, tmp_path: Path
) -> None:
    model, inputs = zoo.build(name)
    program = pc.compile(
        model, pc.Mesh(**mesh), inputs, microbatches=MICROBATCHES, precision="fp64", **options
    )
    program.export(tmp_path / "out")
    data = program.plan.mesh.data
    generator = torch.Generator().manual_seed(0)
    batches = [
        {k: torch.randint(int(t.max()) + 1, (len(t) * MICROBATCHES * data, *t.shape[1:]),
                          generator=generator) for k, t in inputs.items()}
        for _ in range(2)
    ]  # fmt: skip
    rates: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    if optimizer == "Adafactor":  # its own eps makes steps of rounding errors
        rates["eps"] = (1e-4, 1e-3)
    job = Job(str(tmp_path / "out"), batches, optimizer=optimizer,
              options={**rates, "groups": GROUPS})  # fmt: skip
    state = pool().run(job, program.lowered.grid.size).state

    reference, _ = zoo.build(name)
    reference.double()
    groups = [{"params": [p], **chosen(n)} for n, p in reference.named_parameters()]
    plain = getattr(torch.optim, optimizer)(groups, **rates)
    for batch in batches:
        for i in range(MICROBATCHES * data):
            rows = {k: t.chunk(MICROBATCHES * data)[i] for k, t in batch.items()}
            (reference(**rows) / (MICROBATCHES * data)).backward()
        plain.step()
        plain.zero_grad()
    assert {len(group) for group in (chosen(n) for n, _ in reference.named_parameters())} == {0, 1}
    for key, parameter in reference.named_parameters():
        error = (state[key] - parameter.detach()).norm() / parameter.detach().norm()
        assert error <= 1e-9, key
