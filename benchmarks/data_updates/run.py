"""How far do the ways of the data axis, and compression, get on text, by steps and by bytes?

    python benchmarks/data_updates/run.py [--steps 200] [--only NAME ...]

A GPT of bytes learns the standard library of Python on two data ranks. Runs of data ranks that step
by themselves are then repeated in this process, by the code of `program.verify()`.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from rank import ROWS, batch, model

import parcompiler as pc
from parcompiler import prices
from parcompiler.verification.data_ranks import DataRanks
from parcompiler.verification.reference import Original, one_thread

RANKS, RATE = 2, 3e-3
WAYS: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "parameter-server": {"updates": "parameter-server"},
    "bf16": {"compression": "bf16"},
    "fp16": {"compression": "fp16"},
    "powersgd, rank 4": {"compression": "powersgd"},
    "powersgd, rank 1": {"compression": "powersgd", "compression_rank": 1},
    "local, average of 8": {"updates": "local", "every": 8, "outer": "average"},
    "local, Nesterov of 8": {"updates": "local", "every": 8},
    "local, Nesterov of 25": {"updates": "local", "every": 25},
    "asynchronous, 2": {"updates": "asynchronous", "staleness": 2},
    "asynchronous, 0": {"updates": "asynchronous", "staleness": 0},
}


def sent(program: pc.Program) -> float:
    """Bytes that the busiest rank sends in a step, on the mean."""
    lowered = program.lowered
    item_bytes = sum(prices.sent_bytes(lowered, item) for item in lowered.shared)
    updates = lowered.updates
    if updates.way in ("parameter-server", "asynchronous"):  # those of the link of the server
        return 2 * (RANKS - 1) * item_bytes
    return 2 * (RANKS - 1) / RANKS * item_bytes / max(1, updates.every)


def repeated(program: pc.Program, text: torch.Tensor, found: dict[str, Any], rate: float) -> Any:
    """The weights after the same steps in this process; None where that is not repeated here."""
    lowered, count = program.lowered, len(found["losses"])
    pairs = [[batch(text, step, r) for r in range(RANKS)] for step in range(count)]
    batches = [{name: torch.cat([one[name] for one in each]) for name in each[0]} for each in pairs]
    if lowered.updates.way not in ("local", "asynchronous"):
        return None

    class Clipped(torch.optim.AdamW):
        """As the worker clips."""

        def step(self, closure: Any = None) -> Any:
            """A step with clipped gradients."""
            grads = [p.grad for group in self.param_groups for p in group["params"]]
            squares = [torch.linalg.vector_norm(g).double().square() for g in grads]
            norm = functools.reduce(torch.add, squares).sqrt()
            for gradient in grads:
                gradient.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
            return super().step(closure)

    keys = {spec.key.split(".")[-1]: spec.key for spec in program.problem.graph.inputs}
    batches = [{keys.get(name, name): tensor for name, tensor in one.items()} for one in batches]
    optimizer = functools.partial(Clipped, lr=rate)
    with one_thread(), Original(program, 0, None) as original:
        if lowered.updates.way == "local":
            return DataRanks(original, lowered, optimizer).apart(batches).state
        order = found["arrivals"]
        return DataRanks(original, lowered, optimizer).in_order(batches, order).state


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="*", default=list(WAYS))
    options = parser.parse_args()
    library = Path(sysconfig.get_path("stdlib"))
    source = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    text = torch.tensor([byte if byte < 128 else 63 for byte in source], dtype=torch.uint8)
    print(f"{len(text):,} bytes of text, {options.steps} steps, {RANKS} data ranks of {ROWS} rows")
    print("| way | held-out loss at 50 | 100 | 150 | 200 | KB a step | MB in all | repeated |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            (path / "text").write_bytes(bytes(text.tolist()))
            rate = RATE / RANKS if name.startswith("asynchronous") else RATE
            program = pc.compile(
                model(), pc.Mesh(data=RANKS), batch(text, 0, 0), microbatches=1, progress=False,
                **WAYS[name],
            )  # fmt: skip
            exported = program.export(path / "program")
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
            script = str(Path(__file__).parent / "rank.py")
            rest = [str(exported), folder, str(path / "text"), str(options.steps), str(rate)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([*command, script, *rest], check=True, env=environment)
            found = json.loads((path / "found.json").read_text())
            state = torch.load(path / "state.pt")
        again = repeated(program, text, found, rate)
        same = "" if again is None else "to the bit"
        if again is not None and any(not torch.equal(state[n], again[n]) for n in state):
            far = max(float((state[n] - again[n]).abs().max()) for n in state)
            same = f"{far:.0e} away"
        losses = " | ".join(f"{loss:.3f}" for loss in found["evaluated"].values())
        each = sent(program)
        total = each * options.steps / 1e6
        print(f"| {name} | {losses} | {each / 1e3:.0f} | {total:.1f} | {same} |", flush=True)


if __name__ == "__main__":
    main()
