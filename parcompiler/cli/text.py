"""Text -> a file of tokens, for `parcompiler train --data`.

    files, folders      *.txt *.md *.rst *.py *.json, in the order of their paths
    a saved data set    of the package datasets: its column "text", or "input_ids"
    tokens.bin          tokens already

Tokenizers are those of the package tokenizers; without one, bytes are tokens. Texts are read piece
by piece, each time they are needed: they may be larger than the memory.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from parcompiler.cli.output import note
from parcompiler.cli.words import HF
from parcompiler.errors import InputError
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.tokens import columns, described, write_tokens

TOKENIZER = "tokenizer.json"
KINDS = (".txt", ".md", ".rst", ".py", ".json", ".jsonl")
END = "<|endoftext|>"  # between texts
PIECE = 2**20  # characters of a text that are read at once, to the end of their line
BATCH = 64  # pieces that are encoded at once
Piece = tuple[str, bool]  # a part of a text, and whether it is the last


def check(data: Sequence[Path], tokenizer: Path | None) -> None:
    """Refuse data whose first text cannot be read, and what is no tokenizer, before anything is
    compiled. Raises InputError."""
    tokens = [str(path) for path in data if path.suffix == ".bin"]
    if tokens and len(data) > 1:
        message = (
            f"--data takes one file of tokens, or texts ({len(data)} paths given, with "
            f"{', '.join(tokens)}): give the file of tokens alone, or leave it out"
        )
        raise InputError(message)
    for path in data:
        if not path.exists():
            message = f"cannot read {path} (there is no such file or folder)"
            raise InputError(message)
    if tokens:
        described(data[0])
        if tokenizer is not None:
            message = f"--tokenizer is for texts, and {data[0]} has tokens already: leave it out"
            raise InputError(message)
    else:
        for path in data:
            next(_texts([path]), None)
    if tokenizer is not None:
        _opened(tokenizer)


def _are_tokens(data: Sequence[Path]) -> bool:
    """Whether the data are a file of tokens already."""
    return len(data) == 1 and data[0].suffix == ".bin"


def tokens_of(
    data: Sequence[Path], tokenizer: Path | None, model: str, save: Path, program: RankProgram,
    resumed: Path | None, quiet: bool,
) -> Path:  # fmt: skip
    """The file of tokens for some paths; made once, and again when a path or the tokenizer changes.

    A run that goes on from the checkpoint `resumed` keeps its tokenizer unless one is given, as its
    weights fit no other. Raises InputError for data that is no text, and if a package is
    missing."""
    if _are_tokens(data):
        return data[0].absolute()
    kept = _kept(resumed) if tokenizer is None else None
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
        note(
            "the texts have changed: they are encoded with the tokenizer of the run that goes on "
            f"({kept})",
            quiet,
        )
    note(f"tokens: {count:,} of {characters:,} characters", quiet)
    return target.absolute()


def _kept(resumed: Path | None) -> Path | None:
    """The tokenizer in the folder of the run that goes on, if there is one."""
    file = None if resumed is None else resumed.parent / TOKENIZER
    return file if file is not None and file.exists() else None


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
            message = f"{path} has no text files ({', '.join(KINDS)}): give another --data"
            raise InputError(message)
        for file in files:
            try:
                yield from _pieces(file)
            except (OSError, UnicodeDecodeError) as error:
                message = (
                    f"cannot read {file} as text ({error}): --data takes texts in UTF-8, or a file "
                    "of tokens (.bin)"
                )
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
        message = f"{path} is a data set of the package datasets: pip install datasets"
        raise InputError(message) from error
    try:
        dataset: Any = load_from_disk(str(path))
        dataset = dataset["train"] if isinstance(dataset, dict) else dataset
    except Exception as error:  # the package raises nothing narrower
        message = f"cannot read the data set {path} ({type(error).__name__}: {error})"
        raise InputError(message) from error
    if "text" not in dataset.column_names:
        message = f"{path} has no column 'text' (it has: {', '.join(dataset.column_names)})"
        raise InputError(message)
    yield from (row["text"] for row in dataset)


def _encoded(
    data: Sequence[Path], tokenizer: Path | None, size: int | None, save: Path
) -> tuple[Iterator[torch.Tensor], int]:
    """The tokens of texts, with the end of each marked if the tokenizer can, and their upper
    bound."""
    if tokenizer is None and importlib.util.find_spec("tokenizers") is None:
        if size is not None and size < 256:
            message = (
                f"without the package tokenizers, the tokens are 256 bytes, and the model has only "
                f"{size} tokens: pip install 'parcompiler[train]'"
            )
            raise InputError(message)
        in_bytes = (torch.tensor([*text.encode()]) for text, _ in _texts(data))
        return in_bytes, 256
    made = _trained(data, size) if tokenizer is None else _opened(tokenizer)
    (save / TOKENIZER).write_text(made.to_str(pretty=True), encoding="utf-8")
    return _by(made, _texts(data)), max(made.get_vocab().values()) + 1


def _opened(path: Path) -> Any:
    """The tokenizer of a file. Raises InputError where there is none, or no package to read it."""
    if not path.is_file():
        reason = "it is a folder" if path.is_dir() else "there is no such file"
        message = f"cannot read {path} ({reason}): --tokenizer takes a tokenizer.json"
        raise InputError(message)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        message = f"{path} needs the package tokenizers: pip install 'parcompiler[train]'"
        raise InputError(message) from error
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        message = f"{path} is not a tokenizer.json ({error})"
        raise InputError(message) from error


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
        known = "the model does not say how many it has" if size is None else f"it has {size}"
        message = (
            "--tokenizer is missing: a tokenizer is made of the text only for a model of more than "
            f"256 tokens ({known})"
        )
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
