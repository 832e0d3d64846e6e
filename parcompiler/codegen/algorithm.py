"""The layers of the vocabulary in words: the tensors of every rank, and the effect of each
instruction.

The steps are those of "Balancing Pipeline Parallelism with Vocabulary Parallelism" (arXiv
2411.05288), in its letters.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator

from parcompiler.codegen.literals import real
from parcompiler.codegen.quoting import WIDTH, docstring, paragraph
from parcompiler.graph import VocabularyHead
from parcompiler.lower.lowered import Lowered, Spread, SpreadLayer
from parcompiler.pieces import rows

_WIDEST = 40  # of the left column; longer entries get their own line
_GLUE = "\0"  # a space that is not broken

LETTERS = (
    "Head and loss, by every rank for each micro-batch, with x = {x}, W = its rows of {weight}, "
    "G = {labels}, g = the gradient of each row's loss"
)
_DERIVED = ", D = the derivative of `logits`"
_HERE = "logits = x Wᵀ{chain}"
_BY_ITSELF = (
    _HERE + ", m' = the largest of a row, sum' = Σ exp(logits - m'), P' = exp(logits - m') / sum'"
)
_STATISTICS = (
    "m', sum' and the label's logit of all ranks give m, sum and the loss, and its "
    "s = sum' exp(m' - m) / sum"
)
_BROADCAST = ("BROADCAST {x}", "from stage {stage}")
_REDUCE = ("REDUCE {x}.grad", "Σ Z W over all ranks, to stage {stage}, which then goes back")
_THREE_BARRIERS = (
    _BROADCAST,
    ("S", _HERE + ", and the largest of a row"),
    ("EXCHANGE maximum", "m = the largest logit of a row on any rank"),
    ("NORMALIZE", "exp(logits - m), its own sum, and the label's logit if it is here"),
    ("EXCHANGE sum", "both over all ranks, which gives the loss, and P = exp(logits - m) / sum"),
    ("T", "Z = g (P - G){back}, W.grad += Zᵀ x"),
    _REDUCE,
)
STEPS = {
    "naive": _THREE_BARRIERS,
    "interlaced": _THREE_BARRIERS,
    "vocab-1": (
        _BROADCAST,
        ("S", _BY_ITSELF),
        ("EXCHANGE statistics", _STATISTICS),
        ("T", "Z = g (s P' - G){back}, W.grad += Zᵀ x"),
        _REDUCE,
    ),
    "vocab-2": (
        _BROADCAST,
        ("S", _BY_ITSELF + "; A = P'{back} W, B = G{back} W"),
        ("EXCHANGE statistics", _STATISTICS),
        (
            "REDUCE {x}.grad",
            "Σ g (s A - B) over all ranks, to stage {stage}, which goes back without waiting for T",
        ),
        ("T", "Z = g (s P' - G){back}, W.grad += Zᵀ x"),
    ),
}


def algorithm(lowered: Lowered, spread: Spread) -> str:
    """The inside of the docstring of `vocabulary.py`."""
    parts = [paragraph(_title(lowered, spread)), _holdings(lowered, spread)]
    if spread.lookups:
        parts += [paragraph(_embedded(spread)), _table(_looking_up(spread))]
    if spread.head is not None:
        parts += [paragraph(_letters(spread.head)), _table(_steps(spread.method, spread.head))]
    return "\n\n".join(parts)


def _title(lowered: Lowered, spread: Spread) -> str:
    """The title: what is split over which ranks, and how."""
    size = lowered.size * lowered.tensor
    layers = ["embeddings"] * bool(spread.lookups) + ["head and loss"] * bool(spread.head)
    return (
        f"The vocabulary of {docstring(lowered.graph.name)} over {size} ranks by "
        f"{docstring(spread.method)}: {', '.join(layers)}."
    )


def _holdings(lowered: Lowered, spread: Spread) -> str:
    """The part of each tensor on each rank."""
    lines = []
    size = lowered.size * lowered.tensor
    for name, whole in spread.tensors.items():
        shape = " x ".join(map(str, lowered.graph.by_name[name].shape))
        each = rows(whole, size)
        padded = "" if each * size == whole else ", padded with zeros behind the last"
        lines.append(paragraph(f"{docstring(name)} ({shape}): {each} rows each{padded}."))
    return "\n".join(lines)


def _looking_up(spread: Spread) -> Iterator[tuple[str, str]]:
    """The lines of the embeddings; for several, in general terms."""
    first, *others = spread.lookups
    value, table, stage = "e", "its table", "the stage that uses it"
    if not others:
        value, table, stage = first.value, docstring(first.layer.weight), f"stage {first.stage}"
    yield f"EMBED {value}", f"the rows of {table} that are here, zeros for the others"
    yield f"REDUCE {value}", f"the sum over all ranks, to {stage}"
    yield f"BROADCAST {value}.grad", f"from {stage}, once it has gone back"
    yield f"EMBED_BACKWARD {value}", "into the gradient of the rows that are here"


def _embedded(spread: Spread) -> str:
    """The heading of the embeddings."""
    text = "Embedding, by every rank for each micro-batch"
    if len(spread.lookups) == 1:
        return f"{text}:"
    items = (
        f"{item.value} (rows of {docstring(item.layer.weight)}, for stage {item.stage})"
        for item in spread.lookups
    )
    return f"{text}, with e = {' or '.join(items)}:"


def _letters(head: SpreadLayer[VocabularyHead]) -> str:
    """The meaning of the letters."""
    labels = "1 in the column of a row's label, else 0"
    if head.layer.loss.label_smoothing:
        labels += f" (smoothed by {real(head.layer.loss.label_smoothing)})"
    if head.layer.class_weight is not None:
        labels += f", weighted by {docstring(head.layer.class_weight)}"
    x = head.value + " of this context rank's rows" * bool(head.layer.loss.axis)
    text = LETTERS.format(x=x, weight=docstring(head.layer.weight), labels=labels)
    return text + (_DERIVED if head.layer.logits is not None else "") + ":"


def _steps(method: str, head: SpreadLayer[VocabularyHead]) -> Iterator[tuple[str, str]]:
    """The lines of the head."""
    through, bias = head.layer.logits is not None, head.layer.bias is not None
    facts = {
        "x": head.value,
        "stage": head.stage,
        "chain": " + bias" * bias + ", through `logits`" * through,
        "back": " D" * through,
    }
    for step, does in STEPS[method]:
        yield step.format(**facts), does.format(**facts)


def _table(steps: Iterable[tuple[str, str]]) -> str:
    """Two columns: the instruction, and what it does."""
    lines = list(steps)
    width = min(max(len(step) for step, _ in lines), _WIDEST)
    return "\n".join(row for step, does in lines for row in _rows(step, does, width))


def _rows(step: str, does: str, width: int) -> Iterator[str]:
    """The lines of one instruction; no formula is broken in parentheses or at its `=`."""
    pad = " " * (6 + width)
    head = f"    {step.ljust(width)}  "
    if len(step) > width:
        yield head.rstrip()
        head = pad
    together = re.sub(r"\([^()]*\)| = ", lambda formula: formula[0].replace(" ", _GLUE), does)
    lines = textwrap.wrap(
        together, WIDTH, initial_indent=head, subsequent_indent=pad, break_on_hyphens=False
    )
    yield from (line.replace(_GLUE, " ") for line in lines)
