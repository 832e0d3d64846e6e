"""`checkpoint`: shows and checks a saved run, and exports its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from parcompiler.cli import options, output
from parcompiler.cli.output import DONE, FAULT
from parcompiler.cli.request import opened

if TYPE_CHECKING:
    from parcompiler.runtime.checkpoint.folder import Checkpoint

FOLDER = """\
\b
FOLDER is a checkpoint (step_00000010), or the folder that --save or worker.save
was given: its newest complete checkpoint is taken."""


@click.group("checkpoint", short_help="Show, check and export checkpoints.")
def checkpoint_command() -> None:
    """Show what a checkpoint holds, check its files, or export its weights.

    \b
    parcompiler checkpoint show run/
    parcompiler checkpoint check run/step_00000100
    parcompiler checkpoint export run/ --output weights/
    """


@checkpoint_command.command("show", epilog=FOLDER, short_help="Show what a checkpoint holds.")
@click.argument("folder", type=options.PATH)
@click.option("--tensors", is_flag=True, help="List every tensor, too.")
@options.common
def show_command(folder: Path, tensors: bool, form: str) -> int:
    """Show the step, the mesh that saved it, the optimizer, and what tensors take."""
    checkpoint = opened(folder)
    facts = _facts(checkpoint)
    if tensors:
        facts["tensors"] = [
            {
                "name": name,
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": list(entry.shape),
                "pieces": len(entry.pieces),
            }
            for name, entry in checkpoint.entries.items()
        ]
    output.result(form, lambda: _text(facts), lambda: facts)
    return DONE


@checkpoint_command.command("check", epilog=FOLDER, short_help="Check the files of a checkpoint.")
@click.argument("folder", type=options.PATH)
@options.common
def check_command(folder: Path, form: str) -> int:
    """Compare every file with its checksum, and see that every tensor is whole.

    The exit code is 1 when something is damaged or missing.
    """
    from parcompiler.errors import InputError
    from parcompiler.runtime.checkpoint import folder as folders

    path = folders.find(folder)
    faults = folders.damaged(path)
    if not faults:
        try:
            faults = folders.read(path).gaps()
        except InputError as error:
            faults = [str(error)]
    output.result(
        form,
        lambda: "\n".join(faults) or f"{path}: every file is as it was written",
        lambda: {"path": str(path), "ok": not faults, "faults": faults},
    )
    return FAULT if faults else DONE


@checkpoint_command.command("export", epilog=FOLDER, short_help="Write its weights for others.")
@click.argument("folder", type=options.PATH)
@click.option(
    "--output", "target", type=options.PATH, required=True, metavar="FOLDER",
    help="Where model.safetensors, or shards and their index, go.",
)  # fmt: skip
@click.option("--config", type=options.PATH, help="The config.json that stands beside them.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16", "float64"]),
    help="Of the weights. Default: as they were saved.",
)  # fmt: skip
@options.common
def export_command(
    folder: Path, target: Path, config: Path | None, dtype: str | None, form: str
) -> int:
    """Write the weights as `from_pretrained` of Hugging Face opens them, one tensor in memory at a
    time."""
    import torch

    from parcompiler.errors import InputError
    from parcompiler.runtime.checkpoint import folder as folders
    from parcompiler.runtime.checkpoint import pretrained

    checkpoint = opened(folder)
    configuration = pretrained.configuration(config)
    faults = folders.damaged(checkpoint.path)
    if faults:
        raise InputError("\n".join(faults))
    kind = None if dtype is None else getattr(torch, dtype)
    shards = pretrained.PublishedFiles.of(checkpoint, pretrained.SHARD_SIZE, kind)
    if target.exists() and not target.is_dir():
        message = f"cannot write weights into {target}: it is not a folder"
        raise InputError(message)
    with output.writing(target):
        target.mkdir(parents=True, exist_ok=True)
        shards.write(target)
        shards.publish(target, configuration)
    names = sorted(shards.files)
    output.result(
        form,
        lambda: f"{target}: weights of step {checkpoint.step} in {', '.join(names)}",
        lambda: {"folder": str(target), "files": names},
    )
    return DONE


def _text(facts: dict[str, Any]) -> str:
    """Facts as text: one a line, and then tensors."""
    lines = []
    for name, value in facts.items():
        if name != "tensors":
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            lines.append(f"{name.replace('_', ' '):<18}{shown}")
    for row in facts.get("tensors", ()):
        shape = " × ".join(map(str, row["shape"])) or "scalar"
        pieces = f", {row['pieces']} pieces" if row["pieces"] > 1 else ""
        lines.append(f"  {row['name']}: {row['dtype']} {shape}{pieces}")
    return "\n".join(lines)


def _request(checkpoint: Checkpoint) -> dict[str, Any]:
    """The request that its program was compiled from; empty if the checkpoint has none."""
    from parcompiler.errors import InputError
    from parcompiler.request import Request

    try:
        saved = Request.saved(checkpoint)
    except InputError:
        return {}
    options = ", ".join(f"{name}={value}" for name, value in sorted(saved.options.items()))
    return {
        "model": saved.model or "not said",
        "options": options or "the defaults",
        "batch": f"{saved.microbatches} micro-batches of {saved.samples} samples",
    }


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """The main facts of a checkpoint."""
    kinds = {"model": "parameter_bytes", "unsaved": "parameter_bytes"}
    totals = {"parameter_bytes": 0, "optimizer_bytes": 0, "other_bytes": 0}
    for name, entry in checkpoint.entries.items():
        head = name.partition("/")[0].partition(" ")[0]
        kind = kinds.get(head, "optimizer_bytes" if head == "optimizer" else "other_bytes")
        totals[kind] += entry.bytes
    pipeline, replicas, tensor = checkpoint.facts["mesh"]
    context = checkpoint.facts.get("context", 1)
    data = f"data={replicas // context}" + (f", context={context}" if context > 1 else "")
    optimizer = checkpoint.facts.get("optimizer")
    return {
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "mesh": f"pipeline={pipeline}, {data}, tensor={tensor}",
        "optimizer": "none" if optimizer is None else optimizer["kind"],
        "samples": checkpoint.facts["samples"],
        **_request(checkpoint),
        "extra": sorted(checkpoint.facts["extra"]) or ["nothing"],
        **totals,
    }
