"""A plan's information about the proxy stack before any weight is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from mens_exp.errors import SetupError
from mens_exp.layout import hub
from mens_exp.planning.estimate import make_plan
from mens_exp.planning.preflight import preflight

WHOLE = {"eligible": True, "complete": True, "matched": 2, "expected": 2}


@pytest.fixture
def base(tiny_base, tmp_path):
    """A copy of tiny_llama's directory, to be damaged."""
    return Path(shutil.copytree(tiny_base.directory, tmp_path / "base"))


@pytest.fixture
def proxy(tiny_config, rows):
    """Compose a proxy run on the ten rows."""

    def made(*overrides):
        # In f32: the plan warns if the processor has no instructions for bf16.
        shares = ("data.val_frac=0.2", "data.heldout_frac=0.2", "quant.compute_dtype=f32")
        return tiny_config("backend=proxy", "data=jsonl", f"data.path={rows}", *shares, *overrides)

    return made


def lose(base, key):
    tensors = load_file(base / "model.safetensors")
    del tensors[key]
    save_file(tensors, base / "model.safetensors")


def test_stack_of_a_model_that_is_made_here_is_whole(proxy, tmp_path):
    """No file is needed; the graph is that of the run, not the head alone."""
    plan = make_plan(proxy(), tmp_path)
    assert (plan["graph_id"], plan["proxy"]) == ("proxy_stack_v1_residual", WHOLE)
    assert plan["warnings"] == []
    head = make_plan(proxy("backend.lm_head_only=true"), tmp_path)
    assert (head["graph_id"], head["proxy"]["expected"]) == ("lm_head_only", 0)


@pytest.mark.parametrize("layers", [7, 8])
@pytest.mark.parametrize("composition", ["residual", "sequential", "residual_plain"])
def test_composition_without_factors_warns_on_a_deep_stack(proxy, tmp_path, composition, layers):
    """From eight projections on; the seeds' residual form never warns."""
    settings = ("model=random", "model.name=deep", f"model.num_hidden_layers={layers}")
    plan = make_plan(proxy(*settings, f"backend.composition={composition}"), tmp_path)
    assert plan["graph_id"] == f"proxy_stack_v1_{composition}"
    deep = layers == 8 and composition != "residual"
    assert [text.partition(" projections")[0] for text in plan["warnings"]] == ["8"] * deep


def test_incomplete_stack_is_planned_as_the_head_alone_with_a_warning(proxy, base, tmp_path):
    """Never a partial stack: the head has 16 * (320 + 64) parameters; the missing key is named."""
    key = "model.layers.1.self_attn.o_proj.weight"
    lose(base, key)
    config = proxy("model=hf", f"model.id={base}")
    assert preflight(config) == []
    plan = make_plan(config, tmp_path)
    assert plan["graph_id"] == "lm_head_only"
    assert plan["proxy"] == WHOLE | {"complete": False, "matched": 1}
    assert plan["trainable_parameters"] == 16 * (320 + 64)
    (warning,) = plan["warnings"]
    assert key in warning
    assert "the head alone is trained" in warning


def test_incomplete_stack_is_refused_where_the_full_one_is_required(proxy, base):
    """There is one problem, and it names the key."""
    key = "model.layers.1.self_attn.o_proj.weight"
    lose(base, key)
    config = proxy("model=hf", f"model.id={base}", "backend.require_full_stack=true")
    (problem,) = preflight(config)
    assert problem.where == "backend.require_full_stack"
    assert key in str(problem)


def test_embedding_of_another_shape_is_told_once(proxy, base):
    """The check that all backends share reports it."""
    lose(base, "model.embed_tokens.weight")
    (problem,) = preflight(proxy("model=hf", f"model.id={base}"))
    assert "no shard has the embedding" in str(problem)


@pytest.mark.parametrize("name", ["gemma2", "qwen3"])
def test_heads_wider_than_their_share_are_refused_with_the_shape(proxy, family_base, name):
    """The o_proj of a real save reads four heads of 32, while the width is 64."""
    overrides = ("model=hf", f"model.id={family_base(name).directory}", "data.seq_len=128")
    (problem,) = preflight(proxy(*overrides))
    assert problem.where == "self_attn.o_proj"
    assert str(problem.found).startswith("[64, 128]: 4 heads of 32")
    assert preflight(proxy(*overrides, "backend.lm_head_only=true")) == []


def test_proxy_is_planned_from_dimensions_alone(proxy, monkeypatch, tmp_path):
    """Llama-3.1-8B without a network: 32 projections, of which none is known to exist."""

    def away(model_id, revision):
        raise SetupError(f"the hub cannot be reached for {model_id} at {revision}")

    monkeypatch.setattr(hub, "commit_of", away)
    config = proxy("model=llama3_8b", "task=plan")
    assert preflight(config) == []
    plan = make_plan(config, tmp_path)
    assert plan["proxy"] == WHOLE | {"complete": None, "matched": None, "expected": 32}
    assert plan["graph_id"] == "proxy_stack_v1_residual"
