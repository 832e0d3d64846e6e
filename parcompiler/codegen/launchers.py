"""How a cluster starts the ranks: an sbatch script for SLURM, a PyTorchJob for Kubeflow.

    torchrun     no file: README.md has the command
    slurm        submit.sbatch       one torchrun on each node, which meet at the first
    kubernetes   pytorchjob.yaml     one pod for each node, the first of them the master

>>> per_node(32, 8), per_node(12, 8)
(8, 6)
>>> label("GPT2LMHeadModel"), label("9 Übung$(rm -rf /)")
('gpt2lmheadmodel', 'train-9-bung-rm-rf')
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

FILES: Mapping[str, str | None] = {
    "torchrun": None,
    "slurm": "submit.sbatch",
    "kubernetes": "pytorchjob.yaml",
}
LAUNCHERS = tuple(FILES)
VENDORS = {"mi300x": "amd.com/gpu"}  # resource names of Kubernetes for devices
GRACE = 300  # s from the notice that a job ends to its end: for a step, and a checkpoint
RESTARTS = 3  # by torchrun, of all ranks after a failure
LONGEST = 40  # Kubernetes allows 63, of which names of pods use some


@dataclass(frozen=True, slots=True)
class Launch:
    """The launcher of the program, and the number of devices on a node."""

    launcher: str = "torchrun"
    devices_per_node: int = 8

    @property
    def file(self) -> str | None:
        """The file that is written for it; None for torchrun, which needs none."""
        return FILES[self.launcher]

    def facts(self, model: str, size: int, device: str) -> dict[str, object]:
        """The variables of the file's template."""
        ranks = per_node(size, self.devices_per_node)
        return {
            "launcher": self.launcher,
            "launch_file": self.file,
            "label": label(model),
            "nodes": size // ranks,
            "per_node": ranks,
            "on_cpu": device == "cpu" or device.startswith("cpu-"),
            "grace": GRACE,
            "shutdown": GRACE - 30,  # ranks end before their launcher does
            "restarts": RESTARTS,
            "resource": VENDORS.get(device, "nvidia.com/gpu"),
        }


def per_node(size: int, most: int) -> int:
    """The ranks on each of the fewest nodes that have equally many of `size`, at most `most`."""
    return max(n for n in range(1, max(1, most) + 1) if size % n == 0)


def label(name: str) -> str:
    """A model's name as a job's name: a valid DNS label (RFC 1035)."""
    text = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not text[:1].isalpha():
        text = f"train-{text}"
    return text[:LONGEST].strip("-")
