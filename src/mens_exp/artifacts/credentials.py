"""Detection of credentials in text, and masking of them in records.

Only easily recognized forms are detected, so a text without findings is not proven clean. A form is
a format fixed by its issuer, a password in a URL, or a value next to a name such as ``api_key``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_SHOWN: Final = 4  # characters of a masked secret, and never more than a quarter of it


class Pattern(NamedTuple):
    """A pattern, and lower-case strings of which at least one occurs in every match.

    The group ``secret`` of the pattern, if there is one, is masked, otherwise the whole match. For
    a ``guessed`` secret, values that look like placeholders are ignored.
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
    "webhook": Pattern(
        ("hooks.slack.com", "/api/webhooks/"),
        re.compile(
            r"(?:hooks\.slack\.com/(?:services|triggers|workflows)/"
            r"|discord(?:app)?\.com/api/webhooks/\d{5,}/)(?P<secret>[\w/-]{20,})"
        ),
    ),
    "Google API key": Pattern(("aiza",), re.compile(r"\bAIza[0-9A-Za-z_-]{35}")),
    "Stripe key": Pattern(("k_live_",), re.compile(r"\b[rs]k_live_[0-9A-Za-z]{20,}")),
    "OpenAI or Anthropic key": Pattern(
        ("sk-",), re.compile(r"\bsk-(?:proj-|ant-)?[A-Za-z0-9_-]{32,}")
    ),
    "Hugging Face token": Pattern(("hf_",), re.compile(r"\bhf_[A-Za-z0-9]{30,}")),
    "W&B key": Pattern(("wandb_v1_",), re.compile(r"\bwandb_v1_[A-Za-z0-9_]{30,}")),
    "npm or PyPI token": Pattern(
        ("npm_", "pypi-"), re.compile(r"\b(?:npm_[A-Za-z0-9]{36}\b|pypi-[A-Za-z0-9_-]{50,})")
    ),
    "key of a model service": Pattern(
        ("gsk_", "xai-", "nvapi-", "r8_", "pplx-"),
        re.compile(r"\b(?:gsk_|xai-|nvapi-|r8_|pplx-)[A-Za-z0-9_-]{32,}"),
    ),
    "token of a cloud service": Pattern(
        ("dapi", "_v1_", "sg."),
        re.compile(
            r"\b(?:dapi[0-9a-f]{32}\b|do[opr]_v1_[0-9a-f]{64}\b|SG\.[\w-]{20,}\.[\w-]{20,})"
        ),
    ),
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

# In a record, no value counts as a placeholder, and a key's name alone makes a value suspicious.
_KEY_BLOCK: Final = re.compile(
    r"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*KEY[A-Z ]*-----|\Z)",
    re.DOTALL,
)
# A password may contain @ and an unescaped /; digits before a / are a port.
_IN_URL: Final = re.compile(
    r"(?<!/)//(?P<secret>[^\s/\"']+|[^\s/@:\"']{1,99}:(?!\d+/)[^\s@\"']{1,256})@"
)
_SURE: Final = (  # unambiguous names: even a value in the form of a content hash is masked
    r"(?:api|access|account|private|signing)[_-]?key|secret(?:[_-]?(?:access[_-]?)?key)?"
    r"|pass(?:word|wd|phrase)?|pwd|(?:amz|goog)-signature"
)
_CAMEL: Final = r"(?:access|auth|client|refresh|session)?"  # before a name: accessToken
_NAME: Final = rf"{_CAMEL}(?:(?P<sure>{_SURE})|token|auth|credentials?|sig(?:nature)?)"
_VALUE: Final = r"(?P<secret>[\w+/.~%!@#^*-][\w+/.~%!@#^*$-]{15,}=*)"  # $NAME is a reference
_NAMED: Final = re.compile(rf"(?i)(?:\b|_)(?:{_NAME})[\"']?\s*[:=]\s*[\"']?{_VALUE}")
# In HTTP's Authorization, in netrc, and behind an option: --hub-token
_SCHEME: Final = re.compile(
    rf"(?i)(?:\b(?:bearer|basic|password)|--(?:[a-z]+[_-]){{0,3}}(?:{_NAME}))\s+[\"']?{_VALUE}"
)
_KEY: Final = re.compile(rf"(?i)(?:^|[_.-])(?:{_NAME})$")
_LEAST_LENGTH: Final = 16
_LEAST_BITS: Final = 3.2  # per character; words of sixteen letters have 3, a random token 3.7


def masked(secret: str) -> str:
    """Return the first characters of a secret, and its length."""
    shown = secret[: min(_MOST_SHOWN, len(secret) // 4)]
    return f"{shown}… ({len(secret)} characters)"


def without_secrets(text: str) -> str:
    """Return a text with every detected secret masked."""
    for _, (start, end), secret in sorted(found_in(text), key=lambda hit: hit[1], reverse=True):
        text = f"{text[:start]}{masked(secret)}{text[end:]}"
    return text


def looks_like_one(text: str) -> str | None:
    """Return the first credential in a text, masked; None if none is detected."""
    spans = _in_record(text)
    return masked(text[slice(*spans[0])]) if spans else None


def of_known_form(text: str) -> str | None:
    """Return the first credential in a form that its issuer fixed, masked; None without one."""
    found = (secret for kind, _, secret in found_in(text) if not SECRETS[kind].guessed)
    return next(map(masked, found), None)


def screened(value: Any, name: str = "") -> Any:
    """Return a JSON value with all detected credentials masked; other values are unchanged.

    Args:
        value: a value of a record.
        name: its key.
    """
    if isinstance(value, dict):
        return {key: screened(one, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(screened(one, name) for one in value)
    if not isinstance(value, str):
        return value
    key = _KEY.search(name)
    if key is not None and _is_random(value, may_be_hash=key["sure"] is None):
        return masked(value)
    text = value
    for start, end in reversed(_in_record(value)):
        text = f"{text[:start]}{masked(value[start:end])}{text[end:]}"
    return text


def _in_record(text: str) -> list[tuple[int, int]]:
    """Return the spans of credentials in the text of a record; overlapping spans are merged."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(_spans(text)):
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _spans(text: str) -> Iterator[tuple[int, int]]:
    for _, pattern in possible(SECRETS, text):
        if not pattern.guessed:
            yield from (match.span() for match in pattern.form.finditer(text))
    if "-----BEGIN " in text:
        yield from (match.span() for match in _KEY_BLOCK.finditer(text))
    if "//" in text:
        for match in _IN_URL.finditer(text):
            if ":" in match["secret"] or _is_random(match["secret"]):
                yield match.span("secret")
    for match in (*_NAMED.finditer(text), *_SCHEME.finditer(text)):
        if _is_random(match["secret"], may_be_hash=match.groupdict().get("sure") is None):
            yield match.span("secret")


def _is_random(text: str, *, may_be_hash: bool = True) -> bool:
    """Distinguish a random token from a word, a path or, if `may_be_hash`, a content hash."""
    if len(text) < _LEAST_LENGTH or re.search(r"\s", text):
        return False
    if may_be_hash and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text):
        return False
    if text.startswith((".", "/", "~")):
        return False
    counts = Counter(text).values()
    bits = -sum(n / len(text) * math.log2(n / len(text)) for n in counts)
    return bits >= _LEAST_BITS and any(map(str.isdigit, text)) and any(map(str.isalpha, text))


def found_in(text: str) -> Iterator[tuple[str, tuple[int, int], str]]:
    """Yield the kind, the span and the text of every secret that the patterns match."""
    for kind, pattern in possible(SECRETS, text):
        part: str | int = "secret" if "secret" in pattern.form.groupindex else 0
        for match in pattern.form.finditer(text):
            secret = match[part]
            if not (pattern.guessed and _REPLACED.search(secret)):
                yield kind, match.span(part), secret


def possible(patterns: dict[str, Pattern], text: str) -> Iterator[tuple[str, Pattern]]:
    """Yield the patterns that may match; searching for a fixed string is much faster."""
    lowered = text.lower()
    for kind, pattern in patterns.items():
        if any(needle in lowered for needle in pattern.needles):
            yield kind, pattern
