"""Text -> a file of tokens: what `parcompiler train --data` names.

    files, folders      *.txt *.md *.rst *.py *.json, in the order of their paths
    a saved data set    of the package datasets: its column "text", or "input_ids"
    tokens.bin          tokens already

The tokenizer is the package tokenizers'; a text without one is taken byte by byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from parcompiler.cli.words import HF
from parcompiler.errors import InputError
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.tokens import columns, described, write_tokens

KINDS = (".txt", ".md", ".rst", ".py", ".json", ".jsonl")
END = "<|endoftext|>"  # between texts


def tokens_of(
    data: Sequence[Path], tokenizer: Path | None, model: str, save: Path, program: RankProgram,
    quiet: bool,
) -> Path:  # fmt: skip
    """The file of tokens for some paths; made once, and again when a path or the tokenizer changes.

    Raises InputError for what is no text, and where a package is missing."""
    if len(data) == 1 and data[0].suffix == ".bin":
        described(data[0])
        return data[0].absolute()
    (tokens, _), target = columns(program), save / "tokens.bin"
    size = next(s.high for s in program.inputs.values() if s.key == tokens)
    beside = Path(model.removeprefix(HF))
    beside = (beside if beside.is_dir() else beside.parent) / "tokenizer.json"
    if tokenizer is None and model.startswith(HF) and beside.exists():
        tokenizer = beside
    texts = [*_texts(data)]
    digest = hashlib.sha256(json.dumps([texts, size]).encode())
    digest.update(tokenizer.read_bytes() if tokenizer is not None else b"")
    if target.exists():
        try:
            if described(target).get("of") == digest.hexdigest():
                return target.absolute()
        except InputError:
            pass
    found = torch.tensor(_encoded(texts, tokenizer, size, save), dtype=torch.int64)
    write_tokens(target, found, of=digest.hexdigest())
    if not quiet:
        import click

        characters = sum(map(len, texts))
        click.echo(f"tokens: {len(found):,} of {characters:,} characters", err=True)
    return target.absolute()


def _texts(data: Sequence[Path]) -> Iterator[str]:
    """All texts, in order."""
    for path in data:
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            yield from _of_datasets(path)
            continue
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix in KINDS)
        if not files:
            message = f"{path} has no text (files of {', '.join(KINDS)})"
            raise InputError(message)
        for file in files:
            try:
                yield file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                message = f"cannot read {file} as text ({error}): give UTF-8, or a file of tokens"
                raise InputError(message) from error


def _of_datasets(path: Path) -> Iterator[str]:
    """The texts of a saved data set."""
    try:
        from datasets import load_from_disk  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        message = f"{path} is a data set: pip install 'parcompiler[train]' to read it"
        raise InputError(message) from error
    found: Any = load_from_disk(str(path))
    found = found["train"] if isinstance(found, dict) else found
    if "text" not in found.column_names:
        message = f"{path} has no column 'text' (it has: {', '.join(found.column_names)})"
        raise InputError(message)
    yield from (row["text"] for row in found)


def _encoded(
    texts: Sequence[str], tokenizer: Path | None, size: int | None, save: Path
) -> list[int]:
    """The tokens of texts, the end of each marked where the tokenizer can."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        if tokenizer is not None:
            message = f"pip install 'parcompiler[train]' to read {tokenizer}"
            raise InputError(message) from error
        if size is not None and size < 256:
            message = f"bytes are 256 tokens, and the model has {size}: install tokenizers"
            raise InputError(message) from error
        return [byte for text in texts for byte in text.encode()]
    made = _trained(texts, size) if tokenizer is None else Tokenizer.from_file(str(tokenizer))
    made.save(str(save / "tokenizer.json"))
    end = made.token_to_id(END)
    return [
        number
        for encoding in made.encode_batch(list(texts))
        for number in [*encoding.ids, *([] if end is None else [end])]
    ]


def _trained(texts: Sequence[str], size: int | None) -> Any:
    """A byte-pair encoding of a text, with as many tokens as the model knows."""
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
    made.train_from_iterator(texts, trainer)
    return made
