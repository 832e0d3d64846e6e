"""Instruction lists for readers: warm-up, a loop for the steady state, cool-down.

The text is what `parcompiler.instruction.parse` reads, and every list is read back as a check.

>>> lines = [f"{kind} stage 0 mb {i}" for i in range(4) for kind in ("FORWARD", "BACKWARD")]
>>> print(written(parse("\\n".join(lines)), sections=True))
for i in range(0, 4):
    FORWARD   stage 0  mb i
    BACKWARD  stage 0  mb i
>>> lines = ["S mb 3", "EXCHANGE statistics mb 3", "REDUCE ln_f.grad mb 3 to 1"]
>>> print(written(parse("\\n".join(lines))))
S                     mb 3        # logits of this rank's rows of the vocabulary
EXCHANGE  statistics  mb 3        # a few numbers per row, over all ranks
REDUCE    ln_f.grad   mb 3  to 1  # summed over all ranks
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from parcompiler.codegen.quoting import WIDTH
from parcompiler.instruction import (
    BACKWARDS,
    BEHIND,
    COMPUTE,
    EMBEDDING,
    GROUP,
    HEAD,
    MESSAGES,
    STAGED,
    Instruction,
    Kind,
    parse,
)

VALUED = MESSAGES | GROUP | EMBEDDING  # these have a value and a micro-batch
PERIODS = 24  # candidates for the length of a loop's body, the most frequent distances
SAVED = 2  # lines that a loop must save

# Explanations of uncommon kinds, added to the first one in a list.
EXPLAINED = {
    Kind.BACKWARD_INPUT: "gradients of inputs; those of weights come later",
    Kind.BACKWARD_WEIGHT: "gradients of weights, which BACKWARD_INPUT left",
    Kind.UPDATE: "an optimizer step by this micro-batch alone",
    Kind.EMBED: "rows of the table that are here, else zeros",
    Kind.EMBED_BACKWARD: "gradients of the table's rows that are here",
    Kind.S: "logits of this rank's rows of the vocabulary",
    Kind.NORMALIZE: "their softmax, by the maximum of all ranks",
    Kind.T: "gradients of this rank's rows of the head",
    Kind.BROADCAST: "to all ranks",
    Kind.REDUCE: "summed over all ranks",
    Kind.EXCHANGE: "a few numbers per row, over all ranks",
    Kind.GATHER_PARAMETERS: "rows that other data ranks updated, beside the next forward",
    Kind.PUSH_PULL: "gradients to the first data rank, parameters back",
    Kind.AVERAGE_PARAMETERS: "means of the weights of all data ranks, at the end of a round",
    Kind.UNSHARD: "gather whole parameters from the rows of all data ranks",
    Kind.RESHARD: "free all but this data rank's rows",
}


@dataclass(frozen=True, slots=True)
class Repeat:
    """Rounds of a list: `body` is the first, each later one is `step` micro-batches on."""

    start: int
    body: tuple[Instruction, ...]
    rounds: int
    step: int

    @property
    def end(self) -> int:
        """The index after the last round."""
        return self.start + self.rounds * len(self.body)

    @property
    def saved(self) -> int:
        """The number of lines saved by the loop."""
        return (self.rounds - 1) * len(self.body) - 1

    @property
    def index(self) -> int:
        """The micro-batch that the loop's variable starts with: that of the first forward."""
        forwards = [x for x in self.body if x.kind is Kind.FORWARD]
        (first, *_) = forwards or self.body
        assert first.microbatch is not None
        return first.microbatch


def written(instructions: Sequence[Instruction], *, sections: bool = False) -> str:
    """The text of a list; with `sections` under headings that say its phases."""
    phases = _phases(instructions) if sections else [("", tuple(instructions))]
    rows: list[tuple[str, list[str], Kind | None]] = []  # indentation, cells, kind to explain
    for heading, lines in phases:
        space = [("", [""], None)] if rows else []
        rows += [*space, ("", [f"# {heading}"], None)] if heading else []
        rows += _rows(lines)
    widths = Counter[int]()
    for indent, cells, _ in rows:
        for column, cell in enumerate(cells if len(cells) > 1 else []):
            widths[column] = max(widths[column], len(cell) + (len(indent) if column == 0 else 0))
    texts = [_line(indent, cells, widths) for indent, cells, _ in rows]
    text = "\n".join(_explained(texts, [kind for *_, kind in rows]))
    assert parse(text) == tuple(instructions), "the text of a list does not read back as the list"
    return text


def _phases(instructions: Sequence[Instruction]) -> list[tuple[str, Sequence[Instruction]]]:
    """Warm-up, steady state, cool-down and the end of the step, without empty ones.

    The steady state is the loop of forwards and backwards or, if nothing repeats, the lines from
    the first backward to the last forward.
    """
    lines = list(instructions)
    end = len(lines)
    while end and lines[end - 1].microbatch is None:
        end -= 1
    names = ("Warm-up", "Steady state", "Cool-down")
    repeat = _best(lines[:end])
    if repeat is not None and len({x.kind for x in repeat.body} & {Kind.FORWARD, *BACKWARDS}) > 1:
        start, stop = repeat.start, repeat.end
    else:
        start = next((k for k in range(end) if lines[k].kind in BACKWARDS), end)
        forwards = (k for k in range(end) if lines[k].kind is Kind.FORWARD)
        stop = max(forwards, default=-1) + 1
        while stop < end and lines[stop].kind not in COMPUTE and not lines[stop].gradient:
            stop += 1
        if stop <= start:
            names, start = ("Forwards", "", "Backwards"), stop
    parts = (lines[:start], lines[start:stop], lines[stop:end])
    phases: list[tuple[str, Sequence[Instruction]]] = [
        (name, part) for name, part in zip(names, parts, strict=True) if part
    ]
    headed = len(phases) > 1
    gathers = [line for line in lines[end:] if line.kind in BEHIND]
    phases.append(("End of the step", lines[end : len(lines) - len(gathers)]))
    phases = [(name if headed else "", part) for name, part in phases if part]
    return [*phases, *([("Behind the optimizer's step", gathers)] if gathers else [])]


def _rows(lines: Sequence[Instruction]) -> list[tuple[str, list[str], Kind | None]]:
    """The lines of a phase as cells, with loops wherever something repeats."""
    repeat = _best(lines)
    if repeat is None:
        return [("", _cells(item), item.kind) for item in lines]
    first, step = repeat.index, repeat.step
    bounds = f"{first}, {first + step * (repeat.rounds - 1) + 1}"
    if step > 1:
        bounds += f", {step}"
    body = [("    ", _cells(item, first), item.kind) for item in repeat.body]
    loop = [("", [f"for i in range({bounds}):"], None), *body]
    return [*_rows(lines[: repeat.start]), *loop, *_rows(lines[repeat.end :])]


def _best(lines: Sequence[Instruction]) -> Repeat | None:
    """The loop that saves most lines, if one saves enough; of several the shortest and first."""
    alike = [replace(item, microbatch=None) for item in lines]
    places: dict[Instruction, list[int]] = {}
    for place, item in enumerate(alike):
        places.setdefault(item, []).append(place)
    distances = Counter(
        after - before
        for starts in places.values()
        for apart in range(1, min(len(starts), PERIODS))
        for before, after in zip(starts, starts[apart:], strict=False)
    )
    periods = sorted(period for period, _ in distances.most_common(PERIODS))
    repeats = [repeat for period in periods for repeat in _repeats(lines, alike, period)]
    best = max(repeats, key=lambda repeat: repeat.saved, default=None)
    return best if best is not None and best.saved >= SAVED else None


def _repeats(
    lines: Sequence[Instruction], alike: Sequence[Instruction], period: int
) -> Iterator[Repeat]:
    """All longest loops whose body has `period` lines."""
    start, step = 0, 0
    for place in range(len(lines) - period + 1):
        shift = 0
        if place + period < len(lines) and alike[place] == alike[place + period]:
            now, later = lines[place].microbatch, lines[place + period].microbatch
            shift = 0 if now is None or later is None else later - now
        if shift != step:
            rounds = (place - start) // period + 1
            if step > 0 and rounds > 1:
                yield Repeat(start, tuple(lines[start : start + period]), rounds, step)
            start, step = place, shift


def _cells(item: Instruction, first: int | None = None) -> list[str]:
    """The words of an instruction by column, those without columns as one cell.

    In a loop whose variable starts with `first`, micro-batches are relative to it.
    """
    words = str(item).split()
    if first is not None and item.microbatch is not None:
        apart = item.microbatch - first
        words[words.index("mb") + 1] = f"i{apart:+}" if apart else "i"
    if item.kind in STAGED:
        ranks = [" ".join(words[5:])] if words[5:] else []
        return [words[0], " ".join(words[1:3]), " ".join(words[3:5]), *ranks]
    if item.kind in HEAD:
        return [words[0], "", " ".join(words[1:3])]
    if item.kind in VALUED or (item.kind is Kind.REDUCE_GRADIENTS and len(words) == 6):
        peer = [" ".join(words[4:])] if words[4:] else []
        return [*words[:2], " ".join(words[2:4]), *peer]
    return [" ".join(words)]


def _line(indent: str, cells: Sequence[str], widths: Counter[int]) -> str:
    """One line of the table."""
    if len(cells) == 1:
        return indent + cells[0]
    padded = [cell.ljust(widths[column]) for column, cell in enumerate(cells)]
    padded[0] = cells[0].ljust(widths[0] - len(indent))
    return (indent + "  ".join(padded)).rstrip()


def _explained(texts: Sequence[str], kinds: Sequence[Kind | None]) -> Iterator[str]:
    """The lines, with an explanation after the first of each kind."""
    explained = {kinds.index(kind): EXPLAINED[kind] for kind in EXPLAINED if kind in kinds}
    width = max((len(texts[place]) for place in explained), default=0)
    for place, text in enumerate(texts):
        remark = explained.get(place)
        if remark is not None and width + 4 + len(remark) > WIDTH:
            yield f"{' ' * (len(text) - len(text.lstrip()))}# {remark}"
            remark = None
        yield text if remark is None else f"{text.ljust(width)}  # {remark}"
