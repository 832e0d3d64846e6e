"""What was asked of `plan`, `compile` and `verify`: checked first, then compiled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from parcompiler.cli.faults import Settings
from parcompiler.cli.output import result_only
from parcompiler.cli.words import AUTO
from parcompiler.errors import InputError, PlanError

if TYPE_CHECKING:
    from parcompiler.mesh import Cluster, Mesh
    from parcompiler.plan import Plan
    from parcompiler.program import Program
    from parcompiler.schedules import Schedule


@dataclass(frozen=True, slots=True)
class Request:
    """The options of `options.planning`; None where nothing was typed."""

    model: str
    mesh: str | dict[str, int] | None
    nodes: int | None
    devices_per_node: int | None
    device: str | None
    microbatches: int | None
    microbatch: str | tuple[int, ...] | None
    schedule: str | None
    virtual_stages: int | None
    vocabulary: str | None
    stages: str | tuple[int, ...] | None
    recompute: str | dict[str, bool] | None
    shard: tuple[tuple[str, str], ...]
    precision: str | None
    costs: str | None
    optimizer: str | None
    given: Path | None
    sequence: int | None
    rows: int | None

    def compiled(self, settings: Settings) -> Program:
        """The program. Raises what `compile` raises, and InputError for paths and models.

        What is wrong with an option by itself is found before the model is made, which may take
        longer than all that follows.
        """
        if self.mesh is None and self.given is None:
            message = "--mesh is missing: the ranks along each axis, such as pipeline=4,tensor=2"
            raise InputError(message)
        self._check_cluster()
        from parcompiler.changes import read
        from parcompiler.cli.model import Sizes, check, load, remarks_left_out
        from parcompiler.compiler import compile
        from parcompiler.cost import OPTIMIZERS
        from parcompiler.options import Options, offered
        from parcompiler.progress import Progress

        check(self.model, sizes := Sizes(self.sequence, self.rows))
        plan = read(self.given).plan if self.given is not None else None
        mesh = self._place(plan)
        options = self._options(plan)
        own = {name: value for name, value in options.items() if name != "microbatch"}
        chosen = Options(**{"microbatches": 1, **own})
        offered("optimizer", chosen.optimizer, tuple(sorted(OPTIMIZERS)))
        progress = not settings.quiet
        with result_only(), remarks_left_out(self.model):
            with Progress(progress) as steps, steps("model"):
                model, inputs = load(self.model, sizes)
            with _named(self.given):
                return compile(model, mesh, inputs, plan=plan, progress=progress, **options)

    def _check_cluster(self) -> None:
        """Refuse what is for a cluster beside a mesh, and an open mesh beside a plan."""
        sizes = {
            "--nodes": self.nodes,
            "--devices-per-node": self.devices_per_node,
            "--microbatch": self.microbatch,
        }
        for option, value in sizes.items():
            if value is not None and self.mesh != AUTO:
                message = f"{option} is for --mesh auto, which weighs all meshes of a cluster"
                raise InputError(message)
        if self.mesh == AUTO and self.given is not None:
            message = "--plan has its mesh: leave --mesh auto out"
            raise InputError(message)

    def _place(self, plan: Plan | None) -> Mesh | Cluster:
        """The mesh that was typed or is the plan's, or the cluster whose meshes are weighed."""
        from parcompiler.mesh import Cluster, Mesh

        if not isinstance(self.mesh, str):
            return _mesh(self.mesh, self.device, plan)
        device = _devices(self.device or "cpu")
        first = device[0] if isinstance(device, tuple) else device
        each = self.devices_per_node or int(Mesh(device=first).hardware.devices_per_node)
        return Cluster(self.nodes or 1, each, cast("Any", device))  # it refuses several

    def _options(self, plan: Plan | None) -> dict[str, Any]:
        """The arguments of `compile` that were typed, or that the plan that is given demands."""
        typed = {
            "microbatches": self.microbatches,
            "microbatch": self.microbatch,
            "schedule": _schedule(self.schedule),
            "virtual_stages": self.virtual_stages,
            "vocabulary": self.vocabulary,
            "stages": self.stages,
            "recompute": self.recompute,
            "sharding": dict(self.shard) or None,
            "precision": self.precision,
            "costs": self.costs,
            "optimizer": self.optimizer,
        }
        found = {name: value for name, value in typed.items() if value is not None}
        if plan is None:
            return found
        return {"precision": plan.precision, "optimizer": plan.optimizer, **found}


@contextmanager
def _named(plan: Path | None) -> Iterator[None]:
    """Say of a plan that does not fit which file it is from."""
    try:
        yield
    except PlanError as error:
        if plan is not None:
            error.add_note(f"(the plan is that of {plan})")
        raise


def _mesh(degrees: dict[str, int] | None, name: str | None, plan: Plan | None) -> Mesh:
    """The mesh that was typed; the rest of it, or all, is that of a plan."""
    from parcompiler.mesh import Mesh

    if degrees is None:
        assert plan is not None, "one of both is asked for"
        shape = plan.mesh
        degrees = {"pipeline": shape.pipeline, "tensor": shape.tensor, "data": shape.data}
    if name is None:
        found = "cpu" if plan is None else plan.mesh.device
        name = found if isinstance(found, str) else ",".join(found)
    return Mesh(**degrees, device=_devices(name))


def _devices(text: str) -> Any:
    """A device, or with commas between them one for each pipeline coordinate."""
    if "," not in text or os.path.isfile(text):
        return _device(text)
    return tuple(map(_device, text.split(",")))


def _device(name: str) -> Any:
    """A device of the catalogue by its name, or one that a JSON file describes."""
    from parcompiler.device import Device, names

    path = Path(name)
    if name.lower() in names() or not (path.suffix == ".json" or os.path.isfile(name)):
        return name
    return Device.load(path)


def _schedule(name: str | None) -> str | Schedule | None:
    """A schedule by its name, or one that a CSV describes."""
    from parcompiler.schedules import SCHEDULES, Schedule

    if name is None or name in SCHEDULES or not (Path(name).suffix == ".csv"):
        return name
    return Schedule.from_csv(name)
