"""Requests: an export and its checkpoints keep what was asked of the compiler, for another mesh.

    {"model": "model.py:make", "configuration": null, "inputs": {"tokens": ["int64", [2, 64]]},
     "samples": 2, "microbatches": 8, "data": 4, "device": "h100", "options": {"precision": "bf16"}}

It names the Python function that makes the model, but does not contain it: nothing of a checkpoint
is ever run. A configuration of transformers is data, and is kept. Options that fit only one mesh
(block counts of stages, a schedule written by hand) are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parcompiler.errors import InputError
from parcompiler.mesh import Cluster, Mesh
from parcompiler.options import Options
from parcompiler.runtime.checkpoint import pretrained as published
from parcompiler.runtime.checkpoint.folder import Checkpoint
from parcompiler.runtime.program import Input, samples_of

if TYPE_CHECKING:
    from parcompiler.graph import Graph
    from parcompiler.plan import Plan
    from parcompiler.problem import Problem

_OF_A_MESH = ("microbatches", "stages", "schedule")  # fit only one mesh unless they are words


@dataclass(frozen=True)
class Request:
    """A request: `samples` of a micro-batch, `microbatches` of each of the `data` ranks, `options`
    for other arguments of `compile` that are not the defaults. `weights` are published weights that
    the ranks load when they start."""

    samples: int
    microbatches: int
    data: int
    device: str | None = None  # None: several
    inputs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None  # MODEL of the command line
    configuration: Mapping[str, Any] | None = None
    weights: str | None = None

    @classmethod
    def of(cls, problem: Problem, plan: Plan) -> Request:
        """The request of a program, from its problem and plan."""
        specs = problem.graph.inputs
        inputs = {s.key: [str(s.dtype).removeprefix("torch."), list(s.shape)] for s in specs}
        samples = samples_of(Input(s.key, tuple(s.shape), s.dtype) for s in specs)
        devices = set(plan.mesh.devices)
        return cls(
            samples, plan.microbatches, plan.mesh.data,
            devices.pop() if len(devices) == 1 else None, inputs, _options(problem.options),
        )  # fmt: skip

    @classmethod
    def saved(cls, checkpoint: Checkpoint) -> Request:
        """The request of the program that saved a checkpoint. Raises InputError if the checkpoint
        has none, or is damaged."""
        data = checkpoint.facts.get("request")
        names = {item.name for item in dataclasses.fields(cls)}
        if not isinstance(data, dict) or not data.keys() <= names:
            message = f"{checkpoint.path} does not say what its program was compiled from"
            raise InputError(message)
        kinds = {"samples": int, "microbatches": int, "inputs": dict, "options": dict}
        wrong = [name for name, kind in kinds.items() if not isinstance(data.get(name), kind)]
        if wrong:
            message = f"{checkpoint.path} is damaged: its request has no {wrong[0]}"
            raise InputError(message)
        unknown = data["options"].keys() - {item.name for item in dataclasses.fields(Options)}
        if unknown:
            message = f"{checkpoint.path} is damaged: {unknown.pop()!r} is no option of compile"
            raise InputError(message)
        batches = checkpoint.facts["mesh"][1] // checkpoint.facts.get("context", 1)
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in data["options"].items()}
        return cls(**{**data, "options": options, "data": batches})

    def options_on(self, mesh: Mesh | Cluster) -> dict[str, Any]:
        """The options for another mesh: without `zero` where there can be only one data rank, which
        `compile` refuses."""
        alone = (mesh.replicas if isinstance(mesh, Mesh) else mesh.size) == 1
        return {
            name: value for name, value in self.options.items() if not (alone and name == "zero")
        }

    def microbatches_for(self, samples: int, data: int) -> int:
        """The number of micro-batches of `samples` samples on each of `data` data ranks that make a
        step of the same size. Raises InputError if there is none."""
        total = self.samples * self.microbatches * self.data
        count, rest = divmod(total, samples * data)
        if rest or not count:
            message = (
                f"a step takes {total} samples, which {data} data ranks cannot share in "
                f"micro-batches of {samples}: take another number of data ranks, or give "
                "--microbatches, which changes the samples of a step from here on"
            )
            raise InputError(message)
        return count

    def to_data(self) -> dict[str, Any]:
        """The request as JSON data."""
        return dataclasses.asdict(self)


def check_fits(graph: Graph, checkpoint: Checkpoint) -> None:
    """Raise InputError unless a checkpoint has the tensors of this model, and no others."""
    stored = {
        name.partition("/")[2]: entry.shape
        for name, entry in checkpoint.entries.items()
        if name.startswith(("model/", "unsaved/"))
    }
    whole = graph.undivided or graph  # experts in pieces are whole in files
    shapes = {item.name: tuple(item.shape) for item in whole.parameters}
    for name in sorted(shapes.keys() | stored.keys()):
        if shapes.get(name) != stored.get(name):
            there, here = (
                f"has the shape {known[name]}" if name in known else "is missing"
                for known in (stored, shapes)
            )
            message = (
                f"{checkpoint.path} is of another model: {name!r} {there} there, and {here} here"
            )
            raise InputError(message)


def _options(options: Options) -> dict[str, Any]:
    """The options that are not the defaults, without those that fit only one mesh."""
    default = Options(1)
    changed = {}
    for item in dataclasses.fields(options):
        value = getattr(options, item.name)
        of_mesh = item.name in _OF_A_MESH and not isinstance(value, str)
        if value != getattr(default, item.name) and not of_mesh:
            changed[item.name] = value
    return changed


def check_published(graph: Graph, folder: Path) -> None:
    """Raise InputError unless a folder has published weights for this model: all tensors of its
    state dict, and no others."""
    source, parameters = published.opened(folder), (graph.undivided or graph).parameters
    names = {name for item in parameters for name in (item.name, *item.aliases)}
    mapping = published.renamed(source.files, names)
    stored = published.grouped(mapping)
    try:
        for item in parameters:
            aliases = (item.name, *item.aliases)
            tensor = next((stored[name] for name in aliases if name in stored), None)
            if tensor is not None:
                published.boxes(source, mapping, tensor, item.shape)
            elif not {*aliases} <= {*item.unsaved}:
                message = f"there is no {item.name!r}"
                raise InputError(message)
        unknown = [keys[0] for name, keys in stored.items() if name not in names]
        if unknown:
            message = f"the model has no {unknown[0]!r}"
            raise InputError(message)
    except InputError as error:
        message = f"{folder} does not have the weights of this model: {error}"
        raise InputError(message) from None
