"""What starts a program on a cluster: a script for SLURM and a manifest for Kubeflow."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import parcompiler as pc
from parcompiler.cli.words import LAUNCHERS as WORDS
from parcompiler.codegen.folder import texts
from parcompiler.codegen.launchers import LAUNCHERS, Launch, label, per_node
from parcompiler.lower import Lowered
from parcompiler.models import gpt
from tests import zoo
from tests.codegen.emitting import graph_of, lowered_by
from tests.codegen.openapi import faults

HOSTILE = 'GPT"; rm -rf "$HOME" #\n---\n\'`id`: {{ x }}'


@cache
def lowered() -> Lowered:
    config = gpt.Config(layers=2, heads=2, hidden=8, vocabulary=zoo.VOCABULARY, sequence=zoo.LENGTH)
    graph = graph_of(gpt.GPT(config), {"tokens": zoo.tokens(), "labels": zoo.tokens()})
    stages = [["embedding+positions", "layers.0"], ["layers.1", "norm+embedding"]]
    return lowered_by(graph, stages, data=2)


def written(launcher: str, devices_per_node: int = 2, device: str = "h100") -> dict[str, str]:
    """The files of two stages on two data ranks."""
    launch = Launch(launcher, devices_per_node)
    return texts(lowered(), [device] * 2, "(the report)", standalone=True, launch=launch)


@pytest.mark.parametrize(
    ("launcher", "file"), [("slurm", "submit.sbatch"), ("kubernetes", "pytorchjob.yaml")]
)
def test_what_a_launcher_reads_is_golden(
    launcher: str, file: str, golden: Callable[[str, str], None]
) -> None:
    files = written(launcher)
    golden(f"codegen/launchers/{file}", files[file])
    assert file in files["README.md"]
    assert file not in written("torchrun")


@pytest.mark.parametrize("device", ["h100", "cpu-measured"])
def test_shellcheck_finds_nothing_in_the_script(device: str, tmp_path: Path) -> None:
    path = tmp_path / "submit.sbatch"
    path.write_text(written("slurm", device=device)["submit.sbatch"])
    command = [str(Path(sys.executable).with_name("shellcheck")), str(path)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def stubs(folder: Path, commands: dict[str, str]) -> Path:
    """A folder of commands that are these lines."""
    for name, line in commands.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{line}\n")
        path.chmod(0o755)
    return folder / "bin"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Path]:
    """A folder of commands that say what they are called with, in the place of SLURM's."""
    commands = {
        "scontrol": "echo node-a; echo node-b",
        "srun": 'shift; exec "$@"',
        "torchrun": 'printf "%s\\n" "$@"',
    }
    stubs(tmp_path, commands)
    yield tmp_path


def submitted(cluster: Path, folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the script as SLURM would: a copy of it, in the folder of sbatch."""
    script = cluster / "copy"
    script.write_text(written("slurm")["submit.sbatch"])
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_SUBMIT_DIR": str(folder)}
    environment = {**os.environ, **job, "PATH": f"{cluster / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_each_node_starts_its_ranks_and_meets_at_the_first(cluster: Path) -> None:
    folder = cluster / 'it\'s "my" $HOME folder'
    folder.mkdir()
    (folder / "main.py").touch()
    found = submitted(cluster, folder, "--data", "a b.safetensors")
    assert found.stderr == ""
    flags = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-id", "7", "--rdzv-backend", "c10d"]
    flags[4:4] = ["--max-restarts", "3", "--shutdown-timeout", "270"]
    flags += ["--rdzv-endpoint", "node-a:20007", f"{folder}/main.py"]
    flags += [
        "--save",
        f"{folder}/checkpoints",
        "--every",
        "500",
        "--keep",
        "3",
        "--resume",
        "auto",
    ]
    flags += ["--data", "a b.safetensors"]
    assert found.stdout.splitlines() == flags


def test_a_script_submitted_from_elsewhere_says_so(cluster: Path) -> None:
    found = submitted(cluster, cluster)
    assert found.returncode == 2
    assert f"call sbatch in the folder that has main.py ({cluster} has none)" in found.stderr


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_the_manifest_is_a_pytorchjob_by_its_published_schema(devices: int) -> None:
    manifest = yaml.safe_load(written("kubernetes", devices)["pytorchjob.yaml"])
    assert [*faults(manifest, "KubeflowOrgV1PyTorchJob")] == []
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) <= {"Master", "Worker"}
    ranks = int(manifest["spec"]["nprocPerNode"])
    assert sum(one["replicas"] for one in replicas.values()) * ranks == 4
    assert ranks <= devices
    for one in replicas.values():
        (container,) = one["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the operator looks for this name
        assert container["resources"]["limits"] == {"nvidia.com/gpu": ranks}
        volumes = {volume["name"] for volume in one["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("spec", "nprocPerNode"), 2, "is no str: 2"),
        (("spec", "replicas"), 2, "has an unknown field 'replicas'"),
        (("spec", "pytorchReplicaSpecs", "Master", "replicas"), "one", "is no int: 'one'"),
        (("spec", "pytorchReplicaSpecs", "Master"), 3, "is no object: 3"),
        (("spec",), {"nprocPerNode": "2"}, "Invalid value for `pytorch_replica_specs`"),
    ],
)
def test_a_wrong_manifest_is_found(place: tuple[str, ...], value: Any, said: str) -> None:
    manifest = yaml.safe_load(written("kubernetes")["pytorchjob.yaml"])
    inner = manifest
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    assert said in "\n".join(faults(manifest, "KubeflowOrgV1PyTorchJob"))


def test_names_are_those_of_jobs_whatever_the_model_is_called() -> None:
    assert label(HOSTILE) == "gpt-rm-rf-home-id-x"
    assert label("") == label("Ω") == "train"
    assert len(label("x" * 500)) == 40
    for facts in (Launch(name).facts(HOSTILE, 4, "h100") for name in LAUNCHERS):
        assert facts["label"] == label(HOSTILE)


@pytest.mark.parametrize(
    ("size", "most", "nodes"),
    [(4, 8, (1, 4)), (16, 8, (2, 8)), (12, 8, (2, 6)), (13, 8, (13, 1)), (1024, 8, (128, 8))],
)
def test_nodes_hold_equally_many_ranks(size: int, most: int, nodes: tuple[int, int]) -> None:
    ranks = per_node(size, most)
    assert (size // ranks, ranks) == nodes


def test_an_unknown_launcher_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    inputs = (torch.zeros(2, 2),)
    program = pc.compile(nn.Linear(2, 2), pc.Mesh(), inputs, torch.mean, progress=False)
    with pytest.raises(pc.InputError, match="launcher must be one of 'torchrun', 'slurm', 'kub"):
        program.export(tmp_path / "out", launcher="pbs")
    assert not (tmp_path / "out").exists()
    program.export(tmp_path / "out", launcher="slurm")
    assert "--nodes=1\n" in (tmp_path / "out" / "submit.sbatch").read_text()


def test_the_command_line_offers_the_launchers() -> None:
    assert WORDS == LAUNCHERS
