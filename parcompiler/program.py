"""A compiled program, to inspect, verify, export or run."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parcompiler.capture.blocks import cut
from parcompiler.capture.modes import in_modes
from parcompiler.errors import InputError, offered, shown
from parcompiler.graph import Graph
from parcompiler.lower import Lowered, lower
from parcompiler.mesh import Cluster, Mesh, whole
from parcompiler.passes.shard.local import local, local_graph
from parcompiler.plan import Plan
from parcompiler.prices import simulated
from parcompiler.problem import Problem
from parcompiler.timeline import Timeline
from parcompiler.verifier import verify

if TYPE_CHECKING:  # methods import these when called: compiling does not need them
    from datetime import timedelta

    from parcompiler.instruction import Instructions
    from parcompiler.report import Report
    from parcompiler.request import Request
    from parcompiler.runtime import RankProgram, Worker
    from parcompiler.symbolic.costs import Costs
    from parcompiler.verification.comparison import Verification


def check_launcher(launcher: str, mesh: Mesh | Cluster) -> None:
    """Refuse launchers of equal nodes for a mesh of several kinds of devices. Raises InputError."""
    if launcher != "torchrun" and not (isinstance(mesh, Cluster) or mesh.is_uniform):
        names = ", ".join(device.name for device in mesh.devices)
        message = (
            f"launcher {launcher!r} writes a job of equal nodes, and the mesh has several kinds of "
            f"devices ({names}): take launcher='torchrun'"
        )
        raise InputError(message)


@dataclass(frozen=True)
class Program:
    """The result of `compile`, which starts no process and changes no model."""

    captured: Graph = field(repr=False)
    problem: Problem = field(repr=False)
    plan: Plan
    lowered: Lowered = field(repr=False)
    model: nn.Module | None = field(repr=False, default=None)
    loss: Callable[[Any], torch.Tensor] | None = field(repr=False, default=None)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step."""
        return simulated(local(self.problem, self.plan), self.plan, self.lowered)

    def simulate(self) -> Timeline:
        """Predicted step: `step_time` (s), `bubble` (idle fraction per rank), `peak_memory`
        (bytes per rank) and `events`."""
        return self.timeline

    def report(self, forms: bool = False, meshes: bool = True) -> Report:
        """The decisions and their cost, for a terminal, as JSON, HTML or a trace.

        `forms` adds the closed forms of `costs`, which take a moment to compute. `meshes` plans one
        or two neighbouring meshes, and suggests a faster one.
        """
        from parcompiler.report import Report

        parts = self.problem, self.plan, self.lowered, self.timeline
        if not forms:
            return Report.of(*parts, meshes=meshes)
        from parcompiler.symbolic.costs import forms_of, symbols_of

        return Report.of(*parts, symbols_of(self.costs), forms_of(self.costs), meshes=meshes)

    @cached_property
    def costs(self) -> Costs:
        """FLOPs and bytes of blocks and stages as expressions in sizes and degrees, and figures at
        other sizes, micro-batches and degrees: `costs.at(batch=8, sequence=4096)`.

        Computed on first use: the model is captured again at each of these sizes.
        """
        from parcompiler.symbolic.costs import Costs

        return Costs(self.problem, self.plan)

    def verify(
        self, seed: int = 0, progress: bool = True, compiled: bool = False, full: bool = False,
        device: str = "cpu",
    ) -> Verification:  # fmt: skip
        """Run every rank on this machine and the original model beside it.

        The same random batch (`seed`) goes through both, as the program is and lifted to float64:
        loss, all gradients (and which there are), and parameters and buffers after one optimizer
        step with momentum and weight decay are compared. The model itself runs, and is restored
        afterwards. A "pipedream" program is compared with its re-enactment by the original model,
        in which every micro-batch uses weights of the same age as on the ranks. `progress` shows
        its steps when stderr is a terminal. `compiled` verifies the ranks as
        `worker(compiled=True)` runs them. A large step (more than 10¹¹ FLOPs) is lifted to float64
        at fewer tokens and rows, which the result names, unless `full` is set or anything differs.
        Ranks run on the CPU, or with `device="cuda"` on this machine's GPUs, with NCCL; they share
        GPUs where there are fewer. The original model runs on the CPU. Raises InputError for a
        program compiled from a `Graph`, which has no original model, and for a `device` that this
        machine does not have.
        """
        from parcompiler.verification.check import check

        model, modes = self.model, self.captured.modes
        with nullcontext() if model is None else in_modes(model, modes):
            return check(self, seed, progress, compiled=compiled, full=full, device=device)

    @property
    def request(self) -> Request:
        """The request to the compiler, as exports and checkpoints keep it."""
        from parcompiler.request import Request

        return Request.of(self.problem, self.plan)

    def export(
        self,
        path: str | Path,
        weights: bool | str | Path = True,
        standalone: bool = False,
        launcher: str = "torchrun",
        ranks: Iterable[int] | None = None,
        compiled: bool = False,
    ) -> Path:
        """Write a folder of rank scripts at `path`, which torchrun starts; returns it.

        All ranks at a pipeline coordinate run one script, named after the first of them. `ranks`
        additionally get a script under their own number, to read or to start; None: all, if there
        are at most 64.

        `weights` writes the model's parameters beside them; given the path of a folder of Hugging
        Face, every rank loads its own from there at start. `standalone` copies the runtime, so that
        the cluster needs torch only. `launcher` "slurm" adds an sbatch script and "kubernetes" a
        PyTorchJob of Kubeflow, with at most one rank for each device of a node. `compiled` makes
        scripts run layers through torch.compile's compiler by default (see `worker`). Raises
        InputError when the path is taken by something that is no export, the weights are on the
        meta device or not those of the model, the launcher is unknown, there is no such rank, or
        the launcher is not torchrun and the mesh has several kinds of devices: such jobs need equal
        nodes.
        """
        from parcompiler.codegen.launchers import LAUNCHERS

        offered("launcher", launcher, LAUNCHERS)
        chosen = None if ranks is None else [self._rank(rank) for rank in ranks]
        report = self.report(meshes=False)
        return self.write(
            Path(path), report, weights=weights, standalone=standalone, launcher=launcher,
            ranks=chosen, compiled=compiled,
        )  # fmt: skip

    def write(
        self,
        path: Path,
        report: Report | None,
        *,
        weights: bool | str | Path = True,
        standalone: bool = False,
        launcher: str = "torchrun",
        ranks: Iterable[int] | None = None,
        compiled: bool = False,
        model: str | None = None,
        configuration: Mapping[str, Any] | None = None,
    ) -> Path:
        """`export` with a given `report` (None: without one) to exactly this `path`: `weights`,
        `standalone`, `launcher`, `ranks` and `compiled` as there. Raises InputError as that does.

        `model` is the MODEL of the command line, `configuration` that of transformers."""
        from parcompiler.codegen.folder import export, texts
        from parcompiler.codegen.launchers import Launch
        from parcompiler.request import check_published
        from parcompiler.runtime.files import REQUEST

        check_launcher(launcher, self.problem.mesh)
        each = min(device.devices_per_node for device in self.problem.devices)
        launch = Launch(launcher, int(each))
        request = dataclasses.replace(self.request, model=model, configuration=configuration)
        if not isinstance(weights, bool):
            folder = os.path.abspath(weights)  # scripts may run in other folders
            check_published(self.problem.graph, Path(folder))
            request = dataclasses.replace(request, weights=folder)
        files = {
            "plan.json": self.plan.to_json(),
            REQUEST: json.dumps(request.to_data(), indent=2, sort_keys=True) + "\n",
        }
        if report is not None:
            files["report.json"] = report.to_json()
        text = None if report is None else str(report)
        files |= texts(
            self.lowered, self.plan.mesh.devices, text, standalone=standalone, launch=launch,
            ranks=ranks, compiled=compiled,
        )  # fmt: skip
        return export(path, self.lowered, files, weights=weights is True, standalone=standalone)

    def instructions(self, rank: int) -> Instructions:
        """The training instructions of a rank, printable. Raises InputError for no such rank."""
        from parcompiler.instruction import Instructions

        return Instructions(self.rank_program(rank).instructions)

    def rank_program(self, rank: int) -> RankProgram:
        """The program that the runtime executes on a rank. Raises InputError for no such rank."""
        from parcompiler.codegen.rank import rank_program

        index = self._rank(rank)
        position = self.lowered.grid.coordinate(index).pipeline
        return rank_program(self.lowered, index, self.plan.mesh.devices[position])

    def _rank(self, rank: object) -> int:
        """A rank of the program. Raises InputError for anything else."""
        index, size = whole(rank), self.lowered.grid.size
        if index is None or not 0 <= index < size:
            message = f"there is no rank {shown(rank)} (ranks: 0 to {size - 1})"
            raise InputError(message)
        return index

    def worker(self, timeout: timedelta | float | None = None, compiled: bool = False) -> Worker:
        """This process's rank, with the model's weights. Call it in processes that torchrun
        started, one per rank. Raises LaunchError when their number is not the plan's.

        A rank that waits longer than `timeout` (a timedelta, or seconds; None: 10 minutes) for
        others ends with a LaunchError that names them. `compiled` runs layers through
        torch.compile's compiler, once for all equal ones; raises LaunchError where there is no C++
        compiler (on a GPU: no Triton), and for a layer that cannot be compiled, with its line.
        """
        from parcompiler.codegen.modules import functions, stage_classes, vocabulary_class
        from parcompiler.runtime import TIMEOUT, Worker
        from parcompiler.runtime.joining import current_rank

        grid = self.lowered.grid
        rank = current_rank(grid.size)
        position = grid.coordinate(rank).pipeline
        device = self.plan.mesh.devices[position]
        tensors = self.problem.graph.tensors.items()
        return Worker(
            self.rank_program(rank),
            stage_classes(self.lowered, position, device),
            ((name, tensor) for name, tensor in tensors if not tensor.is_meta),
            vocabulary=vocabulary_class(self.lowered, device),
            timeout=TIMEOUT if timeout is None else timeout,
            request=self.request.to_data(),
            compiled=compiled,
            **functions(self.lowered, device),
        )

    def on(self, graph: Graph) -> Program:
        """The program of the same plan, for the graph in another precision or with other values."""
        current = self.problem
        problem = Problem(graph, current.mesh, current.options, context=current.context)
        if graph.fx_graph is self.problem.graph.fx_graph:  # the same program with other values
            divided = dataclasses.replace(self.lowered.graph, tensors=graph.tensors)
            lowered = dataclasses.replace(self.lowered, graph=divided)
        else:
            assert self.plan.granularity is not None
            divided = local_graph(self.problem, self.plan, graph)
            sent = [n for n in divided.fx_graph.nodes if n.name in (self.plan.sent or ())]
            lowered = lower(divided, self.plan, cut(divided, self.plan.granularity, sent))
        verify(lowered)
        return dataclasses.replace(self, problem=problem, lowered=lowered)

    def with_lowered(self, lowered: Lowered) -> Program:
        """The program with another lowering."""
        verify(lowered)
        return dataclasses.replace(self, lowered=lowered)
