"""Texts as files of tokens: read piece by piece, with the tokens of the whole."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import parcompiler as pc
from parcompiler.cli import text
from parcompiler.runtime.program import Input, RankProgram


def program(high: int) -> RankProgram:
    inputs = {"x": Input("input_ids", (2, 8), torch.int64, high=high)}
    return RankProgram(0, 1, "cpu", 1, "0", torch.float32, (0,), (), (), inputs=inputs)


def test_a_text_larger_than_a_piece_has_the_tokens_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, save = tmp_path / "texts", tmp_path / "run"
    folder.mkdir()
    save.mkdir()
    lines = [f"line {n}: what {n % 7} said to {n % 5}\n" for n in range(200)]
    (folder / "a.txt").write_text("".join(lines), encoding="utf-8")
    (folder / "b.md").write_text("the end, with no newline", encoding="utf-8")
    monkeypatch.setattr(text, "PIECE", 100)
    monkeypatch.setattr(text, "BATCH", 3)
    pieces = [*text._texts([folder])]
    assert len(pieces) > 30
    assert max(len(piece) for piece, _ in pieces) < 150
    assert [piece for piece, _ in pieces[:-1]] != lines
    assert "".join(piece for piece, _ in pieces[:-1]) == "".join(lines)
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 2) + [True, True]

    file = text.tokens_of([folder], None, "model.py:make", save, program(300), quiet=True)
    tokenizer = Tokenizer.from_file(str(save / "tokenizer.json"))
    end = tokenizer.token_to_id(text.END)
    expected = [*tokenizer.encode("".join(lines)).ids, end]
    expected += [*tokenizer.encode("the end, with no newline").ids, end]
    facts = json.loads(Path(f"{file}.json").read_text(encoding="utf-8"))
    rows = pc.TokenRows(file, program(300), labels="same")
    found = rows.batch(range(len(rows)))["input_ids"].flatten().tolist()
    assert facts["tokens"] == len(expected)
    assert found == expected[: len(found)]
    written = file.stat().st_mtime_ns
    text.tokens_of([folder], None, "model.py:make", save, program(300), quiet=True)
    assert file.stat().st_mtime_ns == written, "made once"
    (folder / "b.md").write_text("another end", encoding="utf-8")
    text.tokens_of([folder], None, "model.py:make", save, program(300), quiet=True)
    assert file.stat().st_mtime_ns != written


def test_tokens_come_piece_by_piece_and_must_be_below(tmp_path: Path) -> None:
    file = tmp_path / "tokens.bin"
    assert pc.write_tokens(file, iter([torch.arange(5), torch.arange(200)]), below=200) == 205
    assert json.loads(Path(f"{file}.json").read_text())["dtype"] == "uint8"
    with pytest.raises(pc.InputError, match=r"token 199 of .* is not below 100"):
        pc.write_tokens(file, iter([torch.arange(200)]), below=100)
    with pytest.raises(pc.InputError, match="is no file of tokens"):
        pc.TokenRows(file, program(300))
