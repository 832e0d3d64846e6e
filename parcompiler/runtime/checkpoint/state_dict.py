"""State dicts: checked by all ranks together, and each rank's part copied into its tensors.

Each rank gives an account of a state dict, and all draw the same conclusion. Tensors that were
never filled are tracked, and copies on several ranks are compared.

>>> state = {"a": 1, "c": 1}
>>> accounts = [account_of([("a", "tied")], state), account_of([("b",)], state)]
>>> concluded(accounts, state, strict=False)
IncompatibleKeys(missing_keys=['b'], unexpected_keys=['c'])
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from parcompiler.errors import InputError
from parcompiler.runtime.agreement import digest_of
from parcompiler.runtime.checkpoint.states import RankState
from parcompiler.runtime.vocabulary import VocabularyRows

SHOWN = 8  # faults that a message names


class IncompatibleKeys(NamedTuple):
    """The result of loading a state dict, as in torch."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def account_of(
    tensors: Iterable[Sequence[str]],
    state: Mapping[str, object],
    unsaved: Collection[str] = (),
    faults: Sequence[str] = (),
) -> list[list[str]]:
    """A rank's account of a state dict: all names of each of its `tensors`, those of them that are
    missing, the `faults` that it met, and a digest of the names in the state dict.

    A tensor is missing if `state` has none of its names, and not all of them are `unsaved`.
    """
    known: list[str] = []
    missing: list[str] = []
    for names in tensors:
        known += names
        saved = [name for name in names if name not in unsaved]
        if saved and state.keys().isdisjoint(names):
            missing.append(saved[0])
    digest = hashlib.sha256(json.dumps(sorted(map(str, state))).encode()).hexdigest()
    return [known, missing, list(faults), [digest]]


def concluded(
    accounts: Iterable[list[list[str]]], state: Mapping[str, object], *, strict: bool
) -> IncompatibleKeys:
    """The names that are missing and unexpected, from the accounts of all ranks.

    Raises InputError when any rank met a fault and, if `strict`, when there are such names.
    """
    columns = zip(*accounts, strict=True)
    known, missing, faults, digests = (dict.fromkeys(chain(*column)) for column in columns)
    keys = IncompatibleKeys([*missing], [name for name in state if name not in known])
    reasons = [*faults]
    if strict and not reasons:
        if len(digests) > 1:
            reasons.append("the ranks were given different names: give each the whole state dict")
        for kind, names in (("lacks", keys.missing_keys), ("has unknown", keys.unexpected_keys)):
            if names:
                reasons.append(
                    f"the state dict {kind} {', '.join(map(repr, names))} ({len(names)})"
                )
    if reasons:
        advice = "" if faults else " (strict=False loads what fits)"
        more = [f"and {len(reasons) - SHOWN} more"] if len(reasons) > SHOWN + 1 else []
        first = reasons[:SHOWN] if more else reasons
        message = "\n".join([*first, *more, f"nothing is loaded{advice}"])
        raise InputError(message)
    return keys


class RankTensors:
    """The tensors of this rank by name: parameters and buffers, pieces of them, rows, and masters.

    `missing` were never filled, `loaded` were filled since the ranks last compared weights (None:
    none). `lacking` says why the published weights that the export names are not loaded.
    """

    def __init__(self, state: RankState) -> None:
        self._program, self._updates = state.program, state.updates
        self._state, self._tensors = state, state.interpreter.tensors
        self._rows = VocabularyRows(state.program)
        self._missing = set(self._tensors)
        self.loaded: set[str] | None = None
        self.lacking = ""
        self._digests: dict[str, torch.Tensor] = {}

    def faults(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        """Why tensors of a state dict cannot be copied into this rank's."""
        faults = []
        for name, tensor in self._own(state.items()):
            try:
                self._state.place(name, tensor)
            except InputError as error:
                faults.append(str(error))
        return faults

    @torch.no_grad()
    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors into this rank's; those of other ranks are ignored."""
        self.loaded, self.lacking = self.loaded or set(), ""
        for name, whole in self._own(named):
            self._state.fill(name, whole)
            self._missing.discard(name)
            self.loaded.add(name)
            if self._updates.in_pieces(name):  # all must have read rows of equal tensors
                self._digests[name] = torch.tensor(digest_of([whole]))
        self._updates.masters.write()

    def _own(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a state dict that this rank has a part of, by their names in the model."""
        named = ((self._program.aliases.get(alias, alias), tensor) for alias, tensor in named)
        return ((name, tensor) for name, tensor in named if name in self._tensors)

    def filled(self, names: Collection[str]) -> None:
        """Note tensors filled from a checkpoint, which is checked in another way."""
        self._missing.difference_update(names)
        self.loaded, self.lacking = None, ""
        self._digests.clear()

    def unpadded(self, name: str) -> list[torch.Tensor]:
        """A tensor of this rank, and its master if that is whole, without padding; for a parameter
        in pieces a digest of the whole."""
        if self._updates.in_pieces(name):
            return [self._digests.get(name, torch.zeros(1))]  # files: ranks read only rows
        copies = [self._tensors[name]]
        if not (self._program.sharing or self._updates.serving):
            masters = self._updates.masters.by_name
            copies += [masters[name]] if name in masters else []
        return [self._rows.unpadded(name, tensor) for tensor in copies]

    def check_published(self) -> None:
        """Raise InputError where the export names published weights that could not be loaded."""
        if self.lacking:
            raise InputError(self.lacking)

    def check_loaded(self) -> None:
        """Raise InputError where tensors were never filled."""
        self.check_published()
        weights = self._missing.difference(self._program.unsaved)
        if weights:
            message = (
                f"this rank lacks the weights of {min(weights)!r} ({len(weights)} "
                "tensors), as the export has none: load published ones (--pretrained at the "
                "export, worker.load_pretrained), go on from a checkpoint (--resume, worker.load), "
                "call worker.load_state_dict, or export with weights=True a model that has values "
                "(parcompiler train makes those of an hf: model)"
            )
            raise InputError(message)
        if self._missing:
            name, count = min(self._missing), len(self._missing)
            message = (
                f"this rank lacks the value of {name!r} ({count} such tensors), which the state "
                "dict of the model has not: compile the model on the CPU, or give its value by "
                f"worker.load_state_dict({{{name!r}: value}}, strict=False)"
            )
            raise InputError(message)
