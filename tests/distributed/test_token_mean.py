"""The loss over uneven padding is the mean over all tokens, as one large batch has it."""

from pathlib import Path
from typing import Any

import pytest
import torch

import parcompiler as pc
from examples.nanogpt import GPT, GPTConfig
from parcompiler.verification.pool import Job, pool
from tests import zoo

CONFIG = GPTConfig(block_size=6, vocab_size=37, n_layer=4, n_head=2, n_embd=8)
ROWS, MICROBATCHES = 2, 3
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"pipeline": 2}, {"vocabulary": "whole", "schedule": "1f1b"}),
    ({"pipeline": 2}, {"vocabulary": "vocab-1", "schedule": "zb-h1"}),
    ({"pipeline": 2, "data": 2}, {"vocabulary": "vocab-2", "zero": 1}),
    ({"tensor": 2}, {"vocabulary": "whole"}),
    ({"data": 2}, {"zero": 2}),
]


def second(found: Any) -> torch.Tensor:
    """The loss, half as large."""
    loss: torch.Tensor = found[1]
    return loss / 2


def batch_of(rows: int) -> dict[str, torch.Tensor]:
    """Rows of which ever more targets do not count; a whole micro-batch has none that does."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(CONFIG.vocab_size, (rows, 6), generator=generator)
    targets = torch.randint(CONFIG.vocab_size, (rows, 6), generator=generator)
    for row in range(rows):
        targets[row, 6 - row % 6 :] = -1
    targets[ROWS : 2 * ROWS] = -1
    return {"idx": tokens, "targets": targets}


@pytest.mark.parametrize(("mesh", "options"), CASES)
def test_uneven_tokens_weigh_alike(
    mesh: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, tokens = GPT(CONFIG), torch.zeros(ROWS, 6, dtype=torch.long)
    program = pc.compile(
        model, pc.Mesh(**mesh), {"idx": tokens, "targets": tokens}, loss=second,
        microbatches=MICROBATCHES, precision="fp64", loss_weights="tokens", **options,
    )  # fmt: skip
    program.export(tmp_path / "out")
    assert "!= -1" in (tmp_path / "out" / "counts.py").read_text()
    assert "counted=counted" in (tmp_path / "out" / "rank_0.py").read_text()
    batch = batch_of(ROWS * MICROBATCHES * program.plan.mesh.data)
    job = Job(str(tmp_path / "out"), [batch], options={"lr": 0.1})
    outcome = pool().run(job, program.lowered.grid.size)
    model.double()
    loss = second(model(**batch))  # one batch, one mean
    loss.backward()
    assert abs(outcome.loss / loss.detach() - 1) <= 1e-9
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        error = (outcome.gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error <= 1e-9, name


def test_it_is_the_loss_of_transformers_and_its_proof_holds() -> None:
    model, inputs = zoo.build("hf-gpt2")
    program = pc.compile(
        model, pc.Mesh(), inputs, microbatches=2, precision="fp64", loss_weights="tokens"
    )
    assert program.verify().ok  # whose random labels all count
    tokens = inputs["input_ids"].repeat(2, 1)
    labels = tokens.clone()
    labels[0, 3:], labels[2, 7:] = -100, -100
    with program.worker() as worker:
        found = worker.evaluate({"input_ids": tokens, "labels": labels})
    model.double().eval()
    count = (labels[:, 1:] != -100).sum()
    parts = [
        model(input_ids=a, labels=b, num_items_in_batch=count).loss.detach()
        for a, b in zip(tokens.chunk(2), labels.chunk(2), strict=True)
    ]
    assert abs(found / sum(parts) - 1) <= 1e-6  # transformers computes its loss in float32
    whole = model(input_ids=tokens, labels=labels).loss.detach()
    assert abs(found / whole - 1) <= 1e-6


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss": lambda found: found[1] + found[0].mean()}, "mean of a cross-entropy"),
        ({"schedule": "pipedream", "mesh": pc.Mesh(pipeline=2)}, "with schedule='pipedream' each"),
        ({"updates": "local", "mesh": pc.Mesh(data=2)}, "or take updates='all-reduce'"),
        ({"loss_weights": "rows"}, "loss_weights"),
    ],
)
def test_a_loss_that_is_no_mean_over_tokens_is_refused(options: Any, text: str) -> None:
    tokens = torch.zeros(ROWS, 6, dtype=torch.long)
    options = {"loss": second, "mesh": pc.Mesh(), "loss_weights": "tokens", **options}
    with pytest.raises(pc.InputError, match=text):
        pc.compile(GPT(CONFIG), inputs={"idx": tokens, "targets": tokens}, **options)
