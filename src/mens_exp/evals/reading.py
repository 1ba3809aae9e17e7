"""The part of a judgement that reading an answer gives, the same in every suite."""

from __future__ import annotations

from typing import Final

from mens_exp.evals.answer_quality import quality_of
from mens_exp.evals.suite import Judgement

__all__ = ["NO_SANDBOX", "read"]

NO_SANDBOX: Final = (
    "no sandbox: install bubblewrap, or say sandbox=unsafe to run generated code without one"
)


def read(completion: str, code: str, *, is_python: bool = True) -> Judgement:
    """Return what can be told without compiling or running anything; the suite adds the rest.

    Args:
        completion: all that the model said.
        code: the part of it that counts.
        is_python: whether the code is Python; the layout of other languages is not judged.
    """
    quality = quality_of(completion, code, is_python=is_python)
    return Judgement(
        canonical=quality.canonical,
        strict=quality.strictness,
        placeholder_hits=quality.placeholder_hits,
        trivial=quality.trivial,
        richness=quality.richness,
        anti_stub=quality.anti_stub,
    )
