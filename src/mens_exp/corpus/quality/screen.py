"""Secrets and instructions to a model in the text of rows, told by a short list of patterns.

The list is what is easily told, not what may be there: a clean screen is no proof. The kinds of
secrets are those whose form their issuer fixes, and assigned passwords; the phrases are the usual
openings of prompt injections.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.rows.schema import TrainingPair

__all__ = ["INJECTIONS", "SECRETS", "Hit", "Pattern", "hits_in", "masked", "without_secrets"]

_MOST_SHOWN: Final = 4  # characters of a secret, and never over a quarter of it


class Pattern(NamedTuple):
    """What is looked for, and texts of which one, in lower case, is always in it.

    The group ``secret`` of a secret's form, where there is one, is what is masked; else it is the
    whole match. Of a ``guessed`` secret values that say they are to be replaced do not count.
    """

    needles: tuple[str, ...]
    form: re.Pattern[str]
    guessed: bool = False


SECRETS: Final[dict[str, Pattern]] = {
    "private key": Pattern(
        ("-----begin ",), re.compile(r"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY(?: BLOCK)?-----")
    ),
    "AWS access key": Pattern(("akia", "asia"), re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b")),
    "GitHub token": Pattern(
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
        re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,})"),
    ),
    "GitLab token": Pattern(("glpat-",), re.compile(r"\bglpat-[A-Za-z0-9_-]{20,}")),
    "Slack token": Pattern(("xox",), re.compile(r"\bxox[abeprs]-[A-Za-z0-9-]{10,}")),
    "Google API key": Pattern(("aiza",), re.compile(r"\bAIza[0-9A-Za-z_-]{35}")),
    "Stripe key": Pattern(("k_live_",), re.compile(r"\b[rs]k_live_[0-9A-Za-z]{20,}")),
    "OpenAI or Anthropic key": Pattern(
        ("sk-",), re.compile(r"\bsk-(?:proj-|ant-)?[A-Za-z0-9_-]{32,}")
    ),
    "Hugging Face token": Pattern(("hf_",), re.compile(r"\bhf_[A-Za-z0-9]{30,}")),
    "JSON web token": Pattern(("eyj",), re.compile(r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}")),
    "password in a URL": Pattern(
        ("://",),
        re.compile(r"://[^\s:/@\"']+:(?P<secret>[^\s/@\"']{3,})@"),
        guessed=True,
    ),
    "assigned password": Pattern(
        ("password", "passwd", "pwd", "secret", "key", "token"),
        re.compile(
            r"(?i)\b(?:password|passwd|pwd|secret|api_?key|access_?token|auth_?token)\b[\"']?"
            r"\s*[:=]\s*[\"'](?P<secret>[^\s\"']{8,})[\"']"
        ),
        guessed=True,
    ),
}
_REPLACED: Final = re.compile(r"(?i)example|your|change|placeholder|dummy|xxx|\*\*\*|[<>{}$%]")

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
        for kind, _, secret in _secrets(text):
            yield Hit(kind, field, masked(secret))
        for kind, pattern in _possible(INJECTIONS, text):
            if pattern.form.search(text):
                yield Hit(kind, field, None)


def masked(secret: str) -> str:
    """Return the first characters of a secret, and how long it is."""
    shown = secret[: min(_MOST_SHOWN, len(secret) // 4)]
    return f"{shown}… ({len(secret)} characters)"


def without_secrets(text: str) -> str:
    """Return a text in which every secret that the screen finds is masked."""
    for _, (start, end), secret in sorted(_secrets(text), key=lambda hit: hit[1], reverse=True):
        text = f"{text[:start]}{masked(secret)}{text[end:]}"
    return text


def _secrets(text: str) -> Iterator[tuple[str, tuple[int, int], str]]:
    for kind, pattern in _possible(SECRETS, text):
        part: str | int = "secret" if "secret" in pattern.form.groupindex else 0
        for match in pattern.form.finditer(text):
            secret = match[part]
            if not (pattern.guessed and _REPLACED.search(secret)):
                yield kind, match.span(part), secret


def _possible(patterns: dict[str, Pattern], text: str) -> Iterator[tuple[str, Pattern]]:
    """Yield the patterns that may match: to look for a fixed text is much faster."""
    lowered = text.lower()
    for kind, pattern in patterns.items():
        if any(needle in lowered for needle in pattern.needles):
            yield kind, pattern
