"""The config.json of a model with random weights, from the dimensions that are configured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.layout.families import FAMILIES

if TYPE_CHECKING:
    from mens_exp.config.model import RandomModel

__all__ = ["CLASSES", "config_of"]

# The class of each family, which transformers and vLLM look up.
CLASSES = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}
_QWEN = ("qwen2", "qwen3")


def config_of(model: RandomModel) -> dict[str, Any]:
    """Return config.json; what the configuration leaves open is transformers' default.

    Control tokens are those of the byte-level tokenizer.
    """
    name = model.family.value
    family = FAMILIES[name]
    config: dict[str, Any] = {
        "architectures": [CLASSES[name]],
        "model_type": name,
        "dtype": {"f32": "float32", "bf16": "bfloat16"}[model.dtype.value],
        "tie_word_embeddings": model.tie_word_embeddings,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **{key: getattr(model, dimension) for dimension, key in family.keys.items()},
    }
    if name != "gpt2":
        config["num_key_value_heads"] = model.num_key_value_heads
        config["head_dim"] = model.head_dim or model.hidden_size // model.num_attention_heads
    if model.sliding_window is not None:
        config["sliding_window"] = model.sliding_window
        if name in _QWEN:  # its windows are in the upper layers, and off unless asked for
            config |= {
                "use_sliding_window": True,
                "max_window_layers": model.num_hidden_layers // 2,
            }
    return config
