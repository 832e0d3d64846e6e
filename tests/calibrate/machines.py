"""A machine that is told, not found, and how long works take on it."""

import dataclasses

from parcompiler.calibrate.machine import Machine

CORE = Machine(kind="cpu", model="core", threads=1, memory=2**34, devices_per_node=4)
GPU = Machine(kind="cuda", model="", threads=1, memory=80 * 10**9, devices_per_node=8)


def gpu(model: str, memory: int = GPU.memory) -> Machine:
    """A GPU that its driver calls `model`."""
    return dataclasses.replace(GPU, model=model, memory=memory)
