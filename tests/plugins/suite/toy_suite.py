"""A suite of another package: each item asks for a word with a letter, and answers are read."""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_lowercase

from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.metrics import declares
from mens_exp.config.fields import setting
from mens_exp.config.suite import AnsweredSuite, SuiteSpec
from mens_exp.evals.suite import Item, Judgement, SelfTest, Suite

NO_CODE = "suite=letters judges words, not code"
OF_CODE = ("canonical", "strict", "placeholder_hits", "trivial", "richness", "anti_stub", "outcome")


@dataclass(kw_only=True, slots=True)
class LettersSuite(AnsweredSuite):
    """Words with a letter."""

    name: str = "letters"
    items: int = setting(8, "The first so many letters.", ge=1, le=26)


@declares("letters/characters", unit="characters", direction="min", note="of a right answer")
@dataclass(frozen=True, kw_only=True)
class Letters(Suite):
    """The items, and what judges their answers."""

    letters: str
    max_new_tokens: int
    name: str = "letters"

    @classmethod
    def opened(cls, settings, *, calls_functions):
        del calls_functions
        letters = ascii_lowercase[: settings.items]
        return cls(letters=letters, max_new_tokens=settings.max_new_tokens)

    @property
    def digest(self):
        return digest({"letters": self.letters, "max_new_tokens": self.max_new_tokens})

    @property
    def items(self):
        return [
            Item(
                id=one,
                messages=({"role": "user", "content": f"A word with {one}?"},),
                reference=one,
            )
            for one in self.letters
        ]

    def judge(self, answers, runner):
        del runner
        return [self._judged(one.item, one.text) for one in answers]

    def self_test(self, runner):
        right = [one.id for one in self.items if self._judged(one, one.reference).success]
        stubs = [one.id for one in self.items if self._judged(one, "").success]
        wrong = sorted(set(self.letters) - set(right))
        return SelfTest(
            references={"whole": len(self.letters)},
            failed={"whole": wrong},
            stubs=len(self.letters),
            stubs_passed=stubs,
        )

    def _judged(self, item, text):
        has_it = item.id in text.casefold()
        return Judgement(
            success=has_it,
            semantic=has_it,
            errors=() if has_it else (f"there is no {item.id}",),
            values={"letters/characters": len(text)} if has_it else {},
            unknown=dict.fromkeys((*OF_CODE, "compiles"), NO_CODE),
        )


SPEC = SuiteSpec(name="letters", schema=LettersSuite, suite="toy_suite:Letters", title="words")
