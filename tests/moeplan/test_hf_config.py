"""Published Hugging Face configs give the presets; what ModelSpec cannot hold is one clear error."""

from typing import Any

import pytest

from moeplan.errors import InvalidInputError
from moeplan.files import read_json
from moeplan.hf_config import FAMILIES, model_from_hf_config
from moeplan.mixers import GqaAttention
from moeplan.model_spec import Llama3Scaling, YarnScaling
from moeplan.presets import PRESET_FOLDER, load_model

DEEPSEEK_V3 = read_json(PRESET_FOLDER / "hf" / "deepseek-v3-config.json")
_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_COMMON = {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
_AUX = {"aux_loss_alpha": 0.001, "seq_aux": True, "moe_layer_freq": 1, "attention_bias": False}
_V3_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        **_COMMON,
        **more,
    }


def _experts(routed: int, top_k: int, ffn: int, shared: int) -> dict[str, int]:
    return {
        "n_routed_experts": routed,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": ffn,
        "n_shared_experts": shared,
    }


QWEN3_MOE = {
    **_sizes(48, 2048, 32, 4, 6144, vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1000000.0, head_dim=128),
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
}
QWEN3_NEXT = {
    **_sizes(48, 2048, 16, 2, 5120, vocab_size=151936, rms_norm_eps=1e-6, rope_theta=10000000, head_dim=256),
    "model_type": "qwen3_next",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "partial_rotary_factor": 0.25,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}
GPT_OSS = {
    **_sizes(24, 2880, 64, 8, 2880, vocab_size=201088, rms_norm_eps=1e-5, rope_theta=150000, head_dim=64),
    "model_type": "gpt_oss",
    "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_experts_per_tok": 4,
    "num_local_experts": 32,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}
MIXTRAL = {
    **_sizes(32, 4096, 32, 8, 14336, vocab_size=32000, rms_norm_eps=1e-5, rope_theta=1000000.0),
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
LLAMA31 = {
    **_sizes(126, 16384, 128, 8, 53248, vocab_size=128256, rms_norm_eps=1e-5, rope_theta=500000.0),
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
NEMOTRON_NANO = {
    "model_type": "nemotron_h",
    "attention_bias": False,
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}
# Key by key what the models' own config.json holds, without keys that no architecture depends on.
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v2": {
        **_sizes(60, 5120, 128, 128, 12288, vocab_size=102400, rms_norm_eps=1e-6, rope_theta=10000, rope_scaling=_YARN),
        **_MLA,
        **_AUX,
        **_experts(160, 6, 1536, 2),
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "n_group": 8,
        "norm_topk_prob": False,
        "q_lora_rank": 1536,
        "routed_scaling_factor": 16.0,
        "scoring_func": "softmax",
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
    },
    "deepseek-v2-lite": {
        **_sizes(27, 2048, 16, 16, 10944, vocab_size=102400, rms_norm_eps=1e-6, rope_theta=10000, rope_scaling=_YARN),
        **_MLA,
        **_AUX,
        **_experts(64, 6, 1408, 2),
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "n_group": 1,
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
    },
    "kimi-k2": {
        **_sizes(61, 7168, 64, 64, 18432, vocab_size=163840, rms_norm_eps=1e-6, rope_theta=50000.0, rope_scaling=_YARN),
        **_MLA,
        **_AUX,
        **_experts(384, 8, 2048, 1),
        **_V3_ROUTER,
        "model_type": "kimi_k2",
        "first_k_dense_replace": 1,
        "n_group": 1,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 1536,
        "routed_scaling_factor": 2.827,
        "topk_group": 1,
    },
    "moonlight-16b-a3b": {
        **_sizes(27, 2048, 16, 16, 11264, vocab_size=163840, rms_norm_eps=1e-5, rope_theta=50000.0),
        **_MLA,
        **_AUX,
        **_experts(64, 6, 1408, 2),
        **_V3_ROUTER,
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 1,
        "n_group": 1,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "routed_scaling_factor": 2.446,
        "topk_group": 1,
    },
    "qwen3-30b-a3b": QWEN3_MOE,
    "qwen3-next-80b-a3b": QWEN3_NEXT,
    "qwen3-8b": {
        **_sizes(36, 4096, 32, 8, 12288, vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1000000, head_dim=128),
        "model_type": "qwen3",
        "attention_bias": False,
        "max_window_layers": 36,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "qwen2.5-32b": {
        **_sizes(64, 5120, 40, 8, 27648, vocab_size=152064, rms_norm_eps=1e-5, rope_theta=1000000.0),
        "model_type": "qwen2",
        "max_window_layers": 64,
        "sliding_window": 131072,
        "use_sliding_window": False,
    },
    "qwen2-57b-a14b": {
        **_sizes(28, 3584, 28, 4, 18944, vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1000000.0),
        "model_type": "qwen2_moe",
        "decoder_sparse_step": 1,
        "max_window_layers": 28,
        "moe_intermediate_size": 2560,
        "norm_topk_prob": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 20480,
        "sliding_window": 65536,
        "use_sliding_window": False,
    },
    "mixtral-8x7b": MIXTRAL,
    "nemotron3-nano-30b-a3b": NEMOTRON_NANO,
    "gpt-oss-20b": GPT_OSS,
    "llama3.1-405b": LLAMA31,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_published_config_gives_its_preset(name: str) -> None:
    imported = model_from_hf_config(PUBLISHED[name], f"{name}/config.json")
    # Presets are as pre-trained; published weights may be of a longer context.
    preset = load_model(name).model_dump(exclude={"source", "rope_scaling"})
    if name == "qwen3-next-80b-a3b":  # whose config does not say that its checkpoint has a depth of MTP
        assert preset["num_mtp_layers"] == 1
        preset["num_mtp_layers"] = 0
    assert imported.model_dump(exclude={"source", "rope_scaling"}) == preset


def test_every_family_has_a_published_config() -> None:
    without_preset = {"glm4_moe", "qwen3_5_moe", "qwen3_5_moe_text"}
    assert {config["model_type"] for config in PUBLISHED.values()} == set(FAMILIES) - without_preset


def test_the_text_model_inside_one_of_images_is_read() -> None:
    dropped = ("model_type", "mlp_only_layers", "decoder_sparse_step", "rope_theta", "partial_rotary_factor")
    text = {key: value for key, value in QWEN3_NEXT.items() if key not in dropped}
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    text |= {"model_type": "qwen3_5_moe_text", "rope_parameters": rope, "mtp_num_hidden_layers": 1}
    alone = model_from_hf_config(text, "x/config.json")
    whole = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}, "tie_word_embeddings": True}
    inside = model_from_hf_config(whole, "x/config.json")
    assert inside == alone.model_copy(update={"tied_embeddings": True})
    assert (inside.name, inside.num_mtp_layers, inside.attention_period) == ("x", 1, 4)
    next_one = load_model("qwen3-next-80b-a3b")
    assert (inside.attention, inside.linear_mixer, inside.moe) == (
        next_one.attention,
        next_one.linear_mixer,
        next_one.moe,
    )


def test_scaling_added_by_hand_counts_before_rope_parameters() -> None:
    config = {key: value for key, value in QWEN3_MOE.items() if key != "rope_theta"}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    scaled = model_from_hf_config(config | {"rope_scaling": yarn, "rope_theta": 7.0}, "config.json")
    assert scaled.rope_theta == 7.0
    assert isinstance(scaled.rope_scaling, YarnScaling)
    plain = model_from_hf_config(config | {"rope_scaling": None}, "config.json")
    assert (plain.rope_theta, plain.rope_scaling) == (5.0, None)


def test_rope_theta_may_lie_in_rope_parameters() -> None:
    config = {key: value for key, value in GPT_OSS.items() if key not in ("rope_theta", "rope_scaling")}
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    model = model_from_hf_config(config | {"rope_parameters": yarn | {"rope_theta": 123456}}, "config.json")
    assert model.rope_theta == 123456.0
    assert model.rope_scaling == YarnScaling(factor=32, original_max_positions=4096)


def test_rope_scaling_is_read() -> None:
    assert model_from_hf_config(LLAMA31, "config.json").rope_scaling == Llama3Scaling(
        factor=8, original_max_positions=8192
    )
    scaling = model_from_hf_config(DEEPSEEK_V3, "config.json").rope_scaling
    assert scaling == YarnScaling(factor=40, original_max_positions=4096, mscale=1, mscale_all_dim=1)
    assert scaling.table_factor == 1
    # DeepSeek-V3's own code: (0.1 ln 40 + 1) squared.
    assert scaling.softmax_factor == pytest.approx(1.3688879**2)
    without = {key: value for key, value in GPT_OSS.items() if key != "rope_scaling"}
    assert model_from_hf_config(without, "config.json").rope_scaling == YarnScaling(
        factor=32, original_max_positions=4096, truncate=False
    )


@pytest.mark.parametrize(
    "extra, where, name",
    [
        ({"_name_or_path": "deepseek-ai/DeepSeek-V3"}, "x/config.json", "DeepSeek-V3"),
        ({}, "x/config.json", "x"),
        ({}, "config.json", "deepseek_v3"),
        ({}, "some/v3.json", "v3"),
    ],
)
def test_a_model_is_named_after_its_checkpoint(extra: dict[str, str], where: str, name: str) -> None:
    assert model_from_hf_config(DEEPSEEK_V3 | extra, where).name == name


@pytest.mark.parametrize(
    "base, change, kinds",
    [
        (QWEN3_MOE, {"num_hidden_layers": 4, "mlp_only_layers": [0, 1]}, ("dense", "dense", "moe", "moe")),
        (QWEN3_MOE, {"num_hidden_layers": 4, "decoder_sparse_step": 2}, ("dense", "moe", "dense", "moe")),
        (DEEPSEEK_V3, {"num_hidden_layers": 4}, ("dense", "dense", "dense", "moe")),
    ],
)
def test_dense_layers_are_placed(base: dict[str, Any], change: dict[str, Any], kinds: tuple[str, ...]) -> None:
    model = model_from_hf_config(base | change, "config.json")
    assert tuple(kind.mlp for kind in model.layer_kinds) == kinds
    assert model.dense_ffn_size == base["intermediate_size"]


@pytest.mark.parametrize(
    "base, change, expected",
    [
        (MIXTRAL, {"sliding_window": 4096}, (4096, 1)),
        (GPT_OSS, {"layer_types": None}, (128, 2)),
        (GPT_OSS, {"layer_types": ["full_attention"] * 24}, (None, 1)),
        (GPT_OSS, {"layer_types": (["sliding_attention"] + ["full_attention"] * 3) * 6}, (128, 4)),
        (QWEN3_MOE, {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0}, (512, 1)),
        (QWEN3_MOE, {"use_sliding_window": True, "sliding_window": 512}, (None, 1)),
    ],
)
def test_windowed_layers(base: dict[str, Any], change: dict[str, Any], expected: tuple[int | None, int]) -> None:
    attention = model_from_hf_config(base | change, "config.json").attention
    assert isinstance(attention, GqaAttention)
    assert (attention.sliding_window, attention.sliding_period) == expected


@pytest.mark.parametrize(
    "change, period, num_linear",
    [
        ({}, 4, 36),
        ({"full_attention_interval": 3}, 3, 32),
        ({"full_attention_interval": None}, 4, 36),
        ({"layer_types": ["linear_attention", "full_attention"] * 24}, 2, 24),
        ({"layer_types": ["linear_attention"] * 48}, 49, 48),
        ({"layer_types": ["full_attention"] * 48}, 1, 0),
    ],
)
def test_layers_that_attend(change: dict[str, Any], period: int, num_linear: int) -> None:
    model = model_from_hf_config(QWEN3_NEXT | change, "config.json")
    assert model.attention_period == period
    assert sum(kind.mixer == "linear" for kind in model.layer_kinds) == num_linear
    assert (model.linear_mixer is None) == (num_linear == 0)


_BLOCKS = {"M": "mamba", "E": "moe", "*": "attention"}
_LATER = {"mamba": "linear_attention", "attention": "full_attention"}


def test_layers_of_one_block_are_listed_in_three_ways() -> None:
    pattern = NEMOTRON_NANO["hybrid_override_pattern"]
    assert isinstance(pattern, str)
    listed = [_BLOCKS[symbol] for symbol in pattern]
    without = {key: value for key, value in NEMOTRON_NANO.items() if key != "hybrid_override_pattern"}
    for types in (listed, [_LATER.get(kind, kind) for kind in listed]):
        assert model_from_hf_config(without | {"layers_block_type": types}, "config.json").layer_pattern == pattern


def test_the_first_nemotrons_are_dense_and_name_the_width_of_heads_otherwise() -> None:
    config = {key: value for key, value in NEMOTRON_NANO.items() if key not in ("head_dim", "n_routed_experts")}
    changes = {"num_hidden_layers": 6, "hybrid_override_pattern": "M-M-*-", "attention_head_dim": 96}
    model = model_from_hf_config(config | changes, "config.json")
    assert isinstance(model.attention, GqaAttention)
    assert (model.moe, model.dense_ffn_size, model.attention.head_dim) == (None, 1856, 96)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_hidden_layers": 50}, "num_hidden_layers is 50; the pattern has 52 layers"),
        ({"hybrid_override_pattern": "ME+"}, "hybrid_override_pattern holds '+'; M * - E can be imported"),
        ({"layers_block_type": ["mamba", "conv"]}, "layers_block_type holds 'conv'"),
        ({"use_conv_bias": False}, "use_conv_bias is False; only True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True; only False"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; only 'relu2'"),
        ({"sliding_window": 512}, "sliding_window is set"),
        ({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "ME"}, "mtp_hybrid_override_pattern is 'ME'"),
        ({"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["moe"]}, r"mtp_layers_block_type is ['moe']"),
    ],
)
def test_what_no_nemotron_has_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        model_from_hf_config(NEMOTRON_NANO | change, "config.json")
    assert message in caught.value.message


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_missing_size_is_one_error_naming_key_and_file(name: str) -> None:
    needed = ["model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"]
    if PUBLISHED[name]["model_type"] == "nemotron_h":  # its pattern says how many layers there are
        needed[1] = "hybrid_override_pattern"
    needed += [key for key in ("num_experts_per_tok", "q_lora_rank", "kv_lora_rank") if key in PUBLISHED[name]]
    for key in needed:
        config = {other: value for other, value in PUBLISHED[name].items() if other != key}
        with pytest.raises(InvalidInputError) as caught:
            model_from_hf_config(config, "some/config.json")
        assert caught.value.message == f"some/config.json: the key {key} is missing"


@pytest.mark.parametrize(
    "base, change, message",
    [
        (DEEPSEEK_V3, {"model_type": "gemma3"}, "model_type 'gemma3' cannot be imported"),
        (DEEPSEEK_V3, {"hidden_size": "7168"}, "hidden_size must be a whole number, got '7168'"),
        (DEEPSEEK_V3, {"num_hidden_layers": True}, "num_hidden_layers must be a whole number, got True"),
        (DEEPSEEK_V3, {"n_routed_experts": 0}, "n_routed_experts must be at least 1, got 0"),
        (DEEPSEEK_V3, {"routed_scaling_factor": "2.5"}, "routed_scaling_factor must be a number, got '2.5'"),
        (DEEPSEEK_V3, {"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func must be one of sigmoid"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method must be one of noaux_tc"),
        (PUBLISHED["deepseek-v2"], {"norm_topk_prob": True}, "norm_topk_prob is True; only False can be imported"),
        (DEEPSEEK_V3, {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling is of type 'linear'"),
        (GPT_OSS, {"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling is of type 'dynamic'; default, yarn and"),
        (GPT_OSS, {"swiglu_limit": 10.0}, "swiglu_limit is 10.0; only 7.0 can be imported"),
        (GPT_OSS, {"rope_parameters": {"full_attention": {}}}, "rope_parameters differs by kind of layer"),
        (QWEN3_MOE, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
        (QWEN3_NEXT, {"layer_types": ["full_attention"] + ["linear_attention"] * 47}, "layer_types attends in other"),
        (QWEN3_NEXT, {"layer_types": ["full_attention"] * 47}, "layer_types has 47 entries for 48 layers"),
        (QWEN3_NEXT, {"layer_types": ["mamba"] * 48}, "layer_types holds 'mamba'; linear_attention and"),
        (QWEN3_NEXT, {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is above 1"),
        (
            {"model_type": "qwen3_5_moe", "text_config": QWEN3_NEXT | {"attn_output_gate": False}},
            {},
            "text_config: attn_output_gate is False; only True can be imported",
        ),
        (QWEN3_NEXT, {"linear_num_value_heads": 24}, "num_v_heads 24 is not a multiple of num_k_heads 16"),
        (MIXTRAL, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act must be one of silu, swish, gelu"),
        (DEEPSEEK_V3, {"hidden_act": 7}, "hidden_act must be a string, got 7"),
        (DEEPSEEK_V3, {"rope_parameters": [1]}, "rope_parameters must be an object, got [1]"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1 can be imported"),
        (DEEPSEEK_V3, {"num_experts_per_tok": 300}, "top_k 300 exceeds num_experts 256"),
        (LLAMA31, {"mlp_bias": True}, "mlp_bias is True; only False can be imported"),
        (LLAMA31, {"num_attention_heads": 120}, "hidden_size 16384 is not a multiple of num_attention_heads 120"),
        (LLAMA31, {"hidden_act": "relu"}, "hidden_act must be one of"),
        (QWEN3_MOE, {"head_dim": None}, "the key head_dim is missing"),
        (QWEN3_MOE, {"mlp_only_layers": [3]}, "mlp_only_layers is [3] with decoder_sparse_step 1"),
        (QWEN3_MOE, {"mlp_only_layers": 3}, "mlp_only_layers must be a list of whole numbers, got 3"),
        (QWEN3_MOE, {"use_sliding_window": True, "max_window_layers": 9}, "max_window_layers windows other layers"),
        (GPT_OSS, {"layer_types": ["chunked_attention"] * 24}, "layer_types holds 'chunked_attention'"),
        (GPT_OSS, {"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for 24 layers"),
        (GPT_OSS, {"layer_types": "full"}, "layer_types must be a list of strings, got 'full'"),
        (GPT_OSS, {"sliding_window": None}, "the key sliding_window is missing"),
    ],
)
def test_what_cannot_be_imported_is_one_error(base: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        model_from_hf_config(base | change, "some/config.json")
    assert caught.value.message.startswith("some/config.json: ")
    assert message in caught.value.message
    assert caught.value.hint


def test_an_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInputError) as caught:
        model_from_hf_config({"model_type": "bert"}, "config.json")
    assert all(family in caught.value.hint for family in FAMILIES)


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="a Hugging Face config is an object, got list"):
        model_from_hf_config([], "config.json")
