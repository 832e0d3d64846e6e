"""Trains a tiny Hugging Face GPT-2 through `program.worker()` and prints its losses.

Two ranks of test_export.py; the exported scripts must print the same.
"""

import torch
from safetensors.torch import load_file

import parcompiler as pc
from tests import zoo

MICROBATCHES = 3


def compiled() -> pc.Program:
    model, inputs = zoo.build("hf-gpt2")
    return pc.compile(model.eval(), pc.Mesh(pipeline=2), inputs, microbatches=MICROBATCHES)


def main(data: str) -> None:
    tensors = load_file(data)
    rows = zoo.ROWS * MICROBATCHES
    with compiled().worker() as worker:
        worker.set_optimizer(torch.optim.AdamW, lr=1e-3)
        for step in range(3):
            batch = {key: t[step * rows : (step + 1) * rows] for key, t in tensors.items()}
            loss = worker.train_step(batch)
            if worker.rank == 0:
                print(f"step {worker.step_count} loss {loss.item():.8f}", flush=True)
