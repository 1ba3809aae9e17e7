"""The specification of an objective: what planning, encoding and records ask of it.

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
LOGIT_BYTES = 10  # measured: 8 bytes a logit of a chunk, and 2 that a smaller chunk's peak hides
# By whether it is on a GPU: bytes of a chunk's logits, and positions beyond which nothing is
# gained. measured on CPU (SmolLM2, 49,152 tokens): 256 positions 1.04 times as fast as 64, 512 no
# faster. On a GPU an unverified guess.
_CHUNK_BYTES, _MOST_POSITIONS = {False: 128 << 20, True: 1536 << 20}, {False: 512, True: 4096}
_FEWEST_POSITIONS = 16
PRECOMPUTED = "precompute_ref_log_probs"  # of `objective`
SHARED = "share_prompt"  # of `objective`


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


@dataclass(frozen=True, kw_only=True)
class ObjectiveSpec:
    """One objective; the defaults are those of a loss of your own over answers.

    Attributes:
        name: value of `objective.name`, and the name in records.
        schema: its settings, a class of :class:`mens_exp.config.objective.ObjectiveConfig`.
        documents: ``module:name`` of the :class:`mens_exp.rows.documents.RowDocuments` that makes
            documents of a row and says which of their tokens are supervised.
        selects: its settings that select or weigh tokens.
        of_training: its settings that training reads; the others are arguments of its class.
        truncation: side on which a document that is too long is cut, unless `data` says.
        in_chunks: whether logits exist for `chunk_tokens` positions at a time, not for all.
        fuses_head: whether it needs losses of tokens alone, and no logits, so that the head and
            the loss may be one kernel.
        is_likelihood: whether the loss is the negative log-likelihood of the supervised tokens,
            that of validation if the settings change it in training.
        learns_ends: whether it supervises the end of a text as rendered, a few tokens by design.
        needs_reference: whether it compares with the base, which runs in a pass of its own.
        needs_teacher: whether it learns the distributions of another model, `objective.teacher`.
        compares_groups: whether it compares the answers to one prompt, sampled from the adapter
            that training starts from.
        adds_up: whether the loss of a micro-batch is the sum of those of its rows' documents; see
            also `is_sum`.
        counted: what the loss is a mean over.
        metrics: what it reports besides the loss, each name under ``train/`` and ``val/``.
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
        """Return the unit of its loss, in words.

        Args:
            learned: the settings that change what is learned, by dotted path.
        """
        del learned
        return "nats per token" if self.is_likelihood else f"per {self.counted}"

    def is_sum(self, settings: Any) -> bool:
        """Return whether it adds up under the settings of the `objective` group."""
        del settings
        return self.adds_up

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
        names = settings.own() - self.selects - self.of_training
        found = {name: getattr(settings, name) for name in sorted(names)}
        if found.get("chunk_tokens", ...) is None:
            found["chunk_tokens"] = positions_at_once(vocab_size, on_gpu=on_gpu)
        return found

    def passes_before(self, settings: Any) -> int:
        """Return the passes over the rows before training, which spare each step another's."""
        return int(self.needs_reference and getattr(settings, PRECOMPUTED, False))

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


class EveryToken(ObjectiveSpec):
    """Every token is supervised."""

    def supervised_frac(self, settings: Any, typical: float) -> float:
        """Return all of them."""
        del settings, typical
        return 1.0

    def learned(self, settings: Any, *, is_chatml: bool) -> str:
        """Name the objective."""
        del settings, is_chatml
        return "causal"


class LastTokens(ObjectiveSpec):
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
                "more tokens than a sequence has",
                where="objective.k",
                found=k,
                expected=f"at most data.seq_len ({seq_len})",
                remedy="lower objective.k, or raise data.seq_len",
            )


_PARTS = 3  # prefix, suffix and middle
# Tokens of a sequence, of which twelve are left for what frames a document. Unverified guess.
_SHORTEST = 32


class Infilling(EveryToken):
    """The middle of a text is learned last."""

    def learned(self, settings: Any, *, is_chatml: bool) -> str:
        """Name the objective."""
        del settings, is_chatml
        return "fim"

    def problems(self, settings: Any, seq_len: int) -> Iterator[ConfigError]:
        """Yield tokens that are not three, and sequences without room for a text."""
        if seq_len < _SHORTEST:
            yield ConfigError(
                "leaves no room for text besides the three tokens",
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
    """The last answer of a row is better than another one."""

    def problems(self, settings: Any, seq_len: int) -> Iterator[ConfigError]:
        """Yield a loss that is another one under its settings."""
        del seq_len
        loss = plain(getattr(settings, "loss", None))  # some have one alone
        if loss == "robust" and settings.label_smoothing == 0:
            yield ConfigError(
                "equals the sigmoid loss without label smoothing",
                where="objective.loss",
                found="robust with objective.label_smoothing=0",
                expected="objective.label_smoothing above 0, or objective.loss=sigmoid",
            )


class FromTeacher(ObjectiveSpec):
    """A teacher's distributions are learned; it is in memory, or passes over the rows before."""

    def passes_before(self, settings: Any) -> int:
        """Return one if what is kept of the teacher is computed before training."""
        return int(self.needs_teacher and getattr(settings, "top_k", None) is not None)

    def problems(self, settings: Any, seq_len: int) -> Iterator[ConfigError]:
        """Yield hidden states of a teacher that is gone."""
        del seq_len
        if self.passes_before(settings) and getattr(settings, "hidden_weight", 0):
            yield ConfigError(
                "needs the teacher at every step, but objective.top_k stores its top tokens only",
                where="objective.hidden_weight",
                found=f"{settings.hidden_weight} with objective.top_k={settings.top_k}",
                expected="0, or objective.top_k=null",
            )


def shares_prompts(settings: Any) -> bool:
    """Return whether the `objective` group computes the prompt of a pair once."""
    return bool(getattr(settings, SHARED, False))


def matched_layers(settings: Any, ours: int, theirs: int) -> tuple[tuple[int, int], ...]:
    """Return the layers, from 1, of student and teacher whose hidden states are compared.

    Args:
        settings: the `objective` group.
        ours: the student's layers.
        theirs: the teacher's.
    """
    if not getattr(settings, "hidden_weight", 0):
        return ()
    layers = range(1, ours + 1) if settings.hidden_layers is None else settings.hidden_layers
    return tuple((one, one * theirs // ours) for one in layers)


class OfGroups(ObjectiveSpec):
    """Sampled answers have rewards, which are compared with those of other answers."""

    def passes_before(self, settings: Any) -> int:
        """Return one through the adapter that training starts from, and one through the base."""
        if not self.compares_groups:  # a class of the user's, over the same documents
            return 0
        return 2 if settings.beta > 0 else 1

    def loss_unit(self, learned: Mapping[str, Any]) -> str:
        """Return tokens where the loss is a mean over those of several answers."""
        over_tokens = learned.get("objective.loss_type") in {"bnpo", "dapo"}
        return "per token" if over_tokens else super().loss_unit(learned)

    def is_sum(self, settings: Any) -> bool:
        """Return false if each micro-batch has a mean of its own."""
        return self.adds_up and plain(getattr(settings, "loss_type", None)) != "bnpo"
