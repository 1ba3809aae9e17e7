from __future__ import annotations

from mens_exp.artifacts.manifest import Manifest
from mens_exp.evals.arms import Arm, Trial, unlike_losses


def arm_of(tokenizer, **objective):
    manifest = Manifest.__new__(Manifest)  # nothing of it is asked
    hashes = {} if tokenizer is None else {"tokenizer_sha256": tokenizer}
    settings = {f"objective.{name}": value for name, value in objective.items()}
    trial = Trial(manifest=manifest, settings=settings, hashes=hashes)
    return Arm(name="arm", values={}, trials=[trial])


def test_losses_of_preferences_compare_arms_of_one_objective_with_the_same_settings():
    """Another beta is another loss of the same pairs."""
    told = {"name": "dpo", "labels": "dpo", "beta": 0.1, "loss": "sigmoid"}
    one = arm_of("a", **told, chunk_tokens=64)
    assert unlike_losses(one, arm_of("a", **told, chunk_tokens=8)) == {}
    for other in ({"beta": 0.2}, {"loss": "ipo"}, {"name": "cpo", "labels": "cpo"}):
        assert "val_loss" in unlike_losses(one, arm_of("a", **{**told, **other}))


def test_losses_in_nats_a_token_compare_arms_of_one_tokenizer():
    """Bits a byte compare those of two; where nobody recorded one, both are taken for the same."""
    assert unlike_losses(arm_of("a"), arm_of("a")) == {}
    assert unlike_losses(arm_of(None), arm_of(None)) == {}
    assert list(unlike_losses(arm_of("a"), arm_of("b"))) == ["val_loss"]


def test_a_teacher_changes_training_alone():
    """Distillation validates with the cross entropy of the tokens of objective=assistant."""
    told = {"labels": "assistant", "turns": "all"}
    usual = arm_of("a", name="assistant", **told)
    assert unlike_losses(usual, arm_of("a", name="distillation", beta=0.5, **told)) == {}
    last = {**told, "turns": "last"}
    assert "val_loss" in unlike_losses(usual, arm_of("a", name="distillation", **last))


def test_losses_compare_arms_that_learn_the_same_tokens():
    """How many logits exist at a time changes nothing of which tokens are learned."""
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
