"""Predictions are the outputs of the model in evaluation mode, whatever the plan."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import parcompiler as pc
from examples.nanogpt import GPT, GPTConfig
from tests.distributed.predicting import predicted

CONFIG = GPTConfig(block_size=6, vocab_size=37, n_layer=4, n_head=2, n_embd=8, dropout=0.2)
ROWS, MICROBATCHES = 2, 2


class Several(GPT):
    """Caps its logits, and returns hidden states and what does not lead to the loss."""

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        logits = 3.0 * torch.tanh(self.lm_head(self.ln_f(x)) / 3.0)
        found = {"logits": logits, "last": x, "size": x.square().mean((1, 2))}
        if targets is not None:
            found["loss"] = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return found


CASES: list[tuple[type[GPT], dict[str, Any], dict[str, Any], int, str]] = [
    (GPT, {"pipeline": 2}, {"vocabulary": "whole", "schedule": "1f1b"}, 7, "''"),
    (GPT, {"pipeline": 2}, {"vocabulary": "vocab-2", "schedule": "zb-h1"}, 4, "'product'"),
    (Several, {"pipeline": 2}, {"vocabulary": "vocab-1", "schedule": "interleaved"}, 3, "'logits'"),
    (Several, {"tensor": 2}, {"vocabulary": "whole"}, 5, "''"),
    (GPT, {"pipeline": 2, "tensor": 2}, {"vocabulary": "naive"}, 3, "'product'"),
    (Several, {"data": 2}, {"zero": 3, "vocabulary": "whole"}, 9, "''"),
    (GPT, {"tensor": 2, "data": 2}, {"vocabulary": "whole", "zero": 1}, 11, "''"),
]


@pytest.mark.parametrize(("kind", "mesh", "options", "rows", "head"), CASES)
def test_predictions_are_the_outputs_of_the_model(
    kind: type[GPT], mesh: dict[str, Any], options: dict[str, Any], rows: int, head: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    model = kind(CONFIG)
    tokens = torch.randint(CONFIG.vocab_size, (rows, CONFIG.block_size))
    several = kind is Several
    outputs = ["logits", "last", "size"] if several else ["0"]
    program = pc.compile(
        model,
        pc.Mesh(**mesh),
        {"idx": tokens[:ROWS], "targets": tokens[:ROWS]},
        loss=None if several else lambda found: found[1],
        microbatches=MICROBATCHES,
        precision="fp64",
        outputs=outputs,
        **options,
    )
    kept = program.rank_program(0).outputs
    assert repr(kept[outputs[0]].head) == head
    found = predicted(program, {"idx": tokens}, tmp_path)
    model.double().eval()
    with torch.no_grad():
        whole = model(tokens)
    wanted = whole if several else {"0": whole[0]}
    assert found.keys() == {*outputs}
    for name, tensor in found.items():
        assert tensor.shape == wanted[name].shape
        assert tensor.dtype == torch.float64
        error = (tensor - wanted[name]).norm() / wanted[name].norm()
        assert error <= 1e-9, name
