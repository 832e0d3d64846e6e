"""A process that compiles one template into the cache, from its text as JSON on standard input.

python -m parcompiler.runtime.compiled.process    started by `build`
"""

from __future__ import annotations

import json
import linecache
import sys
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from parcompiler.runtime.axis import Axis
from parcompiler.runtime.compiled.build import compile_template
from parcompiler.runtime.compiled.layers import (
    CompiledLayer,
    Surroundings,
    Template,
    TensorForm,
    find_extras,
)
from parcompiler.runtime.stage import Layer, Unfilled


def main() -> None:
    """Compile."""
    job = json.load(sys.stdin)
    device = torch.device(job["device"])
    groups = [Axis(rank, size, None, device, name=name) for name, rank, size in job["groups"]]
    axes = tuple(group for group in groups if group.name != "data")
    row = next((group for group in groups if group.name == "data"), None)
    around = Surroundings(device, axes, row, job["training"], job["split"])
    torch.set_num_threads(1)
    with around.active(), torch.device("meta"), Unfilled():
        layer = _layer(job["text"], job["kind"]).train(job["training"])
    arguments, tensors = (tuple(map(_form, job[name])) for name in ("arguments", "tensors"))
    template = Template(job["key"], layer, arguments, tensors, around)
    with FakeTensorMode(), around.active():
        made = [form.empty(device) for form in tensors]
        for (owner, leaf), tensor in zip(CompiledLayer(layer).places, made, strict=True):
            owner[leaf] = tensor  # type: ignore[assignment]
        find_extras(template, [form.empty(device) for form in arguments], made)
    compile_template(template)


def _layer(text: str, kind: str) -> Layer:
    """A layer of the class `kind` in the text of a module."""
    name = "<parcompiler template>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "template"}
    exec(compile(text, name, "exec"), namespace)
    layer: Layer = namespace[kind]()
    return layer


def _form(written: list[Any]) -> TensorForm:
    """A form from JSON."""
    shape, stride, dtype, carries = written
    return TensorForm(tuple(shape), tuple(stride), getattr(torch, dtype), carries)


if __name__ == "__main__":
    main()
