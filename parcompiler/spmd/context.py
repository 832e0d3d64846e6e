"""Rules of the runtime's calls on context and expert ranks: how another axis may split them.

Conversions are linear and elementwise, except in the dimensions along which they move pieces;
attention by rows splits by samples and heads, with its rows whole. Rows that go to their experts
and back are whole, or split by columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from parcompiler.spmd.call import NodeCall
from parcompiler.spmd.dimensions import words
from parcompiler.spmd.formula import Rule


def _conversion(*dims: str) -> Callable[[NodeCall], Rule]:
    """A conversion that moves pieces along the dimensions that these arguments name."""

    def rule(call: NodeCall) -> Rule:
        moved = [int(call.arguments[name]) for name in dims]
        line = " ".join(words(len(call.shapes[0]), moved))
        return Rule(f"{line} -> {line}")

    return rule


def _attention(call: NodeCall) -> Rule:
    """Splits samples and heads (of queries with those of keys); rows stay whole."""
    grouped = call.arguments.get("enable_gqa") or call.base == "runtime.ring_attention"
    outer = "*b h" if grouped else "*b"
    return Rule(f"!{outer} (m) (e), !{outer} (t) (e), {outer} (t) d -> {outer} (m) d")


def _routed(call: NodeCall) -> Rule:
    """Rows to their experts, or back: any of their columns."""
    line = " ".join(words(len(call.shapes[0]), (0,)))
    return Rule(f"{line}, !(e), !(r) (k) -> {line}")


RULES: Mapping[str, Callable[[NodeCall], Rule]] = {
    "runtime.take": _conversion("1"),
    "runtime.all_gather": _conversion("1"),
    "runtime.reduce_scatter": _conversion("1"),
    "runtime.all_to_all": _conversion("1", "2"),
    "runtime.fan_out": _conversion(),
    "runtime.attention_of_rows": _attention,
    "runtime.ring_attention": _attention,
    "runtime.dispatch": _routed,
    "runtime.combine": _routed,
}
