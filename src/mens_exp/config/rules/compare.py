"""Rules of a comparison's test, which task=promote freezes for a cycle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.compare import CompareTarget, CompareTest, Sequential
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["problems"]


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield a rule for several looks, or about other items, that the test does not have."""
    for group, one in (("compare", config.compare), ("promote", config.promote)):
        if one.sequential is Sequential.always_valid and one.test is CompareTest.sign_flip:
            yield ConfigError(
                "the always-valid test is one of t",
                where=f"{group}.sequential",
                found=one.sequential.value,
                expected=f"none with {group}.test=sign_flip",
                remedy=f"set {group}.test=t or {group}.sequential=none",
            )
        if one.target is CompareTarget.these_items:
            continue
        if one.test is CompareTest.sign_flip:
            yield ConfigError(
                "flips the signs of seeds, which says nothing of other items",
                where=f"{group}.test",
                found=one.test.value,
                expected=f"t, or {group}.target=these_items",
                remedy=f"set {group}.test=t or {group}.target=these_items",
            )
        if one.sequential is Sequential.always_valid:
            yield ConfigError(
                "allows for several looks at these items only",
                where=f"{group}.sequential",
                found=one.sequential.value,
                expected=f"none, or {group}.target=these_items",
                remedy=f"set {group}.sequential=none or {group}.target=these_items",
            )
