"""nanoGPT's training script on two ranks is nanoGPT's loop in one process."""

import math
import re
import shutil
from pathlib import Path

import torch
from torch.nn import functional as F

from examples.nanogpt import GPT, GPTConfig
from tests.distributed import forked

SCRIPT = Path(__file__).parents[2] / "examples" / "train_nanogpt.py"
STEPS, ROWS, ACCUMULATION, BLOCK, EVERY = 40, 2, 3, 8, 20


def one_process(data: bytes) -> tuple[list[float], list[float]]:
    """Losses of the steps and of the evaluations, as train.py of nanoGPT makes them."""
    text = torch.tensor(list(data))
    splits = text[: int(0.9 * len(text))], text[int(0.9 * len(text)) :]
    torch.manual_seed(1337)
    model = GPT(GPTConfig(BLOCK, 256, 2, 2, 8, 0.0)).double()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))

    def micro_batches(part: torch.Tensor, seed: int) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(seed)
        ix = torch.randint(len(part) - BLOCK, (ROWS * ACCUMULATION,), generator=draw)
        windows = torch.stack([part[i : i + BLOCK + 1] for i in ix.tolist()])
        return [*windows.chunk(ACCUMULATION)]

    def loss_of(windows: torch.Tensor) -> torch.Tensor:
        logits, _ = model(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    losses, evaluations = [], []
    for step in range(STEPS):
        ratio = (step - 20) / (STEPS - 20)
        curve = 1e-4 + 0.5 * (1 + math.cos(math.pi * ratio)) * (1e-3 - 1e-4)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1) / 21 if step < 20 else curve
        total = 0.0
        for windows in micro_batches(splits[0], step):
            loss = loss_of(windows) / ACCUMULATION
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                every = [loss_of(w) for k in range(4) for w in micro_batches(splits[1], -1 - k)]
            evaluations.append(float(torch.stack(every).mean()))
    return losses, evaluations


def test_forty_steps_equal_one_process_with_a_break_between(tmp_path: Path) -> None:
    data = bytes(range(32, 123)) * 20
    (tmp_path / "text").write_bytes(data)
    options = {
        "data": tmp_path / "text", "out": tmp_path / "out", "max_iters": STEPS, "batch_size": ROWS,
        "accumulation": ACCUMULATION, "block_size": BLOCK, "n_layer": 2, "n_head": 2, "n_embd": 8,
        "eval_interval": EVERY, "precision": "fp64",
    }  # fmt: skip
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    text = forked.run(2, forked.script, str(SCRIPT), *arguments)
    losses = [float(x) for x in re.findall(r"step \d+: loss ([\d.]+)", text)]
    evaluations = [float(x) for x in re.findall(r"val loss ([\d.]+)", text)]
    wanted = one_process(data)
    for found, exact in zip((losses, evaluations), wanted, strict=True):
        assert len(found) == len(exact)
        assert all(abs(a / b - 1) <= 1e-9 for a, b in zip(found, exact, strict=True))
    assert len(SCRIPT.read_text().splitlines()) <= 60
    shutil.rmtree(tmp_path / "out" / f"step_{STEPS:08d}")
    again = forked.run(2, forked.script, str(SCRIPT), *arguments, "--resume", "1")
    assert re.findall(r"step \d+: .*", again) == re.findall(r"step \d+: .*", text)[EVERY:]
