"""The head of an emitted module: its docstring and imports.

Packages that define operators of the model by torch.library are among these imports.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import fx
from torch._library.custom_ops import OPDEFS

from parcompiler.capture.evaluation import BY_MODE
from parcompiler.capture.functions import Applied
from parcompiler.codegen.literals import literal
from parcompiler.codegen.quoting import comment
from parcompiler.spmd.runtime_call import RuntimeCall

_BUILT_IN = {"aten", "prim", "prims"}


def module_text(opening: str, body: str, nodes: Iterable[fx.Node], device: str) -> str:
    """The whole file: `opening` is the inside of its docstring, `nodes` are those of its body."""
    head = [f'"""{opening}\n"""', "", *_imports(body)]
    if re.search(r"\bruntime\.|\bDEVICE\b", body):
        head.append("from parcompiler import runtime")
    head += _registrations(nodes)
    if "DEVICE" in body:
        head += ["", f"DEVICE = runtime.rank_device({literal(device)})"]
    return "\n".join(head).rstrip() + "\n\n\n" + body + "\n"


def _imports(body: str) -> Iterator[str]:
    """The imports that the body uses."""
    if re.search(r"\btorch\.", body):
        yield "import torch"
    names = [name for name in ("Tensor", "nn") if re.search(rf"\b{name}\b", body)]
    if names:
        yield f"from torch import {', '.join(names)}"
    if re.search(r"\bF\.", body):
        yield "from torch.nn import functional as F"
    yield ""


def _registrations(nodes: Iterable[fx.Node]) -> Iterator[str]:
    """Imports of packages that register custom operators."""
    homes = {home_of(node): node.target for node in nodes}
    for home, target in sorted(homes.items(), key=str):
        if home:
            yield f"import {home}  # noqa: F401 (defines {comment(str(target))})"


def home_of(node: fx.Node) -> str:
    """The module that defines a node's operator; empty for torch's own.

    `torch.library.custom_op` remembers the function; for operators registered otherwise, it is the
    package named like their namespace.
    """
    target: object = node.target
    if isinstance(target, RuntimeCall) and node.args:
        target = node.args[0]  # the operator that it calls, if any
    if isinstance(target, Applied):
        return target.module
    if target is BY_MODE:  # written as Python
        return ""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in _BUILT_IN:
        return ""
    defined = OPDEFS.get(target._schema.name)
    if defined is not None:
        return _dotted(str(defined._init_fn.__module__))
    return _dotted(target.namespace) if target.namespace in sys.modules else ""


def _dotted(name: str) -> str:
    """A module name, if it is one that an import statement can take."""
    return name if all(part.isidentifier() for part in name.split(".")) else ""
