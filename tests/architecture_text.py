"""Language models of transformers: causal, masked, encoder and decoder."""

from typing import Any

from tests.architecture_kinds import GROUPED, SEQ2SEQ, SIZES, T5, Builder, model, pair, text
from tests.zoo import VOCABULARY, tokens

_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED: dict[str, Any] = {**_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
_STATES: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 4,
}
_NAMED: dict[str, Any] = {
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 4,
    "n_head": 4,
    "vocab_size": VOCABULARY,
}

# Those that the usual sizes suffice for, by the start of their class.
_CAUSAL = (
    "Apertus Arcee Biogpt Bloom Cohere Cohere2 CTRL Doge Emu3 Exaone4 Falcon Fuyu GPTBigCode "
    "GPTNeoX GPTNeoXJapanese Granite Jais2 Lfm2 MegatronBert MiniMax Mllama Mpt NanoChat "
    "Nemotron Olmo Olmo2 Olmo3 Persimmon Phi Phi3 Qwen2 RemBert Rwkv SmolLM3 StableLm Starcoder2 "
    "BitNet DiffLlama Ernie4_5 Cwm FalconMamba FlexOlmo GraniteMoe GraniteMoeShared Mistral "
    "ModernBertDecoder OlmoHybrid Phimoe RecurrentGemma AriaText Zaya"
).split()
_HEADS = (
    "Gemma Gemma2 Gemma3 Glm Glm4 Qwen3 SeedOss VaultGemma Llama4 HunYuanDenseV1 Helium".split()
)
_MASKED = (
    "BigBird Camembert ConvBert Data2VecText Deberta DebertaV2 Electra Ernie Esm EuroBert FNet "
    "Gte JinaEmbeddingsV3 MPNet MegatronBert ModernBert Mra NomicBert Nystromformer RemBert "
    "RoFormer Roberta RobertaPreLayerNorm Tapas XLMRoberta XLMRobertaXL Yoso"
).split()
_NAMES: dict[str, Any] = {
    "Biogpt": "BioGptForCausalLM",
    "CTRL": "CTRLLMHeadModel",
    "Zaya": "ZayaForCausalLM",
}

CAUSAL: dict[str, Builder] = {
    **{n.lower(): text(_NAMES.get(n, f"{n}ForCausalLM"), **GROUPED) for n in _CAUSAL},
    **{n.lower(): text(f"{n}ForCausalLM", **GROUPED, head_dim=4) for n in _HEADS},
    "bamba": text(
        "BambaForCausalLM", **GROUPED, **_STATES, mamba_chunk_size=8, attn_layer_indices=[1, 3]
    ),
    "codegen": text("CodeGenForCausalLM", **_NAMED, rotary_dim=4),
    "deepseek-v2": text(
        "DeepseekV2ForCausalLM", **SIZES, **_LATENT, **_ROUTED, first_k_dense_replace=1
    ),
    "deepseek-v3": text(
        "DeepseekV3ForCausalLM", **SIZES, **_LATENT, **_ROUTED, first_k_dense_replace=1
    ),
    "dots1": text(
        "Dots1ForCausalLM", **GROUPED, **_ROUTED, n_shared_experts=1, first_k_dense_replace=1
    ),
    "falcon-h1": text(
        "FalconH1ForCausalLM", **GROUPED, **_STATES, mamba_d_ssm=32, mamba_chunk_size=8
    ),
    "glm4-moe": text(
        "Glm4MoeForCausalLM", **GROUPED, **_ROUTED, head_dim=4, first_k_dense_replace=1
    ),
    "gpt-j": text("GPTJForCausalLM", **_NAMED, rotary_dim=4),
    "gpt-neo": text(
        "GPTNeoForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=4,
        intermediate_size=32,
        max_position_embeddings=32,
    ),
    "gpt-oss": text(
        "GptOssForCausalLM",
        **GROUPED,
        head_dim=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
    ),
    "granite-hybrid": text(
        "GraniteMoeHybridForCausalLM",
        **GROUPED,
        **_STATES,
        mamba_chunk_size=8,
        layer_types=["mamba", "attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
    ),
    "hrm": text("HrmTextForCausalLM", **GROUPED),
    "jamba": text(
        "JambaForCausalLM",
        **GROUPED,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=4,
        mamba_dt_rank=2,
        use_mamba_kernels=False,
    ),
    "jetmoe": text(
        "JetMoeForCausalLM",
        **{k: v for k, v in GROUPED.items() if k != "num_attention_heads"},
        kv_channels=4,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "lfm2-moe": text(
        "Lfm2MoeForCausalLM",
        **GROUPED,
        **_EXPERTS,
        num_experts=4,
        num_dense_layers=1,
        layer_types=["conv", "full_attention"] * 2,
    ),
    "mamba": text(
        "MambaForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=4,
        intermediate_size=32,
        time_step_rank=2,
    ),
    "mamba2": text(
        "Mamba2ForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=4,
        num_heads=4,
        head_dim=8,
        expand=2,
        n_groups=2,
        chunk_size=8,
    ),
    "minicpm3": text("MiniCPM3ForCausalLM", **SIZES, **_LATENT),
    "olmoe": text("OlmoeForCausalLM", **GROUPED, num_experts=4, num_experts_per_tok=2),
    "openai-gpt": text("OpenAIGPTLMHeadModel", **_NAMED),
    "qwen2-moe": text(
        "Qwen2MoeForCausalLM",
        **GROUPED,
        **_EXPERTS,
        shared_expert_intermediate_size=16,
        num_experts=4,
    ),
    "qwen3-moe": text("Qwen3MoeForCausalLM", **GROUPED, **_EXPERTS, head_dim=4, num_experts=4),
    "qwen3-next": text(
        "Qwen3NextForCausalLM",
        **GROUPED,
        **_EXPERTS,
        head_dim=4,
        num_experts=4,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
    ),
    "trocr": text(
        "TrOCRForCausalLM",
        vocab_size=VOCABULARY,
        d_model=16,
        decoder_layers=4,
        decoder_attention_heads=4,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
    ),
    "xglm": text(
        "XGLMForCausalLM",
        vocab_size=VOCABULARY,
        d_model=16,
        num_layers=4,
        attention_heads=4,
        ffn_dim=32,
        max_position_embeddings=32,
    ),
    "xlnet": text(
        "XLNetLMHeadModel", vocab_size=VOCABULARY, d_model=16, n_layer=4, n_head=4, d_inner=32
    ),
    "xlstm": text("xLSTMForCausalLM", **GROUPED),
    "zamba": text(
        "ZambaForCausalLM",
        **{**GROUPED, "num_hidden_layers": 6},
        attn_layer_period=3,
        attn_layer_offset=2,
        mamba_d_state=4,
        mamba_dt_rank=2,
        n_mamba_heads=2,
    ),
}

MASKED: dict[str, Builder] = {
    **{f"{n.lower()}-mlm": text(f"{n}ForMaskedLM", **SIZES) for n in _MASKED},
    "canine": model(
        "CanineForSequenceClassification",
        lambda: {"input_ids": tokens().repeat(1, 2)[:, :16], "labels": pair()},
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        num_hash_functions=2,
        num_hash_buckets=16,
        local_transformer_stride=8,
    ),
    "distilbert": text(
        "DistilBertForMaskedLM",
        vocab_size=VOCABULARY,
        dim=16,
        n_layers=4,
        n_heads=4,
        hidden_dim=32,
        max_position_embeddings=32,
    ),
    "esm-rotary": text(
        "EsmForMaskedLM",
        **SIZES,
        position_embedding_type="rotary",
        mask_token_id=5,
        token_dropout=True,
    ),
    "flaubert": text(
        "FlaubertWithLMHeadModel",
        n_words=VOCABULARY,
        emb_dim=16,
        n_layers=4,
        n_heads=4,
        max_position_embeddings=32,
    ),
    "funnel": text(
        "FunnelForMaskedLM",
        vocab_size=VOCABULARY,
        d_model=16,
        n_head=2,
        d_head=8,
        d_inner=32,
        block_sizes=[2, 2],
        num_decoder_layers=2,
    ),
    "longformer": text("LongformerForMaskedLM", **SIZES, attention_window=4),
    "luke": text("LukeForMaskedLM", **SIZES, entity_vocab_size=10, entity_emb_size=8),
    "mobilebert": text(
        "MobileBertForMaskedLM",
        **{**SIZES, "hidden_size": 32, "num_attention_heads": 2},
        embedding_size=16,
        intra_bottleneck_size=16,
        true_hidden_size=16,
        num_feedforward_networks=2,
    ),
    "perceiver": text(
        "PerceiverForMaskedLM",
        vocab_size=VOCABULARY,
        d_model=16,
        num_latents=4,
        d_latents=16,
        num_self_attends_per_block=3,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
        max_position_embeddings=12,
        qk_channels=16,
        v_channels=16,
    ),
    "squeezebert": text(
        "SqueezeBertForMaskedLM",
        **SIZES,
        embedding_size=16,
        q_groups=2,
        k_groups=2,
        v_groups=2,
        intermediate_groups=2,
        output_groups=2,
    ),
    "xlm": text("XLMWithLMHeadModel", n_words=VOCABULARY, emb_dim=16, n_layers=4, n_heads=4),
}

_LIKE_BART = (
    "MBartForConditionalGeneration PegasusForConditionalGeneration MarianMTModel "
    "BlenderbotForConditionalGeneration BlenderbotSmallForConditionalGeneration "
    "M2M100ForConditionalGeneration MvpForConditionalGeneration PLBartForConditionalGeneration"
).split()

SEQUENCES: dict[str, Builder] = {
    **{n.removesuffix("ForConditionalGeneration").lower(): text(n, **SEQ2SEQ) for n in _LIKE_BART},
    "bigbird-pegasus": text(
        "BigBirdPegasusForConditionalGeneration", **SEQ2SEQ, attention_type="original_full"
    ),
    "led": text(
        "LEDForConditionalGeneration",
        **SEQ2SEQ,
        attention_window=4,
        max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32,
    ),
    "longt5": text("LongT5ForConditionalGeneration", **T5, local_radius=4),
    "longt5-global": text(
        "LongT5ForConditionalGeneration",
        **T5,
        local_radius=4,
        encoder_attention_type="transient-global",
        global_block_size=4,
    ),
    "mt5": text("MT5ForConditionalGeneration", **T5),
    "pegasus-x": text(
        "PegasusXForConditionalGeneration", **SEQ2SEQ, block_size=4, num_global_tokens=2
    ),
    "prophetnet": text(
        "ProphetNetForConditionalGeneration",
        vocab_size=VOCABULARY,
        hidden_size=16,
        encoder_ffn_dim=32,
        num_encoder_layers=2,
        num_encoder_attention_heads=2,
        decoder_ffn_dim=32,
        num_decoder_layers=2,
        num_decoder_attention_heads=2,
        max_position_embeddings=32,
    ),
    "umt5": text("UMT5ForConditionalGeneration", **T5),
}
