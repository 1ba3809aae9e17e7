"""A small random model of every family, with its run configuration, graph and documents."""

from __future__ import annotations

import functools

import live_adapters
import pytest

LENGTHS = (11, 6, 40, 1, 19)  # longer than every window, and than a bucket of 32 tokens

# Far from the defaults, so that an ignored setting is noticed: windows shorter than a document,
# wider heads, caps that take effect, a scale that does not follow from the width.
_FAMILY_CONFIGS = {
    "llama": {},
    "gpt2": {"num_key_value_heads": 4},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "phi3": {"sliding_window": 6},
    "gemma2": {"head_dim": 32, "sliding_window": 5},
    "gemma3_text": {"head_dim": 32, "sliding_window": 5},
    "olmo2": {},
}
_FAMILY_EXTRAS = {
    "gemma2": {
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 7,
    },
    "gemma3_text": {
        "query_pre_attn_scalar": 7,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


@pytest.fixture(scope="session")
def family_base(tmp_path_factory):
    """Save a small random model of a family with widely spread weights, as a user's directory."""
    from mens_exp.config.model import HfModel, ModelFamily, RandomModel
    from mens_exp.layout import model_cache
    from mens_exp.model import sources
    from mens_exp.model.sources import resolve

    root = tmp_path_factory.mktemp("families")

    @functools.cache
    def saved(name):
        model = RandomModel(
            name=name,
            family=ModelFamily(name),
            max_position_embeddings=256,
            tie_word_embeddings=name in ("gpt2", "gemma2", "gemma3_text"),
            **_FAMILY_CONFIGS[name],
        )
        extras = {"initializer_range": 0.15, **_FAMILY_EXTRAS.get(name, {})}
        directory = root / name
        directory.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                sources, "random_config", lambda it: model_cache.random_config(it) | extras
            )
            sources.write_random(model, directory)
        return resolve(HfModel(id=str(directory)), root)

    return saved


@pytest.fixture(scope="session")
def family_config(tiny_config, family_base):
    """Compose a float32 run on a family's directory with an adapter on every linear layer."""
    from mens_exp.config.model import HfModel

    def composed(name):
        config = tiny_config("quant.compute_dtype=f32", "lora.dropout=0")
        config.model = HfModel(id=str(family_base(name).directory))
        return config

    return composed


@pytest.fixture(scope="session")
def family_backend(family_base, family_config):
    """Build the QLoRA graph of a family; `live` fills B with the same values on each device."""
    import torch

    from mens_exp.backends.qlora import QloraBackend

    def built(name, device="cpu", *, live=True):
        backend = QloraBackend(family_config(name), family_base(name), torch.device(device))
        return live_adapters.fill_b(backend) if live else backend

    return built


@pytest.fixture
def family_documents(random_documents):
    """Return five documents in which every token is supervised."""
    return random_documents(LENGTHS, [length - 1 for length in LENGTHS])


@pytest.fixture
def packed_documents(family_documents):
    """Return the five documents in one row."""
    from mens_exp.data.batch import packed_batch

    return packed_batch(family_documents, [list(range(len(LENGTHS)))], index=0)


@pytest.fixture
def padded_documents(family_documents):
    """Return the five documents in a row each."""
    from mens_exp.data.batch import padded_batch

    return padded_batch(family_documents, [[i] for i in range(len(LENGTHS))], index=0, pad_id=0)
