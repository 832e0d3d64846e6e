"""A compilation from the command line: the options of `options.planning`, checked first."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from parcompiler.cli.output import Settings, result_only
from parcompiler.cli.words import AUTO, HF, ZERO
from parcompiler.errors import InputError, PlanError, offered

if TYPE_CHECKING:
    from parcompiler.mesh import Cluster, Mesh
    from parcompiler.plan import Plan
    from parcompiler.program import Program
    from parcompiler.request import Request
    from parcompiler.runtime.checkpoint.folder import Checkpoint


def compiled(
    settings: Settings,
    *,
    model: str | None,
    mesh: str | dict[str, int] | None,
    nodes: int | None,
    devices_per_node: int | None,
    device: str | None,
    pins: tuple[tuple[str, str], ...],
    plan_path: Path | None,
    checkpoint: Path | None,
    sequence: int | None,
    rows: int | None,
    schedule: str | None,
    average_every: int | None,
    real: bool = False,
    check_place: Callable[[Mesh | Cluster], None] = lambda _: None,
    **decisions: Any,
) -> Program:
    """The program. Raises what `compile` raises, and InputError for paths and models.

    Options that are not given are None; `decisions` are other arguments of `compile`. An hf: model
    has values if `real`. `check_place` may refuse the mesh or cluster. Invalid options are refused
    before the model is made, which may take longer than everything else.
    """
    if model is None and checkpoint is None:
        message = "Missing argument 'MODEL': see --help"
        raise InputError(message)
    _check_mesh(
        mesh, plan_path, {"--nodes": nodes, "--devices-per-node": devices_per_node,
        "--microbatch": decisions["microbatch"]},
    )  # fmt: skip
    from parcompiler.changes import read
    from parcompiler.cli.model import check, load, remarks_left_out
    from parcompiler.compiler import compile
    from parcompiler.cost import OPTIMIZERS
    from parcompiler.mesh import Cluster, Mesh
    from parcompiler.options import Options
    from parcompiler.progress import Progress
    from parcompiler.request import check_fits
    from parcompiler.schedules import Schedule

    saved = None if checkpoint is None else _saved(checkpoint)
    if model is not None:
        check(model, sequence, rows)
    elif saved is not None and saved.configuration is None:
        example = saved.model or "path/to/file.py:factory"
        message = (
            f"MODEL is missing: Python code made the model of {checkpoint}, and no code of a "
            f"checkpoint is run: give MODEL, as in parcompiler compile {example} --checkpoint "
            f"{checkpoint}"
        )
        raise InputError(message)
    plan = read(plan_path).plan if plan_path is not None else None
    if device is None and saved is not None and plan is None:
        device = _device_of(saved)
    place: Mesh | Cluster
    if isinstance(mesh, str):
        kind = _devices(device or "cpu")
        first = kind[0] if isinstance(kind, tuple) else kind
        each = devices_per_node or int(Mesh(device=first).hardware.devices_per_node)
        place = Cluster(nodes or 1, each, cast("Any", kind))  # refuses several
    else:
        place = _mesh(mesh, device, plan)
    is_file = schedule is not None and Path(schedule).suffix == ".csv"
    decisions["schedule"] = Schedule.from_csv(cast("str", schedule)) if is_file else schedule
    decisions["sharding"] = dict(pins) or None
    decisions["every"] = average_every  # `train` has an --every of its own
    if decisions["zero"] in ZERO[1:]:
        decisions["zero"] = int(decisions["zero"])
    arguments = {name: value for name, value in decisions.items() if value is not None}
    if plan is not None:
        arguments = {"precision": plan.precision, "optimizer": plan.optimizer, **arguments}
    elif saved is not None:
        arguments = {**saved.options_on(place), **arguments}
    if average_every is not None and arguments.get("updates") != "local":
        message = "--average-every is for --updates local: leave it out"
        raise InputError(message)
    fields = {name: value for name, value in arguments.items() if name != "microbatch"}
    options = Options(**{"microbatches": 1, **fields})
    offered("optimizer", options.optimizer, tuple(sorted(OPTIMIZERS)))
    check_place(place)
    progress = not settings.quiet
    with result_only(), remarks_left_out(model or HF):
        with Progress(progress) as steps, steps("model"):
            if saved is None or (model is not None and not model.startswith(HF)):
                name = cast("str", model)
                module, inputs, arguments["loss"] = load(name, sequence, rows, real=real)
            else:
                module, inputs = _configured(model, saved, sequence, rows, real=real)
        if saved is not None and plan is None and "microbatches" not in arguments:
            data = 1 if isinstance(place, Cluster) else place.data
            arguments["microbatches"] = saved.microbatches_for(_samples(inputs), data)
        try:
            program = compile(module, place, inputs, plan=plan, progress=progress, **arguments)
        except PlanError as error:
            if plan is not None:
                error.add_note(f"(the plan is that of {plan_path})")
            raise
    if checkpoint is not None:
        check_fits(program.problem.graph, opened(checkpoint))
    return program


def source(model: str | None, checkpoint: Path | None) -> dict[str, Any]:
    """The MODEL that an export keeps: from the command line, or from the checkpoint."""
    if model is None:
        assert checkpoint is not None, "compiled refuses neither"
        saved = _saved(checkpoint)
        return {"model": saved.model, "configuration": saved.configuration}
    if not model.startswith(HF):
        return {"model": model, "configuration": None}
    from parcompiler.cli.huggingface import read

    return {"model": model, "configuration": read(Path(model.removeprefix(HF)))}


def opened(folder: Path) -> Checkpoint:
    """The checkpoint of a folder."""
    from parcompiler.runtime.checkpoint import folder as folders

    return folders.read(folders.find(folder))


def _saved(folder: Path) -> Request:
    """The request of a checkpoint's program."""
    from parcompiler.request import Request

    return Request.saved(opened(folder))


def _device_of(saved: Request) -> str:
    """The device of a checkpoint's program, if it is in the catalogue."""
    from parcompiler.device import names

    if saved.device not in names():
        message = (
            "--device is missing: the run of the checkpoint was on "
            f"{saved.device or 'several devices'}, which is not a device of the catalogue"
        )
        raise InputError(message)
    return saved.device


def _configured(
    model: str | None, saved: Request, sequence: int | None, rows: int | None, *, real: bool
) -> tuple[Any, Any]:
    """The model of the given configuration, or else of the checkpoint's, with inputs of the sizes
    in the checkpoint's program."""
    from parcompiler.cli.huggingface import build

    path = Path((model or saved.model or "").removeprefix(HF))
    data = dict(saved.configuration or {}) if model is None else None
    shape = saved.inputs.get("input_ids", (None, [1, None]))[1]
    return build(path, sequence or shape[1], rows or shape[0], data=data, real=real)


def _samples(inputs: Any) -> int:
    """The samples of a micro-batch."""
    from parcompiler.capture.inputs import flat
    from parcompiler.runtime.program import Input, samples_of

    leaves = [(key, leaf) for key, leaf in flat(inputs) if hasattr(leaf, "shape")]
    return samples_of(Input(key, tuple(leaf.shape), leaf.dtype) for key, leaf in leaves)


def _check_mesh(
    mesh: str | dict[str, int] | None, plan_path: Path | None, for_clusters: dict[str, Any]
) -> None:
    """Refuse a missing mesh, options of a cluster beside a mesh, and an open mesh with a plan."""
    if mesh is None and plan_path is None:
        message = "--mesh is missing: the ranks along each axis, such as pipeline=4,tensor=2"
        raise InputError(message)
    for option, value in for_clusters.items():
        if value is not None and mesh != AUTO:
            message = f"{option} is for --mesh auto, which weighs all meshes of a cluster"
            raise InputError(message)
    if mesh == AUTO and plan_path is not None:
        message = "a plan is for one mesh: leave --mesh auto out, or --plan"
        raise InputError(message)


def _mesh(degrees: dict[str, int] | None, device: str | None, plan: Plan | None) -> Mesh:
    """The given mesh, completed from the plan."""
    from parcompiler.mesh import AXES, Mesh

    if degrees is None:
        assert plan is not None, "one of both is asked for"
        degrees = {axis: getattr(plan.mesh, axis) for axis in AXES}
    if device is None:
        known = "cpu" if plan is None else plan.mesh.device
        device = known if isinstance(known, str) else ",".join(known)
    return Mesh(**degrees, device=_devices(device))


def _devices(text: str) -> Any:
    """A device, or a comma-separated list with one for each pipeline coordinate: names of the
    catalogue, or JSON files."""
    from parcompiler.device import Device, names

    if "," in text and not os.path.isfile(text):
        return tuple(map(_devices, text.split(",")))
    path = Path(text)
    if text.lower() in names() or not (path.suffix == ".json" or os.path.isfile(text)):
        return text
    return Device.load(path)
