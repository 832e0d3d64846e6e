"""The training loop of emitted scripts: data, learning rate, evaluation, metrics, profile.

The learning rate is a function of the step alone, so that a resumed run continues it:

    step    0 ── W ───────── N
    rate    up to 1 │ down to a tenth, as a cosine or a line
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from parcompiler.errors import InputError
from parcompiler.runtime.files import request_of
from parcompiler.runtime.metrics import Metrics
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.resuming import Run, above_zero, amount, natural, path, positive
from parcompiler.runtime.samples import Samples
from parcompiler.runtime.tokens import LABELS, TokenRows, described
from parcompiler.runtime.worker import Worker

RATE = 1e-3  # learning rate of AdamW unless --lr says another
LEAST = 0.1  # share of the learning rate at the end of a decay
EVALUATED = 10  # batches of an evaluation unless --evaluate-steps says more


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a command line."""
    group = parser.add_argument_group("training")
    group.add_argument(
        "--lr", type=amount,
        help=f"learning rate of AdamW ({RATE}; a run that goes on: that of its checkpoint)",
    )  # fmt: skip
    group.add_argument(
        "--warmup", type=natural, default=0, help="steps in which the rate rises to --lr (0)"
    )
    group.add_argument(
        "--decay", choices=("none", "cosine", "linear"), default="none",
        help="how the rate falls to a tenth at the last step (none)",
    )  # fmt: skip
    group.add_argument(
        "--weight-decay", type=amount,
        help=(
             "weight decay of parameters with two dimensions or more; without it AdamW's own, for "
             "all, and in a run that goes on that of its checkpoint"
         ),
    )  # fmt: skip
    group.add_argument("--max-norm", type=above_zero, help="clip the gradients to this norm")
    group.add_argument(
        "--labels", choices=LABELS,
        help=(
             "labels of a file of tokens: next, the tokens that follow, or same, for models that "
             "shift them (next)"
         ),
    )  # fmt: skip
    group.add_argument(
        "--hold-out", type=amount, default=0.0, metavar="SHARE",
        help=(
             "share of the rows of a file of tokens that is kept for evaluations, at least for one "
             "after the last step (0)"
         ),
    )  # fmt: skip
    group.add_argument(
        "--evaluate-every", type=positive, metavar="N", help="evaluate after every N-th step, too"
    )
    group.add_argument(
        "--evaluate-steps", type=positive, help=f"batches of an evaluation ({EVALUATED})"
    )
    group.add_argument(
        "--log-every", type=positive, metavar="N",
        help="report loss, speed, MFU, memory and more after every N-th step, instead of each loss",
    )  # fmt: skip
    group.add_argument(
        "--metrics", type=path, metavar="FILE", help="write them as lines of JSON, too"
    )
    group.add_argument(
        "--tensorboard", type=path, metavar="DIR", help="write them for TensorBoard, too"
    )
    group.add_argument(
        "--profile", metavar="FIRST-LAST",
        help="write torch's profile of these steps of each rank into profile/ of --save, or here",
    )  # fmt: skip
    group.add_argument(
        "--publish", type=path, metavar="DIR",
        help="write the weights at the end, as from_pretrained of Hugging Face opens them",
    )  # fmt: skip


def check(options: argparse.Namespace) -> None:
    """Refuse options that no run can have, and data that are not there. Raises InputError."""
    profiled(options.profile, options.steps)
    for name in ("metrics", "tensorboard"):
        if getattr(options, name) is not None and options.log_every is None:
            message = f"--{name} needs --log-every N, the steps from one line to the next"
            raise InputError(message)
    if not options.hold_out < 1:
        message = f"--hold-out takes a share of the rows below 1 ({options.hold_out:g} given)"
        raise InputError(message)
    has_tokens = options.data is not None and options.data.suffix == ".bin"
    if options.labels is not None and not has_tokens:
        message = (
            "--labels is for a file of tokens: give --data FILE.bin with it "
            f"({options.data or 'no --data'} given)"
        )
        raise InputError(message)
    for name in ("evaluate_every", "evaluate_steps"):
        if getattr(options, name) is not None and not (has_tokens and options.hold_out):
            option = name.replace("_", "-")
            message = f"--{option} needs --data FILE.bin and --hold-out SHARE of its rows"
            raise InputError(message)
    if options.hold_out and not has_tokens:
        message = (
            "--hold-out is a share of the rows of a file of tokens: give --data FILE.bin with it "
            f"({options.data or 'no --data'} given)"
        )
        raise InputError(message)
    if options.data is not None and options.data.suffix == ".bin":
        described(options.data)
    elif options.data is not None and not options.data.is_file():
        reason = "it is a folder" if options.data.is_dir() else "there is no such file"
        message = f"cannot read {options.data} ({reason}): --data takes a file"
        raise InputError(message)


def rate_at(step: int, options: argparse.Namespace) -> float:
    """The factor of the learning rate in a step, counted from 0."""
    if step < options.warmup:
        return float((step + 1) / options.warmup)
    if options.decay == "none":
        return 1.0
    done = min(1.0, (step - options.warmup) / max(1, options.steps - options.warmup))
    curve = (1 + math.cos(math.pi * done)) / 2 if options.decay == "cosine" else 1 - done
    return LEAST + (1 - LEAST) * curve


def optimizer_of(worker: Worker, options: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW as the options say, fused on a GPU or where layers are compiled."""
    decay, fused = options.weight_decay, worker.device.type == "cuda" or worker.compiled
    more: dict[str, Any] = {"fused": True} if fused else {}
    if decay is not None:
        more |= {
            "weight_decay": 0.0,
            "groups": lambda _, p: {"weight_decay": decay} if p.dim() >= 2 else {},
        }
    return worker.set_optimizer(
        torch.optim.AdamW, max_norm=options.max_norm,
        lr=RATE if options.lr is None else options.lr,
        error_if_nonfinite=options.error_if_nonfinite, **more,
    )  # fmt: skip


class Training:
    """The steps of one worker from its step count to the last, with evaluations, metrics and
    checkpoints."""

    def __init__(self, worker: Worker, options: argparse.Namespace, checkpoints: Run) -> None:
        self._worker, self._options, self._checkpoints = worker, options, checkpoints
        self._profiled = profiled(options.profile, options.steps)
        self._optimizer = optimizer_of(worker, options)
        asked = [] if options.weight_decay is None else ["weight_decay"]
        asked += [] if options.lr is None else ["lr", "initial_lr"]
        groups = self._optimizer.param_groups
        for group in groups:
            group["initial_lr"] = group["lr"]  # before warm-up and decay: torch's name for it
        self._asked = [{name: group[name] for name in asked} for group in groups]
        self._metrics: Metrics | None = None
        if options.log_every is not None:
            self._metrics = Metrics(
                worker, options.log_every, options.metrics, options.tensorboard, options.steps
            )
        if options.publish is not None:
            worker.check_folder(options.publish)
        self.rows: TokenRows | None = None  # of a file of tokens, to train on
        self._held: TokenRows | None = None
        if options.data is not None and options.data.suffix == ".bin":
            self.rows, held = split_rows(
                options.data, worker.program, options.labels or LABELS[0], options.hold_out
            )
            self._held = held if options.hold_out else None

    def run(self, batches: Iterator[object]) -> None:
        """Train to the last step, and write metrics and profile as the options say."""
        worker, options, metrics = self._worker, self._options, self._metrics
        for group, asked in zip(self._optimizer.param_groups, self._asked, strict=True):
            group.update(asked)  # a checkpoint has set those that it was saved with
        if self._profiled and self._profiled[-1] <= worker.step_count and worker.rank == 0:
            print(f"no profile: steps {options.profile} were made before", flush=True)
        scheduled = options.warmup or options.decay != "none"
        profiler: Any = None
        with self._checkpoints.listening(), ExitStack() as profiling:
            for number in range(worker.step_count + 1, options.steps + 1):  # from 1, as in metrics
                share = rate_at(number - 1, options) if scheduled else 1.0
                for group in self._optimizer.param_groups if scheduled else ():
                    group["lr"] = group["initial_lr"] * share
                if number in self._profiled and profiler is None:
                    profiler = profiling.enter_context(torch.profiler.profile(acc_events=True))
                if metrics is not None:
                    metrics.before_step()
                loss = worker.train_step(next(batches))
                if profiler is not None and number == self._profiled[-1]:
                    profiling.close()
                    self._write_profile(profiler)
                if metrics is None and worker.rank == 0:
                    print(f"step {number} loss {loss.item():.8f}", flush=True)
                if metrics is not None:
                    metrics.after_step(loss, float(self._optimizer.param_groups[0]["lr"]))
                with nullcontext() if metrics is None else metrics.paused():
                    step, each = worker.step_count, options.evaluate_every or options.steps
                    if self._held is not None and (step == options.steps or step % each == 0):
                        self._evaluate(self._held)
                    self._checkpoints.after_step()
            self._checkpoints.end()
        if metrics is not None:
            metrics.close()
        if options.publish is not None:
            folder = worker.folder
            known = {} if folder is None else request_of(folder)
            worker.save_pretrained(options.publish, config=known.get("configuration"))
            if worker.rank == 0:
                print(f"weights: {options.publish}", flush=True)

    def _evaluate(self, held: TokenRows) -> None:
        """Report the mean loss of the held-out rows, or of the first of them."""
        worker, program = self._worker, self._worker.program
        each = program.samples * program.grid.batches
        count = min(program.microbatches, len(held) // each)
        samples, losses = count * program.samples, []
        for k in range(min(self._options.evaluate_steps or EVALUATED, len(held) // (count * each))):
            start = (k * program.grid.batches + worker.data_rank) * samples
            batch = program.in_form(held.batch(range(start, start + samples)))
            losses.append(worker.evaluate(batch))
        loss = float(torch.stack(losses).mean())
        if self._metrics is not None:
            self._metrics.tell(worker.step_count, {"evaluation_loss": loss})
        elif worker.rank == 0:
            print(f"step {worker.step_count} evaluation loss {loss:.8f}", flush=True)

    def _write_profile(self, profiler: Any) -> None:
        """Write torch's profile of this rank."""
        folder = (self._options.save or Path()) / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"rank_{self._worker.rank}.json"))
        if self._worker.rank == 0:
            print(f"profile: {folder}", flush=True)


def token_batches(worker: Worker, rows: TokenRows, options: argparse.Namespace) -> Iterator[object]:
    """This data rank's batches of `rows` of tokens from where training is, for ever."""
    for numbers in Samples(len(rows), worker, seed=options.seed):
        yield worker.program.in_form(rows.batch(numbers))


def split_rows(
    path: Path, program: RankProgram, labels: str, hold_out: float
) -> tuple[TokenRows, TokenRows]:
    """The rows of a file of tokens to train on, and those that are held out for evaluations.

    Raises InputError where a step takes more than there are, or an evaluation, where rows are held
    out.
    """
    end = 1 - hold_out
    trained, held = (TokenRows(path, program, labels, part) for part in ((0.0, end), (end, 1.0)))
    total = len(trained) + len(held)
    needed, each = program.samples_of_step, program.samples * program.grid.batches
    message = ""
    if total < needed:
        message = (
            f"{path} has {total:,} rows of {trained.length} tokens, and a step takes {needed:,}: "
            "give more text, or compile for fewer micro-batches"
        )
    elif len(trained) < needed:
        message = (
            f"--hold-out {hold_out:g} leaves {len(trained):,} of {total:,} rows to train on, and a "
            f"step takes {needed:,}: hold out less, or give more text"
        )
    elif hold_out and len(held) < each:
        message = (
            f"--hold-out {hold_out:g} leaves {len(held):,} of {total:,} rows for evaluations, and "
            f"one takes at least {each:,}: hold out more, or give more text"
        )
    if message:
        raise InputError(message)
    return trained, held


def profiled(text: str | None, steps: int) -> range:
    """The steps to profile, counted from 1, from a text such as 10-12, or 10. Raises InputError for
    others.

    >>> profiled("10-12", 20), profiled("10", 20), profiled(None, 20)
    (range(10, 13), range(10, 11), range(0, 0))
    """
    if text is None:
        return range(0)
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        message = f"--profile takes steps, such as 10-12 ({text!r} given)"
        raise InputError(message)
    numbers = range(int(first), int(last or first) + 1)
    if not numbers or not numbers[0] or numbers[-1] > steps:
        message = (
            f"--profile takes steps from 1 to {steps}, the first before the last ({text!r} given)"
        )
        raise InputError(message)
    return numbers
