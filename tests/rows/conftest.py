"""Tokenizers with small copies of published chat templates."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mens_exp.tokenizer.implementations import HfTokenizer

TEMPLATES = Path(__file__).parent / "templates"
CONTROLS = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "chatml_marked": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>"],
    "gemma": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]"],
    "phi3": ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
    "phi4": ["<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"],
}
CONFIGS = {
    "chatml": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
    "chatml_marked": {"eos_token": "<|im_end|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen3": {"eos_token": "<|im_end|>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
    "phi3": {"eos_token": "<|endoftext|>"},
    "phi4": {"eos_token": "<|im_end|>"},
}


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """Return a byte-level tokenizer with a model family's control tokens and template.

    `rstrip` gives control tokens the flag that Phi-3's have: they swallow white space behind.
    """

    @functools.cache
    def read(name, *, rstrip=False, template=None):
        directory = tmp_path_factory.mktemp(name)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        # Two newlines are one token, as in common tokenizers, so a token can span two parts.
        vocab = {token: i for i, token in enumerate([*alphabet, "ĊĊ"])}
        core = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens(
            [AddedToken(text, special=True, rstrip=rstrip) for text in CONTROLS[name]]
        )
        core.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(json.dumps(CONFIGS[name]), "utf-8")
        source = template or (TEMPLATES / f"{name}.jinja").read_text("utf-8")
        (directory / "chat_template.jinja").write_text(source, "utf-8")
        return HfTokenizer.from_directory(directory)

    return read
