"""Predictions and metrics of a worker on one rank: forms of batches, and what is refused."""

import dataclasses
from typing import Any

import pytest
import torch

import parcompiler as pc
from examples.nanogpt import GPT, GPTConfig
from parcompiler.verifier import verify

CONFIG = GPTConfig(block_size=6, vocab_size=11, n_layer=2, n_head=2, n_embd=8, dropout=0.5)
TOKENS = torch.arange(24).view(4, 6) % 11


def compiled(outputs: list[str], **options: Any) -> pc.Program:
    torch.manual_seed(0)
    inputs = {"idx": TOKENS[:2], "targets": TOKENS[:2]}
    options = {"loss": lambda found: found[1], "microbatches": 2, **options}
    return pc.compile(GPT(CONFIG), pc.Mesh(), inputs, outputs=outputs, **options)


@pytest.fixture(scope="module")
def program() -> pc.Program:
    return compiled(["0", "1"])


def test_metrics_are_made_of_outputs_and_batch(program: pc.Program) -> None:
    def accuracy(outputs: dict[str, torch.Tensor], batch: Any) -> dict[str, float]:
        assert outputs["1"].shape == (2,)  # the loss of each micro-batch
        hits = outputs["0"].argmax(-1) == batch["targets"]
        return {"accuracy": float(hits.float().mean()), "rows": len(hits)}

    batch = {"idx": TOKENS, "targets": TOKENS}
    with program.worker() as worker:
        found = worker.evaluate(batch, accuracy)
        assert found["loss"] == worker.evaluate(batch).item()
    model = program.model
    assert isinstance(model, GPT)
    logits, _ = model.eval()(TOKENS)
    model.train()
    assert found["accuracy"] == pytest.approx(float((logits.argmax(-1) == TOKENS).float().mean()))
    assert found["rows"] == 4


def test_batches_that_cannot_be_predicted_are_refused(program: pc.Program) -> None:
    only = compiled(["0"])
    with only.worker() as worker:
        with pytest.raises(pc.InputError, match="the batch lacks 'idx'"):
            worker.predict({"targets": TOKENS})
        with pytest.raises(pc.InputError, match=r"must have rows of shape \(6,\)"):
            worker.predict({"idx": TOKENS[:, :3]})
        with pytest.raises(pc.InputError, match="the same number of samples"):
            worker.predict({"idx": TOKENS, "targets": TOKENS[:3]})
        with pytest.raises(pc.InputError, match="must have dtype"):
            worker.predict({"idx": TOKENS.float()})
        found = worker.predict({"idx": TOKENS[:1]})  # nothing is broken by it
    assert found is not None
    assert found["0"].shape == (1, 6, 11)
    with program.worker() as worker:
        with pytest.raises(pc.InputError, match=r"'1' has no rows for each sample .* \(3 given\)"):
            worker.predict({"idx": TOKENS[:3], "targets": TOKENS[:3]})


def test_outputs_that_cannot_be_kept_are_refused(program: pc.Program) -> None:
    with pytest.raises(pc.InputError, match=r"no output 'logits' to keep: it returns '0', '1'"):
        compiled(["logits"])
    message = (
        r"one tensor, which has no name, .* keep it as outputs=\['0'\], or return a dict, such"
    )
    with pytest.raises(pc.InputError, match=message):
        pc.compile(torch.nn.Linear(2, 3), pc.Mesh(), (torch.ones(1, 2),), torch.sum, 1,
                   outputs=["logits"])  # fmt: skip
    with pytest.raises(pc.InputError, match="outputs must be a list of names"):
        compiled("logits")  # type: ignore[arg-type]
    with pytest.raises(pc.InputError, match="keeps the outputs that it was captured with"):
        pc.compile(program, pc.Mesh(), microbatches=2, outputs=["0"])
    plain = pc.compile(GPT(CONFIG), pc.Mesh(), {"idx": TOKENS[:2], "targets": TOKENS[:2]},
                       loss=lambda found: found[1], microbatches=1)  # fmt: skip
    with plain.worker() as worker, pytest.raises(pc.InputError, match="no outputs are kept"):
        worker.predict({"idx": TOKENS})


def test_an_output_that_no_stage_keeps_is_found(program: pc.Program) -> None:
    (stage,) = program.lowered.stages
    assert stage.keeps
    for keeps, fault in (((), "is on no stage"), ((*stage.keeps, "x"), "keeps x, which is no")):
        stages = (dataclasses.replace(stage, keeps=keeps),)
        with pytest.raises(pc.PlanError, match=fault):
            verify(dataclasses.replace(program.lowered, stages=stages))
