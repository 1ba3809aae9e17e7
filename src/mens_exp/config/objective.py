"""Settings of `objective`, and the objectives: what planning, encoding and records ask of each.

Nothing here imports torch. The loss is of the class that `_target_` names;
:mod:`mens_exp.objective.causal` has what such a class is given. :attr:`ObjectiveSpec.documents`
names the object that makes documents of rows (:mod:`mens_exp.rows.documents`).

An installed package adds an objective under the entry point group ``mens_exp.objectives``
(:mod:`mens_exp.config.plugins`). Its name is the value of `objective.name`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from mens_exp.artifacts.metrics import Metric
from mens_exp.config.fields import Effect, plain, setting, unless, when
from mens_exp.config.plugins import Registry
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.artifacts.metrics import Direction

_MASKED = 0.5  # share of tokens that are answers, as in the main job
LOGIT_BYTES = 10  # measured: 8 bytes a logit of a chunk, and 2 that a smaller chunk's peak hides
# By whether it is on a GPU: bytes of a chunk's logits, and positions beyond which nothing is
# gained. measured on CPU (SmolLM2, 49,152 tokens): 256 positions 1.04 times as fast as 64, 512 no
# faster. On a GPU an unverified guess.
_CHUNK_BYTES, _MOST_POSITIONS = {False: 128 << 20, True: 1536 << 20}, {False: 512, True: 4096}
_FEWEST_POSITIONS = 16


def positions_at_once(vocab_size: int, *, on_gpu: bool) -> int:
    """Return the positions whose logits exist at one time, a power of two.

    They do not depend on the memory of a machine, so that a run that goes on elsewhere computes the
    same.

    Args:
        vocab_size: logits of a position.
        on_gpu: whether the run computes on a GPU.
    """
    most = min(_CHUNK_BYTES[on_gpu] // (vocab_size * LOGIT_BYTES), _MOST_POSITIONS[on_gpu])
    return max(1 << max(most.bit_length() - 1, 0), _FEWEST_POSITIONS)


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
        "Which tokens are supervised, as the objective of this name has it; set by the option.",
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

    @property
    def spec(self) -> ObjectiveSpec:
        """The objective; that of a user's own class is over the tokens that `labels` names."""
        found = OBJECTIVES.known(self.name)
        if found is not None and isinstance(self, found.schema):
            return found
        labelled = OBJECTIVES.known(self.labels) or OBJECTIVES.named("assistant")
        return dataclasses.replace(
            labelled,
            name=self.name,
            schema=type(self),
            selects=frozenset(),
            in_chunks=False,
            is_likelihood=False,
            needs_reference=False,
            adds_up=True,
            counted="token",
            metrics=(),
        )


@dataclass(kw_only=True, slots=True)
class CrossEntropyConfig(ObjectiveConfig):
    """Next-token cross entropy over the supervised tokens."""

    chunk_tokens: int | None = setting(
        None,
        "Supervised positions whose logits exist at one time (memory: positions × vocabulary × "
        "10 B); null: by vocabulary, 256 on a CPU and 2,048 on a GPU for 49,152 tokens.",
        ge=1,
        changes=Effect.NOTHING,
    )


@dataclass(kw_only=True, slots=True)
class TokenObjective(CrossEntropyConfig):
    """Settings common to the objectives over single tokens; validation measures without them."""

    weight_field: str | None = setting(
        None,
        "Field of each row that its tokens' losses are multiplied by, a number of at least 0. The "
        "loss of a step is then Σ weight · loss / Σ weight over its learned tokens; a row of "
        "weight 0 is left out. null weighs all alike.",
        example="weight",
    )
    label_smoothing: float = setting(
        0.0,
        "Share of each target's probability that is spread evenly over the vocabulary "
        "(arXiv:1512.00567, 0.1 there; torch's cross_entropy). train/loss has it, val/loss never.",
        ge=0,
        lt=1,
        aliases={"label_smoothing_factor": "Transformers and TRL"},
        example="0.1",
    )
    z_loss: float = setting(
        0.0,
        "Weight of (log Z)² that is added for each learned token, Z the sum of the exponentials of "
        "its logits, which keeps logits small (arXiv:2204.02311, 1e-4 there). train/loss has it, "
        "val/loss never.",
        ge=0,
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
        Turns.all, "Which assistant turns of a conversation are learned: all, or the last alone."
    )


@dataclass(kw_only=True, slots=True)
class LastKObjective(TokenObjective):
    """Supervise the last tokens of each text, including the end marker of its last answer."""

    name: str = "last_k"
    labels: str = "last_k"
    k: int = setting(
        1,
        "Tokens learned at the end of each text (1, the seeds' default, is the last one alone); "
        "0 is every token after the prompt.",
        ge=0,
        le=64,
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
    doc = "Share of pairs whose answers are taken to be exchanged."
    return setting(0.0, doc, ge=0, lt=0.5, example="0.1", **facts)


@dataclass(kw_only=True, slots=True)
class PairObjective(CrossEntropyConfig):
    """Settings common to the losses of pairs of answers."""

    beta: float = setting(
        0.1, f"Factor {_BETA_NOTE} (arXiv:2305.18290; under ipo its regularization τ).", gt=0
    )
    loss: PairLoss = setting(
        PairLoss.sigmoid,
        "Loss of a pair: sigmoid (arXiv:2305.18290), ipo (arXiv:2310.12036), hinge "
        "(arXiv:2305.10425), or robust, which corrects for labels of which label_smoothing are "
        "wrong (arXiv:2403.00409).",
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


@dataclass(kw_only=True, slots=True)
class CpoObjective(PairObjective):
    """Contrastive preference optimization: no reference, and a term that imitates."""

    name: str = "cpo"
    labels: str = "cpo"
    nll_weight: float = setting(
        1.0, f"Weight {_NLL_NOTE} (1 as in arXiv:2401.08417 and TRL's cpo_alpha).", ge=0
    )


@dataclass(kw_only=True, slots=True)
class SimpoObjective(CrossEntropyConfig):
    """Simple preference optimization: mean log-likelihoods, no reference, a target margin."""

    name: str = "simpo"
    labels: str = "simpo"
    beta: float = setting(2.0, f"Factor {_BETA_NOTE} (arXiv:2405.14734: 2 to 2.5).", gt=0)
    target: float = setting(
        1.0,
        "Margin between the rewards that is aimed at (γ of arXiv:2405.14734, 0.3 to 1.6 there; "
        "TRL's simpo_gamma).",
        ge=0,
        aliases={"simpo_gamma": "TRL and LLaMA-Factory"},
    )
    label_smoothing: float = _label_smoothing()
    nll_weight: float = setting(0.0, f"Weight {_NLL_NOTE} (0 as in the paper).", ge=0)


@dataclass(kw_only=True, slots=True)
class OrpoObjective(CrossEntropyConfig):
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


@dataclass(frozen=True, kw_only=True)
class ObjectiveSpec:
    """One objective; the defaults are those of a loss of your own over answers.

    Attributes:
        name: value of `objective.name`, and the name in records.
        schema: its settings.
        documents: ``module:name`` of the :class:`mens_exp.rows.documents.RowDocuments` that makes
            documents of a row and says which of their tokens are supervised.
        selects: its settings that select or weigh tokens; the others are arguments of its class.
        truncation: side on which a document that is too long is cut, unless `data` says.
        in_chunks: whether logits exist for `chunk_tokens` positions at a time, not for all.
        is_likelihood: whether the loss is the negative log-likelihood of the supervised tokens,
            that of validation if the settings change it in training.
        learns_ends: whether it supervises the end of a text as rendered, a few tokens by design.
        needs_reference: whether it compares with the base, which runs in a pass of its own.
        adds_up: whether the loss of a micro-batch is the sum of those of its rows' documents.
        counted: what the loss is a mean over.
        metrics: what it reports besides the loss, each name under ``train/`` and ``val/``.
    """

    name: str
    schema: type[ObjectiveConfig]
    documents: str = "mens_exp.rows.documents:ASSISTANT"
    selects: frozenset[str] = frozenset()
    truncation: str = "right"
    in_chunks: bool = False
    is_likelihood: bool = False
    learns_ends: bool = False
    needs_reference: bool = False
    adds_up: bool = True
    counted: str = "token"
    metrics: tuple[Metric, ...] = ()

    @property
    def loss_unit(self) -> str:
        """The unit of its loss, in words."""
        return "nats per token" if self.is_likelihood else f"per {self.counted}"

    def selected(self, settings: Any) -> dict[str, Any]:
        """Return the settings that select tokens, as plain values; they are part of a cache key.

        Those that are null select nothing and are left out.
        """
        found = {name: plain(getattr(settings, name)) for name in sorted(self.selects)}
        return {name: value for name, value in found.items() if value is not None}

    def arguments(self, settings: Any, vocab_size: int, *, on_gpu: bool) -> dict[str, Any]:
        """Return the settings that are arguments of its class; `chunk_tokens` is always set.

        Args:
            settings: the `objective` group.
            vocab_size: logits of a position.
            on_gpu: whether the run computes on a GPU.
        """
        common = {field.name for field in dataclasses.fields(ObjectiveConfig)}
        names = {field.name for field in dataclasses.fields(settings)} - common - self.selects
        found = {name: getattr(settings, name) for name in sorted(names)}
        if found.get("chunk_tokens", ...) is None:
            found["chunk_tokens"] = positions_at_once(vocab_size, on_gpu=on_gpu)
        return found

    def head_positions(
        self, settings: Any, positions: int, vocab_size: int, *, on_gpu: bool
    ) -> int:
        """Return the positions whose logits exist at the same time.

        Args:
            settings: the `objective` group.
            positions: those of a micro-batch.
            vocab_size: logits of a position.
            on_gpu: whether the run computes on a GPU.
        """
        if not self.in_chunks:
            return positions
        chunk: int | None = settings.chunk_tokens
        return positions_at_once(vocab_size, on_gpu=on_gpu) if chunk is None else chunk

    def supervised_frac(self, settings: Any, typical: float) -> float:
        """Estimate the fraction of tokens that are supervised.

        Args:
            settings: the `objective` group.
            typical: number of tokens in a typical document.
        """
        del settings, typical
        return _MASKED

    def last_tokens(self, settings: Any) -> int | None:
        """Return the number of last tokens that are supervised (0: all after the prompt), if so."""
        del settings
        return None

    def learned(self, settings: Any, *, is_chatml: bool) -> str:
        """Name the supervised tokens as the seeds do in ``training_objective_note``."""
        del settings
        return f"masked_{'chatml' if is_chatml else 'chat_template'}"

    def problems(self, settings: Any, seq_len: int) -> Iterator[ConfigError]:
        """Yield the problems of its own settings, for documents of at most ``seq_len`` tokens."""
        del settings, seq_len
        yield from ()


class _EveryToken(ObjectiveSpec):
    """Every token is supervised."""

    def supervised_frac(self, settings: Any, typical: float) -> float:
        """Return all of them."""
        del settings, typical
        return 1.0

    def learned(self, settings: Any, *, is_chatml: bool) -> str:
        """Name the objective."""
        del settings, is_chatml
        return "causal"


class _LastTokens(ObjectiveSpec):
    """The end of each text is supervised."""

    def supervised_frac(self, settings: Any, typical: float) -> float:
        """Return the last tokens' share of a typical document."""
        k = self.last_tokens(settings)
        return min(1.0, k / typical) if k else _MASKED

    def last_tokens(self, settings: Any) -> int | None:
        """Return their number; a class of the user's has all after the prompt."""
        return settings.k if "k" in self.selects else None

    def learned(self, settings: Any, *, is_chatml: bool) -> str:
        """Name the objective, with the number of tokens."""
        del is_chatml
        k = self.last_tokens(settings)
        return "last_k" if k is None else f"last_k{k}"

    def problems(self, settings: Any, seq_len: int) -> Iterator[ConfigError]:
        """Yield more tokens than a document has."""
        k = self.last_tokens(settings)
        if k is not None and k > seq_len:
            yield ConfigError(
                "more last tokens than a sequence has",
                where="objective.k",
                found=k,
                expected=f"at most data.seq_len ({seq_len})",
                remedy="lower objective.k, or raise data.seq_len",
            )


def _metric(name: str, unit: str, direction: Direction, note: str) -> Metric:
    return Metric(name=name, unit=unit, direction=direction, reduction="last", note=note)


_REWARD = "beta times its log-likelihood, less the base's where the objective compares with it"
PAIR_METRICS = (
    _metric("chosen_reward", "1", "none", f"mean reward of the chosen answers: {_REWARD}"),
    _metric("rejected_reward", "1", "none", f"mean reward of the rejected answers: {_REWARD}"),
    _metric("reward_margin", "1", "max", "mean of the chosen answer's reward less the rejected's"),
    _metric("reward_accuracy", "1", "max", "share of pairs whose chosen answer has more reward"),
    _metric("chosen_nll", "nats/token", "min", "mean loss of a token of the chosen answers"),
)


_LABEL_METRICS = (
    *PAIR_METRICS[:2],
    _metric("kl", "nats", "none", "mean KL(model‖base) of an answer, from answers of other rows"),
)


class _OfPairs(ObjectiveSpec):
    """The last answer of a row is better than another one."""

    def problems(self, settings: Any, seq_len: int) -> Iterator[ConfigError]:
        """Yield a loss that is another one under its settings."""
        del seq_len
        loss = plain(getattr(settings, "loss", None))  # some have one alone
        if loss == PairLoss.robust.value and settings.label_smoothing == 0:
            yield ConfigError(
                "is the sigmoid loss while no label is taken to be wrong",
                where="objective.loss",
                found="robust with objective.label_smoothing=0",
                expected="objective.label_smoothing above 0, or objective.loss=sigmoid",
            )


def _over_pairs(
    name: str,
    schema: type[ObjectiveConfig],
    *,
    documents: str = "mens_exp.rows.documents:PAIR",
    needs_reference: bool = False,
) -> ObjectiveSpec:
    return _OfPairs(
        name=name,
        schema=schema,
        documents=documents,
        in_chunks=True,
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
            _EveryToken(
                name="causal",
                schema=CausalObjective,
                documents="mens_exp.rows.documents:CAUSAL",
                selects=frozenset({"weight_field"}),
                in_chunks=True,
                is_likelihood=True,
            ),
            ObjectiveSpec(
                name="assistant",
                schema=AssistantObjective,
                selects=frozenset({"turns", "weight_field"}),
                in_chunks=True,
                is_likelihood=True,
            ),
            _LastTokens(
                name="last_k",
                schema=LastKObjective,
                documents="mens_exp.rows.documents:LAST_K",
                selects=frozenset({"k", "weight_field"}),
                truncation="left",
                in_chunks=True,
                is_likelihood=True,
                learns_ends=True,
            ),
            _over_pairs("dpo", DpoObjective, needs_reference=True),
            _over_pairs("cpo", CpoObjective),
            _over_pairs("simpo", SimpoObjective),
            _over_pairs("orpo", OrpoObjective, documents="mens_exp.rows.documents:WHOLE_PAIR"),
            ObjectiveSpec(
                name="kto",
                schema=KtoObjective,
                documents="mens_exp.rows.documents:LABELLED",
                in_chunks=True,
                needs_reference=True,
                adds_up=False,
                counted="answer",
                metrics=_LABEL_METRICS,
            ),
        )
    },
)
