"""An objective that needs two answers of a row together, for tests of what carries them."""

from __future__ import annotations

from dataclasses import replace

from mens_exp.config.objective import OBJECTIVES, AssistantObjective, ObjectiveSpec
from mens_exp.rows.answers import answer_of
from mens_exp.rows.documents import Document, RowDocuments


class _Both(RowDocuments):
    """The answer and the worse one; a token's value is its position, negative for the worse."""

    together = 2
    extra = ("place",)
    fields = frozenset({"worse"})

    def rendered(self, pair, encoder, labelling):
        worse = replace(pair, response=dict(pair.fields)["worse"])
        return [answer_of(one, 0, encoder) for one in (pair, worse)]

    def documents(self, endings, labelling):
        return [
            Document(
                own.ids,
                [own.start <= i < own.end for i in range(len(own.ids))],
                {"place": [sign * i for i in range(len(own.ids))]},
            )
            for own, sign in zip(endings, (1.0, -1.0), strict=True)
        ]


BOTH = _Both()
SETTINGS = AssistantObjective(_target_="none", name="both", labels="both")


def offer(monkeypatch):
    """Add the objective to the table."""
    spec = ObjectiveSpec(name="both", schema=AssistantObjective, documents=f"{__name__}:BOTH")
    monkeypatch.setattr(OBJECTIVES, "_known", {})
    monkeypatch.setitem(OBJECTIVES.built_in, "both", spec)
