"""How long does training wait for a checkpoint that is written beside the steps?

    python benchmarks/checkpoints/run.py [--saves 7] [--hidden 512]

Two ranks share optimizer states out (zero=1, gloo, one thread each). They save in turn with and
without `asynchronous`, each time into a folder of its own, and make steps between, so that nothing
is being written when the next save begins.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import parcompiler as pc
from parcompiler.models import gpt

SEQUENCE, VOCABULARY, ROWS, RANKS = 128, 8192, 4, 2


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens for one data rank."""
    tokens = torch.randint(VOCABULARY, (ROWS, SEQUENCE))
    return tokens, tokens


def export(folder: Path, hidden: int) -> int:
    """The program; bytes of its parameters and of AdamW's moments."""
    sizes = {"vocabulary": VOCABULARY, "sequence": SEQUENCE, "hidden": hidden}
    model = gpt.GPT(gpt.Config(layers=4, heads=4, tied=False, **sizes))
    mesh = pc.Mesh(data=RANKS)
    pc.compile(model, mesh, batch(), microbatches=1, zero=1, progress=False).export(folder)
    return 3 * sum(parameter.nbytes for parameter in model.parameters())


def rank(folder: Path, saves: int) -> None:
    """What one rank measures, in seconds."""
    found: dict[str, list[float]] = {"save": [], "asynchronous": [], "step": [], "beside": []}
    torch.set_num_threads(1)
    with pc.load(folder / "out").worker() as worker:
        worker.set_optimizer(torch.optim.AdamW, lr=1e-4)
        worker.train_step(batch())

        def timed(name: str, work: Any) -> None:
            worker.any_rank(False)  # all begin together
            begin = time.perf_counter()
            work()
            found[name].append(time.perf_counter() - begin)

        for number in range(saves + 1):
            for name in ("save", "asynchronous"):
                target = folder / f"{name}_{number}"
                timed(name, lambda t=target, n=name: worker.save(t, asynchronous=n != "save"))
                for _ in range(4):
                    kind = "beside" if name != "save" and worker._checkpoints._thread else "step"
                    timed(kind, lambda: worker.train_step(batch()))
                worker._checkpoints.finish()
                size = sum(file.stat().st_size for file in target.rglob("*.safetensors"))
                worker.any_rank(False)
                if worker.rank == 0:
                    shutil.rmtree(target)
    name = f"{worker.rank}.json"
    times = {kind: values[1:] for kind, values in found.items()}  # the first makes its memory
    (folder / name).write_text(json.dumps({**times, "bytes": size}))


def main(saves: int, hidden: int) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        held = export(folder / "out", hidden)
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
        command += [__file__, "--rank", name, "--saves", str(saves)]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        ranks = [json.loads((folder / f"{k}.json").read_text()) for k in range(RANKS)]
    whole, aside, step, beside = (
        [max(pair) for pair in zip(*(one[kind] for one in ranks), strict=False)]
        for kind in ("save", "asynchronous", "step", "beside")
    )
    ratio = statistics.median(b / a for a, b in zip(whole, aside, strict=True))
    cells = [f"{1e3 * statistics.median(times):.0f}" for times in (whole, aside)]
    cells += [f"{ratio:.3f}"]
    cells += [f"{1e3 * statistics.median(times):.0f}" for times in (step, beside)]
    cells += [f"{held / 1e6:.1f}", f"{ranks[0]['bytes'] / held:.4f}"]
    print(f"| {hidden} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--saves", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rank", type=Path)
    options = parser.parse_args()
    if options.rank is None:
        main(options.saves, options.hidden)
    else:
        rank(options.rank, options.saves)
