"""Rules of losses: rows add up; a mean over rows weighs each rank's part.

>>> REDUCTION_MEAN, REDUCTION_SUM
(1, 2)
"""

from __future__ import annotations

from parcompiler.spmd.along import words
from parcompiler.spmd.call import Call
from parcompiler.spmd.rule import Rule

REDUCTION_NONE, REDUCTION_MEAN, REDUCTION_SUM = range(3)


def pointwise(call: Call) -> Rule | None:
    """Losses of two tensors, element by element: a mean is a mean of the means of equal pieces."""
    reduction = call.arguments.get("reduction", REDUCTION_MEAN)
    prediction, target = call.shapes[:2]
    if prediction != target:
        return None
    listed = words(len(prediction))
    rest = ["!" + " ".join(listed[len(listed) - len(shape) :]) for shape in call.shapes]
    result = " ".join(listed) if reduction == REDUCTION_NONE else ""
    means = frozenset(listed) if reduction == REDUCTION_MEAN else frozenset[str]()
    return Rule(f"{', '.join(rest)} -> {result}", means=means)


def classified(call: Call) -> Rule | None:
    """cross_entropy_loss and nll_loss: rows, when they are added up or kept.

    The mean leaves out ignored rows and weighs classes: see `special` for that.
    """
    logits, target = call.shapes[:2]
    if len(target) != len(logits) - 1 or len(logits) < 2:
        return None  # probabilities, or one row
    listed = words(len(logits))
    rows = [listed[0], *listed[2:]]
    reduction = call.arguments.get("reduction", REDUCTION_MEAN)
    if reduction == REDUCTION_MEAN:
        rows = ["1"] * len(rows)
    given = ["!" + " ".join([rows[0], "(c)", *rows[1:]]), "!" + " ".join(rows), "!(c)"]
    result = " ".join(rows) if reduction == REDUCTION_NONE else ""
    return Rule(f"{', '.join(given[: len(call.operands)])} -> {result}")


FAMILIES = {
    **dict.fromkeys(
        (
            *("binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss"),
            *("smooth_l1_loss", "huber_loss", "kl_div"),
        ),
        pointwise,
    ),
    "cross_entropy_loss": classified,
    "nll_loss_nd": classified,
}
