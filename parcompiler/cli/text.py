"""Text -> a file of tokens, for `parcompiler train --data`.

    files, folders      *.txt *.md *.rst *.py *.json, in the order of their paths
    a saved data set    of the package datasets: its column "text", or "input_ids"
    tokens.bin          tokens already

Tokenizers are those of the package tokenizers; without one, bytes are tokens. Texts are read piece
by piece, each time they are needed: they may be larger than the memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from parcompiler.cli.output import note
from parcompiler.cli.words import HF
from parcompiler.errors import InputError
from parcompiler.runtime.checkpoint.folder import FACTS, complete
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.tokens import columns, described, write_tokens

TOKENIZER = "tokenizer.json"
KINDS = (".txt", ".md", ".rst", ".py", ".json", ".jsonl")
END = "<|endoftext|>"  # between texts
PIECE = 2**20  # characters of a text that are read at once, to the end of their line
BATCH = 64  # pieces that are encoded at once
Piece = tuple[str, bool]  # a part of a text, and whether it is the last


def check_paths(*paths: Path) -> None:
    """Refuse paths of texts and tokenizers that do not exist. Raises InputError."""
    for path in paths:
        if not path.exists():
            message = f"cannot read {path} (there is no such file or folder)"
            raise InputError(message)


def tokens_of(
    data: Sequence[Path], tokenizer: Path | None, model: str, save: Path, program: RankProgram,
    resume: str, quiet: bool,
) -> Path:  # fmt: skip
    """The file of tokens for some paths; made once, and again when a path or the tokenizer changes.

    A resumed run (`resume` is auto, no, or a path) keeps its tokenizer unless one is given, as its
    weights fit no other. Raises InputError for data that is no text, and if a package is
    missing."""
    if len(data) == 1 and data[0].suffix == ".bin":
        described(data[0])
        return data[0].absolute()
    kept = _kept(save, resume) if tokenizer is None else None
    (tokens, _), target = columns(program), save / "tokens.bin"
    size = next(s.high for s in program.inputs.values() if s.key == tokens)
    beside = Path(model.removeprefix(HF))
    beside = (beside if beside.is_dir() else beside.parent) / TOKENIZER
    if tokenizer is None and model.startswith(HF) and beside.exists():
        tokenizer = beside
    digest, characters = hashlib.sha256(str(size).encode()), 0
    for text, ends in _texts(data):
        digest.update(text.encode() + b"\0" * ends)
        characters += len(text)
    digest.update(tokenizer.read_bytes() if tokenizer is not None else b"")
    known = [digest.hexdigest()]
    if kept is not None:
        digest.update(b"\0" + kept.read_bytes())
        known = [*(known if kept.parent.resolve() == save.resolve() else []), digest.hexdigest()]
    if target.exists():
        try:
            if described(target).get("of") in known:
                return target.absolute()
        except InputError:
            pass
    pieces, below = _encoded(data, kept or tokenizer, size, save)
    count = write_tokens(target, pieces, below, of=digest.hexdigest())
    if kept is not None:
        note(f"the texts are new: they get the tokenizer of the run that goes on ({kept})", quiet)
    note(f"tokens: {count:,} of {characters:,} characters", quiet)
    return target.absolute()


def _kept(save: Path, resume: str) -> Path | None:
    """The tokenizer of the resumed run, if there is one."""
    if resume == "no":
        return None
    folder = save if resume == "auto" else Path(resume)
    is_checkpoint = (folder / FACTS).is_file()
    file = (folder.parent if is_checkpoint else folder) / TOKENIZER
    return file if file.exists() and (is_checkpoint or complete(folder)) else None


def _texts(data: Sequence[Path]) -> Iterator[Piece]:
    """The pieces of all texts, in order."""
    for path in data:
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            yield from ((text, True) for text in _of_datasets(path))
            continue
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix in KINDS)
        if not files:
            message = f"{path} has no text (files of {', '.join(KINDS)})"
            raise InputError(message)
        for file in files:
            try:
                yield from _pieces(file)
            except (OSError, UnicodeDecodeError) as error:
                message = f"cannot read {file} as text ({error}): give UTF-8, or a file of tokens"
                raise InputError(message) from error


def _pieces(file: Path) -> Iterator[Piece]:
    """A file in pieces that end at a line break."""
    with file.open(encoding="utf-8") as opened:
        piece = opened.read(PIECE) + opened.readline()
        while piece:
            following = opened.read(PIECE) + opened.readline()
            yield piece, not following
            piece = following


def _of_datasets(path: Path) -> Iterator[str]:
    """The texts of a saved data set."""
    try:
        from datasets import load_from_disk  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        message = f"{path} is a data set: pip install datasets to read it"
        raise InputError(message) from error
    found: Any = load_from_disk(str(path))
    found = found["train"] if isinstance(found, dict) else found
    if "text" not in found.column_names:
        message = f"{path} has no column 'text' (it has: {', '.join(found.column_names)})"
        raise InputError(message)
    yield from (row["text"] for row in found)


def _encoded(
    data: Sequence[Path], tokenizer: Path | None, size: int | None, save: Path
) -> tuple[Iterator[torch.Tensor], int]:
    """The tokens of texts, with the end of each marked if the tokenizer can, and their upper
    bound."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        if tokenizer is not None:
            message = f"pip install 'parcompiler[train]' to read {tokenizer}"
            raise InputError(message) from error
        if size is not None and size < 256:
            message = f"bytes are 256 tokens, and the model has {size}: install tokenizers"
            raise InputError(message) from error
        in_bytes = (torch.tensor([*text.encode()]) for text, _ in _texts(data))
        return in_bytes, 256
    if tokenizer is None:
        made = _trained(data, size)
    else:
        try:
            made = Tokenizer.from_file(str(tokenizer))
        except Exception as error:  # the package raises nothing narrower
            message = f"{tokenizer} is no tokenizer.json ({error})"
            raise InputError(message) from error
    made.save(str(save / TOKENIZER))
    return _by(made, _texts(data)), max(made.get_vocab().values()) + 1


def _by(tokenizer: Any, pieces: Iterable[Piece]) -> Iterator[torch.Tensor]:
    """The tokens of pieces, encoded in batches."""
    pieces, end = iter(pieces), tokenizer.token_to_id(END)
    while some := [*islice(pieces, BATCH)]:
        encodings = tokenizer.encode_batch([text for text, _ in some])
        for encoding, (_, ends) in zip(encodings, some, strict=True):
            mark = [end] if ends and end is not None else []
            yield torch.tensor([*encoding.ids, *mark], dtype=torch.int64)


def _trained(data: Sequence[Path], size: int | None) -> Any:
    """A byte-pair encoding trained on a text, with the size of the model's vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    if size is None or size <= 256:
        message = f"--tokenizer is missing: the model has {size or 'any number of'} tokens"
        raise InputError(message)
    made = Tokenizer(BPE())
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=min(size, 2**15), initial_alphabet=ByteLevel.alphabet(), special_tokens=[END],
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator((text for text, _ in _texts(data)), trainer)
    return made
