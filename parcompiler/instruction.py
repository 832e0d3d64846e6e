"""One instruction of one rank: the language that lowering writes and everything else reads.

The verifier, the simulator, the code generator and the runtime read the same lists, so that the
program that runs is the one verified and simulated. The text of an instruction parses back to it:

>>> text = "SEND layers_1 mb 3 to 1"
>>> Instruction.parse(text) == Instruction(Kind.SEND, value="layers_1", microbatch=3, peer=1)
True
>>> str(Instruction.parse(text)) == text
True
>>> print(Instruction(Kind.RECV, value="layers_1", gradient=True, microbatch=0, peer=1))
RECV layers_1.grad mb 0 from 1
>>> print(Instruction.parse("REDUCE wte mb 2 to 0"), Instruction.parse("S mb 2"), sep=", ")
REDUCE wte mb 2 to 0, S mb 2
>>> print(Instruction(Kind.REDUCE_GRADIENTS, value="bucket_0", microbatch=2, ranks=(0,)))
REDUCE_GRADIENTS bucket_0 mb 2 ranks 0
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from parcompiler.errors import InputError

EXPERTS = "experts_"  # prefix of the labels of buckets of experts
ROWS = "rows_"  # and of tables with row gradients


class Kind(StrEnum):
    """The kind of an instruction. `mb` is a micro-batch, `value` a tensor that crosses ranks."""

    FORWARD = "FORWARD"  # stage, mb: run the stage's module, keep what its backward needs
    BACKWARD = "BACKWARD"  # stage, mb: gradients of its inputs and its parameters
    BACKWARD_INPUT = "BACKWARD_INPUT"  # stage, mb: gradients of its inputs; weights come later
    BACKWARD_WEIGHT = "BACKWARD_WEIGHT"  # stage, mb: the products that BACKWARD_INPUT left
    UPDATE = "UPDATE"  # stage, mb: an optimizer step by the gradients of this micro-batch alone;
    # on a timeline, with ranks only: the step of all parameters of a rank, after every list
    SEND = "SEND"  # value mb peer: start sending; the tensor may be released when it is done
    RECV = "RECV"  # value mb peer: post the receive; the first use waits for it
    EMBED = "EMBED"  # value, mb: look up the rows of this rank's piece of a table
    EMBED_BACKWARD = "EMBED_BACKWARD"  # value, mb: gradients of those rows
    S = "S"  # mb: logits of this rank's piece of the vocabulary, and their local softmax
    NORMALIZE = "NORMALIZE"  # mb: powers and their sum, once the largest logit of all is known
    T = "T"  # mb: gradients of this rank's piece of the head
    BROADCAST = "BROADCAST"  # value mb peer: every rank gets that rank's tensor
    REDUCE = "REDUCE"  # value mb peer: the sum of all ranks' parts goes to that rank
    EXCHANGE = "EXCHANGE"  # value mb: numbers of each row, over all ranks
    REDUCE_GRADIENTS = "REDUCE_GRADIENTS"  # value, ranks: sum of a tied parameter's copies, or of a
    # bucket over the data ranks; with mb, of this micro-batch's summand, to pieces
    SHARE_LOSS = "SHARE_LOSS"  # peer: every rank gets the mean loss from that rank
    GATHER_PARAMETERS = "GATHER_PARAMETERS"  # value, ranks: rows that other data ranks updated
    AVERAGE_PARAMETERS = "AVERAGE_PARAMETERS"  # value, ranks: mean of data ranks' weights
    PUSH_PULL = "PUSH_PULL"  # value, ranks: gradients to the server of a row, parameters back
    UNSHARD = "UNSHARD"  # stage, mb, ranks: start gathering its parameters from their rows
    RESHARD = "RESHARD"  # stage, mb: keep only this data rank's rows of them

    __hash__ = str.__hash__  # Enum's is slow, and kinds are hashed often


BACKWARDS = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})  # these give gradients of inputs
FINAL = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)  # these make gradients of parameters final
COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD_WEIGHT}) | BACKWARDS  # of stages
MESSAGES = frozenset({Kind.SEND, Kind.RECV})
SHARDING = frozenset({Kind.UNSHARD, Kind.RESHARD})  # of the parameters of stages, over data ranks
STAGED = COMPUTE | SHARDING | {Kind.UPDATE}  # these name a stage and a micro-batch
# Instructions of all ranks for the layers of the vocabulary, and their collectives.
EMBEDDING = frozenset({Kind.EMBED, Kind.EMBED_BACKWARD})
HEAD = frozenset({Kind.S, Kind.NORMALIZE, Kind.T})
ASKS_FIRST = frozenset({"naive", "interlaced"})  # methods that NORMALIZE by the maximum of all
TRANSFERS = frozenset({Kind.BROADCAST, Kind.REDUCE})
GROUP = TRANSFERS | {Kind.EXCHANGE}
WORK = COMPUTE | EMBEDDING | HEAD  # these occupy a rank
_OUTWARD = frozenset({Kind.SEND, Kind.REDUCE})
BEHIND = frozenset(  # after the optimizer's step, or instead of it
    {Kind.GATHER_PARAMETERS, Kind.AVERAGE_PARAMETERS, Kind.PUSH_PULL}
)
BUCKETED = BEHIND | {Kind.REDUCE_GRADIENTS}  # of several tensors
_VALUED = BUCKETED | EMBEDDING | {Kind.EXCHANGE}
_FIELDS: dict[Kind, set[str]] = {
    **{kind: {"stage", "microbatch"} for kind in (*COMPUTE, Kind.UPDATE)},
    **{kind: {"value", "gradient", "microbatch", "peer"} for kind in (*MESSAGES, *TRANSFERS)},
    **{kind: {"value", "microbatch"} for kind in (*EMBEDDING, Kind.EXCHANGE)},
    **{kind: {"microbatch"} for kind in HEAD},
    **{kind: {"value", "ranks"} for kind in BUCKETED},  # and perhaps a micro-batch
    Kind.SHARE_LOSS: {"peer"},
    Kind.UNSHARD: {"stage", "microbatch", "ranks"},
    Kind.RESHARD: {"stage", "microbatch"},
}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a rank's program; which fields are set follows from `kind`."""

    kind: Kind
    stage: int | None = None
    microbatch: int | None = None
    value: str | None = None
    gradient: bool = False
    peer: int | None = None
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        """The line that `parse` reads."""
        words: list[str] = [self.kind.value]
        if self.value is not None:
            words.append(self.value + (".grad" if self.gradient else ""))
        if self.stage is not None:
            words += ["stage", str(self.stage)]
        if self.microbatch is not None:
            words += ["mb", str(self.microbatch)]
        if self.peer is not None:
            words += ["to" if self.kind in _OUTWARD else "from", str(self.peer)]
        if self.ranks:
            words += ["ranks", ",".join(map(str, self.ranks))]
        return " ".join(words)

    @classmethod
    def parse(cls, line: str) -> Instruction:
        """Read one line. Raises InputError naming the line when it is not an instruction."""
        try:
            fields = dict(_fields(line.split()))
            kind = Kind(str(fields["kind"]))
            optional = {"microbatch"} if kind is Kind.REDUCE_GRADIENTS else set()
            wanted = {"ranks"} if kind is Kind.UPDATE and "ranks" in fields else _FIELDS[kind]
            if fields.keys() - optional != {"kind", *wanted} - optional:
                raise ValueError(sorted(fields))
            return cls(**fields)  # type: ignore[arg-type]
        except (ValueError, IndexError) as error:
            message = f"not an instruction: {line!r} (for example 'FORWARD stage 0 mb 3')"
            raise InputError(message) from error


def _fields(words: list[str]) -> Iterator[tuple[str, object]]:
    """The fields in the words of a line."""
    kind = Kind(words[0])
    yield "kind", kind
    rest = words[1:]
    if kind in MESSAGES | TRANSFERS:
        yield "value", rest[0].removesuffix(".grad")
        yield "gradient", rest[0].endswith(".grad")
        rest = rest[1:]
    elif kind in _VALUED:
        yield "value", rest[0]
        rest = rest[1:]
    way = "to" if kind in _OUTWARD else "from"
    names = {"stage": "stage", "mb": "microbatch", way: "peer"}
    for key, text in zip(rest[::2], rest[1::2], strict=True):
        if key == "ranks":
            yield "ranks", tuple(int(rank) for rank in text.split(","))
        else:
            yield names.get(key, key), int(text)


_LOOP = re.compile(r"for i in range\((\d+), (\d+)(?:, ([1-9]\d*))?\):")
_INDEX = re.compile(r"\bmb i([+-]\d+)?(?= |$)")  # a micro-batch in the body of a loop


def parse(text: str) -> tuple[Instruction, ...]:
    """Read a program: one instruction a line, comments and blank lines ignored, loops unrolled.

    >>> [str(i) for i in parse('''
    ... for i in range(1, 3):  # the steady state
    ...     FORWARD stage 0 mb i
    ...     BACKWARD stage 0 mb i-1
    ... REDUCE_GRADIENTS tied_0 ranks 0,3
    ... ''')]  # doctest: +NORMALIZE_WHITESPACE
    ['FORWARD stage 0 mb 1', 'BACKWARD stage 0 mb 0', 'FORWARD stage 0 mb 2',
     'BACKWARD stage 0 mb 1', 'REDUCE_GRADIENTS tied_0 ranks 0,3']
    """
    instructions: list[Instruction] = []
    indices, body = range(0), list[str]()
    for raw in (*text.splitlines(), "end"):
        line = raw.partition("#")[0].rstrip()
        if not line:
            continue
        if line.startswith(" ") and indices:
            body.append(line.strip())
            continue
        for i in indices:
            for inner in body:
                written = _INDEX.sub(lambda match, i=i: f"mb {i + int(match[1] or 0)}", inner)  # type: ignore[misc]
                instructions.append(Instruction.parse(written))
        indices, body = range(0), []
        if loop := _LOOP.fullmatch(line):
            indices = range(int(loop[1]), int(loop[2]), int(loop[3] or 1))
        elif raw != "end":
            instructions.append(Instruction.parse(line))
    return tuple(instructions)


def listing(instructions: Iterable[Instruction]) -> str:
    """The text of a program, one instruction a line; `parse` reads it back."""
    return "\n".join(map(str, instructions))


class Instructions(tuple[Instruction, ...]):
    """One rank's instruction list; prints one instruction a line."""

    __slots__ = ()

    def __str__(self) -> str:
        """The text that `parse` reads."""
        return listing(self)


def is_of_experts(line: Instruction) -> bool:
    """Whether a line is for experts, among the data ranks that have the same ones."""
    return line.kind in BUCKETED and (line.value or "").startswith(EXPERTS)
