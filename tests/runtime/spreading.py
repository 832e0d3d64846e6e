"""The passes of a head on ranks of one process: what collectives do is done with lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from parcompiler import runtime
from parcompiler.runtime import head as passes
from parcompiler.runtime.head import Statistics, combined, factors, loss, stacked, undivided

SHARE = 0.5  # what the loss counts in that of the step
IGNORED = -7


class Step(NamedTuple):
    """A loss, and the gradients of its share."""

    loss: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class Case:
    """A head, its input, and its labels; those of `ignored` rows are ignored."""

    classes: int = 13
    rows: int = 7
    width: int = 5
    cap: float = 0.0
    smoothing: float = 0.0
    weighted: bool = False
    reduction: str = "mean"
    ignored: tuple[int, ...] = (2,)
    scale: float = 1.25
    dtype: torch.dtype = torch.float64
    seed: int = 0
    given: tuple[tuple[str, torch.Tensor], ...] = ()  # instead of what is drawn

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them, drawn from the seed."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        found = {"x": draw(self.rows, self.width), "weight": draw(self.classes, self.width)}
        found |= {"bias": draw(self.classes), "importance": draw(self.classes).abs()}
        found = {name: tensor.to(self.dtype) for name, tensor in (found | dict(self.given)).items()}
        found["labels"] = torch.randint(self.classes, (self.rows,), generator=generator)
        found["labels"][list(self.ignored)] = IGNORED
        return found

    def logits(self, products: torch.Tensor) -> torch.Tensor:
        """What stands between the product and the loss."""
        return self.cap * (products / self.cap).tanh() if self.cap else products


def eager(case: Case) -> Step:
    """The whole head, by autograd."""
    tensors = case.tensors()
    x, weight, bias = (tensors[name].requires_grad_() for name in ("x", "weight", "bias"))
    found = case.scale * F.cross_entropy(
        case.logits(F.linear(x, weight, bias)),
        tensors["labels"],
        tensors["importance"] if case.weighted else None,
        ignore_index=IGNORED,
        reduction=case.reduction,
        label_smoothing=case.smoothing,
    )
    gradients = torch.autograd.grad(found * SHARE, (x, weight, bias))
    return Step(found.detach(), *gradients)


def spread(case: Case, method: str, ranks: int, *, fused: bool = False) -> Step:
    """The same on ranks that hold rows."""
    tensors = case.tensors()
    modules = [_module(case, tensors, ranks, index) for index in range(ranks)]
    own = [passes.rows_of_head(module, fused=fused) for module in modules]
    parts = [_part(item, tensors, passes.MatrixPool()) for item in own]
    whole = _naive(own, parts) if method == "naive" else _once(own, parts, method)
    x = torch.zeros_like(tensors["x"])
    for item, part in zip(own, parts, strict=True):
        assert part.statistics is not None
        told = undivided(part.statistics) if method == "naive" else part.statistics
        found = factors(item.head, item.classes, part.labels, told, whole, SHARE)
        if part.product is None:
            passes.weigh(item, part)
        x += passes.input_gradient(item, part, found)
        passes.weight_gradient(item, part, found)
    weight, bias = (_joined(case, modules, name) for name in ("weight", "bias"))
    return Step(loss(own[0].head, case.classes, parts[0].labels, whole), x, weight, bias)


def _module(
    case: Case, tensors: dict[str, torch.Tensor], ranks: int, index: int
) -> runtime.Vocabulary:
    """What would be emitted."""
    names = ("weight", "bias", "importance")

    class Rows(runtime.Vocabulary):
        size = dict.fromkeys(names, case.classes)
        head = runtime.Head(
            "x",
            "weight",
            ("labels",),
            bias="bias",
            logits=case.cap != 0,
            class_weight="importance" if case.weighted else "",
            ignore_index=IGNORED,
            label_smoothing=case.smoothing,
            reduction=case.reduction,
            scale=case.scale,
        )

        def logits(self, products: torch.Tensor) -> torch.Tensor:
            return case.logits(products)

    made = Rows(ranks, index)
    for name in names:
        rows = runtime.rows(*tensors[name].shape, ranks=ranks, dtype=case.dtype)
        span = made.span(name)
        rows[: span.size] = tensors[name][span.start : span.start + span.size]
        setattr(made, name, nn.Parameter(rows))
    return made


def _part(
    own: passes.HeadRows, tensors: dict[str, torch.Tensor], room: passes.MatrixPool
) -> passes.HeadLogits:
    """The products of a rank; its matrix has held something else before."""
    n, k = len(tensors["x"]), len(own.weight)
    room.give(torch.full((n, k), torch.nan, dtype=own.weight.dtype))
    return passes.products(own, tensors["x"], passes.labels_of(own, tensors["labels"]), room)


def _naive(own: list[passes.HeadRows], parts: list[passes.HeadLogits]) -> Statistics:
    """S, EXCHANGE maximum, NORMALIZE, EXCHANGE sum."""
    for item, part in zip(own, parts, strict=True):
        passes.find_largest(item, part)
    m = torch.stack([part.largest for part in parts]).amax(0)
    for item, part in zip(own, parts, strict=True):
        passes.normalize(item, part, m)
    return Statistics(m, *torch.stack([_told(part)[1:] for part in parts]).sum(0))


def _once(own: list[passes.HeadRows], parts: list[passes.HeadLogits], method: str) -> Statistics:
    """S, EXCHANGE statistics."""
    for item, part in zip(own, parts, strict=True):
        passes.normalize(item, part)
        if method == "vocab-2":
            passes.weigh(item, part)
    return combined(torch.stack([_told(part) for part in parts]))


def _told(part: passes.HeadLogits) -> torch.Tensor:
    """Own numbers."""
    assert part.statistics is not None
    return stacked(part.statistics)


def _joined(case: Case, modules: list[Any], name: str) -> torch.Tensor:
    """The gradients of all rows; padding has none."""
    gradients = torch.cat([getattr(module, name).grad for module in modules])
    assert not gradients[case.classes :].any()
    return gradients[: case.classes]


def difference(found: Step, wanted: Step) -> float:
    """The largest difference, relative to what is no rounding of zero; NaN equals itself."""
    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        scale = other.abs().nan_to_num().max().clamp(min=1e-4)
        assert torch.equal(one.isnan(), other.isnan())
        worst = max(worst, float((one - other).abs().nan_to_num().max() / scale))
    return worst
