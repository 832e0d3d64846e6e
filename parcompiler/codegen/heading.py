"""What stands above the classes of an emitted module: what it is, and the imports it uses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import fx

from parcompiler.codegen.literals import literal
from parcompiler.codegen.quoting import comment
from parcompiler.codegen.registry import home_of


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
    """Imports of the packages that define operators of their own, for what they register."""
    homes = {home_of(node): node.target for node in nodes}
    for home, target in sorted(homes.items(), key=str):
        if home:
            yield f"import {home}  # noqa: F401 (defines {comment(str(target))})"
