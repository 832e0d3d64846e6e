"""A state dict judged by all ranks: each says what it has of the model, and all conclude the same.

>>> says = [says_of([("a", "tied")], {"a": 1, "c": 1}), says_of([("b",)], {"a": 1, "c": 1})]
>>> concluded(says, {"a": 1, "c": 1}, strict=False)
IncompatibleKeys(missing_keys=['b'], unexpected_keys=['c'])
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from parcompiler.errors import InputError


class IncompatibleKeys(NamedTuple):
    """What loading a state dict returns, as in torch."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def says_of(
    tensors: Iterable[Sequence[str]],
    state: Mapping[str, object],
    unsaved: Collection[str] = (),
    faults: Sequence[str] = (),
) -> str:
    """What a rank says of a state dict: all names of each of its `tensors`, those of them that are
    missing, the `faults` that it met, and a digest of the names that it was given.

    A tensor is missing that has none of its names in `state`, and some that are not `unsaved`.
    """
    known: list[str] = []
    missing: list[str] = []
    for names in tensors:
        known += names
        saved = [name for name in names if name not in unsaved]
        if saved and state.keys().isdisjoint(names):
            missing.append(saved[0])
    given = hashlib.sha256(json.dumps(sorted(map(str, state))).encode()).hexdigest()
    return json.dumps([known, missing, list(faults), [given]])


def concluded(
    says: Iterable[str], state: Mapping[str, object], *, strict: bool
) -> IncompatibleKeys:
    """The names that are missing and unexpected, from what all ranks say.

    Raises InputError when any has met a fault and, if `strict`, for such names.
    """
    columns = zip(*map(json.loads, says), strict=True)
    known, missing, faults, given = (
        dict.fromkeys(item for row in column for item in row) for column in columns
    )
    keys = IncompatibleKeys([*missing], [name for name in state if name not in known])
    found = [*faults]
    if strict and not found:
        if len(given) > 1:
            found.append("the ranks were given different names: give each the whole state dict")
        for kind, names in (("lacks", keys.missing_keys), ("has unknown", keys.unexpected_keys)):
            if names:
                found.append(f"the state dict {kind} {', '.join(map(repr, names))} ({len(names)})")
    if found:
        advice = "" if faults else " (strict=False loads what fits)"
        message = "\n".join([*found, f"nothing is loaded{advice}"])
        raise InputError(message)
    return keys
