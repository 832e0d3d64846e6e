"""Small models at any sizes, with all that a closed form has to follow from them."""

from typing import Any

import torch
from torch import nn

from parcompiler.capture import capture
from parcompiler.capture.inputs import Batch
from parcompiler.mesh import Mesh
from parcompiler.models import bert, dlrm, gpt, llama, moe, resnet, t5
from parcompiler.options import Options
from parcompiler.problem import Problem, prepared


def made(
    name: str, batch: int, sequence: int = 32, target: int = 16, layers: int = 2
) -> tuple[nn.Module, Batch]:
    """A model and one micro-batch."""
    sizes: Any = {
        "layers": layers, "heads": 4, "hidden": 32, "vocabulary": 64, "sequence": 64
    }  # fmt: skip
    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    both = {"tokens": tokens, "labels": tokens}
    match name:
        case "gpt":
            return gpt.GPT(gpt.Config(**sizes, dropout=0.1)), both
        case "llama":
            return llama.Llama(llama.Config(**sizes, kv_heads=2)), both
        case "bert":
            return bert.BERT(bert.Config(**sizes)), both
        case "moe":
            return moe.MoE(moe.Config(**sizes)), both
        case "t5":
            output = torch.zeros(batch, target, dtype=torch.long)
            given = {"tokens": tokens, "decoder_tokens": output, "labels": output}
            return t5.T5(t5.Config(**sizes)), given
        case "dlrm":
            numbers, labels = torch.zeros(batch, 13), torch.zeros(batch)
            categories = torch.zeros(batch, 4, dtype=torch.long)
            given = {"numbers": numbers, "categories": categories, "labels": labels}
            return dlrm.DLRM(dlrm.Config()), given
        case "resnet":
            images, labels = torch.zeros(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.long)
            model = resnet.ResNet(resnet.Config(image_size=32, classes=10))
            return model, {"images": images, "labels": labels}
        case _:
            return hugging_face(batch, sequence, layers)


def hugging_face(batch: int, sequence: int, layers: int) -> tuple[nn.Module, Batch]:
    """An unmodified Llama of transformers: masks, rotary tables and grouped heads made inside."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    given = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    return LlamaForCausalLM(config), given


def problem_of(name: str, batch: int, sequence: int = 32, target: int = 16) -> Problem:
    """The problem of a fresh capture of one layer (of the encoder, too) at these sizes."""
    model, inputs = made(name, batch, sequence, target, layers=1)
    mesh, options = Mesh(), Options(microbatches=4)
    return Problem(prepared(capture(model, inputs), options, mesh, None), mesh, options)
