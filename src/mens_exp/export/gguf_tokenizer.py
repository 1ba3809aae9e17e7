"""A tokenizer.json as GGUF's header says it: a vocabulary and the name of a known splitting.

GGUF holds no tokenizer.json. A reader has the splitting rules of known pre-tokenizers built in,
by name, and a SentencePiece-like vocabulary is merged by scores alone. So only a tokenizer that is
one of those is written; any other would split text differently, and is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.tokenizer.hf import HfTokenizer

__all__ = ["GgufVocabulary", "vocabulary_of"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"  # SentencePiece's mark of a space
_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The pattern that splits text in tokenizer.json -> what llama.cpp calls the same splitting.
_SPLITS = {
    _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST: "llama-bpe",
    _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST: "qwen2",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufVocabulary:
    """The tokenizer's part of a GGUF header.

    Attributes:
        model: ``gpt2`` is byte-level BPE, ``llama`` SentencePiece-like.
        pre: name of the splitting.
        tokens: by id; ids without a token are filled up.
        types: kind of each token, as gguf counts them.
        merges: of byte-level BPE, two parts with a space between; None for scores.
        scores: of a SentencePiece-like vocabulary; None for merges.
        adds_space: whether a space stands before a text.
        adds_bos: whether the tokenizer puts a begin-of-sequence token before a text.
        adds_eos: whether it puts an end-of-sequence token behind it.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None
    scores: list[float] | None
    adds_space: bool
    adds_bos: bool
    adds_eos: bool


def vocabulary_of(tokenizer: HfTokenizer, rows: int) -> GgufVocabulary:
    """Say a tokenizer in GGUF's terms.

    Args:
        tokenizer: of the model directory.
        rows: of the model's embedding; the vocabulary is filled up to as many.

    Raises:
        RequestError: GGUF has no name for it, or it has more tokens than rows.
    """
    core = json.loads(tokenizer.core.to_str())
    model = core["model"]
    if model["type"] != "BPE":
        raise _unsayable("its model", model["type"], "BPE")
    if tokenizer.last_id >= rows:
        raise _unsayable("its largest id", tokenizer.last_id, f"at most {rows - 1}, the rows")
    is_scored = bool(model["byte_fallback"])
    tokens = _tokens(tokenizer, rows)
    adds_bos, adds_eos = _added_around(tokenizer)
    return GgufVocabulary(
        model="llama" if is_scored else "gpt2",
        pre="default" if is_scored else _splitting(core),
        tokens=tokens,
        types=_types(tokenizer, tokens, model, is_scored=is_scored),
        merges=None if is_scored else [" ".join(pair) for pair in _pairs(model)],
        scores=_scores(tokens, model) if is_scored else None,
        adds_space=is_scored and _adds_space(core),
        adds_bos=adds_bos,
        adds_eos=adds_eos,
    )


def _unsayable(what: str, found: object, expected: str) -> RequestError:
    return RequestError(
        f"the tokenizer has no equal in GGUF by {what}",
        where="tokenizer.json",
        found=found if isinstance(found, str) else json.dumps(found, ensure_ascii=False),
        expected=expected,
        remedy="serve the directory itself: task=serve, vLLM and Ollama read tokenizer.json",
    )


def _tokens(tokenizer: HfTokenizer, rows: int) -> list[str]:
    by_id = {id_: token for token, id_ in tokenizer.core.get_vocab(with_added_tokens=True).items()}
    return [by_id.get(index, f"[PAD{index}]") for index in range(rows)]


def _types(
    tokenizer: HfTokenizer, tokens: list[str], model: dict[str, Any], *, is_scored: bool
) -> list[int]:
    added = tokenizer.core.get_added_tokens_decoder()
    unknown = model["unk_token"]

    def kind(index: int, token: str) -> int:
        if is_scored and token == unknown:
            return _UNKNOWN
        if index in added:
            return _CONTROL if added[index].special else _USER_DEFINED
        if token not in model["vocab"]:
            return _UNUSED
        is_byte = is_scored and len(token) == 6 and token.startswith("<0x")  # noqa: PLR2004
        return _BYTE if is_byte else _NORMAL

    return [kind(index, token) for index, token in enumerate(tokens)]


def _pairs(model: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the merges, best first; files write them as pairs or with a space between."""
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def _added_around(tokenizer: HfTokenizer) -> tuple[bool, bool]:
    """Tell whether the tokenizer itself adds a begin and an end of sequence."""
    bare = tokenizer.core.encode("a", add_special_tokens=False).ids
    whole = tokenizer.core.encode("a", add_special_tokens=True).ids
    for bos in (False, True):
        for eos in (False, True):
            around = [*[tokenizer.bos_id] * bos, *bare, *[tokenizer.eos_id] * eos]
            if around == whole:
                return bos, eos
    raise _unsayable("what it adds to a text", whole, "a begin or end of sequence, or nothing")


def _splitting(core: dict[str, Any]) -> str:
    """Name the splitting of byte-level BPE."""
    normalizer = core["normalizer"]
    if normalizer not in (None, {"type": "NFC"}):  # readers take text as it is; most is in NFC
        raise _unsayable("its normalizer", normalizer, "none or NFC")
    if (core["decoder"] or {}).get("type") != "ByteLevel":
        raise _unsayable("its decoder", core["decoder"], "ByteLevel")
    if not core["model"]["merges"]:
        raise _unsayable("its merges", "none", "some: readers take no vocabulary without")
    parts = core["pre_tokenizer"] or {}
    *before, level = parts["pretokenizers"] if parts.get("type") == "Sequence" else [parts]
    is_plain = level.get("type") == "ByteLevel" and not level["add_prefix_space"]
    has_regex = level.get("use_regex", True)
    name = None
    if is_plain and has_regex and not before:
        name = "gpt-2"
    elif is_plain and has_regex and before == [{"type": "Digits", "individual_digits": True}]:
        name = "smollm"
    elif is_plain and not has_regex and len(before) == 1 and before[0].get("type") == "Split":
        name = _SPLITS.get(before[0]["pattern"].get("Regex", ""))
        if before[0]["behavior"] != "Isolated" or before[0]["invert"]:
            name = None
    # What readers do under the name: Llama 3's takes a whole word before it merges.
    if name is None or (core["model"].get("ignore_merges", False) and name != "llama-bpe"):
        raise _unsayable(
            "its pre-tokenizer", parts, "that of GPT-2, SmolLM, Llama 3 or Qwen 2 and 3"
        )
    return name


def _adds_space(core: dict[str, Any]) -> bool:
    """Tell whether a SentencePiece-like tokenizer puts a space before every text."""
    normalizer, splitting = core["normalizer"], core["pre_tokenizer"]
    parts = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    if splitting is None and parts == [{"type": "Prepend", "prepend": _SPACE}, replace]:
        return True
    if splitting is None and parts == [replace]:
        return False
    # Metaspace's other schemes put none before a text that begins with one; llama.cpp does.
    never = {"type": "Metaspace", "prepend_scheme": "never", "split": False, "replacement": _SPACE}
    if not parts and splitting == never:
        return False
    raise _unsayable(
        "its normalizer and pre-tokenizer",
        [normalizer, splitting],
        "a space before every text or before none, and no splitting",
    )


def _scores(tokens: list[str], model: dict[str, Any]) -> list[float]:
    """Return scores under which merging by score is merging by rank.

    Raises:
        RequestError: there are none: a reader merges any two tokens that make a third, best score
            of the third first, and this tokenizer does not.
    """
    vocab = model["vocab"]
    ranks: dict[str, list[int]] = {}
    for rank, (left, right) in enumerate(_pairs(model)):
        ranks.setdefault(left + right, []).append(rank)
    in_order = [whole for _, whole in sorted((found[0], whole) for whole, found in ranks.items())]
    reached = 0
    for whole in in_order:
        splits = sum(whole[:cut] in vocab and whole[cut:] in vocab for cut in range(1, len(whole)))
        if ranks[whole] != list(range(reached, reached + splits)):
            raise _unsayable("the order of its merges", whole, "that of one score for each token")
        reached += splits
    made = {
        token
        for token in vocab
        if any(token[:cut] in vocab and token[cut:] in vocab for cut in range(1, len(token)))
        and not (token.startswith("<") and token.endswith(">"))
    }
    if made - ranks.keys():
        raise _unsayable(
            "its merges", min(made - ranks.keys()), "a merge for every token that two others make"
        )
    place = {whole: -float(index) for index, whole in enumerate(in_order)}
    lowest = -float(len(in_order))
    return [place.get(token, lowest) for token in tokens]
