"""The projection stack, compared with its definition for single positions."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from nf4_reference import quantize
from safetensors.torch import load_file, save_file

from mens_exp.data.batch import packed_batch
from mens_exp.errors import ConfigError, ModelFileError, SetupError
from mens_exp.layout.checkpoint_files import read_directory

PROXY = ["backend=proxy", "quant.compute_dtype=f32"]
IDS = [7, 100, 41, 41, 258, 3, 199, 12, 64, 5]
MODELS = {
    # model, the middle key of layer i, and whether it is stored as [in, out]
    "tiny_llama": ("model.layers.{}.self_attn.o_proj.weight", "model.embed_tokens.weight", False),
    "tiny_qwen2": ("model.layers.{}.self_attn.o_proj.weight", "model.embed_tokens.weight", False),
    "tiny_gpt2": ("transformer.h.{}.attn.c_proj.weight", "transformer.wte.weight", True),
}


def weights_of(backend):
    """Read the checkpoint with another library than the backend's."""
    (shard,) = read_directory(backend.base.directory).shards
    return {name: tensor.float() for name, tensor in load_file(shard).items()}


def by_definition(backend, model, previous, *, composition="residual"):
    """Return the logits after one token, from the specification in float64."""
    middle, embedding, transposed = MODELS[model]
    weights, adapter = weights_of(backend), backend.trainable()
    key_of = {name: name for name in weights}
    if embedding not in key_of:  # saved without its head, a GPT-2 lacks the first part of each key
        embedding, middle = embedding.partition(".")[2], middle.partition(".")[2]

    def projected(weight, name, x):
        frozen = quantize(weight, double_quant=True).dequantize().double()
        a, b = (adapter[f"{name}.lora_{half}"].detach().double() for half in "ab")
        return frozen @ x + (16 / a.shape[0]) * (b @ (a @ x))

    h = weights[embedding][previous].double()
    n = len(backend.middle)
    for i in range(n):
        weight = weights[middle.format(i)]
        weight = weight.T if transposed else weight
        if composition == "residual":
            normed = h / torch.sqrt((h * h).mean() + 1e-5)
            h = h + projected(weight.contiguous(), f"mid{i}", normed) / math.sqrt(n)
        elif composition == "sequential":
            h = projected(weight.contiguous(), f"mid{i}", h)
        else:
            h = h + projected(weight.contiguous(), f"mid{i}", h)
    if n and composition == "residual":
        h = h / math.sqrt(n)
    return projected(weights[embedding], "lm_head", h)


@pytest.fixture(scope="session")
def batch_of(documents_of):
    """Pack one document whose last `k` tokens are supervised."""

    def made(k, ids=IDS):
        learned = [0] * (len(ids) - k) + [1] * k
        return packed_batch(documents_of([ids], [learned]), [[0]], index=0)

    return made


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("k", [1, 4, 9])
def test_all_targets_at_once_equal_one_at_a_time(tiny_backend, batch_of, model, k):
    """Logits and mean loss of the last k targets agree to 1e-4 in float32 on three layouts."""
    backend = tiny_backend(*PROXY, f"model={model}", live=True).eval()
    batch = batch_of(k)
    with torch.no_grad():
        logits = backend.head(backend(batch))
    places = range(len(IDS) - k, len(IDS))
    expected = torch.stack([by_definition(backend, model, IDS[t - 1]) for t in places])
    assert torch.allclose(logits.double(), expected, atol=1e-4, rtol=1e-4)
    targets = torch.tensor([IDS[t] for t in places])
    assert torch.equal(batch.targets_M, targets)
    ours = torch.nn.functional.cross_entropy(logits, targets)
    theirs = -expected.log_softmax(-1)[range(k), targets].mean()
    assert abs(float(ours) - float(theirs)) <= 5e-5


@pytest.mark.parametrize("composition", ["residual", "sequential", "residual_plain"])
def test_each_composition_is_its_own_formula(tiny_backend, batch_of, composition):
    """The three compositions give different results."""
    backend = tiny_backend(*PROXY, f"backend.composition={composition}", live=True).eval()
    with torch.no_grad():
        logits = backend.head(backend(batch_of(1)))[0]
    expected = {
        kind: by_definition(backend, "tiny_llama", IDS[-2], composition=kind)
        for kind in ("residual", "sequential", "residual_plain")
    }
    assert torch.allclose(logits.double(), expected[composition], atol=1e-4, rtol=1e-4)
    others = [value for kind, value in expected.items() if kind != composition]
    assert all((logits - other).abs().max() > 1e-3 for other in others)
    assert backend.facts()["candle_qlora_graph_id"] == f"proxy_stack_v1_{composition}"


@pytest.mark.parametrize(
    ("overrides", "middle", "graph"),
    [
        ([], 2, "proxy_stack_v1_residual"),
        (["backend.max_layers=1"], 1, "proxy_stack_v1_residual"),
        (["backend.max_layers=0"], 0, "lm_head_only"),
        (["backend.lm_head_only=true"], 0, "lm_head_only"),
    ],
)
def test_layers_are_taken_from_the_first_on(
    tiny_backend,
    batch_of,
    overrides,
    middle,
    graph,
):
    """Factors depend on the number of layers, and the facts use the seeds' names."""
    backend = tiny_backend(*PROXY, *overrides, live=True).eval()
    with torch.no_grad():
        logits = backend.head(backend(batch_of(1)))[0]
    expected = by_definition(backend, "tiny_llama", IDS[-2])
    assert torch.allclose(logits.double(), expected, atol=1e-4, rtol=1e-4)
    facts = backend.facts()
    assert facts["middle_layers_active"] == middle
    assert facts["candle_qlora_graph_id"] == graph
    assert facts["trainable_projection_stack"] == [*(f"mid{i}" for i in range(middle)), "lm_head"]
    assert facts["training_objective_note"] == "candle_qlora_proxy_v1_k1"
    assert facts["candle_qlora_ce_last_k"] == 1
    assert facts["proxy_stack_complete"]
    assert (facts["n_layers"], facts["n_heads"], facts["d_model"]) == (2, 4, 64)
    assert facts["notes"] == []


def test_the_prediction_depends_on_the_last_token_alone(tiny_backend, batch_of):
    """Earlier tokens and the position change no bit."""
    backend = tiny_backend(*PROXY, live=True).eval()
    with torch.no_grad():
        long = backend(batch_of(1))
        short = backend(batch_of(1, IDS[-2:]))
    assert torch.equal(long, short)


def test_the_embedding_is_mapped_and_never_written(tiny_backend, tiny_base):
    """It is no parameter or buffer, and writing to the mapping leaves the file unchanged."""
    (shard,) = read_directory(tiny_base.directory).shards
    before = shard.read_bytes()
    backend = tiny_backend(*PROXY)
    assert backend.embedding_VD.shape == (320, 64)
    names = [name for name, _ in [*backend.named_parameters(), *backend.named_buffers()]]
    assert not any("embedding" in name for name in names)
    backend.embedding_VD[0, 0] = 1.0
    assert shard.read_bytes() == before


def test_weights_are_what_four_bits_leave_of_them(tiny_backend):
    """Each frozen weight equals the reference round trip of the checkpoint's."""
    backend = tiny_backend(*PROXY)
    weights = weights_of(backend)
    for name, part in backend.projections.items():
        expected = quantize(weights[backend.keys[name]], double_quant=True).dequantize()
        assert (part.weight_OI - expected).abs().max() <= 1e-6


def test_bits_per_parameter_are_measured(tiny_backend):
    """It is 4.5 without double quantization: codes and scales of three weights in whole blocks."""
    backend = tiny_backend(*PROXY, "quant.double_quant=false")
    assert backend.facts()["bits_per_parameter"] == 4.5


def test_arms_of_other_backends_start_from_the_same_matrices(
    tiny_backend,
):
    """The A of the proxy's mid1 equals that of the full graph's l1.o, and likewise the head's."""
    proxy = tiny_backend(*PROXY).trainable()
    full = tiny_backend("lora.targets=[o_proj,lm_head]").trainable()
    assert torch.equal(proxy["mid1.lora_a"], full["l1.o.lora_a"])
    assert torch.equal(proxy["lm_head.lora_a"], full["lm_head.lora_a"])
    assert not torch.equal(proxy["mid0.lora_a"], proxy["mid1.lora_a"])


def test_generation_follows_the_arg_max_of_the_last_token(
    tiny_backend,
):
    """Tokens of each row follow the definition, and an end id ends its row."""
    backend = tiny_backend(*PROXY, live=True)

    def follow(token):
        return int(by_definition(backend, "tiny_llama", token).argmax())

    first = [follow(41), follow(7)]
    made = backend.generate([[5, 41], [7]], max_new_tokens=3, end_ids=set())
    assert made == [[t, follow(t), follow(follow(t))] for t in first]
    times = []
    ended = backend.generate(
        [[5, 41], [7]],
        max_new_tokens=3,
        end_ids={first[0]},
        on_end=lambda row, seconds: times.append(row),
    )
    assert ended[0] == [first[0]]
    assert sorted(times) == [0, 1]  # once for each answer


def test_there_is_no_peft_view(tiny_backend, tmp_path):
    """The request is refused and nothing is written."""
    backend = tiny_backend(*PROXY)
    assert not backend.has_peft_view
    with pytest.raises(SetupError, match="PEFT"):
        backend.write_peft(tmp_path / "peft")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="session")
def without(tiny_base, tmp_path_factory):
    """Copy tiny_llama with some tensors left out or replaced and config.json changed."""

    def made(*names, config=None, **tensors):
        directory = tmp_path_factory.mktemp("lacking") / "model"
        shutil.copytree(tiny_base.directory, directory)
        (shard,) = read_directory(directory).shards
        kept = {k: v for k, v in load_file(shard).items() if k not in names}
        save_file({**kept, **tensors}, shard, metadata={"format": "pt"})
        (directory / "mens_exp_base.json").unlink()
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | (config or {})), "utf-8")
        return directory

    return made


LACKING = "model.layers.1.self_attn.o_proj.weight"


def test_a_checkpoint_that_lacks_a_projection_trains_its_head_alone(tiny_backend, without):
    """The stack is all or nothing; a note says what is missing."""
    directory = without(LACKING)
    backend = tiny_backend(*PROXY, "model=hf", f"model.id={directory}")
    facts = backend.facts()
    assert list(backend.projections) == ["lm_head"]
    assert (facts["middle_keys_matched"], facts["middle_keys_expected"]) == (1, 2)
    assert not facts["proxy_stack_complete"]
    assert facts["candle_qlora_graph_id"] == "lm_head_only"
    assert LACKING in facts["notes"][0]


def test_a_full_stack_is_required_on_request(tiny_backend, without):
    """The error lists what is missing before a weight is read."""
    overrides = [*PROXY, "model=hf", f"model.id={without(LACKING)}"]
    with pytest.raises(ModelFileError, match=LACKING):
        tiny_backend(*overrides, "backend.require_full_stack=true")


def test_projections_that_are_not_square_are_refused_with_their_shape(
    tiny_backend,
):
    """Four heads of 32 at width 64 give an o_proj of [64, 128]; the head alone still works."""
    overrides = [*PROXY, "model=random", "model.name=wide", "model.head_dim=32"]
    with pytest.raises(ModelFileError, match=r"\[64, 128\].*4 heads of 32"):
        tiny_backend(*overrides)
    assert list(tiny_backend(*overrides, "backend.lm_head_only=true").projections) == ["lm_head"]


def test_more_layers_than_there_are_is_refused(tiny_backend):
    """Three layers of two are refused, and two are accepted."""
    with pytest.raises(ConfigError, match="at most 2"):
        tiny_backend(*PROXY, "backend.max_layers=3")
    assert len(tiny_backend(*PROXY, "backend.max_layers=2").middle) == 2


def test_a_deep_plain_product_is_warned_about(tiny_backend, tiny_config):
    """For eight layers without factors a note gives a remedy; with residuals there is none."""
    deep = [*PROXY, "model=random", "model.name=deep", "model.num_hidden_layers=8"]
    for kind in ("sequential", "residual_plain"):
        notes = tiny_backend(*deep, f"backend.composition={kind}").facts()["notes"]
        assert "backend.composition=residual" in notes[0]
    assert tiny_backend(*deep).facts()["notes"] == []
