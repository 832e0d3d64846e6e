"""parcompiler: a declarative graph-partitioning compiler for training on many devices.

    program = pc.compile(model, pc.Mesh(pipeline=2), inputs)
    print(program.report())

Names are imported when first used, so that `parcompiler.runtime` needs torch alone.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from parcompiler.temporary import uncollected

if TYPE_CHECKING:
    from parcompiler.compiler import compile
    from parcompiler.device import Device
    from parcompiler.errors import (
        CaptureError,
        InfeasibleError,
        InputError,
        LaunchError,
        ParcompilerError,
        PlanError,
    )
    from parcompiler.graph import Graph
    from parcompiler.loaded import load
    from parcompiler.mesh import Cluster, Coordinate, Mesh
    from parcompiler.plan import Plan
    from parcompiler.program import Program
    from parcompiler.report import Report
    from parcompiler.runtime import Metrics, Samples, TokenRows, Worker, write_tokens
    from parcompiler.schedules import Schedule
    from parcompiler.timeline import Timeline
    from parcompiler.verification.comparison import Verification

    __version__: str

_HOME = {
    "compile": "compiler",
    "Device": "device",
    "CaptureError": "errors",
    "Cluster": "mesh",
    "InfeasibleError": "errors",
    "InputError": "errors",
    "LaunchError": "errors",
    "ParcompilerError": "errors",
    "PlanError": "errors",
    "Graph": "graph",
    "load": "loaded",
    "Coordinate": "mesh",
    "Mesh": "mesh",
    "Plan": "plan",
    "Program": "program",
    "Report": "report",
    "Metrics": "runtime",
    "Samples": "runtime",
    "Schedule": "schedules",
    "TokenRows": "runtime",
    "Worker": "runtime",
    "write_tokens": "runtime",
    "Timeline": "timeline",
    "Verification": "verification.comparison",
}

__all__ = [
    "CaptureError",
    "Cluster",
    "Coordinate",
    "Device",
    "Graph",
    "InfeasibleError",
    "InputError",
    "LaunchError",
    "Mesh",
    "Metrics",
    "ParcompilerError",
    "Plan",
    "PlanError",
    "Program",
    "Report",
    "Samples",
    "Schedule",
    "Timeline",
    "TokenRows",
    "Verification",
    "Worker",
    "compile",
    "load",
    "write_tokens",
]


def __getattr__(name: str) -> Any:
    """The public name, from the module that defines it; `__version__` as it is installed."""
    if name == "__version__":
        return importlib.metadata.version("parcompiler")
    if name not in _HOME:
        message = f"module 'parcompiler' has no attribute {name!r}"
        raise AttributeError(message)
    with uncollected():
        return getattr(importlib.import_module(f"parcompiler.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
