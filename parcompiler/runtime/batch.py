"""A batch of this rank's data coordinate: checked, and cut into micro-batches.

A batch has the form of the inputs that the model was compiled with (dict of keywords or tuple of
positions) with `microbatches` times the rows: dimension 0 of every tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from parcompiler.errors import InputError
from parcompiler.runtime.program import PLAIN, Input, RankProgram


def microbatches(
    program: RankProgram, batch: object, *, fewer: bool = False
) -> list[dict[str, torch.Tensor]]:
    """The tensors of each micro-batch, by input name.

    `fewer` allows a batch of fewer micro-batches than a step has, which is evaluated. Raises
    InputError when a key is missing or unknown, a dtype or shape is not the one that the model was
    compiled for, or a tensor to train on wants a gradient.
    """
    leaves = dict(_leaves(batch))
    wanted = {spec.key for spec in program.inputs.values()}
    _check_form(program, batch)
    _check_keys(leaves, wanted, program.constants)
    count = _count(program, leaves) if fewer else program.microbatches
    tensors = {name: leaves[spec.key] for name, spec in program.inputs.items()}
    pieces = _cut(program, tensors, count)
    for name, spec in program.inputs.items():
        if not fewer and pieces[0][name].requires_grad:
            message = (
                f"batch[{spec.key!r}] requires a gradient, and a step gives none to its inputs: "
                "detach it (.detach()), or compile what it was computed with as a part of the model"
            )
            raise InputError(message)
    return pieces


def check_modes(device: torch.device, *, training: bool) -> None:
    """Refuse modes of torch, set by the caller, that would change results or forbid training."""
    if torch.is_autocast_enabled(device.type):
        message = (
            "a program computes in its own precision: call it outside of torch.autocast, and "
            "compile with precision='bf16' instead"
        )
        raise InputError(message)
    if training and torch.is_inference_mode_enabled():
        message = "nothing is trained within torch.inference_mode(): call step outside of it"
        raise InputError(message)


def samples_of_batch(program: RankProgram, batch: object) -> tuple[dict[str, object], int]:
    """The tensors of a batch for predictions by key, and its number of samples, which may be any.

    Inputs that no kept output depends on, such as labels, may be missing. Raises InputError as
    `microbatches` does, and where inputs have different numbers of samples.
    """
    leaves = dict(_leaves(batch))
    needed = {name for output in program.outputs.values() for name in output.inputs}
    _check_form(program, batch)
    specs = [s for n, s in program.inputs.items() if n in needed or s.key in leaves]
    _check_keys(leaves, {spec.key for spec in specs}, program.constants)
    counts: dict[str, int] = {}
    for spec in (spec for spec in specs if program.rows_of_sample(spec)):
        tensor, rows = leaves[spec.key], program.rows_of_sample(spec)
        length = tensor.shape[0] if isinstance(tensor, torch.Tensor) and tensor.ndim else 0
        whole = isinstance(tensor, torch.Tensor) and tensor.shape[1:] == spec.shape[1:]
        if not (length and whole) or length % rows:
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor)
            message = (
                f"batch[{spec.key!r}] must have rows of shape {spec.shape[1:]}, {rows} for each "
                f"sample ({shape} given)"
            )
            raise InputError(message)
        counts[spec.key] = length // rows
    if len({*counts.values()}) > 1:
        listed = ", ".join(f"{key!r}: {count}" for key, count in counts.items())
        message = f"the inputs of a batch must have the same number of samples ({listed})"
        raise InputError(message)
    count = next(iter(counts.values()), program.samples)
    for spec in specs:
        if spec.shape and not program.rows_of_sample(spec):
            _check_shared(spec, leaves[spec.key], -(-count // program.samples))
    return leaves, count


def _check_shared(spec: Input, tensor: object, count: int) -> None:
    """Refuse a shared input that has neither one row nor one for each of `count` micro-batches."""
    shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor)
    if shape not in ((1, *spec.shape[1:]), (count, *spec.shape[1:])):
        message = (
            f"batch[{spec.key!r}] must have a row of shape {spec.shape[1:]} that all samples "
            f"share, or one for each of the {count} micro-batches ({shape} given)"
        )
        raise InputError(message)


def padded(
    program: RankProgram, leaves: Mapping[str, object], count: int
) -> list[dict[str, torch.Tensor]]:
    """`count` micro-batches of the tensors that `samples_of_batch` returns: padded with repeats of
    the last sample, and with zeros for missing inputs."""
    batch: dict[str, torch.Tensor] = {}
    for name, spec in program.inputs.items():
        tensor, rows = leaves.get(spec.key), spec.shape[0] if spec.shape else 0
        each = program.rows_of_sample(spec)
        if not isinstance(tensor, torch.Tensor):
            batch[name] = torch.zeros((rows * count, *spec.shape[1:]), dtype=spec.dtype)
        elif each:
            sample = torch.arange(count * program.samples).clamp(max=len(tensor) // each - 1)
            place = (sample[:, None] * each + torch.arange(each)).flatten()
            batch[name] = tensor[place.to(tensor.device)]
        elif spec.shape:
            batch[name] = tensor[torch.arange(count).clamp(max=len(tensor) - 1).to(tensor.device)]
        else:
            batch[name] = tensor
    return _cut(program, batch, count)


def _cut(
    program: RankProgram, batch: Mapping[str, object], count: int
) -> list[dict[str, torch.Tensor]]:
    """Check the tensors of a batch, and cut them into `count` micro-batches."""
    pieces: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    for name, spec in program.inputs.items():
        tensor = batch[name]
        _check_tensor(spec, tensor, program, count)
        assert isinstance(tensor, torch.Tensor)
        # Autograd cannot save a tensor made in inference mode for the backward.
        tensor = tensor.to(spec.dtype, copy=tensor.is_inference())
        rows = spec.shape[0] if spec.shape else 0
        for i, piece in enumerate(pieces):
            piece[name] = tensor.narrow(0, i * rows, rows) if spec.shape else tensor
    return pieces


def _count(program: RankProgram, leaves: Mapping[str, object]) -> int:
    """The number of micro-batches in a batch, by its first tensor with a multiple of a
    micro-batch's rows; if there is none, the number in a step."""
    for spec in program.inputs.values():
        tensor = leaves[spec.key]
        if spec.shape and isinstance(tensor, torch.Tensor) and tensor.ndim:
            count, rest = divmod(tensor.shape[0], spec.shape[0])
            if not rest and 0 < count <= program.microbatches:
                return count
    return program.microbatches


def _leaves(batch: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every leaf of a batch with its key, as `capture` names them: `ids`, `0`, `images.1`.

    Arguments by position have numbers, those of a named tuple too. Below the top level a named
    tuple has its field names, as has all that is registered with torch's pytrees (dataclasses).
    """
    items: list[tuple[str, Any]]
    by_name = bool(prefix) and hasattr(batch, "_fields")
    if isinstance(batch, Mapping):
        items = [(str(key), value) for key, value in batch.items()]
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes) and not by_name:
        items = [(str(index), value) for index, value in enumerate(batch)]
    elif pytree.tree_is_leaf(batch):
        yield (prefix or "0"), batch
        return
    else:
        children, _ = pytree.tree_flatten_with_path(batch, lambda value: value is not batch)
        items = [(_name(path[0]), value) for path, value in children]
    for key, value in items:
        yield from _leaves(value, f"{prefix}.{key}" if prefix else key)


def _name(step: object) -> str:
    """One step of a path into a pytree, as text."""
    names = (getattr(step, kind, None) for kind in ("name", "key", "idx"))
    return next(str(name) for name in names if name is not None)


def _check_form(program: RankProgram, batch: object) -> None:
    """Refuse a dict where the model was compiled with a tuple, and the other way round."""
    if not program.inputs or isinstance(batch, Mapping) != program.positional:
        return
    form = "tuple of positional arguments" if program.positional else "dict of keyword arguments"
    message = f"the batch must be a {form}, as the inputs were ({type(batch).__name__} given)"
    raise InputError(message)


def _check_keys(
    leaves: Mapping[str, object], wanted: set[str], constants: Mapping[str, object]
) -> None:
    """Refuse missing tensors, and values that the model was compiled without.

    Constants of the compiled inputs may be in the batch, with unchanged values.
    """
    needed = ", ".join(sorted(wanted)) or "nothing"
    missing = sorted(wanted - leaves.keys())
    listed = [key for key in missing if any(name.startswith(f"{key}.") for name in leaves)]
    if listed:
        message = (
            f"batch[{listed[0]!r}] must be a tensor, as in the inputs (several values given, as in "
            "a list or a dict): torch.tensor makes one of a list of numbers"
        )
        raise InputError(message)
    if missing:
        message = (
            f"the batch lacks {missing[0]!r} (it has: {', '.join(sorted(leaves)) or 'nothing'}; "
            f"needed: {needed})"
        )
        raise InputError(message)
    unknown = [k for k in leaves if k not in wanted and k not in constants]
    if unknown:
        message = (
            f"the batch has {unknown[0]!r}, which the model was compiled without (needed: "
            f"{needed}): compile it with inputs that have it"
        )
        raise InputError(message)
    for key in constants.keys() & leaves.keys():
        value, known = leaves[key], constants[key]
        is_plain = isinstance(value, PLAIN)
        is_nan = is_plain and value != value and known != known
        if not is_plain or (value != known and not is_nan):
            message = (
                f"batch[{key!r}] is {value if is_plain else type(value).__name__}, and the model "
                f"was compiled with {known}: values other than tensors are constants of a program "
                "(compile it with a tensor there, or again with this value)"
            )
            raise InputError(message)


def _check_tensor(spec: Input, tensor: object, program: RankProgram, count: int) -> None:
    """Refuse another type, dtype or shape than `count` micro-batches have.

    16-bit inputs of a 16-bit program may be given in float32, as the model itself takes them.
    """
    if not isinstance(tensor, torch.Tensor):
        kind = f"{type(tensor).__module__}.{type(tensor).__name__}".removeprefix("builtins.")
        message = f"batch[{spec.key!r}] must be a tensor ({kind} given)"
        if hasattr(tensor, "__array__"):
            message += ": torch.as_tensor makes one of an array"
        raise InputError(message)
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
        layout = (
            tensor.device if tensor.is_meta else "nested" if tensor.is_nested else tensor.layout
        )
        message = f"batch[{spec.key!r}] must be a dense tensor with values ({layout} given)"
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
    if tuple(tensor.shape) == spec.shape:
        message += (
            f"; this has the rows of one micro-batch: give those of all {count}, and repeat what "
            "is the same for all of them (tensor.repeat)"
        )
    elif spec.shape and tensor.ndim and tensor.shape[0] < spec.shape[0] * count:
        message += (
            "; DataLoader(drop_last=True) leaves out the smaller batch at the end of an epoch, of "
            f"which `evaluate` takes multiples of {spec.shape[0]} rows"
        )
    raise InputError(message)
