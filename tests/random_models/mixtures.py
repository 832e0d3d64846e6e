"""Mixtures of stacked experts for random models, line by line.

    f ─► gates ─► slots of each expert ─► product ─► what experts compute ─► product ─► f + sum

Drawn are where slots have the experts and the samples, and what is between the products. Not all of
that can be computed with the experts in pieces.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# How slots are made of rows and gates, the shape of what each expert has of its own, the product
# with a stack of matrices, and the sum over the experts.
LAYOUTS = {
    "experts first": (
        "torch.einsum('b...e,b...w->eb...w', {gates}, {f})",
        "({e}, {ones}, {w})",
        "torch.einsum('eb...w,ewv->eb...v', {x}, {weight})",
        "torch.einsum('b...e,eb...w->b...w', {gates}, {x})",
    ),
    "rows": (
        "{f}.flatten(0, -2) * {gates}.flatten(0, -2).t().unsqueeze(-1)",
        "({e}, 1, {w})",
        "torch.bmm({x}, {weight})",
        "{x}.sum(0).view_as({f})",
    ),
    "all rows for each": (
        "{f}.flatten(0, -2).expand({e}, -1, -1)",
        "({e}, 1, {w})",
        "torch.matmul({x}, {weight})",
        "({x} * {gates}.flatten(0, -2).t().unsqueeze(-1)).sum(0).view_as({f})",
    ),
    "samples first": (
        "torch.einsum('b...e,b...w->bew', {gates}, {f})",
        "({e}, {w})",
        "torch.einsum('bew,ewv->bev', {x}, {weight})",
        "torch.einsum('b...e,bew->b...w', {gates}, {x})",
    ),
}
GATES = "{router}.softmax(-1)", "torch.sigmoid({router})"
CHOSEN = (  # of use in float64 alone: a rounding may choose another expert
    "{gates} * torch.zeros_like({gates}).scatter(-1, {gates}.topk(2, -1).indices, 1.0)",
    "{gates} * F.one_hot({gates}.argmax(-1), {e})",
    "{gates} * ({gates}.cumsum(1) < 0.8)",
)
BETWEEN = (
    "F.gelu({x})", "F.silu({x})", "F.relu({x})", "{x} + {own}", "{x} * {own}", "{x} * {kept}",
    "F.dropout({x}, {q}, self.training)", "F.layer_norm({x}, ({w},))",
    "{x} + 0.3 * {x}.roll(1, -1)", "{x} - {x}.mean(0, True)", "{x} - {x}.mean(1, True)",
    "{x}.softmax(-1)", "{x} * {shared}", "{x}.clamp(-1.5, 1.5)", "F.silu({x}) * {product}",
    "{x} + {product}",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """The variable that a line of `forward` makes, the line, and what it needs in `__init__`."""

    target: str
    text: str
    init: tuple[str, ...] = ()


def mixture(
    chosen: random.Random,
    f: str,
    shape: Sequence[int],
    size: int,
    exact: bool,
    number: Callable[[], int],
) -> list[Line]:
    """The lines of a layer of `size` experts on the rows of a value `f`, of some shape; `number`
    gives one that nothing else has."""
    slots_of, own_shape, product, combined = chosen.choice([*LAYOUTS.values()])
    width, hidden, lines = shape[-1], chosen.choice((2, 3, 4, 6)), list[Line]()
    fixed = {"f": f, "e": size, "ones": ", ".join("1" * (len(shape) - 1))}

    def add(text: str, *init: str, **places: object) -> str:
        target = f"v{number()}"
        before = lines[-1].target if lines else f
        filled = text.format(**{"x": before} | fixed | places)
        lines.append(Line(target, f"{target} = {filled}", init))
        return target

    def stack(rows: int, columns: int) -> tuple[str, str]:
        name, frozen = f"self.experts{number()}", chosen.random() < 0.1
        made = f"torch.randn({size}, {rows}, {columns}) * 0.4"
        init = f"{name} = nn.Parameter({made}, requires_grad={not frozen})"
        if exact and not frozen and chosen.random() < 0.1:
            init += f"\n{name}.register_hook(lambda gradient: gradient * 0.7)"
        return name, init

    router = f"self.router{number()}"
    init = f"{router} = nn.Linear({width}, {size})"
    gates = add(chosen.choice(GATES), init, router=f"{router}({f})")
    if exact and size > 2 and chosen.random() < 0.7:
        gates = add(chosen.choice(CHOSEN), gates=gates)
    slots, (up, init) = add(slots_of, gates=gates), stack(width, hidden)
    add(product, init, weight=up)
    for text in chosen.sample(BETWEEN, chosen.randrange(4)):
        name, of_each = f"own{number()}", own_shape.format(**fixed, w=hidden)
        places: dict[str, object] = dict.fromkeys(("own", "kept", "shared"), f"self.{name}")
        init = ""
        if "{own}" in text:
            init = f"self.{name} = nn.Parameter(torch.randn({of_each}))"
        elif "{kept}" in text:
            init = f"self.register_buffer('{name}', torch.rand({of_each}) + 0.5)"
        elif "{shared}" in text:
            init = f"self.{name} = nn.Parameter(torch.rand({hidden}) + 0.5)"
        elif "{product}" in text:
            weight, init = stack(width, hidden)
            places["product"] = product.format(x=slots, weight=weight)
        q = round(0.1 + 0.4 * chosen.random(), 3)
        add(text, *([init] if init else []), **places, w=hidden, q=q)
    down, init = stack(hidden, width)
    if chosen.random() < 0.04:
        add(product, weight=f"{up}.transpose(1, 2)")
    else:
        add(product, init, weight=down)
    if chosen.random() < 0.2:
        name, of_each = f"self.own{number()}", own_shape.format(**fixed, w=width)
        add("{x} + {own}", f"{name} = nn.Parameter(torch.randn({of_each}))", own=name)
    add("{f} + 0.5 * " + combined, gates=gates)
    return lines
