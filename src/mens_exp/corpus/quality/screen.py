"""Secrets and instructions to a model in the text of rows, told by a short list of patterns.

The list is what is easily told, not what may be there: a clean screen is no proof. The kinds of
secrets are those whose form their issuer fixes, and assigned passwords; the phrases are the usual
openings of prompt injections.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from mens_exp.artifacts.credentials import Pattern, found_in, masked, possible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.rows.schema import TrainingPair

__all__ = ["INJECTIONS", "Hit", "hits_in"]

_BEFORE: Final = r"(?:previous|prior|above|earlier|preceding)"
_ORDERS: Final = r"(?:instructions?|prompts?|directions?|messages?|rules)"
_FILLING: Final = r"(?:(?:all|any|of|the|your|my)\s+)*"
INJECTIONS: Final[dict[str, Pattern]] = {
    "ignore previous instructions": Pattern(
        ("ignore", "disregard", "forget", "override"),
        re.compile(
            rf"(?i)\b(?:ignore|disregard|forget|override)\s+{_FILLING}{_BEFORE}\s+{_ORDERS}\b"
        ),
    ),
    "forget everything": Pattern(
        ("forget",),
        re.compile(r"(?i)\bforget\s+(?:everything|all)\s+(?:you|above|before|i\s+(?:said|told))\b"),
    ),
    "new instructions": Pattern(
        ("new",), re.compile(r"(?i)\b(?:these\s+are\s+your|your)\s+new\s+instructions\b")
    ),
    "do anything now": Pattern(("do",), re.compile(r"(?i)\bdo\s+anything\s+now\b")),
    "another role": Pattern(
        ("you",),
        re.compile(
            r"(?i)\byou\s+are\s+(?:now|no\s+longer)\s+(?:an?\s+)?(?:AI|DAN|unrestricted|bound)\b"
        ),
    ),
    "reveal the prompt": Pattern(
        ("prompt",),
        re.compile(
            r"(?i)\b(?:reveal|print|show|repeat|output|tell)\s+(?:me\s+)?(?:your|the)\s+"
            r"(?:hidden\s+|initial\s+|original\s+|full\s+)?system\s+prompt\b"
        ),
    ),
    "developer mode": Pattern(
        ("developer",), re.compile(r"(?i)\bdeveloper\s+mode\s+(?:is\s+)?(?:enabled|activated|on)\b")
    ),
    "control tokens": Pattern(
        ("<|", "<<sys>>", "inst]"),
        re.compile(
            r"<\|(?:im_start|im_end|endoftext|eot_id|start_header_id)\|>|<<SYS>>|\[/?INST\]"
        ),
    ),
}


class Hit(NamedTuple):
    """One finding; `shown` is the masked beginning of a secret, and None of a phrase."""

    kind: str
    field: str
    shown: str | None


def hits_in(pair: TrainingPair) -> Iterator[Hit]:
    """Yield what the screen finds in a row: a secret each time, a phrase once a field."""
    fields = [("system", pair.system)] if pair.system is not None else []
    for number, (asked, said) in enumerate(pair.exchanges):
        turn = f", turn {number + 1}" if pair.history else ""
        fields += [(f"prompt{turn}", asked), (f"answer{turn}", said)]
    for field, text in fields:
        for kind, _, secret in found_in(text):
            yield Hit(kind, field, masked(secret))
        for kind, pattern in possible(INJECTIONS, text):
            if pattern.form.search(text):
                yield Hit(kind, field, None)
