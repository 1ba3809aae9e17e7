"""Methods other than LoRA, compared with PEFT's models; refusals."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers_models import of_transformers

from mens_exp.artifacts.adapter_tensors import disagreements
from mens_exp.data.batch import packed_batch
from mens_exp.errors import DataError
from mens_exp.export.adapter import config_of_adapter, with_scale_one
from mens_exp.lora.peft_methods import RANDLORA, VERA
from mens_exp.model.sources import resolve
from mens_exp.objective.causal import CrossEntropy
from mens_exp.planning.activations import Documents
from mens_exp.planning.memory import memory
from mens_exp.planning.preflight import preflight
from mens_exp.quant.bnb import dequantized
from mens_exp.training.build import build_backend

F32 = ("quant.compute_dtype=f32",)
DENSE = ("backend=lora", "quant=none", *F32)
SETTINGS = {
    "ia3": ("lora=ia3",),
    "loha": ("lora=loha",),
    "lokr": ("lora=lokr", "lora.r=3", "lora.alpha=6"),
    "adalora": ("lora=adalora", "lora.r=6", "lora.target_r=3"),
    "vera": ("lora=vera",),
    "randlora": ("lora=randlora", "lora.r=24", "lora.alpha=48"),
}
METHODS = tuple(SETTINGS)
LENGTHS = (11, 30, 47)


def own_config(name, **others):
    """Return PEFT's configuration for the `lora` option of this name."""
    from peft import (
        AdaLoraConfig,
        IA3Config,
        LoHaConfig,
        LoKrConfig,
        RandLoraConfig,
        VeraConfig,
    )

    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    if name == "loha":
        return LoHaConfig(r=4, alpha=4, target_modules=projections)
    if name == "lokr":
        return LoKrConfig(r=3, alpha=6, target_modules=projections)
    if name == "adalora":
        sizes = {"init_r": 6, "target_r": 3, "lora_alpha": 8, "total_step": 9}
        usual = {"target_modules": projections, "orth_reg_weight": 0.0}
        return AdaLoraConfig(**{**sizes, **usual, **others})
    if name == "vera":
        return VeraConfig(r=256, target_modules=projections)
    if name == "randlora":
        return RandLoraConfig(r=24, randlora_alpha=48, target_modules=projections)
    usual = {"target_modules": ["k_proj", "v_proj", "up_proj"], "feedforward_modules": []}
    return IA3Config(**{**usual, **others})


def of_peft(name, directory, *, quantized=False, **others):
    """Return PEFT's model with the same base, attention and dtype, as in its documentation."""
    from peft import get_peft_model

    model = of_transformers(directory, torch.float32, quant="nf4" if quantized else None)
    return get_peft_model(model, own_config(name, **others))


def places(backend, model):
    """Yield our parameter and PEFT's for each layer and part."""
    layers = dict(model.named_modules())
    for one in backend.modules_chosen:
        theirs = layers[f"base_model.model.{one.path}"]
        for part, ours in backend.method.parameters(backend.layers[one.logical]).items():
            named = part.replace("adalora_e", "lora_E").replace("adalora", "lora")
            named = f"{named[:-1]}{named[-1].upper()}" if part.startswith("adalora") else part
            yield ours, getattr(theirs, named)["default"]


def filled(backend, model=None, seed=7):
    """Move our adapter from its initial values, and copy it into PEFT's."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in backend.trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for ours, theirs in places(backend, model) if model else ():
            theirs.copy_(ours.reshape(theirs.shape))
    return backend


def mean_loss(model, documents):
    """Return the mean loss per token from `forward(labels=…)` on single documents."""
    total, count = 0.0, 0
    for start, end in pairwise(documents.offsets.tolist()):
        ids = torch.from_numpy(documents.ids[None, start:end]).long()
        learned = torch.from_numpy(documents.supervised[None, start:end])
        labels = ids.masked_fill(~learned, -100)
        many = int(learned[:, 1:].sum())
        total = total + model(input_ids=ids, labels=labels).loss * many
        count += many
    return total / count


def our_loss(backend, documents):
    batch = packed_batch(documents, [list(range(len(LENGTHS)))], index=0)
    backend.begin(0)
    found = CrossEntropy("causal", 64)(backend(batch), batch.targets_M, backend.head)
    return found.total / found.count


@pytest.fixture
def documents(random_documents):
    return random_documents(LENGTHS)


@pytest.mark.parametrize("name", METHODS)
def test_a_start_adds_nothing_and_is_drawn_from_the_seed(name, tiny_backend, documents):
    """The initial loss is the base's; another seed changes any random values."""
    backend, again, other = (
        tiny_backend(*SETTINGS[name], *DENSE, f"seed={seed}") for seed in (1, 1, 2)
    )
    with torch.no_grad():
        tuned = our_loss(backend, documents)
        with backend.base_only():
            assert torch.equal(our_loss(backend, documents), tuned)
    values = [torch.cat([p.flatten() for p in b.trainable().values()]) for b in (backend, again)]
    assert torch.equal(*values)
    drawn = torch.cat([p.flatten() for p in other.trainable().values()])
    assert torch.equal(values[0], drawn) is (name not in {"loha", "lokr", "adalora"})


@pytest.mark.parametrize("name", METHODS)
def test_losses_and_steps_are_those_of_a_loop_over_peft(name, tiny_backend, tiny_base, documents):
    """Three AdamW steps in float32 give equal losses and adapters."""
    backend = tiny_backend(*SETTINGS[name], *DENSE).train()
    model = of_peft(name, tiny_base.directory).train()
    filled(backend, model)
    ours = torch.optim.AdamW([*backend.trainable().values()], lr=1e-2)
    theirs = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        losses = our_loss(backend, documents), mean_loss(model, documents)
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
        for optimizer, loss in zip((ours, theirs), losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for one, other in places(backend, model):
            assert (one.grad - other.grad.reshape(one.shape)).abs().max() < 1e-5
        for optimizer in (ours, theirs):
            optimizer.step()
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == sum(
        p.numel() for p in backend.trainable().values()
    )


@pytest.mark.parametrize("name", ["ia3", "adalora", "vera", "randlora"])
def test_on_four_bits_the_loss_is_that_of_peft(name, tiny_backend, tiny_base, documents):
    """PEFT has layers of these methods for bitsandbytes weights."""
    backend = tiny_backend(*SETTINGS[name], *F32).train()
    model = of_peft(name, tiny_base.directory, quantized=True)
    filled(backend, model)
    found = our_loss(backend, documents).item()
    assert found == pytest.approx(mean_loss(model, documents).item(), rel=1e-6)


def test_factors_of_up_proj_are_those_that_peft_puts_before_down_proj(
    tiny_backend, tiny_base, documents
):
    """PEFT's default for this family scales the input of down_proj."""
    backend = filled(tiny_backend("lora=ia3", *DENSE).train())
    default = {"target_modules": None, "feedforward_modules": None}
    model = of_peft("ia3", tiny_base.directory, **default)
    layers = dict(model.named_modules())
    with torch.no_grad():
        for one in backend.modules_chosen:
            path = f"base_model.model.{one.path}".replace("up_proj", "down_proj")
            theirs = layers[path].ia3_l["default"]
            theirs.copy_(backend.layers[one.logical].ia3_l.reshape(theirs.shape))
    found = our_loss(backend, documents).item()
    assert found == pytest.approx(mean_loss(model, documents).item(), rel=1e-6)


@pytest.mark.parametrize("name", ["loha", "lokr"])
def test_on_four_bits_the_loss_is_that_of_peft_on_the_same_weights_dense(
    name, tiny_backend, tiny_base, documents
):
    """PEFT's LoHa and LoKr need dense weights, so they get the dequantized values."""
    backend = tiny_backend(*SETTINGS[name], *F32).train()
    model = of_peft(name, tiny_base.directory)
    filled(backend, model)
    layers = dict(model.named_modules())
    with torch.no_grad():
        for one in backend.modules_chosen:
            weight = backend.layers[one.logical].get_base_layer().weight
            layers[f"base_model.model.{one.path}"].get_base_layer().weight.copy_(
                dequantized(weight)
            )
    found = our_loss(backend, documents).item()
    assert found == pytest.approx(mean_loss(model, documents).item(), rel=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_merged_weights_are_those_that_peft_merges(name, tiny_backend, tiny_base):
    """In float32 PEFT merges the same adapter into a dense copy of the base."""
    backend = tiny_backend(*SETTINGS[name], *DENSE)
    model = of_peft(name, tiny_base.directory)
    filled(backend, model)
    plain = {
        one.logical: backend.layers[one.logical].get_base_layer().weight.detach().clone()
        for one in backend.modules_chosen
    }
    merged = dict(model.merge_and_unload().named_parameters())
    for one in backend.modules_chosen:
        ours = backend.merged(one.logical, plain[one.logical])
        assert (ours - merged[f"{one.path}.weight"]).abs().max() < 1e-6, one.path
        assert (ours - plain[one.logical]).abs().max() > 1e-3, one.path


@pytest.mark.parametrize(
    "settings",
    [
        ("lora=ia3",),
        ("lora=loha", "lora.r=3", "lora.alpha=12"),
        ("lora=lokr", "lora.r=2", "lora.alpha=12"),
        ("lora=adalora", "lora.r=5", "lora.alpha=12", "lora.target_r=2"),
        ("lora=vera", "lora.r=24", "lora.targets=[attention]"),
        ("lora=randlora", "lora.r=5", "lora.alpha=12", "lora.targets=[attention]"),
    ],
)
def test_an_adapter_without_its_run_is_the_same_model(
    settings, tiny_backend, tiny_config, documents, cache
):
    """It is built from the record's rank, alpha and targets."""
    config = tiny_config(*settings, *DENSE)
    backend = filled(tiny_backend(*settings, *DENSE))
    manifest, tensors = backend.adapter(config)
    again = config_of_adapter(config, manifest, backend.base, backend.shape, None)
    again.model = config.model
    fresh = build_backend(again, resolve(config.model, cache))
    fresh.load_adapter(with_scale_one(manifest, tensors))
    with torch.no_grad():
        losses = [our_loss(one.eval(), documents).item() for one in (backend, fresh)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["loha", "lokr"])
def test_the_plan_counts_the_updates_that_the_backward_pass_keeps(
    name, tiny_backend, tiny_config, documents, monkeypatch
):
    """The oracle is autograd's hooks, plus two of the largest updates as temporaries.

    Three of them need not be kept: nothing before the first layer learns.
    """
    from peft.tuners.loha.layer import LoHaLayer
    from peft.tuners.lokr.layer import LoKrLayer

    layers = {"loha": LoHaLayer, "lokr": LoKrLayer}[name]
    settings = (*SETTINGS[name], *DENSE, "model.gradient_checkpointing=off")
    config, backend = tiny_config(*settings), filled(tiny_backend(*settings).train())
    made, kept = {}, {}  # each stored tensor has its own address
    of_peft = layers.get_delta_weight

    def watched(layer, name):
        update = of_peft(layer, name)
        made[update.data_ptr()] = update
        return update

    def seen(tensor):
        if tensor.data_ptr() in made:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    monkeypatch.setattr(layers, "get_delta_weight", watched)
    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        loss = our_loss(backend, documents)
    lengths = Documents(longest=100, typical=100)
    planned = memory(config, backend.shape, lengths, kind="cpu").components
    largest = 4 * max(one.out * one.width for one in backend.modules_chosen)
    assert loss.requires_grad
    first = [one for one in backend.modules_chosen if one.logical in {"l0.q", "l0.k", "l0.v"}]
    not_kept = sum(4 * one.out * one.width for one in first)
    assert planned["updates of whole weights"] == sum(kept.values()) + not_kept + 2 * largest


def test_projections_are_recorded_and_drawn_again(tiny_backend, tiny_config, tiny_base):
    """From seed and sizes PEFT draws matrices with the recorded digest."""
    from peft import VeraConfig, get_peft_model

    settings = ("lora=vera", "lora.r=24", *DENSE)
    backend = filled(tiny_backend(*settings))
    manifest, tensors = backend.adapter(tiny_config(*settings))
    assert set(tensors) == set(backend.trainable())
    found = manifest.projections
    layer = torch.nn.ModuleDict({"one": torch.nn.Linear(found["width"], found["out"])})
    theirs = VeraConfig(r=24, target_modules=["one"], projection_prng_key=found["seed"])
    model = get_peft_model(layer, theirs)
    A_RI, B_OR = model.base_model.vera_A["default"], model.base_model.vera_B["default"]
    parts = (A_RI.numpy().tobytes(), B_OR.numpy().tobytes())
    assert hashlib.sha256(b"".join(parts)).hexdigest() == found["sha256"]
    one = backend.modules_chosen[-1]
    weight_OI = torch.randn(one.out, one.width, dtype=torch.float64)
    parts = {n.rpartition(".")[2]: v for n, v in tensors.items() if n.startswith(one.logical)}
    lambda_b, lambda_d = (
        torch.from_numpy(parts[f"vera_lambda_{which}"]).double().diag() for which in "bd"
    )
    update_OI = lambda_b @ B_OR[: one.out].double() @ lambda_d @ A_RI[:, : one.width].double()
    change = VERA.sharing(found).change(
        {name: torch.from_numpy(values) for name, values in parts.items()}, scale=1.0
    )
    assert (change.expected(weight_OI) - (weight_OI + update_OI)).abs().max() < 1e-12
    with pytest.raises(DataError, match="do not match its seed"):
        VERA.sharing({**found, "seed": 1})


def test_the_plan_counts_the_bases_and_the_factors_that_the_backward_pass_keeps(
    tiny_backend, tiny_config, documents
):
    """By hooks: layers with wider inputs than outputs keep the narrow output too."""
    settings = ("lora=randlora", "lora.r=24", *DENSE, "model.gradient_checkpointing=off")
    config, backend = tiny_config(*settings), filled(tiny_backend(*settings).train())
    kept: dict[int, torch.Tensor] = {}

    def seen(tensor):
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        assert our_loss(backend, documents).requires_grad
    modules, spec = backend.modules_chosen, config.lora.spec
    narrow = [one for one in modules if one.out < one.width]
    shapes = [tuple(one.shape) for one in kept.values()]
    made = {one.path: -(-min(one.out, one.width) // 24) * 24 for one in modules}
    outputs = [shape for shape in shapes if shape[:-1] == (sum(LENGTHS),)]
    for size in {made[one.path] for one in narrow}:
        many = sum(made[one.path] == size for one in narrow)
        assert sum(shape[-1] == size for shape in outputs) == many
    for one in modules:
        smaller, sizes = min(one.out, one.width), {"r": 24, "out": one.out, "width": one.width}
        assert spec.formed(**sizes) == made[one.path] * smaller
        assert spec.kept_per_token(**sizes) == (made[one.path] if one in narrow else 0)
    factors = [shape for shape in shapes if sorted(shape) in [[64, 72], [32, 48]]]
    assert len(factors) == sum(one.logical not in {"l0.q", "l0.k", "l0.v"} for one in modules)
    lengths = Documents(longest=100, typical=100)
    planned = memory(config, backend.shape, lengths, kind="cpu").components
    sides = [max(one.out for one in modules), max(one.width for one in modules)]
    bases = 24 * -(-min(sides) // 24)
    assert planned["shared projections"] == 4 * (24 * min(sides) + bases * max(sides))


def test_bases_are_those_of_peft_and_the_update_is_the_paper_s(tiny_backend, tiny_config):
    """They are bitwise equal given seed and sizes; by hand in float64 with PEFT's order of rows."""
    from peft import RandLoraConfig, get_peft_model

    settings = ("lora=randlora", "lora.r=24", "lora.alpha=48", *DENSE)
    backend = filled(tiny_backend(*settings))
    manifest, tensors = backend.adapter(tiny_config(*settings))
    found = manifest.projections
    layer = torch.nn.ModuleDict({"one": torch.nn.Linear(found["width"], found["out"])})
    theirs = RandLoraConfig(r=24, target_modules=["one"], projection_prng_key=found["seed"])
    model = get_peft_model(layer, theirs)
    A_R1S, B_LNR = model.base_model.randlora_A["default"], model.base_model.randlora_B["default"]
    digest = hashlib.sha256(A_R1S.numpy().tobytes() + B_LNR.numpy().tobytes())
    assert digest.hexdigest() == found["sha256"]
    method = RANDLORA.sharing(found)
    for one in backend.modules_chosen[:7]:
        parts = {n.rpartition(".")[2]: v for n, v in tensors.items() if n.startswith(one.logical)}
        lambda_RN, gamma_NS = (
            parts[f"randlora_{which}"].astype("f8") for which in ("lambda", "gamma")
        )
        (bases, smaller), larger = gamma_NS.shape, max(one.out, one.width)
        A, B = A_R1S.double().numpy(), B_LNR.double().numpy()
        rows = [
            lambda_RN[r, n] * A[r, 0, :smaller] * gamma_NS[n]
            for r in range(24)
            for n in range(bases)
        ]
        columns = [B[:larger, n, r] for n in range(bases) for r in range(24)]
        update = 2.0 * sum(np.outer(c, row) for c, row in zip(columns, rows, strict=True))
        change = method.change(
            {name: torch.from_numpy(values) for name, values in parts.items()}, scale=2.0
        )
        weight_OI = torch.randn(one.out, one.width, dtype=torch.float64)
        merged = change.expected(weight_OI).numpy() - weight_OI.numpy()
        assert np.abs(merged - (update if one.width <= one.out else update.T)).max() < 1e-12
    with pytest.raises(DataError, match="layer of another size"):
        change.expected(torch.zeros(8, 8, dtype=torch.float64))


def test_a_kronecker_product_is_merged_entry_by_entry(tiny_backend, tiny_config):
    """By hand in float64: entry [a · K + k, b · M + m] is w1[a, b] times w2[k, m]."""
    settings = ("lora=lokr", "lora.r=3", "lora.alpha=6", *DENSE)
    backend = filled(tiny_backend(*settings))
    manifest, tensors = backend.adapter(tiny_config(*settings))
    for one in backend.modules_chosen[:7]:
        w1, a, b = (tensors[f"{one.logical}.lokr_{part}"] for part in ("w1", "w2_a", "w2_b"))
        second = a.astype("f8") @ b.astype("f8")
        outputs, inputs = (np.arange(size) for size in (one.out, one.width))
        update = (
            w1.astype("f8")[np.ix_(outputs // len(second), inputs // second.shape[1])]
            * second[np.ix_(outputs % len(second), inputs % second.shape[1])]
        )
        weight_OI = torch.randn(one.out, one.width, dtype=torch.float64)
        merged = backend.method.change(
            {
                part: torch.from_numpy(tensors[f"{one.logical}.{part}"])
                for part in manifest.form.tensors
            },
            scale=manifest.scale_of(one.logical),
        ).expected(weight_OI)
        assert np.abs(merged.numpy() - (weight_OI.numpy() + 2.0 * update)).max() < 1e-12


@pytest.mark.parametrize("r", [3, 4])
def test_peft_s_lokr_has_another_form_from_the_rank_that_is_refused(r, tiny_config):
    """For 64 by 64 in factors of 8, PEFT has no second product from rank 4 on."""
    from peft import LoKrConfig, get_peft_model

    layer = torch.nn.ModuleDict({"one": torch.nn.Linear(64, 64)})
    names = [
        name
        for name, _ in get_peft_model(
            layer, LoKrConfig(r=r, target_modules=["one"])
        ).named_parameters()
        if "lokr" in name
    ]
    problems = [
        one for one in preflight(tiny_config("lora=lokr", f"lora.r={r}")) if one.where == "lora.r"
    ]
    assert len(names) == (3 if r == 3 else 2)
    assert len(problems) == (r == 4)
    assert all("set lora.r=3" in str(one) for one in problems)


def test_tensors_of_a_layer_that_contradict_each_other_are_refused(tiny_backend, tiny_config):
    """For RandLoRA, sizes that two bases share must agree."""
    settings = ("lora=randlora", "lora.r=24", *DENSE)
    manifest, tensors = tiny_backend(*settings).adapter(tiny_config(*settings))
    name = f"{manifest.layer_order[0]}.randlora_gamma"
    shapes = {n: v.shape for n, v in tensors.items()}
    kinds = dict.fromkeys(shapes, "F32")
    assert disagreements(manifest, shapes, kinds, "file") == []
    shapes[name] = (shapes[name][0] + 1, shapes[name][1])
    (problem,) = disagreements(manifest, shapes, kinds, "file")
    assert problem.found == list(shapes[name])


def test_a_record_without_its_projections_is_invalid(tiny_backend, tiny_config):
    """Projections of another rank or seed are invalid too."""
    settings = ("lora=vera", "lora.r=24", *DENSE)
    manifest, _ = tiny_backend(*settings).adapter(tiny_config(*settings))
    for name, value, said in (("r", 23, "24, the rank"), ("seed", 1, "0, PEFT's default")):
        good = manifest.mens_exp["projections"]
        manifest.mens_exp["projections"] = {**good, name: value}
        (problem,) = manifest.problems("file")
        assert said in str(problem)
        manifest.mens_exp["projections"] = good
    del manifest.mens_exp["projections"]
    (problem,) = manifest.problems("file")
    assert "mens_exp.projections: is missing" in str(problem)


def test_the_plan_counts_the_projections_and_what_their_factors_keep(
    tiny_backend, tiny_config, documents
):
    """By hooks: each layer keeps the outputs of A and B, which feed the trained factors."""
    settings = ("lora=vera", "lora.r=24", *DENSE, "model.gradient_checkpointing=off")
    config, backend = tiny_config(*settings), filled(tiny_backend(*settings).train())
    modules, kept = backend.modules_chosen, []

    def seen(tensor):
        kept.append(tuple(tensor.shape[1:]))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        assert our_loss(backend, documents).requires_grad
    assert kept.count((sum(LENGTHS), 24)) == len(modules)
    lengths = Documents(longest=100, typical=100)
    planned = memory(config, backend.shape, lengths, kind="cpu").components
    wide = max(one.out for one in modules) + max(one.width for one in modules)
    assert planned["shared projections"] == 4 * 24 * wide
    per_token = config.lora.spec.kept_per_token(r=24, out=modules[0].out, width=modules[0].width)
    assert per_token == 24 + modules[0].out


@pytest.mark.parametrize(
    ("overrides", "where", "said"),
    [
        (("lora=vera", "lora.targets=[lm_head]"), "lora.variant", "decoder layers alone"),
        (("lora=ia3", "lora.targets=[lm_head]"), "lora.variant", "decoder layers alone"),
        (("lora=lokr", "lora.targets=[lm_head]"), "lora.variant", "decoder layers alone"),
        (("lora=randlora", "lora.targets=[lm_head]"), "lora.variant", "decoder layers alone"),
        (("lora=ia3", "model=tiny_qwen2"), "lora.targets", "multiplies the bias"),
    ],
)
def test_a_layer_that_a_method_cannot_adapt_is_refused(tiny_config, overrides, where, said):
    """The plan refuses it before anything is loaded."""
    (problem,) = [one for one in preflight(tiny_config(*overrides)) if one.where == where]
    assert said in str(problem)
