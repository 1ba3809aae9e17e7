"""Parity of an output with the trained model: logits, hidden states and weights.

One model is in memory at a time; the reference's traces are stored on disk. The expected result of
a merge is computed from the trained layers, and weights are compared with ``W + s · B A`` in f64
and bitsandbytes' own 4-bit values. The code that writes merges is not used here, because the check
would share its errors. Weights reveal errors that text does not: a delta that is transposed in one
layer, after a few steps, is far below the noise of bf16 matmuls.

Shapes: T tokens of a document, D hidden width, V vocabulary, I inputs and O outputs of a
projection, R rank.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mens_exp.artifacts import atomic
from mens_exp.artifacts.certificate import Comparison, TensorError, WorstLayer, over_limits
from mens_exp.backends.frozen_base import load_base
from mens_exp.backends.generation import Trace, trace
from mens_exp.config.quant import ComputeDtype, QuantConfig, QuantType, unquantized
from mens_exp.errors import MensError, ModelFileError
from mens_exp.evals.logit_comparison import LogitComparison
from mens_exp.export.gguf import GGUF_FILE as GGUF
from mens_exp.export.gguf import ROPE_FACTORS
from mens_exp.layout.prequantized import CODES
from mens_exp.layout.shape import HEAD
from mens_exp.model.quiet import quiet
from mens_exp.model.sources import gguf_parsed_once
from mens_exp.model.stored_weights import CodedRows
from mens_exp.quant.binding import DTYPES
from mens_exp.quant.layers import quantized_linears, values_of
from mens_exp.quant.round_trip import round_trip

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from mens_exp.artifacts.quantizer_record import Quantizer
    from mens_exp.backends.proxy import ProxyBackend
    from mens_exp.backends.qlora import QloraBackend
    from mens_exp.config.root import RunConfig
    from mens_exp.config.task import BudgetConfig
    from mens_exp.export.certificate import Probe
    from mens_exp.layout.adapter_base import Place
    from mens_exp.layout.modules import LinearModule
    from mens_exp.lora.method import Change
    from mens_exp.model.sources import BaseModel

_LOGITS = "logits"  # not the name of any layer


class Forward(Protocol):
    """A model that processes one document."""

    def __call__(self, ids: Sequence[int]) -> Trace:
        """Return the hidden states after each layer, and the logits."""


class Reference:
    """The outputs of a model on a probe, stored on disk."""

    def __init__(self, folder: Path, probe: Probe, nll: float) -> None:
        """Store its location; :func:`record_reference` creates it."""
        self.folder = folder
        self.probe = probe
        self.nll = nll

    def read(self, document: int) -> Trace:
        """Read the trace of one document."""
        tensors = load_file(self.folder / f"{document}.safetensors")
        logits_TV = tensors.pop(_LOGITS)
        return Trace(hidden=tensors, logits_TV=logits_TV)


def record_reference(forward: Forward, probe: Probe, folder: Path) -> Reference:
    """Run the reference model, and store its traces.

    Args:
        forward: the model.
        probe: the text; its logits take ``tokens · V · 4`` bytes of disk.
        folder: an empty directory.
    """
    total = 0.0
    for number, ids in enumerate(probe.documents):
        found = forward(ids)
        # Clone, because layers without effect return the same tensor, which cannot be stored twice.
        tensors = {name: state.cpu().clone() for name, state in found.hidden.items()}
        logits_TV = found.logits_TV.cpu().clone()
        save_file({**tensors, _LOGITS: logits_TV}, folder / f"{number}.safetensors")
        log_probabilities = torch.log_softmax(logits_TV[:-1].double(), -1)
        targets = torch.tensor(ids[1:])
        total -= float(log_probabilities.gather(1, targets[:, None]).sum())
    return Reference(folder, probe, total / (probe.tokens - len(probe.documents)))


def compare(reference: Reference, forward: Forward, what: str, budget: BudgetConfig) -> Comparison:
    """Compare a model with the reference, on every token of the probe.

    Args:
        reference: the trained model's outputs on the probe.
        forward: the other model, with the same vocabulary.
        what: description of the other model.
        budget: the limits.

    Raises:
        MensError: one of its outputs is not finite, or its vocabulary differs.
    """
    logits = LogitComparison()
    apart: defaultdict[str, float] = defaultdict(float)
    size: defaultdict[str, float] = defaultdict(float)
    for number, ids in enumerate(reference.probe.documents):
        theirs, ours = reference.read(number), forward(ids)
        for name, state_TD in theirs.hidden.items():
            other_TD = ours.hidden[name].cpu()
            apart[name] += float((other_TD.double() - state_TD.double()).square().sum())
            size[name] += float(state_TD.double().square().sum())
        logits.add(
            theirs.logits_TV[:-1],
            ours.logits_TV[:-1].cpu(),
            torch.tensor(ids[1:]),
            torch.arange(len(ids) - 1),
        )
    found = logits.result()
    errors = {name: math.sqrt(apart[name] / size[name]) if size[name] else 0.0 for name in size}
    worst = max(errors, key=lambda name: errors[name])
    if not math.isfinite(errors[worst]):
        raise MensError("a hidden state is not finite", where=what, found=worst)
    layer = WorstLayer(layer=worst, relative_error=errors[worst])
    made = Comparison(
        what=what,
        tokens=found.tokens,
        mean_kl=found.mean_kl,
        p99_kl=found.p99_kl,
        max_kl=found.max_kl,
        top1_agreement=found.top1_agreement,
        nll_difference=found.nll_difference,
        worst_layer=layer,
        exceeded=[],
    )
    made["exceeded"] = over_limits(made, dataclasses.asdict(budget))
    return made


@contextmanager
def merged(
    backend: QloraBackend, config: RunConfig, base: BaseModel, *, into: str
) -> Iterator[Forward]:
    """Build the dense f32 model of a base plus the trained deltas.

    Args:
        backend: the trained model, with its adapter loaded.
        config: configuration of the run.
        base: the base model of the training.
        into: ``dequantized`` for the dequantized weights, or ``original`` for the published ones.
    """
    device = next(backend.model.parameters()).device
    model = _dense(config, base, device)
    with torch.no_grad():
        if into == "dequantized":
            for path, module in quantized_linears(backend.causal_lm).items():
                _put(model, path.removesuffix(".base_layer"), values_of(module))
        # On the published base, the delta includes what initialisation subtracted from the base.
        with nullcontext() if into == "dequantized" else backend.as_peft_view():
            for one in (one for one in backend.modules_chosen if one.stack is None):
                if one.logical == HEAD:
                    _untie(model)
                weight_OI = _get(model, one).double()
                _put(model, one.path, backend.merged(one.logical, weight_OI).float(), one.norm)
            for stack in backend.stacks:
                weight_EOI = model.get_parameter(stack.path)
                weight_EOI.copy_(backend.merged(stack.logical, weight_EOI.double()))
    yield functools.partial(trace, model)


@contextmanager
def with_tensors(
    config: RunConfig, base: BaseModel, file: Path, names: Mapping[str, str], *, tied: bool = False
) -> Iterator[Forward]:
    """Build the dense f32 model of a published base with some weights replaced.

    Args:
        config: configuration of the run.
        base: the published model.
        file: file of the replacement weights, in the base's storage layout.
        names: name in the file by path of the parameter.
        tied: whether a replaced head is also the input embedding.
    """
    model = _dense(config, base, torch.device("cpu"))
    with torch.no_grad(), safe_open(file, framework="pt") as stored:
        for path, name in names.items():
            if path == f"{HEAD}.weight" and not tied:
                _untie(model)
            model.get_parameter(path).copy_(stored.get_tensor(name))
    yield functools.partial(trace, model)


@contextmanager
def from_peft(directory: Path, config: RunConfig, base: BaseModel) -> Iterator[Forward]:
    """Load a PEFT directory on a run's base, quantized as in the run.

    Args:
        directory: directory of adapter_config.json and the tensors.
        config: configuration of the run.
        base: the published model.
    """
    from peft import PeftModel

    model = load_base(config, base, torch.device("cpu"))
    with quiet(), warnings.catch_warnings():
        # PEFT's model of tuned norms says so of each norm, in which it then finds no features.
        warnings.filterwarnings("ignore", message="Unsupported layer type")
        adapted = PeftModel.from_pretrained(model, str(directory))
    yield functools.partial(trace, adapted.get_base_model())


def _dense(config: RunConfig, base: BaseModel, device: torch.device) -> Any:
    """Load a base unquantized, in f32."""
    plain = dataclasses.replace(config)
    plain.quant = unquantized(ComputeDtype.f32)
    return load_base(plain, base, device, dtype=torch.float32)


def _untie(model: Any) -> None:
    """Give the head a separate weight, so that the embedding does not change with it."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def _is_transposed(module: Any) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def _get(model: Any, one: LinearModule) -> torch.Tensor:
    weight: torch.Tensor = model.get_parameter(one.parameter)
    return weight.T if _is_transposed(model.get_submodule(one.path)) else weight


def _put(model: Any, path: str, weight_OI: torch.Tensor, vector: str | None = None) -> None:
    module = model.get_submodule(path)
    values = weight_OI.T if _is_transposed(module) else weight_OI
    module.get_parameter(vector or "weight").copy_(values)


@contextmanager
def from_directory(directory: Path, *, memory_bytes: int | None = None) -> Iterator[Forward]:
    """Open a complete model directory with plain transformers, computing in f32.

    Args:
        directory: directory of config.json and safetensors.
        memory_bytes: larger weights stay on disk and are read layer by layer; if the dtype differs
            from the compute dtype, from a copy next to the directory.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"device_map": {"": "cpu"}}
    if memory_bytes is not None:
        options = {"device_map": "auto", "max_memory": {"cpu": memory_bytes}}
    with atomic.scratch(directory.parent) as scratch:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=torch.float32,
                use_safetensors=True,
                offload_folder=str(scratch),
                **options,
            )
        yield functools.partial(trace, model, device=torch.device("cpu"))


def gguf_context(directory: Path) -> int:
    """Return the number of positions in the header of an export's GGUF file."""
    from gguf import GGUFReader

    fields = GGUFReader(directory / GGUF).fields
    return int(fields[f"{fields['general.architecture'].contents()}.context_length"].contents())


@contextmanager
def from_gguf(directory: Path) -> Iterator[Forward]:
    """Read the GGUF file of an export with transformers, computing in f32."""
    import gguf
    from transformers import AutoModelForCausalLM

    with quiet(), gguf_parsed_once():
        file = gguf.GGUFReader(directory / GGUF)
        tensors = {one.name: one.data for one in file.tensors}
        config = _config_in(file, directory, tensors)
        model = AutoModelForCausalLM.from_pretrained(
            directory, gguf_file=GGUF, config=config, dtype=torch.float32, device_map={"": "cpu"}
        )
    if ROPE_FACTORS in tensors:
        rotary = model.model.rotary_emb
        rotary.inv_freq = rotary.inv_freq / torch.tensor(tensors[ROPE_FACTORS])
    yield functools.partial(trace, model)


def _config_in(file: Any, directory: Path, tensors: Collection[str]) -> Any:
    """Read the configuration in a GGUF file's header, with the values that transformers ignores.

    Args:
        file: the file, as the gguf package reads it.
        directory: its directory.
        tensors: names of its tensors, which show what projections have biases.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, gguf_file=GGUF)
    begin = f"{file.fields['general.architecture'].contents()}."
    header = {
        name.removeprefix(begin): one.contents()
        for name, one in file.fields.items()
        if name.startswith(begin)
    }
    if "attention.key_length" in header:
        config.head_dim = header["attention.key_length"]
    if config.model_type == "gpt2":
        config.n_positions = header["context_length"]
        config.n_inner = header["feed_forward_length"]
    if config.model_type == "llama":
        config.attention_bias = "blk.0.attn_q.bias" in tensors
        config.mlp_bias = "blk.0.ffn_gate.bias" in tensors
    if header.get("rope.scaling.type") == "linear":
        scaling = {"rope_type": "linear", "factor": header["rope.scaling.factor"]}
        config.rope_parameters = {**config.rope_parameters, **scaling}
    return config


@contextmanager
def quantized_from(directory: Path, config: RunConfig, base: BaseModel) -> Iterator[Forward]:
    """Open a complete model directory, quantized like the base of a run.

    Args:
        directory: a merged model.
        config: configuration of the run, whose quantizer is applied.
        base: the run's base, for anything missing in the directory.
    """
    there = dataclasses.replace(base, directory=directory, source="directory")
    device = torch.device("cpu")
    yield functools.partial(trace, load_base(config, there, device))


@contextmanager
def merged_stack(
    backend: ProxyBackend, weights_OI: Mapping[str, torch.Tensor], *, tied: bool = False
) -> Iterator[Forward]:
    """Build the proxy stack with merged projections and without adapters, in f32.

    Args:
        backend: the trained stack; restored after the block.
        weights_OI: weight of each projection, by logical name.
        tied: whether the head's weight is also the input embedding.
    """
    parts, table_VD = backend.projections, backend.embedding_VD
    trained = {name: part.weight_OI for name, part in parts.items()}
    for name, part in parts.items():
        part.weight_OI = weights_OI[name].to(backend.device).float()
    if tied:
        backend.embedding_VD = weights_OI[HEAD].float()
    try:
        with backend.base_only():
            yield backend.trace
    finally:
        backend.embedding_VD = table_VD
        for name, part in parts.items():
            part.weight_OI = trained[name]


def tensor_errors(
    written: Mapping[str, Path],
    places: Iterable[Place],
    deltas: Mapping[str, Change],
    quantizer: Quantizer | None,
) -> dict[str, TensorError]:
    """Compare every merged tensor with its expected value, one at a time.

    The expected sum is rounded to the output dtype before the comparison, since this is the best
    possible output. The error is relative to the size of the adapter's change.

    Args:
        written: file of each tensor of the output, by its name there.
        places: the expected source of each tensor of the output.
        deltas: deltas of the adapter, by logical name.
        quantizer: quantizer of the base; None for the published weights.

    Raises:
        ModelFileError: a merged tensor is missing, or has a wrong shape.
    """
    errors = {}
    for place in places:
        if place.logical is None:
            continue
        if place.name not in written:
            raise ModelFileError("a merged tensor is not in the output", found=place.name)
        found_OI, base_OI = _read(written[place.name], place.name), _stored(place)
        if found_OI.shape != base_OI.shape:
            raise ModelFileError(
                "a merged tensor has another shape than its base",
                where=f"{written[place.name]}: {place.name}",
                found=str(list(found_OI.shape)),
                expected=str(list(base_OI.shape)),
            )
        if place.transposed:
            found_OI, base_OI = found_OI.T, base_OI.T
        weight_OI = _base(base_OI, place, deltas[place.logical], quantizer)
        expected_OI = deltas[place.logical].expected(weight_OI)
        apart_OI = found_OI.double() - expected_OI.to(found_OI.dtype).double()
        changed = float((expected_OI - weight_OI).norm()) or float(weight_OI.norm())
        errors[place.name] = TensorError(
            max_abs=float(apart_OI.abs().max()), relative=float(apart_OI.norm()) / changed
        )
    return errors


def row_lengths(place: Place, delta: Change, quantizer: Quantizer | None) -> torch.Tensor:
    """Return the row norms of a weight before the adapter was applied, ``[out]``, f64.

    PEFT computes them in the compute dtype of a 4-bit layer, so they are rounded accordingly.

    Args:
        place: location of the adapted weight.
        delta: delta of the adapter.
        quantizer: quantizer of the base; None for the published weights.
    """
    stored = _stored(place)
    stored_OI = stored.T if place.transposed else stored
    lengths_O: torch.Tensor = _base(stored_OI, place, delta, quantizer).norm(dim=1)
    if quantizer is not None:
        lengths_O = lengths_O.to(DTYPES[quantizer["compute_dtype"]]).double()
    return lengths_O


def _stored(place: Place) -> torch.Tensor:
    """Return the weight of a base as stored; published codes are dequantized."""
    if place.info.dtype != CODES:
        return _read(place.shard, place.key)
    codes = CodedRows(place.shard, place.key)
    return codes.read(0, codes.rows)


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def _base(
    stored_OI: torch.Tensor, place: Place, delta: Change, quantizer: Quantizer | None
) -> torch.Tensor:
    """Return the base weight seen by the adapter, f64; without a quantizer, as published."""
    if quantizer is None:
        return stored_OI.double()
    if place.quantizer is None:
        return stored_OI.to(DTYPES[quantizer["compute_dtype"]]).double()
    return _made_again(stored_OI, delta, place.quantizer)


def _made_again(stored_OI: torch.Tensor, change: Change, quantizer: Quantizer) -> torch.Tensor:
    values_OI = change.quantized(stored_OI.double())
    quant = QuantConfig(
        quant_type=QuantType(quantizer["quant_type"]),
        double_quant=quantizer["double_quant"],
        block_size=quantizer["block_size"],
        levels=quantizer.get("levels", []),
    )
    rounded_OI = values_OI.float().to(DTYPES[quantizer["rounded_to"]])
    there = round_trip(rounded_OI.contiguous(), quant).values
    return there.to(DTYPES[quantizer["compute_dtype"]]).double()
