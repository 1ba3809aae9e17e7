"""Turn a contract into an execution plan: apply every gate in order, then describe what will run.

The gates are those of REFERENCE section 2; the first six use its numbers. The environment is read
without loading weights or importing torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from mens_exp.config.backend import BACKEND_SPECS, PROXY, BackendSpec, spec_for
from mens_exp.config.model import HfModel
from mens_exp.config.option_files import group_options
from mens_exp.errors import MensError
from mens_exp.layout import hub
from mens_exp.layout.families import FAMILIES
from mens_exp.layout.shape import family_for, graph_name, shape_of
from mens_exp.planning import messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.layout.families import Family
    from mens_exp.layout.shape import Shape
    from mens_exp.planning.contract import FineTuneContract

SUBSET_MERGE = "task=merge merge.mode=subset"
MOBILE_EDGE_NOTE = (
    "deployment_target=mobile_edge: converting the merged model (LiteRT, Core ML) is the "
    "operator's, with their own tools; this run leaves the adapter and its manifest"
)
_COMPOSITION = "backend.composition"  # among the contract's settings
# The limits of mobile_edge (REFERENCE section 2).
_EDGE_SEQ_LEN, _EDGE_RANK, _EDGE_BATCH = 512, 32, 1


class Gate(StrEnum):
    """Reasons to refuse a contract, in the order in which they are checked."""

    QUANTIZED_BASE = "1 quantized base"
    TOKENIZER = "2 tokenizer"
    WARM_START = "3 warm start"
    KERNEL = "4 kernel"
    DEPLOYMENT = "5 deployment target"
    FORCED = "6 forced kernel"
    FLAGS = "flags"


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The environment that a contract is checked against.

    Attributes:
        kernels: the available backends.
        model_type: the family of the base model; None if unknown.
        device: ``auto``, ``cpu`` or ``gpu``, as requested.
        forced: the backend named in the command; None lets the contract choose.
        keys: the checkpoint's tensor names, if headers were read; needed for the proxy's coverage.
        layers: number of decoder layers, if known.
    """

    kernels: frozenset[str]
    model_type: str | None
    device: str = "cpu"
    forced: str | None = None
    keys: frozenset[str] | None = None
    layers: int | None = None

    @property
    def family(self) -> Family | None:
        """The verified layout of the base model; None if there is none."""
        return FAMILIES.get(self.model_type or "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """The share of the proxy stack contained in a checkpoint; all None for another graph.

    ``complete`` and ``matched`` are None as long as the checkpoint's headers are not available.
    """

    eligible: bool | None = None
    complete: bool | None = None
    matched: int | None = None
    expected: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionPlan:
    """The execution plan of an accepted contract."""

    kernel: str
    graph_id: str
    method: str
    contract_digest: str
    proxy: Coverage
    notes: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return the plan as plain JSON."""
        return {**asdict(self), "notes": list(self.notes)}


def refusals(contract: FineTuneContract, around: Environment) -> Iterator[tuple[Gate, MensError]]:
    """Yield every reason to refuse a contract, in the order of the gates."""
    method, kernel = contract.adapter.method, _kernel(contract, around)
    for error in _base(contract, around, kernel):
        yield Gate.QUANTIZED_BASE, error
    mode = contract.data.tokenizer_mode
    if method == "qlora" and mode != "hf":
        yield Gate.TOKENIZER, messages.qlora_needs_hf_tokenizer(mode)
    if method != "qlora" and kernel is not None and mode not in kernel.tokenizers:
        yield Gate.TOKENIZER, messages.kernel_needs_hf_tokenizer(kernel.name, mode)
    # The other backends can load any model known to transformers.
    reads_names = kernel is not None and kernel.needs_layout
    if method == "lora" and mode == "hf" and reads_names and around.family is None:
        unread = messages.needs_verified_layout(
            f"a warm start of backend={kernel.name if kernel else method}",
            around.model_type,
            FAMILIES,
            instead="backend=lora",
        )
        yield Gate.WARM_START, unread
    yield from _kernel_gate(kernel, around)
    if contract.artifact.deployment_target == "mobile_edge":
        for error in _edge(contract, around.device):
            yield Gate.DEPLOYMENT, error
    chosen = _chosen(contract)
    if kernel and chosen and not _agrees(kernel, contract):
        yield Gate.FORCED, messages.forced_kernel_disagrees(kernel.name, chosen.name)
    for error in _flags(contract, around, kernel):
        yield Gate.FLAGS, error


def _base(
    contract: FineTuneContract, around: Environment, kernel: BackendSpec | None
) -> Iterator[MensError]:
    method, base = contract.adapter.method, contract.quant.base
    if base != "none" and method != "qlora":
        yield messages.quantized_base_needs_qlora(base, method)
    if base == "none" and method == "qlora":
        yield messages.qlora_needs_quantized_base(around.forced or method)
    elif method == "qlora" and kernel and kernel.quantized and not kernel.takes(base):
        yield messages.kernel_without_base(kernel.name, base, kernel.bases)


def execution_plan(contract: FineTuneContract, around: Environment) -> ExecutionPlan:
    """Return the plan of a contract that has no refusals."""
    kernel = _kernel(contract, around)
    found = coverage(contract, around)
    graph = kernel.graph_id if kernel else "of the user's own class"
    if kernel and kernel.targets == PROXY and found.expected is not None:
        middle = 0 if found.complete is False else found.expected
        graph = graph_name(str(contract.settings.get(_COMPOSITION, "residual")), middle)
    notes = []
    if contract.artifact.deployment_target == "mobile_edge":
        notes.append(MOBILE_EDGE_NOTE)
    if around.model_type is not None and around.family is None:
        refusing = readers_of_names()
        notes.append(messages.layout_is_not_verified(around.model_type, FAMILIES, refusing))
    return ExecutionPlan(
        kernel=around.forced or (kernel.name if kernel else "none"),
        graph_id=graph,
        method=contract.adapter.method,
        contract_digest=contract.digest,
        proxy=found,
        notes=tuple(notes),
    )


def coverage(contract: FineTuneContract, around: Environment) -> Coverage:
    """Count the middle projections of the proxy stack; all None for another graph."""
    if contract.adapter.targets != PROXY:
        return Coverage()
    expected = _middle_keys(contract, around)
    if expected is None:
        return Coverage(eligible=around.family is not None)
    if around.keys is None:
        return Coverage(eligible=True, expected=len(expected))
    matched = sum(1 for key in expected if key in around.keys)
    return Coverage(
        eligible=around.family is not None,
        complete=matched == len(expected),
        matched=matched,
        expected=len(expected),
    )


def _middle_keys(contract: FineTuneContract, around: Environment) -> list[str] | None:
    """List the checkpoint keys of the middle projections; None if they cannot be determined."""
    family = around.family
    if family is None or around.layers is None:
        return None
    many = around.layers
    if contract.exec.lm_head_only:
        many = 0
    elif contract.exec.proxy_max_layers is not None:
        many = min(many, contract.exec.proxy_max_layers)
    path = next(one.path for one in family.projections if one.logical == "o")
    prefix = family.layers
    if around.keys is not None and not any(key.startswith(f"{prefix}.") for key in around.keys):
        prefix = prefix.partition(".")[2]  # saved without its head
    return [f"{prefix}.{layer}.{path}.weight" for layer in range(many)]


def _chosen(contract: FineTuneContract) -> BackendSpec | None:
    return spec_for(
        contract.adapter.method,
        quantized=contract.quant.base != "none",
        targets=contract.adapter.targets,
    )


def _kernel(contract: FineTuneContract, around: Environment) -> BackendSpec | None:
    """Return the backend that will run; None for a user-defined class, which has no spec."""
    if around.forced is not None:
        return BACKEND_SPECS.get(around.forced)
    return _chosen(contract)


def _agrees(kernel: BackendSpec, contract: FineTuneContract) -> bool:
    asked = (contract.adapter.method, contract.quant.base != "none", contract.adapter.targets)
    return (kernel.method, kernel.quantized, kernel.targets) == asked


def _kernel_gate(
    kernel: BackendSpec | None, around: Environment
) -> Iterator[tuple[Gate, MensError]]:
    name = kernel.name if kernel else around.forced
    if name is None:
        return  # reported by the first gate
    if name not in around.kernels:
        planned = kernel is not None
        error = messages.kernel_not_available(name, around.kernels, planned=planned)
        yield Gate.KERNEL, error
    elif kernel and kernel.targets == PROXY and around.family is None:
        error = messages.needs_verified_layout(
            f"backend={name}", around.model_type, FAMILIES, instead="backend=qlora"
        )
        yield Gate.KERNEL, error


def _edge(contract: FineTuneContract, device: str) -> Iterator[MensError]:
    run = contract.exec
    refuse = messages.mobile_edge_refuses
    if run.require_full_proxy_stack:
        where = "require_full_proxy_stack"
        yield refuse(where, True, "false", f"drop {where}")
    for where, found, most in (
        ("data.seq_len", run.seq_len, _EDGE_SEQ_LEN),
        ("lora.r", contract.adapter.rank, _EDGE_RANK),
        ("data.micro_batch_size", run.batch_size, _EDGE_BATCH),
    ):
        if found > most:
            yield refuse(where, found, f"at most {most}", f"choose {where}={most}")
    if device != "cpu":
        yield refuse("trainer", device, "cpu", "choose trainer=cpu")


def _flags(
    contract: FineTuneContract, around: Environment, kernel: BackendSpec | None
) -> Iterator[MensError]:
    run = contract.exec
    if run.max_skip_rate is not None and not 0 <= run.max_skip_rate <= 1:
        yield messages.skip_rate_out_of_range(run.max_skip_rate)
    if run.require_full_proxy_stack and run.lm_head_only:
        yield messages.proxy_flags_contradict("require_full_proxy_stack", "lm_head_only")
    if run.lm_head_only and (run.proxy_max_layers or 0) > 0:
        yield messages.proxy_flags_contradict("lm_head_only", "proxy_max_layers")
    most = min(messages.MOST_LAST_TARGETS, run.seq_len)
    if run.ce_last_k is not None and not 1 <= run.ce_last_k <= most:
        yield messages.last_targets_out_of_range(run.ce_last_k, run.seq_len)
    if run.require_full_proxy_stack and kernel and kernel.targets == PROXY:
        missing = _missing(contract, around)
        if missing:
            yield messages.proxy_stack_incomplete(missing, coverage(contract, around).expected or 0)


def _missing(contract: FineTuneContract, around: Environment) -> list[str]:
    expected, keys = _middle_keys(contract, around), around.keys
    return [] if expected is None or keys is None else [k for k in expected if k not in keys]


def environment_of(config: RunConfig) -> Environment:
    """Collect the environment; facts missing from a model's files are None (reported elsewhere)."""
    kernel = BACKEND_SPECS.get(config.backend.name)
    model_type, layers, keys = None, None, None
    is_proxy = kernel is not None and kernel.targets == PROXY
    try:
        model_type = family_for(config.model).model_type
        shape = shape_of(config.model)
        layers = shape.num_hidden_layers
        keys = _keys(config, shape) if is_proxy else None
    except (MensError, ArithmeticError):
        pass  # reported by the check of the model's files
    return Environment(
        kernels=available() | {config.backend.name if kernel is None else ""} - {""},
        model_type=model_type,
        device=config.trainer.accelerator,
        forced=config.backend.name,
        keys=keys,
        layers=layers,
    )


def _keys(config: RunConfig, shape: Shape) -> frozenset[str] | None:
    """Return a checkpoint's keys; a model created here has every projection."""
    if isinstance(config.model, HfModel):
        return frozenset(hub.describe(config.model).tensors) or None
    return frozenset(
        f"{shape.family.layers}.{layer}.{path}.weight"
        for layer in range(shape.num_hidden_layers)
        for path in shape.projections(layer)
    )


def available() -> frozenset[str]:
    """Return the backends that the config groups offer, built-in and user-defined."""
    return frozenset(group_options().get("backend", ()))


def readers_of_names() -> tuple[str, ...]:
    """Return the settings, as typed, that read weights by name and so require a known family."""
    here = available()
    backends = (
        f"backend={one.name}" + (" with tokenizer=hf" if len(one.tokenizers) > 1 else "")
        for one in BACKEND_SPECS.values()
        if one.needs_layout and one.name in here
    )
    return (*backends, SUBSET_MERGE, "task=export export.format=gguf")
