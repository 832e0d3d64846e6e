"""The closed forms of a program as the report prints them."""

from __future__ import annotations

from parcompiler.report import data
from parcompiler.report.names import numbers
from parcompiler.symbolic.costs import Costs
from parcompiler.symbolic.forms import Forms

# What is counted, by the fields of `Forms`.
WHAT = {
    "flops_forward": "FLOPs, forward",
    "flops_backward": "FLOPs, backward",
    "bytes_forward": "bytes moved, forward",
    "bytes_backward": "bytes moved, backward",
    "sent_forward": "bytes to tensor ranks, forward",
    "sent_backward": "bytes to tensor ranks, backward",
    "saved": "bytes saved",
    "message": "bytes of outputs",
    "parameters": "bytes of parameters",
    "gradients": "bytes of gradients",
    "optimizer": "bytes of optimizer states",
}
OF_STAGES = WHAT | {
    "message": "bytes to other stages",
    "averaged": "bytes to data ranks, once a step",
}
WORDS = {"h": "hidden", "V": "vocabulary", "f": "inner"}


def symbols_of(costs: Costs) -> tuple[data.Symbol, ...]:
    """The letters, and the sizes that have none."""
    sizes = (data.Symbol(size.letter, size.word, size.now) for size in costs.sizes)
    named = (data.Symbol(letter, WORDS[letter], size) for letter, size in costs.names.items())
    refused = (data.Symbol("", word, reason=reason) for word, reason in costs.refused)
    mesh, ranks = costs.plan.mesh, costs.over_ranks
    exact = ", ".join(map(str, ranks.ranks))
    tensor = [data.Symbol("t", f"tensor ranks, exact for {exact}", mesh.tensor)] if exact else []
    unknown = [data.Symbol("", "tensor ranks", reason=ranks.reason)] if ranks.reason else []
    copies = data.Symbol("d", "data ranks", mesh.data)
    return (*sizes, *named, *tensor, copies, *refused, *unknown)


def forms_of(costs: Costs) -> tuple[data.Form, ...]:
    """The forms of each template and of each stage; those of equal stages once."""
    stages: dict[Forms, list[int]] = {}
    for j, forms in enumerate(costs.named_stages):
        stages.setdefault(forms, []).append(j)
    parts = [(name, costs.blocks[name], forms, WHAT) for name, forms in costs.named.items()]
    for forms, places in stages.items():
        parts.append((f"stage{'s' * (len(places) > 1)} {numbers(places)}", 0, forms, OF_STAGES))
    return tuple(
        data.Form(name, blocks, what, str(value))
        for name, blocks, forms, fields in parts
        for field, what in fields.items()
        if (value := getattr(forms, field)) != 0
    )
