"""The state of a run on one rank: collected for a checkpoint, and restored from one.

    model/NAME             parameters (of 16-bit programs their float32 masters) and buffers
    unsaved/NAME           buffers that are not persistent, which a state dict does not have
    rank 1 model/NAME      this rank's own value, where data ranks step by themselves
    rank 1 error/NAME      the error feedback of PowerSGD, and its factor
    outer momentum/NAME    outer momentum of rounds of such steps, and the anchor they begin from
    data 1/NAME            tensors that differ between data ranks (statistics of a batch norm)
    optimizer KEY/NAME     a state of the optimizer with the shape of its parameter, or its own

Numbers of the optimizer (the step of each parameter) and its options are in checkpoint.json, by the
name of the parameter. Gradients, and weight versions of pipedream, do not outlive a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from parcompiler.errors import InputError
from parcompiler.runtime.agreement import digest_of
from parcompiler.runtime.boxes import Box
from parcompiler.runtime.checkpoint.facts import option, set_options, value_of
from parcompiler.runtime.checkpoint.folder import Checkpoint
from parcompiler.runtime.checkpoint.layout import Part, RankLayout
from parcompiler.runtime.checkpoint.pretrained import Place, Pretrained, boxes, grouped
from parcompiler.runtime.interpreter import Interpreter
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.updates import Updates
from parcompiler.runtime.zero import DataParts

FACTORED = ("error", "factor")  # of PowerSGD
ARRIVALS = "arrivals"  # of an asynchronous program
KEPT = ("outer anchor", "outer momentum")  # of rounds
COUNTERS = ("step", "mu_product", "eta", "mu")  # states of torch.optim that are one number each
LIKE = "like its parameter"  # the note of a state that is divided as its parameter is


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint: the shape of the whole, a note, and the parts on this rank."""

    shape: tuple[int, ...]
    note: str
    parts: list[Part]

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> StoredTensor:
        """A tensor that this rank has whole."""
        return cls(tuple(tensor.shape), "", [Part(Box.whole(tensor.shape), tensor)])


@dataclass
class Restored:
    """What a rank does to load a checkpoint: `faults` that forbid it, parts to fill with `copies`
    of stored tensors, functions that `restore` some of these, and the states and options of the
    optimizer."""

    faults: list[str] = field(default_factory=list)
    copies: list[tuple[str, Part]] = field(default_factory=list)
    restore: list[tuple[Callable[[str, torch.Tensor], None], str, torch.Tensor]] = field(
        default_factory=list
    )
    names: set[str] = field(default_factory=set)
    states: list[tuple[nn.Parameter, dict[str, Any]]] = field(default_factory=list)
    options: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    own: dict[Any, Any] = field(default_factory=dict)

    def copy(self, key: str, parts: Iterable[Part]) -> None:
        """Fill these parts from the stored tensor `key`."""
        self.copies += [(key, part) for part in parts]


class RankState:
    """The state of one rank. `calls` counts its steps (True) and evaluations (False)."""

    def __init__(
        self,
        program: RankProgram,
        interpreter: Interpreter,
        updates: Updates,
        calls: dict[bool, int],
    ) -> None:
        self.program, self.layout = program, RankLayout(program)
        self.interpreter, self.updates = interpreter, updates
        self._calls = calls

    def names(self) -> dict[str, list[str]]:
        """All names of each tensor, on the first rank of its pipeline coordinate; empty on the
        others."""
        at = self.program.coordinate
        names = {name: [name] for name in self.interpreter.tensors if not (at.data or at.tensor)}
        for alias, name in self.program.aliases.items():
            if name in names:
                names[name].append(alias)
        return names

    def tensors(self, *, optimizer: bool = True) -> dict[str, StoredTensor]:
        """Everything that this rank holds a part of, by its key."""
        stored: dict[str, StoredTensor] = {}
        for name in self.interpreter.tensors:
            kind = "unsaved" if name in self.program.unsaved else "model"
            if parts := self._parts(name, self._master(name)):
                stored[f"{kind}/{name}"] = StoredTensor(self._shape(name), "", parts)
        for name, parameter, states in self._states() if optimizer else ():
            for key, value in states.items():
                if self._is_number(name, key, value):
                    continue
                if value.shape == parameter.shape:
                    parts = self._parts(name, value)
                    stored[f"optimizer {key}/{name}"] = StoredTensor(self._shape(name), LIKE, parts)
                else:
                    place = self._place(name, parameter)
                    stored[f"optimizer {key}{place}/{name}"] = StoredTensor.whole(value)
        for name, kind, value in self._kept() if optimizer else ():
            parts = self._parts(name, value)
            stored[f"{kind}/{name}"] = StoredTensor(self._shape(name), LIKE, parts)
        return stored

    def gradients(self) -> dict[str, StoredTensor]:
        """The gradients that this rank holds a part of, by the keys of their tensors."""
        gradients = self.updates.gradients().items()
        return {
            f"gradient/{n}": StoredTensor(self._shape(n), LIKE, self._parts(n, g))
            for n, g in gradients
        }

    def apart(self, *, optimizer: bool = True) -> dict[str, StoredTensor]:
        """This rank's own state, where data ranks step by themselves: the states of its optimizer,
        and within a round its weights; also the state of PowerSGD, and the record of arrivals."""
        rounds, stored = self.updates.rounds, dict[str, StoredTensor]()
        if optimizer and self.interpreter.powersgd is not None:
            states = self.interpreter.powersgd.states()
            stored |= {key: StoredTensor.whole(tensor) for key, tensor in states}
        if optimizer and self.updates.serving is not None and self.updates.serving.record:
            record = torch.tensor(self.updates.serving.record, dtype=torch.int16)
            stored[f"{ARRIVALS}/"] = StoredTensor.whole(record)
        if rounds is not None and self.program.coordinate.data:
            weights = self.updates.weights() if rounds.position else ()
            trained = {f"model/{name}" for name in weights}
            for key, tensor in self.tensors(optimizer=optimizer).items():
                if key in trained or key.startswith("optimizer "):
                    stored[key] = tensor
        return {f"rank {self.program.rank} {key}": tensor for key, tensor in stored.items()}

    def of_first(self) -> Collection[str]:
        """The tensors that data rank 0 writes, as others may have other values."""
        apart = self.updates.rounds or self.updates.serving
        return (self.interpreter.tensors if apart else self.untrained()).keys()

    def untrained(self) -> dict[str, torch.Tensor]:
        """Tensors that may come to differ between data ranks: buffers and frozen parameters."""
        return {
            name: tensor
            for name, tensor in self.interpreter.tensors.items()
            if not (isinstance(tensor, nn.Parameter) and tensor.requires_grad)
            and not self.updates.in_pieces(name)
        }

    def digests(self) -> dict[str, int]:
        """Digests of the untrained tensors, by which data ranks find those that differ."""
        tensors = self.untrained() if self.program.data > 1 else {}
        return {name: digest_of([tensor]) for name, tensor in tensors.items()}

    def differing(
        self, current: Mapping[str, int], stored: Mapping[str, int], first: Mapping[str, int]
    ) -> dict[str, StoredTensor]:
        """The untrained tensors that differ from those of data rank 0, by the digests of both;
        `first` is the first pipeline coordinate that holds a tensor."""
        at = self.program.coordinate
        return {
            f"data {at.data}/{name}": StoredTensor(self._shape(name), "", self._parts(name, tensor))
            for name, tensor in self.untrained().items()
            if at.data
            and current[name] != stored[name]
            and (at.tensor == 0 or self.layout.is_divided(name))
            and (first[name] == at.pipeline or name in self.program.rows)
        }

    def facts(self, *, optimizer: bool = True) -> dict[str, Any]:
        """This rank's state apart from tensors. Raises InputError where a checkpoint cannot hold
        that of the optimizer."""
        at, scale = self.program.coordinate, self.updates.scale
        facts: dict[str, Any] = {
            "step": self.interpreter.step,
            "samples": self.interpreter.samples,
            "calls": [self._calls[True], self._calls[False]],
            "mesh": [self.program.grid.pipeline, self.program.data, self.program.tensor],
            "context": self.program.context,  # number of data ranks that share a batch
            "seed": self.interpreter.seed,
            "scale": None if scale is None else [scale.value, scale.good, scale.skipped],
        }
        if self.updates.rounds is not None:
            facts["round"] = [self.updates.rounds.position, self.program.updates.every]
        current = self._optimizer() if optimizer else None
        if current is not None and not at.tensor and (not at.data or self.program.sharing):
            facts["optimizer"] = {
                "kind": type(current).__name__,
                "groups": [
                    {
                        "names": names,
                        "options": {
                            key: option(value, f"option {key!r} of the optimizer")
                            for key, value in group.items()
                            if key != "params"
                        },
                    }
                    for group, names in zip(current.param_groups, self.members(), strict=True)
                ],
                "values": {
                    name: {
                        key: option(value, f"state {key!r} of {name!r}")
                        for key, value in states.items()
                        if self._is_number(name, key, value)
                    }
                    for name, _, states in self._states()
                    if (parts := self._data_parts(name)) is None or parts.is_first(name)
                },
                "own": [
                    [option(key, "a key of the state"), option(value, f"state {key!r}")]
                    for key, value in current.state.items()
                    if not isinstance(key, torch.Tensor)
                ],
            }
        return facts

    def members(self) -> list[list[str]]:
        """The names of the parameters in each group of the optimizer, as far as this rank has
        them."""
        names = {id(parameter): name for name, parameter in self.updates.weights().items()}
        groups = () if (current := self._optimizer()) is None else current.param_groups
        return [[names[id(p)] for p in group["params"] if id(p) in names] for group in groups]

    def restored(
        self, checkpoint: Checkpoint, members: Sequence[Sequence[str]], *, optimizer: bool
    ) -> Restored:
        """How to load a checkpoint into this rank; nothing is changed yet. `members` are those of
        each group on all ranks. Raises InputError where its files lack what it lists."""
        restored, rounds = Restored(), self.updates.rounds
        for name in self.interpreter.tensors:
            key, shape = self._key(checkpoint, name), self._shape(name)
            if key is None:
                continue
            if checkpoint.entries[key].shape != shape:
                shapes = f"{shape} needed, {checkpoint.entries[key].shape} stored"
                restored.faults.append(f"{name!r} has another shape ({shapes})")
                continue
            restored.names.add(name)
            restored.copy(key, self._filled(name))
            for key in (f"{kind}/{name}" for kind in KEPT if optimizer):
                if key in checkpoint.entries and rounds is not None:
                    kept = torch.empty_like(self.updates.weights()[name])
                    restored.restore.append((rounds.restore, key, kept))
                    restored.copy(key, self._parts(name, kept))
        self._restore_apart(checkpoint, restored, optimizer=optimizer)
        saved = checkpoint.facts.get("optimizer")
        if optimizer and saved is not None:
            self._restore_optimizer(checkpoint, saved, members, restored)
        for key, part in restored.copies:
            checkpoint.pieces(key, part.box)  # before anything is copied
        return restored

    def _restore_apart(
        self, checkpoint: Checkpoint, restored: Restored, *, optimizer: bool
    ) -> None:
        """Add the states of PowerSGD and of this rank's server."""
        powersgd, serving = self.interpreter.powersgd, self.updates.serving
        prefix = f"rank {self.program.rank} "
        restore: Callable[[str, torch.Tensor], None]
        for key, entry in checkpoint.entries.items() if self._is_apart(checkpoint) else ():
            name = key.removeprefix(prefix)
            kind = name.partition("/")[0]
            if powersgd is not None and optimizer and name != key and kind in FACTORED:
                restore, device = powersgd.restore, self.interpreter.channels.device
            elif serving is not None and name == f"{ARRIVALS}/" and name != key:
                restore, device = serving.restore, torch.device("cpu")
            else:
                continue
            target = torch.empty(entry.shape, dtype=entry.dtype, device=device)
            restored.restore.append((restore, name, target))
            restored.copy(key, StoredTensor.whole(target).parts)

    @torch.no_grad()
    def apply(self, checkpoint: Checkpoint, restored: Restored, *, optimizer: bool) -> None:
        """Copy the tensors of a checkpoint into this rank's, and set counters and options."""
        self.copy(checkpoint, restored.copies)
        self._apply_facts(checkpoint.facts)
        if self.interpreter.powersgd is not None:
            self.interpreter.powersgd.clear()
        for restore, key, tensor in restored.restore:
            restore(key, tensor)
        if not optimizer or checkpoint.facts.get("optimizer") is None:
            return
        current = self._optimizer()
        assert current is not None
        unnamed = {k: v for k, v in current.state.items() if not isinstance(k, torch.Tensor)}
        current.state.clear()
        current.state.update(unnamed | restored.own)
        served = self.updates.serving is not None and self.program.coordinate.data > 0
        for parameter, states in () if served else restored.states:
            current.state[parameter] = states
        for group, options in restored.options:
            set_options(group, options)

    def published(
        self, source: Pretrained, mapping: Mapping[str, Place]
    ) -> tuple[dict[str, list[tuple[str, Part]]], list[str]]:
        """The parts that this rank copies out of published weights, by the name of its tensor, and
        faults; `mapping` places the published tensors in the model."""
        copies: dict[str, list[tuple[str, Part]]] = {}
        aliases: dict[str, str] = {}
        faults = []
        for alias, stored in grouped(mapping).items():
            name = self.program.aliases.get(alias, alias)
            if name not in self.interpreter.tensors:
                continue
            try:
                pieces = boxes(source, mapping, stored, self._shape(name))
            except InputError as error:
                faults.append(str(error))
                continue
            sources = [
                (key, Part(common.within(box), common.within(part.box).of(part.tensor)))
                for part in self._filled(name)
                for key, box in pieces
                for common in [part.box.overlap(box)]
                if common.count
            ]
            if name not in copies:
                copies[name], aliases[name] = sources, alias
            elif not _same(source, copies[name], sources):
                faults.append(
                    f"{aliases[name]!r} and {alias!r} are one tensor of the model, and differ in "
                    "the files: leave one of them out, or untie the model"
                )
        return copies, faults

    def place(self, name: str, tensor: torch.Tensor) -> Box:
        """Which part of a tensor of the model `tensor` is: all of it, or the one box of it that
        this rank has. Raises InputError for another shape, and for tensors without values."""
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            kind = "has no values (meta)" if isinstance(tensor, torch.Tensor) else "is no tensor"
            message = f"{name!r} {kind}: give a tensor of the CPU or a device"
            raise InputError(message)
        boxes = self.layout.boxes(name, self.interpreter.tensors[name])
        for box in (Box.whole(self._shape(name)), *([boxes[0][0]] if len(boxes) == 1 else [])):
            if box.sizes == tensor.shape or not boxes:  # of rows it may have none
                return box
        shapes = f"{self._shape(name)} needed, {tuple(tensor.shape)} given"
        message = f"{name!r} has another shape ({shapes}): weights of another model?"
        raise InputError(message)

    @torch.no_grad()
    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor of the model, or the box of it that this rank has, into this rank's."""
        box = self.place(name, tensor)
        for part in self._filled(name):
            part.tensor.copy_(part.box.within(box).of(tensor))

    @torch.no_grad()
    def copy(self, source: Checkpoint | Pretrained, copies: Iterable[tuple[str, Part]]) -> None:
        """Copy stored tensors into this rank's."""
        for key, part in copies:
            source.read(key, part.box, part.tensor)
        self.updates.masters.write()

    def _apply_facts(self, facts: Mapping[str, Any]) -> None:
        """Set the counters, the seed and the scale of the loss."""
        program, interpreter = self.program, self.interpreter
        interpreter.step, interpreter.samples = facts["step"], facts["samples"]
        self._calls[True], self._calls[False] = facts["calls"]
        same = facts["mesh"] == [program.grid.pipeline, program.data, program.tensor]
        interpreter.seed = facts["seeds"][program.rank if same else 0]
        rounds, saved = self.updates.rounds, facts.get("round", [0, 0])
        if rounds is not None:
            same = same and saved[1] == program.updates.every
            rounds.position = saved[0] if same else 0
        if saved[0] and (rounds is None or not same) and not program.rank:
            text = (
                f"the checkpoint was saved {saved[0]} steps after an average of weights (one every "
                f"{saved[1]}), with other ranks or another number of steps between averages: what "
                "data ranks other than the first have learned since then is left out"
            )
            warnings.warn(text, stacklevel=2)
        scale = self.updates.scale
        if scale is not None and facts["scale"] is not None:
            scale.value, scale.good, scale.skipped = facts["scale"]

    def _restore_optimizer(
        self,
        checkpoint: Checkpoint,
        saved: Mapping[str, Any],
        members: Sequence[Sequence[str]],
        restored: Restored,
    ) -> None:
        """Add the states and options of the optimizer, by the names of its parameters."""
        current = self._optimizer()
        if current is None:
            restored.faults.append(
                f"the checkpoint has the states of an optimizer ({saved['kind']}): call "
                "worker.set_optimizer first, or load with optimizer=False"
            )
            return
        if type(current).__name__ != saved["kind"]:
            restored.faults.append(
                f"the checkpoint has the states of {saved['kind']}, this worker has "
                f"{type(current).__name__}: set that optimizer, or load with optimizer=False"
            )
            return
        by_name: dict[str, list[tuple[str, str]]] = {}
        for key in checkpoint.entries:
            head, _, name = key.partition("/")
            if head.startswith("optimizer "):
                by_name.setdefault(name, []).append((head.removeprefix("optimizer "), key))
        for name, parameter in self.updates.weights().items():
            states = {
                key: value_of(value, parameter)
                for key, value in saved["values"].get(name, {}).items()
            }
            for head, key in by_name.get(name, ()):
                self._restore_state(checkpoint, name, parameter, head, key, states, restored)
            if states:
                restored.states.append((parameter, states))
        restored.own = {
            value_of(key, torch.empty(0)): value_of(value, torch.empty(0))
            for key, value in saved.get("own", ())
        }
        self._restore_options(current, saved["groups"], members, restored)

    def _restore_state(
        self,
        checkpoint: Checkpoint,
        name: str,
        parameter: nn.Parameter,
        head: str,
        key: str,
        states: dict[str, Any],
        restored: Restored,
    ) -> None:
        """Add one state of a parameter: in the parameter's dtype if both had one dtype when
        saved."""
        entry, weight = checkpoint.entries[key], checkpoint.entries.get(f"model/{name}")
        dtype = parameter.dtype if weight and weight.dtype == entry.dtype else entry.dtype
        if entry.note == LIKE:
            target = torch.zeros_like(parameter, dtype=dtype)
            if self._shape(name) != entry.shape:
                return  # the parameter's own fault reports it
            parts = self._parts(name, target)
        else:
            place = self._place(name, parameter)
            head, divided, where = head.partition("[")
            if divided + where != place:
                if not divided or not place:
                    restored.faults.append(
                        f"the state {head!r} of {name!r} was saved with that tensor divided in "
                        "another way: load it where it is divided as it was"
                    )
                return
            target = torch.empty(entry.shape, dtype=dtype, device=parameter.device)
            parts = StoredTensor.whole(target).parts
        states[head] = target
        apart = f"rank {self.program.rank} {key}"
        is_apart = self._is_apart(checkpoint) and apart in checkpoint.entries
        restored.copy(apart if is_apart else key, parts)

    def _restore_options(
        self,
        current: torch.optim.Optimizer,
        groups: Sequence[Mapping[str, Any]],
        members: Sequence[Sequence[str]],
        restored: Restored,
    ) -> None:
        """Add the options of each group: those of the stored group that has its parameters, at
        whatever place. A group of new parameters keeps its own; an empty one takes those of an
        empty one at its place."""
        saved = {name: group["options"] for group in groups for name in group["names"]}
        for number, (group, names) in enumerate(zip(current.param_groups, members, strict=False)):
            options = [saved[name] for name in names if name in saved]
            if not names and number < len(groups) and not groups[number]["names"]:
                options = [groups[number]["options"]]
            if any(item != options[0] for item in options):
                restored.faults.append(
                    f"group {number} of the optimizer has parameters of several groups"
                )
            elif options:
                restored.options.append((group, options[0]))

    def _key(self, checkpoint: Checkpoint, name: str) -> str | None:
        """The key of a tensor in a checkpoint; None if it is not there."""
        keys = [f"model/{name}", f"unsaved/{name}"]
        if self._is_apart(checkpoint):
            keys.insert(0, f"rank {self.program.rank} model/{name}")
        if checkpoint.facts["mesh"][1] == self.program.data:
            keys.insert(0, f"data {self.program.coordinate.data}/{name}")
        return next((key for key in keys if key in checkpoint.entries), None)

    def _is_apart(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint has this rank's own state (`apart`): only one of an equal mesh."""
        grid, updates = self.program.grid, self.program.updates
        apart = updates.separate or updates.compression == "powersgd"
        return apart and checkpoint.facts["mesh"] == [grid.pipeline, grid.data, grid.tensor]

    def _kept(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Name, kind and value of the tensors that rounds keep."""
        rounds = self.updates.rounds
        if rounds is not None:
            for name, kind in product(self.updates.weights(), KEPT):
                if (value := rounds.kept(kind, name)) is not None:
                    yield name, kind, value

    def _is_number(self, name: str, key: str, value: object) -> bool:
        """Whether a state of a parameter is stored as a number. Those of a scalar are stored like
        it (ZeRO has it in rows), unless they are `COUNTERS`."""
        if not isinstance(value, torch.Tensor) or value.dim():
            return not isinstance(value, torch.Tensor)
        return bool(self._shape(name)) or key in COUNTERS

    def _place(self, name: str, parameter: torch.Tensor) -> str:
        """Which boxes of a divided parameter this rank has, for states of other shapes."""
        boxes = [part.box for part in self._parts(name, parameter)]
        return "" if boxes == [Box.whole(self._shape(name))] else f"[{';'.join(map(str, boxes))}]"

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of the model, of which this rank may have a piece."""
        return self.layout.shape(name, self.interpreter.tensors[name])

    def _data_parts(self, name: str) -> DataParts | None:
        """The parts of the data ranks, if they share a tensor out."""
        parts = self.interpreter.parts
        return parts if parts is not None and name in parts.parameters else None

    def _parts(self, name: str, memory: torch.Tensor | None) -> list[Part]:
        """The boxes of a tensor of the model that this rank has in `memory`, which has the shape of
        its tensor, or of the rows of it that this data rank updates."""
        if memory is None:
            return []
        tensor, rows = self.interpreter.tensors[name], None
        if (parts := self._data_parts(name)) is not None and memory is not tensor:
            span = parts.span(name)
            rows = span if tensor.dim() and span.size != tensor.shape[0] else None
        return self.layout.parts(name, tensor, memory, rows)

    def _filled(self, name: str) -> list[Part]:
        """The parts that a tensor of the model fills on this rank; `masters.write` does the rest. A
        master in rows updates only these rows, so the whole tensor is filled as well."""
        tensor, master = self.interpreter.tensors[name], self._master(name)
        shared = self._data_parts(name) is not None and not self.updates.in_pieces(name)
        targets = [tensor] if master is tensor else [tensor, master] if shared else [master]
        return [part for target in targets for part in self._parts(name, target)]

    def _master(self, name: str) -> torch.Tensor | None:
        """The memory that a checkpoint stores for a tensor: its master or itself, or this data
        rank's rows of either (None where it has none)."""
        tensor, parts = self.interpreter.tensors[name], self._data_parts(name)
        if parts is not None and self.is_shared_out(f"model/{name}"):
            return self.updates.masters.by_name.get(name, parts.parts.get(name))
        return self.updates.masters.by_name.get(name, tensor)

    def is_shared_out(self, key: str) -> bool:
        """Whether each data rank has a part of a stored tensor, which no other has."""
        head, _, name = key.partition("/")
        parts = self._data_parts(name)
        if parts is None:
            return False
        narrow = self.interpreter.tensors[name].dtype == self.program.narrow
        updated = head == "gradient" or head.startswith("optimizer ")
        return updated or narrow or name in parts.in_pieces

    def _states(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
        """Name, parameter and state of the parameters that the optimizer has stepped."""
        if (optimizer := self._optimizer()) is not None:
            for name, weight in self.updates.weights().items():
                if weight in optimizer.state:
                    yield name, weight, optimizer.state[weight]

    def _optimizer(self) -> torch.optim.Optimizer | None:
        try:
            return self.updates.optimizer
        except InputError:
            return None


def _same(
    source: Pretrained, one: Sequence[tuple[str, Part]], other: Sequence[tuple[str, Part]]
) -> bool:
    """Whether two lists of copies fill the same tensors with equal values."""

    def values(copies: Sequence[tuple[str, Part]]) -> Iterator[torch.Tensor]:
        for key, part in copies:
            value = torch.empty_like(part.tensor, device="cpu")
            source.read(key, part.box, value)
            yield value.flatten()

    return not one or torch.equal(torch.cat([*values(one)]), torch.cat([*values(other)]))
