"""`parcompiler train` trains on a text, ends at Ctrl-C, goes on, and writes for Hugging Face."""

import json
import os
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from parcompiler import cli

ROOT = Path(__file__).parents[2]
CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 384, "n_embd": 16,
    "n_layer": 2, "n_head": 2, "n_positions": 16, "resid_pdrop": 0.1, "bos_token_id": 0,
    "eos_token_id": 0, "dtype": "float32",
}  # fmt: skip


def start(folder: Path, steps: int, *more: str) -> subprocess.Popen[str]:
    options = "--rows 2 --sequence 16 --mesh pipeline=2 --vocabulary whole --every 3"
    options += " --log-every 1 --evaluate-every 4 --warmup 2 --keep 2"
    options += f" --steps {steps} --profile {steps - 1}"
    return subprocess.Popen(
        [sys.executable, "-m", "parcompiler", "train", f"hf:{folder}", *options.split(), *more,
         "--data", str(ROOT / "docs" / "concepts"), "--save", str(folder / "run")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
             "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip


def test_a_run_is_interrupted_goes_on_and_opens_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    library: Any = transformers

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    text = ""
    with start(tmp_path, 400) as first:
        assert first.stdout is not None
        for line in first.stdout:
            text += line
            if line.startswith("step 2/"):
                first.send_signal(signal.SIGINT)
        assert first.wait(120) == 130, text
    stopped = re.search(r"told to end: saved after step (\d+)", text)
    assert stopped is not None, text
    step = int(stopped[1])
    assert 2 <= step < 400

    # The checkpoint has the weights: those of the beginning may be gone.
    second = start(tmp_path, last := step + 3, "--pretrained", "no weights")
    text = second.communicate(timeout=240)[0]
    assert second.returncode == 0, text
    assert f"going on from step {step} of " in text
    run = tmp_path / "run"
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row for row in told if "loss" in row]
    assert [row["step"] for row in losses] == list(range(1, last + 1))
    evaluated = [row["step"] for row in told if "evaluation_loss" in row]
    assert evaluated == [*range(4, last, 4), last]
    known = {"tokens_per_second", "mfu", "gradient_norm", "learning_rate", "memory", "slowest_rank"}
    assert known <= losses[0].keys()
    assert losses[0]["learning_rate"] == losses[1]["learning_rate"] / 2 == 3e-4
    names = {path.name for path in (run / "profile").iterdir()}
    assert names == {"predicted.json", "rank_0.json", "rank_1.json"}
    assert len([*run.glob("step_*")]) == 2

    model = library.GPT2LMHeadModel.from_pretrained(run / "weights")
    tokenizer = library.PreTrainedTokenizerFast(
        tokenizer_file=str(run / "weights" / "tokenizer.json")
    )
    tokens = torch.tensor([tokenizer.encode("A stage is")[:4]])
    made = model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert made.shape[1] == tokens.shape[1] + 3

    # Other ranks go on from it, without MODEL: with its labels and its tokenizer.
    lines: list[list[str]] = []

    def ranks(line: list[str], _: int) -> int:
        lines.append(line)
        return 1

    monkeypatch.setattr("parcompiler.cli.train._ranks", ranks)
    command = ["train", "--checkpoint", str(run), "--mesh", "data=2", "--vocabulary", "whole"]
    command += ["--data", str(ROOT / "docs" / "concepts"), "--save", str(tmp_path / "other")]
    assert cli.run(command) == 1
    assert ("--labels", "same") in pairwise(lines[0])
    assert ("--resume", str(max(run.glob("step_*")))) in pairwise(lines[0])
    kept = (run / "tokenizer.json").read_bytes()
    assert (tmp_path / "other" / "tokenizer.json").read_bytes() == kept
