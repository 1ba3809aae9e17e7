"""An objective of another package: an answer gains on a worse one, compared with the base.

Shapes: M supervised positions, P pairs of answers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mens_exp.artifacts.metrics import Metric
from mens_exp.config.fields import setting
from mens_exp.config.objective import ObjectiveConfig, ObjectiveSpec
from mens_exp.objective.causal import LossSum, Objective, token_losses
from mens_exp.rows.answers import answer_of
from mens_exp.rows.documents import Document, RowDocuments


@dataclass(kw_only=True, slots=True)
class ContrastConfig(ObjectiveConfig):
    """Settings of contrast."""

    name: str = "contrast"
    labels: str = "contrast"
    first: int = setting(0, "Tokens that are compared, from an answer's start; 0: all.", ge=0)
    margin: float = setting(1.0, "Gain beyond which nothing is learned, in nats a token.", gt=0)
    chunk_tokens: int = setting(64, "Positions whose logits exist at one time.", ge=1)


class BothAnswers(RowDocuments):
    """The answer, and beside it the field `worse`; each token has its share of its answer."""

    together = 2
    extra = ("share",)
    fields = frozenset({"worse"})

    def rendered(self, pair, encoder, labelling):
        worse = replace(pair, response=dict(pair.fields)["worse"])
        last = len(pair.exchanges) - 1
        return [answer_of(one, last, encoder) for one in (pair, worse)]

    def documents(self, endings, labelling):
        first = dict(labelling.options)["first"]
        return [self._document(own, first) for own in endings]

    def _document(self, own, first):
        end = min(own.start + first, own.end) if first else own.end
        learned = [own.start <= place < end for place in range(len(own.ids))]
        shares = [1 / (end - own.start)] * len(own.ids)
        return Document(own.ids, learned, {"share": shares})


class Contrast(Objective):
    """The loss of pairs: what is missing to the margin."""

    def __init__(self, margin, chunk_tokens):
        self.margin = margin
        self.chunk_tokens = chunk_tokens

    def loss(self, passed):
        batch = passed.batch
        ours_M = token_losses(passed, self.chunk_tokens)
        base_M = token_losses(passed.reference, self.chunk_tokens)
        sign_M = 1 - 2 * (batch.document_M % 2)
        pairs, pair_M = (batch.document_M // 2).unique(return_inverse=True)
        gain_P = torch.zeros(len(pairs), device=ours_M.device).index_add(
            0, pair_M, (base_M - ours_M) * batch.extra["share"] * sign_M
        )
        return LossSum(
            total=(self.margin - gain_P).relu().sum(),
            count=len(pairs),
            metrics={"gain": gain_P.sum(), "wins": (gain_P > 0).sum()},
        )


class ContrastSpec(ObjectiveSpec):
    """Its name in records."""

    def learned(self, settings, *, is_chatml):
        return f"contrast{settings.first or ''}"


def _metric(name, unit, note):
    return Metric(name=name, unit=unit, direction="max", reduction="last", note=note)


DOCUMENTS = BothAnswers()
SPEC = ContrastSpec(
    name="contrast",
    schema=ContrastConfig,
    documents="toy_objective:DOCUMENTS",
    selects=frozenset({"first"}),
    in_chunks=True,
    needs_reference=True,
    metrics=(
        _metric("gain", "nats", "what answers gain on worse ones, compared with the base"),
        _metric("wins", "1", "share of answers that gain on the worse one"),
    ),
)
