"""Bytes that autograd keeps for the backward pass, from the sizes of a model and of documents.

Tensors are counted one by one; a test compares the counts with autograd's saved-tensor hooks on the
real graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mens_exp.config.backend import ProxyConfig
from mens_exp.config.model import HfModel
from mens_exp.layout import hub
from mens_exp.layout.modules import linear_modules
from mens_exp.layout.norms import BIAS
from mens_exp.layout.shape import HEAD, ProxyStack, stack_of
from mens_exp.layout.targets import chosen, pattern_values, target_problems

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.modules import LinearModule
    from mens_exp.layout.shape import Shape

_F32 = 4  # bytes of an element
_MASK = 1 / 8  # bytes of an element of the dropout mask on a CPU; a GPU regenerates the mask
# CPU attention (model/attention.py) rounds lengths up to a multiple of BUCKET and processes queries
# in blocks of at least ROWS.
BUCKET, ROWS = 32, 128  # tokens; measured: experiments/LOG.md, and best of 64, 128 and 256 rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Lengths of the documents to train on, in tokens.

    Attributes:
        longest: length of the longest document.
        typical: token-weighted mean document length.
        varied: whether the documents have many different lengths.
        shared_frac: share of their tokens saved because the answers of a pair share one prompt.
    """

    longest: int
    typical: float
    varied: bool = True
    shared_frac: float = 0.0

    def pairs(self, sequences: int, seq_len: int) -> float:
        """Return the number of query-key pairs, each with a score, in the largest micro-batch.

        Assumes one document of the greatest length; the rest are of typical length. An answer that
        shares its prompt has fewer tokens, each of which attends to more keys.
        """
        longest, typical = min(self.longest, seq_len), min(self.typical, seq_len)
        found = pairs(longest) + (sequences * seq_len - longest) / typical * pairs(round(typical))
        answer = 1 - 2 * self.shared_frac  # of a document; of a pair, 1 + answer is computed
        return found * (1 + 2 * answer - answer**2) / (1 + answer)


def pairs(tokens: int) -> int:
    """Count a document's query-key pairs: for each block of queries, all keys up to its end.

    Lengths are rounded up to buckets, as on a CPU in `model/attention.py`.
    """
    padded = _bucketed(tokens)
    step = _bucketed(-(-padded // max(padded // ROWS, 1)))
    ends = [min(first + step, padded) for first in range(0, padded, step)]
    return sum((end - first) * end for first, end in zip([0, *ends], ends, strict=False))


def _bucketed(tokens: int) -> int:
    return -(-tokens // BUCKET) * BUCKET


def modules_of(config: RunConfig, shape: Shape) -> tuple[LinearModule, ...]:
    """Return the modules that get an adapter; empty if a target is invalid (reported elsewhere)."""
    return () if target_problems(config.lora, shape) else chosen(config.lora, shape)


def proxy_stack(config: RunConfig, shape: Shape) -> ProxyStack | None:
    """Return the proxy's stack; None for other backends.

    A checkpoint created here is complete. One whose headers are not available is assumed to be.

    Raises:
        MensError: the stack cannot be built, or a directory's headers cannot be read.
    """
    backend = config.backend
    if not isinstance(backend, ProxyConfig):
        return None
    keys = hub.describe(config.model).tensors if isinstance(config.model, HfModel) else None
    return stack_of(shape, backend, keys or None)


def saved_bytes(
    config: RunConfig,
    shape: Shape,
    documents: Documents,
    *,
    width: int,
    on_cpu: bool,
    again: bool,
) -> dict[str, float]:
    """Return the bytes saved for the backward pass, by kind."""
    sequences, seq_len = config.data.micro_batch_size, config.data.seq_len
    if not config.data.packing:
        seq_len = min(seq_len, documents.longest)
    tokens, layers = sequences * seq_len, shape.num_hidden_layers
    stack = proxy_stack(config, shape)
    if stack is not None:  # no attention; each projection saves its input, its norm's, A's output
        one = width * (2 * shape.hidden_size + config.lora.r) + _F32 * shape.hidden_size
        return {"activations": float(tokens * len(stack.middle) * one), "attention scores": 0.0}
    per_token = _layer_bytes(config, shape, width=width, on_cpu=on_cpu)
    scores = 0.0
    if on_cpu and config.data.packing:  # otherwise a fused kernel saves none
        scores = shape.num_attention_heads * documents.pairs(sequences, config.data.seq_len) * width
    if again:  # saves the input of every layer, and all tensors of one layer at a time
        inputs = tokens * layers * shape.hidden_size * width
        return {"activations": inputs + tokens * per_token, "attention scores": layers * scores}
    return {"activations": tokens * layers * per_token, "attention scores": layers * scores}


def _layer_bytes(config: RunConfig, shape: Shape, *, width: int, on_cpu: bool) -> float:
    """Return the average bytes that a decoder layer saves per token, without attention scores.

    Derived from the saved tensors of the real graph: the residual in f32 for each of two norms;
    query, key and value (and their fused kernel's output); gate, up and their
    activation; for each input of an adapter, the result of dropout and its mask; and the tensors
    that the adapter method saves for each target.
    """
    wide, heads = shape.intermediate_size, shape.num_attention_heads * shape.head_dim
    narrow = shape.num_key_value_heads * shape.head_dim
    is_gated = any(one.logical in {"gate", "gate_up"} for one in shape.family.projections)
    total = 2.0 * _F32 * shape.hidden_size
    total += width * (heads + 2 * narrow + (0 if on_cpu else heads))
    total += width * wide * (3 if is_gated else 5)  # tanh GELU saves intermediate results
    every_module = modules_of(config, shape)
    # torch's LayerNorm, which has a bias, keeps its input whether its vectors are trained or not.
    layer_norms = {one.path for one in every_module if one.norm == BIAS}
    modules = [
        one
        for one in every_module
        if one.kind != HEAD and one.stack is None and one.path not in layer_norms
    ]
    method = config.lora.spec
    inputs = {one.reads: one.width for one in modules} if method.keeps_inputs else {}
    ranks = pattern_values(config.lora.rank_pattern, modules, shape.family, config.lora.r)
    mask = _MASK if config.lora.dropout > 0 and on_cpu else 0
    kept = sum(
        method.kept_per_token(r=ranks[one.path], out=one.out, width=one.width) for one in modules
    )
    adapters = sum(inputs.values()) * (width + mask) + kept * width
    if config.quant.spec.keeps_inputs:  # the quantizer's linear layers save their inputs
        shared = inputs.keys() if config.lora.dropout == 0 else set()  # A saves the same tensor
        # On a CPU, lora/linear.py computes layers with PEFT adapters and saves no such inputs.
        ours = {one.path for one in modules} if on_cpu and method.peft is not None else set()
        every = [one for one in linear_modules(shape) if one.layer is not None]
        others = {one.reads: one.width for one in every if one.path not in ours}
        adapters += width * sum(w for reads, w in others.items() if reads not in shared)
    return total + adapters / shape.num_hidden_layers
