"""The contents of checkpoint.json: counters and options of all ranks, and states as JSON.

The tensors of a state stand beside it:

>>> tensors = {}
>>> text = encoded({"epoch": 3, "sizes": (1, 2), 7: None}, tensors)
>>> text
{'dict': [['epoch', 3], ['sizes', {'tuple': [1, 2]}], [7, None]]}
>>> decoded(text, tensors.__getitem__)
{'epoch': 3, 'sizes': (1, 2), 7: None}
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from parcompiler.errors import InputError, shown
from parcompiler.runtime.axis import in_memory, raw
from parcompiler.runtime.checkpoint.folder import Checkpoint, dtype_of
from parcompiler.runtime.program import RankProgram


def merged(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The contents of checkpoint.json, from the facts of all ranks."""
    together = {key: value for key, value in facts[0].items() if key != "seed"}
    together["seeds"] = [item["seed"] for item in facts]
    optimizers = [item["optimizer"] for item in facts if "optimizer" in item]
    if optimizers:
        groups = _groups([item["groups"] for item in optimizers])
        stepping = [one for one in optimizers if any(x["names"] for x in one["groups"])]
        named = stepping[0]["own"] if stepping else []
        if any(item["own"] != named for item in stepping):
            names = ", ".join(repr(key) for key, _ in named)
            message = (
                f"states of the optimizer that belong to no parameter ({names}) differ between "
                "ranks, and a checkpoint has one for all: save with optimizer=False"
            )
            raise InputError(message)
        values = {n: v for item in reversed(optimizers) for n, v in item["values"].items()}
        kind = optimizers[0]["kind"]
        together["optimizer"] = {"kind": kind, "groups": groups, "values": values, "own": named}
    extras = [item["extra"] for item in facts if "extra" in item]
    together["extra"] = {
        name: states[:1] if all(state == states[0] for state in states) else states
        for name in extras[0]
        for states in [[item[name] for item in extras]]
    }
    return together


def _groups(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The groups of the optimizer, merged over `ranks` by their number; a rank's group whose
    options differ from an earlier rank's is appended separately."""
    groups: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for on_rank in ranks:
        for number, group in enumerate(on_rank):
            if number == len(groups):
                groups.append({"names": [], "options": group["options"]})
            known = groups[number]
            if not known["names"]:
                known["options"] = group["options"]
            if known["options"] != group["options"] and group["names"]:
                others.append(dict(group))
            else:
                known["names"] += [n for n in group["names"] if n not in known["names"]]
    return [*groups, *others]


def extra_state(extra: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The states of the user's `extra` objects. Raises InputError for an object that has none, or
    one that a checkpoint cannot hold."""
    states = {}
    for name, item in extra.items():
        if not callable(getattr(item, "state_dict", None)):
            message = f"extra {name!r} has no state_dict() ({type(item).__name__})"
            raise InputError(message)
        states[name] = encoded(item.state_dict(), tensors, f"the state of extra {name!r}")
    return states


def extra_of(checkpoint: Checkpoint, name: str, program: RankProgram) -> Any:
    """The state of an object, as it is for a data rank. Raises InputError where it has none."""
    states = checkpoint.facts["extra"].get(name)
    if states is None:
        known = ", ".join(checkpoint.facts["extra"]) or "nothing"
        message = f"the checkpoint has no extra {name!r} (it has: {known})"
        raise InputError(message)
    if len(states) not in (1, program.data):
        message = (
            f"extra {name!r} has a state for each of {len(states)} data ranks, and this program "
            f"has {program.data}: save what is the same on all (pc.Samples needs no state)"
        )
        raise InputError(message)
    state = states[program.coordinate.data if len(states) > 1 else 0]
    return decoded(state, lambda digest: checkpoint.whole(f"extra/{digest}"))


def option(value: object, place: str) -> Any:
    """A number of an optimizer as JSON; a tensor without dimensions keeps dtype and device."""
    if isinstance(value, torch.Tensor) and not value.dim() and not value.is_complex():
        dtype = str(value.dtype).removeprefix("torch.")
        return {"scalar": value.item(), "dtype": dtype, "cpu": value.device.type == "cpu"}
    tensors: dict[str, torch.Tensor] = {}
    encoding = encoded(value, tensors, place)
    return _refused(place) if tensors else encoding


def _refused(place: str) -> Any:
    message = (
        f"{place} is or holds a tensor with dimensions, which a checkpoint cannot hold there (of a "
        "parameter it holds states that are tensors themselves): save with optimizer=False"
    )
    raise InputError(message)


def value_of(value: Any, parameter: torch.Tensor) -> Any:
    """Inverse of `option`; a tensor goes to the CPU or to the parameter's device, as it was."""
    match value:
        case {"scalar": number, "dtype": str(dtype), "cpu": bool(cpu)}:
            device = torch.device("cpu") if cpu else parameter.device
            return torch.tensor(number, dtype=dtype_of(dtype), device=device)
    return decoded(value, lambda name: _refused(name))


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set the options of a group; a tensor is filled in place."""
    for key, option in options.items():
        before = group.get(key)
        value = value_of(option, torch.empty(0))
        if isinstance(before, torch.Tensor):
            before.fill_(value)
        else:
            group[key] = value


def encoded(value: object, tensors: dict[str, torch.Tensor], place: str = "the state") -> Any:
    """A value as JSON; its tensors go into `tensors` by a digest of their contents.

    A dictionary is kept as it is when its keys are texts and it cannot be mistaken for an encoding.
    Raises InputError for what neither JSON nor safetensors can hold, and says where it is.
    """
    match value:
        case None | bool() | int() | float() | str() if type(value) in _PLAIN:
            return value
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case torch.Tensor():
            return {"tensor": _kept(value, tensors)}
        case list():
            return [encoded(item, tensors, f"{place}[{k}]") for k, item in enumerate(value)]
        case tuple() if type(value) is tuple:
            return {"tuple": encoded([*value], tensors, place)}
        case dict():
            pairs = [
                [encoded(k, tensors, f"a key of {place}"), encoded(v, tensors, f"{place}[{k!r}]")]
                for k, v in value.items()
            ]
            if all(isinstance(key, str) for key in value) and value.keys().isdisjoint(_MARKS):
                return dict(pairs)
            return {"dict": pairs}
    message = (
        f"{place} is {shown(value)} ({type(value).__name__}), which a checkpoint cannot hold: "
        "numbers, texts, bytes, tensors, and lists, tuples and dictionaries of these"
    )
    raise InputError(message)


def decoded(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Inverse of `encoded`; `tensor` returns a tensor by its digest."""
    match value:
        case {"bytes": str(text), **rest} if not rest:
            return base64.b64decode(text)
        case {"tensor": str(name), **rest} if not rest:
            return tensor(name)
        case {"tuple": [*items], **rest} if not rest:
            return tuple(decoded(item, tensor) for item in items)
        case {"dict": [*pairs], **rest} if not rest:
            return {decoded(key, tensor): decoded(item, tensor) for key, item in pairs}
        case dict():
            return {key: decoded(item, tensor) for key, item in value.items()}
        case list():
            return [decoded(item, tensor) for item in value]
    return value


_PLAIN = (type(None), bool, int, float, str)
_MARKS = frozenset(("bytes", "tensor", "tuple", "dict"))


def _kept(tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    """Store a tensor under a digest of its contents, equal ones once. Returns the digest."""
    copy = in_memory(tensor.detach().cpu()).clone()
    described = f"{copy.dtype} {tuple(copy.shape)}".encode()
    digest = hashlib.sha256(described + raw(copy)).hexdigest()[:32]
    tensors[digest] = copy
    return digest
