"""Distillation losses, compared with TRL, torch and float64 formulas."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from live_adapters import fill_b
from teachers import model_directory
from torch.nn.functional import cross_entropy, kl_div, mse_loss

from mens_exp.backends.forward import layer_states
from mens_exp.backends.frozen_base import Teacher, load_base
from mens_exp.config.model import teacher_of
from mens_exp.corpus.source import labelling_of
from mens_exp.data.batch import packed_batch, padded_batch
from mens_exp.errors import ModelFileError
from mens_exp.model.sources import resolve
from mens_exp.objective.causal import CrossEntropy, Passed
from mens_exp.objective.distillation import Distillation, summed_divergence, top_tokens
from mens_exp.rows.encode import encode
from mens_exp.rows.schema import TrainingPair
from mens_exp.tokenizer.load import load_tokenizer
from mens_exp.training.build import build_backend, objective_of
from mens_exp.training.module import TrainingModule

CLOSE = 1e-5
BETAS = [0.0, 1.0, 0.1, 0.5, 0.9]
TEMPERATURES = [1.0, 0.5, 3.0]


def drawn(*, positions=40, vocabulary=97, seed=0):
    """Return student and teacher logits, some far apart, and targets."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (
        torch.randn(positions, vocabulary, generator=generator) * scale for scale in (2.0, 5.0)
    )
    return student, teacher, torch.randint(vocabulary, (positions,), generator=generator)


def learned(found, logits):
    """Return the loss sum and its gradient by the logits."""
    (gradient,) = torch.autograd.grad(found, logits)
    return float(found.detach()), gradient


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_loss_and_gradient_are_those_of_trl(beta, temperature, monkeypatch):
    """The oracle is TRL's GKD loss on the same float32 logits, times the number of tokens."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    student, teacher, targets = drawn()
    labels = targets.clone()
    labels[::3] = -100
    is_kept = labels != -100
    theirs_at = student.clone().requires_grad_()
    theirs, theirs_by = learned(
        GKDTrainer.generalized_jsd_loss(
            theirs_at[None], teacher[None], labels[None], beta=beta, temperature=temperature
        ),
        theirs_at,
    )
    ours_at = student[is_kept].requires_grad_()
    ours = summed_divergence(
        ours_at, teacher[is_kept], targets[is_kept], beta=beta, temperature=temperature
    )
    many = int(is_kept.sum())
    loss, by = learned(ours.loss, ours_at)
    assert loss / many == pytest.approx(theirs, rel=CLOSE)
    scale = float(theirs_by.abs().max())
    torch.testing.assert_close(by / many, theirs_by[is_kept], rtol=CLOSE, atol=CLOSE * scale)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("ce_weight", [0.0, 0.3])
def test_loss_and_gradient_are_those_of_the_formula_in_f64(beta, ce_weight):
    """The oracle is the papers' formula on probabilities, differentiated by torch."""
    temperature = 2.0
    student, teacher, targets = drawn(seed=1)
    wide = student.double().requires_grad_()
    q = torch.softmax(wide / temperature, dim=1)
    p = torch.softmax(teacher.double() / temperature, dim=1)
    if beta == 0:
        divergence = (p * (p / q).log()).sum()
    elif beta == 1:
        divergence = (q * (q / p).log()).sum()
    else:
        m = beta * p + (1 - beta) * q
        divergence = beta * (p * (p / m).log()).sum() + (1 - beta) * (q * (q / m).log()).sum()
    nll = cross_entropy(wide, targets, reduction="sum")
    expected, expected_by = learned((1 - ce_weight) * divergence + ce_weight * nll, wide)
    at = student.clone().requires_grad_()
    found = summed_divergence(
        at, teacher, targets, beta=beta, temperature=temperature, ce_weight=ce_weight
    )
    loss, by = learned(found.loss, at)
    assert loss == pytest.approx(expected, rel=CLOSE)
    scale = float(expected_by.abs().max())
    torch.testing.assert_close(by.double(), expected_by, rtol=CLOSE, atol=CLOSE * scale)
    assert float(found.divergence) == pytest.approx(float(divergence.detach()), rel=CLOSE)
    assert float(found.nll) == pytest.approx(float(nll.detach()), rel=CLOSE)
    of_teacher = cross_entropy(teacher.double(), targets, reduction="sum")
    assert float(found.teacher_nll) == pytest.approx(float(of_teacher), rel=CLOSE)


def test_forward_and_reverse_are_torchs_own():
    """kl_div takes the target second, so each direction swaps the arguments."""
    student, teacher, targets = drawn(seed=2)
    q, p = (torch.log_softmax(one.double(), dim=1) for one in (student, teacher))
    for beta, (first, second) in ((0.0, (q, p)), (1.0, (p, q))):
        expected = kl_div(first, second, reduction="sum", log_target=True)
        found = summed_divergence(student, teacher, targets, beta=beta)
        assert float(found.loss) == pytest.approx(float(expected), rel=CLOSE)


@pytest.mark.parametrize("beta", BETAS)
def test_a_student_that_is_its_teacher_has_nothing_to_learn(beta):
    """Loss and gradient are zero within rounding."""
    student, _, targets = drawn(seed=3)
    at = student.clone().requires_grad_()
    loss, by = learned(summed_divergence(at, student, targets, beta=beta).loss, at)
    assert loss == pytest.approx(0, abs=1e-4)
    assert float(by.abs().max()) < 1e-6


def objective(**settings):
    return Distillation(name="distillation", **{"chunk_tokens": 7, **settings})


def passed(dtype=torch.float32):
    """Pass a micro-batch of 40 positions; the teacher's hidden state is wider."""
    generator = torch.Generator().manual_seed(4)
    _, _, targets = drawn()
    hidden, theirs = (torch.randn(40, width, generator=generator).to(dtype) for width in (16, 24))
    heads = [torch.randn(width, 97, generator=generator).to(dtype) for width in (16, 24)]
    heads[0].requires_grad_()
    hidden.requires_grad_()
    batch = SimpleNamespace(targets_M=targets, extra={})
    teacher = Passed(batch, theirs, lambda states: (states @ heads[1]).detach())
    return Passed(batch, hidden, lambda states: states @ heads[0], teacher), hidden, heads


@pytest.mark.parametrize("chunk_tokens", [1, 7, 40, 64])
def test_chunks_change_nothing(chunk_tokens):
    """Gradients of hidden states and head equal those of torch without chunks."""
    at, hidden, heads = passed()
    found = objective(chunk_tokens=chunk_tokens, beta=0.5, ce_weight=0.2).loss(at)
    (found.total * 3).backward()
    mine = [hidden.grad.clone(), heads[0].grad.clone()]
    logits, teacher = hidden.double() @ heads[0].double(), at.reference.head(at.reference.hidden_MD)
    q, p = torch.softmax(logits, 1), torch.softmax(teacher.double(), 1)
    m = (p + q) / 2
    divergence = ((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2
    nll = cross_entropy(logits, at.batch.targets_M, reduction="sum")
    loss = 0.8 * divergence + 0.2 * nll
    assert float(found.total.detach()) == pytest.approx(float(loss.detach()), rel=CLOSE)
    assert found.count == 40
    for one, expected in zip(mine, torch.autograd.grad(loss * 3, [hidden, heads[0]]), strict=True):
        scale = float(expected.abs().max())
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=CLOSE * scale)


def known(teacher, targets, k, temperature):
    """Return the stored values of a teacher with these logits."""
    batch = SimpleNamespace(targets_M=targets)
    at = Passed(batch, teacher, lambda states: states)
    return top_tokens(at, k, chunk_tokens=7, temperature=temperature)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [1, 5, 90])
def test_of_top_tokens_all_others_are_one_outcome(beta, k):
    """The oracle is torch in float64 on K + 1 summed probabilities."""
    temperature, ce_weight = 2.0, 0.3
    student, teacher, targets = drawn(seed=5)
    wide = student.double().requires_grad_()
    q, p = (torch.softmax(one.double() / temperature, dim=1) for one in (wide, teacher))
    order = torch.argsort(teacher, dim=1, descending=True)
    q, p = (
        torch.cat([one.gather(1, order[:, :k]), one.gather(1, order[:, k:]).sum(1)[:, None]], 1)
        for one in (q, p)
    )
    m = beta * p + (1 - beta) * q
    expected = {0.0: (p * (p / q).log()).sum(), 1.0: (q * (q / p).log()).sum()}.get(
        beta, beta * (p * (p / m).log()).sum() + (1 - beta) * (q * (q / m).log()).sum()
    )
    nll = cross_entropy(wide, targets, reduction="sum")
    loss, expected_by = learned((1 - ce_weight) * expected + ce_weight * nll, wide)
    at = student.clone().requires_grad_()
    found = summed_divergence(
        at,
        known(teacher, targets, k, temperature),
        targets,
        beta=beta,
        temperature=temperature,
        ce_weight=ce_weight,
    )
    mine, by = learned(found.loss, at)
    assert mine == pytest.approx(loss, rel=CLOSE)
    scale = float(expected_by.abs().max())
    torch.testing.assert_close(by.double(), expected_by, rtol=CLOSE, atol=CLOSE * scale)
    of_teacher = cross_entropy(teacher.double(), targets, reduction="sum")
    assert float(found.teacher_nll) == pytest.approx(float(of_teacher), rel=CLOSE)


@pytest.mark.parametrize("beta", BETAS)
def test_all_but_one_token_are_the_whole_teacher(beta, monkeypatch):
    """With all tokens it equals TRL's GKD loss; with fewer the divergence is smaller."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    student, teacher, targets = drawn(seed=6)
    theirs = GKDTrainer.generalized_jsd_loss(
        student[None], teacher[None], targets[None], beta=beta, temperature=0.5
    )
    found = [
        float(
            summed_divergence(
                student, known(teacher, targets, k, 0.5), targets, beta=beta, temperature=0.5
            ).divergence
        )
        / len(targets)
        for k in (2, 20, 96)
    ]
    assert found[2] == pytest.approx(float(theirs), rel=CLOSE)
    assert found[0] < found[1] < found[2] * (1 + CLOSE)


def test_validation_is_the_cross_entropy():
    """Validation is as without a teacher, and the divergence is a metric."""
    at, *_ = passed()
    with torch.no_grad():
        found = objective(ce_weight=0.5, temperature=2.0).loss(at)
        expected = CrossEntropy("assistant", 7).loss(at)
    assert float(found.total.detach()) == pytest.approx(float(expected.total), rel=1e-6)
    assert not found.total.requires_grad
    assert float(found.metrics["divergence"]) > 1


def test_bf16_logits_are_computed_in_f32():
    """The sum is that of the rounded logits; the gradient has their dtype."""
    student, teacher, targets = (
        one.bfloat16() if one.is_floating_point() else one for one in drawn()
    )
    at = student.clone().requires_grad_()
    loss, by = learned(summed_divergence(at, teacher, targets, beta=0.0).loss, at)
    wide = summed_divergence(student.float(), teacher.float(), targets, beta=0.0).loss
    assert loss == pytest.approx(float(wide), rel=1e-6)
    assert by.dtype == torch.bfloat16


def test_hidden_states_differ_by_torchs_mean_squared_error():
    """The sum over layers is added with its weight, in training only."""
    at, *_ = passed()
    generator = torch.Generator().manual_seed(8)
    ours, theirs = (torch.randn(2, 40, 16, generator=generator) for _ in range(2))
    ours.requires_grad_()
    with_layers = replace(
        at, layers=tuple(ours), reference=replace(at.reference, layers=tuple(theirs))
    )
    expected = sum(mse_loss(one, other) for one, other in zip(ours, theirs, strict=True))
    found = objective(hidden_weight=0.3).loss(with_layers)
    assert float(found.metrics["hidden_mse"]) / 40 == pytest.approx(
        float(expected.detach()), rel=CLOSE
    )
    plain = objective().loss(at)
    added = float(found.total.detach()) - float(plain.total.detach())
    assert added / 40 == pytest.approx(0.3 * float(expected.detach()), rel=1e-4)
    (mine,) = torch.autograd.grad(found.total, ours)
    (by,) = torch.autograd.grad(0.3 * 40 * expected, ours)
    torch.testing.assert_close(mine, by, rtol=CLOSE, atol=CLOSE * float(by.abs().max()))
    with torch.no_grad():
        assert float(objective(hidden_weight=0.3).loss(with_layers).total) == pytest.approx(
            float(objective().loss(at).total), rel=1e-6
        )


@pytest.fixture(scope="module")
def teacher_directory(tmp_path_factory):
    """Save a wider and deeper model with the tiny model's tokenizer."""
    return model_directory(tmp_path_factory.mktemp("teacher"), hidden_size=128, init_seed=7)


@pytest.mark.parametrize("packing", [True, False])
def test_loss_and_gradient_are_those_of_two_plain_models(
    packing, tiny_config, tiny_base, teacher_directory, monkeypatch
):
    """The oracle passes single documents through transformers' models and TRL's loss."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from transformers import AutoModelForCausalLM
    from trl.experimental.gkd import GKDTrainer

    config, backend, module = beside(tiny_config, tiny_base, teacher_directory)
    documents, (batch,) = batches_of(config, tiny_base, [range(4)], packing=packing)
    _, found = module.passed(batch)
    found.total.backward()

    student = merged_student(tiny_base, backend)
    teacher = AutoModelForCausalLM.from_pretrained(teacher_directory, dtype=torch.float32)
    total = 0.0
    for start, end in zip(documents.offsets[:-1], documents.offsets[1:], strict=True):
        ids = torch.from_numpy(documents.ids[start:end].astype("int64"))[None]
        learned = torch.from_numpy(documents.supervised[start:end].copy())[None]
        with torch.no_grad():
            theirs = teacher(input_ids=ids).logits[:, :-1]
        total += GKDTrainer.generalized_jsd_loss(
            student(input_ids=ids).logits[:, :-1],
            theirs,
            labels=ids.where(learned, -100)[:, 1:],
            beta=0.3,
            num_items_in_batch=1,
        )
    assert float(found.total.detach()) == pytest.approx(float(total.detach()), rel=CLOSE)
    total.backward()
    for mine, expected in gradients_of_b(backend, student):
        assert float((mine - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    ("depth", "layers", "counterparts", "checkpointing"),
    [
        (2, None, {1: 1, 2: 2}, "off"),
        (2, [1], {1: 1}, "on"),
        (4, None, {1: 2, 2: 4}, "on"),
        (4, [1], {1: 2}, "off"),
    ],
)
def test_hidden_states_are_compared_as_transformers_own(
    packing, depth, layers, counterparts, checkpointing, tiny_config, tiny_base, tmp_path
):
    """Loss and gradient agree for all or some layers, with a deeper teacher, in chunks or whole.

    The oracle passes each document alone through plain models with `output_hidden_states`.
    """
    from transformers import AutoModelForCausalLM

    place = model_directory(tmp_path / "deep", num_hidden_layers=depth, init_seed=7)
    words = ["objective.hidden_weight=0.7", f"model.gradient_checkpointing={checkpointing}"]
    words += [f"objective.hidden_layers={layers}"] if layers else []
    config, backend, module = beside(tiny_config, tiny_base, place, *words)
    student = merged_student(tiny_base, backend)
    teacher = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    documents, whole = batches_of(config, tiny_base, [range(4)], packing=packing)
    _, parts = batches_of(config, tiny_base, [range(1), range(1, 4)], packing=packing)
    found = []
    for batches in (whole, parts):
        backend.zero_grad()
        summed = 0.0
        for batch in batches:
            passed, loss = module.passed(batch)
            alone = objective(beta=0.3).loss(replace(passed, layers=()))
            (loss.total - alone.total).backward()
            summed += float(loss.metrics["hidden_mse"])
        found.append((summed, _by_b(backend)))
    total = 0.0
    for start, end in zip(documents.offsets[:-1], documents.offsets[1:], strict=True):
        ids = torch.from_numpy(documents.ids[start:end].astype("int64"))[None]
        predict = torch.from_numpy(documents.supervised[start:end].copy()).nonzero()[:, 0] - 1
        ours = student(input_ids=ids, output_hidden_states=True).hidden_states
        with torch.no_grad():
            theirs = teacher(input_ids=ids, output_hidden_states=True).hidden_states
        for one, other in counterparts.items():
            total += len(predict) * mse_loss(ours[one][0, predict], theirs[other][0, predict])
    (0.7 * total).backward()
    expected_by = [expected for _, expected in gradients_of_b(backend, student)]
    for summed, by in found:
        assert summed == pytest.approx(float(total.detach()), rel=CLOSE)
        for mine, expected in zip(by, expected_by, strict=True):
            assert float((mine - expected).norm()) <= CLOSE * float(expected.norm())


def test_code_that_keeps_its_hidden_states_is_refused(tiny_base):
    """The error names the model; other layers than the named ones would be compared."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_base.directory, dtype=torch.float32)
    model.config.num_hidden_layers = 3  # the code returns two
    batch = SimpleNamespace(
        documents=None,
        input_ids_BT=torch.arange(5, 20)[None],
        attention_mask_BT=torch.ones(1, 15),
        predict_M=torch.arange(3),
    )
    model.model.layers = model.model.layers[:2]
    with pytest.raises(ModelFileError, match="the hidden states after each of its layers"):
        layer_states(model, batch, [1])


def beside(tiny_config, tiny_base, teacher_directory, *more):
    """Return a float32 student with a non-zero adapter in a module with its teacher."""
    words = ("backend=lora", "quant=none", "quant.compute_dtype=f32", "lora.dropout=0")
    named = f"objective.teacher={teacher_directory}"
    config = tiny_config("objective=distillation", *words, named, "objective.beta=0.3", *more)
    backend = fill_b(build_backend(config, tiny_base))
    module = TrainingModule(config, backend, objective_of(config), total_steps=1).train()
    named_model = teacher_of(config.objective, config.model)
    module.teacher = Teacher(config, resolve(named_model, None), torch.device("cpu"))
    return config, backend, module


def batches_of(config, tiny_base, parts, *, packing):
    """Return four documents, and a micro-batch of each part of them."""
    pairs = [
        TrainingPair(prompt=f"row {i}", response="x" * (3 + 5 * i), group=f"g{i}") for i in range(4)
    ]
    tokenizer = load_tokenizer(config.tokenizer, tiny_base.directory)
    documents = encode(pairs, tokenizer, labelling_of(config))
    return documents, [
        packed_batch(documents, [part], 0, multiple=32)
        if packing
        else padded_batch(documents, [part], 0, pad_id=tokenizer.pad_id)
        for part in parts
    ]


def merged_student(tiny_base, backend):
    """Return transformers' model with the adapter merged."""
    from transformers import AutoModelForCausalLM

    student = AutoModelForCausalLM.from_pretrained(tiny_base.directory, dtype=torch.float32)
    for name in backend.layers:
        weight = student.get_submodule(_path(backend, name)).weight
        weight.data = backend.merged(name, weight.data)
        weight.requires_grad_()
    return student


def _by_b(backend):
    tensors = (backend.method.parameters(layer)["lora_b"] for layer in backend.layers.values())
    return [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in tensors]


def gradients_of_b(backend, student):
    """Return our gradients of B, and those of the merged model: s · dW Aᵀ."""
    for mine, (name, layer) in zip(_by_b(backend), backend.layers.items(), strict=True):
        weight = student.get_submodule(_path(backend, name)).weight
        by_weight = torch.zeros_like(weight) if weight.grad is None else weight.grad
        a = backend.method.parameters(layer)["lora_a"].detach()
        yield mine, backend.method.scale(layer) * by_weight @ a.T


def _path(backend, name):
    return next(one.path for one in backend.modules_chosen if one.logical == name)


def test_the_usual_teacher_is_the_base_before_quantization(tiny_config, tiny_base):
    """Its logits equal transformers'; the student's NF4 base has others."""
    from transformers import AutoModelForCausalLM

    config = tiny_config("objective=distillation", "quant.compute_dtype=f32")
    teacher = Teacher(config, tiny_base, torch.device("cpu"))
    plain = AutoModelForCausalLM.from_pretrained(tiny_base.directory, dtype=torch.float32)
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        expected = plain(input_ids=ids).logits[0]
        found = teacher.causal_lm(input_ids=ids).logits[0]
        quantized = load_base(config, tiny_base, torch.device("cpu"))(input_ids=ids).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert float((quantized - expected).norm() / expected.norm()) > 0.01
    assert not any(one.requires_grad for one in teacher.causal_lm.parameters())
