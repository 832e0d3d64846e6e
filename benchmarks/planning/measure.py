"""How long does a plan for a large model take, beside `torch.export` alone?

    python benchmarks/planning/measure.py [--runs 3]

Each run is a process of its own: export alone, then everything that `compile` does.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch

import parcompiler as pc
from parcompiler.capture.loss import WithLoss
from parcompiler.models import gpt, llama

BIG = 10**13  # bytes: enough that memory never decides, as there is no tensor parallelism here


def model(name: str) -> tuple[torch.nn.Module, int]:
    """The model on the meta device and its sequence length."""
    with torch.device("meta"):
        if name == "gpt-175b":
            return gpt.GPT(gpt.PRESETS["175b"]), 2048
        return llama.Llama(llama.PRESETS["3.1-405b"]), 8192


def once(name: str, what: str) -> dict[str, float]:
    """Seconds of export alone or of compile, and the peak memory of this process in GiB."""
    made, sequence = model(name)
    tokens = torch.zeros(1, sequence, dtype=torch.long, device="meta")
    inputs = {"tokens": tokens, "labels": tokens.clone()}
    found: dict[str, float] = {}
    start = time.perf_counter()
    if what == "export":
        torch.export.export(WithLoss(made, None), (), inputs, strict=False)
        found["export"] = time.perf_counter() - start
    else:
        device = pc.Device.from_json(large("h100"))
        mesh = pc.Mesh(pipeline=16, device=device)
        program = pc.compile(made, mesh, inputs, microbatches=64, progress=False)
        found["compile"] = time.perf_counter() - start
        start = time.perf_counter()
        mesh = pc.Mesh(pipeline=32, device=device)
        pc.compile(program, mesh, microbatches=64, progress=False)
        found["second"] = time.perf_counter() - start
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return found


def large(name: str) -> str:
    """A device of the catalogue with memory for anything, as JSON."""
    data = json.loads(pc.Mesh(device=name).hardware.to_json())
    return json.dumps({**data, "name": f"{name}-large", "memory": BIG})


def main() -> None:
    """Print the table; or, with --once, one measurement as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--once", nargs=2, metavar=("MODEL", "WHAT"))
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(*options.once)))
        return
    print("| model | export alone (s) | compile (s) | ratio | second mesh (s) | peak RSS (GiB) |")
    print("|---|---|---|---|---|---|")
    for name in ("gpt-175b", "llama-405b"):
        rows = [{**start(name, "export"), **start(name, "compile")} for _ in range(options.runs)]
        middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        ratio = statistics.median(row["compile"] / row["export"] for row in rows)
        print(
            f"| {name} | {middle['export']:.1f} | {middle['compile']:.1f} | {ratio:.2f} | "
            f"{middle['second']:.2f} | {middle['memory']:.2f} |"
        )


def start(name: str, what: str) -> dict[str, float]:
    """One measurement in a new process."""
    command = [sys.executable, __file__, "--once", name, what]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(text.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
