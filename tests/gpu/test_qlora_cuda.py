"""Differences of a CUDA machine: kernels, dropout's generator and the place of loading."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from mens_exp.artifacts.adapter_v3 import read_adapter
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.backends.qlora import QloraBackend
from mens_exp.data.batch import packed_batch, padded_batch
from mens_exp.lora.keyed import KeyedDropout
from mens_exp.objective.causal import CrossEntropy

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
F32 = "quant.compute_dtype=f32"
STILL = "lora.dropout=0"


@pytest.fixture
def cuda_backend(tiny_backend):
    """Build tiny_llama on the GPU with B filled."""
    return functools.partial(tiny_backend, "trainer.accelerator=gpu", live=True)


@pytest.fixture
def documents(random_documents):
    return random_documents([11, 6, 17, 9], [3, 1, 12, 4])


def gradients_of(backend, batch):
    backend.train()
    backend.zero_grad()
    backend.begin(batch.index)
    CrossEntropy("causal", 4)(backend(batch), batch.targets_M, backend.head).total.backward()
    return {name: p.grad.clone() for name, p in backend.trainable().items() if p.grad is not None}


def mask(*, micro_batch=0, p=0.3):
    dropout = KeyedDropout(p, seed=1, layer="l0.qkv")
    dropout.begin(micro_batch)
    return dropout(torch.ones(512, 512, device=CUDA)) != 0


def test_the_main_path_runs_on_the_gpu(train_in, tmp_path):
    """A whole run succeeds, its facts name the GPU, and its peak memory is recorded."""
    directory = train_in(tmp_path / "run", "trainer=gpu")
    manifest = Manifest.read(directory.manifest)
    assert manifest.status is Status.SUCCEEDED
    assert manifest.facts["device"].startswith("cuda")
    assert manifest.results["peak_cuda_bytes"] > 0


def test_two_runs_on_the_gpu_end_with_the_same_adapter(train_in, tmp_path):
    """Atomic sums are unordered, so they agree to a hundredth of the norm and not bit for bit."""
    (_, first), (_, second) = (
        read_adapter(train_in(tmp_path / name, "trainer=gpu").adapter) for name in "ab"
    )
    for name, values in first.items():
        distance = torch.from_numpy(values - second[name]).norm()
        assert float(distance) <= 0.01 * float(torch.from_numpy(values).norm()), name


def test_weights_are_loaded_where_they_were_asked_for(
    cuda_backend,
    tiny_base,
    tiny_config,
):
    """The requested device is used, even the CPU on a machine with a GPU."""
    assert {p.device.type for p in cuda_backend().parameters()} == {"cuda"}
    on_cpu = QloraBackend(tiny_config(), tiny_base, torch.device("cpu"))
    assert {p.device.type for p in on_cpu.parameters()} == {"cpu"}


def test_initialisation_is_that_of_the_cpu(cuda_backend, tiny_backend):
    """A is drawn on the CPU, so that runs on either device start equal."""
    there, here = cuda_backend().trainable(), tiny_backend().trainable()
    assert all(
        torch.equal(there[name].cpu(), here[name]) for name in here if name.endswith("lora_a")
    )


def test_dropout_masks_are_a_function_of_their_key():
    """Equal keys give equal masks despite other draws; another micro-batch gets another mask."""
    first = mask()
    torch.rand(100, device=CUDA)
    assert torch.equal(mask(), first)
    assert not torch.equal(mask(micro_batch=1), first)


@pytest.mark.parametrize("p", [0.05, 0.3])
def test_the_share_that_is_dropped_is_the_probability(p):
    """Over a quarter of a million elements it is within six standard deviations."""
    dropped = 1 - float(mask(p=p).float().mean())
    assert abs(dropped - p) < 6 * math.sqrt(p * (1 - p)) / 512


@pytest.mark.parametrize("overrides", [[], [F32], ["quant=fp4"], ["quant.double_quant=false"]])
def test_every_adapter_matrix_learns_before_and_after_a_validation(
    cuda_backend, documents, overrides
):
    """No gradient is zero or missing."""
    backend = cuda_backend(*overrides)
    batch = packed_batch(documents, [[0, 1, 2, 3]], index=0).to(CUDA)
    for _ in range(2):
        gradients = gradients_of(backend, batch)
        assert len(gradients) == 28
        assert all(bool(gradient.any()) for gradient in gradients.values())
        backend.eval()
        with torch.inference_mode():
            backend.head(backend(batch))


def test_packed_and_padded_give_the_same_gradients(cuda_backend, documents):
    """The two kernels share only the mathematics; in float32."""
    backend = cuda_backend(F32, STILL)
    packed = packed_batch(documents, [[0, 1, 2, 3]], index=0).to(CUDA)
    padded = padded_batch(documents, [[0], [1], [2], [3]], index=0, pad_id=0).to(CUDA)
    expected = gradients_of(backend, packed)
    for name, gradient in gradients_of(backend, padded).items():
        assert (gradient - expected[name]).norm() <= 1e-3 * expected[name].norm(), name


def test_changing_a_document_changes_nothing_in_the_others(cuda_backend, documents):
    """Packed in float32, the logits of the other three agree to 1e-5."""
    backend = cuda_backend(F32).eval()

    def logits():
        batch = packed_batch(documents, [[0, 1, 2, 3]], index=0).to(CUDA)
        with torch.no_grad():
            return backend.head(backend(batch))

    before = logits()
    documents.ids[11:17] = 5
    after = logits()
    assert (before[:3] - after[:3]).abs().max() <= 1e-5
    assert (before[4:] - after[4:]).abs().max() <= 1e-5
    assert (before[3] - after[3]).abs().max() > 1e-3


def test_prompts_are_continued_on_the_gpu_as_alone(
    cuda_backend,
):
    """Left padding changes no id in float32."""
    backend, prompts = cuda_backend(F32), [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14], [16]]

    def complete(some):
        return backend.generate(some, max_new_tokens=8, end_ids={319})

    assert complete(prompts) == [complete([prompt])[0] for prompt in prompts]


@pytest.mark.parametrize(
    "overrides",
    [
        ["lora.init=pissa"],
        ["lora.init=loftq"],
        ["lora.init=loftq", "lora.loftq_iters=3"],
        ["lora.variant=dora"],
        ["lora.init=pissa", "lora.variant=dora"],
    ],
    ids=str,
)
def test_starts_and_variants_run_on_a_gpu_from_start_to_end(train_in, tmp_path, overrides):
    """The base is the plain one, the quantization error falls, and the adapter trains."""
    still = ["trainer=gpu", STILL, "trainer.max_steps=6"]
    run = train_in(tmp_path / "run", *overrides, *still)
    plain = train_in(tmp_path / "plain", *still)
    ours, theirs = (Manifest.read(one.manifest) for one in (run, plain))
    assert ours.results["base_val_loss"] == pytest.approx(theirs.results["base_val_loss"], rel=1e-4)
    assert ours.results["tuned_val_loss"] < ours.results["base_val_loss"]
    if any(text.startswith("lora.init") for text in overrides):
        facts = ours.facts
        assert facts["quantization_error_after"] < 0.99 * facts["quantization_error_before"]


@pytest.mark.parametrize("init", ["pissa", "loftq"])
def test_a_start_on_a_gpu_is_that_of_the_cpu(tiny_base, tiny_config, init):
    """Up to the last bits of the decomposition, update and errors are equal."""
    config = tiny_config(f"lora.init={init}")
    here, there = (QloraBackend(config, tiny_base, device) for device in (CPU, CUDA))
    for name, (before, after) in here.quantization_errors().items():
        theirs = there.quantization_errors()[name]
        assert theirs[0] == pytest.approx(before, rel=1e-3)
        assert theirs[1] == pytest.approx(after, rel=1e-2)
        updates = [
            (found[f"{name}.lora_b"] @ found[f"{name}.lora_a"]).detach().cpu()
            for found in (here.trainable(), there.trainable())
        ]
        assert (updates[0] - updates[1]).norm() < 0.02 * updates[0].norm()
