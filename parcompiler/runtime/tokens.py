"""A file of tokens, mapped into memory, as rows of a model's inputs.

    tokens      5 9 2 7 4 8 1 3 6 ...        one text after another
    row 0       5 9 2 7                      tokens
                9 2 7 4                      labels: the tokens that follow (or the same, for models
    row 1               4 8 1 3                      that shift by themselves, as transformers' do)

Beside `tokens.bin` stands `tokens.bin.json`: the dtype of its integers, and how many there are.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from parcompiler.errors import InputError, check_no_pipe, path_of
from parcompiler.runtime.axis import raw
from parcompiler.runtime.program import RankProgram

DTYPES = {"uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64}
PIECE = 2**20  # tokens of an array that are read at once
LABELS = ("next", "same")


def write_tokens(
    path: str | Path, tokens: Any, below: int | None = None,
    **facts: object,
) -> int:  # fmt: skip
    """Write a file of `tokens` at `path`, in the narrowest integers that hold them; returns their
    number.

    `tokens` is a tensor, an array of numpy, a list of integers, or an iterable of tensors. The
    tokens of an iterable must be less than `below` (None: 2³¹ - 1), which decides the width of the
    integers. `facts` are kept in the JSON beside the file. Raises InputError for a larger token.
    """
    listed = isinstance(tokens, list) and isinstance(next(iter(tokens), 0), int)
    if listed or hasattr(tokens, "__array__"):
        parts = functools.partial(_parts, tokens)
        below = below or max((int(part.max()) for part in parts()), default=0) + 1
        tokens = parts()
    below = below or torch.iinfo(torch.int32).max
    path = path_of(path)
    kind = next(name for name, dtype in DTYPES.items() if below - 1 <= torch.iinfo(dtype).max)
    beside, count, largest = Path(f"{path}.json"), 0, 0
    beside.unlink(missing_ok=True)  # written last: without it this is no file of tokens
    with path.open("wb") as file:
        for piece in tokens:
            largest = max(largest, int(piece.max()) if len(piece) else 0)
            if largest >= below:
                message = f"token {largest} of {path} is not below {below}"
                raise InputError(message)
            data = piece.to(DTYPES[kind]).contiguous()
            file.write(raw(data))
            count += len(data)
    described = {"dtype": kind, "tokens": count, "largest": largest, **facts}
    beside.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return count


def _parts(tokens: Any) -> Iterator[torch.Tensor]:
    """The pieces of a tensor, an array or a list of integers."""
    for k in range(0, len(tokens), PIECE):
        yield torch.as_tensor(tokens[k : k + PIECE]).long()


class TokenRows(Dataset[dict[str, torch.Tensor]]):
    """Rows of `length` tokens with their labels, as the inputs that a worker's program has.

    `part` selects rows: (0.0, 0.95) are the first 95 %. Labels are the tokens that follow with
    `labels` "next", the tokens themselves with "same". Raises InputError where it is no file of
    tokens, or the program has other inputs than rows of tokens and labels.
    """

    def __init__(
        self,
        path: str | Path,
        program: RankProgram,
        labels: str = "next",
        part: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        facts, self._keys = described(path_of(path)), columns(program)
        spec = next(s for s in program.inputs.values() if s.key == self._keys[0])
        if spec.high is not None and facts["largest"] >= spec.high:
            message = (
                f"{path} has tokens up to {facts['largest']}, and the model takes those below "
                f"{spec.high}: take a tokenizer with its vocabulary"
            )
            raise InputError(message)
        self.length, self._shift = spec.shape[1], int(labels == "next")
        self._tokens = torch.from_file(
            str(path), size=facts["tokens"], dtype=DTYPES[facts["dtype"]]
        )
        rows = max(0, (len(self._tokens) - self._shift) // self.length)
        first, end = (round(rows * place) for place in part)
        self._rows = range(first, end)

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """One row: tokens and labels [length]."""
        return {key: tensor[0] for key, tensor in self.batch([number]).items()}

    def batch(self, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        """Several rows: tokens and labels [rows, length]."""
        starts = [self._rows[number] * self.length for number in numbers]
        rows = torch.stack([self._tokens[s : s + self.length + self._shift] for s in starts]).long()
        tokens, labels = self._keys
        batch = {tokens: rows[:, : self.length].contiguous()}
        return batch | ({labels: rows[:, self._shift :].contiguous()} if labels else {})


def described(path: Path) -> Mapping[str, Any]:
    """The JSON beside a file of tokens. Raises InputError where it is not one."""
    try:
        check_no_pipe(Path(f"{path}.json"))
        facts = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
        size = DTYPES[facts["dtype"]].itemsize * facts["tokens"]
        if path.stat().st_size == size and isinstance(facts["largest"], int):
            return dict(facts)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    message = (
        f"{path} is not a file of tokens, or {path.name}.json does not fit it (parcompiler train "
        "and pc.write_tokens write both)"
    )
    raise InputError(message)


def columns(program: RankProgram) -> tuple[str, str]:
    """The keys of the inputs for tokens and labels ("": no labels). Raises InputError where there
    are other inputs."""
    rows = [s for s in program.inputs.values() if len(s.shape) == 2 and s.dtype == torch.int64]
    if len(rows) not in (1, 2) or len(rows) != len(program.inputs):
        listed = ", ".join(f"{s.key} {s.shape} {s.dtype}" for s in program.inputs.values())
        message = (
            "a file of tokens needs a model whose inputs are tokens and labels, both [rows, "
            f"tokens] of int64 (this model: {listed}): give a file of safetensors, or write a loop "
            "of your own"
        )
        raise InputError(message)
    named = [s.key for s in rows if "label" in s.key or "target" in s.key] or [rows[-1].key]
    labels = named[0] if len(rows) == 2 else ""
    return next(s.key for s in rows if s.key != labels), labels
