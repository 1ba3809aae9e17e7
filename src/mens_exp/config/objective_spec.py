"""The specification of an objective, as used by planning, encoding and records.

Nothing here imports torch. :mod:`mens_exp.config.objective` has the settings and the objectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.metrics import Metric
from mens_exp.config.fields import plain
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mens_exp.artifacts.metrics import Direction

_MASKED = 0.5  # share of tokens that are answers, as in the main job
LOGIT_BYTES = 10  # measured: 8 bytes per logit of a chunk, and 2 that smaller chunks do not show
# For GPU and CPU: bytes of a chunk's logits, and the positions beyond which there is no gain.
# measured on CPU (SmolLM2, 49,152 tokens): 256 positions 1.04 times as fast as 64, 512 no faster.
# For GPU an unverified guess.
_CHUNK_BYTES, _MOST_POSITIONS = {False: 128 << 20, True: 1536 << 20}, {False: 512, True: 4096}
_FEWEST_POSITIONS = 16
PRECOMPUTED = "precompute_ref_log_probs"  # of `objective`
SHARED = "share_prompt"  # of `objective`


def positions_at_once(vocab_size: int, *, on_gpu: bool) -> int:
    """Return the number of positions whose logits are in memory at once, a power of two.

    It does not depend on the machine's memory, so that a run resumed on another machine computes
    the same.

    Args:
        vocab_size: logits per position.
        on_gpu: whether the run computes on a GPU.
    """
    most = min(_CHUNK_BYTES[on_gpu] // (vocab_size * LOGIT_BYTES), _MOST_POSITIONS[on_gpu])
    return max(1 << max(most.bit_length() - 1, 0), _FEWEST_POSITIONS)


@dataclass(frozen=True, kw_only=True)
class ObjectiveSpec:
    """The spec of an objective; the defaults suit a user's loss over answers.

    Attributes:
        name: value of `objective.name`, and the name in records.
        schema: its settings, a subclass of :class:`mens_exp.config.objective.ObjectiveConfig`.
        documents: ``module:name`` of the :class:`mens_exp.rows.documents.RowDocuments` that builds
            a row's documents and selects their supervised tokens.
        selects: its settings that select or weight tokens.
        of_training: its settings that training reads; the others are arguments of the loss class.
        truncation: side on which an overlong document is truncated, unless set in `data`.
        in_chunks: whether logits are computed for `chunk_tokens` positions at a time.
        fuses_head: whether it needs only token losses and no logits, so that the head and the
            loss can be fused into one kernel.
        is_likelihood: whether the loss is the negative log-likelihood of the supervised tokens, at
            least in validation.
        learns_ends: whether it supervises the end of a text as rendered, few tokens by design.
        needs_reference: whether it needs a reference pass of the base model.
        needs_teacher: whether it distills another model, `objective.teacher`.
        compares_groups: whether it compares answers to the same prompt, sampled from the initial
            adapter.
        adds_up: whether the loss of a micro-batch is the sum over its documents; see also
            `is_sum`.
        counted: the unit that the loss is averaged over.
        metrics: additional metrics, each reported under ``train/`` and ``val/``.
    """

    name: str
    schema: type[Any]
    documents: str = "mens_exp.rows.documents:ASSISTANT"
    selects: frozenset[str] = frozenset()
    of_training: frozenset[str] = frozenset()
    truncation: str = "right"
    in_chunks: bool = False
    fuses_head: bool = False
    is_likelihood: bool = False
    learns_ends: bool = False
    needs_reference: bool = False
    needs_teacher: bool = False
    compares_groups: bool = False
    adds_up: bool = True
    counted: str = "token"
    metrics: tuple[Metric, ...] = ()

    def loss_unit(self, learned: Mapping[str, Any]) -> str:
        """Return the unit of the loss in words.

        Args:
            learned: the settings that change what is learned, by dotted path.
        """
        del learned
        return "nats per token" if self.is_likelihood else f"per {self.counted}"

    def is_sum(self, settings: Any) -> bool:
        """Return whether the loss is a sum over documents under these settings."""
        del settings
        return self.adds_up

    def selected(self, settings: Any) -> dict[str, Any]:
        """Return the settings that select tokens, as plain values for the cache key.

        Null settings are omitted.
        """
        found = {name: plain(getattr(settings, name)) for name in sorted(self.selects)}
        return {name: value for name, value in found.items() if value is not None}

    def arguments(self, settings: Any, vocab_size: int, *, on_gpu: bool) -> dict[str, Any]:
        """Return the arguments of the loss class; `chunk_tokens` is always set.

        Args:
            settings: the `objective` group.
            vocab_size: logits per position.
            on_gpu: whether the run computes on a GPU.
        """
        names = settings.own() - self.selects - self.of_training
        found = {name: getattr(settings, name) for name in sorted(names)}
        if found.get("chunk_tokens", ...) is None:
            found["chunk_tokens"] = positions_at_once(vocab_size, on_gpu=on_gpu)
        return found

    def passes_before(self, settings: Any) -> int:
        """Return the number of passes before training, which replace a pass in each step."""
        return int(self.needs_reference and getattr(settings, PRECOMPUTED, False))

    def head_positions(
        self, settings: Any, positions: int, vocab_size: int, *, on_gpu: bool
    ) -> int:
        """Return the number of positions whose logits are in memory at once.

        Args:
            settings: the `objective` group.
            positions: positions of a micro-batch.
            vocab_size: logits per position.
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
        """Return how many last tokens are supervised (0: all after the prompt), or None."""
        del settings
        return None

    def learned(self, settings: Any, *, is_chatml: bool) -> str:
        """Name the supervised tokens, in the form of the seeds' ``training_objective_note``."""
        del settings
        return f"masked_{'chatml' if is_chatml else 'chat_template'}"

    def problems(self, settings: Any, seq_len: int) -> Iterator[ConfigError]:
        """Yield the problems of its settings, for documents of at most ``seq_len`` tokens."""
        del settings, seq_len
        yield from ()


class EveryToken(ObjectiveSpec):
    """Every token is supervised."""

    def supervised_frac(self, settings: Any, typical: float) -> float:
        """Return 1."""
        del settings, typical
        return 1.0

    def learned(self, settings: Any, *, is_chatml: bool) -> str:
        """Name the objective."""
        del settings, is_chatml
        return "causal"


class LastTokens(ObjectiveSpec):
    """The end of each text is supervised."""

    def supervised_frac(self, settings: Any, typical: float) -> float:
        """Return the fraction of the last tokens in a typical document."""
        k = self.last_tokens(settings)
        return min(1.0, k / typical) if k else _MASKED

    def last_tokens(self, settings: Any) -> int | None:
        """Return their number; a user's class supervises all tokens after the prompt."""
        return settings.k if "k" in self.selects else None

    def learned(self, settings: Any, *, is_chatml: bool) -> str:
        """Name the objective, with the number of tokens."""
        del is_chatml
        k = self.last_tokens(settings)
        return "last_k" if k is None else f"last_k{k}"

    def problems(self, settings: Any, seq_len: int) -> Iterator[ConfigError]:
        """Yield an error if there are more last tokens than a document can have."""
        k = self.last_tokens(settings)
        if k is not None and k > seq_len:
            yield ConfigError(
                "more tokens than a sequence has",
                where="objective.k",
                found=k,
                expected=f"at most data.seq_len ({seq_len})",
                remedy="lower objective.k, or raise data.seq_len",
            )


_PARTS = 3  # prefix, suffix and middle
# Minimum sequence length; twelve tokens are reserved for a document's frame. Unverified guess.
_SHORTEST = 32


class Infilling(EveryToken):
    """The middle of a text comes last, after prefix and suffix."""

    def learned(self, settings: Any, *, is_chatml: bool) -> str:
        """Name the objective."""
        del settings, is_chatml
        return "fim"

    def problems(self, settings: Any, seq_len: int) -> Iterator[ConfigError]:
        """Yield errors unless there are three sentinel tokens and room for a text."""
        if seq_len < _SHORTEST:
            yield ConfigError(
                "leaves no room for text next to the three tokens",
                where="data.seq_len",
                found=seq_len,
                expected=f"at least {_SHORTEST} under objective=fim",
            )
        tokens = settings.tokens
        if tokens is not None and not len(tokens) == len(set(tokens)) == _PARTS:
            yield ConfigError(
                "needs three distinct tokens",
                where="objective.tokens",
                found=", ".join(tokens) or "none",
                expected="the tokens before prefix, suffix and middle",
            )


def _metric(name: str, unit: str, direction: Direction, note: str) -> Metric:
    return Metric(name=name, unit=unit, direction=direction, reduction="last", note=note)


_REWARD = (
    "beta times its log-likelihood, less the base's where the objective compares with it; without "
    "a base, that of a mean token where the objective compares means"
)
PAIR_METRICS = (
    _metric("chosen_reward", "1", "none", f"mean reward of the chosen answers: {_REWARD}"),
    _metric("rejected_reward", "1", "none", f"mean reward of the rejected answers: {_REWARD}"),
    _metric("reward_margin", "1", "max", "mean of the chosen answer's reward less the rejected's"),
    _metric("reward_accuracy", "1", "max", "share of pairs whose chosen answer has more reward"),
    _metric(
        "chosen_nll",
        "nats/token",
        "min",
        "mean over chosen answers of the mean loss of their tokens",
    ),
)


LABEL_METRICS = (
    *PAIR_METRICS[:2],
    _metric("kl", "nats", "none", "mean KL(model‖base) of an answer, from answers of other rows"),
)


GROUP_METRICS = (
    _metric(
        "reward", "1", "none", "mean reward of the answers, which were sampled before training"
    ),
    _metric("equal_frac", "1", "none", "share of answers whose whole group has the same reward"),
    _metric("base_kl", "nats/token", "none", "mean KL(model‖base) of a token, estimated by k3"),
    _metric(
        "clip_frac",
        "1",
        "none",
        "share of tokens that earn nothing, because their probability has changed enough",
    ),
)


DISTILLATION_METRICS = (
    _metric("divergence", "nats/token", "min", "mean divergence of student and teacher"),
    _metric("teacher_nll", "nats/token", "none", "mean loss of a token under the teacher"),
    _metric(
        "hidden_mse",
        "1",
        "min",
        "squared difference of student's and teacher's hidden states, the mean over width and "
        "tokens, the sum over the compared layers",
    ),
)


class OfPairs(ObjectiveSpec):
    """A row's last answer is preferred to another answer."""

    def problems(self, settings: Any, seq_len: int) -> Iterator[ConfigError]:
        """Yield an error for a loss that equals another one under its settings."""
        del seq_len
        loss = plain(getattr(settings, "loss", None))  # not every objective has a choice
        if loss == "robust" and settings.label_smoothing == 0:
            yield ConfigError(
                "equals the sigmoid loss without label smoothing",
                where="objective.loss",
                found="robust with objective.label_smoothing=0",
                expected="objective.label_smoothing above 0, or objective.loss=sigmoid",
            )


class FromTeacher(ObjectiveSpec):
    """Distillation from a teacher that stays in memory, or runs once before training."""

    def passes_before(self, settings: Any) -> int:
        """Return 1 if the teacher's top tokens are computed before training."""
        return int(self.needs_teacher and getattr(settings, "top_k", None) is not None)

    def problems(self, settings: Any, seq_len: int) -> Iterator[ConfigError]:
        """Yield an error for hidden states if the teacher does not stay in memory."""
        del seq_len
        if self.passes_before(settings) and getattr(settings, "hidden_weight", 0):
            yield ConfigError(
                "needs the teacher at every step, but objective.top_k stores its top tokens only",
                where="objective.hidden_weight",
                found=f"{settings.hidden_weight} with objective.top_k={settings.top_k}",
                expected="0, or objective.top_k=null",
            )


def shares_prompts(settings: Any) -> bool:
    """Return whether the prompt of a pair is computed only once."""
    return bool(getattr(settings, SHARED, False))


def matched_layers(settings: Any, ours: int, theirs: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of student and teacher layers, from 1, with compared hidden states.

    Args:
        settings: the `objective` group.
        ours: number of student layers.
        theirs: number of teacher layers.
    """
    if not getattr(settings, "hidden_weight", 0):
        return ()
    layers = range(1, ours + 1) if settings.hidden_layers is None else settings.hidden_layers
    return tuple((one, one * theirs // ours) for one in layers)


class OfGroups(ObjectiveSpec):
    """Rewards of sampled answers are compared within a group."""

    def passes_before(self, settings: Any) -> int:
        """Return 1 for the initial adapter, and 1 more for the base model if beta is above 0."""
        if not self.compares_groups:  # a user's class over the same documents
            return 0
        return 2 if settings.beta > 0 else 1

    def loss_unit(self, learned: Mapping[str, Any]) -> str:
        """Return tokens if the loss is averaged over the tokens of several answers."""
        over_tokens = learned.get("objective.loss_type") in {"bnpo", "dapo"}
        return "per token" if over_tokens else super().loss_unit(learned)

    def is_sum(self, settings: Any) -> bool:
        """Return false if each micro-batch has a separate mean."""
        return self.adds_up and plain(getattr(settings, "loss_type", None)) != "bnpo"
