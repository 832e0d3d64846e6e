"""A file of tokens as rows of a model's inputs, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

import parcompiler as pc
from parcompiler.runtime.program import Input, RankProgram


def program(**inputs: Input) -> RankProgram:
    kind = torch.int64
    inputs = inputs or {
        "x": Input("tokens", (2, 3), kind, high=100), "y": Input("labels", (2, 3), kind)
    }  # fmt: skip
    return RankProgram(0, 1, "cpu", 1, "0", torch.float32, (0,), (), (), inputs=inputs)


def test_rows_and_the_tokens_that_follow(tmp_path: Path) -> None:
    file = tmp_path / "tokens.bin"
    pc.write_tokens(file, torch.arange(11))
    assert file.stat().st_size == 11  # one byte each
    numbers: list[object] = [np.arange(11, dtype=np.uint16), list(range(11))]
    for given in numbers:
        pc.write_tokens(str(tmp_path / "same.bin"), given)
        assert (tmp_path / "same.bin").read_bytes() == file.read_bytes()
    rows = pc.TokenRows(file, program())
    assert len(rows) == 3
    assert rows.batch([0, 2])["tokens"].tolist() == [[0, 1, 2], [6, 7, 8]]
    assert rows[2]["labels"].tolist() == [7, 8, 9]
    same = pc.TokenRows(file, program(), labels="same", part=(0.5, 1.0))
    assert len(same) == 1
    assert same[0]["tokens"].tolist() == same[0]["labels"].tolist() == [6, 7, 8]


def test_what_is_no_file_of_tokens_for_the_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens.bin"
    pc.write_tokens(file, torch.arange(300))
    with pytest.raises(
        pc.InputError, match="tokens up to 299, and the model takes those below 100"
    ):
        pc.TokenRows(file, program())
    image = Input("image", (2, 3), torch.float32)
    with pytest.raises(pc.InputError, match=r"inputs are tokens and labels.*image \(2, 3\)"):
        pc.TokenRows(file, program(image=image))
    file.write_bytes(b"abc")
    with pytest.raises(pc.InputError, match=r"is not a file of tokens, or tokens\.bin\.json does"):
        pc.TokenRows(file, program())
