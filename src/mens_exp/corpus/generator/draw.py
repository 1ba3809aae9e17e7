"""Random draws of a template's parameters: one stream of random numbers, named by a text.

Nothing here depends on the process, its hash seed or the order of other draws.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WORDS", "Draw"]

T = TypeVar("T")

_WORDS: Final = (
    "apple amber arrow basket beacon bottle bridge button candle canyon carpet castle cherry "
    "circle copper cotton dagger desert dinner dragon eagle ember engine falcon feather fern "
    "forest garden ginger glacier hammer harbor hazel island ivory jacket jungle kettle "
    "ladder lantern lemon level maple marble meadow mirror needle noon ocean olive orange "
    "orchid paper pebble pepper pillow planet pocket radar rabbit ribbon river rocket saddle "
    "salmon shadow silver spider statue stone summer sunset table temple ticket tiger timber "
    "tulip tunnel valley velvet violet wagon walnut willow window winter yellow zebra "
)
WORDS: Final = tuple(_WORDS.split())


class Draw:
    """Random choices for one task."""

    def __init__(self, seed: str) -> None:
        """Begin the stream that belongs to a text."""
        # A text is seeded by its SHA-512, not by hash(); nothing here is a secret.
        self._random = random.Random(seed)  # noqa: S311

    def pick(self, options: Sequence[T]) -> T:
        """Return one of the options."""
        return options[self._random.randrange(len(options))]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """Return several different options, in random order."""
        return self._random.sample(options, count)

    def number(self, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`, both included."""
        return self._random.randint(low, high)

    def numbers(self, count: int, low: int, high: int) -> list[int]:
        """Return so many whole numbers, each from `low` to `high`."""
        return [self._random.randint(low, high) for _ in range(count)]

    def chance(self) -> bool:
        """Return true half of the time."""
        return self._random.random() < 0.5  # noqa: PLR2004  # a half

    def shuffled(self, options: Sequence[T]) -> list[T]:
        """Return all options in random order."""
        return self._random.sample(options, len(options))

    def words(self, count: int) -> list[str]:
        """Return so many words; one may come twice."""
        return [self.pick(WORDS) for _ in range(count)]

    def letters(self, count: int, alphabet: str) -> str:
        """Return a text of so many letters of an alphabet."""
        return "".join(self.pick(alphabet) for _ in range(count))
