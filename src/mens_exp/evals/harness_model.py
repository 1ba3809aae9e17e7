"""Adapter of our model to lm-evaluation-harness: log-likelihoods and generation.

Texts are tokenized as in training, with the same chat template. Texts that are too long are
truncated from the left, as in the harness's own models.

Shapes: M positions processed at a time, V vocabulary.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn.functional import cross_entropy

from mens_exp.backends.generation import evaluating
from mens_exp.data.batch import Batch
from mens_exp.errors import DataError
from mens_exp.evals.engines import cut, seed_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lm_eval.api.instance import Instance

    from mens_exp.backends.protocol import Backend
    from mens_exp.tokenizer.load import Tokenizer

_SEED: Final = 1234  # the harness's default, for tasks that sample tokens
_POSITIONS: Final = 64  # whose logits exist at the same time
_KNOWN: Final = frozenset({"until", "max_gen_toks", "do_sample", "temperature", "top_p"})
_DO_NOTHING: Final = frozenset({("num_beams", 1), ("top_k", 0), ("top_k", None)})


@dataclass(kw_only=True, slots=True)
class Asked:
    """The cost of one document of a task: prompt tokens, generated tokens and milliseconds."""

    tokens_in: int = 0
    tokens_out: int = 0
    latency_ms: float = 0.0
    is_finished: bool = True


class GraphModel(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """A backend and its tokenizer, with its adapter or inside ``base_only``."""

    def __init__(
        self, backend: Backend, tokenizer: Tokenizer, *, max_new_tokens: int, batch_size: int
    ) -> None:
        """Wrap a model.

        Args:
            backend: the model.
            tokenizer: the tokenizer, with the chat template of training.
            max_new_tokens: maximum length of an answer if the task sets none.
            batch_size: number of texts processed together.
        """
        super().__init__()
        self.graph, self.texts = backend, tokenizer
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.asked: dict[tuple[str | None, int | None], Asked] = {}
        self._took: list[float] = []

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self.texts.pad_id if self.texts.eos_id is None else self.texts.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The id that precedes a text without a context."""
        return self.eot_token_id if self.texts.bos_id is None else self.texts.bos_id

    @property
    def tokenizer_name(self) -> str:
        """An identifier of the chat template, by which the harness distinguishes requests."""
        return self.texts.template_sha256

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation as training does."""
        return self.texts.render(chat_history, add_generation_prompt=add_generation_prompt)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text, with the begin marker if the tokenizer adds one."""
        ids = self.texts.encode_all([string])[0]
        bos = self.texts.bos_id
        if add_special_tokens is not False and self.texts.adds_bos and ids[:1] != [bos]:
            assert bos is not None, "what is added exists"
            return [bos, *ids]
        return ids

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood (nats) of each continuation, and whether it is the argmax."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        for request, latency_ms, (tokens, _) in zip(
            requests, self._took, self._lengths, strict=True
        ):
            one = self._of(request)
            one.tokens_in += tokens
            one.latency_ms += latency_ms
        return found

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Return the log-likelihoods of whole texts, in windows of the model's length."""
        del disable_tqdm
        totals = []
        for request in requests:
            windows = [
                (("", ""), *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.graph.max_positions,
                    context_len=1,
                )
            ]
            totals.append(sum(one for one, _ in self._loglikelihood_tokens(windows)))
            asked = self._of(request)
            asked.tokens_in += sum(tokens for tokens, _ in self._lengths)
            asked.latency_ms += sum(self._took)
        return totals

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = True,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        del disable_tqdm
        longest = self.graph.max_positions
        texts = []
        for _pair, context, continuation in requests:
            learned = min(len(continuation), longest)
            texts.append(((context + continuation)[-(longest + 1) :], learned))
        self._lengths = [(len(ids), learned) for ids, learned in texts]
        order = sorted(range(len(texts)), key=lambda place: -len(texts[place][0]))
        found: dict[int, tuple[float, bool]] = {}
        took: dict[int, float] = {}
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            began = time.perf_counter()
            found.update(zip(batch, self._scores([texts[i] for i in batch]), strict=True))
            took.update(dict.fromkeys(batch, 1000 * (time.perf_counter() - began)))
        self._took = [took[place] for place in range(len(texts))]
        return [found[place] for place in range(len(texts))]

    def _scores(self, texts: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each text's last tokens, and whether all are the argmax."""
        graph: Any = self.graph
        batch = _batch(texts, self.texts.pad_id)
        with torch.inference_mode(), evaluating(graph):
            batch = batch.to(next(graph.parameters()).device)
            hidden_MD = graph(batch)
            logs, likeliest = [], []
            for start in range(0, len(hidden_MD), _POSITIONS):
                targets_M = batch.targets_M[start : start + _POSITIONS]
                logits_MV = graph.head(hidden_MD[start : start + _POSITIONS]).float()
                logs.append(-cross_entropy(logits_MV, targets_M, reduction="none"))
                likeliest.append(logits_MV.argmax(-1) == targets_M)
        logs_M, likeliest_M = torch.cat(logs).double(), torch.cat(likeliest)
        ends = list(itertools.accumulate(n for _, n in texts))
        parts = [slice(end - n, end) for end, (_, n) in zip(ends, texts, strict=True)]
        return [(float(logs_M[part].sum()), bool(likeliest_M[part].all())) for part in parts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Answer each context up to a stop text or an end marker.

        Raises:
            DataError: a task requests an unsupported generation option.
        """
        del disable_tqdm
        wanted = [self._wanted(request) for request in requests]
        groups: dict[tuple[int, float, float], list[int]] = {}
        for place, (options, _) in enumerate(wanted):
            groups.setdefault(options, []).append(place)
        made: dict[int, str] = {}
        for options, places in groups.items():
            for start in range(0, len(places), self.batch_size):
                batch = places[start : start + self.batch_size]
                answers = self._answers(
                    [requests[i] for i in batch], batch, [wanted[i][1] for i in batch], options
                )
                made.update(zip(batch, answers, strict=True))
        return [made[place] for place in range(len(requests))]

    def _wanted(self, request: Instance) -> tuple[tuple[int, float, float], tuple[str, ...]]:
        """Return the maximum length, temperature and top_p of a request, and its stop texts."""
        options = dict(request.args[1])
        odd = {name for name in options.items() if name[0] not in _KNOWN} - _DO_NOTHING
        if odd:
            raise DataError(
                "is not supported",
                where=f"task {request.task_name}: generation_kwargs",
                found=", ".join(sorted(name for name, _ in odd)),
                expected=f"one of {', '.join(sorted(_KNOWN))}",
            )
        temperature = float(options.get("temperature") or 0.0)
        if not options.get("do_sample", temperature > 0):
            temperature = 0.0
        until = options.get("until") or []
        stops = (until,) if isinstance(until, str) else tuple(until)
        longest = int(options.get("max_gen_toks") or self.max_new_tokens)
        return (longest, temperature, float(options.get("top_p") or 1.0)), stops

    def _answers(
        self,
        requests: list[Instance],
        places: list[int],
        stops: list[tuple[str, ...]],
        options: tuple[int, float, float],
    ) -> list[str]:
        from mens_exp.backends.generation import Sampling, Stops

        longest, temperature, top_p = options
        room = self.graph.max_positions - longest
        if room < 1:
            raise DataError(
                "the longest answer leaves no room for a question",
                where=f"task {requests[0].task_name}: max_gen_toks",
                found=longest,
                expected=f"less than {self.graph.max_positions}",
            )
        prompts = [self.tok_encode(one.args[0])[-room:] for one in requests]
        seeds = [
            seed_of(_SEED, f"{one.task_name}/{one.doc_id}", place, 0)
            for one, place in zip(requests, places, strict=True)
        ]
        drawing = Sampling(temperature=temperature, top_p=top_p, seeds=seeds)
        seconds: dict[int, float] = {}
        outputs = self.graph.generate(
            prompts,
            max_new_tokens=longest,
            end_ids=self.texts.end_ids,
            on_end=seconds.__setitem__,
            sampling=drawing if temperature > 0 else None,
            stops=Stops(texts=stops, decode=self.texts.decode),
        )
        answers = []
        for at, (request, prompt, ids, stop) in enumerate(
            zip(requests, prompts, outputs, stops, strict=True)
        ):
            text, is_stopped = cut(self.texts.decode(ids), [one for one in stop if one])
            one = self._of(request)
            one.tokens_in += len(prompt)
            one.tokens_out += len(ids)
            one.latency_ms += 1000 * seconds[at]
            one.is_finished = is_stopped or bool(ids and ids[-1] in self.texts.end_ids)
            answers.append(text)
        return answers

    def _of(self, request: Instance) -> Asked:
        return self.asked.setdefault((request.task_name, request.doc_id), Asked())


def _batch(texts: Sequence[tuple[list[int], int]], pad_id: int) -> Batch:
    """Right-pad texts; their last tokens are dropped, because they predict nothing."""
    width = max(len(ids) - 1 for ids, _ in texts)
    ids_BT = torch.full((len(texts), width), pad_id, dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    predict: list[int] = []
    targets: list[int] = []
    for row, (ids, learned) in enumerate(texts):
        ids_BT[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        mask_BT[row, : len(ids) - 1] = 1
        end = row * width + len(ids) - 1
        predict += range(end - learned, end)
        targets += ids[len(ids) - learned :]
    return Batch(
        input_ids_BT=ids_BT,
        position_ids_BT=torch.arange(width).expand(len(texts), width),
        attention_mask_BT=mask_BT,
        documents=None,
        predict_M=torch.tensor(predict),
        targets_M=torch.tensor(targets),
        tokens=int(mask_BT.sum()),
        index=0,
    )
