"""The tokenizers: Hugging Face's, read from its files without torch, and VoxTokenizer.

VoxTokenizer has 131 ids and is bit-compatible with the Vox mens trainer's, including its losses.
0 is PAD, 1 UNK, 2 EOS; printable ASCII is 3 to 97; 33 compounds follow from 98. At each position
the first compound *in list order* that matches is taken, not the longest; then an ASCII character;
then UNK for a single byte. Newlines, tabs and all bytes of non-ASCII text are therefore lost.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from mens_exp.artifacts.digest import digest, sha256_bytes, sha256_file
from mens_exp.errors import DataError, ModelFileError
from mens_exp.tokenizer.control import ControlText, Placed, placed
from mens_exp.tokenizer.templates import (
    CHATML,
    DATE,
    TOKENIZERS_OWN,
    Message,
    generated_spans,
    is_dated,
    render,
    template_in_force,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from mens_exp.config.model import TokenizerConfig

_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
_PROBE = "a small answer"
_SCRIPTS = "a small answer, 7\n\té漢🦀"


@dataclass(frozen=True, kw_only=True, slots=True)
class HfTokenizer:
    """tokenizer.json, its special tokens and its chat template.

    ``turn_end_ids`` are the end-of-sequence token, and the control token that the chat template
    writes after an answer. ``end_ids``, the ids that end an answer, are these and those of the
    model, with which transformers ends an answer. ``template_source`` is the origin of the chat
    template, and ``date`` is its current date. Conversation text that spells a control token is
    encoded as text, unless ``allow_control_text`` is set.
    """

    core: Tokenizer = field(repr=False)
    chat_template: str
    template_source: str
    special_tokens: dict[str, str]
    end_ids: set[int]
    turn_end_ids: set[int]
    sha256: str
    date: str = DATE
    allow_control_text: bool = False
    _control: ControlText = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Look up the control tokens."""
        control = ControlText(self.core, allow=self.allow_control_text)
        object.__setattr__(self, "_control", control)  # required for a frozen dataclass

    @classmethod
    def from_directory(cls, directory: Path, config: TokenizerConfig | None = None) -> HfTokenizer:
        """Read the tokenizer of a model directory.

        Args:
            directory: directory of tokenizer.json.
            config: the `tokenizer` group; None takes everything from the directory.

        Raises:
            ModelFileError: tokenizer.json is missing or invalid.
            ConfigError: the chat template file is missing or cannot be read.
        """
        path = directory / "tokenizer.json"
        try:
            core = Tokenizer.from_file(str(path))
            core.encode(_SCRIPTS)  # some faults appear only with an unknown character
        except BaseException as error:
            # tokenizers raises bare Exception for all errors, and a Rust panic is not an Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ModelFileError("is not a tokenizer", where=str(path), found=str(error)) from error
        core.no_padding()
        core.no_truncation()
        template, source = chat_template_of(directory, config)
        special_tokens = _special_tokens(_tokenizer_config(directory))
        ends = _end_ids(core, template, special_tokens)
        return cls(
            core=core,
            chat_template=template,
            template_source=source,
            special_tokens=special_tokens,
            end_ids=ends | _model_end_ids(directory, core.get_vocab_size()),
            turn_end_ids=ends,
            sha256=sha256_file(path),
            date=DATE if config is None else config.date,
            allow_control_text=config is not None and config.allow_control_text,
        )

    @property
    def template_sha256(self) -> str:
        """Hash of the effective chat template."""
        return sha256_bytes(self.chat_template.encode())

    @property
    def has_own_template(self) -> bool:
        """Whether the chat template is the tokenizer's own."""
        return self.template_source == TOKENIZERS_OWN

    @property
    def is_dated(self) -> bool:
        """Whether the chat template uses the date."""
        return is_dated(self.chat_template)

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-sequence token, if there is one."""
        return _id_of(self.core, self.special_tokens.get("eos_token"))

    @property
    def bos_id(self) -> int | None:
        """Id of the begin-of-sequence token, if there is one."""
        return _id_of(self.core, self.special_tokens.get("bos_token"))

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer itself prepends the begin-of-sequence token to every text."""
        return self.bos_id is not None and self.core.encode("").ids[:1] == [self.bos_id]

    @property
    def text_start(self) -> str:
        """The control token that the tokenizer puts before every text; empty if none."""
        return self.special_tokens["bos_token"] if self.adds_bos else ""

    @property
    def special_ids(self) -> set[int]:
        """Ids of control tokens."""
        return _control_ids(self.core)

    @property
    def last_id(self) -> int:
        """Largest id."""
        return max(self.core.get_vocab(with_added_tokens=True).values(), default=0)

    @property
    def pad_id(self) -> int:
        """Id used for padding; masked by length, never by its value."""
        for name in (self.special_tokens.get("pad_token"), self.special_tokens.get("eos_token")):
            token = _id_of(self.core, name)
            if token is not None:
                return token
        return 0

    def guard(self, text: str) -> str:
        """Return a row's text for `render`, with anything that spells a control token guarded."""
        return self._control.guard(text)

    def render(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        """Render a conversation with the effective chat template.

        Control tokens in its texts are guarded, so that `encode_all` can distinguish them from the
        template's own; `unguard` makes the text readable.
        """
        return render(
            self.chat_template,
            self._guarded(messages),
            add_generation_prompt=add_generation_prompt,
            today=self.date,
            **self.special_tokens,
        )

    def unguard(self, text: str) -> str:
        """Return a rendered text in readable form."""
        return self._control.unguard(text)

    def generated_spans(self, messages: list[Message]) -> list[tuple[int, int]] | None:
        """Return the spans marked as generated by the template, in characters of rendered text."""
        return generated_spans(
            self.chat_template, self._guarded(messages), today=self.date, **self.special_tokens
        )

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without adding the tokenizer's own special tokens."""
        return self._control.encode(list(texts))

    def encode_pieces(self, texts: Sequence[Sequence[str]]) -> list[Placed]:
        """Encode texts given in pieces, with the pieces of each token."""
        return self._control.encode_pieces(texts)

    def encode_prompts(self, conversations: Sequence[list[Message]]) -> list[list[int]]:
        """Encode conversations up to the start of the assistant's turn, as in training."""
        return self.encode_all(
            [self.render(messages, add_generation_prompt=True) for messages in conversations]
        )

    def _guarded(self, messages: list[Message]) -> list[Message]:
        return [
            {
                key: value if key == "role" else _each_text(value, self.guard)
                for key, value in turn.items()
            }
            for turn in messages
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids without control tokens."""
        return str(self.core.decode(list(ids), skip_special_tokens=True))

    def spell(self, ids: Sequence[int]) -> str:
        """Decode ids, including the text of control tokens."""
        return str(self.core.decode(list(ids), skip_special_tokens=False))


def chat_template_of(directory: Path, config: TokenizerConfig | None) -> tuple[str, str]:
    """Return the effective chat template of a model directory, and its source for records.

    Raises:
        ConfigError: the file named by `tokenizer.chat_template` contains no template.
        ModelFileError: the directory has several templates, none of them named default.
    """
    named = None if config is None else config.chat_template
    return template_in_force(directory, _tokenizer_config(directory), named)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with every string in it changed, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _each_text(one, change) for key, one in value.items()}
    return [_each_text(one, change) for one in value] if isinstance(value, list) else value


def _id_of(core: Tokenizer, token: str | None) -> int | None:
    found = core.token_to_id(token) if token else None
    return None if found is None else int(found)


def _control_ids(core: Tokenizer) -> set[int]:
    added = core.get_added_tokens_decoder()
    return {token for token, what in added.items() if what.special}


def _end_ids(core: Tokenizer, template: str, special_tokens: dict[str, str]) -> set[int]:
    """Return the ids that end an answer; the template's marker is found by rendering an answer."""
    eos = _id_of(core, special_tokens.get("eos_token"))
    ends = set() if eos is None else {eos}
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    try:
        text = render(template, turns, add_generation_prompt=False, **special_tokens)
    except DataError:  # a template that needs other turns is refused when rows are encoded
        return ends
    closing = core.encode(text.rpartition(_PROBE)[2], add_special_tokens=False).ids
    controls = _control_ids(core)
    return ends | set([token for token in closing if token in controls][:1])


def _model_end_ids(directory: Path, vocab_size: int) -> set[int]:
    """Return the ids with which transformers' ``generate`` ends an answer of the model.

    They are in generation_config.json; if it has none, in config.json.
    """
    of_model = _read_object(directory / "config.json")
    inside = of_model.get("text_config")
    for settings in (
        _read_object(directory / "generation_config.json"),
        of_model,
        inside if isinstance(inside, dict) else {},
    ):
        found = settings.get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            known = range(vocab_size)
            return {one for one in ids if type(one) is int and one in known}
    return set()


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, merged over the token file of older tokenizers."""
    config = _read_object(directory / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    return config | _read_object(directory / "special_tokens_map.json")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError("cannot be read", where=str(path), found=str(error)) from error
    if not isinstance(value, dict):
        raise ModelFileError("is not a JSON object", where=str(path))
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ModelFileError(
            "contains half of a surrogate pair", where=str(path), found=str(error)
        ) from error
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _TOKEN_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


VOX_PAD, VOX_UNK, VOX_EOS = 0, 1, 2
_FIRST_ASCII, _LAST_ASCII = 32, 126
VOX_COMPOUNDS = (
    "workflow", "activity", "ret ", "let ", "actor ", "fn ", "type ", "import ", "spawn(",
    "match ", "with {", "->", "=>", "::", "..", "!=", "==", ">=", "<=", "<|im_start|>",
    "<|im_end|>", "```", "@mcp", "@table", "@query", "@mutation", "@action", "@server", "@test",
    "@component", "@agent_def", "@skill", "@v0",
)  # fmt: skip
_FIRST_COMPOUND = 3 + _LAST_ASCII - _FIRST_ASCII + 1
VOX_VOCAB_SIZE = _FIRST_COMPOUND + len(VOX_COMPOUNDS)
_IM_START, _IM_END = (
    _FIRST_COMPOUND + VOX_COMPOUNDS.index(f"<|im_{x}|>") for x in ("start", "end")
)

# Every id fits a byte, so that text between compounds is encoded with one table lookup per run.
_OF_BYTE = bytes(
    byte - _FIRST_ASCII + 3 if _FIRST_ASCII <= byte <= _LAST_ASCII else VOX_UNK
    for byte in range(256)
)
_OF_COMPOUND = {
    text.encode(): bytes([_FIRST_COMPOUND + place]) for place, text in enumerate(VOX_COMPOUNDS)
}
# An alternation takes the first alternative that matches, which is list order.
_COMPOUND = re.compile(b"(" + b"|".join(map(re.escape, _OF_COMPOUND)) + b")")
_TEXT = (
    "",  # PAD
    "\N{REPLACEMENT CHARACTER}",  # UNK
    "",  # EOS
    *map(chr, range(_FIRST_ASCII, _LAST_ASCII + 1)),
    *VOX_COMPOUNDS,
)
_BYTES = [1] * _FIRST_COMPOUND + [len(text) for text in VOX_COMPOUNDS]


@dataclass(frozen=True, kw_only=True, slots=True)
class VoxTokenizer:
    """The fixed Vox tokenizer with ChatML; a ChatML marker in a row's text becomes that marker."""

    chat_template: str = CHATML
    template_source: str = "ChatML"
    date: str = DATE
    allow_control_text: bool = True  # its ids cannot distinguish a row's markers from ours

    @property
    def sha256(self) -> str:
        """Hash of the vocabulary."""
        return digest({"tokenizer": "vox", "vocabulary": list(_TEXT)})

    @property
    def template_sha256(self) -> str:
        """Hash of the effective chat template."""
        return sha256_bytes(self.chat_template.encode())

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of control tokens by role; PAD, UNK and EOS have none."""
        return {}

    @property
    def is_dated(self) -> bool:
        """Whether the chat template uses the date."""
        return is_dated(self.chat_template)

    @property
    def bos_id(self) -> None:
        """There is no begin-of-sequence token."""
        return

    @property
    def adds_bos(self) -> bool:
        """Always false: nothing is prepended to a text."""
        return False

    @property
    def text_start(self) -> str:
        """Always empty: nothing is prepended to a text."""
        return ""

    @property
    def eos_id(self) -> int:
        """Id of the end-of-sequence token."""
        return VOX_EOS

    @property
    def pad_id(self) -> int:
        """Id used for padding."""
        return VOX_PAD

    @property
    def last_id(self) -> int:
        """Highest id."""
        return VOX_VOCAB_SIZE - 1

    @property
    def special_ids(self) -> set[int]:
        """Ids of control tokens."""
        return {VOX_PAD, VOX_EOS, _IM_START, _IM_END}

    @property
    def end_ids(self) -> set[int]:
        """Ids that end an answer: EOS, and ChatML's end marker."""
        return {VOX_EOS, _IM_END}

    def render(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        """Render a conversation with the chat template."""
        return render(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            today=self.date,
        )

    def generated_spans(self, messages: list[Message]) -> list[tuple[int, int]] | None:
        """Return the spans marked as generated by the template, in characters of rendered text."""
        return generated_spans(self.chat_template, messages, today=self.date)

    def guard(self, text: str) -> str:
        """Return the text unchanged, because a marker in it becomes that marker."""
        return text

    def unguard(self, text: str) -> str:
        """Return the text unchanged."""
        return text

    def encode_prompts(self, conversations: Sequence[list[Message]]) -> list[list[int]]:
        """Encode conversations up to the start of the assistant's turn, as in training."""
        return [self.encode(self.render(c, add_generation_prompt=True)) for c in conversations]

    def encode(self, text: str) -> list[int]:
        """Encode a text; a lone surrogate counts as three bytes, as in the reference's UTF-8."""
        pieces = _COMPOUND.split(text.encode("utf-8", "surrogatepass"))
        runs = [piece.translate(_OF_BYTE) for piece in pieces]
        runs[1::2] = [_OF_COMPOUND[piece] for piece in pieces[1::2]]
        return list(b"".join(runs))

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts."""
        return [self.encode(text) for text in texts]

    def encode_pieces(self, texts: Sequence[Sequence[str]]) -> list[Placed]:
        """Encode texts given in pieces, with the pieces of each token; positions are in bytes."""
        return [_placed(self.encode("".join(pieces)), pieces) for pieces in texts]

    def spell(self, ids: Sequence[int]) -> str:
        """Decode ids; the text of control tokens is included already."""
        return self.decode(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids: PAD and EOS are dropped, UNK is U+FFFD.

        An id beyond the vocabulary, which a model with a padded table can emit, is U+FFFD too.
        """
        unknown = _TEXT[VOX_UNK]
        return "".join([_TEXT[i] if 0 <= i < VOX_VOCAB_SIZE else unknown for i in ids])


def _placed(ids: list[int], pieces: Sequence[str]) -> Placed:
    """Attribute tokens to pieces; every id is one byte, except the compounds."""
    sizes = np.array([_BYTES[token] for token in ids], np.int64)
    ends = np.cumsum(sizes)
    lengths = [len(piece.encode("utf-8", "surrogatepass")) for piece in pieces]
    return placed(ids, np.stack([ends - sizes, ends], axis=1), lengths)
