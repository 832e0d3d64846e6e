"""Texts as files of tokens: read piece by piece, with the tokens of the whole."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import parcompiler as pc
from parcompiler.cli import text
from parcompiler.runtime.checkpoint.folder import begin, finish
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

    file = text.tokens_of([folder], None, "model.py:make", save, program(300), None, quiet=True)
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
    text.tokens_of([folder], None, "model.py:make", save, program(300), None, quiet=True)
    assert file.stat().st_mtime_ns == written, "made once"
    (folder / "b.md").write_text("another end", encoding="utf-8")
    text.tokens_of([folder], None, "model.py:make", save, program(300), None, quiet=True)
    assert file.stat().st_mtime_ns != written


def test_a_run_that_goes_on_keeps_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, save = tmp_path / "texts", tmp_path / "run"
    folder.mkdir()
    save.mkdir()

    def made(words: str, resumed: Path | None, save: Path = save) -> tuple[bytes, str]:
        """The tokenizer after a start with these texts, and what the start said."""
        (folder / "a.txt").write_text(f"{words} " * 50, encoding="utf-8")
        text.tokens_of([folder], None, "model.py:make", save, program(300), resumed, quiet=False)
        return (save / "tokenizer.json").read_bytes(), capsys.readouterr().err

    assert made("a stage is a piece", None) != (first := made("some ranks hold rows", None)), (
        "without a checkpoint nothing goes on"
    )
    step = begin(save, 7)[0]
    checkpoint = finish(step, {"checkpoint.json": {}}, {})
    same, told = made("zebra zeppelin zigzag", checkpoint)
    assert same == first[0]
    assert f"the tokenizer of the run that goes on ({save / 'tokenizer.json'})" in told
    whole = Tokenizer.from_file(str(save / "tokenizer.json")).encode("zebra zeppelin zigzag " * 50)
    assert json.loads((save / "tokens.bin.json").read_text())["tokens"] == len(whole.ids) + 1
    assert made("zebra zeppelin zigzag", checkpoint) == (same, ""), "made once"

    (other := tmp_path / "other").mkdir()
    assert made("zebra zeppelin zigzag", None, other)[0] != same
    assert made("zebra zeppelin zigzag", checkpoint, other)[0] == same
    assert made("zebra zeppelin zigzag", None)[0] != same, "tokens of a kept tokenizer are not kept"


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    file, words = tmp_path / "tokenizer.json", tmp_path / "words.txt"
    file.write_text("{", encoding="utf-8")
    words.write_text("some words", encoding="utf-8")
    with pytest.raises(pc.InputError, match=r"tokenizer\.json is not a tokenizer\.json \(EOF"):
        text.tokens_of([words], file, "model.py:make", tmp_path, program(300), None, quiet=True)


def test_tokens_come_piece_by_piece_and_must_be_below(tmp_path: Path) -> None:
    file = tmp_path / "tokens.bin"
    assert pc.write_tokens(file, iter([torch.arange(5), torch.arange(200)]), below=200) == 205
    assert json.loads(Path(f"{file}.json").read_text())["dtype"] == "uint8"
    with pytest.raises(pc.InputError, match=r"--tokenizer is for texts, and .* has tokens already"):
        text.check([file], tmp_path / "tokenizer.json")
    with pytest.raises(pc.InputError, match=r"token 199 of .* is not below 100"):
        pc.write_tokens(file, iter([torch.arange(200)]), below=100)
    with pytest.raises(pc.InputError, match="is not a file of tokens"):
        pc.TokenRows(file, program(300))
