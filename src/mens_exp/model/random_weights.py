"""A Llama-shaped model with random weights, as a Hugging Face directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.model.quiet import quiet
from mens_exp.tokenizer import byte_level

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.config.model import RandomModel

__all__ = ["write_random"]


def write_random(model: RandomModel, directory: Path) -> None:
    """Draw weights from ``model.init_seed`` alone and write them in f32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(model.init_seed)
        LlamaForCausalLM(config).save_pretrained(directory)
    byte_level.write_files(directory)
