"""What a rank has to remember of a run, taken out of it and put back.

    model/NAME             parameters (of 16-bit programs their float32 masters) and buffers
    unsaved/NAME           what a state dict of the model has not: buffers that are not persistent
    rank 1 model/NAME      where data ranks step by themselves, what this one has instead
    rank 1 error/NAME      what PowerSGD has left out, and its factor
    outer momentum/NAME    what rounds of such steps have left, and the anchor that they begin from
    data 1/NAME            what differs between data ranks (statistics of a batch norm)
    optimizer KEY/NAME     a state of the optimizer with the shape of its parameter, or its own

Numbers of the optimizer (the step of each parameter) and its options are in checkpoint.json, by the
name of the parameter. Gradients, and weight versions of pipedream, do not outlive a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from parcompiler.errors import InputError
from parcompiler.runtime.agreement import digests_of
from parcompiler.runtime.checkpoint.boxes import Box
from parcompiler.runtime.checkpoint.folder import Checkpoint, dtype_of
from parcompiler.runtime.checkpoint.layout import Part, RankLayout
from parcompiler.runtime.checkpoint.pretrained import Place, Pretrained, boxes, grouped
from parcompiler.runtime.checkpoint.values import decoded, encoded
from parcompiler.runtime.interpreter import Interpreter
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.updates import Updates

FACTORED = ("error", "factor")  # of PowerSGD
ARRIVALS = "arrivals"  # of an asynchronous program
KEPT = ("outer anchor", "outer momentum")  # of rounds
LIKE = "like its parameter"  # the note of a state that is divided as its parameter is


class Held(NamedTuple):
    """What a rank holds of a tensor: the shape of the whole, a note, and its parts."""

    shape: tuple[int, ...]
    note: str
    parts: list[Part]


@dataclass
class Restored:
    """What a checkpoint means for a rank: `faults` that forbid to load it, what is to be copied
    into the rank's memory, and the states and options that its optimizer gets."""

    faults: list[str] = field(default_factory=list)
    copies: list[tuple[str, Part]] = field(default_factory=list)
    kept: list[tuple[Callable[[str, torch.Tensor], None], str, torch.Tensor]] = field(
        default_factory=list
    )
    names: set[str] = field(default_factory=set)
    states: list[tuple[nn.Parameter, dict[str, Any]]] = field(default_factory=list)
    options: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)


class RankState:
    """The state of one rank. `calls` counts its steps (True) and evaluations (False)."""

    def __init__(
        self,
        program: RankProgram,
        interpreter: Interpreter,
        updates: Updates,
        layout: RankLayout,
        calls: dict[bool, int],
    ) -> None:
        self._program = program
        self._interpreter = interpreter
        self._updates = updates
        self._layout = layout
        self._calls = calls

    def names(self) -> list[str]:
        """The tensors that this rank holds, as far as no other rank of its pipeline coordinate says
        so."""
        at = self._program.coordinate
        return [] if at.data or at.tensor else list(self._interpreter.tensors)

    def every_name(self) -> list[str]:
        """The tensors that this rank holds."""
        return list(self._interpreter.tensors)

    def tensors(self, *, optimizer: bool = True) -> dict[str, Held]:
        """Of everything that this rank holds: the shape of the whole, a note, and its parts."""
        found = {}
        unsaved = self._program.unsaved
        for name, tensor in self._interpreter.tensors.items():
            key = f"{'unsaved' if name in unsaved else 'model'}/{name}"
            parts = self._parts(name, self._master(name))
            if parts:
                found[key] = Held(self._layout.shape(name, tensor), "", parts)
        for name, parameter, states in self._states() if optimizer else ():
            for key, value in states.items():
                if not isinstance(value, torch.Tensor) or not value.dim():
                    continue
                if value.shape == parameter.shape:
                    shape = self._layout.shape(name, self._interpreter.tensors[name])
                    parts = self._parts(name, value)
                    found[f"optimizer {key}/{name}"] = Held(shape, LIKE, parts)
                else:
                    parts = [Part(Box.whole(value.shape), value)]
                    place = self._place(name, parameter)
                    found[f"optimizer {key}{place}/{name}"] = Held(tuple(value.shape), "", parts)
        for name, kind, value in self._kept():
            shape = self._layout.shape(name, self._interpreter.tensors[name])
            found[f"{kind}/{name}"] = Held(shape, LIKE, self._parts(name, value))
        return found

    def apart(self, *, optimizer: bool = True) -> dict[str, Held]:
        """What this rank has instead of what data rank 0 has, where data ranks step by
        themselves: the states of its optimizer, and within a round its weights; and what PowerSGD
        keeps, and the record of arrivals."""
        rounds, rank = self._updates.rounds, self._program.rank
        powersgd = self._interpreter.powersgd if optimizer else None
        found = {} if powersgd is None else {
            key: Held(tuple(tensor.shape), "", [Part(Box.whole(tensor.shape), tensor)])
            for key, tensor in powersgd.states()
        }  # fmt: skip
        record = None if self._updates.serving is None else self._updates.serving.record
        if record and optimizer:
            order = torch.tensor(record, dtype=torch.int16)
            found[f"{ARRIVALS}/"] = Held(
                tuple(order.shape), "", [Part(Box.whole(order.shape), order)]
            )
        if rounds is not None and self._program.coordinate.data:
            trained = {f"model/{name}" for name, _ in self._trained()} if rounds.position else set()
            for key, held in self.tensors(optimizer=optimizer).items():
                if key in trained or key.startswith("optimizer "):
                    found[key] = held
        return {f"rank {rank} {key}": held for key, held in found.items()}

    def alone(self, keys: Iterable[str]) -> set[str]:
        """Those of some keys whose tensors the data ranks have shared out."""
        return {key for key in keys if self._is_shared_out(key)}

    def of_first(self) -> Collection[str]:
        """The tensors that data rank 0 writes, as others may have other values."""
        apart = self._updates.rounds or self._updates.serving
        return (self._interpreter.tensors if apart else self.untrained()).keys()

    def untrained(self) -> dict[str, torch.Tensor]:
        """What steps may change in another way on each data rank: buffers and frozen parameters."""
        return {
            name: tensor
            for name, tensor in self._interpreter.tensors.items()
            if not (isinstance(tensor, nn.Parameter) and tensor.requires_grad)
            and not self._updates.in_pieces(name)
        }

    def digests(self) -> dict[str, int]:
        """Numbers that tell data ranks which of these they hold differently."""
        tensors = self.untrained() if self._program.data > 1 else {}
        groups = [[tensor] for tensor in tensors.values()]
        device = self._interpreter.channels.device
        return dict(zip(tensors, digests_of(groups, device), strict=True))

    def differing(
        self, own: Mapping[str, int], others: Mapping[str, int], first: Mapping[str, int]
    ) -> dict[str, Held]:
        """What this rank holds differently than data rank 0, by the digests of both; `first` is the
        first pipeline coordinate that holds a tensor."""
        at = self._program.coordinate
        return {
            f"data {at.data}/{name}": Held(
                self._layout.shape(name, tensor), "", self._parts(name, tensor)
            )
            for name, tensor in self.untrained().items()
            if at.data
            and own[name] != others[name]
            and (at.tensor == 0 or self._layout.is_divided(name))
            and (first[name] == at.pipeline or name in self._program.rows)
        }

    def facts(self, *, optimizer: bool = True) -> dict[str, Any]:
        """What is no tensor, of this rank. Raises InputError for an optimizer that has what a
        checkpoint cannot hold."""
        at, scale = self._program.coordinate, self._updates.scale
        own = self._optimizer() if optimizer else None
        found: dict[str, Any] = {
            "step": self._interpreter.step,
            "samples": self._interpreter.samples,
            "calls": [self._calls[True], self._calls[False]],
            "mesh": [self._program.grid.pipeline, self._program.data, self._program.tensor],
            "seed": self._interpreter.seed,
            "scale": None if scale is None else [scale.value, scale.good, scale.skipped],
        }
        if self._updates.rounds is not None:
            found["round"] = [self._updates.rounds.position, self._program.updates.every]
        if own is not None and not at.tensor and (not at.data or self._program.sharing):
            names = {id(parameter): name for name, parameter in self._trained()}
            found["optimizer"] = {
                "kind": type(own).__name__,
                "groups": [
                    {
                        "names": [names[id(p)] for p in group["params"] if id(p) in names],
                        "options": {
                            key: _option(value, f"option {key!r} of the optimizer")
                            for key, value in group.items()
                            if key != "params"
                        },
                    }
                    for group in own.param_groups
                ],
                "values": {
                    name: {
                        key: _option(value, f"state {key!r} of {name!r}")
                        for key, value in states.items()
                        if not isinstance(value, torch.Tensor) or not value.dim()
                    }
                    for name, _, states in self._states()
                    if self._interpreter.parts is None
                    or name not in self._interpreter.parts.parameters
                    or self._interpreter.parts.is_first(name)
                },
            }
        return found

    def restored(self, checkpoint: Checkpoint, *, optimizer: bool) -> Restored:
        """What a checkpoint means for this rank; nothing is changed yet."""
        found = Restored()
        for name, tensor in self._interpreter.tensors.items():
            key = self._key(checkpoint, name)
            shape = self._layout.shape(name, tensor)
            if key is None:
                continue
            if checkpoint.entries[key].shape != shape:
                shapes = f"{shape} needed, {checkpoint.entries[key].shape} stored"
                found.faults.append(f"{name!r} has another shape ({shapes})")
                continue
            found.names.add(name)
            found.copies += [(key, part) for part in self._filled(name)]
            for key in (f"{kind}/{name}" for kind in KEPT if optimizer):
                if key in checkpoint.entries and self._updates.rounds is not None:
                    kept = torch.empty_like(self._updates.weights()[name])
                    found.kept.append((self._updates.rounds.restore, key, kept))
                    found.copies += [(key, part) for part in self._parts(name, kept)]
        powersgd, own = self._interpreter.powersgd, f"rank {self._program.rank} "
        for key, entry in checkpoint.entries.items() if self._is_apart(checkpoint) else ():
            kind = key.removeprefix(own).partition("/")[0]
            if powersgd is not None and optimizer and key.startswith(own) and kind in FACTORED:
                device = self._interpreter.channels.device
                target = torch.empty(entry.shape, dtype=entry.dtype, device=device)
                found.kept.append((powersgd.restore, key.removeprefix(own), target))
                found.copies.append((key, Part(Box.whole(entry.shape), target)))
        serving, key = self._updates.serving, f"{own}{ARRIVALS}/"
        if serving is not None and key in checkpoint.entries and self._is_apart(checkpoint):
            record = torch.empty(checkpoint.entries[key].shape, dtype=torch.int16)
            found.kept.append((serving.restore, key, record))
            found.copies.append((key, Part(Box.whole(record.shape), record)))
        saved = checkpoint.facts.get("optimizer")
        if optimizer and saved is not None:
            self._restore_optimizer(checkpoint, saved, found)
        scale = checkpoint.facts["scale"]
        if (scale is None) != (self._updates.scale is None) and optimizer and saved is not None:
            found.faults.append("only one of the checkpoint and this program scales its loss")
        return found

    @torch.no_grad()
    def apply(self, checkpoint: Checkpoint, restored: Restored, *, optimizer: bool) -> None:
        """Copy the tensors of a checkpoint into this rank's, and go on from its counters."""
        for key, part in restored.copies:
            checkpoint.read(key, part.box, part.tensor)
        self._updates.masters.write()
        self._apply_facts(checkpoint.facts)
        if self._interpreter.powersgd is not None:
            self._interpreter.powersgd.clear()
        for restore, key, tensor in restored.kept:
            restore(key, tensor)
        if not optimizer or checkpoint.facts.get("optimizer") is None:
            return
        own = self._optimizer()
        assert own is not None
        own.state.clear()
        served = self._updates.serving is not None and self._program.coordinate.data > 0
        for parameter, states in () if served else restored.states:
            own.state[parameter] = states
        for group, options in restored.options:
            _set_options(group, options)

    def published(
        self, source: Pretrained, mapping: Mapping[str, Place]
    ) -> tuple[dict[str, list[tuple[str, Part]]], list[str]]:
        """What this rank copies out of published weights, by the name of its tensor, and what does
        not fit; `mapping` says where those stand in the model."""
        copies: dict[str, list[tuple[str, Part]]] = {}
        faults = []
        for given, stored in grouped(mapping).items():
            name = self._program.aliases.get(given, given)
            if name not in self._interpreter.tensors or name in copies:
                continue
            shape = self._layout.shape(name, self._interpreter.tensors[name])
            try:
                pieces = boxes(source, mapping, stored, shape)
            except InputError as error:
                faults.append(str(error))
                continue
            copies[name] = [
                (key, Part(common.within(box), common.within(part.box).of(part.tensor)))
                for part in self._filled(name)
                for key, box in pieces
                for common in [part.box.overlap(box)]
                if common.count
            ]
        return copies, faults

    @torch.no_grad()
    def copy(self, source: Pretrained, copies: Iterable[Sequence[tuple[str, Part]]]) -> None:
        """Copy published weights into this rank's tensors."""
        for name, part in (copy for group in copies for copy in group):
            source.read(name, part.box, part.tensor)
        self._updates.masters.write()

    def _apply_facts(self, facts: Mapping[str, Any]) -> None:
        """The counters, the seed and the scale of the loss."""
        program, interpreter = self._program, self._interpreter
        interpreter.step, interpreter.samples = facts["step"], facts["samples"]
        self._calls[True], self._calls[False] = facts["calls"]
        same = facts["mesh"] == [program.grid.pipeline, program.data, program.tensor]
        interpreter.seed = facts["seeds"][program.rank if same else 0]
        rounds, saved = self._updates.rounds, facts.get("round", [0, 0])
        if rounds is not None:
            same = same and saved[1] == program.updates.every
            rounds.position = saved[0] if same else 0
        if saved[0] and (rounds is None or not same) and not program.rank:
            text = (
                f"the checkpoint is of step {saved[0]} of {saved[1]} between averages, for other "
                "ranks or rounds: what data ranks beside the first have learned since is left out"
            )
            warnings.warn(text, stacklevel=2)
        scale = self._updates.scale
        if scale is not None and facts["scale"] is not None:
            scale.value, scale.good, scale.skipped = facts["scale"]

    def _restore_optimizer(
        self, checkpoint: Checkpoint, saved: Mapping[str, Any], found: Restored
    ) -> None:
        """What the optimizer gets, by the names of its parameters."""
        own = self._optimizer()
        if own is None:
            found.faults.append(
                f"the checkpoint has the states of an optimizer ({saved['kind']}): call "
                "worker.set_optimizer first, or load with optimizer=False"
            )
            return
        if type(own).__name__ != saved["kind"]:
            found.faults.append(
                f"the checkpoint has the states of {saved['kind']}, this worker has "
                f"{type(own).__name__}: set that optimizer, or load with optimizer=False"
            )
            return
        by_name: dict[str, list[tuple[str, str]]] = {}
        for key in checkpoint.entries:
            head, _, name = key.partition("/")
            if head.startswith("optimizer "):
                by_name.setdefault(name, []).append((head.removeprefix("optimizer "), key))
        for name, parameter in self._trained():
            states = {
                key: _value(value, parameter)
                for key, value in saved["values"].get(name, {}).items()
            }
            for head, key in by_name.get(name, ()):
                self._restore_state(checkpoint, name, parameter, head, key, states, found)
            if states:
                found.states.append((parameter, states))
        self._restore_options(own, saved["groups"], found)

    def _restore_state(
        self,
        checkpoint: Checkpoint,
        name: str,
        parameter: nn.Parameter,
        head: str,
        key: str,
        states: dict[str, Any],
        found: Restored,
    ) -> None:
        """One state of a parameter."""
        entry = checkpoint.entries[key]
        if entry.note == LIKE:
            target = torch.zeros_like(parameter, dtype=entry.dtype)
            if self._layout.shape(name, self._interpreter.tensors[name]) != entry.shape:
                return  # the parameter itself says so
            parts = self._parts(name, target)
        else:
            place = self._place(name, parameter)
            head, divided, where = head.partition("[")
            if divided + where != place:
                if not divided or not place:
                    found.faults.append(
                        f"the state {head!r} of {name!r} belongs to another division of it: load "
                        "it where that is divided as it was"
                    )
                return
            target = torch.empty(entry.shape, dtype=entry.dtype, device=parameter.device)
            parts = [Part(Box.whole(entry.shape), target)]
        states[head] = target
        own = f"rank {self._program.rank} {key}"
        if self._is_apart(checkpoint) and own in checkpoint.entries:
            key = own
        found.copies += [(key, part) for part in parts]

    def _restore_options(
        self, own: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], found: Restored
    ) -> None:
        """The options of each group: those of the group that has its parameters."""
        names = {id(parameter): name for name, parameter in self._trained()}
        saved = {name: group["options"] for group in groups for name in group["names"]}
        for number, group in enumerate(own.param_groups):
            own_names = [names[id(p)] for p in group["params"] if id(p) in names]
            options = [saved[name] for name in own_names if name in saved]
            if not options and number < len(groups):
                options = [groups[number]["options"]]
            if any(item != options[0] for item in options):
                found.faults.append(
                    f"group {number} of the optimizer has parameters of several groups"
                )
            elif options:
                found.options.append((group, options[0]))

    def _key(self, checkpoint: Checkpoint, name: str) -> str | None:
        """Under which key a checkpoint has a tensor."""
        keys = [f"model/{name}", f"unsaved/{name}"]
        if self._is_apart(checkpoint):
            keys.insert(0, f"rank {self._program.rank} model/{name}")
        if checkpoint.facts["mesh"][1] == self._program.data:
            keys.insert(0, f"data {self._program.coordinate.data}/{name}")
        return next((key for key in keys if key in checkpoint.entries), None)

    def _is_apart(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint has what this rank had of its own."""
        grid, updates = self._program.grid, self._program.updates
        apart = updates.separate or updates.compression == "powersgd"
        return apart and checkpoint.facts["mesh"] == [grid.pipeline, grid.data, grid.tensor]

    def _kept(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Name, kind and value of what rounds keep."""
        rounds = self._updates.rounds
        for name, _ in self._trained() if rounds is not None else ():
            for kind in KEPT:
                value = rounds.kept(kind, name)  # type: ignore[union-attr]
                if value is not None:
                    yield name, kind, value

    def _place(self, name: str, parameter: torch.Tensor) -> str:
        """Which boxes of a divided parameter this rank has, for states of other shapes."""
        shape = self._layout.shape(name, self._interpreter.tensors[name])
        boxes = [part.box for part in self._parts(name, parameter)]
        return "" if boxes == [Box.whole(shape)] else f"[{';'.join(map(str, boxes))}]"

    def _parts(self, name: str, held: torch.Tensor | None) -> list[Part]:
        """The boxes of a tensor of the model that this rank holds in `held`, which has the shape of
        its tensor, or of the rows of it that this data rank updates."""
        if held is None:
            return []
        own, rows = self._interpreter.tensors[name], None
        if self._interpreter.parts is not None and name in self._interpreter.parts.parameters:
            span = self._interpreter.parts.span(name)
            whole = not own.dim() or span.size == own.shape[0]
            rows = None if held is own or whole else span
        return self._layout.parts(name, own, held, rows)

    def _filled(self, name: str) -> list[Part]:
        """Where the values of a tensor of the model go on this rank; `masters.write` does the rest.
        A master in rows gives values to these alone, so that the others are read as well."""
        tensor, master = self._interpreter.tensors[name], self._master(name)
        shared = self._interpreter.parts is not None and name in self._interpreter.parts.parameters
        shared = shared and not self._updates.in_pieces(name)
        targets = [tensor] if master is tensor else [tensor, master] if shared else [master]
        return [part for target in targets for part in self._parts(name, target)]

    def _master(self, name: str) -> torch.Tensor | None:
        """What a checkpoint holds of a tensor: its master, or this data rank's rows of that or of
        itself (None where it has none), or itself."""
        tensor, parts = self._interpreter.tensors[name], self._interpreter.parts
        if parts is not None and self._is_shared_out(f"model/{name}"):
            return self._updates.masters.by_name.get(name, parts.parts.get(name))
        return self._updates.masters.by_name.get(name, tensor)

    def _is_shared_out(self, key: str) -> bool:
        """Whether the data ranks have each their own of a tensor."""
        head, _, name = key.partition("/")
        parts = self._interpreter.parts
        if parts is None or name not in parts.parameters:
            return False
        narrow = self._interpreter.tensors[name].dtype == self._program.narrow
        return head.startswith("optimizer ") or narrow or name in parts.in_pieces

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer changes, by the names of the model."""
        masters = self._updates.masters.by_name
        return [
            (name, masters.get(name, parameter))
            for name, parameter in self._updates.updated.items()
            if parameter.requires_grad
        ]

    def _states(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
        """Name, parameter and state of what the optimizer has stepped."""
        optimizer = self._optimizer()
        for name, parameter in self._trained() if optimizer is not None else ():
            if parameter in optimizer.state:  # type: ignore[union-attr]
                yield name, parameter, optimizer.state[parameter]  # type: ignore[union-attr]

    def _optimizer(self) -> torch.optim.Optimizer | None:
        try:
            return self._updates.optimizer
        except InputError:
            return None


def merged(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What checkpoint.json says, of what all ranks say."""
    found = {key: value for key, value in facts[0].items() if key != "seed"}
    found["seeds"] = [item["seed"] for item in facts]
    optimizers = [item["optimizer"] for item in facts if "optimizer" in item]
    if optimizers:
        groups: list[dict[str, Any]] = []
        for group in (group for item in optimizers for group in item["groups"]):
            same = [one for one in groups if one["options"] == group["options"]]
            if same:
                same[0]["names"] += [n for n in group["names"] if n not in same[0]["names"]]
            else:
                groups.append(dict(group))
        values = {n: v for item in reversed(optimizers) for n, v in item["values"].items()}
        found["optimizer"] = {"kind": optimizers[0]["kind"], "groups": groups, "values": values}
    extras = [item["extra"] for item in facts if "extra" in item]
    found["extra"] = {
        name: states[:1] if all(state == states[0] for state in states) else states
        for name in extras[0]
        for states in [[item[name] for item in extras]]
    }
    return found


def extra_state(extra: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The states of the objects that a user hands over. Raises InputError for what has none, or one
    that a checkpoint cannot hold."""
    found = {}
    for name, item in extra.items():
        if not callable(getattr(item, "state_dict", None)):
            message = f"extra {name!r} has no state_dict() ({type(item).__name__})"
            raise InputError(message)
        found[name] = encoded(item.state_dict(), tensors, f"the state of extra {name!r}")
    return found


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


def names_of(checkpoint: Checkpoint) -> Collection[str]:
    """The names of the model's state dict that a checkpoint has."""
    return [key.partition("/")[2] for key in checkpoint.entries if key.startswith("model/")]


def _option(value: object, place: str) -> Any:
    """A number of an optimizer; a tensor without dimensions keeps dtype and device."""
    if isinstance(value, torch.Tensor) and not value.dim() and not value.is_complex():
        dtype = str(value.dtype).removeprefix("torch.")
        return {"scalar": value.item(), "dtype": dtype, "cpu": value.device.type == "cpu"}
    return encoded(value, {}, place) if not isinstance(value, torch.Tensor) else _refused(place)


def _refused(place: str) -> Any:
    message = f"{place} is a tensor with dimensions, which a checkpoint cannot hold"
    raise InputError(message)


def _value(value: Any, parameter: torch.Tensor) -> Any:
    """The number that was stored, beside a parameter."""
    match value:
        case {"scalar": number, "dtype": str(dtype), "cpu": bool(cpu)}:
            device = torch.device("cpu") if cpu else parameter.device
            return torch.tensor(number, dtype=dtype_of(dtype), device=device)
    return decoded(value, lambda name: _refused(name))


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Give a group its options; a tensor stays the one that it is."""
    for key, option in options.items():
        before = group.get(key)
        value = _value(option, torch.empty(0))
        if isinstance(before, torch.Tensor):
            before.fill_(value)
        else:
            group[key] = value
