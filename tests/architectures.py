"""Unmodified Hugging Face architectures by name, tiny, random, in training mode.

`ALL` compile and verify; `CHOSEN` are those of the ordinary suite, each for what it stresses.
`REFUSED` cannot be captured: the CaptureError must name the place that says why.
"""

from typing import Any

import torch

from tests.architecture_kinds import (
    GROUPED,
    SEQ2SEQ,
    SIZES,
    T5,
    Builder,
    Case,
    mask,
    model,
    text,
)
from tests.architecture_senses import (
    COMBINED,
    OTHERS,
    SERIES,
    SOUND,
    SPEECH,
    VISION,
    series,
    spoken,
    vilt,
)
from tests.architecture_text import CAUSAL, MASKED, SEQUENCES
from tests.zoo import ROWS, VOCABULARY, tokens

ALL: dict[str, Builder] = {
    **CAUSAL,
    **MASKED,
    **SEQUENCES,
    **VISION,
    **SPEECH,
    **COMBINED,
    **OTHERS,
}
CHOSEN = {
    "swin": "windows, shifts, stochastic depth",
    "debertav2-mlm": "dropout everywhere, relative positions shared by all layers",
    "gemma2": "tied table, soft caps, two kinds of masks",
    "whisper": "encoder and decoder, convolutions",
    "mamba": "a scan written in place",
    "clip-loss": "two towers, loss by callable",
    "led": "branches on masks that are constants",
    "phimoe": "a custom autograd Function, experts, noise",
}


def masked_pair() -> dict[str, Any]:
    """A text, its mask and its translation."""
    return {
        "input_ids": tokens(),
        "attention_mask": mask(),
        "labels": tokens(),
        "use_cache": False,
    }


# Name and reason: a builder, and a regular expression for the place that the error names.
REFUSED: dict[str, tuple[Builder, str]] = {
    "autoformer: rolls by the delays that it finds": (
        model("AutoformerForPrediction", series, **SERIES, label_length=4, moving_average=5),
        r"'model.encoder.layers.0.self_attn'.*roll_delay = .*roll\(",
    ),
    "fsmt: leaves out the mask of a batch without padding": (
        text(
            "FSMTForConditionalGeneration",
            src_vocab_size=VOCABULARY,
            tgt_vocab_size=VOCABULARY,
            **{k: v for k, v in SEQ2SEQ.items() if k != "vocab_size"},
        ),
        r"'model'.*_prepare_fsmt_decoder_inputs",
    ),
    "ibert: a range of values that begins with the first batch": (
        text("IBertForMaskedLM", **SIZES),
        r"'ibert.embeddings.embeddings_act1'.*if self.x_min.min\(\) >",
    ),
    "nllb-moe: a loop over the experts that were chosen": (
        text(
            "NllbMoeForConditionalGeneration",
            **SEQ2SEQ,
            num_experts=4,
            expert_capacity=16,
            encoder_sparse_step=2,
            decoder_sparse_step=2,
        ),
        r"ffn.experts'.*for expert_idx in expert_hit",
    ),
    "qwen3-moe, eager experts: a loop over the experts that were chosen": (
        text(
            "Qwen3MoeForCausalLM",
            **GROUPED,
            head_dim=4,
            moe_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
            experts_implementation="eager",
        ),
        r"mlp.experts'.*for expert_idx in expert_hit",
    ),
    "reformer: an autograd Function that takes modules": (
        text(
            "ReformerModelWithLMHead",
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_attention_heads=2,
            attention_head_size=8,
            feed_forward_size=32,
            axial_pos_shape=[3, 4],
            axial_pos_embds_dim=[8, 8],
            attn_layers=["local", "lsh"],
            is_decoder=True,
            local_attn_chunk_length=4,
            lsh_attn_chunk_length=4,
            num_buckets=2,
            max_position_embeddings=32,
        ),
        r"hide parameters.*'reformer.encoder'.*_ReversibleFunction.apply",
    ),
    "switch: a loop over the experts that were chosen": (
        model(
            "SwitchTransformersForConditionalGeneration",
            masked_pair,
            **T5,
            num_experts=4,
            expert_capacity=16,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
        ),
        r"mlp.experts'.*for expert_idx in expert_hit",
    ),
    "vilt: as many patches as an image's mask has": (
        lambda: vilt({"pixel_mask": torch.ones(ROWS, 32, 32, dtype=torch.long)}),
        r"'vilt.embeddings'.*modeling_vilt.py:\d+",
    ),
    "wav2vec2: layers dropped by chance": (
        model("Wav2Vec2ForCTC", spoken, **{**SOUND, "layerdrop": 0.1}),
        r"'wav2vec2.encoder'.*skip_the_layer.*\n.*dropped by chance: set layerdrop=0 in the config",
    ),
    "bart: layers dropped by chance": (
        model("BartForConditionalGeneration", masked_pair, **{**SEQ2SEQ, "decoder_layerdrop": 0.1}),
        r"layers are dropped by chance: set decoder_layerdrop=0 in the config",
    ),
}


def build(name: str) -> Case:
    """The model (in training mode, same weights every time), one micro-batch and the loss."""
    torch.manual_seed(0)
    made, inputs, loss = ALL[name]()
    return made.train(), inputs, loss
