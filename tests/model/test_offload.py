"""Codes of the base in host memory: the same numbers, and at most two layers on the device."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from live_adapters import training_pass

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.config.lora import ADAPTERS
from mens_exp.config.overrides import check
from mens_exp.data.batch import packed_batch
from mens_exp.errors import SetupError
from mens_exp.layout.modules import linear_modules
from mens_exp.layout.shape import shape_of
from mens_exp.model import offload
from mens_exp.model.offload import HostCodes, codes_of
from mens_exp.planning.checks.machine import check_offload
from mens_exp.planning.machine import Machine
from mens_exp.planning.memory import offloaded_codes
from mens_exp.quant.layers import quantized_linears
from mens_exp.training import build

GPU = Machine(kind="cuda", name="GPU", total_bytes=1 << 33, free_bytes=1 << 33)

CPU = torch.device("cpu")


class Elsewhere(HostCodes):
    """Codes that the layers hold no longer, so that only a copy gives the right numbers."""

    def __init__(self, layers, device):
        self.held, self.copies = {}, []
        super().__init__(layers, device)
        for layer in layers:
            self.held[layer] = layer.weight.data
            layer.weight.data = torch.full_like(layer.weight.data, 0x77)

    def _copied(self, layer):
        copy = self.held[layer].clone()
        self.copies.append((layer, weakref.ref(copy)))
        return copy

    def alive(self):
        gc.collect()
        return [layer for layer, copy in self.copies if copy() is not None]


@pytest.fixture
def elsewhere(monkeypatch):
    """Offload the codes, and overwrite those that the layers hold."""
    made = []

    def begin(layers, device):
        made.append(Elsewhere(layers, device))
        return made[-1]

    monkeypatch.setattr("mens_exp.backends.qlora.HostCodes", begin)
    return made


@pytest.fixture
def batch(random_documents):
    """Return a packed micro-batch of three documents."""
    documents = random_documents((40, 30, 58), (39, 29, 57))
    return packed_batch(documents, [[0, 1, 2]], index=0)


def same(ours, theirs):
    """Compare losses and gradients bit by bit."""
    assert ours[0] == theirs[0]
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        assert torch.equal(ours[1][name], gradient), name


@pytest.mark.parametrize(
    "overrides",
    [
        ["quant=nf4"],
        ["quant=fp4", "quant.double_quant=false"],
        ["quant=nf3"],
        ["quant=hqq4"],
        ["quant=nvfp4"],
        ["quant=nf4", "quant.type_pattern={v_proj: nf8}"],
        ["quant=nf4", "model.gradient_checkpointing='on'", "lora.dropout=0.1"],
        ["quant=nf4", "model=tiny_gpt2"],
        ["quant=nf4", "quant.compute_dtype=f32", "lora=attention"],
    ],
    ids=" ".join,
)
def test_an_offloaded_base_gives_the_same_numbers(tiny_backend, elsewhere, batch, overrides):
    """Bit by bit, in training, in evaluation and in answers, from copies alone."""
    here, there = (tiny_backend(*overrides, live=True) for _ in range(2))
    there.offload(CPU)
    for _ in range(2):
        same(training_pass(there, batch), training_pass(here, batch))
    for one in (here, there):
        one.eval()
    with torch.no_grad():
        assert torch.equal(there(batch), here(batch))
    prompts = [[5, 6, 7], [8, 9]]
    answers = [one.generate(prompts, max_new_tokens=4, end_ids={0}) for one in (here, there)]
    assert answers[0] == answers[1]
    kept = {one.data_ptr() for one in elsewhere[0].held.values()}
    assert not kept & {one.data_ptr() for one in there.parameters()}  # Lightning moves these
    assert there.facts()["offloaded_bytes"] == elsewhere[0].stored_bytes > 0
    assert "offloaded_bytes" not in here.facts()


@pytest.mark.parametrize("name", [name for name, one in ADAPTERS.built_in.items()])
def test_methods_that_only_multiply_by_the_base_are_those_that_say_so(
    tiny_backend, elsewhere, batch, name
):
    """On a GPU, the others would read codes in host memory, so a plan refuses them."""
    spec = ADAPTERS.built_in[name]
    if "qlora" not in spec.backends:
        pytest.skip("no adapter of this method on a quantized base")
    overrides = [f"lora={spec.option}"]
    if spec.schema is None and not spec.on_norms and not spec.on_embedding:
        overrides = ["lora=attention", f"lora.variant={name}"]
    if name == "passthrough":
        assert spec.reads_base, "of any type of PEFT"
        return
    here, there = (tiny_backend(*overrides) for _ in range(2))
    there.offload(CPU)
    try:
        same(training_pass(there, batch), training_pass(here, batch))
        there.eval()
        here.eval()
        with torch.no_grad():
            assert torch.equal(there(batch), here(batch))
        reads = False
    except AssertionError:
        reads = True
    assert reads == spec.reads_base


def test_at_most_two_layers_are_on_the_device(tiny_backend, elsewhere, batch):
    """The one that is computed with, and the one that is expected next."""
    backend = tiny_backend("model.gradient_checkpointing='on'")
    backend.offload(CPU)
    (host,) = elsewhere
    most, copied = [], host._copied

    def counted(layer):
        most.append(len(host.alive()) + 1)
        return copied(layer)

    host._copied = counted
    training_pass(backend, batch)
    assert max(most) <= 2


def test_after_a_micro_batch_every_copy_is_made_ahead(tiny_backend, elsewhere, batch):
    """Passes forward and backward read layers in the same order each time."""
    backend = tiny_backend("model.gradient_checkpointing='on'")
    backend.offload(CPU)
    (host,) = elsewhere
    training_pass(backend, batch)
    training_pass(backend, batch)
    host.copies.clear()
    read, on_device = [], host.on_device
    host.on_device = lambda layer: read.append(layer) or on_device(layer)
    ahead = host._ahead[0]
    training_pass(backend, batch)
    assert [ahead, *(layer for layer, _ in host.copies)][:-1] == read


def test_a_wrong_guess_costs_a_copy_and_no_number(tiny_backend, elsewhere, batch):
    """Layers are read in an order never seen before."""
    here, there = tiny_backend(), tiny_backend()
    there.offload(CPU)
    training_pass(there, batch)
    names = list(quantized_linears(there.causal_lm))
    for name in [*names[::-1], *names[::3], *names]:
        ours, theirs = (one.causal_lm.get_submodule(name) for one in (there, here))
        assert torch.equal(codes_of(ours), codes_of(theirs)), name


REFUSED = {
    "quant=int8": "quant.quant_type",
    "backend=lora quant=none": "model.offload",
    "lora.variant=dora": "lora.variant",
    "lora.init=pissa": "lora.init",
    "lora.init=eva": "lora.init",
    "trainer=fsdp trainer.devices=2": "model.offload",
    "trainer=cpu": "model.offload",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_cannot_be_offloaded_is_refused(overrides):
    """By the name of the setting, before anything is loaded."""
    given = ["model=tiny_llama", "trainer=gpu", "model.offload=true", *overrides.split()]
    found = check(given).problems
    assert REFUSED[overrides] in [one.where for one in found]
    assert check(["model=tiny_llama", "trainer=gpu", "model.offload=true"]).problems == ()


def config_of(*overrides):
    (cell,) = check(["model=llama3_8b", "trainer=gpu", "suite=none", *overrides]).cells
    return cell.config


def test_a_plan_counts_two_layers_of_codes():
    """The rest of the codes, half a byte per weight, is in host memory."""
    shape = shape_of(config_of().model)
    codes = offloaded_codes(config_of("model.offload=true"), shape)
    linears = [one for one in linear_modules(shape) if one.layer is not None]
    assert codes == [one.out * one.width // 2 for one in linears]
    assert offloaded_codes(config_of(), shape) == []


def test_a_machine_without_a_gpu_or_the_memory_is_refused(monkeypatch):
    """Before the base is loaded."""
    config = config_of("model.offload=true")
    monkeypatch.setattr("mens_exp.planning.checks.machine.device_of_plan", lambda _: GPU)
    assert [*check_offload(config)] == []
    small = Machine(kind="cpu", name="CPU", total_bytes=1 << 30, free_bytes=1 << 30)
    monkeypatch.setattr("mens_exp.planning.machine.look", lambda _: small)
    (error,) = check_offload(config)
    assert "3.2 GiB of codes, 1.0 GiB of memory" in str(error)
    monkeypatch.setattr("mens_exp.planning.checks.machine.device_of_plan", lambda _: small)
    assert "there is no device to offload the base from" in str(next(check_offload(config)))


def test_memory_that_cannot_be_locked_is_named(monkeypatch):
    """With its size, and what to do."""

    class Codes:
        nbytes = 3 << 30

        def pin_memory(self):
            raise RuntimeError("CUDA error: out of memory\nmore")

    with pytest.raises(SetupError, match=r"3.0 GiB of free host memory") as error:
        offload._page_locked(Codes(), Codes.nbytes)
    assert "CUDA error: out of memory" in str(error.value)


def test_a_whole_run_has_the_bytes_of_one_that_is_not_offloaded(train_in, tmp_path, elsewhere):
    """Lightning, checkpoints, validation, the PEFT directory, and a resumed run."""
    real = build.build_backend

    def offloaded(*given, **named):
        backend = real(*given, **named)
        backend.offload(CPU)
        return backend

    adapters = {}
    for name in ("here", "there"):
        with pytest.MonkeyPatch.context() as patch:
            if name == "there":
                patch.setattr(build, "build_backend", offloaded)
            run = train_in(tmp_path / name, "trainer.max_steps=2")
            assert cli.main([f"resume={run.path}", "trainer.max_steps=4"]) == 0
        adapters[name] = (run.adapter / "adapter.safetensors").read_bytes()
        results = Manifest.read(run.manifest).results
        adapters[f"{name} results"] = [
            results[one] for one in ("base_val_loss", "tuned_val_loss", "peft_view_difference_f32")
        ]
    assert len(elsewhere) == 2
    assert adapters["there"] == adapters["here"]
    assert adapters["there results"] == adapters["here results"]
