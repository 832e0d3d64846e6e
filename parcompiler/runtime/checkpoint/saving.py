"""The checkpoints of one worker: saved and loaded by all ranks together.

    save       agree ─► write own files ─► agree ─► rank 0 completes the folder ─► agree
    beside     agree ─► copy ─► thread: write, tell the store ─► rank 0 completes the folder
    load       agree on a folder ─► check files, each a share ─► agree ─► copy ─► agree

To agree is a collective in which every rank reports a result or a fault: after a fault of one rank
all raise the same InputError, and may go on.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from parcompiler.errors import InputError, path_of
from parcompiler.runtime.agreement import combined
from parcompiler.runtime.boxes import Box
from parcompiler.runtime.checkpoint import folder as folders
from parcompiler.runtime.checkpoint import pretrained as published
from parcompiler.runtime.checkpoint.facts import extra_of, extra_state, merged
from parcompiler.runtime.checkpoint.folder import ADVICE, FACTS, TENSORS, Checkpoint
from parcompiler.runtime.checkpoint.layout import Part, base
from parcompiler.runtime.checkpoint.state_dict import IncompatibleKeys, account_of, concluded
from parcompiler.runtime.checkpoint.states import RankState, Restored, StoredTensor
from parcompiler.runtime.failure import Watch
from parcompiler.runtime.tensor_files import Described, write

POLL = 0.05  # s between two checks of rank 0 whether all have written
T = TypeVar("T")
_IDS = iter(range(10**9))  # all ranks number saves in the same order


@dataclass(frozen=True, slots=True)
class Writing:
    """The part of a checkpoint that a rank writes into the hidden folder `partial`: its tensors and
    its `facts`."""

    partial: Path
    tensors: Mapping[str, StoredTensor]  # with the parts that this rank writes
    facts: dict[str, Any]
    serial: int
    keep: int | None


class Checkpoints:
    """Saves and loads the state of a rank. `watch` knows why the run has failed, if it has."""

    def __init__(
        self,
        state: RankState,
        store: dist.Store | None,
        watch: Watch,
        request: Mapping[str, Any],
    ) -> None:
        self._program, self._layout = state.program, state.layout
        self._state, self._channels = state, state.interpreter.channels
        self._store = store
        self._watch = watch
        self._request = request  # the request to the compiler
        self._thread: threading.Thread | None = None
        self._fault = ""  # of the thread
        self.unwritten = ""  # names the folder that it writes
        self._copies: dict[tuple[str, Box], torch.Tensor] = {}  # of the last state to be copied
        self._stopped = threading.Event()
        self._holders: dict[str, int] | None = None  # cache of `_first`

    def place(self, folder: str | Path) -> Path:
        """A folder as a path. A collective that raises InputError on all ranks where it is none on
        one of them."""
        return self._on_rank(lambda: path_of(folder), "cannot use the folder")

    def save(
        self,
        folder: Path,
        extra: Mapping[str, Any],
        *,
        asynchronous: bool,
        keep: int | None,
        optimizer: bool,
    ) -> Path:
        """Save a checkpoint; its folder. A collective that raises InputError on all ranks."""
        self.finish()
        arguments = [str(folder), sorted(map(str, extra)), asynchronous, keep, optimizer]
        tensors: dict[str, torch.Tensor] = {}
        partial: list[Path] = []  # of rank 0, that made it

        facts: dict[str, Any] = {}
        digests: dict[str, int] = {}

        def begin() -> dict[str, Any]:
            """The report of this rank to all: a few numbers, as there may be thousands of ranks."""
            check_keep(keep)
            facts.update(self._state.facts(optimizer=optimizer))
            at = self._program.coordinate
            if self._program.rank == 0:
                facts["request"] = dict(self._request)
            if not at.pipeline and not at.tensor:
                facts["extra"] = extra_state(extra, tensors)
            digests.update(self._state.digests())
            report = {
                "arguments": arguments,
                "untrained": combined(digests.items()),
                "extra": [*tensors],
            }
            if self._program.rank == 0:
                path, report["serial"] = folders.begin(folder, facts["step"])
                partial.append(path)
                report["partial"] = path.name
            return report

        try:
            everyone = self._agreed(begin, f"cannot save into {folder}")
            if any(one["arguments"] != arguments for one in everyone):
                message = "the ranks save different things: give every rank the same arguments"
                raise InputError(message)
            stored = self._to_write(everyone, digests, tensors, optimizer=optimizer)
            place = folder / everyone[0]["partial"]
            writing = Writing(place, stored, facts, everyone[0]["serial"], keep)
            if asynchronous:
                self._start(self._copied(writing))
                return folders.final(writing.partial)
            failure = f"cannot write {folders.final(place)}"
            self._agreed(lambda: self._write(writing), failure)
            self._agreed(lambda: self._complete(writing), failure)
        except BaseException:
            for path in partial:
                shutil.rmtree(path, ignore_errors=True)
            raise
        return folders.final(writing.partial)

    def check_folder(self, folder: Path) -> None:
        """Try whether `save` could write: each rank writes an empty file into a hidden folder of
        rank 0, and all is removed. A collective that raises InputError on all ranks where one
        cannot."""
        rank, failure = self._program.rank, f"cannot save into {folder}"

        def begin() -> str:
            if rank:
                return ""
            folder.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=".tried-", dir=folder)).name

        def write_nothing(hidden: Path) -> None:
            _check_seen(hidden)
            folders.write(hidden / str(rank), b"")

        hidden = folder / self._agreed(begin, failure)[0]
        try:
            self._agreed(lambda: write_nothing(hidden), failure)
        finally:
            if rank == 0:
                shutil.rmtree(hidden, ignore_errors=True)

    def load(self, folder: Path, extra: Mapping[str, Any], *, optimizer: bool) -> set[str]:
        """Load the checkpoint `folder`, or the newest in it. Returns the names of this rank's
        tensors that it has. A collective that raises InputError on all ranks, and changes nothing
        then."""
        self.finish()
        program = self._program
        failure = f"cannot load {folder}"

        def find() -> str:
            return "" if program.rank else str(folders.find(folder).relative_to(folder))

        path = folder / self._agreed(find, failure)[0]

        def check() -> Any:
            faults = folders.damaged(path, program.rank, program.size)
            if faults:
                raise InputError("\n".join(f"{fault}: {ADVICE}" for fault in faults))

        self._agreed(check, failure)

        members = self._members()

        def plan() -> tuple[Checkpoint, Restored, dict[str, Any]]:
            checkpoint = folders.read(path)
            restored = self._state.restored(checkpoint, members, optimizer=optimizer)
            return checkpoint, restored, {x: extra_of(checkpoint, x, program) for x in extra}

        checkpoint, restored, states = self._on_rank(plan, failure)
        self.conclude(dict.fromkeys(checkpoint.names), restored.faults, strict=True)
        self._agreed(lambda: self._state.apply(checkpoint, restored, optimizer=optimizer), failure)
        others = ", ".join(checkpoint.facts["extra"].keys() - extra.keys())
        if others and optimizer and program.rank == 0:
            text = f"the checkpoint has extra states that load was not given objects for: {others}"
            warnings.warn(text, stacklevel=3)
        if optimizer and members and checkpoint.facts.get("optimizer") is None and not program.rank:
            text = (
                "the checkpoint has no optimizer states: those of this optimizer stay as they are"
            )
            warnings.warn(text, stacklevel=3)
        for name, item in extra.items():
            item.load_state_dict(states[name])
        return restored.names

    def load_pretrained(self, folder: Path, *, strict: bool) -> tuple[IncompatibleKeys, set[str]]:
        """Load published weights. Returns missing and unexpected names, and the names of this
        rank's tensors that were loaded. A collective that raises InputError on all ranks, and
        changes nothing then."""
        program, failure = self._program, f"cannot load {folder}"

        source = self._on_rank(lambda: published.opened(folder), failure)
        mapping = published.renamed(source.files, self._first().keys() | program.aliases.keys())
        copies, faults = self._on_rank(lambda: self._state.published(source, mapping), failure)
        stored = dict.fromkeys(mapping[name].name for name in source.files)
        keys = self.conclude(stored, faults, strict=strict)
        self._agreed(lambda: self._state.copy(source, chain(*copies.values())), failure)
        return keys, set(copies)

    def gather(self, *, gradients: bool = False) -> dict[str, torch.Tensor] | None:
        """On rank 0 the tensors of the model by name, or their gradients, whole and on the CPU;
        None elsewhere. A collective."""
        state, wholes = self._state, dict[str, torch.Tensor]()
        dealt = self._dealt(state.gradients() if gradients else state.tensors(optimizer=False))
        parts = [
            ([key, item.shape, part.box.offsets, part.box.sizes], part.tensor)
            for key, item in dealt.items()
            for part in item.parts
        ]
        missing = Counter[str]()
        for (key, shape, offsets, sizes), tensor in self._channels.collect(parts):
            name, box = base(key), Box(tuple(offsets), tuple(sizes))
            if name not in wholes:
                wholes[name] = torch.empty(shape, dtype=tensor.dtype)
                missing[name] = wholes[name].numel()
            box.of(wholes[name]).copy_(tensor)
            missing[name] -= box.count
        assert not any(missing.values()), "ranks that hold a tensor deal it out alike"
        order = (name for name in self._first() if name in wholes)
        return None if self._program.rank else {name: wholes[name] for name in order}

    def save_pretrained(
        self, folder: Path, config: Any, *, dtype: torch.dtype | None, size: int
    ) -> None:
        """Write weights for others to read. A collective that raises InputError on all ranks."""
        program, failure = self._program, f"cannot write the weights into {folder}"
        settings = None if program.rank else config  # rank 0 writes it
        config = self._on_rank(lambda: published.configuration(settings), failure)
        pieces = folder / ".pieces"
        try:
            path = self.save(pieces, {}, asynchronous=False, keep=None, optimizer=False)
            checkpoint = self._on_rank(lambda: folders.read(path), failure)
            shards = published.PublishedFiles.of(checkpoint, size, dtype)

            def publish() -> None:
                if program.rank == 0:
                    shards.publish(folder, config)

            self._agreed(lambda: shards.write(folder, program.rank, program.size), failure)
            self._agreed(publish, failure)
        finally:
            if program.rank == 0:
                shutil.rmtree(pieces, ignore_errors=True)

    def conclude(
        self, stored: Mapping[str, object], faults: Sequence[str], *, strict: bool
    ) -> IncompatibleKeys:
        """Missing and unexpected names of the tensors `stored`, over all ranks; `faults` are this
        rank's. A collective; raises InputError as `concluded` does."""
        names = self._state.names().values()
        account = account_of(names, stored, self._program.unsaved, faults)
        return concluded(self._channels.gather_values(account), stored, strict=strict)

    def finish(self) -> None:
        """Wait for the checkpoint that is written beside the steps. A collective; raises InputError
        on all ranks where any could not write it."""
        if self._thread is None:
            return

        def ended() -> Any:
            fault = self.ended()
            if fault:
                raise InputError(fault)

        self._agreed(ended, self.unwritten)

    def ended(self) -> str:
        """Wait for the thread of this rank. Returns its fault, or ""."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        fault, self._fault = self._fault, ""
        return fault

    def stop(self) -> None:
        """The run has failed: no longer wait for checkpoints."""
        self._stopped.set()

    def _agreed(self, work: Callable[[], Any], failure: str) -> list[Any]:
        """The results of every rank's `work` (JSON-able), by rank. Raises InputError on all ranks
        when it fails on any."""
        fault, value = _tried(work)
        answers = self._channels.gather_values({"fault": fault, "value": value})
        faults = {
            line: rank
            for rank, answer in reversed([*enumerate(answers)])
            for line in answer["fault"].splitlines()
        }
        if faults:
            lines = [f"rank {rank}: {line}" for line, rank in sorted(faults.items())]
            raise InputError("\n".join([f"{failure}:", *lines]))
        return [answer["value"] for answer in answers]

    def _on_rank(self, work: Callable[[], T], failure: str) -> T:
        """The result of `work` on this rank; raises as `_agreed` does."""
        values: list[T] = []
        self._agreed(lambda: values.append(work()), failure)
        return values[0]

    def _to_write(
        self,
        everyone: list[dict[str, Any]],
        digests: Mapping[str, int],
        tensors: Mapping[str, torch.Tensor],
        *,
        optimizer: bool,
    ) -> dict[str, StoredTensor]:
        """The tensors that this rank writes, by the reports of all ranks. `tensors` are those of
        `extra`; each is written by the first rank that has it."""
        written = self._dealt(self._state.tensors(optimizer=optimizer))
        untrained = [one["untrained"] for one in everyone]
        written |= self._differing(untrained, digests, self._first())
        written |= self._state.apart(optimizer=optimizer)
        others = {digest for one in everyone[: self._program.rank] for digest in one["extra"]}
        for digest, tensor in tensors.items():
            if digest not in others:
                written[f"extra/{digest}"] = StoredTensor.whole(tensor)
        return written

    def _dealt(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The tensors `stored`, each with only the parts that this rank writes."""
        parts = self._layout.written(
            {key: item.parts for key, item in stored.items()},
            self._first(),
            self._state.of_first(),
            {key for key in stored if self._state.is_shared_out(key)},
        )
        return {key: stored[key]._replace(parts=parts[key]) for key in parts}

    def _members(self) -> list[list[str]]:
        """The names of the parameters in each group of the optimizer, of all ranks."""
        ranks = self._channels.gather_values(self._state.members())
        return [[*dict.fromkeys(chain(*names))] for names in zip_longest(*ranks, fillvalue=())]

    def _first(self) -> Mapping[str, int]:
        """The first pipeline coordinate that holds each tensor of the model; ranks ask each other
        once."""
        if self._holders is None:
            grid, self._holders = self._program.grid, {}
            for rank, names in enumerate(self._channels.gather_values([*self._state.names()])):
                for name in names:
                    self._holders.setdefault(name, grid.coordinate(rank).pipeline)
        return self._holders

    def _differing(
        self, numbers: Sequence[int], digests: Mapping[str, int], first: Mapping[str, int]
    ) -> dict[str, StoredTensor]:
        """This rank's tensors whose values differ from those of data rank 0. `numbers` has one
        digest of all `digests` for each rank; these are gathered only where it differs."""
        grid = self._program.grid
        places = [grid.coordinate(rank) for rank in range(grid.size)]
        zeros = [grid.rank(at.pipeline, 0, at.tensor) for at in places]
        unlike = {rank for rank, zero in enumerate(zeros) if numbers[rank] != numbers[zero]}
        if not unlike:
            return {}
        compared = self._program.rank in unlike | {zeros[rank] for rank in unlike}
        told = self._channels.gather_values(dict(digests) if compared else {})
        if self._program.rank not in unlike:
            return {}
        return self._state.differing(digests, told[zeros[self._program.rank]], first)

    def _write(self, writing: Writing) -> None:
        """Write the file of this rank, and beside it what rank 0 needs for the index."""
        _check_seen(writing.partial)
        file = f"rank_{self._program.rank}.safetensors"
        described: dict[str, Described] = {}
        index: dict[str, Any] = {}
        for key, stored in writing.tensors.items():
            pieces = []
            for part in stored.parts:
                place = "" if part.box == Box.whole(stored.shape) else f"[{part.box}]"
                described[key + place] = Described.of(part.tensor)
                pieces.append([key + place, list(part.box.offsets), list(part.box.sizes)])
            dtype = str(stored.parts[0].tensor.dtype).removeprefix("torch.")
            index[key] = {"dtype": dtype, "shape": list(stored.shape), "pieces": pieces}
            if stored.note:
                index[key]["note"] = stored.note
        digest = (
            ""
            if not described
            else write(writing.partial / file, described, {"format": "pt"}, durable=True)
        )
        document = {"file": file, "sha256": digest, "tensors": index, "facts": writing.facts}
        text = json.dumps(document).encode()
        folders.write(writing.partial / f"rank_{self._program.rank}.json", text)

    def _complete(self, writing: Writing) -> None:
        """Rank 0 completes the folder into which all ranks have written."""
        if self._program.rank:
            return
        partial = writing.partial
        parts = []
        for rank in range(self._program.size):
            path = partial / f"rank_{rank}.json"
            parts.append(json.loads(path.read_bytes()))
            path.unlink()
        index = folders.index((part["file"], part["tensors"]) for part in parts)
        facts = {"format": folders.FORMAT, "serial": writing.serial}
        facts |= merged([part["facts"] for part in parts])
        digests = {part["file"]: part["sha256"] for part in parts if part["sha256"]}
        folders.finish(partial, {FACTS: facts, TENSORS: index}, digests)
        if writing.keep is not None:
            folders.prune(partial.parent, writing.keep)

    def _start(self, writing: Writing) -> None:
        """Start the thread that writes beside the steps."""
        self.unwritten = f"the last checkpoint, {folders.final(writing.partial)}, was not written"
        name = f"checkpoint/{next(_IDS)}"
        alone = self._store is None or self._program.size == 1
        # Its own client, as the watch has: while one waits, all calls of that client wait.
        store = dist.HashStore() if alone else self._store.clone()  # type: ignore[union-attr]
        self._thread = threading.Thread(
            target=self._beside, args=(writing, store, name), name="checkpoint"
        )
        self._thread.start()

    def _copied(self, writing: Writing) -> Writing:
        """`writing` with copies of all tensors, on the CPU, so that steps can go on. Their memory
        is reused by the next save, as new pages take longer than copying."""
        before, self._copies = self._copies, {}
        stored = {}
        for key, item in writing.tensors.items():
            parts = []
            for part in item.parts:
                place, tensor = (key, part.box), part.tensor.detach()
                copy = before.get(place)
                if copy is None or copy.dtype != tensor.dtype:
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
                self._copies[place] = copy.copy_(tensor)
                parts.append(Part(part.box, copy))
            stored[key] = item._replace(parts=parts)
        return replace(writing, tensors=stored)

    def _beside(self, writing: Writing, store: dist.Store, name: str) -> None:
        """Body of the thread: write, report the result to the store, and on rank 0 complete the
        folder when all have written."""
        rank = self._program.rank
        fault, _ = _tried(lambda: self._write(writing))
        unreported, _ = _tried(lambda: store.set(f"{name}/{rank}", fault))
        fault = fault or unreported
        if rank == 0:
            others, _ = _tried(lambda: self._await(store, name))
            fault = fault or others
            fault = fault or _tried(lambda: self._complete(writing))[0]
            if fault:
                shutil.rmtree(writing.partial, ignore_errors=True)
        self._fault = fault

    def _await(self, store: dist.Store, name: str) -> None:
        """Wait until all ranks have written. Raises InputError when one could not, or is gone."""
        faults = []
        for rank in range(self._program.size):
            key = f"{name}/{rank}"
            while not store.check([key]):
                if self._stopped.is_set() or self._watch.cause:
                    message = "the run failed before all ranks had written"
                    raise InputError(message)
                time.sleep(POLL)
            fault = store.get(key).decode()
            if fault:
                faults.append(f"rank {rank} could not write its file ({fault})")
        if faults:
            raise InputError("\n".join(faults))


def _check_seen(folder: Path) -> None:
    """Refuse a folder of rank 0 that this rank does not see."""
    if not folder.is_dir():
        message = f"there is no {folder} here: give a folder that all ranks see"
        raise InputError(message)


def _tried(work: Callable[[], Any]) -> tuple[str, Any]:
    """The fault of `work` ("" if none), and its result."""
    try:
        return "", work()
    except OSError as error:
        return f"{error.strerror or error}", None
    except InputError as error:
        return str(error), None
    except Exception as error:  # of a user's object, which may raise anything
        return f"{type(error).__name__}: {error}" or type(error).__name__, None


def check_keep(keep: int | None) -> None:
    """Refuse `keep` unless it is a positive number of checkpoints or None."""
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        message = f"keep must be a number of checkpoints, or None for all ({keep!r} given)"
        raise InputError(message)
