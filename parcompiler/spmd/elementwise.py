"""Rules of operators that treat every element by itself, with broadcasting."""

from __future__ import annotations

from collections.abc import Mapping

from parcompiler.spmd.call import Call, is_floating
from parcompiler.spmd.rule import Rule

# Any number of operands, none of them linear.
CURVED = frozenset(
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

LINES: Mapping[str, str] = {
    "alias": "*x -> *x",
    "clone": "*x -> *x",
    "contiguous": "*x -> *x",
    "_conj": "*x -> *x",
    "_neg_view": "*x -> *x",
    "conj": "*x -> *x",
    "conj_physical": "*x -> *x",
    "detach": "*x -> *x",
    "dropout": "*x -> *x",
    "lift_fresh_copy": "*x -> *x",
    "lift_fresh": "*x -> *x",
    "neg": "*x -> *x",
    "negative": "*x -> *x",
    "positive": "*x -> *x",
    "resolve_conj": "*x -> *x",
    "resolve_neg": "*x -> *x",
    "real": "*x -> *x",
    "imag": "*x -> *x",
    "complex": "*x + *x -> *x",
    "copy": "*x + *x -> *x",
    "addcmul": "*x + *x, *x -> *x",
    "addcdiv": "*x + *x, !*x -> *x",
    "lerp": "*x + *x, !*x -> *x",
    "expand_as": "*x, !*x -> *x",
}


def curved(call: Call) -> Rule:
    """An operator that is linear in none of its operands."""
    results = ", ".join("*x" for _ in call.results)
    return Rule(", ".join("!*x" for _ in call.operands) + f" -> {results}")


def added(call: Call) -> Rule:
    """A sum or difference; of a tensor and a number it is no longer linear."""
    return Rule(" + ".join("*x" for _ in call.operands) + " -> *x", affine=len(call.operands) < 2)


def multiplied(call: Call) -> Rule:
    """A product, linear in each factor."""
    return Rule(", ".join("*x" for _ in call.operands) + " -> *x")


def divided(call: Call) -> Rule:
    """A quotient, linear in the numerator unless it is rounded."""
    if call.arguments.get("rounding_mode") is not None or call.operand("self") is None:
        return curved(call)
    return Rule(", !".join("*x" for _ in call.operands) + " -> *x")


def chosen(call: Call) -> Rule | None:
    """where(condition, a, b), linear in both; a number among them other than 0 is a constant."""
    if "self" not in call.arguments:
        return None  # the places of the elements that hold
    sides = [call.arguments["self"], call.arguments["other"]]
    affine = any(isinstance(side, bool | int | float) and side != 0 for side in sides)
    terms = " + ".join("*x" for operand in call.operands[1:] if operand.argument != "condition")
    return Rule(f"!*x, {terms} -> *x" if terms else "!*x -> *x", affine=affine)


def filled(call: Call) -> Rule:
    """masked_fill, linear when it fills with 0 or with a tensor."""
    value = call.operand("value")
    if value is not None:
        return Rule("*x, !*x + *x -> *x")
    return Rule("*x, !*x -> *x", affine=call.arguments["value"] != 0)


def cast(call: Call) -> Rule:
    """A change of type or device, linear between floating types; to those of another tensor too."""
    floating = is_floating(call.operands[0].value) and is_floating(call.results[0])
    mark = "" if floating else "!"
    others = ", !(*y)" * (len(call.operands) - 1)
    return Rule(f"{mark}*x{others} -> *x")


FAMILIES = {
    **dict.fromkeys(CURVED, curved),
    "add": added,
    "sub": added,
    "subtract": added,
    "rsub": added,
    "mul": multiplied,
    "multiply": multiplied,
    "div": divided,
    "divide": divided,
    "true_divide": divided,
    "where": chosen,
    "masked_fill": filled,
    "to": cast,
    "_to_copy": cast,
    "type_as": cast,
}
