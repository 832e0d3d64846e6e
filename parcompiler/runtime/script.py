"""The main function of emitted scripts: train for some steps and print the loss of each.

torchrun --nproc-per-node 2 out/main.py --steps 10 --data batches.safetensors
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from parcompiler.errors import InputError
from parcompiler.runtime import weights
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.worker import CHECK_BATCHES, TIMEOUT, Worker


def run(make: Callable[[float], Worker], arguments: list[str] | None = None) -> None:
    """Train the worker that `make` gives for a timeout as the command line says, on a file of
    batches or on random ones."""
    options = _options(arguments)
    with make(options.timeout) as worker:
        worker.check_batches = options.check_batches
        worker.set_optimizer(
            torch.optim.AdamW,
            max_norm=options.max_norm,
            error_if_nonfinite=options.error_if_nonfinite,
            lr=options.lr,
        )
        batches = _batches(worker.program, options)
        for number in range(options.steps):
            loss = worker.train_step(next(batches))
            if worker.rank == 0:
                print(f"step {number} loss {loss.item():.8f}", flush=True)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="train this rank of an exported program")
    parser.add_argument("--steps", type=int, default=10, help="training steps (10)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW (0.001)")
    parser.add_argument("--max-norm", type=float, help="clip the gradients to this norm")
    parser.add_argument(
        "--error-if-nonfinite",
        action="store_true",
        help="stop all ranks when the loss or the norm of the gradients is not finite",
    )
    parser.add_argument(
        "--check-batches",
        type=int,
        default=CHECK_BATCHES,
        help="compare the batches of tensor and pipeline ranks at the first step and every so many "
        f"({CHECK_BATCHES}; 0: at the first alone)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of synthetic batches (0)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT.total_seconds(),
        help="seconds that a rank waits for another at most (%(default)g)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="safetensors file with a tensor per input, its rows those of whole batches one after "
        "another (read round and round); without it batches are random. Data ranks take batches "
        "in turn",
    )
    return parser.parse_args(arguments)


def _batches(program: RankProgram, options: argparse.Namespace) -> Iterator[object]:
    """Batches from the file, or random ones, for ever."""
    if options.data is not None:
        yield from _from_file(program, options.data)
    generator = torch.Generator().manual_seed(options.seed)
    while True:
        yield [random_batch(program, generator) for _ in range(program.data)][
            program.coordinate.data
        ]


def random_batch(program: RankProgram, generator: torch.Generator) -> object:
    """A batch of normal floats and of integers below the bounds that the model sets."""
    return _batch(program, {n: _random(program, n, generator) for n in program.inputs})


def _from_file(program: RankProgram, path: Path) -> Iterator[object]:
    """The batches of a file, round and round; what has no rows is in every batch."""
    tensors = dict(weights.read(path))
    found: dict[str, torch.Tensor] = {}
    for name, spec in program.inputs.items():
        if spec.key not in tensors:
            message = f"{path} lacks {spec.key!r} (it has: {', '.join(sorted(tensors))})"
            raise InputError(message)
        found[name] = tensors[spec.key]
        if spec.shape and not found[name].ndim:
            message = f"{spec.key!r} in {path} must have rows of shape {spec.shape[1:]} (a scalar)"
            raise InputError(message)
    rows = {n: s.shape[0] * program.microbatches for n, s in program.inputs.items() if s.shape}
    ranks = program.data
    count = min((found[name].shape[0] // rows[name] for name in rows), default=ranks)
    if count < ranks:
        each = "" if ranks == 1 else f" for each of {ranks} data ranks"
        message = (
            f"{path} holds less than one batch{each} ({ranks * min(rows.values())} rows needed)"
        )
        raise InputError(message)
    while True:
        for index in range(program.coordinate.data, count // ranks * ranks, ranks):
            yield _batch(
                program,
                {
                    name: tensor.narrow(0, index * rows[name], rows[name])
                    if name in rows
                    else tensor
                    for name, tensor in found.items()
                },
            )


def _random(program: RankProgram, name: str, generator: torch.Generator) -> torch.Tensor:
    """One input of a synthetic batch."""
    spec = program.inputs[name]
    shape = (spec.shape[0] * program.microbatches, *spec.shape[1:]) if spec.shape else ()
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        kind = torch.complex128 if spec.dtype.is_complex else torch.float64
        return torch.randn(shape, generator=generator, dtype=kind).to(spec.dtype)
    high = 2 if spec.high is None else spec.high
    return torch.randint(0, high, shape, generator=generator).to(spec.dtype)


def _batch(program: RankProgram, tensors: Mapping[str, torch.Tensor]) -> object:
    """Tensors by the names of stages, in the form of the compiled inputs."""
    by_key = {program.inputs[name].key: tensor for name, tensor in tensors.items()}
    if program.positional:
        last = max(int(key.partition(".")[0]) for key in by_key)
        return tuple(by_key.get(str(position)) for position in range(last + 1))
    return by_key
