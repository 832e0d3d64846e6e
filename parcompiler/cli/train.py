"""`train`: compile a model, make tokens of a text, and train on it, all ranks of this machine.

    text files ──► save/tokens.bin        MODEL ──► save/program/        main.py on every rank
    Ctrl-C ──► SIGTERM to the ranks ──► they save ──► the same command resumes

If the command is itself started as ranks (by torchrun, srun or a PyTorchJob), the first compiles
into the shared folder, the others wait until it says in the ranks' store that they can start, and
each runs its script in its own process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from parcompiler.cli import options, output, words
from parcompiler.cli.commands import MODEL_FORMS
from parcompiler.cli.output import DONE, INTERRUPTED, Settings
from parcompiler.cli.request import compiled, opened, source
from parcompiler.cli.words import HF
from parcompiler.errors import InputError, LaunchError, ParcompilerError

if TYPE_CHECKING:
    import torch.distributed as dist

    from parcompiler.mesh import Cluster, Mesh
    from parcompiler.runtime.checkpoint.folder import Checkpoint

PATIENCE = 1800.0  # s that ranks wait for the first one to compile
LAST_WORDS = 10.0  # s that the first one waits for ranks to read why it does not start
_START, _READ = "start", "read"  # keys in the store of a start
GRACE = 60.0  # s that ranks get to end after another has failed


@click.command("train", epilog=MODEL_FORMS, short_help="Train on a text, on this machine's ranks.")
@options.planning
@click.option(
    "--data", "data", type=options.PATH, required=True, multiple=True, metavar="PATH",
    help="Text files and folders of them, a data set that datasets saved, or a file of tokens.",
)  # fmt: skip
@click.option(
    "--tokenizer", type=options.PATH, metavar="FILE",
    help="A tokenizer.json. Default: that of the run, where it goes on; that beside an hf: "
    "configuration; else one is made of the text, for the model's vocabulary (or, without the "
    "package tokenizers, bytes are tokens).",
)  # fmt: skip
@click.option(
    "--save", type=options.PATH, required=True, metavar="DIR",
    help="The run's folder: tokens, scripts, checkpoints, metrics, weights.",
)  # fmt: skip
@click.option("--steps", type=options.COUNT, default=200, show_default=True, help="Steps in all.")
@click.option("--lr", type=options.AMOUNT, default=6e-4, show_default=True,
              help="Learning rate of AdamW.")  # fmt: skip
@click.option("--warmup", type=options.NUMBER, default=20, show_default=True,
              help="Steps in which the rate rises to --lr; then it falls to a tenth as a "
              "cosine.")  # fmt: skip
@click.option("--weight-decay", type=options.AMOUNT, default=0.1, show_default=True,
              help="Weight decay of AdamW, for matrices.")  # fmt: skip
@click.option("--max-norm", type=options.Real(min=0, min_open=True, finite=False), default=1.0,
              show_default=True, help="Norm that gradients are clipped to; inf: none.")  # fmt: skip
@click.option("--hold-out", type=options.Real(0, 1, max_open=True), default=0.05,
              show_default=True, help="Share of the rows kept for evaluations.")  # fmt: skip
@click.option("--evaluate-every", type=options.COUNT, default=50, show_default=True, metavar="N",
              help="Steps from one evaluation to the next; the end has one, too.")  # fmt: skip
@click.option("--every", type=options.COUNT, default=100, show_default=True, metavar="N",
              help="Steps from one checkpoint to the next.")  # fmt: skip
@click.option("--keep", type=options.COUNT, default=3, show_default=True, help="Checkpoints kept.")
@click.option("--log-every", type=options.COUNT, default=10, show_default=True, metavar="N",
              help="Steps from one line of metrics to the next.")  # fmt: skip
@click.option("--resume", type=words.RESUME, default="auto", show_default=True,
              help="What to go on from: auto is the newest checkpoint of the run's folder (or that "
              "of --checkpoint), if there is one; no begins again.")  # fmt: skip
@click.option("--tensorboard", is_flag=True, help="Write the metrics for TensorBoard, too.")
@click.option("--profile", metavar="FIRST-LAST",
              help="Write torch's profile of these steps beside the predicted trace.")  # fmt: skip
@click.option(
    "--pretrained", type=options.PATH, metavar="FOLDER",
    help="Published weights to begin from. Default: those that MODEL makes. A run that goes on has "
    "those of its checkpoint.",
)  # fmt: skip
@click.option("--seed", type=options.SEED, default=0, show_default=True,
              help="Seed of the model's first weights, the order of the data, and "
              "dropout.")  # fmt: skip
@options.remarks
@click.pass_obj
def train_command(
    settings: Settings, /, data: tuple[Path, ...], tokenizer: Path | None, save: Path, steps: int,
    lr: float, warmup: int, weight_decay: float, max_norm: float, hold_out: float,
    evaluate_every: int, every: int, keep: int, log_every: int, resume: str, tensorboard: bool,
    profile: str | None, pretrained: Path | None, seed: int, **request: Any,
) -> int:  # fmt: skip
    """Train MODEL on a text, with live metrics, checkpoints, and weights for from_pretrained.

    Ctrl-C saves and ends; the same line goes on from there. Metrics are in DIR/metrics.jsonl, the
    weights of the end in DIR/weights, and DIR/program is an export as `compile` writes it.

    \b
    parcompiler train hf:config.json --rows 4 --mesh pipeline=2 --data docs/ --save run/
    parcompiler train model.py:make --mesh data=4 --data corpus.txt --save run/ --steps 1000
    torchrun --nnodes 2 --nproc-per-node 8 -m parcompiler train ... (or srun, or a PyTorchJob)
    """
    output.check_folder(save / "program")
    origin_of = click.get_current_context().get_parameter_source
    if not hold_out and origin_of("evaluate_every") is ParameterSource.COMMANDLINE:
        message = "--evaluate-every needs rows to evaluate: give --hold-out SHARE above 0"
        raise InputError(message)
    program = save / "program"
    from parcompiler.runtime.joining import place, rendezvous
    from parcompiler.runtime.worker import TIMEOUT

    rank, size = place() or (0, 0)  # size 0: this process starts the ranks itself
    store = _of_start(rendezvous(TIMEOUT)) if size else None
    ranks = 0
    if rank == 0:
        import torch

        from parcompiler.cli import text
        from parcompiler.request import check_fits
        from parcompiler.runtime.checkpoint import pretrained as published
        from parcompiler.runtime.resuming import alone
        from parcompiler.runtime.training import profiled, split_rows

        with _refusing(store, size):
            # Refuse what can be refused before anything is compiled.
            text.check(data, tokenizer)
            profiled(profile, steps)
            if tensorboard and importlib.util.find_spec("tensorboard") is None:
                message = "--tensorboard needs the package tensorboard: pip install tensorboard"
                raise InputError(message)
            begun = _begun(save, resume, request["checkpoint"])
            if begun is not None and begun.step >= steps:
                done = f"{begun.path} has made all of {steps} steps: only the weights are written"
                output.note(done, settings.quiet)
            if pretrained is not None and begun is None:
                published.opened(pretrained)
            with output.writing(save):
                save.mkdir(parents=True, exist_ok=True)
            click.get_current_context().with_resource(alone(save))
            torch.manual_seed(seed)
            made = compiled(
                settings, real=pretrained is None and begun is None,
                check_place=lambda place: _check_place(place, size), **request,
            )  # fmt: skip
            if begun is not None:
                check_fits(made.problem.graph, begun)
            report, ranks = made.report(meshes=False), made.problem.mesh.size
            origin = source(request["model"], request["checkpoint"])
            model = origin["model"] or ""
            labels = "same" if model.startswith(HF) else "next"
            resumed = None if begun is None else begun.path
            with output.result_only(), output.writing(save):
                tokens = text.tokens_of(
                    data, tokenizer, model, save, made.rank_program(0), resumed, settings.quiet
                )
            split_rows(tokens, made.rank_program(0), labels, hold_out)
            with output.writing(program):
                weights = begun is None  # a checkpoint has all that the ranks need
                made.write(program, report, weights=weights and (pretrained or True), **origin)
            if profile is not None:
                (save / "profile").mkdir(exist_ok=True)
                report.to_trace(save / "profile" / "predicted.json")
            start = {"tokens": str(tokens), "labels": labels, "resumed": resumed and str(resumed)}
        if store is not None:
            store.set(_START, json.dumps(start))
    else:
        assert store is not None, "a process that is not rank 0 has been started with others"
        start = _awaited(store)
    arguments = [
        "--data", start["tokens"], "--labels", start["labels"], "--save", save, "--locked",
        "--steps", steps, "--lr", lr, "--warmup", warmup, "--decay", "cosine",
        "--weight-decay", weight_decay, "--max-norm", max_norm, "--every", every, "--keep", keep,
        "--log-every", log_every,
        "--metrics", save / "metrics.jsonl", "--seed", seed, "--publish", save / "weights",
    ]  # fmt: skip
    arguments += ["--resume", start["resumed"]] if start["resumed"] else []
    arguments += ["--hold-out", hold_out, "--evaluate-every", evaluate_every] if hold_out else []
    arguments += ["--tensorboard", save / "tensorboard"] if tensorboard else []
    arguments += ["--profile", profile] if profile else []
    line = [str(program / "main.py"), *map(str, arguments)]
    if size:
        sys.argv = line
        sys.path.insert(0, str(program))  # as Python does for a script
        runpy.run_path(line[0], run_name="__main__")
        code = DONE
    else:
        code = _ranks(line, ranks)
    tokenizer_file = save / "tokenizer.json"
    if code == DONE and rank == 0 and tokenizer_file.exists():
        with output.writing(save / "weights"):
            shutil.copy(tokenizer_file, save / "weights" / "tokenizer.json")
    return code


def _begun(save: Path, resume: str, checkpoint: Path | None) -> Checkpoint | None:
    """The checkpoint to go on from; None: begin with the model's weights. Raises InputError where
    the one that was asked for is not there, or the newest is damaged."""
    from parcompiler.runtime.checkpoint.folder import begun

    if resume == "no":
        return None
    if resume != "auto":
        return opened(Path(resume))
    if begun(save):
        return opened(save)
    return None if checkpoint is None else opened(checkpoint)


def _check_place(place: Mesh | Cluster, started: int) -> None:
    """Refuse a mesh that the `started` processes (0: none yet), or the devices here, are not
    enough for."""
    from parcompiler.mesh import Mesh
    from parcompiler.runtime.joining import rank_device

    if started and place.size != started:
        message = (
            f"the mesh has {place.size} ranks, and {started} processes were started: start "
            f"{place.size}, or give another --mesh"
        )
        raise InputError(message)
    devices = place.devices if isinstance(place, Mesh) else (place.hardware,)
    last = None if started else place.size - 1
    for name in {device.name for device in devices}:
        rank_device(name, last)


def _of_start(store: dist.Store) -> dist.Store:
    """The keys of this start: torchrun's static rendezvous keeps its store where it starts the
    ranks again (`--max-restarts`)."""
    import torch.distributed as dist

    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"parcompiler train {start}", store)


@contextmanager
def _refusing(store: dist.Store | None, size: int) -> Iterator[None]:
    """In this context rank 0 makes a run ready; where it cannot, it tells the `size` ranks that
    wait for it in `_awaited`, and does not end, and with it the store, before they know."""
    from parcompiler.runtime.failure import named

    try:
        yield
    except BaseException as error:
        if store is not None:
            text = str(error) if isinstance(error, ParcompilerError) else named(error)
            store.set(_START, json.dumps({"refused": text}))
            end = time.monotonic() + LAST_WORDS
            while store.add(_READ, 0) < size - 1 and time.monotonic() < end:
                time.sleep(0.1)
        raise


def _awaited(store: dist.Store) -> dict[str, Any]:
    """What rank 0 has made ready, once it has. Raises InputError where it refuses to, and
    LaunchError where it is gone, or takes too long."""
    import torch.distributed as dist

    end = time.monotonic() + PATIENCE
    try:
        while not store.check([_START]):
            if time.monotonic() > end:
                message = f"rank 0 has not compiled in {PATIENCE:g} s"
                raise LaunchError(message)
            time.sleep(0.2)
        start: dict[str, Any] = json.loads(store.get(_START))
        store.add(_READ, 1)
    except dist.DistError as error:
        message = "rank 0 has ended before it had compiled: see what it printed"
        raise LaunchError(message) from error
    if "refused" in start:
        message = f"rank 0 has refused to start: {start['refused']}"
        raise InputError(message)
    return start


def _ranks(line: Sequence[str], size: int) -> int:
    """Run a script as all ranks on this machine; Ctrl-C lets them save, a second one ends them.

    Ranks that still run GRACE seconds after one has failed are killed.
    """
    import torch.distributed as dist

    # This process serves the ranks' store, as torchrun's agent does: a free port found now could be
    # taken by another program before rank 0 has imported torch.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, *line], env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,  # Ctrl-C reaches this process, which signals them
        )
        for rank in range(size)
    ]  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM):  # both ask for a checkpoint
        signal.signal(number, signal.default_int_handler)
    try:
        code, codes = None, list[int | None]()
        while code is None:
            time.sleep(0.1)
            codes = [process.poll() for process in processes]
            code = DONE if set(codes) == {DONE} else next(filter(None, codes), None)
        if code < 0:  # by a signal; nobody else says so where it was the only rank
            killed = f"rank {codes.index(code)} was ended by {signal.strsignal(-code)!r}"
            click.echo(f"{killed} (signal {-code}): type the same line to go on", err=True)
            code = 128 - code  # as shells have it
        # The others notice and report by themselves, unless they have not yet connected.
        _wait(processes, GRACE)
        _signal(processes, signal.SIGKILL)
        _wait(processes, GRACE)
        return code
    except KeyboardInterrupt:
        click.echo("saving ... (Ctrl-C again ends at once)", err=True)
        _signal(processes, signal.SIGTERM)
        try:
            for process in processes:
                process.wait()
        except KeyboardInterrupt:
            _signal(processes, signal.SIGKILL)
        else:
            click.echo("type the same line to go on", err=True)
        return INTERRUPTED
    except BaseException:
        _signal(processes, signal.SIGKILL)
        raise


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until all processes have ended, at most `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(0.1)


def _signal(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    """Send a signal to processes that still run."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)
