from __future__ import annotations

import dataclasses

import pytest
import torch

from mens_exp.backends.forward import hidden_states, logits
from mens_exp.backends.frozen_base import load_base
from mens_exp.config.quant import QuantConfig, QuantType
from mens_exp.data.batch import packed_batch, padded_batch
from mens_exp.evals.attribution import Replay, replaced
from mens_exp.layout.modules import linear_modules
from mens_exp.layout.shape import shape_of
from mens_exp.model.sources import resolve

FAMILIES = ["llama", "gpt2", "gemma2", "gemma3_text", "phi3", "qwen2", "olmo2"]


def plain(config):
    return dataclasses.replace(config, quant=QuantConfig(quant_type=QuantType.none))


@pytest.fixture
def batches(random_documents):
    """Return a packed batch of two documents and a padded batch of two others."""
    documents = random_documents([20, 11, 14, 9])
    return [
        packed_batch(documents, [[0, 1]], 0, multiple=32),
        padded_batch(documents, [[2], [3]], 1, pad_id=0),
    ]


@pytest.fixture
def replay_of(family_config, tmp_path, batches):
    """Load a family's small model unquantized in float32."""

    def made(family):
        config = family_config(family)
        base = resolve(config.model, tmp_path)
        model = load_base(plain(config), base, torch.device("cpu"), dtype=torch.float32).eval()
        layers = shape_of(config.model).family.layers
        return Replay(model, layers, batches, chunk_tokens=5), config

    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_change_in_a_layer_is_that_of_a_plain_full_forward(replay_of, batches, family):
    """With one module of layer 2 replaced, the hidden states equal a full forward bit for bit."""
    replay, config = replay_of(family)
    shape = shape_of(config.model)
    for one in [module for module in linear_modules(shape) if module.layer == 1]:
        module = replay.causal_lm.get_submodule(one.path)
        other_OI = torch.randn(one.out, one.width, generator=torch.Generator().manual_seed(1)) / 8
        with (
            replaced(module, other_OI, transposed=shape.family.transposed),
            torch.inference_mode(),
        ):
            expected = [hidden_states(replay.causal_lm, batch) for batch in batches]
            found = list(replay.hidden_from(1))
        assert all(map(torch.equal, found, expected)), one.path
        assert not torch.allclose(found[0], replay.reference_MD[0]), one.path


def test_model_is_as_before_afterwards(replay_of, batches):
    """Weights and layers are restored even if the block is left at its first batch."""
    replay, _ = replay_of("llama")
    module = replay.causal_lm.model.layers[0].mlp.up_proj

    def stop_early():
        with replaced(module, torch.zeros_like(module.weight), transposed=False):
            next(replay.hidden_from(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_early()
    with torch.inference_mode():
        again = [hidden_states(replay.causal_lm, batch) for batch in batches]
    assert all(map(torch.equal, again, replay.reference_MD))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_inputs_are_what_modules_read_in_a_plain_forward(replay_of, batches, family):
    """Inputs of the last layer's modules: 31 tokens of 32 positions, then 14 and 9 of 28."""
    replay, config = replay_of(family)
    paths = [one.path for one in linear_modules(shape_of(config.model)) if one.layer == 1]
    modules = [replay.causal_lm.get_submodule(path) for path in paths]
    expected = {path: [] for path in paths}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, path=path: expected[path].append(args[0]))
        for path, module in zip(paths, modules, strict=True)
    ]
    with torch.inference_mode():
        for batch in batches:
            hidden_states(replay.causal_lm, batch)
    for hook in hooks:
        hook.remove()
    for path, (packed, padded) in zip(paths, replay.inputs_of(1, modules), strict=True):
        in_packed, in_padded = expected[path]
        assert torch.equal(packed, in_packed[0, :31]), path
        assert torch.equal(padded, torch.cat([in_padded[0], in_padded[1, :9]])), path


def test_comparison_reads_positions_inside_documents(replay_of, batches):
    """A model compared with itself differs by zero; positions restart with each document."""
    replay, _ = replay_of("llama")
    result = replay.compared(replay.reference_MD, position_bounds=(0, 9, 10)).result()
    supervised = sum(len(batch.targets_M) for batch in batches)
    assert (result.tokens, result.mean_kl, result.nll_difference) == (supervised, 0, 0)
    # The documents have 20, 11, 14 and 9 tokens; the second half of each is supervised.
    positions = [p for n in (20, 11, 14, 9) for p in range(n - n // 2 - 1, n - 1)]
    counts = [sum(p < 9 for p in positions), positions.count(9), sum(p > 9 for p in positions)]
    assert [one.tokens for one in result.by_position] == counts


def test_reference_loss_is_that_of_all_logits_at_once(replay_of, batches):
    """The chunked loss (five positions) equals torch's cross entropy over all logits."""
    replay, _ = replay_of("gemma2")  # a family with capped logits
    with torch.inference_mode():
        all_logits = torch.cat([logits(replay.causal_lm, h) for h in replay.reference_MD])
    targets = torch.cat([batch.targets_M for batch in batches])
    expected = torch.nn.functional.cross_entropy(all_logits.double(), targets)
    found = replay.compared(replay.reference_MD).result().reference_nll
    assert found == pytest.approx(float(expected), rel=1e-7)
