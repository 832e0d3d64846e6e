"""A batch of this rank's data coordinate: checked, and cut into micro-batches.

A batch has the form of the inputs that the model was compiled with (dict of keywords or tuple of
positions) with `microbatches` times the rows: dimension 0 of every tensor.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from parcompiler.errors import InputError
from parcompiler.runtime.program import Input, RankProgram


def microbatches(
    program: RankProgram, batch: object, *, fewer: bool = False
) -> list[dict[str, torch.Tensor]]:
    """The tensors of each micro-batch by the names that stages know.

    `fewer` allows a batch of fewer micro-batches than a step has. Raises InputError when a key is
    missing or unknown, or a dtype or shape is not the one that the model was compiled for.
    """
    leaves = dict(_leaves(batch))
    wanted = {item.key for item in program.inputs.values()}
    _check_form(program, batch)
    _check_keys(leaves, wanted)
    count = _fewer(program, leaves) if fewer else program.microbatches
    pieces: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    for name, spec in program.inputs.items():
        tensor = leaves[spec.key]
        _check_tensor(spec, tensor, program, count)
        assert isinstance(tensor, torch.Tensor)
        tensor = tensor.to(spec.dtype)
        rows = spec.shape[0] if spec.shape else 0
        for i, piece in enumerate(pieces):
            piece[name] = tensor.narrow(0, i * rows, rows) if spec.shape else tensor
    return pieces


class Told(NamedTuple):
    """What a rank tells the others of a call, before anything else is sent.

    `microbatches` is 0 where it refuses its batch, `digest` where batches are not compared.
    """

    training: int  # 1, and 0 in an evaluation
    every: int  # steps from one comparison to the next
    microbatches: int = 0
    digest: int = 0


def differing(program: RankProgram, everyone: Sequence[Told]) -> str:
    """What the ranks do not agree in, the same on all of them; nothing where they do."""
    refusing = [rank for rank, told in enumerate(everyone) if not told.microbatches]
    if refusing:
        return f"rank {refusing[0]} refused its batch and says why: no rank has taken this one"
    for rank, told in enumerate(everyone):
        if told[:3] != everyone[0][:3]:
            calls = f"rank 0: {_words(everyone[0])}; rank {rank}: {_words(told)}"
            return f"all ranks must make the same call ({calls})"
        data = program.grid.coordinate(rank).data
        first = program.grid.rank(0, data)
        if told.digest != everyone[first].digest:
            return (
                f"ranks {first} and {rank} were given different batches: give all ranks of a data "
                f"coordinate ({data}) the same"
            )
    return ""


def _words(told: Told) -> str:
    """A call in words."""
    kind = "training" if told.training else "evaluation"
    return f"{kind} of {told.microbatches} micro-batches, check_batches = {told.every}"


def digest(pieces: Sequence[Mapping[str, torch.Tensor]]) -> int:
    """A number of 60 bits that equal micro-batches have in common, and others do not."""
    found = hashlib.sha256()
    for name, tensor in (item for piece in pieces for item in piece.items()):
        raw = tensor.detach().cpu().contiguous()
        found.update(f"{name} {raw.dtype} {tuple(raw.shape)}".encode())
        found.update((ctypes.c_char * raw.nbytes).from_address(raw.data_ptr()))
    return int(found.hexdigest()[:15], 16)


def _fewer(program: RankProgram, leaves: Mapping[str, object]) -> int:
    """How many micro-batches a batch has, by the first of its tensors; as many as a step has where
    that does not say."""
    for spec in program.inputs.values():
        tensor = leaves[spec.key]
        if spec.shape and isinstance(tensor, torch.Tensor) and tensor.ndim:
            count, rest = divmod(tensor.shape[0], spec.shape[0])
            if not rest and 0 < count <= program.microbatches:
                return count
    return program.microbatches


def _leaves(batch: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every leaf of a batch with its key, as `capture` names them: `ids`, `0`, `images.1`."""
    if isinstance(batch, Mapping):
        items: list[tuple[str, Any]] = [(str(key), value) for key, value in batch.items()]
    elif isinstance(batch, tuple) and (fields := getattr(batch, "_fields", ())):
        items = list(zip(fields, batch, strict=True))
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        items = [(str(index), value) for index, value in enumerate(batch)]
    else:
        yield (prefix or "0"), batch
        return
    for key, value in items:
        yield from _leaves(value, f"{prefix}.{key}" if prefix else key)


def _check_form(program: RankProgram, batch: object) -> None:
    """Refuse a dict where the model was compiled with a tuple, and the other way round."""
    if not program.inputs or isinstance(batch, Mapping) != program.positional:
        return
    form = "tuple of positional arguments" if program.positional else "dict of keyword arguments"
    message = f"the batch must be a {form}, as the inputs were ({type(batch).__name__} given)"
    raise InputError(message)


def _check_keys(found: Mapping[str, object], wanted: set[str]) -> None:
    """Refuse missing tensors, and tensors that the model was compiled without.

    Constants of the compiled inputs may stand in the batch or not.
    """
    needed = ", ".join(sorted(wanted)) or "nothing"
    missing = sorted(wanted - found.keys())
    if missing:
        message = (
            f"the batch lacks {missing[0]!r} (it has: {', '.join(sorted(found)) or 'nothing'}; "
            f"needed: {needed})"
        )
        raise InputError(message)
    unknown = [k for k in found if k not in wanted and isinstance(found[k], torch.Tensor)]
    if unknown:
        message = (
            f"the batch has {unknown[0]!r}, which the model was compiled without (needed: "
            f"{needed}): compile it with inputs that have it"
        )
        raise InputError(message)


def _check_tensor(spec: Input, tensor: object, program: RankProgram, count: int) -> None:
    """Refuse what is no tensor, another dtype, or another shape than `count` micro-batches have.

    What a 16-bit program reads may be given in float32, as the model itself reads it.
    """
    if not isinstance(tensor, torch.Tensor):
        message = f"batch[{spec.key!r}] must be a tensor ({type(tensor).__name__} given)"
        raise InputError(message)
    wider = spec.dtype == program.narrow and tensor.is_floating_point()
    if tensor.dtype != spec.dtype and not wider:
        message = f"batch[{spec.key!r}] must have dtype {spec.dtype} ({tensor.dtype} given)"
        raise InputError(message)
    wanted = (spec.shape[0] * count, *spec.shape[1:]) if spec.shape else ()
    if tuple(tensor.shape) == wanted:
        return
    message = (
        f"batch[{spec.key!r}] must have shape {wanted}: {count} micro-batches of {spec.shape} "
        f"({tuple(tensor.shape)} given)"
    )
    if spec.shape and tensor.ndim and tensor.shape[0] % count:
        message += f"; {tensor.shape[0]} rows cannot be divided into {count} micro-batches"
    if spec.shape and tensor.ndim and tensor.shape[0] < spec.shape[0] * count:
        message += (
            "; DataLoader(drop_last=True) leaves out the smaller batch at the end of an epoch, of "
            f"which `evaluate` takes multiples of {spec.shape[0]} rows"
        )
    raise InputError(message)
