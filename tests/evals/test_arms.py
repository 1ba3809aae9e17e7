from __future__ import annotations

from mens_exp.artifacts.manifest import Manifest
from mens_exp.evals.arms import Arm, Trial, unlike_losses


def arm_of(tokenizer, *, val=None, text_bytes=None, metrics=(), **objective):
    manifest = Manifest.__new__(Manifest)  # no other attribute is read
    manifest.results = {"val_text_bytes": text_bytes, "metrics": dict.fromkeys(metrics, 1.0)}
    hashes = {} if tokenizer is None else {"tokenizer_sha256": tokenizer}
    hashes |= {} if val is None else {"data.val_sha256": val}
    settings = {f"objective.{name}": value for name, value in objective.items()}
    trial = Trial(manifest=manifest, settings=settings, hashes=hashes)
    return Arm(name="arm", values={}, trials=[trial])


def test_losses_of_preferences_compare_arms_of_one_objective_with_the_same_settings():
    """With another beta, the loss of the same pairs is another metric."""
    told = {"name": "dpo", "labels": "dpo", "beta": 0.1, "loss": "sigmoid"}
    one = arm_of("a", **told, chunk_tokens=64)
    assert unlike_losses(one, arm_of("a", **told, chunk_tokens=8)) == {}
    for other in ({"beta": 0.2}, {"loss": "ipo"}, {"name": "cpo", "labels": "cpo"}):
        assert "val_loss" in unlike_losses(one, arm_of("a", **{**told, **other}))


def test_losses_in_nats_a_token_compare_arms_of_one_tokenizer():
    """Bits per byte compare two tokenizers; if none is recorded, both count as the same."""
    assert unlike_losses(arm_of("a"), arm_of("a")) == {}
    assert unlike_losses(arm_of(None), arm_of(None)) == {}
    assert list(unlike_losses(arm_of("a"), arm_of("b"))) == ["val_loss"]


def test_a_teacher_changes_training_alone():
    """Distillation validates with the same cross entropy as objective=assistant."""
    told = {"labels": "assistant", "turns": "all"}
    usual = arm_of("a", name="assistant", **told)
    assert unlike_losses(usual, arm_of("a", name="distillation", beta=0.5, **told)) == {}
    last = {**told, "turns": "last"}
    assert "val_loss" in unlike_losses(usual, arm_of("a", name="distillation", **last))


def test_losses_compare_arms_that_learn_the_same_tokens():
    """The chunk size of the logits does not change which tokens are supervised."""
    answers = arm_of("a", name="assistant", labels="assistant", turns="all", chunk_tokens=64)
    assert (
        unlike_losses(answers, arm_of("a", name="assistant", labels="assistant", turns="all")) == {}
    )
    for other in ({"turns": "last"}, {"labels": "causal"}, {"name": "mine"}):
        told = {"name": "assistant", "labels": "assistant", "turns": "all", **other}
        assert list(unlike_losses(answers, arm_of("a", **told))) == [
            "val_loss",
            "val_bits_per_byte",
        ]


def test_losses_compare_arms_that_validate_on_the_same_documents():
    """Other rows, or rows truncated by data.seq_len, are other text, whatever changed them."""
    of_pairs = ("val/reward_accuracy", "train/reward_accuracy")
    usual = arm_of("a", val="1", text_bytes=1000, metrics=of_pairs)
    assert unlike_losses(usual, arm_of("a", val="1", text_bytes=1000)) == {}
    found = unlike_losses(usual, arm_of("a", val="2", text_bytes=1000))
    assert list(found) == ["val_loss", "val_bits_per_byte", "val/reward_accuracy"]
    assert "data.val_path" in found["val_loss"]


def test_bits_per_byte_compare_two_tokenizers_on_the_same_text():
    """Samples of equal tokens may differ in bytes; a prepended space is not text."""
    usual = arm_of("a", val="1", text_bytes=1000)
    assert list(unlike_losses(usual, arm_of("b", val="2", text_bytes=1009))) == ["val_loss"]
    found = unlike_losses(usual, arm_of("b", val="2", text_bytes=2940))
    assert list(found) == ["val_loss", "val_bits_per_byte"]
    assert "1,000 and 2,940 bytes" in found["val_bits_per_byte"]


def test_divergences_compare_arms_of_one_teacher_and_one_divergence():
    """Forward and reverse KL are different metrics; neither changes the cross entropy."""
    told = {"name": "distillation", "labels": "assistant", "metrics": ["val/divergence"]}
    usual = arm_of("a", beta=0.0, temperature=1.0, **told)
    assert unlike_losses(usual, arm_of("a", beta=0.0, temperature=1.0, ce_weight=0.5, **told)) == {}
    for other in ({"beta": 1.0}, {"temperature": 2.0}, {"teacher": "./model"}):
        settings = {"beta": 0.0, "temperature": 1.0, **told, **other}
        assert "val/divergence" in unlike_losses(usual, arm_of("a", **settings))


def test_hidden_states_compare_arms_of_the_same_layers():
    """The sum over other layers is another metric; its weight in the loss does not matter."""
    told = {"name": "distillation", "labels": "assistant", "metrics": ["val/hidden_mse"]}
    usual = arm_of("a", hidden_weight=1.0, hidden_layers=[1], **told)
    assert unlike_losses(usual, arm_of("a", hidden_weight=9.0, hidden_layers=[1], **told)) == {}
    other = arm_of("a", hidden_weight=1.0, hidden_layers=[1, 2], **told)
    assert "val/hidden_mse" in unlike_losses(usual, other)


def test_margins_of_rewards_compare_arms_of_one_beta():
    """Reward margins scale with beta; the accuracy of the preferences does not."""
    told = {
        "name": "dpo",
        "labels": "dpo",
        "loss": "sigmoid",
        "metrics": [f"val/reward_{name}" for name in ("margin", "accuracy")],
    }
    found = unlike_losses(arm_of("a", beta=0.1, **told), arm_of("a", beta=0.5, **told))
    assert "val/reward_margin" in found
    assert "val/reward_accuracy" not in found
