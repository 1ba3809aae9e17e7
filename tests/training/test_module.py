"""The optimizer step through a real Trainer, compared with sums computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from device_reads import Reads
from lightning import Callback, Trainer
from torch.nn import functional

from mens_exp.data.batch import packed_batch, padded_batch
from mens_exp.data.stream import MicroBatches
from mens_exp.errors import DataError, MensError
from mens_exp.objective.causal import CrossEntropy, LossSum
from mens_exp.training.build import AtomicCheckpointIO, lightning_quiet
from mens_exp.training.module import TrainingModule

EXACT = (
    "quant.compute_dtype=f32",
    "lora.dropout=0",
    "schedule=constant",
    "schedule.warmup_steps=0",
)
LENGTHS, SUPERVISED = [9, 21, 12, 16, 7, 14, 25, 10], [1, 14, 3, 8, 2, 0, 20, 5]
PEAK = 2e-3


@pytest.fixture(autouse=True)
def own_determinism():
    """Restore the global switch that Trainer(deterministic=True) sets."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def documents(random_documents):
    return random_documents(LENGTHS, SUPERVISED)


class Watch(Callback):
    """Keeps the metrics and the gradients of every optimizer step."""

    def __init__(self):
        self.metrics = []
        self.gradients = []
        self.validations = []

    def on_train_start(self, trainer, pl_module):
        def keep(*_):
            parameters = pl_module.backend.trainable().items()
            self.gradients.append({name: p.grad.clone() for name, p in parameters})

        trainer.optimizers[0].register_step_post_hook(
            keep
        )  # this hook runs before the backward pass

    def on_train_batch_end(self, trainer, pl_module, *_):
        if pl_module.at_step_boundary:
            self.metrics.append(dict(pl_module.step_metrics))

    def on_validation_end(self, trainer, pl_module):
        self.validations.append(dict(pl_module.validation))


@pytest.fixture
def fit(
    tiny_backend,
    tiny_config,
    documents,
    tmp_path,
):
    """Train tiny_llama on eight documents of different lengths.

    Of the `other` options, `total_steps` is what the schedule runs over, `resume` a checkpoint,
    `encoded` other documents, `live` whether B starts filled, and `of_documents` how many of
    them validation tells apart.
    """

    def fitted(
        *overrides,
        steps=1,
        accumulate=4,
        size=1,
        clip=1e9,
        validate_every=None,
        **other,
    ):
        config, watch = tiny_config(*EXACT, *overrides), Watch()
        backend = tiny_backend(*EXACT, *overrides, live=other.get("live", True))
        module = TrainingModule(
            config,
            backend,
            other.get("objective", CrossEntropy("causal", 8)),
            total_steps=other.get("total_steps", steps),
        ).train()
        module.validation_documents = other.get("of_documents", 0)
        trainer = Trainer(
            accelerator="cpu",
            max_steps=steps,
            max_epochs=-1,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=clip,
            val_check_interval=validate_every or steps * accumulate + 1,
            check_val_every_n_epoch=None,
            deterministic=True,
            callbacks=[watch, *other.get("callbacks", [])],
            plugins=[AtomicCheckpointIO()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=tmp_path,
        )
        encoded, resume = other.get("encoded", documents), other.get("resume")
        train = stream(encoded, size=size, total=steps * accumulate, seed=0)
        validation = stream(encoded, size=3, total=3, seed=None)
        with lightning_quiet():
            trainer.fit(module, train, validation, ckpt_path=resume, weights_only=bool(resume))
        return module, watch, trainer

    return fitted


def stream(encoded, *, size, total, seed):
    return MicroBatches(
        encoded,
        [[i] for i in range(len(encoded))],
        micro_batch_size=size,
        total=total,
        seed=seed,
        packing=True,
        pad_id=0,
    )


def mean_loss(backend, batch):
    """Return the mean loss over supervised tokens from all logits at once."""
    return functional.cross_entropy(backend.head(backend(batch)), batch.targets_M)


def tensors_of(module):
    return {name: p.detach().clone() for name, p in module.backend.trainable().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


Fit = "Callable[..., tuple[TrainingModule, Watch, Trainer]]"


# The loss of a step.


def test_a_step_s_loss_and_gradient_are_those_of_the_mean_over_its_tokens(
    fit, tiny_backend, documents
):
    """Four uneven micro-batches equal one plain mean over all their tokens in float32."""
    _, watch, _ = fit()
    order = [stream(documents, size=1, total=4, seed=0)._block_at(i) for i in range(4)]
    reference = tiny_backend(*EXACT, live=True).train()
    loss = mean_loss(reference, packed_batch(documents, [order], index=0))
    loss.backward()
    assert len({SUPERVISED[i] for i in order}) > 2, "ragged, or a mean of means would do"
    assert watch.metrics[0]["train/loss"] == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in reference.trainable().items():
        assert torch.allclose(watch.gradients[0][name], parameter.grad, rtol=1e-4, atol=1e-7), name
    norm = torch.linalg.vector_norm(
        torch.stack([p.grad.norm() for p in reference.trainable().values()])
    )
    assert watch.metrics[0]["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize(("accumulate", "size"), [(2, 2), (1, 4)])
def test_four_micro_batches_of_one_are_one_of_four(fit, accumulate, size):
    """Over two steps on uneven documents, losses and gradients agree to float32 tolerance."""
    _, apart, _ = fit(steps=2, accumulate=4, size=1)
    _, together, _ = fit(steps=2, accumulate=accumulate, size=size)
    for step in (0, 1):
        first, second = apart.metrics[step], together.metrics[step]
        assert first["train/loss"] == pytest.approx(second["train/loss"], rel=1e-6)
        assert first["data/supervised_tokens"] == second["data/supervised_tokens"]
        for name, gradient in apart.gradients[step].items():
            other = together.gradients[step][name]
            assert torch.allclose(gradient, other, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize(("accumulate", "size"), [(4, 1), (1, 4)])
def test_smoothing_and_z_loss_are_means_over_the_step_s_tokens(
    fit, tiny_backend, documents, accumulate, size
):
    """The oracle is torch's loss on all logits; validation uses the plain loss."""
    own = CrossEntropy("causal", 8, label_smoothing=0.1, z_loss=0.02)
    _, watch, _ = fit(objective=own, accumulate=accumulate, size=size)
    order = [stream(documents, size=1, total=4, seed=0)._block_at(i) for i in range(4)]
    reference = tiny_backend(*EXACT, live=True).train()
    batch = packed_batch(documents, [order], index=0)
    logits = reference.head(reference(batch))
    smoothed = functional.cross_entropy(logits, batch.targets_M, label_smoothing=0.1)
    loss = smoothed + 0.02 * torch.logsumexp(logits, dim=1).square().mean()
    loss.backward()
    assert watch.metrics[0]["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in reference.trainable().items():
        assert torch.allclose(watch.gradients[0][name], parameter.grad, rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize(("accumulate", "size"), [(4, 1), (2, 2), (1, 4)])
def test_a_weighted_step_is_a_mean_over_the_weights_of_its_tokens(
    fit, tiny_backend, documents, accumulate, size
):
    """The loss is Σ weight · loss / Σ weight over micro-batches; validation has no weights."""
    weights = np.repeat([0.5, 2, 0.25, 3, 1, 0.1, 1.5, 4], LENGTHS).astype(np.float32)
    weighted = replace(documents, extra={"weight": weights})
    module, watch, _ = fit(
        encoded=weighted, accumulate=accumulate, size=size, validate_every=accumulate
    )
    order = [stream(documents, size=1, total=4, seed=0)._block_at(i) for i in range(4)]
    reference = tiny_backend(*EXACT, live=True).train()
    batch = packed_batch(weighted, [order], index=0)
    own_M = batch.extra["weight"]
    assert len(set(own_M.tolist())) > 2
    losses_M = functional.cross_entropy(
        reference.head(reference(batch)), batch.targets_M, reduction="none"
    )
    loss = (losses_M * own_M).sum() / own_M.sum()
    loss.backward()
    assert watch.metrics[0]["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert watch.metrics[0]["data/supervised_tokens"] == len(batch.targets_M)
    for name, parameter in reference.trainable().items():
        assert torch.allclose(watch.gradients[0][name], parameter.grad, rtol=1e-4, atol=1e-7), name
    everything = packed_batch(documents, [list(range(8))], index=0)
    module.eval()
    with torch.no_grad():
        plain = mean_loss(module.backend, everything)
    assert watch.validations[-1]["val/loss"] == pytest.approx(plain.item(), rel=1e-6)


@pytest.mark.parametrize("accumulate", [3, 7])
def test_an_accumulation_that_no_float_divides_by_changes_nothing(fit, accumulate):
    """Lightning's division and our multiplication cancel exactly."""
    _, apart, _ = fit(accumulate=accumulate, size=1)
    _, together, _ = fit(accumulate=1, size=accumulate)
    for name, gradient in apart.gradients[0].items():
        assert torch.allclose(gradient, together.gradients[0][name], rtol=1e-4, atol=1e-6), name


def test_a_step_reads_as_many_numbers_however_many_micro_batches_it_has(fit):
    """Reading the loss in every micro-batch would synchronize with the GPU each time."""
    counts = []
    for accumulate in (1, 4):
        with Reads() as reads:
            fit(steps=2, accumulate=accumulate)
        counts.append(reads.count)
    assert counts[0] == counts[1]


def test_a_micro_batch_without_supervision_adds_nothing(fit):
    """Two epochs of eight documents, one of them unsupervised, count 53 tokens each."""
    module, watch, _ = fit(steps=4)
    assert watch.metrics[1]["data/supervised_tokens"] == sum(SUPERVISED) == 53
    assert watch.metrics[3]["data/supervised_tokens"] == 106
    assert watch.metrics[3]["data/tokens"] == 2 * sum(LENGTHS)
    assert (module.tokens, module.supervised_tokens) == (2 * sum(LENGTHS), 106)


def test_a_step_without_supervision_is_refused(fit, random_documents):
    """It would divide by zero; the data error names the step."""
    with pytest.raises(DataError, match=r"no supervised token.*step 0"):
        fit(encoded=random_documents([5, 6, 7], [0, 0, 0]))


# Clipping.


def test_clipping_comes_after_the_division(fit):
    """A limit between the norm of the mean and that of the sum clips nothing."""
    _, free, _ = fit()
    norm, count = free.metrics[0]["train/grad_norm"], free.metrics[0]["data/supervised_tokens"]
    assert count > 4
    _, loose, _ = fit(clip=norm * 2)
    assert same(loose.gradients[0], free.gradients[0])


def test_clipping_scales_the_whole_gradient_down_to_its_limit(fit):
    """With half the norm as limit, the optimizer sees the limit and the record the norm before."""
    _, free, _ = fit()
    norm = free.metrics[0]["train/grad_norm"]
    _, tight, _ = fit(clip=norm / 2)
    flat = torch.cat([gradient.flatten() for gradient in tight.gradients[0].values()])
    assert float(flat.norm()) == pytest.approx(norm / 2, rel=1e-4)
    assert tight.metrics[0]["train/grad_norm"] == pytest.approx(norm, rel=1e-6)


# The learning rate.


def test_the_first_step_of_a_warm_up_moves(fit):
    """It has a quarter of the peak rate, and AdamW's first step has the size of its rate."""
    module, watch, _ = fit("schedule.warmup_steps=4", live=False)
    assert watch.metrics[0]["optim/lr"] == pytest.approx(PEAK / 4, abs=1e-15)
    moved = max(
        float(p.detach().abs().max())
        for n, p in module.backend.trainable().items()
        if n.endswith("b")
    )
    assert moved == pytest.approx(PEAK / 4, rel=1e-3)


def test_every_step_has_the_rate_of_the_schedule(fit):
    """Two warm-up and four cosine steps agree to 1e-12; micro-batches do not advance the rate."""
    _, watch, _ = fit("schedule=cosine", "schedule.warmup_steps=2", steps=6, accumulate=2)
    root = 2**0.5 / 2
    table = [0.5, 1, 1, (1 + root) / 2, 0.5, (1 - root) / 2]
    assert [m["optim/lr"] / PEAK for m in watch.metrics] == pytest.approx(table, abs=1e-12)


# Validation.


def test_training_goes_on_after_a_validation_as_if_there_had_been_none(fit):
    """In bf16 with dropout, validating even in mid-step, the adapter is bitwise equal."""
    real = ("quant.compute_dtype=bf16", "lora.dropout=0.1")
    plain, _, _ = fit(*real, steps=3)
    checked, watch, _ = fit(*real, steps=3, validate_every=2)
    assert len(watch.validations) == 6
    assert same(tensors_of(plain), tensors_of(checked))


def test_every_matrix_gets_gradients_before_and_after_a_validation(fit):
    """Over three steps with validations in between, no gradient is zero."""
    _, watch, _ = fit("quant.compute_dtype=bf16", steps=3, validate_every=4)
    assert len(watch.gradients) == 3
    for gradients in watch.gradients:
        assert len(gradients) == 28
        assert all(bool(gradient.any()) for gradient in gradients.values())


def test_validation_loss_is_the_mean_over_all_supervised_tokens(fit, tiny_backend, documents):
    """Three uneven batches equal one plain mean."""
    _, _, trainer = fit()
    module = trainer.lightning_module
    with lightning_quiet():
        trainer.validate(module, stream(documents, size=3, total=3, seed=None), verbose=False)
    batch = packed_batch(documents, [list(range(8))], index=0)
    module.eval()
    with torch.no_grad():
        expected = mean_loss(module.backend, batch)
    assert module.validation["val/loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert module.validation["val/supervised_tokens"] == 53
    assert "val/bits_per_byte" not in module.validation  # the number of bytes is unknown
    module.validated_bytes = 106
    with lightning_quiet():
        trainer.validate(module, stream(documents, size=3, total=3, seed=None), verbose=False)
    bits = expected.item() / 2 / math.log(2)
    assert module.validation["val/bits_per_byte"] == pytest.approx(bits, rel=1e-6)


def test_as_base_validates_without_the_adapter(fit, tiny_backend, documents):
    """Inside the context the loss is that of a fresh graph, and afterwards the adapter's."""
    _, _, trainer = fit()
    module = trainer.lightning_module

    def validated():
        with lightning_quiet():
            trainer.validate(module, stream(documents, size=8, total=1, seed=None), verbose=False)
        return module.validation["val/loss"]

    fresh = tiny_backend(*EXACT).eval()
    with torch.no_grad():
        base = mean_loss(fresh, packed_batch(documents, [list(range(8))], index=0)).item()
    tuned = validated()
    with module.as_base():
        assert module.condition == "base"
        assert validated() == pytest.approx(base, rel=1e-6)
    assert module.condition == "tuned"
    assert validated() == tuned != pytest.approx(base, rel=1e-3)


def test_as_base_ends_with_an_error_too(tiny_backend, tiny_config):
    """After a failed validation the run is not left labelled as the base."""
    module = TrainingModule(
        tiny_config(*EXACT), tiny_backend(*EXACT), CrossEntropy("causal", 8), total_steps=1
    )

    def fail():
        with module.as_base():
            raise OSError("lost")

    with pytest.raises(OSError, match="lost"):
        fail()
    assert module.condition == "tuned"


# Checkpoints.


def test_a_graph_stays_where_it_is_when_a_trainer_is_done(
    tiny_config,
):
    """Lightning's strategies end with `cpu()`, after which scoring would run on the CPU.

    Nothing can be copied out of the meta device: whoever moves it fails.
    """
    graph = torch.nn.Linear(2, 2, device="meta")
    objective = CrossEntropy(name="ce", chunk_tokens=16)
    module = TrainingModule(tiny_config(), graph, objective, total_steps=1)
    assert module.cpu() is module
    assert {p.device.type for p in module.parameters()} == {"meta"}


def test_a_checkpoint_holds_the_adapter_and_its_state_and_no_base_weight(fit, tmp_path):
    """The size is three times the adapter (itself and two moments) plus under 64 KiB."""
    module, _, trainer = fit(steps=2)
    path = tmp_path / "step.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    adapter = tensors_of(module)
    assert saved["state_dict"] == {}
    assert same(saved["adapter"], adapter)
    assert len(saved["optimizer_states"][0]["state"]) == len(adapter)
    size = sum(values.numel() * 4 for values in adapter.values())
    assert 3 * size < path.stat().st_size < 3 * size + (64 << 10)


@pytest.mark.parametrize(
    "settings",
    [
        ["schedule=cosine"],
        ["schedule=constant"],
        ["optim.loraplus_lr_ratio=16"],
        ["optim=muon"],
        ["optim=schedule_free"],
        ["optim=prodigy"],
        ["optim=adafactor"],
        ["optim=sgd"],
    ],
    ids=lambda settings: settings[0],
)
def test_a_run_resumed_from_a_checkpoint_is_the_run_never_stopped(fit, tmp_path, settings):
    """Resumed in mid-epoch in bf16 with dropout, it agrees bit for bit."""
    real = ("quant.compute_dtype=bf16", "lora.dropout=0.1", *settings)
    whole, watch, _ = fit(*real, steps=5, accumulate=3)
    _, _, trainer = fit(*real, steps=2, accumulate=3, total_steps=5)
    trainer.save_checkpoint(tmp_path / "step.ckpt")
    resumed, again, _ = fit(*real, steps=5, accumulate=3, resume=tmp_path / "step.ckpt")
    assert same(tensors_of(resumed), tensors_of(whole))
    assert again.metrics == watch.metrics[2:]
    assert resumed.tokens == whole.tokens


def test_the_rate_of_prodigy_is_its_estimate(fit):
    """The recorded rate is that of the step taken; before the first it is `d0`."""
    _, watch, trainer = fit("optim=prodigy", "optim.d0=1e-4", "schedule=constant", steps=6)
    rates = [metrics["optim/lr"] for metrics in watch.metrics]
    assert rates[0] == pytest.approx(1e-4)
    assert rates == sorted(rates)
    assert trainer.optimizers[0].param_groups[0]["d"] >= rates[-1]


FREE = ("optim=schedule_free", "optim.lr=1e-2")


class Points(Callback):
    """Keeps the adapter at every training pass and wherever it is evaluated."""

    def __init__(self):
        self.learned, self.seen = [], []

    def on_before_backward(self, trainer, pl_module, loss):
        self.learned.append(tensors_of(pl_module))

    def on_validation_batch_start(self, trainer, pl_module, *_):
        self.seen.append(tensors_of(pl_module))

    on_train_batch_end = on_validation_batch_start


def test_schedule_free_steps_are_those_of_a_loop_by_hand(tiny_backend, tiny_config, documents, fit):
    """Three steps of one micro-batch in float32 agree within a thousandth of a step."""
    from schedulefree import AdamWScheduleFree

    module, _, _ = fit(*FREE, steps=3, accumulate=1)
    backend = tiny_backend(*EXACT, *FREE, live=True).train()
    optimizer = AdamWScheduleFree([*backend.trainable().values()], lr=1e-2)
    optimizer.train()
    for batch in stream(documents, size=1, total=3, seed=0):
        optimizer.zero_grad()
        backend.begin(batch.index)
        logits = backend.head(backend(batch))
        functional.cross_entropy(logits, batch.targets_M).backward()
        optimizer.step()
    optimizer.eval()
    for name, values in tensors_of(module).items():
        assert (values - backend.trainable()[name]).abs().max() < 1e-5, name


def test_what_looks_at_a_schedule_free_run_sees_the_average(fit):
    """Micro-batch ends and validation see the average and not the point being trained."""
    points = Points()
    module, _, trainer = fit(*FREE, steps=4, accumulate=2, validate_every=4, callbacks=[points])
    optimizer = trainer.optimizers[0]
    assert same(points.seen[-1], tensors_of(module))
    assert not same(points.learned[-1], points.seen[-1])
    # Between two steps the training point and the average occur twice each, unchanged.
    assert same(points.learned[-1], points.learned[-2])
    for name, average in tensors_of(module).items():
        state = optimizer.state[module.backend.trainable()[name]]
        by_hand = state["y"].double() + (1 - 1 / 0.9) * (state["z"].double() - state["y"].double())
        assert (average - by_hand).abs().max() < 1e-7


def test_a_schedule_free_run_writes_the_adapter_that_was_validated(fit, tiny_backend, documents):
    """The written tensors, loaded into a fresh graph, have the last validation's loss."""
    module, watch, _ = fit(*FREE, steps=3, accumulate=1)
    _, written = module.backend.adapter(module.config)
    fresh = tiny_backend(*EXACT, *FREE)
    fresh.load_adapter(written)
    with torch.no_grad():
        everything = packed_batch(documents, [list(range(len(documents)))], index=0)
        loss = mean_loss(fresh.eval(), everything).item()
    assert watch.validations[-1]["val/loss"] == pytest.approx(loss, rel=1e-6)


def test_more_validations_change_nothing_of_a_schedule_free_run(fit):
    """Switching to the average and back is exact."""
    seldom, _, _ = fit(*FREE, steps=4, accumulate=1)
    often, watch, _ = fit(*FREE, steps=4, accumulate=1, validate_every=1)
    assert len(watch.validations) >= 4
    assert same(tensors_of(seldom), tensors_of(often))


@pytest.mark.parametrize("validate_every", [None, 2])
def test_noise_goes_on_where_a_resumed_run_does(fit, tmp_path, validate_every):
    """Noise depends only on the micro-batch's number; a validation does not change it."""
    noisy = ("objective.neftune_alpha=5", "lora.dropout=0.1")
    whole, _, _ = fit(*noisy, steps=3, accumulate=2)
    quiet, _, _ = fit("lora.dropout=0.1", steps=3, accumulate=2)
    assert not same(tensors_of(whole), tensors_of(quiet))
    _, _, trainer = fit(*noisy, steps=1, accumulate=2, total_steps=3)
    trainer.save_checkpoint(tmp_path / "step.ckpt")
    resumed, _, _ = fit(
        *noisy,
        steps=3,
        accumulate=2,
        resume=tmp_path / "step.ckpt",
        validate_every=validate_every,
    )
    assert same(tensors_of(resumed), tensors_of(whole))


def test_a_longer_schedule_takes_hold_at_the_first_resumed_step(fit, tmp_path):
    """With a linear schedule of 8 steps instead of 4, step 2 has the rate 1 - 2/8."""
    _, _, trainer = fit("schedule=linear", steps=2, total_steps=4)
    trainer.save_checkpoint(tmp_path / "step.ckpt")
    _, watch, _ = fit("schedule=linear", steps=4, total_steps=8, resume=tmp_path / "step.ckpt")
    found = [m["optim/lr"] / PEAK for m in watch.metrics]
    assert found == pytest.approx([1 - 2 / 8, 1 - 3 / 8], abs=1e-12)


def test_the_stream_stands_where_a_resumed_run_goes_on(fit):
    """After 2 steps of 3 micro-batches the next one is number 6."""
    _, _, trainer = fit(steps=2, accumulate=3)
    assert trainer.train_dataloader.state_dict() == {"position": 6}


# Metrics.


def test_an_undeclared_metric_is_refused(tiny_backend, tiny_config):
    """The error gives the nearest declared name."""
    module = TrainingModule(
        tiny_config(*EXACT), tiny_backend(*EXACT), CrossEntropy("causal", 8), total_steps=1
    )
    module.record("train/loss", 1.5)
    assert module.step_metrics == {"train/loss": 1.5}
    with pytest.raises(MensError, match="train/loss"):
        module.record("train/los", 1.5)


def test_a_step_is_pending_until_its_last_micro_batch(fit):
    """Metrics are summarized at optimizer steps, and the loss is reset with them."""
    module, _, _ = fit(steps=2)
    assert module.at_step_boundary
    assert module.pending_loss == 0.0


def test_validation_tells_the_loss_of_each_document(fit, documents):
    """The oracle is torch's own loss for each of eight documents; one has no supervision."""
    module, _, _ = fit(steps=2, of_documents=8)
    assert module.selected_validated is module.validated
    for number, (loss, tokens) in enumerate(module.validated.tolist()):
        assert tokens == SUPERVISED[number]
        if tokens:
            batch = packed_batch(documents, [[number]], index=0)
            with torch.no_grad():
                alone = mean_loss(module.backend, batch).item()
            assert loss / tokens == pytest.approx(alone, rel=1e-5)
    total, count = module.validated.sum(0).tolist()
    assert total / count == pytest.approx(module.validation["val/loss"], rel=1e-6)


def test_padded_batches_tell_the_same_documents_apart(documents):
    """A target belongs to the same document with padding as with packing."""
    packed, padded = (
        packed_batch(documents, [[3, 1], [6]], index=0),
        padded_batch(documents, [[3, 1], [6]], index=0, pad_id=0),
    )
    expected = [3] * SUPERVISED[3] + [1] * SUPERVISED[1] + [6] * SUPERVISED[6]
    assert packed.document_M.tolist() == padded.document_M.tolist() == expected


class TotalOnly:
    """A user's objective without losses of single tokens."""

    name = "own"

    def __call__(self, hidden_MD, targets_M, head):
        total = functional.cross_entropy(head(hidden_MD), targets_M, reduction="sum")
        return LossSum(total=total, count=len(targets_M))


def test_an_objective_without_token_losses_tells_no_documents(fit):
    """The validation loss is recorded without losses of single documents."""
    module, _, _ = fit(of_documents=8, objective=TotalOnly())
    assert module.validated is None
    assert module.selected[1] > 0
