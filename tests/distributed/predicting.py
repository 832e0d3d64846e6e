"""Predictions of an exported program, whose data ranks share the rows of a batch."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import parcompiler as pc
from tests.distributed import forked


def predicted(
    program: pc.Program, tokens: dict[str, torch.Tensor], folder: Path
) -> dict[str, torch.Tensor]:
    """The outputs for some tokens, by name."""
    path = program.export(folder / "program")
    save_file(tokens, folder / "tokens.safetensors")
    forked.run(program.lowered.grid.size, main, str(path), str(folder))
    return load_file(folder / "outputs.safetensors")


def main(path: str, folder: str) -> None:
    tokens = load_file(Path(folder) / "tokens.safetensors")
    with pc.load(path).worker() as worker:
        share, ranks = worker.data_rank, worker.data_ranks
        outputs = worker.predict({k: t.tensor_split(ranks)[share] for k, t in tokens.items()})
        if outputs is not None:
            save_file(outputs, Path(folder) / "outputs.safetensors")
