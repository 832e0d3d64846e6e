"""hf: models: any configuration becomes a model on the meta device with a micro-batch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from parcompiler.cli import run
from parcompiler.cli.huggingface import build
from parcompiler.errors import InputError

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NAMED = {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 64}
T5 = {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, "num_layers": 2, "vocab_size": 64}
BLOOM = {"hidden_size": 16, "n_head": 4, "n_layer": 2, "vocab_size": 64}


def config(tmp_path: Path, kind: str, architecture: str | None = None, **sizes: Any) -> Path:
    path = tmp_path / "config.json"
    named = {"architectures": [architecture]} if architecture else {}
    path.write_text(json.dumps({"model_type": kind, **named, **sizes}))
    return path


@pytest.mark.parametrize(
    ("kind", "architecture", "sizes", "made"),
    [
        ("llama", "LlamaForCausalLM", SIZES, "LlamaForCausalLM"),
        ("mistral", "MistralForCausalLM", SIZES, "MistralForCausalLM"),
        ("qwen3", None, SIZES, "Qwen3ForCausalLM"),
        ("gemma2", "Gemma2ForCausalLM", SIZES, "Gemma2ForCausalLM"),
        ("gpt_neox", "GPTNeoXForCausalLM", SIZES, "GPTNeoXForCausalLM"),
        ("phi3", "Phi3ForCausalLM", SIZES, "Phi3ForCausalLM"),
        ("gpt2", "GPT2LMHeadModel", NAMED, "GPT2LMHeadModel"),
        ("bert", "BertForMaskedLM", SIZES, "BertForMaskedLM"),
        ("t5", "T5ForConditionalGeneration", T5, "T5ForConditionalGeneration"),
        ("bloom", "BloomModel", BLOOM, "BloomForCausalLM"),  # the class named has no loss
    ],
)
def test_configurations_are_built_without_values(
    kind: str, architecture: str | None, sizes: dict[str, Any], made: str, tmp_path: Path
) -> None:
    path = config(tmp_path, kind, architecture, **sizes)
    model, inputs = build(tmp_path if kind == "llama" else path, 8, 3)
    assert type(model).__name__ == made
    assert all(tensor.is_meta for tensor in model.parameters())
    assert model.training
    assert {inputs["input_ids"].shape, inputs["labels"].shape} == {(3, 8)}


def test_a_row_is_as_long_as_the_model_allows_and_its_dtype_is_kept(tmp_path: Path) -> None:
    path = config(tmp_path, "llama", **SIZES, dtype="bfloat16")
    model, inputs = build(path, None, None)
    assert inputs["input_ids"].shape == (1, 32)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    path = config(tmp_path, "llama", **{**SIZES, "max_position_embeddings": 9000})
    assert build(path, None, None)[1]["input_ids"].shape == (1, 2048)


def test_a_plan_of_a_configuration_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, "llama", "LlamaForCausalLM", **SIZES)
    quick = ("--microbatches", "2", "--schedule", "1f1b", "--vocabulary", "whole")
    arguments = ("--mesh", "pipeline=2,data=2", "--device", "h100", "--rows", "2", *quick)
    assert run(["plan", f"hf:{path}", *arguments]) == 0
    assert capsys.readouterr().out.startswith("LlamaForCausalLM on 4 x h100\n")
    folder = tmp_path / "out"
    assert run(["compile", f"hf:{path}", *arguments, "--export", str(folder)]) == 0
    told = capsys.readouterr()
    assert "no weights are written" in told.err
    assert "compile with --pretrained FOLDER, or train from scratch by 'parcompiler" in told.out
    assert "torchrun" not in told.out
    assert run(["compile", f"hf:{path}", *arguments, "--export", str(folder), "--weights"]) == 2
    told = capsys.readouterr()
    assert "no weights to write: compile with --pretrained FOLDER, or" in told.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[1]", "it has no 'model_type'"),
        ('{"hidden_size": 8}', "it has no 'model_type'"),
        ('{"model_type": "lama"}', r"no model_type 'lama' \(did you mean 'llama'\?\)"),
        ('{"model_type": "llama", "hidden_size": "big"}', "'hidden_size' expected int, got str"),
        (
            '{"model_type": "llama", "auto_map": {"AutoModel": "a--b.C"}}',
            "auto_map loads code that",
        ),
        ('{"model_type": "llama", "trust_remote_code": true}', "trust_remote_code loads code that"),
        ('{"model_type": "llama", "use_kernels": true}', "use_kernels loads code that is not in"),
        (
            '{"model_type": "llama", "attn_implementation": "kernels-community/flash-attn"}',
            "attn_implementation loads a kernel from a repository: write 'sdpa' or 'eager'",
        ),
        (
            '{"model_type": "llava", "text_config": {"_attn_implementation": {"": "a/b"}}}',
            "text_config._attn_implementation loads a kernel from a repository",
        ),
        (
            '{"model_type": "llama", "quantization_config": {"load_in_4bit": true}}',
            "quantization_config keeps weights in a few bits, which cannot be trained: remove it",
        ),
        ('{"model_type": "llama", "num_hidden_layers": -2}', r"from 0 to 100,000 \(-2 found\)"),
        ('{"model_type": "gpt2", "n_layer": 1000000000}', r"from 0 to 100,000 \(1000000000 found"),
        ('{"model_type": "llama", "hidden_size": 1' + "0" * 5000 + "}", "at most 40 digits"),
        ('{"model_type": "llama", "x": ' + "[" * 5000 + "]" * 5000 + "}", "nests too deeply"),
        ('{"model_type": "vit"}', "has a language model with a loss for 'vit': build it in a file"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        build(path, None, None)
    assert str(path) in str(caught.value)


def test_a_configuration_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"there is no file .*config.json: .* nothing is downloaded"
    ):
        build(tmp_path, None, None)


def test_a_row_that_the_model_cannot_hold_is_refused(tmp_path: Path) -> None:
    path = config(tmp_path, "llama", **SIZES)
    with pytest.raises(InputError, match=r"--sequence 33 is longer than .* \(at most 32\)"):
        build(path, 33, None)
