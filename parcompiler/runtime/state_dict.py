"""This rank's part of the model's tensors: state dicts in, and whole tensors out on rank 0.

A state dict is judged by all ranks: each gives an account, and all conclude the same.

>>> state = {"a": 1, "c": 1}
>>> accounts = [account_of([("a", "tied")], state), account_of([("b",)], state)]
>>> concluded(accounts, state, strict=False)
IncompatibleKeys(missing_keys=['b'], unexpected_keys=['c'])
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from parcompiler.errors import InputError
from parcompiler.pieces import Shard
from parcompiler.runtime.agreement import digest_of
from parcompiler.runtime.axis import in_memory
from parcompiler.runtime.channels import Channels
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.updates import Updates
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
) -> str:
    """A rank's account of a state dict: all names of each of its `tensors`, those of them that are
    missing, the `faults` that it met, and a digest of the names in the state dict.

    A tensor is missing that has none of its names in `state`, and some that are not `unsaved`.
    """
    known: list[str] = []
    missing: list[str] = []
    for names in tensors:
        known += names
        saved = [name for name in names if name not in unsaved]
        if saved and state.keys().isdisjoint(names):
            missing.append(saved[0])
    digest = hashlib.sha256(json.dumps(sorted(map(str, state))).encode()).hexdigest()
    return json.dumps([known, missing, list(faults), [digest]])


def concluded(
    accounts: Iterable[str], state: Mapping[str, object], *, strict: bool
) -> IncompatibleKeys:
    """The names that are missing and unexpected, from the accounts of all ranks.

    Raises InputError when any has met a fault and, if `strict`, for such names.
    """
    columns = zip(*map(json.loads, accounts), strict=True)
    known, missing, faults, digests = (
        dict.fromkeys(entry for row in column for entry in row) for column in columns
    )
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

    `missing` are those that were never filled, `loaded` those that were since the ranks compared
    their weights (None: none).
    """

    def __init__(
        self,
        program: RankProgram,
        tensors: Mapping[str, torch.Tensor],
        updates: Updates,
        channels: Channels,
    ) -> None:
        self._program, self._tensors, self._updates = program, tensors, updates
        self._channels, self._axis = channels, channels.axis
        self._rows = VocabularyRows(program)
        self._missing = set(tensors)
        self.loaded: set[str] | None = None
        self._digests: dict[str, torch.Tensor] = {}

    def account(self, state: Mapping[str, torch.Tensor]) -> str:
        """This rank's account of a state dict; the first of ranks with equal tensors names them."""
        faults = []
        for name, tensor in state.items():
            try:
                self._placed(name, tensor)
            except InputError as error:
                faults.append(str(error))
        first = not (self._program.coordinate.data or self._program.coordinate.tensor)
        names = {name: [name] for name in self._tensors if first}
        for alias, name in self._program.aliases.items():
            if name in names:
                names[name].append(alias)
        return account_of(names.values(), state, self._program.unsaved, faults)

    @torch.no_grad()
    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors into this rank's; those of other ranks are passed over."""
        self.loaded = self.loaded or set()
        for alias, whole in named:
            name, part = self._placed(alias, whole)
            if part is None:
                continue

            def fill(target: torch.Tensor, name: str = name, part: torch.Tensor = part) -> None:
                self._rows.unpadded(name, target).copy_(part)

            self._updates.fill(name, self._tensors[name], fill)
            self._missing.discard(name)
            self._note(name, part)
            self.loaded.add(name)

    def filled(self, names: Collection[str]) -> None:
        """Take note of tensors whose values came from a checkpoint, which is compared otherwise."""
        self._missing.difference_update(names)
        self.loaded = None
        self._digests.clear()

    def _note(self, name: str, whole: torch.Tensor) -> None:
        """Keep a number for the values of a parameter of which each data rank has rows of its own:
        all must have taken them from the same whole."""
        if self._updates.in_pieces(name):
            self._digests[name] = torch.tensor(digest_of([whole]))

    def unpadded(self, name: str) -> list[torch.Tensor]:
        """A tensor of this rank, and its master where it has a whole one, without padding; of a
        parameter in pieces a number for the whole."""
        if self._updates.in_pieces(name):
            return [self._digests.get(name, torch.zeros(1))]  # of files each rank reads its rows
        copies = [self._tensors[name]]
        if not (self._program.sharing or self._updates.serving):
            masters = self._updates.masters.by_name
            copies += [masters[name]] if name in masters else []
        return [self._rows.unpadded(name, tensor) for tensor in copies]

    def check_loaded(self) -> None:
        """Raise InputError where tensors were never filled."""
        weights = self._missing.difference(self._program.unsaved)
        if weights:
            message = (
                f"this rank lacks the weights of {min(weights)!r} ({len(weights)} "
                "tensors), as the export has none: load published ones (--pretrained at the "
                "export, worker.load_pretrained), go on from a checkpoint (--resume, worker.load), "
                "call worker.load_state_dict, or export with weights=True"
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

    def gather(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """On rank 0 the tensors of all ranks by name, whole, on the CPU; None elsewhere. A
        collective. Of ranks that hold the same, the first of a pipeline coordinate sends."""
        grid, rank = self._program.grid, self._program.rank
        sources = [grid.rank(position) for position in range(1, grid.pipeline)]
        parts = self._whole({n: t for n, t in tensors.items() if n not in self._program.rows})
        if rank in sources:
            _send(parts, self._channels)
        if rank != 0:
            sources, parts = [], {}
        whole = {name: tensor.detach().cpu().clone() for name, tensor in parts.items()}
        for source in sources:
            for name, tensor in _receive(source, self._channels).items():
                whole.setdefault(name, tensor)  # copies of a tied tensor are equal
        for name in self._rows.sizes if 0 in self._rows.ranks else ():
            if name not in tensors:
                continue
            padded = in_memory(tensors[name].detach())
            if rank == 0:
                buffer, channels = torch.empty_like(padded), self._channels
                whole[name] = self._rows.joined(
                    name,
                    (channels.receive_now(buffer, r) if r else padded for r in self._rows.ranks),
                )
            else:
                self._channels.send_now(padded, 0)
        return whole if rank == 0 else None

    def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send tensors by name to rank 0."""
        _send(tensors, self._channels)

    def receive(self, source: int) -> dict[str, torch.Tensor]:
        """The tensors that rank `source` sends, on rank 0."""
        return _receive(source, self._channels)

    def _whole(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors of this rank, whole on the first rank of each tensor-parallel group that
        others read from."""
        at, shards, experts = self._program.coordinate, self._program.shards, self._program.experts
        group = self._channels.expert
        if (self._axis is None and group is None) or at.data >= self._program.expert:
            return tensors
        wholes: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            shard, whole = shards.get(name), tensor.detach()
            of_experts = group is not None and name in experts
            if self._axis is not None and shard is not None and (of_experts or at.data == 0):
                whole = self._axis.all_gather(whole, shard)
            if group is not None and of_experts:
                whole = group.all_gather(whole, Shard(0, (experts[name],)))
            if at.tensor == at.data == 0:
                wholes[name] = whole.cpu()
        return wholes

    def _placed(self, alias: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor | None]:
        """The name of a tensor with the name `alias` in a state dict, and this rank's part of it,
        None if it has none. Raises InputError for a tensor that cannot be copied."""
        name = self._program.aliases.get(alias, alias)
        if name not in self._tensors:
            return name, None
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            kind = "has no values (meta)" if isinstance(tensor, torch.Tensor) else "is no tensor"
            message = f"{alias!r} {kind}: give a tensor of the CPU or a device"
            raise InputError(message)
        padded, shard = self._tensors[name], self._program.shards.get(name)
        target = self._rows.unpadded(name, padded)
        part = self._rows.of_whole(name, tensor, padded)
        if name in self._program.experts and len(part) == self._program.experts[name]:
            span = self._program.own_experts(name)
            part = part.narrow(0, span.start, span.size)
        if shard is not None and self._axis is not None and part.shape == shard.shape(padded.shape):
            part = shard.take(part, self._axis.size, self._axis.rank)
        if part.shape != target.shape:
            shapes = f"{tuple(target.shape)} needed, {tuple(part.shape)} given"
            message = f"{name!r} has another shape ({shapes}): weights of another model?"
            raise InputError(message)
        return name, part


def _send(tensors: Mapping[str, torch.Tensor], channels: Channels) -> None:
    """Send names, shapes and dtypes as JSON, then the tensors, to rank 0."""
    device = channels.device
    kinds = [[n, list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in tensors.items()]
    header = torch.tensor(list(json.dumps(kinds).encode()), dtype=torch.uint8, device=device)
    channels.send_now(torch.tensor([header.numel()], device=device), 0)
    channels.send_now(header, 0)
    for tensor in tensors.values():
        if tensor.numel():
            channels.send_now(in_memory(tensor.detach().to(device)), 0)


def _receive(source: int, channels: Channels) -> dict[str, torch.Tensor]:
    """Receive the tensors that `_send` on rank `source` sends."""
    device = channels.device
    length = channels.receive_now(torch.zeros(1, dtype=torch.int64, device=device), source)
    header = torch.zeros(int(length), dtype=torch.uint8, device=device)
    channels.receive_now(header, source)
    tensors = {}
    for name, shape, dtype in json.loads(bytes(header.tolist())):
        tensor = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        if tensor.numel():
            channels.receive_now(tensor, source)
        tensors[name] = tensor.cpu()
    return tensors
