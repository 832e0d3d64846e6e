"""What is emitted where tensor ranks hold pieces: a GPT as Megatron-LM splits it, word for word."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from parcompiler.models import gpt
from parcompiler.spmd.shard import shard
from tests import zoo
from tests.codegen.emitting import files_of, graph_of, lowered_by
from tests.spmd.choosing import GPT, greedy


@cache
def emitted(dropout: float) -> dict[str, str]:
    """Two stages of two ranks; 97 words do not divide evenly."""
    config = gpt.Config(
        layers=2, heads=2, hidden=16, vocabulary=97, sequence=12, tied=True, dropout=dropout
    )
    torch.manual_seed(0)
    inputs = {"tokens": zoo.tokens(), "labels": zoo.tokens()}
    graph = graph_of(gpt.GPT(config).train(), inputs)
    local = shard(graph, greedy(graph, 2, GPT), 2)
    stages = [["embedding+positions", "layers.0"], ["layers.1", "norm+embedding"]]
    return files_of(lowered_by(local, stages, tensor=2))


@pytest.mark.parametrize("file", ["stage_0.py", "stage_1.py", "rank_0.py"])
def test_a_layer_in_pieces_reads_like_a_layer(
    file: str, golden: Callable[[str, str], None]
) -> None:
    golden(f"codegen/gpt-tensor/{file}", emitted(0.0)[file])


def test_dropout_of_pieces_draws_for_each_rank(golden: Callable[[str, str], None]) -> None:
    golden("codegen/gpt-tensor-dropout/stage_1.py", emitted(0.1)["stage_1.py"])


def test_all_tensor_ranks_run_the_same_stages() -> None:
    assert {name for name in emitted(0.0) if name.startswith("stage")} == {
        "stage_0.py",
        "stage_1.py",
    }
    assert {name for name in emitted(0.0) if name.startswith("rank")} == {
        f"rank_{rank}.py" for rank in range(4)
    }
