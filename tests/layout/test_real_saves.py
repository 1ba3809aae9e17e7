"""Layouts compared with the files that transformers saves, for every family."""

from __future__ import annotations

import pytest

from mens_exp.config.compose import compose, typed
from mens_exp.config.model import HfModel
from mens_exp.layout.checkpoint_files import read_directory
from mens_exp.layout.families import FAMILIES
from mens_exp.layout.modules import linear_modules
from mens_exp.layout.shape import HEAD, base_key, check_weights, shape_of
from mens_exp.model import sources
from mens_exp.planning.preflight import preflight

# Grouped queries, and heads not of width hidden_size / heads where a family allows it.
_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
CONFIGS = {
    **{name: dict(_COMMON) for name in ("llama", "mistral", "qwen2", "phi3", "olmo2")},
    **{name: {**_COMMON, "head_dim": 32} for name in ("qwen3", "gemma2", "gemma3_text")},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 300},
}
# [out, in] by hand: queries 4 × 16 or 4 × 32 wide, keys and values half of that.
NARROW = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}
WIDE = {"q": (128, 64), "k": (64, 64), "v": (64, 64), "o": (64, 128)}
GATED = {"gate": (192, 64), "up": (192, 64), "down": (64, 192)}
EXPECTED = {
    **{name: {**NARROW, **GATED} for name in ("llama", "mistral", "qwen2", "olmo2")},
    **{name: {**WIDE, **GATED} for name in ("qwen3", "gemma2", "gemma3_text")},
    "phi3": {"qkv": (128, 64), "o": (64, 64), "gate_up": (384, 64), "down": (64, 192)},
    "gpt2": {"qkv": (192, 64), "o": (64, 64), "fc": (256, 64), "proj": (64, 256)},
}


def save(name, directory, *, headless=False):
    """Create and save a small random model with transformers."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **CONFIGS[name])
    maker = AutoModel if headless else AutoModelForCausalLM
    maker.from_config(config).save_pretrained(directory)
    sources.write_byte_level_tokenizer(directory)
    return directory


def test_every_family_is_here():
    """A family that is added to the table must be tested here."""
    assert CONFIGS.keys() == EXPECTED.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_real_save_has_the_shapes_that_its_config_tells(name, tmp_path):
    """Each projection of each layer has its name, in the stored orientation."""
    directory = read_directory(save(name, tmp_path / name))
    shape = shape_of(HfModel(id=str(directory.path)))
    check_weights(directory)
    modules = [one for one in linear_modules(shape) if one.logical != HEAD]
    assert len(modules) == 2 * len(EXPECTED[name])
    for one in modules:
        key = base_key(one.path, shape.family, directory.tensors)
        stored = directory.tensors[key].shape
        assert (one.out, one.width) == EXPECTED[name][one.kind]
        assert stored == ((one.width, one.out) if name == "gpt2" else (one.out, one.width))
    # A layer contains no other matrix.
    matrices = {
        key
        for key, info in directory.tensors.items()
        if len(info.shape) == 2 and f"{shape.family.layers.partition('.')[2]}." in key
    }
    known = {base_key(one.path, shape.family, directory.tensors) for one in modules}
    assert matrices == known


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tied_head_has_no_tensor_of_its_own(name, tmp_path):
    """Depending on the config, the head's key is the table's or its own."""
    directory = read_directory(save(name, tmp_path / name))
    shape = shape_of(HfModel(id=str(directory.path)))
    own = [key for key in directory.tensors if "lm_head" in key]
    assert bool(own) is not shape.tied
    key = base_key(HEAD, shape.family, directory.tensors)
    assert directory.tensors[key].shape == (300, 64)


def test_gpt2_is_read_without_its_prefix_too(tmp_path):
    """Published GPT-2 checkpoints lack `transformer.`, like a model saved without its head."""
    directory = read_directory(save("gpt2", tmp_path / "gpt2", headless=True))
    assert "h.0.attn.c_attn.weight" in directory.tensors
    check_weights(directory)
    shape = shape_of(HfModel(id=str(directory.path)))
    for one in linear_modules(shape):
        assert base_key(one.path, shape.family, directory.tensors) in directory.tensors


def test_model_that_reads_images_too_is_refused_by_the_name_of_the_text_only_one(
    tmp_path,
):
    """For Gemma 3 with a vision tower there is one error with exit code 2."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config={**_COMMON, "head_dim": 16}, vision_config=vision, mm_tokens_per_image=4
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    sources.write_byte_level_tokenizer(tmp_path)
    overrides = ["model=hf", f"model.id={tmp_path}", "logger=none", "trainer=cpu"]
    (problem,) = preflight(typed(compose([overrides])[0].values))
    assert problem.found == "gemma3, whose text_config is of gemma3_text"
    assert "of model_type gemma3_text, such as google/gemma-3-1b-it" in str(problem.expected)
    assert problem.exit_code == 2
