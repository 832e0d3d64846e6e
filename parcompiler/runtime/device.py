"""Which device and backend this process computes on."""

from __future__ import annotations

import os

import torch

from parcompiler.errors import LaunchError

OVERRIDE = "PARCOMPILER_DEVICE"


def rank_device(planned: str) -> torch.device:
    """The device of this process for a plan made for `planned` (a name such as "cpu" or "h100").

    A plan for "cpu", or for a measured one such as "cpu-measured", runs on the CPU, any other on
    the CUDA device of this process's LOCAL_RANK; PARCOMPILER_DEVICE, "cpu" or "cuda", says
    otherwise. Raises LaunchError without such a device.
    """
    on_cpu = planned == "cpu" or planned.startswith("cpu-")
    wanted = os.environ.get(OVERRIDE) or ("cpu" if on_cpu else "cuda")
    if wanted not in ("cpu", "cuda"):
        message = f"{OVERRIDE} must be 'cpu' or 'cuda' ({wanted!r} given)"
        raise LaunchError(message)
    if wanted == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        message = (
            f"the plan is for device {planned!r} and needs CUDA device {index} ({found} found); "
            f"{OVERRIDE}=cpu runs it on the CPU"
        )
        raise LaunchError(message)
    return torch.device("cuda", index)


def backend_of(device: torch.device) -> str:
    """The torch.distributed backend for tensors on `device`."""
    return "nccl" if device.type == "cuda" else "gloo"
