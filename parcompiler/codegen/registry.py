"""Operators that a package registers with torch.library: which module must be imported for them."""

from __future__ import annotations

import sys

import torch
from torch import fx
from torch._library.custom_ops import OPDEFS

from parcompiler.capture.functions import Applied
from parcompiler.spmd.runtime_call import RuntimeCall

_BUILT_IN = {"aten", "prim", "prims"}


def home_of(node: fx.Node) -> str:
    """The module that defines a node's operator; empty for torch's own.

    `torch.library.custom_op` remembers the function; for operators registered otherwise, the
    package that is called like their namespace is taken.
    """
    target: object = node.target
    if isinstance(target, RuntimeCall) and node.args:
        target = node.args[0]  # the operator that it calls, if it is one
    if isinstance(target, Applied):
        return target.module
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in _BUILT_IN:
        return ""
    defined = OPDEFS.get(target._schema.name)
    if defined is not None:
        return _dotted(str(defined._init_fn.__module__))
    return _dotted(target.namespace) if target.namespace in sys.modules else ""


def _dotted(name: str) -> str:
    """A module name, if it is one that an import statement can take."""
    return name if all(part.isidentifier() for part in name.split(".")) else ""
