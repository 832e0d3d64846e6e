"""Models of transformers that see, hear, combine, or predict."""

from typing import Any

import torch
import transformers
from torch import nn

from tests.architecture_kinds import (
    BACKBONE,
    GROUPED,
    SEQ2SEQ,
    SIZES,
    VIT,
    Builder,
    Case,
    image,
    images,
    integers,
    mask,
    model,
    normal,
    pair,
    segmenter,
)
from tests.zoo import LENGTH, ROWS, VOCABULARY, tokens

_STAGES: dict[str, Any] = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1]}
_WINDOWS: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "window_size": 4,
}
_LIKE_VIT = (
    "DeiT Beit Data2VecVision Dinov2 Dinov2WithRegisters ViTMSN IJepa".split()
)  # image classifiers with the sizes of a ViT
_DECODER: dict[str, Any] = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 2,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 32,
}
_BOXES: dict[str, Any] = {
    "num_labels": 5,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_queries": 4,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
}


def resnet(*features: str) -> transformers.ResNetConfig:
    """The configuration of a tiny backbone."""
    return transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 8, 8],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=list(features),  # type: ignore[call-arg]
    )


def boxes(outputs: Any) -> torch.Tensor:
    """A stand-in for the matching loss of detectors, which leaves torch."""
    loss: torch.Tensor = outputs.logits.square().mean() + outputs.pred_boxes.mean()
    return loss


def scene() -> dict[str, Any]:
    """Images of which every pixel counts."""
    return {
        "pixel_values": images(64),
        "pixel_mask": torch.ones(ROWS, 64, 64, dtype=torch.long),
    }


VISION: dict[str, Builder] = {
    **{n.lower(): image(f"{n}ForImageClassification", **VIT) for n in _LIKE_VIT},
    "beit-relative": image(
        "BeitForImageClassification", **VIT, use_relative_position_bias=True, use_mask_token=True
    ),
    "bit": image(
        "BitForImageClassification",
        **_STAGES,
        embedding_size=8,
        num_groups=4,
        drop_path_rate=0.1,
    ),
    "convnext": image("ConvNextForImageClassification", **_STAGES, drop_path_rate=0.1),
    "convnextv2": image("ConvNextV2ForImageClassification", **_STAGES, drop_path_rate=0.1),
    "cvt": image(
        "CvtForImageClassification",
        embed_dim=[8, 8, 16],
        num_heads=[1, 2, 2],
        depth=[1, 2, 3],
        patch_sizes=[3, 3, 3],
        patch_stride=[2, 2, 2],
    ),
    "deformable-detr": model(
        "DeformableDetrForObjectDetection",
        scene,
        boxes,
        **_BOXES,
        num_feature_levels=3,
        backbone_config=lambda: resnet("stage2", "stage3", "stage4"),
    ),
    "detr": model(
        "DetrForObjectDetection",
        scene,
        boxes,
        **_BOXES,
        backbone_config=lambda: resnet("stage4"),
    ),
    "donut-swin": image("DonutSwinForImageClassification", **_WINDOWS),
    "dpt": segmenter(
        "DPTForSemanticSegmentation",
        **VIT,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        reassemble_factors=[4, 2, 1, 0.5],
    ),
    "efficientnet": image(
        "EfficientNetForImageClassification",
        image_size=32,
        width_coefficient=0.25,
        depth_coefficient=0.3,
        hidden_dim=320,
    ),
    "focalnet": image(
        "FocalNetForImageClassification",
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[2, 2],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
        hidden_sizes=[8, 16],
    ),
    "glpn": model(
        "GLPNForDepthEstimation",
        lambda: {"pixel_values": images(), "labels": normal(32, 32).abs() + 0.5},
        **BACKBONE,
        decoder_hidden_size=8,
    ),
    "hiera": image(
        "HieraForImageClassification",
        image_size=[32, 32],
        embed_dim=8,
        patch_size=[3, 3],
        patch_stride=[2, 2],
        patch_padding=[1, 1],
        depths=[1, 1, 1],
        num_heads=[1, 2, 2],
        masked_unit_size=[4, 4],
        query_stride=[2, 2],
        num_query_pool=2,
    ),
    "imagegpt": model(
        "ImageGPTForImageClassification",
        lambda: {"input_ids": tokens(), "labels": pair()},
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=4,
        n_head=4,
    ),
    "levit": image(
        "LevitForImageClassification",
        side=64,
        image_size=64,
        patch_size=16,
        hidden_sizes=[16, 16, 16],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[4, 4, 4],
    ),
    "mobilenetv1": image("MobileNetV1ForImageClassification", depth_multiplier=0.125),
    "mobilenetv2": image("MobileNetV2ForImageClassification", depth_multiplier=0.25),
    "mobilevit": image(
        "MobileViTForImageClassification",
        image_size=32,
        hidden_sizes=[8, 8, 16],
        neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16],
        num_attention_heads=2,
        expand_ratio=2.0,
    ),
    "mobilevitv2": image(
        "MobileViTV2ForImageClassification",
        side=64,
        image_size=64,
        width_multiplier=0.125,
        n_attn_blocks=[1, 1, 1],
        base_attn_unit_dims=[32, 32, 32],
    ),
    "poolformer": image(
        "PoolFormerForImageClassification",
        hidden_sizes=[8, 8, 8, 8],
        depths=[1, 1, 1, 1],
        drop_path_rate=0.1,
    ),
    "pvt": image(
        "PvtForImageClassification",
        **{k: v for k, v in BACKBONE.items() if k != "sr_ratios"},
        image_size=32,
        sequence_reduction_ratios=[4, 2, 1, 1],
        drop_path_rate=0.1,
    ),
    "pvtv2": image("PvtV2ForImageClassification", **BACKBONE, image_size=32, drop_path_rate=0.1),
    "regnet": image("RegNetForImageClassification", **_STAGES, embedding_size=8, groups_width=4),
    "segformer": image("SegformerForImageClassification", **BACKBONE, decoder_hidden_size=8),
    "segformer-pixels": segmenter(
        "SegformerForSemanticSegmentation", **BACKBONE, decoder_hidden_size=8
    ),
    "swiftformer": image(
        "SwiftFormerForImageClassification",
        image_size=32,
        depths=[1, 1, 1, 1],
        embed_dims=[8, 8, 16, 16],
        drop_path_rate=0.1,
    ),
    "swin": image("SwinForImageClassification", **_WINDOWS),
    "swinv2": image("Swinv2ForImageClassification", **_WINDOWS),
    "upernet": segmenter(
        "UperNetForSemanticSegmentation",
        side=64,
        hidden_size=8,
        pool_scales=[1, 2],
        auxiliary_in_channels=8,
        auxiliary_channels=8,
        backbone_config=lambda: transformers.ConvNextConfig(
            hidden_sizes=[4, 4, 8, 8],
            depths=[1, 1, 1, 1],
            out_features=["stage1", "stage2", "stage3", "stage4"],  # type: ignore[call-arg]
        ),
    ),
    "vit-mae": model("ViTMAEForPreTraining", lambda: {"pixel_values": images()}, **VIT, **_DECODER),
    "yolos": model(
        "YolosForObjectDetection",
        lambda: {"pixel_values": images()},
        boxes,
        **{**VIT, "image_size": [32, 32]},
        num_labels=5,
        num_detection_tokens=4,
    ),
}

SOUND: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (8, 8),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 8),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
_WHISPER: dict[str, Any] = {
    **SEQ2SEQ,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
_LIKE_WAV2VEC2 = "Wav2Vec2 Hubert WavLM UniSpeech UniSpeechSat SEW SEWD Data2VecAudio".split()


def spoken() -> dict[str, torch.Tensor]:
    """Sound with its transcript."""
    return {"input_values": normal(400), "labels": integers(1, VOCABULARY, 4)}


SPEECH: dict[str, Builder] = {
    **{
        f"{n.lower()}-ctc": model(f"{n}ForCTC", spoken, **SOUND)
        for n in [*_LIKE_WAV2VEC2, "Wav2Vec2Conformer"]
    },
    "ast": model(
        "ASTForAudioClassification",
        lambda: {"input_values": normal(32, 16), "labels": pair()},
        **{k: v for k, v in VIT.items() if k != "image_size"},
        frequency_stride=8,
        time_stride=8,
        max_length=32,
        num_mel_bins=16,
    ),
    "moonshine": model(
        "MoonshineForConditionalGeneration",
        lambda: {"input_values": normal(2000), "labels": tokens(), "use_cache": False},
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=2,
        decoder_num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        decoder_start_token_id=1,
    ),
    "speech2text": model(
        "Speech2TextForConditionalGeneration",
        lambda: {"input_features": normal(32, 8), "labels": tokens(), "use_cache": False},
        **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"},
        input_feat_per_channel=8,
        input_channels=1,
        conv_channels=16,
        conv_kernel_sizes=[3, 3],
        max_source_positions=64,
        max_target_positions=16,
    ),
    "speecht5": model(
        "SpeechT5ForSpeechToText",
        lambda: {"input_values": normal(400), "labels": tokens(), "use_cache": False},
        **{k: v for k, v in SEQ2SEQ.items() if k not in ("d_model", "max_position_embeddings")},
        **{k: v for k, v in SOUND.items() if k.startswith(("conv_", "num_", "mask_"))},
        hidden_size=16,
        apply_spec_augment=False,
    ),
    "wav2vec2": model(
        "Wav2Vec2ForSequenceClassification",
        lambda: {"input_values": normal(400), "labels": pair()},
        **SOUND,
        classifier_proj_size=8,
    ),
    "wav2vec2-bert": model(
        "Wav2Vec2BertForSequenceClassification",
        lambda: {"input_features": normal(20, 8), "labels": pair()},
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        feature_projection_input_dim=8,
        mask_time_prob=0.0,
        layerdrop=0.0,
        conv_depthwise_kernel_size=3,
        classifier_proj_size=8,
    ),
    "whisper": model(
        "WhisperForConditionalGeneration",
        lambda: {"input_features": normal(8, 32), "labels": tokens(), "use_cache": False},
        **_WHISPER,
    ),
    "whisper-classes": model(
        "WhisperForAudioClassification",
        lambda: {"input_features": normal(8, 32), "labels": pair()},
        **_WHISPER,
        classifier_proj_size=8,
    ),
}

_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 16,
}
_TEXT_TOWER: dict[str, Any] = {
    **_TOWER,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "eos_token_id": 2,
}
_IMAGE_TOWER: dict[str, Any] = {**_TOWER, "image_size": 32, "patch_size": 8}
_TOWERS: dict[str, Any] = {"text_config": _TEXT_TOWER, "vision_config": _IMAGE_TOWER}


def captioned() -> dict[str, Any]:
    """Images with a text each."""
    return {"input_ids": tokens(), "pixel_values": images(), "attention_mask": mask()}


def matched() -> dict[str, Any]:
    """Images with a text each, for the model's own loss."""
    return {**captioned(), "return_loss": True}


def placed() -> dict[str, Any]:
    """A text that begins with the places of an image's 16 patches."""
    places = torch.full((ROWS, 16), 5)
    text = tokens().clamp(min=6)
    return {
        "input_ids": torch.cat([places, text], 1),
        "pixel_values": images(),
        "labels": torch.cat([places, text], 1),
        "use_cache": False,
    }


def encoder_decoder() -> Case:
    """A BERT that reads and a BERT that writes."""
    kind = transformers.EncoderDecoderConfig
    config = kind.from_encoder_decoder_configs(
        transformers.BertConfig(**SIZES),
        transformers.BertConfig(**SIZES),
        decoder_start_token_id=1,
        pad_token_id=0,
    )
    inputs = {"input_ids": tokens(), "labels": tokens(), "use_cache": False}
    return transformers.EncoderDecoderModel(config), inputs, None


def vision_encoder_decoder() -> Case:
    """A ViT that looks and a GPT-2 that writes."""
    writer = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=VOCABULARY,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**VIT), writer, decoder_start_token_id=1, pad_token_id=0
    )
    inputs = {"pixel_values": images(), "labels": tokens(), "use_cache": False}
    return transformers.VisionEncoderDecoderModel(config), inputs, None


COMBINED: dict[str, Builder] = {
    "altclip": model(
        "AltCLIPModel",
        matched,
        text_config={**_TEXT_TOWER, "project_dim": 16, "pad_token_id": 0},
        vision_config=_IMAGE_TOWER,
        projection_dim=16,
    ),
    "blip": model(
        "BlipForConditionalGeneration",
        lambda: {**captioned(), "labels": tokens()},
        text_config={
            **_TEXT_TOWER,
            "encoder_hidden_size": 16,
            "bos_token_id": 1,
            "pad_token_id": 0,
            "sep_token_id": 3,
        },
        vision_config=_IMAGE_TOWER,
        projection_dim=16,
        image_text_hidden_size=16,
    ),
    "chinese-clip": model("ChineseCLIPModel", matched, **_TOWERS, projection_dim=16),
    "clip": model("CLIPModel", matched, **_TOWERS, projection_dim=16),
    "clip-loss": model(
        "CLIPModel",
        captioned,
        lambda outputs: outputs.logits_per_text.square().mean(),
        **_TOWERS,
        projection_dim=16,
    ),
    "encoder-decoder": encoder_decoder,
    "flava": model(
        "FlavaModel",
        captioned,
        lambda outputs: outputs.multimodal_embeddings.square().mean(),
        text_config=SIZES,
        image_config=_IMAGE_TOWER,
        multimodal_config={k: v for k, v in _TOWER.items() if k != "projection_dim"},
        projection_dim=16,
        hidden_size=16,
    ),
    "git": model(
        "GitForCausalLM",
        lambda: {**captioned(), "labels": tokens(), "use_cache": False},
        **SIZES,
        vision_config=_IMAGE_TOWER,
    ),
    "groupvit": model(
        "GroupViTModel",
        matched,
        text_config=_TEXT_TOWER,
        vision_config={
            **_IMAGE_TOWER,
            "depths": [2, 2],
            "num_group_tokens": [4, 0],
            "num_output_groups": [4, 2],
        },
        projection_dim=16,
        projection_intermediate_dim=16,
    ),
    "layoutlm": model(
        "LayoutLMForMaskedLM",
        lambda: {
            "input_ids": tokens(),
            "bbox": integers(0, 30, LENGTH, 4).sort()[0],
            "labels": tokens(),
        },
        **SIZES,
        max_2d_position_embeddings=32,
    ),
    "layoutlmv3": model(
        "LayoutLMv3ForSequenceClassification",
        lambda: {
            "input_ids": tokens(),
            "bbox": integers(0, 30, LENGTH, 4).sort()[0],
            "pixel_values": images(),
            "labels": pair(),
        },
        **SIZES,
        coordinate_size=2,
        shape_size=4,
        input_size=32,
        patch_size=8,
        max_2d_position_embeddings=32,
    ),
    "llava": model(
        "LlavaForConditionalGeneration",
        placed,
        text_config={"model_type": "llama", **GROUPED},
        vision_config={"model_type": "clip_vision_model", **_IMAGE_TOWER},
        image_token_index=5,
        image_token_id=5,
        vision_feature_layer=-1,
        image_seq_length=16,
    ),
    "lxmert": model(
        "LxmertForQuestionAnswering",
        lambda: {
            "input_ids": tokens(),
            "visual_feats": normal(4, 8),
            "visual_pos": normal(4, 4),
            "labels": pair(),
        },
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_attention_heads=2,
        num_qa_labels=4,
        intermediate_size=32,
        l_layers=2,
        x_layers=2,
        r_layers=2,
        visual_feat_dim=8,
        max_position_embeddings=32,
    ),
    "paligemma": model(
        "PaliGemmaForConditionalGeneration",
        lambda: {**placed(), "token_type_ids": torch.arange(28).repeat(ROWS, 1) // 20},
        text_config={"model_type": "gemma", "head_dim": 4, **GROUPED},
        vision_config={"model_type": "siglip_vision_model", **_IMAGE_TOWER},
        image_token_index=5,
        image_token_id=5,
        projection_dim=16,
    ),
    "siglip": model("SiglipModel", matched, **_TOWERS),
    "vision-encoder-decoder": vision_encoder_decoder,
    "visualbert": model(
        "VisualBertForQuestionAnswering",
        lambda: {
            "input_ids": tokens(),
            "attention_mask": mask(),
            "visual_embeds": normal(4, 8),
            "labels": normal(2).softmax(-1),
        },
        **SIZES,
        visual_embedding_dim=8,
    ),
}


class OfOneSize(nn.Module):
    """A model of vision and language whose images all have 4 x 4 patches."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Its outputs, with the positions of a row in that row."""
        grid = torch.tensor([[1, 4, 4]] * ROWS)
        positions = inputs.pop("position_ids").transpose(0, 1)
        return self.whole(image_grid_thw=grid, position_ids=positions, use_cache=False, **inputs)


def qwen(name: str, **vision: Any) -> Builder:
    """A model that counts the patches of images in Python."""

    def make() -> Case:
        kind = getattr(transformers, name)
        rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
        sizes = {**GROUPED, "hidden_size": 32, "head_dim": 8, "rope_parameters": rotary}
        config = kind.config_class(text_config=sizes, vision_config=vision, image_token_id=5)
        places = torch.full((ROWS, 4), 5)
        text = torch.cat([places, tokens().clamp(min=6)], 1)
        pixels = normal(16, 3 * config.vision_config.temporal_patch_size * 4**2).flatten(0, 1)
        inputs = {
            "input_ids": text,
            "labels": text,
            "pixel_values": pixels,
            "position_ids": torch.arange(text.shape[1]).repeat(ROWS, 3, 1),
        }
        return OfOneSize(kind(config)), inputs, None

    return make


def vilt(more: dict[str, Any]) -> Case:
    """A model of images that takes all patches of one that its mask has."""
    make = model(
        "ViltForQuestionAnswering",
        lambda: {
            "input_ids": tokens(),
            "pixel_values": images(),
            "labels": normal(3).softmax(-1),
            **more,
        },
        **SIZES,
        image_size=32,
        patch_size=8,
        num_labels=3,
        max_image_length=-1,
    )
    return make()


_QWEN: dict[str, Any] = {"depth": 2, "num_heads": 4, "patch_size": 4}
COMBINED |= {
    "qwen2-vl": qwen("Qwen2VLForConditionalGeneration", embed_dim=32, hidden_size=32, **_QWEN),
    "qwen2.5-vl": qwen(
        "Qwen2_5_VLForConditionalGeneration",
        hidden_size=32,
        intermediate_size=32,
        out_hidden_size=32,
        window_size=16,
        fullatt_block_indexes=[1],
        **_QWEN,
    ),
    "qwen3-vl": qwen(
        "Qwen3VLForConditionalGeneration",
        hidden_size=32,
        intermediate_size=32,
        out_hidden_size=32,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0, 1],
        **_QWEN,
    ),
    "vilt": lambda: vilt({}),
}


def series() -> dict[str, Any]:
    """The past of a series, and its future."""
    return {
        "past_values": normal(15),
        "past_time_features": normal(15, 2),
        "past_observed_mask": torch.ones(ROWS, 15),
        "future_values": normal(4),
        "future_time_features": normal(4, 2),
        "use_cache": False,
    }


def trajectory() -> dict[str, Any]:
    """States, actions and rewards."""
    return {
        "states": normal(6, 4),
        "actions": normal(6, 3),
        "rewards": normal(6, 1),
        "returns_to_go": normal(6, 1),
        "timesteps": torch.arange(6).repeat(ROWS, 1),
        "attention_mask": torch.ones(ROWS, 6),
    }


SERIES: dict[str, Any] = {
    **{k: v for k, v in SEQ2SEQ.items() if not k.endswith("_id") and "position" not in k},
    "prediction_length": 4,
    "context_length": 8,
    "num_time_features": 2,
}
del SERIES["vocab_size"]
_PATCHES: dict[str, Any] = {
    "num_input_channels": 2,
    "context_length": 32,
    "patch_length": 8,
    "patch_stride": 8,
    "prediction_length": 4,
    "d_model": 16,
}

OTHERS: dict[str, Builder] = {
    "decision-transformer": model(
        "DecisionTransformerModel",
        trajectory,
        lambda outputs: outputs.action_preds.square().mean(),
        state_dim=4,
        act_dim=3,
        hidden_size=16,
        max_ep_len=16,
        n_layer=3,
        n_head=2,
        n_positions=32,
        vocab_size=2,
    ),
    "informer": model("InformerForPrediction", series, **SERIES),
    "patchtsmixer": model(
        "PatchTSMixerForPrediction",
        lambda: {"past_values": normal(32, 2), "future_values": normal(4, 2)},
        **_PATCHES,
        num_layers=3,
    ),
    "patchtst": model(
        "PatchTSTForPrediction",
        lambda: {"past_values": normal(32, 2), "future_values": normal(4, 2)},
        **_PATCHES,
        num_hidden_layers=3,
        num_attention_heads=2,
        ffn_dim=32,
    ),
    "time-series": model("TimeSeriesTransformerForPrediction", series, **SERIES),
}
