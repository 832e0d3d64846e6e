"""Rules of operators that treat every element by itself, with broadcasting, and of losses."""

from __future__ import annotations

from parcompiler.capture.effects import CASTS
from parcompiler.graph import is_floating
from parcompiler.spmd.call import NodeCall
from parcompiler.spmd.formula import Family, Rule

# Any number of operands, none of them linear.
NONLINEAR = frozenset(
    """
    abs absolute acos acosh angle asin asinh atan atan2 atanh ceil celu clamp clamp_max
    clamp_min clip cos cosh digamma elu erf erfc erfinv exp exp2 expm1 floor fmod frac gelu
    hardshrink hardsigmoid hardswish hardtanh hypot leaky_relu lgamma log log10 log1p log2
    log_sigmoid logaddexp logit maximum minimum mish nan_to_num pow reciprocal relu relu6
    remainder round rsqrt selu sgn sigmoid sign silu sin sinc sinh softplus softshrink
    special_expit sqrt square tan tanh threshold trunc fix xlogy
    copysign fmax fmin
    eq ne lt le gt ge greater less greater_equal less_equal not_equal isclose isfinite isinf isnan
    logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
    bitwise_left_shift bitwise_right_shift
    __and__ __or__ __xor__ __iand__ __ior__ __ixor__ __lshift__ __rshift__
    polar bernoulli rand_like randn_like randint_like zeros_like ones_like full_like empty_like
    alpha_dropout fill floor_divide
    """.split()
)
LINEAR = """
    alias clone contiguous _conj _neg_view conj conj_physical detach dropout lift_fresh_copy
    lift_fresh neg negative positive resolve_conj resolve_neg real imag
    """.split()

REDUCTIONS = ("none", "mean", "sum")  # by number, as in torch.nn._reduction
REDUCTION_NONE, REDUCTION_MEAN, REDUCTION_SUM = range(3)


def nonlinear(call: NodeCall) -> Rule:
    """An operator that is linear in none of its operands."""
    results = ", ".join("*x" for _ in call.results)
    return Rule(", ".join("!*x" for _ in call.operands) + f" -> {results}")


def add(call: NodeCall) -> Rule:
    """A sum or difference; of a tensor and a number it is not linear."""
    return Rule(" + ".join("*x" for _ in call.operands) + " -> *x", affine=len(call.operands) < 2)


def multiply(call: NodeCall) -> Rule:
    """A product, linear in each factor."""
    return Rule(", ".join("*x" for _ in call.operands) + " -> *x")


def divide(call: NodeCall) -> Rule:
    """A quotient, linear in the numerator unless it is rounded."""
    if call.arguments.get("rounding_mode") is not None or call.operand("self") is None:
        return nonlinear(call)
    return Rule(", !".join("*x" for _ in call.operands) + " -> *x")


def where(call: NodeCall) -> Rule | None:
    """where(condition, a, b), linear in both; a number among them other than 0 is a constant."""
    if "self" not in call.arguments:
        return None  # where(condition): the number of results depends on the values
    sides = [call.arguments["self"], call.arguments["other"]]
    affine = any(isinstance(side, bool | int | float) and side != 0 for side in sides)
    terms = " + ".join("*x" for operand in call.operands[1:] if operand.argument != "condition")
    return Rule(f"!*x, {terms} -> *x" if terms else "!*x -> *x", affine=affine)


def masked_fill(call: NodeCall) -> Rule:
    """Linear when it fills with 0 or with a tensor."""
    value = call.operand("value")
    if value is not None:
        return Rule("*x, !*x + *x -> *x")
    return Rule("*x, !*x -> *x", affine=call.arguments["value"] != 0)


def cast(call: NodeCall) -> Rule:
    """A change of type or device, linear between floating types; also to the dtype of another
    tensor."""
    floating = is_floating(call.operands[0].value) and is_floating(call.results[0])
    mark = "" if floating else "!"
    others = ", !(*y)" * (len(call.operands) - 1)
    return Rule(f"{mark}*x{others} -> *x")


def pointwise_loss(call: NodeCall) -> Rule | None:
    """Elementwise losses of two tensors: a mean is the mean of the means of equal pieces."""
    reduction = call.arguments.get("reduction", REDUCTION_MEAN)
    prediction, target = call.shapes[:2]
    if prediction != target:
        return None
    listed = [f"d{dim}" for dim in range(len(prediction))]
    operands = ["!" + " ".join(listed[len(listed) - len(shape) :]) for shape in call.shapes]
    result = " ".join(listed) if reduction == REDUCTION_NONE else ""
    means = frozenset(listed) if reduction == REDUCTION_MEAN else frozenset[str]()
    return Rule(f"{', '.join(operands)} -> {result}", means=means)


def cross_entropy(call: NodeCall) -> Rule | None:
    """cross_entropy_loss and nll_loss: splits rows, if they are summed or not reduced.

    For the mean, with ignored rows and class weights, see `special`.
    """
    logits, target = call.shapes[:2]
    if len(target) != len(logits) - 1 or len(logits) < 2:
        return None  # probabilities, or one row
    reduction = call.arguments.get("reduction", REDUCTION_MEAN)
    rows = [f"d{dim}" for dim in range(len(logits)) if dim != 1]
    if reduction == REDUCTION_MEAN:
        rows = ["1"] * len(rows)
    operands = ["!" + " ".join([rows[0], "(c)", *rows[1:]]), "!" + " ".join(rows), "!(c)"]
    result = " ".join(rows) if reduction == REDUCTION_NONE else ""
    return Rule(f"{', '.join(operands[: len(call.operands)])} -> {result}")


RULES: dict[str, str | Family] = {
    **dict.fromkeys(NONLINEAR, nonlinear),
    **dict.fromkeys(LINEAR, "*x -> *x"),
    "complex": "*x + *x -> *x",
    "copy": "*x + *x -> *x",
    "by_mode": "*x + *x -> *x",
    "addcmul": "*x + *x, *x -> *x",
    "addcdiv": "*x + *x, !*x -> *x",
    "lerp": "*x + *x, !*x -> *x",
    "expand_as": "*x, !*x -> *x",
    **dict.fromkeys(("add", "sub", "subtract", "rsub"), add),
    **dict.fromkeys(("mul", "multiply"), multiply),
    **dict.fromkeys(("div", "divide", "true_divide"), divide),
    "where": where,
    "masked_fill": masked_fill,
    **dict.fromkeys(CASTS, cast),
    **dict.fromkeys(
        """
        binary_cross_entropy binary_cross_entropy_with_logits mse_loss l1_loss smooth_l1_loss
        huber_loss kl_div
        """.split(),
        pointwise_loss,
    ),
    "cross_entropy_loss": cross_entropy,
    "nll_loss_nd": cross_entropy,
}
