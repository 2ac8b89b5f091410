"""Shapes of released models, as far as they decide what a sequence costs, and what it costs by the arithmetic of their papers.

Owns facts only: transformers' config class with the values of the release, the architecture that the release states, bytes of
KV a token (bf16; a latent counts as latent + rotated part) and bytes of state a sequence (convolution windows of K - 1 inputs in
bf16, recurrent states in fp32). `source` says where the shapes were published. Layer lists that a release spells out are
given; the others follow from the class. Used by the tests of `check-model`.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """One released model. `text` values belong to the language model where the config wraps it."""

    architecture: str
    config: str
    text: Mapping[str, object]
    kv_nbytes: int  # a token
    state_nbytes: int  # a sequence
    source: str
    is_wrapped: bool = False


def _qwen3_5(layers: int, hidden: int, heads: tuple[int, int], v_heads: int, **more: object) -> dict[str, object]:
    return {
        "vocab_size": 248320,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": v_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        **more,
    }


def _experts(count: int, chosen: int, width: int, shared: int) -> dict[str, object]:
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": shared,
    }


def _granite(layers: int, hidden: int, attention: list[int], heads: tuple[int, int], mamba: tuple[int, int], **more: object):
    kinds = ["full_attention" if index in attention else "linear_attention" for index in range(layers)]
    return {
        "vocab_size": 100352,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "layer_types": kinds,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "mamba_n_heads": mamba[0],
        "mamba_d_head": mamba[1],
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "max_position_embeddings": 131072,
        "position_embedding_type": "nope",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        **more,
    }


def _falcon(layers: int, hidden: int, inter: int, vocab: int, kv: tuple[int, int, int], mamba: tuple[int, int, int]):
    return {
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_attention_heads": kv[0],
        "num_key_value_heads": kv[1],
        "head_dim": kv[2],
        "mamba_n_heads": mamba[0],
        "mamba_d_head": mamba[1],
        "mamba_d_ssm": mamba[0] * mamba[1],
        "mamba_d_state": mamba[2],
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
    }


def _lfm2(layers: int, hidden: int, attention: list[int], q_heads: int, vocab: int = 65536, **more: object):
    return {
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": q_heads,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "layer_types": ["full_attention" if index in attention else "conv" for index in range(layers)],
        **more,
    }


def _nemotron(pattern: str, hidden: int, heads: tuple[int, int], mamba: tuple[int, int], **more: object) -> dict[str, object]:
    kinds = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
    return {
        "layers_block_type": [kinds[letter] for letter in pattern],
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 128,
        "mamba_num_heads": mamba[0],
        "mamba_head_dim": mamba[1],
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        **more,
    }


_LFM2_ATTENTION = [2, 5, 8, 10, 12, 14]
_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_QWEN = "slime scripts/models, Qwen3.5"
_CONFIGURATOR = "ai-dynamo/aiconfigurator, model_configs"
_TEST = "a public test configuration"
_NEXT = _qwen3_5(48, 2048, (16, 2), 32, **_experts(512, 10, 512, 512)) | {"vocab_size": 151936, "intermediate_size": 5120}

RELEASES: Mapping[str, Release] = {
    "Qwen3-Next-80B-A3B": Release("Qwen3NextForCausalLM", "Qwen3NextConfig", _NEXT, 24_576, 77_266_944, _CONFIGURATOR),
    **{
        f"Qwen3.5-{size}": Release(
            "Qwen3_5ForConditionalGeneration", "Qwen3_5Config", text, kv, state, source, is_wrapped=True
        )
        for size, text, kv, state, source in (
            ("0.8B", _qwen3_5(24, 1024, (8, 2), 16, intermediate_size=3584), 12_288, 19_537_920, _QWEN),
            ("2B", _qwen3_5(24, 2048, (8, 2), 16, intermediate_size=6144), 12_288, 19_537_920, "apxml.com/models/qwen35-2b"),
            ("4B", _qwen3_5(32, 2560, (16, 4), 32, intermediate_size=9216), 32_768, 51_511_296, _QWEN),
            ("9B", _qwen3_5(32, 4096, (16, 4), 32, intermediate_size=12288), 32_768, 51_511_296, _QWEN),
            ("27B", _qwen3_5(64, 5120, (24, 4), 48, intermediate_size=17408), 65_536, 153_944_064, _CONFIGURATOR),
        )
    },
    **{
        f"Qwen3.5-{size}": Release(
            "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig", text, kv, state, _CONFIGURATOR, is_wrapped=True
        )
        for size, text, kv, state in (
            ("35B-A3B", _qwen3_5(40, 2048, (16, 2), 32, **_experts(256, 8, 512, 512)), 20_480, 64_389_120),
            ("122B-A10B", _qwen3_5(48, 3072, (32, 2), 64, **_experts(256, 8, 1024, 1024)), 24_576, 153_649_152),
            ("397B-A17B", _qwen3_5(60, 4096, (32, 2), 64, **_experts(512, 10, 1024, 1024)), 30_720, 192_061_440),
        )
    },
    "Qwen3.8-Flash-Next": Release(
        "Qwen4ExpForConditionalGeneration",
        "Qwen4ExpConfig",
        _qwen3_5(48, 2560, (24, 2), 48, **_experts(512, 10, 640, 640))
        | {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048}
        | {"indexer_compress_ratio": 4, "ple_layer_ids": [2], "ple_embed_dim": 2560, "split_ngram_parts": 128}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}, "eos_token_id": 248044},
        24_576 + 768,  # and one pooled index key of 128 for 4 tokens
        # Layer 2's window and last token ids; of each index the rows of a group that is not yet full.
        115_458_048 + 184_336 + 12 * 3 * 128 * 2,
        "docs.nvidia.com NeMo AutoModel, qwen3_8_flash_next",
        is_wrapped=True,
    ),
    "GLM-5.3-Flash": Release(
        "Glm5NextForConditionalGeneration",
        "Glm5NextConfig",
        {"index_kpool": 4},
        11_264 + 704,  # the latent, and one pooled index key of 128 for 4 tokens
        147_619_840 + 11 * 3 * 256 * 2,  # and of each index the rows, keys and gates, of a group that is not yet full
        "docs.nvidia.com NeMo AutoModel, glm-5-3-flash",
        is_wrapped=True,
    ),
    "Kimi-Linear-48B-A3B": Release(
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {"layer_types": ["full_attention" if i in (3, 7, 11, 15, 19, 23, 26) else "linear_attention" for i in range(27)]},
        8_064,
        43_417_600,
        _TEST,
    ),
    "Ling-3.0-Flash": Release(
        "BailingMoeV3ForCausalLM", "BailingHybridConfig", {}, 8_064, 75_980_800, "transformers; wiki-b2l.pages.dev/rfc/0012"
    ),
    "Lara-4-Mini": Release("LaraMiniForCausalLM", "LaraMiniConfig", {}, 14_336, 15_024_128, "transformers"),
    "Olmo-Hybrid-7B": Release(
        "OlmoHybridForCausalLM", "OlmoHybridConfig", {}, 122_880, 54_743_040, "transformers; docs.vllm.ai olmo_hybrid"
    ),
    "Nemotron-3-Nano-30B-A3B": Release(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        _nemotron(
            _NANO, 2688, (32, 2), (64, 64), n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856,
            moe_shared_expert_intermediate_size=3712,
        ),
        6_144,
        49_082_368,
        _CONFIGURATOR,
    ),
    "Nemotron-3-Super-120B-A12B": Release(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        _nemotron(
            "MEMEMEMEM*E" * 8, 4096, (32, 2), (128, 64), n_routed_experts=512, num_experts_per_tok=22, moe_intermediate_size=2688,
            moe_latent_size=1024, moe_shared_expert_intermediate_size=5376,
        ),
        8_192,
        170_229_760,
        f"{_CONFIGURATOR}; where in the 88 layers the 8 of attention stand is not published there, and decides nothing here",
    ),
    "Nemotron-3-Ultra-550B-A55B": Release(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        _nemotron("MEMEMEME*" * 12, 8192, (64, 2), (256, 64)),
        12_288,
        407_961_600,
        f"{_CONFIGURATOR}; the order of the 108 layers as for Super",
    ),
    "Nemotron-3-Nano-4B": Release(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        _nemotron("M-" * 17 + "M*" * 4, 3136, (40, 8), (96, 80)),
        16_384,
        83_801_088,
        f"{_TEST}; the order of the 42 layers as for Super",
    ),
    "granite-4.0-h-350m": Release(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        _granite(32, 768, [10, 13, 17, 27], (12, 4), (48, 32), shared_intermediate_size=2048),
        4_096,
        22_321_152,
        "huggingface.co/Org-Exp/SSM-350m",
    ),
    "granite-4.0-h-micro": Release(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        _granite(40, 2048, [5, 15, 25, 35], (32, 8), (64, 64), shared_intermediate_size=8192),
        8_192,
        76_437_504,
        _TEST,
    ),
    "granite-4.0-h-tiny": Release(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        _granite(
            40, 1536, [5, 15, 25, 35], (12, 4), (48, 64), shared_intermediate_size=1024, intermediate_size=512,
            num_local_experts=64, num_experts_per_tok=6,
        ),
        8_192,
        57_341_952,
        _TEST,
    ),
    "Falcon-H1-Tiny-90M": Release(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        _falcon(24, 512, 768, 32768, (8, 2, 64), (24, 32, 64)),
        12_288,
        4_847_616,
        _TEST,
    ),
    "Falcon-H1-0.5B": Release(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        _falcon(36, 1024, 2048, 32784, (8, 2, 64), (24, 64, 128)),
        18_432,
        28_698_624,
        "NVIDIA Megatron-Bridge, tests",
    ),
    "Falcon-H1-7B": Release(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        _falcon(44, 3072, 12288, 130048, (12, 2, 128), (24, 128, 256)),
        45_056,
        139_358_208,
        _TEST,
    ),
    "LFM2-350M": Release(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        _lfm2(16, 1024, _LFM2_ATTENTION, 16, intermediate_size=6656),
        12_288,
        40_960,
        "huggingface.co/florianvoss/LFM2-350M_reducecache",
    ),
    "LFM2-1.2B": Release(
        "Lfm2ForCausalLM", "Lfm2Config", _lfm2(16, 2048, _LFM2_ATTENTION, 32, intermediate_size=12288), 12_288, 81_920, _TEST
    ),
    "LFM2-2.6B": Release(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        _lfm2(30, 2048, [2, 6, 10, 14, 18, 22, 26, 29], 32, intermediate_size=10752),
        16_384,
        180_224,
        f"{_TEST}; where the 8 layers of attention stand decides nothing here",
    ),
    "LFM2-8B-A1B": Release(
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        _lfm2(24, 2048, [2, 6, 10, 14, 18, 21], 32, moe_intermediate_size=1792, num_experts=32, num_experts_per_tok=4),
        12_288,
        147_456,
        _TEST,
    ),
    "LFM3-1.7B": Release("Lfm3ForCausalLM", "Lfm3Config", {}, 12_288, 319_488, "ollama.com/library/lfm3:1.7b-mxfp8"),
    "MiniMax-Text-01": Release(
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {
            "num_hidden_layers": 80, "hidden_size": 6144, "intermediate_size": 9216, "vocab_size": 200064,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 32,
            "layer_types": ["full_attention" if i % 8 == 7 else "linear_attention" for i in range(80)],
        },
        40_960,
        293_601_280,
        _TEST,
    ),
    "Jamba-v0.1": Release("JambaForCausalLM", "JambaConfig", {}, 16_384, 16_056_320, _TEST),
    "Bamba-9B": Release(
        "BambaForCausalLM", "BambaConfig", {"attn_layer_indices": [9, 18, 27], "mamba_d_state": 128}, 12_288, 123_104_768, _TEST
    ),
    "Falcon-Mamba-7B": Release(
        "FalconMambaForCausalLM",
        "FalconMambaConfig",
        {"num_hidden_layers": 64, "hidden_size": 4096, "vocab_size": 65024, "tie_word_embeddings": False},
        0,
        36_700_160,
        _TEST,
    ),
    "Codestral-Mamba-7B": Release("Mamba2ForCausalLM", "Mamba2Config", {}, 0, 272_367_616, "transformers"),
    "Zamba2-7B": Release(
        "Zamba2ForCausalLM",
        "Zamba2Config",
        {
            "num_hidden_layers": 81, "hidden_size": 3584, "intermediate_size": 14336, "n_mamba_heads": 112, "mamba_ngroups": 2,
            "num_mem_blocks": 2, "use_shared_attention_adapter": True,
            "layers_block_type": ["hybrid" if i in range(6, 81, 6) else "mamba" for i in range(81)],
        },
        372_736,
        152_243_712,
        _TEST,
    ),
}  # fmt: skip

#: Those that must run: all of them.
SERVED = tuple(RELEASES)
