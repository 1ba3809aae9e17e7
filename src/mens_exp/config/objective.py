"""Settings of `objective`, and the available objectives.

Nothing here imports torch. `_target_` names the loss class, whose arguments are described in
:mod:`mens_exp.objective.causal`. An :class:`mens_exp.config.objective_spec.ObjectiveSpec` describes
an objective; its ``documents`` names the object that builds documents from rows
(:mod:`mens_exp.rows.documents`).

An installed package adds an objective under the entry point group ``mens_exp.objectives``
(:mod:`mens_exp.config.plugins`). Its name is the value of `objective.name`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from mens_exp.config.fields import Effect, setting, unless, when
from mens_exp.config.objective_spec import (
    DISTILLATION_METRICS,
    GROUP_METRICS,
    LABEL_METRICS,
    PAIR_METRICS,
    PRECOMPUTED,
    SHARED,
    EveryToken,
    FromTeacher,
    Infilling,
    LastTokens,
    ObjectiveSpec,
    OfGroups,
    OfPairs,
)
from mens_exp.config.plugins import Registry


class Turns(Enum):
    """The assistant turns that are supervised."""

    all = "all"
    last = "last"


@dataclass(kw_only=True, slots=True)
class ObjectiveConfig:
    """Settings common to all objectives, including user-defined ones."""

    _target_: str = setting(MISSING, "Class of the objective; set by the option.")
    name: str = setting(MISSING, "Its name in records; set by the option.")
    labels: str = setting(
        MISSING,
        "Rule for which tokens are supervised, by the objective of this name; set by the option.",
    )
    neftune_alpha: float = setting(
        0.0,
        "Noise on the embeddings in training: uniform, at most alpha / sqrt(L · D), with L the "
        "document's tokens and D the model's width; 0 is none (arXiv:2310.05914: 5 to 15).",
        ge=0,
        only_if=unless("backend.name", "proxy", why="which knows no documents"),
        aliases={
            "neftune_noise_alpha": "Transformers, TRL, Axolotl and Unsloth",
            "neftune_alpha": "LLaMA-Factory",
        },
        example="5",
    )

    @classmethod
    def own(cls) -> set[str]:
        """Return the names of the settings that are not common to all objectives."""
        common = {field.name for field in dataclasses.fields(ObjectiveConfig)}
        return {field.name for field in dataclasses.fields(cls)} - common

    @property
    def spec(self) -> ObjectiveSpec:
        """The spec of the objective; a user's class has that of the tokens named by `labels`."""
        found = OBJECTIVES.known(self.name)
        if found is not None and isinstance(self, found.schema):
            return found
        labelled = OBJECTIVES.known(self.labels) or OBJECTIVES.named("assistant")
        return dataclasses.replace(
            labelled,
            name=self.name,
            schema=type(self),
            selects=frozenset(),
            of_training=frozenset(),
            in_chunks=False,
            fuses_head=False,
            is_likelihood=False,
            needs_reference=False,
            needs_teacher=False,
            compares_groups=False,
            adds_up=True,
            counted="token",
            metrics=(),
        )


@dataclass(kw_only=True, slots=True)
class CrossEntropyConfig(ObjectiveConfig):
    """Next-token cross entropy over the supervised tokens."""

    chunk_tokens: int | None = setting(
        None,
        "Supervised positions whose logits are in memory at once (memory: positions × vocabulary × "
        "10 B); null: by vocabulary, 256 on a CPU and 2,048 on a GPU for 49,152 tokens.",
        ge=1,
        changes=Effect.NOTHING,
    )


_WITHOUT_DFT = unless("objective.dft", True, why="which weighs the plain cross-entropy")


@dataclass(kw_only=True, slots=True)
class TokenObjective(CrossEntropyConfig):
    """Settings common to the objectives over single tokens; validation measures without them."""

    weight_field: str | None = setting(
        None,
        "Field of each row that its tokens' losses are multiplied by, a number of at least 0. The "
        "loss of a step is then Σ weight · loss / Σ weight over its learned tokens; a row of "
        "weight 0 is left out. null weighs all equally.",
        example="weight",
    )
    dft: bool = setting(
        False,
        "Dynamic fine-tuning: multiply the loss of each learned token by its probability, through "
        "which no gradient flows (arXiv:2508.05629; TRL's loss_type=dft). train/loss has it, "
        "val/loss never.",
        aliases={"use_dft_loss": "LLaMA-Factory"},
    )
    label_smoothing: float = setting(
        0.0,
        "Share of each target's probability that is spread evenly over the vocabulary "
        "(arXiv:1512.00567, 0.1 there; torch's cross_entropy). train/loss has it, val/loss never.",
        ge=0,
        lt=1,
        only_if=_WITHOUT_DFT,
        idle=0.0,
        aliases={"label_smoothing_factor": "Transformers and TRL"},
        example="0.1",
    )
    z_loss: float = setting(
        0.0,
        "Weight of (log Z)² that is added for each learned token, Z the sum of the exponentials of "
        "its logits, which keeps logits small (arXiv:2204.02311, 1e-4 there). train/loss has it, "
        "val/loss never.",
        ge=0,
        only_if=_WITHOUT_DFT,
        idle=0.0,
        example="1e-4",
    )


@dataclass(kw_only=True, slots=True)
class CausalObjective(TokenObjective):
    """Causal language modeling: every token is supervised."""

    name: str = "causal"
    labels: str = "causal"


@dataclass(kw_only=True, slots=True)
class AssistantObjective(TokenObjective):
    """Supervise the assistant's turns, each with its end marker."""

    name: str = "assistant"
    labels: str = "assistant"
    turns: Turns = setting(
        Turns.all, "Assistant turns of a conversation to learn: all, or only the last."
    )


@dataclass(kw_only=True, slots=True)
class LastKObjective(TokenObjective):
    """Supervise the last tokens of each text, including the end marker of its last answer."""

    name: str = "last_k"
    labels: str = "last_k"
    k: int = setting(
        1,
        "Tokens learned at the end of each text (1, the default of the Vox mens trainer, is only "
        "the last one); 0: every token after the prompt.",
        ge=0,
        le=64,
    )


@dataclass(kw_only=True, slots=True)
class FimObjective(TokenObjective):
    """Fill in the middle of plain texts; every token is supervised (arXiv:2207.14255)."""

    name: str = "fim"
    labels: str = "fim"
    rate: float = setting(
        0.5,
        "Share of texts whose middle is moved to the end; the others are learned as they are "
        "(0.5 as StarCoder, arXiv:2305.06161; up to 0.9 costs nothing, arXiv:2207.14255).",
        gt=0,
        le=1,
    )
    spm_rate: float = setting(
        0.5,
        "Share of these with the suffix first (SPM); the others have the prefix first (PSM).",
        ge=0,
        le=1,
    )
    split_seed: int = setting(
        0, "Seed of the cuts, apart from the run's seed, so that runs of any seed share them.", ge=0
    )
    tokens: list[str] | None = setting(
        None,
        "Tokens before prefix, suffix and middle; null: the tokenizer's own, by their names in "
        "StarCoder, Qwen2.5-Coder, CodeGemma, SantaCoder and DeepSeek-Coder.",
        example='["<fim_prefix>","<fim_suffix>","<fim_middle>"]',
    )


@dataclass(kw_only=True, slots=True)
class DistillationObjective(CrossEntropyConfig):
    """Learn a teacher's distribution of each token of the assistant's turns."""

    name: str = "distillation"
    labels: str = "assistant"
    turns: Turns = setting(
        Turns.all, "Assistant turns of a conversation to learn: all, or only the last."
    )
    teacher: str | None = setting(
        None,
        "Model to learn from, with the same tokenizer and vocabulary: path of a directory, or an "
        "id of the hub. null is the base itself before quantization, without the adapter, so that "
        "the adapter recovers what quantization lost.",
        aliases={"teacher_model_name_or_path": "TRL"},
        example="HuggingFaceTB/SmolLM2-360M-Instruct",
    )
    teacher_revision: str | None = setting(
        None,
        "Branch, tag or commit of the teacher, recorded as a commit when a run starts; null: main.",
        aliases={"teacher_model_revision": "TRL"},
        only_if=unless("objective.teacher", None, needs="objective.teacher=<path or id>"),
        example="main",
    )
    beta: float = setting(
        0.0,
        "Divergence of teacher p and student q: 0 is KL(p‖q), the forward KL; 1 is KL(q‖p), the "
        "reverse; between them the generalized Jensen-Shannon divergence, beta · KL(p‖m) + "
        "(1 - beta) · KL(q‖m) with m = beta · p + (1 - beta) · q (arXiv:2306.13649, eq. 1; 0.5 in "
        "TRL).",
        ge=0,
        le=1,
        example="0.5",
    )
    temperature: float = setting(
        1.0,
        "Both models' logits are divided by it in the divergence, which is not multiplied by its "
        "square (arXiv:1503.02531 does so; TRL's GKD does not).",
        gt=0,
        example="2",
    )
    top_k: int | None = setting(
        None,
        "Compute the teacher's k most probable tokens once before training, and keep them in the "
        "cache: the teacher and the student are never in memory together. All other tokens "
        "count as one outcome (the ghost token of arXiv:2503.16870). null keeps the teacher in "
        "memory and compares all tokens.",
        ge=1,
        example="64",
    )
    ce_weight: float = setting(
        0.0,
        "Share of the cross entropy with the rows' own tokens: the loss of a token is (1 - "
        "ce_weight) · divergence + ce_weight · cross entropy.",
        ge=0,
        lt=1,
        example="0.5",
    )
    hidden_weight: float = setting(
        0.0,
        "Weight of the squared difference between hidden states of student and teacher, the mean "
        "over their width and the sum over hidden_layers, that is added to the loss of a token (λ "
        "of arXiv:1909.10351, eq. 6 and 8, 1 there; their widths must be equal). 0 leaves hidden "
        "states free.",
        ge=0,
        example="0.1",
    )
    hidden_layers: list[int] | None = setting(
        None,
        "The student's decoder layers after which hidden states are compared, from 1; after the "
        "last one, those that the head reads. null is all. With a teacher of n times as many "
        "layers, layer i is compared with its layer n · i (uniform, as in arXiv:1909.10351).",
        only_if=unless("objective.hidden_weight", 0.0, needs="objective.hidden_weight above 0"),
        example="[2,4]",
    )


class PairLoss(Enum):
    """The loss of a pair of answers, given the margin between their rewards."""

    sigmoid = "sigmoid"
    ipo = "ipo"
    hinge = "hinge"
    robust = "robust"


_BETA_NOTE = "of the margin between the answers"
_NLL_NOTE = "of the chosen answer's mean negative log-likelihood per token that is added"


def _label_smoothing(**facts: Any) -> Any:
    doc = "Share of pairs whose answers are assumed to be swapped."
    return setting(0.0, doc, ge=0, lt=0.5, example="0.1", **facts)


def _precompute_ref_log_probs() -> Any:
    return setting(
        False,
        "Compute the base's log-likelihood of each answer once, before training, instead of at "
        "every step (TRL's name), and keep it in the cache for the next run of the same base and "
        "rows. Equal to the bit where data.micro_batch_size is 1, else within rounding.",
        changes=Effect.NOTHING,
    )


@dataclass(kw_only=True, slots=True)
class OverPairs(CrossEntropyConfig):
    """Settings common to all objectives over pairs of answers."""

    share_prompt: bool = setting(
        False,
        "Compute the prompt of a pair once instead of once with each answer: the rejected answer "
        "attends to the prompt in front of the chosen one. Losses and gradients are the same "
        "within rounding, but lora.dropout and objective.neftune_alpha draw other values.",
        only_if=(
            when("data.packing", True, why="which puts each answer in a separate row"),
            unless("backend.name", "proxy", why="which knows no documents"),
        ),
        idle=False,
    )


@dataclass(kw_only=True, slots=True)
class PairObjective(OverPairs):
    """Settings common to the losses of pairs of answers."""

    beta: float = setting(
        0.1, f"Factor {_BETA_NOTE} (arXiv:2305.18290; under ipo its regularization τ).", gt=0
    )
    loss: PairLoss = setting(
        PairLoss.sigmoid,
        "Loss of a pair: sigmoid (arXiv:2305.18290), ipo (arXiv:2310.12036), hinge "
        "(arXiv:2305.10425), or robust, which corrects for a share label_smoothing of wrong "
        "labels (arXiv:2403.00409).",
        aliases={"pref_loss": "LLaMA-Factory"},
    )
    label_smoothing: float = _label_smoothing(only_if=when("objective.loss", "sigmoid", "robust"))
    length_normalised: bool = setting(
        False,  # as in the paper of DPO
        "Compare means over the answers' tokens instead of sums; ipo always does.",
        only_if=unless("objective.loss", "ipo", why="which compares means over tokens"),
    )


@dataclass(kw_only=True, slots=True)
class DpoObjective(PairObjective):
    """Direct preference optimization, against the base without the adapter."""

    name: str = "dpo"
    labels: str = "dpo"
    nll_weight: float = setting(0.0, f"Weight {_NLL_NOTE} (arXiv:2404.19733 adds it with 1).", ge=0)
    precompute_ref_log_probs: bool = _precompute_ref_log_probs()


@dataclass(kw_only=True, slots=True)
class CpoObjective(PairObjective):
    """Contrastive preference optimization: no reference, and a term that imitates."""

    name: str = "cpo"
    labels: str = "cpo"
    nll_weight: float = setting(
        1.0, f"Weight {_NLL_NOTE} (1 as in arXiv:2401.08417 and TRL's cpo_alpha).", ge=0
    )


@dataclass(kw_only=True, slots=True)
class SimpoObjective(OverPairs):
    """Simple preference optimization: mean log-likelihoods, no reference, a target margin."""

    name: str = "simpo"
    labels: str = "simpo"
    beta: float = setting(2.0, f"Factor {_BETA_NOTE} (arXiv:2405.14734: 2 to 2.5).", gt=0)
    target: float = setting(
        1.0,
        "Target margin between the rewards (γ of arXiv:2405.14734, 0.3 to 1.6 there; "
        "TRL's simpo_gamma).",
        ge=0,
        aliases={"simpo_gamma": "TRL and LLaMA-Factory"},
    )
    label_smoothing: float = _label_smoothing()
    nll_weight: float = setting(0.0, f"Weight {_NLL_NOTE} (0 as in the paper).", ge=0)


@dataclass(kw_only=True, slots=True)
class OrpoObjective(OverPairs):
    """Odds ratio preference optimization: imitates the chosen row, and raises its odds."""

    name: str = "orpo"
    labels: str = "orpo"
    beta: float = setting(
        0.1, "Weight of the odds ratio (λ of arXiv:2403.07691, 0.1 for Mistral 7B there).", gt=0
    )


@dataclass(kw_only=True, slots=True)
class KtoObjective(CrossEntropyConfig):
    """Kahneman-Tversky optimization: answers that are wanted or not, against the base."""

    name: str = "kto"
    labels: str = "kto"
    beta: float = setting(
        0.1, "Factor of an answer's log-likelihood less the base's (arXiv:2402.01306).", gt=0
    )
    wanted_weight: float = setting(
        1.0,
        "Weight of the loss of a wanted answer; with more of one kind, the paper weighs the kinds "
        "so that the ratio of their weighted numbers is 1 to 1.33.",
        gt=0,
        aliases={"desirable_weight": "TRL", "kto_chosen_weight": "LLaMA-Factory"},
    )
    unwanted_weight: float = setting(
        1.0,
        "Weight of the loss of an answer not wanted.",
        gt=0,
        aliases={"undesirable_weight": "TRL", "kto_rejected_weight": "LLaMA-Factory"},
    )
    precompute_ref_log_probs: bool = _precompute_ref_log_probs()


class GroupLoss(Enum):
    """The reduction of a step's token losses, by TRL's names."""

    grpo = "grpo"
    dr_grpo = "dr_grpo"
    bnpo = "bnpo"
    dapo = "dapo"


class RewardScale(Enum):
    """The divisor of an answer's advantage, its reward minus the group mean."""

    group = "group"
    batch = "batch"
    none = "none"


@dataclass(kw_only=True, slots=True)
class GrpoObjective(CrossEntropyConfig):
    """Group relative policy optimization: answers with rewards, against others to their prompt."""

    name: str = "grpo"
    labels: str = "grpo"
    beta: float = setting(
        0.04,
        "Weight of the KL divergence from the base (arXiv:2402.03300), whose estimate for a token "
        "is multiplied by the token's ratio (arXiv:2512.02556, as TRL does by default); 0, TRL's "
        "default, saves the base's pass before training.",
        ge=0,
    )
    epsilon_low: float = setting(
        0.2,
        "The probability of a token, divided by that under the adapter that training starts from, "
        "earns nothing below 1 - epsilon_low (arXiv:1707.06347; TRL's epsilon).",
        gt=0,
        lt=1,
        aliases={"epsilon": "TRL"},
    )
    epsilon_high: float = setting(
        0.2,
        "The same above 1 + epsilon_high (arXiv:2503.14476 has 0.28).",
        gt=0,
        example="0.28",
    )
    scale_rewards: RewardScale = setting(
        RewardScale.group,
        "Divisor of an answer's reward minus the mean of its group. group: the group's "
        "standard deviation + 1e-4 (arXiv:2402.03300); batch: that of all answers on its side of "
        "the split (arXiv:2508.08221); none: nothing (arXiv:2503.20783).",
    )
    loss_type: GroupLoss = setting(
        GroupLoss.grpo,
        "Mean over the losses of a step's tokens. grpo: the mean of each answer, then over answers "
        "(arXiv:2402.03300); dr_grpo: the sum of each answer divided by max_completion_tokens, "
        "then over answers (arXiv:2503.20783); dapo: over all tokens of the step "
        "(arXiv:2503.14476; TRL's default); bnpo: over the tokens of each micro-batch, then over "
        "micro-batches, so that data.micro_batch_size changes what is learned.",
    )
    max_completion_tokens: int = setting(
        256,
        "Tokens of the longest answer that could have been sampled, such as eval.max_new_tokens "
        "(256 as in TRL).",
        ge=1,
        only_if=when("objective.loss_type", "dr_grpo"),
        idle=256,
        aliases={"max_completion_length": "TRL"},
    )


def _over_pairs(
    name: str,
    schema: type[ObjectiveConfig],
    *,
    documents: str = "mens_exp.rows.documents:PAIR",
    needs_reference: bool = False,
) -> ObjectiveSpec:
    return OfPairs(
        name=name,
        schema=schema,
        documents=documents,
        of_training=frozenset({SHARED, PRECOMPUTED} if needs_reference else {SHARED}),
        in_chunks=True,
        fuses_head=True,
        needs_reference=needs_reference,
        counted="pair",
        metrics=PAIR_METRICS,
    )


OBJECTIVES = Registry(
    kind="objective",
    group="mens_exp.objectives",
    spec=ObjectiveSpec,
    built_in={
        spec.name: spec
        for spec in (
            EveryToken(
                name="causal",
                schema=CausalObjective,
                documents="mens_exp.rows.documents:CAUSAL",
                selects=frozenset({"weight_field"}),
                in_chunks=True,
                fuses_head=True,
                is_likelihood=True,
            ),
            ObjectiveSpec(
                name="assistant",
                schema=AssistantObjective,
                selects=frozenset({"turns", "weight_field"}),
                in_chunks=True,
                fuses_head=True,
                is_likelihood=True,
            ),
            LastTokens(
                name="last_k",
                schema=LastKObjective,
                documents="mens_exp.rows.documents:LAST_K",
                selects=frozenset({"k", "weight_field"}),
                truncation="left",
                in_chunks=True,
                fuses_head=True,
                is_likelihood=True,
                learns_ends=True,
            ),
            Infilling(
                name="fim",
                schema=FimObjective,
                documents="mens_exp.rows.infilling:FIM",
                selects=frozenset({"rate", "spm_rate", "split_seed", "tokens", "weight_field"}),
                in_chunks=True,
                fuses_head=True,
                is_likelihood=True,
            ),
            FromTeacher(
                name="distillation",
                schema=DistillationObjective,
                selects=frozenset({"turns"}),
                of_training=frozenset({"teacher", "teacher_revision", "top_k", "hidden_layers"}),
                in_chunks=True,
                is_likelihood=True,
                needs_teacher=True,
                metrics=DISTILLATION_METRICS,
            ),
            _over_pairs("dpo", DpoObjective, needs_reference=True),
            _over_pairs("cpo", CpoObjective),
            _over_pairs("simpo", SimpoObjective),
            _over_pairs("orpo", OrpoObjective, documents="mens_exp.rows.documents:WHOLE_PAIR"),
            ObjectiveSpec(
                name="kto",
                schema=KtoObjective,
                documents="mens_exp.rows.documents:LABELLED",
                of_training=frozenset({PRECOMPUTED}),
                in_chunks=True,
                fuses_head=True,
                needs_reference=True,
                adds_up=False,
                counted="answer",
                metrics=LABEL_METRICS,
            ),
            OfGroups(
                name="grpo",
                schema=GrpoObjective,
                documents="mens_exp.rows.rewards:REWARDED",
                in_chunks=True,
                fuses_head=True,
                needs_reference=True,
                compares_groups=True,
                counted="answer",
                metrics=GROUP_METRICS,
            ),
        )
    },
)
