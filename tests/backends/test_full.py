"""Graphs that train the base: full fine-tuning, and the research lane from scratch."""

from __future__ import annotations

import pytest
import torch

from mens_exp.artifacts.adapter_v3 import read_adapter
from mens_exp.data.batch import packed_batch
from mens_exp.errors import RequestError, SetupError
from mens_exp.export.subject import subject_of
from mens_exp.objective.causal import CrossEntropy

F32 = "quant.compute_dtype=f32"
FULL = ["backend=full", F32]
SCRATCH = ["backend=burn"]
GPT2 = [*SCRATCH, "model=tiny_gpt2"]
graphs = pytest.mark.parametrize(
    "overrides", [FULL, SCRATCH, GPT2], ids=["full", "burn from scratch", "burn on gpt2"]
)


@pytest.fixture
def batch(random_documents):
    return packed_batch(random_documents([11, 6, 17]), [[0, 1, 2]], index=0)


def logits_of(backend, batch):
    backend.eval()
    with torch.no_grad():
        return backend.head(backend(batch))


def step(backend, batch):
    """Move every weight against its gradient."""
    backend.train()
    backend.zero_grad()
    loss = CrossEntropy("causal", 4)(backend(batch), batch.targets_M, backend.head)
    loss.total.backward()
    with torch.no_grad():
        for parameter in backend.trainable().values():
            if parameter.grad is not None:
                parameter.sub_(0.01 * parameter.grad)


def test_gradients_are_those_of_transformers_own_loss(tiny_backend, batch):
    """They agree to 1e-4 for every weight, also the tied embedding, over chunks of the head."""
    from transformers import AutoModelForCausalLM

    backend = tiny_backend(*FULL).train()
    loss = CrossEntropy("causal", 4)(backend(batch), batch.targets_M, backend.head)
    loss.total.backward()
    model = AutoModelForCausalLM.from_pretrained(backend.base.directory, dtype=torch.float32)
    total = torch.zeros(())
    for start, end in batch.documents or ():
        logits = model(input_ids=batch.input_ids_BT[:, start:end]).logits[0]
        mask = (batch.predict_M >= start) & (batch.predict_M < end)
        total = total + torch.nn.functional.cross_entropy(
            logits[batch.predict_M[mask] - start], batch.targets_M[mask], reduction="sum"
        )
    total.backward()
    assert torch.allclose(loss.total.detach(), total.detach(), rtol=1e-5)
    theirs = dict(model.named_parameters())
    assert backend.trainable().keys() == theirs.keys()
    for name, parameter in backend.trainable().items():
        difference = (parameter.grad - theirs[name].grad).norm()
        assert difference <= 1e-4 * theirs[name].grad.norm(), name


@graphs
def test_every_weight_learns_in_f32(tiny_backend, batch, overrides):
    """One step changes all base weights, and B, which starts at zero."""
    backend = tiny_backend(*overrides)
    before = {name: p.detach().clone() for name, p in backend.trainable().items()}
    assert {p.dtype for p in backend.trainable().values()} == {torch.float32}
    step(backend, batch)
    still = [n for n, p in backend.trainable().items() if torch.equal(p, before[n])]
    assert all(name.endswith("lora_a") for name in still)  # its gradient is zero while B = 0
    assert len(before) > len(still)


@graphs
def test_the_base_is_the_published_one_after_training(tiny_backend, batch, overrides):
    """Inside the context the first logits return, and afterwards the trained ones, bit for bit."""
    backend = tiny_backend(*overrides)
    first = logits_of(backend, batch)
    step(backend, batch)
    trained = logits_of(backend, batch)
    assert not torch.equal(trained, first)
    with backend.base_only():
        assert torch.equal(logits_of(backend, batch), first)
    assert torch.equal(logits_of(backend, batch), trained)


@graphs
def test_written_weights_are_the_trained_model(tiny_backend, batch, overrides, tmp_path):
    """Loaded by transformers alone, the logits of one document agree to 1e-5."""
    from transformers import AutoModelForCausalLM

    backend = tiny_backend(*overrides)
    step(backend, batch)
    step(backend, batch)
    backend.write_weights(tmp_path / "weights")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float32)
    (start, end), *_ = batch.documents or ()
    inside = [int(i) for i in batch.predict_M if start <= i < end]
    with torch.no_grad():
        theirs = model(input_ids=batch.input_ids_BT[:, start:end]).logits[0][inside]
    assert torch.allclose(logits_of(backend, batch)[: len(inside)], theirs, atol=1e-5)


@graphs
def test_there_is_no_adapter(tiny_backend, tiny_config, overrides):
    """If every weight was trained, none is written or loaded."""
    backend = tiny_backend(*overrides)
    assert not backend.has_adapter
    assert not backend.has_peft_view
    if overrides is FULL:
        with pytest.raises(RequestError, match="no adapter"):
            backend.adapter(tiny_config(*overrides))
        with pytest.raises(RequestError, match="no adapter"):
            backend.load_adapter({})


def test_a_frozen_base_writes_no_weights(tiny_backend, tmp_path):
    """Warm-started, the research lane writes only an adapter, like qlora and the proxy."""
    for overrides in (["backend=burn", "backend.train_base=false"], [], ["backend=proxy"]):
        backend = tiny_backend(*overrides)
        assert backend.has_adapter
        with pytest.raises(SetupError, match="frozen"):
            backend.write_weights(tmp_path / "weights")


def test_the_research_lane_says_so(tiny_backend, tiny_config):
    """This is in the facts, in a note and in the adapter's manifest."""
    overrides = ["backend=burn", "backend.train_base=false"]
    backend = tiny_backend(*overrides)
    facts = backend.facts()
    assert facts["lane"] == "research"
    assert facts["notes"][0].startswith("lane: research")
    manifest, _ = backend.adapter(tiny_config(*overrides))
    assert manifest.mens_exp is not None
    assert manifest.mens_exp["lane"] == "research"
    assert "lane" not in tiny_backend().facts()


def test_a_full_run_leaves_weights_and_adapter_tasks_refuse_it(finished_with):
    """Through the CLI, weights/ is hashed, and task=evaluate says what to use instead."""
    run = finished_with("backend=full")
    assert (run.weights / "model.safetensors").is_file()
    assert not run.adapter.exists()
    with pytest.raises(RequestError, match="model=hf"):
        subject_of(str(run.path))


@pytest.mark.parametrize("overrides", [["backend=proxy"], ["backend=burn"], ["backend=lora"]])
def test_each_backend_trains_through_the_command_line(finished_with, overrides):
    """The run succeeds, the loss falls, and the artifacts can be read."""
    from mens_exp.artifacts.manifest import Manifest

    run = finished_with(*overrides)
    manifest = Manifest.read(run.manifest)
    assert manifest.status == "succeeded"
    assert manifest.results["tuned_val_loss"] < manifest.results["base_val_loss"]
    if overrides == ["backend=burn"]:
        assert (run.weights / "config.json").is_file()
        assert manifest.facts["train_base"]
    else:
        adapter, _ = read_adapter(run.adapter)
        assert adapter.quant["base_quant"] == ("none" if "lora" in overrides[0] else "nf4")
    assert run.peft.is_dir() is (overrides == ["backend=lora"])
