"""Batched generation, greedy or sampled, and per-layer traces of one document.

Each prompt has its own random stream, and each of its tokens consumes one uniform number. A prompt
with a given seed therefore gets the same tokens regardless of the rest of the batch. A trace holds
the hidden states after each layer.

Shapes: B prompts, T tokens of the longest or of the document, D hidden width, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
import random
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from mens_exp.model.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Extra tokens to inspect beyond the length of the longest stop text. A token usually has at least
# one character, but one that ends in the middle of a character may decode to none.
_MARGIN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling settings.

    Attributes:
        temperature: above 0; logits are divided by it.
        top_p: tokens are drawn from the smallest set with this cumulative probability.
        seeds: one for each prompt.
    """

    temperature: float
    top_p: float
    seeds: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stops:
    """Texts that end an answer.

    Attributes:
        texts: the stop texts of each prompt; empty if it has none.
        decode: turns ids into text.
    """

    texts: Sequence[Sequence[str]]
    decode: Callable[[Sequence[int]], str]


class Draw:
    """Draws the next token of every prompt."""

    def __init__(self, sampling: Sampling) -> None:
        """Start the random stream of every prompt."""
        self.sampling = sampling
        self._streams = [torch.Generator().manual_seed(seed) for seed in sampling.seeds]

    def __call__(self, logits_BV: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Draw one token per prompt, ``[B]``.

        Args:
            logits_BV: logits of the next token.
            rows: the prompt of each row; all prompts in order by default.
        """
        streams = self._streams if rows is None else [self._streams[row] for row in rows]
        uniform = [torch.rand(1, generator=stream, dtype=torch.float64) for stream in streams]
        uniform_B1 = torch.stack(uniform).to(logits_BV.device)
        ordered_BV, tokens_BV = (logits_BV.double() / self.sampling.temperature).sort(
            dim=-1, descending=True, stable=True
        )
        chance_BV = ordered_BV.softmax(-1)
        reached_BV = chance_BV.cumsum(-1)
        # Always keep the first token; keep another while those before it do not reach top_p.
        kept_BV = reached_BV - chance_BV < self.sampling.top_p
        total_B1 = (chance_BV * kept_BV).sum(-1, keepdim=True)
        place_B1 = (reached_BV <= uniform_B1 * total_B1).sum(-1, keepdim=True)
        place_B1 = place_B1.minimum(kept_BV.sum(-1, keepdim=True) - 1)
        return tokens_BV.gather(-1, place_B1).squeeze(-1)

    def as_processor(self, ids_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        """Mask all logits but the drawn token's, as a transformers logits processor."""
        del ids_BT
        drawn_B1 = self(logits_BV).unsqueeze(-1)
        return torch.full_like(logits_BV, -torch.inf).scatter(-1, drawn_B1, 0.0)


class StopWatch:
    """Detects when an answer has reached one of its stop texts."""

    def __init__(self, stops: Stops) -> None:
        """Start with empty answers."""
        self.stops = stops
        self._window = max((len(text) for one in stops.texts for text in one), default=0) + _MARGIN
        self.lengths: dict[int, int] = {}

    def has_stopped(self, row: int, ids: Sequence[int]) -> bool:
        """Return whether an answer has reached a stop text, and remember its length at that point.

        Args:
            row: index of the prompt.
            ids: the answer so far.
        """
        if row not in self.lengths:
            texts = self.stops.texts[row]
            tail = self.stops.decode(ids[-self._window :]) if texts else ""
            if any(text in tail for text in texts):
                self.lengths[row] = len(ids)
        return row in self.lengths


@dataclass(kw_only=True)
class Answers:
    """Answers in progress; the backend supplies the logits of each next token.

    Attributes:
        count: number of prompts.
        max_new_tokens: maximum length of an answer.
        end_ids: ids that end an answer.
        sampling: sampling settings; None is greedy decoding.
        stops: texts that end an answer.
        on_end: called with the index of a prompt whose answer has ended, and the seconds since it
            began.
        made: the new ids of each prompt.
    """

    count: int
    max_new_tokens: int
    end_ids: set[int]
    sampling: Sampling | None = None
    stops: Stops | None = None
    on_end: Callable[[int, float], None] | None = None

    def __post_init__(self) -> None:
        """Start with empty answers."""
        self.made: list[list[int]] = [[] for _ in range(self.count)]
        self._began: dict[int, float] = {}
        self._draw = Draw(self.sampling) if self.sampling is not None else None
        self._watch = StopWatch(self.stops) if self.stops is not None else None

    def begin(self, rows: Sequence[int]) -> None:
        """Start the clocks of answers."""
        self._began |= dict.fromkeys(rows, time.perf_counter())

    def take(self, rows: Sequence[int], logits_BV: torch.Tensor) -> list[int]:
        """Append a token to answers; return the rows whose answer has not ended."""
        chosen_B = logits_BV.argmax(-1) if self._draw is None else self._draw(logits_BV, rows)
        going = []
        for row, token in zip(rows, chosen_B.tolist(), strict=True):
            ids = self.made[row]
            ids.append(token)
            is_over = token in self.end_ids or len(ids) == self.max_new_tokens
            if is_over or (self._watch is not None and self._watch.has_stopped(row, ids)):
                if self.on_end is not None:
                    self.on_end(row, time.perf_counter() - self._began[row])
            else:
                going.append(row)
        return going


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode inside the block, then restore the mode of each module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _contiguous_head(model: Any) -> Iterator[None]:
    """Inside the block, give the head contiguous states.

    Those of the last token of each prompt are a strided view, for which torch would copy the head's
    weight once per prompt.
    """
    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    hook = head.register_forward_pre_hook(
        lambda _, states: tuple(state.contiguous() for state in states)
    )
    try:
        yield
    finally:
        hook.remove()


def greedy(
    model: Any,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    end_ids: set[int],
    sampling: Sampling | None = None,
    stops: Stops | None = None,
    batch_size: int | None = None,
    on_end: Callable[[int, float], None] | None = None,
) -> list[list[int]]:
    """Continue prompts until an end id, a stop text or the limit.

    Prompts of similar length are prefilled together, and an answer that has ended makes room for
    the next prompt, so that no answer waits for a longer one. Dropout is off in any mode of the
    model. Generation settings in the model's files (such as a repetition penalty) are ignored.

    Args:
        model: a transformers model.
        prompts: the ids of each prompt.
        max_new_tokens: maximum length of an answer.
        end_ids: ids that end an answer.
        sampling: sampling settings; None is greedy decoding.
        stops: texts that end an answer.
        batch_size: answers in progress at a time; None is all of them.
        on_end: called with the index of a prompt whose answer has ended, and the seconds since its
            prefill began.

    Returns:
        The new ids of each prompt, including the end id or stop text that ended it.
    """
    answers = Answers(
        count=len(prompts),
        max_new_tokens=max_new_tokens,
        end_ids=end_ids,
        sampling=sampling,
        stops=stops,
        on_end=on_end,
    )
    pending = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), prompts[row]))
    most = batch_size or len(prompts)
    with torch.inference_mode(), evaluating(model), quiet(), _contiguous_head(model):
        batch = _opened(model, prompts)
        going: list[int] = []
        while going or pending:
            room = most - len(going)
            if pending and (not going or room >= max(1, most // _REFILL)):
                new, pending = pending[:room], pending[room:]
                answers.begin(new)
                batch.keep(going)
                going += answers.take(new, batch.read(new))
            elif len(going) * _REFILL <= len(batch.rows) * (_REFILL - 1):
                batch.keep(going)
            if going:
                logits_BV = batch.step([answers.made[row][-1] for row in batch.rows])
                place = {row: at for at, row in enumerate(batch.rows)}
                going = answers.take(going, logits_BV[[place[row] for row in going]])
    return answers.made


# New prompts enter when a quarter of a batch has ended: each prefill costs one pass over the
# weights, and each change of the rows a copy of the cache.
_REFILL = 4
_GROWTH = 64  # columns by which a cache grows
_PREFIX = 16  # tokens; a shorter common prefix is not prefilled separately


class _Batch:
    """The key-value cache of the answers in progress, left-padded to align their last tokens.

    Attributes:
        rows: the prompt of each row; its answer may have ended.
    """

    def __init__(
        self, model: Any, prompts: Sequence[list[int]], *, shares_prefix: bool = True
    ) -> None:
        """Start without rows; a common prefix is prefilled once if ``shares_prefix``."""
        self._model, self._prompts = model, prompts
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._cache: Any = None
        self._starts_B = torch.zeros(0, dtype=torch.long, device=model.device)
        self._prefix: Any = None
        can_share = shares_prefix and not _has_windows(model)
        self._shared = _shared_prefix(prompts) if can_share else 0
        self.rows: list[int] = []

    def keep(self, rows: list[int]) -> None:
        """Keep only the given rows, and the columns that they need."""
        if rows == self.rows:
            return
        at = [self.rows.index(row) for row in rows]
        self.rows = rows.copy()
        if not rows:
            self._cache = None
            return
        starts_B = self._starts_B[at]
        width = self._cache.get_seq_length() - int(starts_B.min())
        self._starts_B = starts_B - starts_B.min()
        for layer in self._cache.layers:
            layer.keep(at, width)

    def read(self, rows: list[int]) -> torch.Tensor:
        """Prefill and add new prompts; return the logits of their next tokens, ``[B, V]``."""
        unique = list(dict.fromkeys(tuple(self._prompts[row]) for row in rows))
        which = [unique.index(tuple(self._prompts[row])) for row in rows]
        shared = self._shared
        if shared and self._prefix is None:
            self._prefix = _new_cache()
            ids_1T = torch.tensor([unique[0][:shared]], device=self._model.device)
            self._forward(ids_1T, torch.ones_like(ids_1T), self._prefix)
        width = max(map(len, unique)) - shared
        ids_BT = torch.zeros(len(unique), width, dtype=torch.long)  # padding is masked
        mask_BT = torch.ones(len(unique), shared + width, dtype=torch.long)
        for row, prompt in enumerate(unique):
            own = len(prompt) - shared
            ids_BT[row, width - own :] = torch.tensor(prompt[shared:])
            mask_BT[row, shared : shared + width - own] = 0
        cache = _new_cache()
        if shared:
            for of_prefix in self._prefix.layers:
                layer = _Layer()
                layer.start_with(of_prefix, len(unique))
                cache.layers.append(layer)
        device = self._model.device
        logits_BV = self._forward(ids_BT.to(device), mask_BT.to(device), cache)
        gaps = [width + shared - len(self._prompts[row]) for row in rows]
        self._add(cache, which, gaps, shared)
        self.rows = [*self.rows, *rows]
        return logits_BV[which]

    def step(self, last: list[int]) -> torch.Tensor:
        """Append a token to every row; return the logits of the next one, ``[B, V]``."""
        ids_B1 = torch.tensor(last, device=self._model.device)[:, None]
        columns_T = torch.arange(self._cache.get_seq_length() + 1, device=self._model.device)
        mask_BT = (columns_T >= self._starts_B[:, None]).long()
        return self._forward(ids_B1, mask_BT, self._cache)

    def _forward(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, cache: Any) -> torch.Tensor:
        positions = {}
        if self._takes_positions:
            places_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
            positions = {"position_ids": places_BT[:, -ids_BT.shape[1] :]}
        output = self._model(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            past_key_values=cache,
            use_cache=True,
            **positions,
            **self._last_only,
        )
        logits_BV: torch.Tensor = output.logits[:, -1].float()
        return logits_BV

    def _add(self, cache: Any, which: list[int], gaps: list[int], shared: int) -> None:
        """Add rows of another cache, without the padding between a shared prefix and the rest."""
        for layer in cache.layers:
            layer.close_gaps(which, gaps, shared)
        starts_B = torch.tensor(gaps, device=self._model.device)
        if self._cache is None:
            self._cache, self._starts_B = cache, starts_B
            return
        ours, theirs = self._cache.get_seq_length(), cache.get_seq_length()
        width = max(ours, theirs)
        for layer, other in zip(self._cache.layers, cache.layers, strict=True):
            layer.add(other, width)
        self._starts_B = torch.cat([self._starts_B + width - ours, starts_B + width - theirs])


class _Recomputed:
    """The answers in progress of a model without a usable cache: each pass reads a whole sequence.

    A sequence is passed alone, as transformers passes it without a cache.
    """

    def __init__(self, model: Any, prompts: Sequence[list[int]]) -> None:
        """Start without rows."""
        self._model, self._prompts = model, prompts
        self._made: dict[int, list[int]] = {}
        self.rows: list[int] = []

    def keep(self, rows: list[int]) -> None:
        """Keep only the given rows."""
        self.rows = rows.copy()

    def read(self, rows: list[int]) -> torch.Tensor:
        """Add new prompts; return the logits of their next tokens, ``[B, V]``."""
        self.rows = [*self.rows, *rows]
        self._made |= {row: [] for row in rows}
        return self._logits(rows)

    def step(self, last: list[int]) -> torch.Tensor:
        """Append a token to every row; return the logits of the next one, ``[B, V]``."""
        for row, token in zip(self.rows, last, strict=True):
            self._made[row].append(token)
        return self._logits(self.rows)

    def _logits(self, rows: Sequence[int]) -> torch.Tensor:
        wholes = [[*self._prompts[row], *self._made[row]] for row in rows]
        return torch.stack([_next_logits(self._model, whole) for whole in wholes]).float()


def _next_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return the logits ``[V]`` after a sequence, without a cache, in the model's own format."""
    ids_1T = torch.tensor([list(ids)], device=model.device)
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    output = model(
        input_ids=ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        use_cache=False,
        **({"logits_to_keep": 1} if keeps else {}),
    )
    logits_V: torch.Tensor = output.logits[0, -1]
    return logits_V


_WAYS: WeakKeyDictionary[Any, Callable[..., Any]] = WeakKeyDictionary()
_TRIED = 48  # tokens of the longest of three trial prompts
# RMS error of a row of logits, relative to their standard deviation. Measured with the trial: 1e-5
# in f32 and 0.1 in bf16 for SmolLM2, and from 0.33 on for families with a wrong cache.
_TOLERANCE, _TOLERANCE_BF16 = 1e-3, 0.25


def _opened(model: Any, prompts: Sequence[list[int]]) -> Any:
    """Return the answers in progress, in the fastest way that is right for the model.

    Whether a cache, padding and shared prefixes are right depends on how a family numbers
    positions, biases attention and stores its state, so it is tried once per model.
    """
    if model not in _WAYS:
        _WAYS[model] = _fastest(model)
    return _WAYS[model](model, prompts)


def _fastest(model: Any) -> Callable[..., Any]:
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or 2 * _TRIED
    longest = min(_TRIED, int(positions) // 2)  # tokens follow, and some families use positions
    if longest <= 2:  # noqa: PLR2004  # too few for two prompts with a common beginning
        return _Recomputed
    trial = _trial(config, longest)
    logits_V = _next_logits(model, trial.prompts[0])
    tolerance = _TOLERANCE if logits_V.dtype is torch.float32 else _TOLERANCE_BF16
    limit = tolerance * float(logits_V.float().std())
    exact_BV = _answered(_Recomputed(model, trial.prompts), trial)
    ways: list[Callable[..., Any]] = [_Batch, partial(_Batch, shares_prefix=False)]
    if longest <= _PREFIX + 2:  # the trial shares no prefix
        del ways[0]
    for way in ways:
        if _error(way(model, trial.prompts), trial, exact_BV) <= limit:
            return way
    return _Recomputed


@dataclass(frozen=True, slots=True)
class _Trial:
    """Prompts of different lengths with a common beginning, and two tokens that follow."""

    prompts: list[list[int]]
    first: int
    second: int


def _trial(config: Any, longest: int) -> _Trial:
    special = {getattr(config, name, None) for name in ("pad_token_id", "bos_token_id")}
    known = [token for token in range(config.vocab_size) if token not in special]
    drawn = random.Random(0).choices(known, k=longest + 4)  # noqa: S311  # any tokens
    *long, first, second, last, other = drawn
    common = long[: min(_PREFIX + 1, longest - 2)]
    middle = long[: (len(common) + longest) // 2]
    return _Trial([[*common, last], long, [*middle, other]], first, second)


def _answered(batch: Any, trial: _Trial) -> torch.Tensor:
    """Return the logits of answers that begin, go on and end, ``[6, V]``."""
    found = [batch.read([0, 1]), batch.step([trial.first, trial.second])]
    batch.keep([1])
    return torch.cat([*found, batch.read([2]), batch.step([trial.first, trial.second])])


def _error(batch: _Batch, trial: _Trial, exact_BV: torch.Tensor) -> float:
    """Return the largest RMS error of a row of logits; infinite if the model's code fails."""
    try:
        found_BV = _answered(batch, trial)
    except Exception:  # noqa: BLE001  # of any kind, in the code of the model's family
        return math.inf
    return float((found_BV - exact_BV).square().mean(-1).sqrt().max())


def next_logits(model: Any, ids: Sequence[int], cache: Any = None) -> tuple[torch.Tensor, Any]:
    """Run a causal model over new token ids.

    Args:
        model: a transformers model.
        ids: the tokens that are not in the cache yet; one, unless a sequence is started.
        cache: the cache returned by the previous call; None starts a sequence.

    Returns:
        The logits of the next token, ``[V]``, f32, and the cache.
    """
    with torch.inference_mode(), evaluating(model), quiet():
        if cache is None:
            cache = _opened(model, [list(ids)])
            return cache.read([0])[0], cache
        return cache.step(list(ids))[0], cache


def _shared_prefix(prompts: Sequence[list[int]]) -> int:
    """Return the length of the common prefix, which leaves each prompt a token; 0 if short."""
    first, last = min(prompts, default=[]), max(prompts, default=[])
    same = next(
        (at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other),
        min(len(first), len(last)),
    )
    same = min(same, min(map(len, prompts), default=1) - 1)
    return same if same >= _PREFIX and first != last else 0


def _has_windows(model: Any) -> bool:
    """Return whether a layer's attention is not full: padding would stretch a window's columns."""
    config = model.config
    kinds = getattr(config, "layer_types", None) or []
    return bool(getattr(config, "sliding_window", None)) or any(
        kind != "full_attention" for kind in kinds
    )


class _Layer:
    """Keys and values of one layer, ``[B, H, T, D]``, in buffers that grow by chunks.

    A cache that grew by one column per token left gigabytes of fragmented memory.
    """

    is_initialized = is_sliding = is_compileable = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        """Start without rows."""
        self.length = 0

    def update(self, keys: Any, values: Any, *rest: Any, **named: Any) -> Any:
        """Append columns; under autocast, keys and values may differ in dtype."""
        del rest, named
        new = self.length + keys.shape[-2]
        if not self.is_initialized:
            self.is_initialized = True
            self.keys = _wider(keys[:, :, :0], new)
            self.values = _wider(values[:, :, :0].to(keys.dtype), new)
        elif new > self.keys.shape[-2]:
            self.keys = _wider(self.keys[:, :, : self.length], new)
            self.values = _wider(self.values[:, :, : self.length], new)
        self.keys[:, :, self.length : new] = keys
        self.values[:, :, self.length : new] = values
        self.length = new
        return self.keys[:, :, :new], self.values[:, :, :new]

    def get_seq_length(self) -> int:
        """Return the number of columns."""
        return self.length

    def get_mask_sizes(self, new: int | torch.Tensor) -> tuple[int, int]:
        """Return the number of columns that new tokens attend to, and the first column.

        Args:
            new: number of new tokens or, in transformers 5.0, their positions.
        """
        return self.length + (new.shape[0] if isinstance(new, torch.Tensor) else new), 0

    def keep(self, rows: list[int], width: int) -> None:
        """Keep some rows and the last columns."""
        self._change(lambda all_BHTD: all_BHTD[rows, :, self.length - width : self.length])
        self.length = width

    def start_with(self, prefix: Any, rows: int) -> None:
        """Start every row with a copy of a one-row prefix."""
        shape = (rows, -1, -1, -1)
        self.update(
            prefix.keys[:, :, : prefix.length].expand(shape),
            prefix.values[:, :, : prefix.length].expand(shape),
        )

    def close_gaps(self, rows: list[int], gaps: list[int], shared: int) -> None:
        """Select rows, with repeats, and move the shared prefix of each next to its other tokens.

        Args:
            rows: rows of this cache.
            gaps: columns of padding between the prefix and the other tokens of each row.
            shared: columns of the prefix.
        """

        def moved(all_BHTD: torch.Tensor) -> torch.Tensor:
            taken_BHTD = all_BHTD[rows, :, : self.length]  # a copy
            for row, gap in enumerate(gaps):
                if shared and gap:
                    prefix_HTD = all_BHTD[rows[row], :, :shared]
                    taken_BHTD[row, :, gap : gap + shared] = prefix_HTD
            return taken_BHTD

        self._change(moved)

    def add(self, other: Any, width: int) -> None:
        """Add the rows of another cache, aligned at the last column."""
        for name in ("keys", "values"):
            parts = [
                torch.nn.functional.pad(
                    getattr(one, name)[:, :, : one.length], (0, 0, width - one.length, 0)
                )
                for one in (self, other)
            ]
            setattr(self, name, _wider(torch.cat(parts), width))
        self.length = width

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.keys, self.values = change(self.keys), change(self.values)


def _wider(all_BHTD: torch.Tensor, width: int) -> torch.Tensor:
    """Return a copy with spare columns beyond ``width``; unwritten columns are zero.

    Attention gives masked columns a weight of zero, but zero times NaN or infinity is NaN.
    """
    rows, heads, filled, size = all_BHTD.shape
    made_BHTD = all_BHTD.new_zeros((rows, heads, width + _GROWTH, size))
    made_BHTD[:, :, :filled] = all_BHTD
    return made_BHTD


def _new_cache() -> Any:
    from transformers.cache_utils import Cache, CacheLayerMixin

    CacheLayerMixin.register(_Layer)
    return Cache(layer_class_to_replicate=_Layer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Hidden states and logits of a model over a document.

    Attributes:
        hidden: layer -> states, ``[T, D]`` f32, first layer first.
        logits_TV: f32; row t predicts the token after position t.
    """

    hidden: dict[str, torch.Tensor]
    logits_TV: torch.Tensor


def trace(
    model: Any,
    ids: Sequence[int],
    *,
    device: torch.device | None = None,
    virtual_ids: Sequence[int] = (),
) -> Trace:
    """Run a document through a transformers causal model in evaluation mode.

    Args:
        model: the model; its own code computes everything between the layers.
        ids: the document's token ids.
        device: device for the ids; None uses the model's.
        virtual_ids: ids before the document, of which nothing is returned.
    """
    ids_BT = torch.tensor([[*virtual_ids, *ids]], device=device or model.device)
    with torch.inference_mode(), evaluating(model), quiet():
        output = model(input_ids=ids_BT, use_cache=False, output_hidden_states=True)
    states = output.hidden_states
    # transformers' last entry is the head's input, after the final norm.
    names = ["embedding", *(f"l{i}" for i in range(len(states) - 2)), "final norm"]
    own = slice(len(virtual_ids), None)
    hidden = {name: state[0, own].float() for name, state in zip(names, states, strict=True)}
    return Trace(hidden=hidden, logits_TV=output.logits[0, own].float())
