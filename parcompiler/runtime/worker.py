"""One rank of a running program: step, train, evaluate, and its part of the model.

worker = program.worker()          # or pc.load(folder).worker(), or an emitted script's
worker.set_optimizer(torch.optim.AdamW, lr=3e-4)
for batch in batches:
    loss = worker.train_step(batch)
"""

from __future__ import annotations

import atexit
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import nn

from parcompiler.errors import InputError, LaunchError
from parcompiler.runtime.agreement import (
    WorkerCall,
    check_programs,
    combined,
    difference_of_batches,
    difference_of_calls,
    difference_of_options,
    difference_of_weights,
    digest_of_batch,
)
from parcompiler.runtime.asynchronous import Serving
from parcompiler.runtime.axis import within
from parcompiler.runtime.batch import check_modes, microbatches, padded, samples_of_batch
from parcompiler.runtime.channels import Channels
from parcompiler.runtime.checkpoint import SHARD_SIZE, Checkpoints, RankState, RankTensors
from parcompiler.runtime.checkpoint.state_dict import IncompatibleKeys
from parcompiler.runtime.failure import Watch, explain, named
from parcompiler.runtime.files import Fingerprint, fingerprint, request_of, stored
from parcompiler.runtime.flight import FlightRecorder
from parcompiler.runtime.groups import GroupOf, Patterns
from parcompiler.runtime.interpreter import Around, InstructionTime, Interpreter
from parcompiler.runtime.joining import host, meet, rank_device, start
from parcompiler.runtime.mixed_precision import LEAST
from parcompiler.runtime.predicting import Predictions
from parcompiler.runtime.program import RankProgram, of_first
from parcompiler.runtime.rounds import Rounds
from parcompiler.runtime.stage import Stage, Unfilled
from parcompiler.runtime.updates import Updates
from parcompiler.runtime.vocabulary import Vocabulary, VocabularyRows
from parcompiler.temporary import default_dtype

if TYPE_CHECKING:
    from parcompiler.runtime.compiled.build import CompiledStages

TIMEOUT = timedelta(minutes=10)
LONGEST = 10**8  # s that a timeout may have
BACKSTOP = timedelta(seconds=5)  # from the worker's timeout to the process groups'
CLOSED = "worker.close() was called"
Metrics = Callable[[dict[str, torch.Tensor], Any], Mapping[str, float]]
Kept = dict[str, dict[int, torch.Tensor]]  # outputs by value and micro-batch
CHECK_BATCHES = 100  # steps from one comparison of the ranks' batches to the next


class Worker:
    """One rank. `stages` makes its modules; `tensors` are its weights by their names in the model.

    `vocabulary` makes the module of its rows of the vocabulary, where all ranks have some. `hooks`
    are the model's gradient hooks, by parameter name. `folder` is the exported folder of a script:
    its weights are loaded, and all ranks compare the checksums of its scripts and weights. Where
    the loss is a mean over the targets of all micro-batches, `counted` returns how many one
    micro-batch has, from the tensors that its arguments name. `request` is the request to the
    compiler, which checkpoints keep; with a `folder` it is read from there. Published weights that
    it names are loaded here; if they cannot be, the first call that needs weights says why, unless
    others were loaded before.

    The tensor and pipeline ranks of a data coordinate are given the same batch. They compare their
    batches in the first step, and in every `check_batches`-th one from there on; only in the first
    if that is 0. It must be the same on all ranks. In the first call after weights were loaded from
    elsewhere than `folder`, ranks compare digests of the weights that several of them hold.

    Initializes torch.distributed from torchrun's environment, unless the caller has; then the
    caller destroys it. Raises LaunchError when the number of processes is not the plan's, or the
    ranks run different programs. After a failure a worker is closed: all ranks must start again
    from saved weights.

    A wait that takes longer than `timeout` (a timedelta, or seconds) ends with a LaunchError that
    says where every rank is and since when; a rank that dies is noticed within seconds. `flight`
    has the last instructions of this rank, and writes them into its `folder` when the run fails.
    With `compiled` the layers of stages go through torch.compile's compiler: for training at once,
    for evaluation before the first one. Raises LaunchError where there is no compiler, and for a
    layer that cannot be compiled, with its line. All ranks must call steps, evaluations and methods
    that say "Collective" equally often and in the same order.
    """

    def __init__(
        self,
        program: RankProgram,
        stages: Mapping[int, Callable[[], Stage]],
        tensors: Iterable[tuple[str, torch.Tensor]] = (),
        *,
        vocabulary: Callable[[int, int], Vocabulary] | None = None,
        folder: Path | None = None,
        hooks: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | None = None,
        device: torch.device | None = None,
        timeout: timedelta | float = TIMEOUT,
        request: Mapping[str, Any] | None = None,
        counted: Callable[..., torch.Tensor] | None = None,
        compiled: bool = False,
    ) -> None:
        timeout = _timedelta(timeout)
        self.program = program
        self.device = device or rank_device(program.device)
        self.compiled: CompiledStages | None = None
        if compiled and program.expert > 1:
            message = (
                "compiled=True needs a fixed number of rows, and expert ranks get another number "
                f"in each step (expert={program.expert}): run without compiled=True"
            )
            raise LaunchError(message)
        if compiled:  # imports half of torch
            from parcompiler.runtime.compiled.build import check_compiler

            check_compiler(self.device)
        self._records: list[InstructionTime] | None = None
        self._hooks = hooks or {}
        self._count_targets = counted
        self.folder = folder
        self._copied: torch.Event | None = None  # the last batch is on the device
        self._closed = ""  # why the worker is closed
        self._refused = ""  # why this rank refused the call that others may be in
        self.check_batches = CHECK_BATCHES
        self._calls = {True: 0, False: 0}  # of training and of evaluation
        self._owner = not dist.is_initialized()
        store = meet(program, timeout)
        self.flight = FlightRecorder()
        # The watch names late ranks and aborts the groups before their own timeouts do.
        self._channels = Channels(
            program, self.device, timeout + BACKSTOP, self._explained, self.flight
        )
        seconds = timeout.total_seconds()
        self._watch = Watch(store, program, self._channels, self.flight, host(store), seconds)
        with self._failing_together():
            start(program, self.device, store, timeout)
            files = Fingerprint("0") if folder is None else fingerprint(folder)
            if files.edited and program.rank == 0:
                edited = ", ".join(files.edited)
                warnings.warn(f"edited since the export: {edited}", stacklevel=2)
            self._channels.connect()
            check_programs(program, files, self._channels)
            self._channels.open()
            with self._in_groups(), torch.device(self.device), Unfilled():
                self._stages = {j: make() for j, make in stages.items()}
                self._vocabulary = (
                    None if vocabulary is None else VocabularyRows(program).make(vocabulary)
                )
            self._interpreter = Interpreter(
                program, self._stages, self._channels, self._vocabulary, self.flight, fused=compiled
            )
            if compiled:
                from parcompiler.runtime.compiled.build import CompiledStages

                self.compiled = CompiledStages(self._interpreter)
            self._updates = Updates(
                program,
                {n: p for n, p in self._interpreter.tensors.items() if isinstance(p, nn.Parameter)},
                self.device,
                self._channels.total_of_step,
                self._interpreter.parts,
                self.flight,
            )
            if program.updates.way == "local":
                weights = self._updates.weights()
                self._updates.rounds = Rounds(program, weights, self._channels)
            if program.updates.way == "asynchronous":
                self._updates.serving = Serving(
                    program, self._updates.trained(), self._updates.masters, self._channels,
                    self._watch, self._explained, seconds,
                )  # fmt: skip
                atexit.register(self._updates.serving.abandon)
            self._interpreter.update = self._updates.apply
            for axis in self._channels.axes.values():
                if axis.name != "data":  # whose ranks draw different numbers
                    self._interpreter.seed = axis.agreed(self._interpreter.seed % 2**62)
            self._predictions = Predictions(program, self._channels, self._vocabulary)
            state = RankState(program, self._interpreter, self._updates, self._calls)
            self._tensors = RankTensors(state)
            if folder is not None:
                request = request_of(folder)
            self._checkpoints = Checkpoints(state, store, self._watch, request or {})
            self._tensors.load(tensors if folder is None else stored(folder, program))
            if folder is not None:
                self._tensors.loaded = None  # checksums are compared
            if self.compiled is not None:
                with self._in_groups():
                    self.compiled.prepare(training=True)
        if folder is not None and request and request.get("weights"):
            try:
                self.load_pretrained(request["weights"])
            except InputError as error:  # on all ranks; a resumed run does not need them
                self._tensors.lacking = str(error)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.program.rank

    @property
    def stages(self) -> dict[int, Stage]:
        """The modules of this rank, by stage."""
        self._hand_out()
        return self._stages

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The module of its rows of the vocabulary, where all ranks have some."""
        self._hand_out()
        return self._vocabulary

    def step(self, batch: object) -> torch.Tensor:
        """Forward and backward of one batch; the mean loss, on every rank.

        `batch` has the form of the compiled inputs with `microbatches` times the rows. Gradients
        are those of this batch, reduced over the ranks that share a tensor; parameters stay.
        Raises InputError for a batch of another form, for a batch that differs from that of the
        other ranks of the data coordinate, and for an asynchronous program: nothing has been sent
        then, and the worker stays usable. Raises LaunchError when any rank fails.
        """
        self._check_synchronous()
        return self._trained(batch)

    def train_step(self, batch: object) -> torch.Tensor:
        """`step`, then an optimizer step; the gradients are freed. Returns the mean loss.

        With "pipedream" every micro-batch is a minibatch of its own: the optimizer steps after each
        backward, by the gradient of that loss alone, so `microbatches` times in a call. (A
        learning-rate scheduler moves when its own `step` is called, as ever.) The pipeline fills
        and drains once in a call: give it many micro-batches.
        """
        self._check_open()
        self._updates.optimizer  # noqa: B018 (refuses to begin without one)
        loss = self._trained(batch)
        if not self.program.asynchronous:
            self._apply()
        return loss

    def optimizer_step(self) -> None:
        """Update the parameters by the gradients of the last `step`, and free the gradients.

        Clips them first where `set_optimizer` has a `max_norm`. In float16 a step whose gradients
        are not finite on some rank is skipped on all. Raises InputError for an asynchronous
        program, whose steps have done it.
        """
        self._check_synchronous()
        self._apply()

    @overload
    def evaluate(self, batch: object) -> torch.Tensor: ...

    @overload
    def evaluate(self, batch: object, metrics: Metrics) -> dict[str, float]: ...

    def evaluate(
        self, batch: object, metrics: Metrics | None = None
    ) -> torch.Tensor | dict[str, float]:
        """The mean loss of one `batch` in evaluation mode (no dropout), without gradients.

        `metrics` computes further numbers by name from the outputs that the model was compiled to
        keep and the batch, on the first rank of each data coordinate; then every rank returns a
        dictionary of the loss and of their means over data coordinates.

        Parameters and buffers stay as they are, and later steps draw the same random numbers. The
        batch may have fewer micro-batches than a step, equally many on all ranks: the loss is the
        mean over these, so an average over batches must weigh each by its rows. Raises InputError
        for other numbers of rows, as `step` does.

        Layers compute as the model's do in evaluation mode, its Python branches on `self.training`
        included, unless `compile` said why they cannot: see docs/limits.md.
        """
        self._settle()
        if metrics is None:
            with self._evaluating():
                return self._run(batch, training=False)
        kept: Kept = {}
        with self._evaluating():
            loss = self._run(batch, training=False, kept=kept)
        count = samples_of_batch(self.program, batch)[1]
        with self._failing_together("evaluate"):
            outputs = self._predictions.gather(kept, count // self.program.samples)
            numbers = {}
            if self._channels.is_first:
                made = metrics(self._predictions.joined([outputs], count), batch)
                numbers = {str(name): float(value) for name, value in made.items()}
            told = self._channels.gather_values(numbers)
        rows = [numbers for numbers in told if numbers]
        means = {n: sum(row[n] for row in rows) / len(rows) for n in (rows or [{}])[0]}
        return {"loss": loss.item(), **means}

    def predict(self, batch: object) -> dict[str, torch.Tensor] | None:
        """On rank 0 the outputs that the model was compiled to keep, by name on the CPU, in
        evaluation mode; None elsewhere. Collective.

        A batch has any number of samples, which may differ between data coordinates; the ranks of
        one are given the same. Inputs that no output depends on, such as labels, may be left out.
        Outputs have a row for each sample, ordered by data coordinate; one without rows for samples
        (a scalar) has one entry for each micro-batch. Raises InputError on every rank, and stays
        usable, where a batch has another form, or nothing is kept.
        """
        self._check_open()
        if not self.program.outputs:
            message = (
                "no outputs are kept: name them when compiling, as pc.compile(outputs=['logits'])"
            )
            raise InputError(message)
        self._settle()
        leaves, counts = self._counted(batch)
        most = -(-max(counts) // self.program.samples)
        parts = []
        with self._evaluating(), self._failing_together("predict"), self._in_groups():
            if self.compiled is not None:
                self.compiled.prepare(training=False)
            batches = padded(self.program, leaves, most)
            batches = [{n: t.to(self.device) for n, t in each.items()} for each in batches]
            for start in range(0, most, self.program.microbatches):
                some = batches[start : start + self.program.microbatches]
                kept: Kept = {}
                lines = of_first(self.program.evaluation, len(some))
                self._interpreter.run(lines, some, training=False, kept=kept)
                parts.append(self._predictions.gather(kept, len(some)))
            return self._predicted(parts, counts)

    def _counted(self, batch: object) -> tuple[dict[str, object], list[int]]:
        """The tensors of a batch for predictions, and the samples of all data coordinates. Raises
        InputError on all ranks if one refuses its batch, or ranks that share a batch were given
        different ones."""
        program = self.program
        leaves: dict[str, object] = {}
        refusal, count, digest = "", 0, 0
        try:
            check_modes(self.device, training=False)
            leaves, count = samples_of_batch(program, batch)
            self._predictions.check(count)
            self._interpreter.check(padded(program, leaves, -(-count // program.samples)))
            tensors = {k: t for k, t in leaves.items() if isinstance(t, torch.Tensor)}
            digest = digest_of_batch([tensors])
        except InputError as error:
            refusal = str(error)
        with self._failing_together("predict"):
            said = self._channels.gather_values([count, digest, refusal])
        for rank, (_, _, text) in enumerate(said):
            if text:
                raise InputError(text if rank == program.rank else f"rank {rank}: {text}")
        if text := difference_of_batches(program, [local for _, local, _ in said]):
            raise InputError(text)
        return leaves, [said[rank][0] for rank in program.grid.leaders]

    def _predicted(
        self, parts: Sequence[Mapping[str, torch.Tensor]], counts: Sequence[int]
    ) -> dict[str, torch.Tensor] | None:
        """The outputs of all data coordinates on rank 0."""
        outputs: Mapping[str, torch.Tensor] = {}
        if self.rank in self.program.grid.leaders:
            outputs = self._predictions.joined(parts, counts[self.data_rank])
        joined: dict[str, list[torch.Tensor]] = {}
        for name, tensor in self._channels.collect([*outputs.items()]):
            joined.setdefault(name, []).append(tensor)
        return None if self.rank else {name: torch.cat(each) for name, each in joined.items()}

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """In this context, modules are in evaluation mode; buffers that forwards update are
        restored."""
        modules: list[nn.Module] = [*self._stages.values()]
        modules += [] if self._vocabulary is None else [self._vocabulary]
        modes = {module: module.training for module in modules}
        updated = [buffer for module in modes for buffer in module.buffers()]
        updated += [t for n, t in self._interpreter.tensors.items() if n in self.program.updated]
        values = [(tensor, tensor.detach().clone()) for tensor in updated]
        for module in modes:
            module.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.train(mode)
            with torch.no_grad():
                for tensor, before in values:
                    tensor.copy_(before)

    def set_optimizer(
        self,
        kind: Callable[..., torch.optim.Optimizer],
        *,
        max_norm: float | None = None,
        error_if_nonfinite: bool = False,
        elementwise: bool | None = None,
        groups: Patterns | GroupOf | None = None,
        **options: Any,
    ) -> torch.optim.Optimizer:
        """Build the optimizer over this rank's trainable parameters; `kind` is its class (or a
        `functools.partial` of it), `options` are its own.

        `groups` gives parameters other options by name: pairs of a pattern and options, as
        `("*.bias", {"weight_decay": 0.0})`, where the last match decides, or a function of name and
        parameter that returns options (the parameter has the dimensions of the model's, and on
        tensor ranks the sizes of a piece). Group 0 has the parameters that nothing matches. Every
        rank has all groups in the same order, as schedulers need. Collective with `groups`.

        With `max_norm` every step clips the gradients of the whole model to that norm first, as
        `clip_gradients` does. With `error_if_nonfinite` a step whose loss or whose gradients' norm
        is not finite raises LaunchError on every rank (with local and asynchronous updates on those
        of its data coordinate), and leaves the parameters as they were; in float16 the loss alone,
        as steps with such gradients are skipped there (with it or without, until the scale of the
        loss would be below 6e-5). In a 16-bit program the parameters are masters in float32.
        Returns the optimizer, for schedulers of its learning rate. Raises InputError for an
        optimizer that is made already, for other values, and where no parameter matches a pattern.

        An optimizer that is not known to work element by element (Adafactor, Muon, a class of your
        own) gets whole parameters from `zero`; InputError is raised where ranks hold only pieces of
        a parameter, on tensor ranks or as rows of the vocabulary. `elementwise=True` declares that
        an optimizer works element by element.
        """
        agreeing = groups is not None and self._failing_together("set_optimizer", InputError)
        with agreeing or nullcontext():
            return self._updates.set_optimizer(
                kind, max_norm, options, error_if_nonfinite=error_if_nonfinite,
                elementwise=elementwise, groups=groups, gather=self._channels.gather_values,
            )  # fmt: skip

    @contextmanager
    def using(self, state: str) -> Iterator[None]:
        """In this context, weights are swapped with a state that the optimizer has of each, such as
        their average: to evaluate or publish that. Collective.

        Raises InputError where no parameter of this rank has that state, and for asynchronous
        updates, which do not stop for it.
        """
        self._check_synchronous()
        if self._updates.serving is not None:
            message = (
                "using() is not available with updates='asynchronous', where the server goes on "
                "updating"
            )
            raise InputError(message)
        with self._failing_together("using", InputError):
            self._updates.swap(state)
        try:
            yield
        finally:
            if not self._closed:
                with self._failing_together("using"):
                    self._updates.swap(state)

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients of the last `step` so that the model's have a norm of `max_norm` at
        most. Returns the norm before, the same on every rank. Collective.

        As `torch.nn.utils.clip_grad_norm_` on the whole model in one process: pieces and rows of a
        tensor count together, copies once.
        """
        self._check_synchronous()
        with self._failing_together("clip_gradients"):
            return self._updates.clip(max_norm)

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        """The norm of the model's gradients in the last step, before they were clipped; None if it
        was not computed (it is with `max_norm`, `clip_gradients` and in float16)."""
        return self._updates.norm

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in its backward; 1 except in float16. Losses and gradients that a
        worker returns are without it. It may be set, to the same value on all ranks."""
        scale = self._updates.scale
        return 1.0 if scale is None else scale.value

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if self._updates.scale is None:
            message = "the loss is scaled in float16 alone"
            raise InputError(message)
        self._updates.scale.set(value)

    @property
    def seed(self) -> int:
        """The seed of dropout and other random operators, mixed with step, stage and micro-batch:
        the process's `torch.initial_seed()` when the worker was made, or a checkpoint's."""
        return self._interpreter.seed

    @property
    def skipped_steps(self) -> int:
        """The number of steps skipped because gradients were not finite (in float16)."""
        return 0 if self._updates.scale is None else self._updates.scale.skipped

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under their names in the model: with `zero=3` its rows of them,
        where it has some."""
        parts = self._interpreter.parts
        pieces = () if parts is None else parts.in_pieces
        self._hand_out()
        for name, tensor in self._interpreter.tensors.items():
            part = parts.parts.get(name) if parts is not None and name in pieces else tensor
            if isinstance(part, nn.Parameter):
                yield name, part

    def load_state_dict(
        self, state: Mapping[str, torch.Tensor], strict: bool = True
    ) -> IncompatibleKeys:
        """Copy this rank's part out of the `state` dict of a whole model (its names). Collective.

        Returns the missing and the unexpected names, over the whole model, as
        `torch.nn.Module.load_state_dict` does. A tied tensor may be given under any of its names,
        and tensors that the model's state dict does not have (buffers that are not persistent) may
        be given too. Raises InputError on every rank, and changes nothing, when a tensor has
        another shape on one, and, if `strict`, when a name is missing or unexpected.
        """
        if not isinstance(state, Mapping):
            message = f"a state dict is needed: names and tensors ({type(state).__name__} given)"
            raise InputError(message)
        with self._failing_together("load_state_dict", InputError):
            faults = self._tensors.faults(state)
            keys = self._checkpoints.conclude(state, faults, strict=strict)
        self._tensors.load(state.items())
        self._restart()
        return keys

    def gather_state_dict(self, everything: bool = False) -> dict[str, torch.Tensor] | None:
        """On rank 0 the state dict of the model; None elsewhere. Collective.

        `everything` adds tensors that a state dict of the model does not have: buffers that are not
        persistent, constants, and the parameters of a loss that is a module. The parameters of a
        16-bit program are the masters, in float32; frozen ones have none and are in 16 bits.
        """
        self._settle()
        with self._failing_together("gather"):
            state = self._checkpoints.gather()
        if state is not None:
            state |= {a: state[name] for a, name in self.program.aliases.items() if name in state}
            left_out = () if everything else self.program.unsaved
            state = {name: tensor for name, tensor in state.items() if name not in left_out}
        return state

    def gather_gradients(self) -> dict[str, torch.Tensor] | None:
        """On rank 0 the gradient of every parameter that has one; None elsewhere. Collective.

        Of a 16-bit program they are in float32, and without the scale of the loss.
        """
        with self._failing_together("gather"):
            return self._checkpoints.gather(gradients=True)

    @property
    def step_count(self) -> int:
        """The number of training steps so far, including those of a loaded checkpoint."""
        return self._interpreter.step

    @property
    def sample_count(self) -> int:
        """The number of samples all data ranks together have trained on, including those of a
        loaded checkpoint: the run's position in its data, from which `Samples` goes on."""
        return self._interpreter.samples

    @property
    def data_rank(self) -> int:
        """The data coordinate of this rank: which of the batches of a step is its own."""
        return self.program.batch

    @property
    def data_ranks(self) -> int:
        """How many batches a step takes."""
        return self.program.grid.batches

    def any_rank(self, says: bool) -> bool:
        """Whether `says` is true on any rank. Collective."""
        return any(answer for (answer,) in self.gather_numbers(int(says)))

    def gather_numbers(self, *numbers: int) -> list[tuple[int, ...]]:
        """Some integers of every rank, by rank, such as times or sizes. Collective."""
        with self._failing_together():
            return self._channels.gather_numbers(*numbers)

    def save(
        self,
        folder: str | Path,
        extra: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
        keep: int | None = None,
        optimizer: bool = True,
    ) -> Path:
        """Save a checkpoint into `folder`, as `step_N`, whose path is returned. Collective.

        It holds parameters and their masters, buffers, the optimizer's states, the step, the seeds,
        the scale of the loss, and the `state_dict()` of the objects in `extra` (numbers, texts,
        tensors, and lists, tuples and dictionaries of these). Every rank writes a share of its
        tensors; nothing is pickled. `folder` is one that all ranks see. `optimizer=False` leaves
        out the optimizer's states.

        A checkpoint with its final name is complete; a failure leaves older ones as they were.
        `keep` removes all complete ones but that many of the newest. With `asynchronous` the state
        is copied, and written beside the steps that follow; the next `save` or `load`, or `close`,
        waits for it and raises its error. Gradients are not saved.

        Raises InputError on every rank when it cannot be written; the worker stays usable.
        """
        self._settle()
        with self._failing_together("save", InputError):
            place = self._checkpoints.place(folder)
            return self._checkpoints.save(
                place, extra or {}, asynchronous=asynchronous, keep=keep, optimizer=optimizer
            )

    def check_folder(self, folder: str | Path) -> None:
        """Refuse a `folder` that `save` could not write into, before steps that would be lost. It
        is created if missing. Collective; raises InputError on every rank."""
        with self._failing_together("check_folder", InputError):
            self._checkpoints.check_folder(self._checkpoints.place(folder))

    def load(
        self,
        folder: str | Path,
        extra: Mapping[str, Any] | None = None,
        optimizer: bool = True,
    ) -> int:
        """Resume from a checkpoint of this model, whatever plan wrote it. Returns its step.
        Collective.

        `folder` is a checkpoint, or a folder of them: the newest one is loaded. An optimizer of the
        saved kind must have been set; its options become the saved ones (`optimizer=False` loads
        neither). The objects in `extra` get their states by `load_state_dict`; a warning names
        saved ones that are not given.

        Raises InputError on every rank, and changes nothing, when a file is damaged, or names,
        shapes or objects do not fit.
        """
        with self._failing_together("load", InputError):
            place = self._checkpoints.place(folder)
            names = self._checkpoints.load(place, extra or {}, optimizer=optimizer)
        self._tensors.filled(names)
        return self.step_count

    def load_pretrained(self, folder: str | Path, strict: bool = True) -> IncompatibleKeys:
        """Load published weights: a `folder` of Hugging Face with `model.safetensors`, or with
        shards and their index. Collective.

        Every rank reads only its own part. Names are those of the model's state dict, a tied tensor
        under any of its names, and with or without a first component that the class around the
        model adds (`transformer.`). Other dtypes are converted. Optimizer, step and seeds stay as
        they are. Returns the missing and unexpected names, and raises InputError on every rank, as
        `load_state_dict` does (`strict=False` allows such names).
        """
        with self._failing_together("load_pretrained", InputError):
            place = self._checkpoints.place(folder)
            keys, names = self._checkpoints.load_pretrained(place, strict=strict)
            self._restart()
        loaded = self._tensors.loaded or set()
        self._tensors.filled(names)
        self._tensors.loaded = loaded | names  # ranks may read different folders
        return keys

    def save_pretrained(
        self,
        folder: str | Path,
        config: Any = None,
        dtype: torch.dtype | None = None,
        max_shard_size: int = SHARD_SIZE,
    ) -> None:
        """Write the weights in the format that `from_pretrained` of Hugging Face opens: shards of
        `max_shard_size` bytes at most and their index, or one file. Collective.

        `config` becomes `config.json`: a configuration of transformers, a dictionary, or the path
        of a file. Tensors are written in `dtype`; None: as they are, parameters of a 16-bit program
        as their float32 masters. No rank holds more than one whole tensor. Other weights in
        `folder`, which all ranks see, are replaced. Raises InputError on every rank when they
        cannot be written.
        """
        self._settle()
        with self._failing_together("save_pretrained", InputError):
            place = self._checkpoints.place(folder)
            self._checkpoints.save_pretrained(place, config, dtype=dtype, size=max_shard_size)

    def use_draws(self, around: Around | None) -> None:
        """Draw random numbers within `around(stage, microbatch)` instead of from the seed."""
        self._interpreter.draws = around

    def record(self, on: bool = True) -> None:
        """Measure the instructions of the steps that follow, for `trace`."""
        self._records = [] if on else None

    def trace(self) -> tuple[InstructionTime, ...]:
        """Every instruction of the last step since `record`: begin and end in seconds since the
        step began, and the seconds it waited for messages. Raises InputError where steps are not
        recorded."""
        if self._records is None:
            message = "no step is recorded: call worker.record() before the step to be measured"
            raise InputError(message)
        return tuple(self._records)

    def close(self) -> None:
        """Destroy the process groups; also torch.distributed when this worker started it.

        Waits for an asynchronous checkpoint. Raises InputError when that could not be written.
        """
        if self._refused and not self._closed:
            self._watch.fail(self._refused)
        else:
            self._arrive()
        fault = "" if self._closed else self._checkpoints.ended()
        self._close(self._refused or CLOSED)
        if fault:
            message = f"{self._checkpoints.unwritten}: {fault}"
            raise InputError(message)

    def __enter__(self) -> Worker:
        """A `with` block closes the worker at its end."""
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        """Close; the other ranks are told of an error that ends the block."""
        if isinstance(error, Exception | KeyboardInterrupt) and not self._closed:
            left = f"rank {self.rank} left its worker because of {named(error)}"
            self._watch.fail(self._refused or left)
            self._close(f"of {named(error)}")
        self.close()

    def _trained(self, batch: object) -> torch.Tensor:
        """Execute the training instructions for one batch, from zero gradients. Returns the mean
        loss."""
        loss = self._run(batch, training=True)
        with torch.no_grad():
            for name, hook in self._hooks.items():
                tensor = self._updates.updated.get(name)
                if tensor is not None and tensor.grad is not None:
                    tensor.grad.copy_(hook(tensor.grad))
        if self._updates.error_if_nonfinite and not loss.isfinite():
            message = (
                f"the loss of step {self._calls[True]} is not finite ({loss.item()}): the "
                "parameters are as before the step"
            )
            raise LaunchError(message)
        return loss

    def _apply(self) -> None:
        """An optimizer step that frees the gradients."""
        self._check_open()
        self._updates.optimizer  # noqa: B018
        call = self._failing_together("optimizer_step")
        apart = self.program.zero or self.program.updates.way != "all-reduce"
        with call if self._updates.exchanges or apart else nullcontext():
            updated = self._updates.apply()
        scale = self._updates.scale
        if not updated and (scale is None or scale.value < LEAST):
            halved = "" if scale is None else (
                f", nor were those of {scale.skipped - 1} steps before it that were skipped, and "
                f"the scale of the loss has come below {LEAST:.1g}"
            )  # fmt: skip
            message = (
                f"the gradients of step {self._calls[True]} are not finite (norm: "
                f"{self.gradient_norm}){halved}: the parameters are as before the step"
            )
            raise LaunchError(message)

    @property
    def arrivals(self) -> torch.Tensor | None:
        """The order of the updates of an asynchronous program, on rank 0: the data rank of each,
        and -1 where all ranks got the current weights (for an evaluation, a checkpoint or a state
        dict). With it a run can be repeated to the bit. None on other ranks."""
        serving = self._updates.serving
        if serving is None or self.rank:
            return None
        return torch.tensor(serving.record, dtype=torch.int16)

    def _settle(self) -> None:
        """Bring the weights of this rank up to date: wait for parameters that other data ranks have
        updated, and in an asynchronous program get the server's, which is a collective."""
        self._tensors.check_published()
        self._arrive()
        if self._updates.serving is not None:
            with self._failing_together("settle"):
                self._updates.serving.settle()

    def _arrive(self) -> None:
        """Wait for parameters that other data ranks have updated, before they are read."""
        if not self._closed:
            with self._failing_together():
                self._interpreter.arrive()
                self._updates.adopt()

    def _hand_out(self) -> None:
        """Parameters are handed to the caller, who may read and write them."""
        self._arrive()
        self._updates.handed_out = True

    def _restart(self) -> None:
        """Forget state that belongs to the old weights: the position in a round, the errors of
        PowerSGD, the order of updates."""
        if self._updates.rounds is not None:
            self._updates.rounds.position = 0
        if self._interpreter.powersgd is not None:
            self._interpreter.powersgd.clear()
        if self._updates.serving is not None:
            self._updates.serving.restore("", torch.empty(0))

    def _run(self, batch: object, *, training: bool, kept: Kept | None = None) -> torch.Tensor:
        """Check the batch and execute a list; any failure stops every rank. `kept` is filled with
        outputs."""
        program = self.program
        batches = self._agreed(batch, training)
        if training:
            lines = program.step
        else:
            lines = of_first(program.evaluation, len(batches))
        if self._records is not None:
            self._records.clear()
        with self._failing_together(), self._in_groups():
            if self.compiled is not None:
                self.compiled.prepare(training)
            share = self._share_of_tokens(batches)
            scale = (self._updates.begin() if training else 1.0) * share
            loss = self._interpreter.run(
                lines, batches, training=training, record=self._records, scale=scale, kept=kept
            )
            loss = loss if share == 1.0 else loss * share
        if self._copied is not None:
            self._copied.synchronize()  # then the caller may overwrite pinned memory
        self._calls[training] += 1
        return loss

    def _share_of_tokens(self, batches: Sequence[Mapping[str, torch.Tensor]]) -> float:
        """The factor between the mean of the micro-batches' sums and the mean over all targets that
        count, in all data ranks; 1 where the loss is a mean already."""
        if self._count_targets is None:
            return 1.0
        names = inspect.signature(self._count_targets).parameters
        count = sum(
            int(self._count_targets(**{name: each[name] for name in names})) for each in batches
        )
        total = count
        if self.data_ranks > 1:
            counts = self._channels.gather_numbers(count)
            total = sum(counts[rank][0] for rank in self.program.grid.leaders)
        return len(batches) * self.data_ranks / max(1, total)

    def _agreed(self, batch: object, training: bool) -> list[dict[str, torch.Tensor]]:
        """The micro-batches of a batch, once all ranks accept theirs; InputError where one refuses.

        Nothing has been sent then, and the worker stays usable. Ranks agree in evaluations, and in
        the steps in which they compare their batches; in other steps the others wait for a rank
        that refuses its batch until it is called again, or closed.
        """
        call = "step" if training else "evaluate"
        number, every = self._calls[training], self.check_batches
        loaded = self._tensors.loaded is not None
        every = 0 if self._updates.serving is not None else every  # data ranks run on their own
        compares = loaded or not number or (every > 0 and number % every == 0)
        tells = self.program.size > 1 and (compares or not training)
        try:
            batches = self._checked(batch, training)
        except InputError as error:
            if tells:
                self._watch.begin(call)
                self._gather_calls(WorkerCall(training, every))
            else:
                self._refused = f"rank {self.rank} refused its batch: InputError: {error}"
            raise
        self._refused = ""
        self._watch.begin(call)
        if tells:
            digest = digest_of_batch(batches) if compares else 0
            options = self._updates.options() if compares and training else {}
            combination = combined(options.items())
            calls = self._gather_calls(
                WorkerCall(training, every, len(batches), digest, combination)
            )
            text = difference_of_calls(self.program, calls)
            if not text:
                digests = [call.options for call in calls]
                with self._failing_together():
                    text = difference_of_options(self.program, digests, options, self._channels)
            if text:
                raise InputError(text)
        if loaded:
            with self._failing_together():
                weights = {n: self._tensors.unpadded(n) for n in self._tensors.loaded or ()}
                text = difference_of_weights(self.program, weights, self._channels)
            if text:
                raise InputError(text)
            self._tensors.loaded = None
        return batches

    def _gather_calls(self, call: WorkerCall) -> list[WorkerCall]:
        """The calls that all ranks are about to begin, by rank."""
        with self._failing_together():
            return [WorkerCall(*numbers) for numbers in self._channels.gather_numbers(*call)]

    def _checked(self, batch: object, training: bool) -> list[dict[str, torch.Tensor]]:
        """The micro-batches of a batch on this rank's device. Raises InputError for a batch that
        cannot be computed with."""
        with self._failing_together(but=InputError), self._in_groups():
            self._tensors.check_loaded()
            check_modes(self.device, training=training)
            batches = microbatches(self.program, batch, fewer=not training)
            batches = [
                {n: t.to(self.device, non_blocking=True) for n, t in each.items()}
                for each in batches
            ]
            if self.device.type == "cuda":
                self._copied = torch.cuda.current_stream(self.device).record_event()
            self._interpreter.check(batches)
            return batches

    @contextmanager
    def _in_groups(self) -> Iterator[None]:
        """In this context, layers find this rank's groups along the axes, and the data ranks; and
        torch's default dtype is float32, whatever the process has: emitted code names others."""
        with default_dtype(torch.float32), within(*self._channels.axes.values()):
            yield

    @contextmanager
    def _failing_together(
        self, call: str = "", but: type[Exception] | tuple[()] = ()
    ) -> Iterator[None]:
        """Context for work of all ranks: any exception on one rank, other than `but`, closes all.
        `call` names a collective call of the worker, which first waits for parameters that other
        ranks send.

        A rank that fails, or is interrupted, tells the others why and closes the connections that
        they wait on: a step that is half done cannot be continued.
        """
        self._check_open()
        self._watch.begin(call)
        try:
            if call:
                self._interpreter.arrive()
            yield
        except but:
            raise
        except Exception as error:
            known = self._explained(error)
            self._close(f"it failed: {known}")
            if known is error:
                raise
            raise known from error
        except BaseException as interruption:
            interrupted = f"interrupted by {type(interruption).__name__}"
            self._watch.fail(f"rank {self.rank} was {interrupted} {self.flight.place}")
            self._close(f"it was {interrupted}")
            raise
        finally:
            self._watch.end()

    def _explained(self, error: Exception) -> Exception:
        """The exception that this rank raises for `error`, after telling the other ranks."""
        stages: Mapping[int, Stage] = getattr(self, "_stages", {})
        return explain(error, self.rank, self.flight.place, stages.values(), self._watch)

    def _close(self, reason: str) -> None:
        """Close, unless that is done; the first reason is kept."""
        if self._closed:
            return
        self._closed = reason
        if hasattr(self, "_checkpoints") and reason != CLOSED:
            self._checkpoints.stop()
        serving = self._updates.serving if hasattr(self, "_updates") else None
        fault = ""
        if reason == CLOSED:
            self._watch.leave()
            fault = serving.finish() if serving is not None else ""
        else:
            self._channels.abort()
        self._channels.close()
        if serving is not None:
            atexit.unregister(serving.abandon)
        if self._owner and dist.is_initialized():
            dist.destroy_process_group()
        self._watch.close()
        if reason == CLOSED and self._watch.cause:
            message = f"rank {self.rank} was closed when the run had failed: {self._watch.cause}"
            raise LaunchError(message)
        if fault:
            raise LaunchError(fault)

    def _check_open(self) -> None:
        """Refuse calls of a closed worker."""
        if self._closed:
            message = f"this worker is closed, because {self._closed}: start all ranks again"
            raise LaunchError(message)

    def _check_synchronous(self) -> None:
        """Refuse programs that update parameters, and free gradients, within the step."""
        self._check_open()
        if self.program.asynchronous:
            message = "pipedream updates parameters inside the step: call train_step"
            raise InputError(message)


def _timedelta(timeout: timedelta | float) -> timedelta:
    """A timeout; a number is in seconds."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST:
        message = f"timeout must be above 0 and at most {LONGEST} s ({seconds!r} given)"
        raise InputError(message)
    return timedelta(seconds=seconds)
