"""The module of the vocabulary, and scripts that use it: words, rows, peers, weights and names."""

import builtins
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler.codegen.folder import export
from parcompiler.codegen.modules import vocabulary_class
from parcompiler.codegen.rank import rank_program, rank_script
from parcompiler.codegen.vocabulary import vocabulary_module
from parcompiler.instruction import TRANSFERS, Kind, parse
from parcompiler.loaded import load
from parcompiler.lower import Lowered
from parcompiler.models import gpt
from parcompiler.pieces import own_rows
from parcompiler.plan import Plan, Shape
from parcompiler.runtime.files import stored
from parcompiler.vocabulary import spread
from tests import zoo
from tests.codegen.emitting import files_of, graph_of, lowered_by, spread_choice
from tests.codegen.test_golden import RULES, ruff
from tests.codegen.test_hostile_code import MODULES, PARAMETERS, TRIGGER, blocks_of, halves

GPT_STAGES = [["positions", "layers.0", "layers.1"], ["layers.2", "layers.3", "norm"]]


def gpt_by(method: str, *, vocabulary: int = 96, tensor: int = 1, data: int = 1) -> Lowered:
    config = gpt.Config(layers=4, heads=2, hidden=16, vocabulary=vocabulary, sequence=12, tied=True)
    graph = graph_of(gpt.GPT(config).train(), {"tokens": zoo.tokens(), "labels": zoo.tokens()})
    return lowered_by(graph, GPT_STAGES, vocabulary=method, tensor=tensor, data=data)


@cache
def emitted_gpt(method: str) -> dict[str, str]:
    return files_of(gpt_by(method))


@cache
def emitted_gemma() -> dict[str, str]:
    """A Gemma 2: a soft cap on its logits, and its table is the head's."""
    model, inputs = zoo.language_model(
        "Gemma2ForCausalLM", head_dim=4, num_key_value_heads=2, **zoo.SMALL
    )()
    layers = [f"model.layers.{index}" for index in range(4)]
    stages = [["embed_tokens", *layers[:2]], [*layers[2:], "norm"]]
    return files_of(lowered_by(graph_of(model.train(), inputs), stages, vocabulary="vocab-1"))


@pytest.mark.parametrize(
    "file", ["vocabulary.py", "stage_0.py", "stage_1.py", "rank_0.py", "rank_1.py", "README.md"]
)
def test_a_gpt_whose_vocabulary_is_on_all_ranks_is_golden(
    file: str, golden: Callable[[str, str], None]
) -> None:
    golden(f"codegen/gpt-vocab-2/{file}", emitted_gpt("vocab-2")[file])


@pytest.mark.parametrize("file", ["vocabulary.py", "stage_1.py", "rank_1.py"])
def test_a_soft_cap_is_a_method_of_the_vocabulary(
    file: str, golden: Callable[[str, str], None]
) -> None:
    golden(f"codegen/hf-gemma2-vocab-1/{file}", emitted_gemma()[file])


def test_ruff_finds_nothing_and_formats_nothing(tmp_path: Path) -> None:
    texts = {method: emitted_gpt(method) for method in ("naive", "vocab-1", "vocab-2")}
    texts |= {"gemma": emitted_gemma(), "t5": files_of(t5())}
    for name, files in texts.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text, encoding="utf-8")
    found = ruff(tmp_path, "check", "--select", RULES, "--output-format", "concise")
    assert found.returncode == 0, found.stdout
    found = ruff(tmp_path, "format", "--diff")
    assert found.returncode == 0, found.stdout


def shifted(labels: Tensor) -> Tensor:
    """As T5 has it, with a tensor before the first word whatever torch makes of a number."""
    first = torch.tensor(0).expand(len(labels), 1)
    words = torch.cat([first, labels[:, :-1]], dim=1)
    return words.masked_fill(words == -100, 0)


@cache
def t5() -> Lowered:
    """Two lookups of one table, the second one by shifted labels."""
    model, inputs = zoo.build("hf-t5")
    vars(model)["_shift_right"] = shifted
    stages = [
        ["encoder.block.0", "encoder.block.1", "final_layer_norm"],
        ["decoder.block.0", "decoder.block.1", "final_layer_norm#2"],
    ]
    return lowered_by(graph_of(model.train(), inputs), stages, vocabulary="vocab-2")


def test_indices_and_classes_are_computed_as_in_the_model() -> None:
    kind = vocabulary_class(t5(), "cpu")
    assert kind is not None
    made = kind(2, 0)
    made.get_buffer("lifted_tensor_0").fill_(7)  # what stands before the first word
    labels = torch.tensor([[*range(11), -100], [*range(12)]])
    shifted = torch.tensor([[7, *range(11)], [7, *range(11)]])
    shifted[0, 1:] = labels[0, :-1]
    lookup = kind.lookups["decoder_embed_tokens"]
    assert torch.equal(made.computed(lookup.indices, lookup.inputs, {"labels": labels}), shifted)
    assert kind.head is not None
    classes = made.computed(kind.head.targets, kind.head.inputs, {"labels": labels})
    assert torch.equal(classes, labels.flatten())
    plain = kind.lookups["encoder_embed_tokens"]
    assert plain.indices == ""
    assert made.computed("", plain.inputs, {"input_ids": labels}) is labels


def test_every_rank_has_as_many_rows_and_names_them_as_the_model_does() -> None:
    kind = vocabulary_class(gpt_by("vocab-1", vocabulary=97), "cpu")
    assert kind is not None
    made = kind(2, 1)
    assert kind.method == "vocab-1"
    assert dict(kind.size) == {"embedding_weight": 97}
    ((name, tensor),) = made.tensors()
    assert name == "embedding.weight"
    assert isinstance(tensor, nn.Parameter)
    assert tensor.shape == (50, 16)


def test_a_script_says_which_rows_its_rank_has() -> None:
    lowered = gpt_by("vocab-2", vocabulary=97)
    first, second = (rank_program(lowered, rank, "cpu") for rank in range(2))
    assert first.rows == second.rows == {"embedding.weight": 97}
    assert "with rows 0 to 49 of a vocabulary of 97" in rank_script(lowered, first)
    assert "with rows 50 to 96 of a vocabulary of 97" in rank_script(lowered, second)
    assert "vocabulary=Vocabulary" in rank_script(lowered, second)


def test_a_program_without_rows_says_nothing_of_them() -> None:
    lowered = lowered_by(*whole_gpt())
    program = rank_program(lowered, 0, "cpu")
    assert not program.rows
    assert "ocabulary" not in rank_script(lowered, program)
    assert "vocabulary.py" not in files_of(lowered)
    assert vocabulary_class(lowered, "cpu") is None


def whole_gpt() -> tuple[Any, list[list[str]]]:
    config = gpt.Config(layers=4, heads=2, hidden=16, vocabulary=96, sequence=12, tied=True)
    inputs = {"tokens": zoo.tokens(), "labels": zoo.tokens()}
    first, second = GPT_STAGES
    stages = [["embedding+positions", *first[1:]], [*second[:-1], "norm+embedding"]]
    return graph_of(gpt.GPT(config).train(), inputs), stages


def test_a_rank_is_told_the_first_of_the_tensor_line_that_a_transfer_starts_or_ends_at() -> None:
    lowered = gpt_by("vocab-2", tensor=2, data=2)
    for rank in range(lowered.grid.size):
        at = lowered.grid.coordinate(rank)
        lines = lowered.instructions[at.pipeline]
        for line, own in zip(lines, rank_program(lowered, rank, "cpu").instructions, strict=True):
            if line.peer is not None:
                tensor = 0 if line.kind in TRANSFERS else at.tensor
                assert own.peer == lowered.grid.rank(line.peer, at.data, tensor), str(own)
    kinds = {line.kind for lines in lowered.instructions for line in lines}
    assert {*TRANSFERS, Kind.EXCHANGE, Kind.S, Kind.T} <= kinds


def test_all_rows_are_in_the_files_once(tmp_path: Path) -> None:
    lowered = gpt_by("vocab-2", vocabulary=97, tensor=2)
    folder = exported(lowered, tmp_path / "out", weights=True)
    table = lowered.graph.tensors["embedding.weight"]
    pieces = [load_file(folder / f"vocabulary_{index}.safetensors") for index in range(4)]
    assert all(piece.keys() == {"embedding.weight"} for piece in pieces)
    assert torch.equal(torch.cat([piece["embedding.weight"] for piece in pieces]), table)
    assert "embedding.weight" not in load_file(folder / "stage_0.safetensors")
    assert not (folder / "vocabulary_4.safetensors").exists()


def test_a_rank_reads_its_rows_whatever_its_data_coordinate(tmp_path: Path) -> None:
    lowered = gpt_by("vocab-2", vocabulary=97, tensor=2, data=2)
    folder = exported(lowered, tmp_path / "out", weights=True)
    table = lowered.graph.tensors["embedding.weight"]
    for rank in range(lowered.grid.size):
        at = lowered.grid.coordinate(rank)
        own = own_rows(97, 4, at.pipeline * 2 + at.tensor)
        found = dict(stored(folder.parent, rank_program(lowered, rank, "cpu")))
        expected = table[own.start : own.start + own.size]
        assert torch.equal(found["embedding.weight"], expected)
        assert "norm.weight" in found or at.pipeline == 0


def test_a_bias_with_a_dimension_before_the_vocabulary_keeps_it(tmp_path: Path) -> None:
    graph = graph_of(*zoo.build("hf-bart"))
    graph.tensors["final_logits_bias"].copy_(torch.arange(96))
    choice = spread_choice(graph, "vocab-1", 2)
    stages = halves(blocks_of(spread(graph, choice, 2)))
    lowered = lowered_by(graph, stages, vocabulary=choice.method)
    kind = vocabulary_class(lowered, "cpu")
    assert kind is not None
    assert kind(2, 1).get_buffer("final_logits_bias").shape == (1, 48)
    folder = exported(lowered, tmp_path / "out", weights=True)
    stored = load_file(folder / "vocabulary_1.safetensors")["final_logits_bias"]
    assert torch.equal(stored, torch.arange(48.0, 96.0).unsqueeze(0))


def test_without_weights_only_buffers_are_written(tmp_path: Path) -> None:
    folder = exported(t5(), tmp_path / "out", weights=False)
    for index in range(2):
        found = load_file(folder / f"vocabulary_{index}.safetensors")
        assert found.keys() == {"lifted_tensor_0"}


def test_a_module_of_this_process_called_vocabulary_is_left_alone(tmp_path: Path) -> None:
    exported(gpt_by("vocab-2"), tmp_path / "out", weights=False)
    mine = type(sys)("vocabulary")
    sys.modules["vocabulary"] = mine
    try:
        script: Any = load(tmp_path / "out")._script(1)
        assert sys.modules["vocabulary"] is mine
    finally:
        del sys.modules["vocabulary"]
    assert script.Vocabulary.method == "vocab-2"
    assert script.PROGRAM == rank_program(gpt_by("vocab-2"), 1, "cpu")


def exported(lowered: Lowered, path: Path, *, weights: bool) -> Path:
    plan = Plan(model="GPT", fingerprint="", mesh=Shape(pipeline=lowered.size), microbatches=1)
    files = files_of(lowered) | {"plan.json": plan.to_json()}
    return export(path, lowered, files, weights=weights, standalone=False) / "weights"


# Names that the class has for something else, and names that would do harm if they were run.
NAMES = (
    *MODULES, *(name for name in PARAMETERS if name.strip()),
    "ranks", "index", "span", "size", "lookups", "head", "method", "targets", "logits", "indices",
    "computed", "tensors", "0_indices", "embedding",
)  # fmt: skip


PARTS = 5  # of so many tables in one model, each would be too small to share


class Tables(nn.Module):
    """Tables under any names, and a head over the first of them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.order = names
        for name in names:
            self.add_module(f"_{name}".replace(".", "_"), nn.Module())
            table = self.get_submodule(f"_{name}".replace(".", "_"))
            table.register_parameter(name.replace(".", "_"), nn.Parameter(torch.randn(64, 8)))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        tables = [next(self.get_submodule(f"_{n}".replace(".", "_")).parameters())
                  for n in self.order]  # fmt: skip
        x = F.embedding(tokens, tables[0])
        for shift, table in enumerate(tables[1:]):
            x = x + F.embedding((tokens + shift) % 64, table)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits = torch.tanh(x @ tables[0].t() / 30.0) * 30.0
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def tables(names: tuple[str, ...]) -> Lowered:
    inputs = {"tokens": zoo.tokens(64), "labels": zoo.tokens(64)}
    torch.manual_seed(0)
    kind = type('Evil"""; raise SystemExit\n', (Tables,), {})
    graph = graph_of(kind(names).train(), inputs)
    choice = spread_choice(graph, "vocab-2", 2)
    return lowered_by(graph, halves(blocks_of(spread(graph, choice, 2))), vocabulary=choice.method)


@pytest.mark.parametrize("part", range(PARTS))
def test_hostile_names_of_tables_are_data(part: int) -> None:
    names = NAMES[part::PARTS]
    lowered = tables(names)
    kind = vocabulary_class(lowered, "cpu")
    assert kind is not None
    made = kind(2, 0)
    assert lowered.vocabulary is not None
    assert set(kind.names.values()) == set(lowered.vocabulary.tensors)
    assert len(kind.names) == len(names)
    assert {name for name, _ in made.tensors()} == set(lowered.vocabulary.tensors)
    tokens = zoo.tokens(64)
    for shift, item in enumerate(lowered.vocabulary.lookups):
        lookup = kind.lookups[item.value]
        assert kind.names[lookup.weight] == item.layer.weight
        indices = made.computed(lookup.indices, lookup.inputs, {"tokens": tokens})
        assert torch.equal(indices, tokens if shift == 0 else (tokens + shift - 1) % 64)
    logits = torch.randn(3, 5)
    capped = made.computed("logits", ("logits",), {"logits": logits})
    assert torch.equal(capped, torch.tanh(logits / 30.0) * 30.0)
    tree = compile(vocabulary_module(lowered, "cpu"), "vocabulary.py", "exec")
    assert TRIGGER not in tree.co_names
    assert not hasattr(builtins, TRIGGER)


def test_the_lines_of_the_vocabulary_stand_in_columns() -> None:
    table = emitted_gpt("vocab-2")["rank_0.py"].partition('INSTRUCTIONS = """\n')[2]
    lines = table.partition('"""')[0].splitlines()
    places = {line.index(" mb ") for line in lines if " mb " in line}
    assert len(places) == 1
    assert parse("\n".join(lines)) == rank_program(gpt_by("vocab-2"), 0, "cpu").instructions
