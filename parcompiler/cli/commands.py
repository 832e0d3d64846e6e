"""The commands that take a model, those that read files of others, and `calibrate`."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from parcompiler import documents
from parcompiler.cli import options, output, words
from parcompiler.cli.output import DONE, FAULT, Settings
from parcompiler.cli.request import compiled as compiled_program
from parcompiler.cli.request import source
from parcompiler.errors import InputError

if TYPE_CHECKING:
    from parcompiler.device import Device
    from parcompiler.program import Program
    from parcompiler.report import Report
    from parcompiler.verification.comparison import Errors

MODEL_FORMS = """\
\b
MODEL is one of
  package.module:factory    factory() -> (model, inputs) or (model, inputs, loss): inputs
  path/to/file.py:factory   are ONE micro-batch, a dict of keyword arguments or a tuple of
                            positional ones; loss(outputs) where the model returns none
  hf:path/to/config.json    any configuration of transformers, built without weights"""


@click.command("plan", epilog=MODEL_FORMS, short_help="Decide how a model is divided.")
@options.planning
@options.pictures
@click.option(
    "--json", "file", type=options.PATH,
    help="Write the plan, to read, edit, compare (diff) and reuse (--plan).",
)  # fmt: skip
@click.option(
    "--forms", is_flag=True,
    help="Add FLOPs and bytes as formulas in sizes and degrees to all tables of the report.",
)  # fmt: skip
@options.common
@click.pass_obj
def plan_command(
    settings: Settings, /, html: Path | None, trace: Path | None, file: Path | None, forms: bool,
    details: bool, form: str, **request: Any,
) -> int:  # fmt: skip
    """Decide how a model is divided, and predict what its training takes.

    Prints what a step takes, what bounds it, what to try next and what every rank holds;
    with --details also alternatives, placements and messages. No devices are needed, and no
    process is started.

    \b
    parcompiler plan hf:config.json --mesh pipeline=4,tensor=2,data=2 --device h100
    parcompiler plan model.py:make --mesh pipeline=4 --schedule zb-h2 --microbatches 16
    parcompiler plan model.py:make --mesh pipeline=4 --json plan.json
    parcompiler plan model.py:make --plan plan.json --html report.html
    parcompiler plan model.py:make --mesh pipeline=4 --format json | jq .report.step
    """
    output.check_files(html, trace, file)
    output.check_page(html)
    program = compiled_program(settings, **request)
    from parcompiler.progress import Progress

    with output.result_only(), Progress(not settings.quiet) as steps, steps("report"):
        report = program.report(forms)
    _draw(report, html, trace, settings)
    if file is not None:
        from parcompiler.changes import written

        with output.writing(file):
            documents.write(file, written(program.plan, report))
        output.note(f"plan: {file}", settings.quiet)
    output.result(form, lambda: _text(report, details or forms), lambda: _document(program, report))
    return DONE


@click.command("compile", epilog=MODEL_FORMS, short_help="Write the scripts of all ranks.")
@options.planning
@click.option(
    "--export", "folder", type=options.PATH, required=True, metavar="FOLDER",
    help="Where the scripts go; an older export there is replaced.",
)  # fmt: skip
@click.option(
    "--weights/--no-weights", default=None,
    help="Whether the model's parameters are written beside the scripts. Default: if it has any.",
)  # fmt: skip
@click.option(
    "--pretrained", type=options.PATH, metavar="FOLDER",
    help="Published weights (of Hugging Face), which every rank loads its own of when it starts.",
)  # fmt: skip
@click.option(
    "--standalone", is_flag=True,
    help="Copy the runtime beside the scripts: the cluster needs torch only.",
)  # fmt: skip
@click.option(
    "--launcher", type=click.Choice(words.LAUNCHERS), default="torchrun", show_default=True,
    help="slurm adds an sbatch script, kubernetes a PyTorchJob of Kubeflow.",
)  # fmt: skip
@click.option(
    "--compiled", is_flag=True,
    help="Scripts run layers through torch.compile's compiler (main.py --no-compile: not).",
)  # fmt: skip
@options.common
@click.pass_obj
def compile_command(
    settings: Settings, /, folder: Path, weights: bool | None, pretrained: Path | None,
    standalone: bool, launcher: str, compiled: bool, form: str, **request: Any,
) -> int:  # fmt: skip
    """Write a folder with one readable script for each rank, which torchrun starts.

    \b
    parcompiler compile model.py:make --mesh pipeline=2,tensor=2 --export out/
    torchrun --nproc-per-node 4 out/main.py

    \b
    parcompiler compile hf:config.json --plan plan.json --export out/ --standalone
    parcompiler compile model.py:make --mesh pipeline=4,data=8 --device h100 --export out/ \\
        --launcher slurm

    \b
    parcompiler compile model.py:make --checkpoint run/ --mesh data=6 --export out6/
    parcompiler compile hf:config.json --pretrained weights/ --mesh tensor=8 --export out/
    """
    output.check_folder(folder)
    model, checkpoint = request["model"] or "", request["checkpoint"]
    if pretrained is not None:
        from parcompiler.runtime.checkpoint.pretrained import opened

        opened(pretrained)
    elif weights and model.startswith(words.HF):
        message = f"an hf: model has no weights to write: {_without_weights(model, meta=True)}"
        raise InputError(message)
    from parcompiler.program import check_launcher

    program = compiled_program(
        settings, check_place=lambda place: check_launcher(launcher, place), **request
    )
    report = program.report()
    meta = any(tensor.is_meta for tensor in program.problem.graph.tensors.values())
    stored = pretrained is not None or checkpoint is not None
    advice = _without_weights(model, meta=meta)
    if weights and meta and pretrained is None:
        message = f"the model has no weights to write (meta device): {advice}"
        raise InputError(message)
    if weights is None:
        weights = not meta and checkpoint is None
        if not weights and pretrained is None:
            reason = "the checkpoint has them"
            if checkpoint is None:
                reason = "the model has none (meta device)"
            output.note(f"no weights are written: {reason}", settings.quiet)
    with output.writing(folder):
        path = program.write(
            folder, report, weights=pretrained or weights, standalone=standalone,
            launcher=launcher, compiled=compiled, **source(request["model"], checkpoint),
        )  # fmt: skip
    ranks = program.problem.mesh.size
    resumed = "" if checkpoint is None else f" --resume {shlex.quote(str(checkpoint.absolute()))}"
    started = f"{_started(launcher, path, ranks)}{resumed}"
    if not (weights or stored):
        started = f"it has no weights to begin with: {advice}; or start it with --resume CHECKPOINT"
    text = (
        f"{path}: the scripts of {ranks} ranks, explained in {path / 'README.md'}\n"
        f"  {started}\n"
        f"  parcompiler report {shlex.quote(str(path))}"
    )
    places = {"folder": str(path), "ranks": ranks}
    output.result(form, lambda: text, lambda: _document(program, report) | places)
    return DONE


@click.command("verify", epilog=MODEL_FORMS, short_help="Prove that it trains the model.")
@options.planning
@click.option(
    "--seed", type=options.SEED, default=0, show_default=True,
    help="Seed of the random batch, and of the weights where the model has none.",
)  # fmt: skip
@click.option(
    "--compiled", is_flag=True, help="Prove it with layers through torch.compile's compiler."
)
@click.option(
    "--full", is_flag=True, help="Compare a large step in float64 at its full sizes, too."
)
@click.option(
    "--on", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
    help="What the ranks run on; they share GPUs where there are fewer.",
)  # fmt: skip
@options.common
@click.pass_obj
def verify_command(
    settings: Settings, /, seed: int, compiled: bool, full: bool, on: str, form: str, **request: Any
) -> int:
    """Prove that the program trains exactly the model.

    Runs every rank as a process on this machine, and the model itself beside them, on the same
    random batch; compares the loss, all gradients, and the parameters after a step. The
    model must fit into this machine's memory, twice. The exit code is 1 when they differ.

    \b
    parcompiler verify model.py:make --mesh pipeline=2,tensor=2
    parcompiler verify model.py:make --plan plan.json
    """
    from parcompiler.verification.check import check_device

    check_device(on)
    program = compiled_program(settings, **request)
    with output.result_only():
        shown = not settings.quiet
        verification = program.verify(seed, shown, compiled, full, device=on)
    comparisons = {
        "ok": verification.ok,
        "native": _errors(verification.native),
        "float64": verification.lifted and _errors(verification.lifted),
        "note": verification.note,
    }
    output.result(form, lambda: str(verification), lambda: comparisons)
    return DONE if verification.ok else FAULT


@click.command("diff", short_help="Say how two plans differ.")
@click.argument("before", type=options.PATH)
@click.argument("after", type=options.PATH)
@options.common
def diff_command(before: Path, after: Path, form: str) -> int:
    """Say in words how two plans differ, and what that does to time and memory.

    BEFORE and AFTER are files of `plan --json` or `plan --format json`, or exported folders.

    \b
    parcompiler plan model.py:make --mesh pipeline=4 --json a.json
    parcompiler plan model.py:make --mesh pipeline=4 --recompute full --json b.json
    parcompiler diff a.json b.json
    """
    from parcompiler.changes import Comparison, read

    comparison = Comparison.of(read(before), read(after))
    output.result(form, lambda: str(comparison), comparison.data)
    return DONE


@click.command("report", short_help="Show the report of an exported folder.")
@click.argument("folder", type=options.PATH)
@options.pictures
@options.common
@click.pass_obj
def report_command(
    settings: Settings,
    /,
    folder: Path,
    html: Path | None,
    trace: Path | None,
    details: bool,
    form: str,
) -> int:
    """Show the report of an exported FOLDER again; the model is not needed.

    \b
    parcompiler report out/
    parcompiler report out/ --html report.html --trace step.trace.json
    """
    from parcompiler.loaded import load

    output.check_files(html, trace)
    output.check_page(html)
    report = load(folder).report()
    _draw(report, html, trace, settings)
    output.result(form, lambda: _text(report, details), lambda: json.loads(report.to_json()))
    return DONE


@click.command("calibrate", short_help="Measure this machine, as a device for plans.")
@click.option(
    "--output", "path", type=options.PATH, required=True, metavar="FILE",
    help="The device file, for --device FILE and pc.Mesh(device=FILE). What is measured is kept "
    "beside it at once, in FILE.measurements.jsonl.",
)  # fmt: skip
@click.option(
    "--like", type=words.DEVICE,
    help="The device whose figures stand for what is not measured, such as links where one "
    "process runs. Default: the device of the catalogue that this is.",
)  # fmt: skip
@click.option(
    "--name", metavar="NAME", help="The device's name. Default: that of the device it is, measured."
)
@click.option(
    "--dtypes", type=words.NAMES,
    help="Dtypes to measure, such as float32,bfloat16. Default: all that the device is made for.",
)  # fmt: skip
@click.option(
    "--threads", type=click.IntRange(1, 4096), default=1, show_default=True, metavar="N",
    help="Threads of a rank on a CPU.",
)  # fmt: skip
@click.option(
    "--seconds", type=options.Real(min=0, max=600, min_open=True), default=0.2,
    show_default=True, metavar="S", help="About how long each measurement takes.",
)  # fmt: skip
@click.option(
    "--sizes", type=options.COUNT, metavar="N",
    help="Measure only the N smallest sizes of each kind. Default: all that are quick enough.",
)  # fmt: skip
@click.option("--fresh", is_flag=True, help="Forget what was measured before; measure all anew.")
@options.common
@click.pass_obj
def calibrate_command(
    settings: Settings, /, path: Path, like: str | None, name: str | None,
    dtypes: tuple[str, ...] | None, threads: int, seconds: float, sizes: int | None, fresh: bool,
    form: str,
) -> int:  # fmt: skip
    """Measure this machine, and write what it can do as a device file.

    Matrix products, attention, convolutions, copies and small operators, by size and dtype; some
    minutes. Interrupted, it keeps what it has measured, and the same command goes on from there.
    Started by torchrun or srun, it measures messages and collectives between the processes too.

    \b
    parcompiler calibrate --output mine.json
    parcompiler plan model.py:make --mesh pipeline=4 --device mine.json

    \b
    torchrun --nproc-per-node 8 -m parcompiler calibrate --output mine.json
    """
    from parcompiler.calibrate import calibrate
    from parcompiler.runtime import place

    if (place() or (0, 1))[0] == 0:  # only rank 0 writes
        output.check_files(path)

    with output.result_only():
        device = calibrate(
            path, name=name, like=like, dtypes=dtypes, threads=threads, seconds=seconds,
            sizes=sizes, fresh=fresh, progress=not settings.quiet,
        )  # fmt: skip
    if device is None:  # not rank 0, which prints the result
        return DONE
    text = f"{_summary(device)}\n\n{path}: take it with --device {path}, or pc.Mesh("
    text += f"device={str(path)!r})"
    output.result(form, lambda: text, lambda: json.loads(device.to_json()))
    return DONE


def _draw(report: Report, html: Path | None, trace: Path | None, settings: Settings) -> None:
    """Write the report as a page and as a trace, if asked for."""
    for path, draw in ((html, report.to_html), (trace, report.to_trace)):
        if path is not None:
            with output.writing(path):
                draw(path)
            output.note(f"{'report' if path is html else 'trace'}: {path}", settings.quiet)


def _text(report: Report, details: bool) -> str:
    """The report for standard output: one screen, or all tables."""
    from parcompiler.report import render

    return render.for_stdout(report, details=details)


def _document(program: Program, report: Report) -> dict[str, Any]:
    """Plan and report as JSON data; `diff` reads it too."""
    return {"plan": json.loads(program.plan.to_json()), "report": json.loads(report.to_json())}


def _started(launcher: str, path: Path, ranks: int) -> str:
    """The command that starts the program; paths may have blanks."""
    folder = shlex.quote(str(path))
    return {
        "torchrun": f"torchrun --nproc-per-node {ranks} {shlex.quote(str(path / 'main.py'))}",
        "slurm": f"cd {folder} && sbatch submit.sbatch",
        "kubernetes": f"kubectl create --filename {shlex.quote(str(path / 'pytorchjob.yaml'))}",
    }[launcher]


def _without_weights(model: str, *, meta: bool) -> str:
    """Advice for compiling a model so that its ranks have initial weights."""
    other = "--weights"
    if meta:
        other = "have the factory make the model on the CPU"
    if meta and model.startswith(words.HF):
        other = "train from scratch by 'parcompiler train', which makes weights"
    return f"compile with --pretrained FOLDER, or {other}"


def _errors(errors: Errors) -> dict[str, Any]:
    """One comparison as JSON data; an infinite error, explained by `cause`, is null."""
    figures = {**dataclasses.asdict(errors), "ok": errors.ok}
    return {name: None if value == math.inf else value for name, value in figures.items()}


def _summary(device: Device) -> str:
    """The figures of a device, each with its source."""
    from parcompiler.report.units import BYTES, FLOPS, SECONDS, quantity, rate

    rows = [
        (f"peak, {name}", f"{quantity(peak, FLOPS)}FLOP/s", f"flops.{name}")
        for name, peak in device.flops
    ]
    rows += [
        ("memory", quantity(device.memory, BYTES), "memory"),
        ("memory bandwidth", f"{rate(device.memory_bandwidth / 1e9)} GB/s", "memory_bandwidth"),
        ("launch of a kernel", quantity(device.launch_overhead, SECONDS), "launch_overhead"),
    ]
    links = {"link": device.link, "network": device.network}
    links |= {"host": device.host} if device.host else {}
    for place, link in links.items():
        bandwidth = f"{rate(link.bandwidth / 1e9)} GB/s"
        rows.append((f"{place}, bandwidth", bandwidth, f"{place}.bandwidth"))
        rows.append((f"{place}, latency", quantity(link.latency, SECONDS), f"{place}.latency"))
    if device.host_memory is not None:
        rows.append(("memory of a node", quantity(device.host_memory, BYTES), "host_memory"))
    sources = dict(device.sources)
    lines = (
        f"  {name:20}{value:>16}  {_origin(sources.get(figure, ''))}".rstrip()
        for name, value, figure in rows
    )
    return "\n".join([device.name, *lines])


def _origin(source: str) -> str:
    """A source in short; the file has the full text.

    >>> _origin("measured on one core: the longest copy"), _origin("not measured, as cpu: chosen")
    ('measured', 'not measured, as cpu')
    """
    return "measured" if source.startswith("measured ") else source.partition(":")[0]
