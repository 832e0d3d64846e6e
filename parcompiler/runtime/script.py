"""The main function of emitted scripts: train for some steps and print the loss of each.

torchrun --nproc-per-node 2 out/main.py --steps 10 --data batches.safetensors
torchrun --nproc-per-node 2 out/main.py --steps 1000 --save run/ --every 100 --resume auto --keep 3
torchrun --nproc-per-node 2 out/main.py --data tokens.bin --warmup 100 --decay cosine --log-every 10
"""

from __future__ import annotations

import argparse
import io
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from parcompiler.errors import InputError
from parcompiler.runtime import resuming, training
from parcompiler.runtime.files import loading
from parcompiler.runtime.joining import place
from parcompiler.runtime.program import Input, RankProgram
from parcompiler.runtime.resuming import Run, above_zero, add_options, natural, path, seed
from parcompiler.runtime.rng import mixed
from parcompiler.runtime.samples import Samples, positions
from parcompiler.runtime.tensor_files import read
from parcompiler.runtime.worker import CHECK_BATCHES, TIMEOUT, Worker

WRONG_USE = 2  # exit code, as argparse has it


def worker_of(script: Path) -> Callable[..., Worker]:
    """The function `worker` of a rank's script, which is loaded when the function is called: `run`
    says what is wrong with it. Raises InputError then for a script that cannot be loaded."""

    def make(*arguments: Any, **options: Any) -> Worker:
        with loading(script):
            worker = runpy.run_path(str(script))["worker"]
        made: Worker = worker(*arguments, **options)
        return made

    return make


def run(make: Callable[..., Worker], arguments: list[str] | None = None) -> None:
    """Train the worker that `make` builds (with the command line's timeout, compiled or not) on a
    file of batches or on random ones.

    Raises InputError for what cannot be run with these `arguments`. Without any, it is a script,
    which prints the message, without a traceback on each rank, and ends with exit code 2.
    """
    if arguments is not None:
        _run(make, command_line(arguments))
        return
    try:
        _run(make, command_line())
    except InputError as error:
        rank, size = place() or (0, 1)
        whose = f"rank {rank}: " if size > 1 else ""
        lines = (str(error), *getattr(error, "__notes__", ()))
        sys.stderr.write("".join(f"{whose}{line}\n" for line in lines))  # ranks write beside it
        sys.exit(WRONG_USE)


def _run(make: Callable[..., Worker], options: argparse.Namespace) -> None:
    """`run`, by the options of its command line."""
    resuming.check(options)
    training.check(options)
    torch.manual_seed(options.seed)  # a worker draws from it, by step, stage and micro-batch
    compiled = {} if options.compile is None else {"compiled": options.compile}
    with make(options.timeout, **compiled) as worker:
        worker.check_batches = options.check_batches
        worker.flight.folder = options.flight or (options.save or Path()) / "flight"
        checkpoints = Run(worker, options)
        with checkpoints.alone():
            steps = training.Training(worker, options, checkpoints)
            checkpoints.resume()
            if steps.rows is None:
                steps.run(_batches(worker, options.data))
            else:
                steps.run(training.token_batches(worker, steps.rows, options))


def command_line(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line. Raises SystemExit where it is wrong, and after its help, which only the
    first rank prints."""
    parser = argparse.ArgumentParser(description="train this rank of an exported program")
    parser.add_argument("--steps", type=natural, default=10, help="training steps in all (10)")
    parser.add_argument(
        "--error-if-nonfinite",
        action="store_true",
        help="stop all ranks when the loss or the norm of the gradients is not finite",
    )
    parser.add_argument(
        "--check-batches",
        type=natural,
        default=CHECK_BATCHES,
        help="compare the batches of tensor and pipeline ranks at the first step and every so many "
        f"({CHECK_BATCHES}; 0: at the first alone)",
    )
    parser.add_argument(
        "--seed",
        type=seed,
        default=0,
        help="seed of dropout and other random operators, and of synthetic batches (0); a run that "
        "goes on has the one that it began with",
    )
    parser.add_argument(
        "--timeout",
        type=above_zero,
        default=TIMEOUT.total_seconds(),
        help="seconds that a rank waits for another at most; then all ranks stop and say where "
        "each of them is (%(default)g)",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="run layers through torch.compile's compiler, once for all that are equal (as "
        "exported)",
    )
    parser.add_argument(
        "--flight",
        type=path,
        metavar="DIR",
        help="where each rank writes its last instructions if the run fails (flight/ in the folder "
        "of --save, otherwise here)",
    )
    parser.add_argument(
        "--data",
        type=path,
        help="safetensors file with a tensor per input, its rows one sample after another (read "
        "round and round), or a file of tokens (.bin), whose rows are shuffled; without it batches "
        "are random. The data ranks share each step's samples",
    )
    training.add_options(parser)
    add_options(parser)
    rank, _ = place() or (0, 1)
    with redirect_stdout(io.StringIO()) if rank else nullcontext():
        return parser.parse_args(arguments)


def _batches(worker: Worker, data: Path | None) -> Iterator[object]:
    """This data rank's batches from where training is, for ever: of a file of tensors, or random
    ones."""
    if data is not None:
        yield from _from_file(worker, data)
    program, generator = worker.program, torch.Generator()
    inputs = program.inputs.values()
    for places in positions(worker):
        samples = []
        for number in places:
            generator.manual_seed(mixed(worker.seed, number))
            samples.append([_random_sample(program, spec, generator) for spec in inputs])
        columns = zip(inputs, zip(*samples, strict=True), strict=True)
        yield program.in_form({spec.key: _joined(program, spec, one) for spec, one in columns})


def _random_sample(program: RankProgram, spec: Input, generator: torch.Generator) -> torch.Tensor:
    """One sample's part of an input, of normal floats or of integers below the bound that the model
    sets; the whole of one that the rows of a micro-batch share."""
    rows = program.rows_of_sample(spec)
    shape = (rows, *spec.shape[1:]) if rows else spec.shape
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        kind = torch.complex128 if spec.dtype.is_complex else torch.float64
        return torch.randn(shape, generator=generator, dtype=kind).to(spec.dtype)
    high = 2 if spec.high is None else spec.high
    return torch.randint(0, high, shape, generator=generator).to(spec.dtype)


def _joined(program: RankProgram, spec: Input, column: Sequence[torch.Tensor]) -> torch.Tensor:
    """An input of a batch from those of its samples; of a shared input each micro-batch has that of
    its first sample."""
    if not spec.shape:
        return column[0]
    return torch.cat([*column[:: 1 if program.rows_of_sample(spec) else program.samples]])


def _from_file(worker: Worker, path: Path) -> Iterator[object]:
    """The batches of a file, over and over; inputs without rows, or with a shared one, are in every
    batch."""
    program, tensors = worker.program, dict(read(path))
    rows = _rows_of_samples(program, tensors, path)
    for spec in program.inputs.values():
        if spec.shape and spec.key not in rows:
            tensors[spec.key] = torch.cat([tensors[spec.key]] * program.microbatches)
    most = program.samples_of_step
    counts = {key: len(tensors[key]) // number for key, number in rows.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{key!r}: {count}" for key, count in counts.items())
        message = f"the tensors in {path} must have the same number of samples ({listed})"
        raise InputError(message)
    count = min(counts.values(), default=most)
    for numbers in Samples(count, worker, shuffle=False):
        first = torch.tensor(numbers)[:, None]
        batch = {spec.key: tensors[spec.key] for spec in program.inputs.values()}
        for key, number in rows.items():
            batch[key] = batch[key][(first * number + torch.arange(number)).flatten()]
        yield program.in_form(batch)


def _rows_of_samples(
    program: RankProgram, tensors: Mapping[str, torch.Tensor], path: Path
) -> dict[str, int]:
    """The rows of a sample in each tensor of a file that has any. Raises InputError for tensors
    that are missing, or are not as the program's inputs."""
    rows: dict[str, int] = {}
    for spec in program.inputs.values():
        if spec.key not in tensors:
            message = f"{path} lacks {spec.key!r} (it has: {', '.join(sorted(tensors))})"
            raise InputError(message)
        if spec.shape and not tensors[spec.key].ndim:
            message = (
                f"{spec.key!r} in {path} must have rows of shape {spec.shape[1:]} (it is a scalar)"
            )
            raise InputError(message)
        if number := program.rows_of_sample(spec):
            rows[spec.key] = number
        elif spec.shape and len(tensors[spec.key]) != 1:
            message = (
                f"{spec.key!r} in {path} must have one row, which all samples share "
                f"({len(tensors[spec.key])} found)"
            )
            raise InputError(message)
    return rows
