"""Messages of the planner and of the preflight checks: runs, model files and adapter files.

Each states the problem, the value found, the accepted values and what to do next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.errors import ConfigError, ModelFileError, SetupError, expected_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

MOST_NAMES = 32  # missing keys that are listed; the rest are only counted
MOST_LAST_TARGETS = 64  # REFERENCE section 2: ce_last_k

COMPARISON = (
    "arms that share tokenizer, data and objective are compared by loss; on the same texts under "
    "another tokenizer by bits per byte; everything else by the suite's KPIs alone"
)
_MORE = "docs/reference/capabilities.md says what goes with what"


def quantized_base_needs_qlora(base: str, method: str) -> ConfigError:
    """Gate 1: the f32 LoRA lane has no quantized base."""
    return ConfigError(
        "only qlora has a quantized base",
        where="quant",
        found=f"base {base} under method {method}",
        expected="method qlora, or an unquantized base",
        remedy=f"choose backend=qlora, or quant=none; {_MORE}",
    )


def qlora_needs_quantized_base(kernel: str) -> ConfigError:
    """Gate 1, the converse: qlora without a quantized base is plain LoRA."""
    return ConfigError(
        "qlora needs a quantized base",
        where="quant",
        found=f"base none under backend={kernel}",
        expected="nf4, fp4 or, on the full graph, int8",
        remedy=f"choose quant=nf4, or a backend of method lora; {_MORE}",
    )


def kernel_without_base(name: str, base: str, bases: Sequence[str]) -> ConfigError:
    """Gate 1: the backend does not support this quantizer."""
    return ConfigError(
        f"backend={name} does not support this base",
        where="quant",
        found=f"base {base}",
        expected=" or ".join(bases),
        remedy=f"choose quant={bases[0]}, or backend=qlora; {_MORE}",
    )


def qlora_needs_hf_tokenizer(mode: str) -> ConfigError:
    """Gate 2: a pretrained base requires its own tokenizer."""
    return ConfigError(
        "qlora needs the base model's own tokenizer.json",
        where="tokenizer",
        found=mode,
        expected="hf",
        remedy=f"choose tokenizer=hf; {_MORE}",
    )


def kernel_needs_hf_tokenizer(name: str, mode: str) -> ConfigError:
    """Gate 2: only the research lane trains with other token ids."""
    return ConfigError(
        f"backend={name} needs the base model's own tokenizer.json",
        where="tokenizer",
        found=mode,
        expected="hf",
        remedy=f"choose tokenizer=hf, or backend=burn; {_MORE}",
    )


def needs_verified_layout(
    what: str, model_type: str | None, known: Collection[str], *, instead: str | None = None
) -> ConfigError:
    """Gates 3 and 4, and every task that reads weights by name.

    Args:
        what: the setting that reads weights by name, such as ``backend=proxy`` or
            ``export.format=gguf``.
        model_type: model type of the base.
        known: the model types with verified names.
        instead: an alternative setting that does not need names, if there is one.
    """
    return ConfigError(
        f"{what} reads weights by name, and this family's names are not verified",
        where="model",
        found=f"model_type {model_type}",
        expected=f"a known layout: {', '.join(sorted(known))}",
        remedy="choose a model of a known family"
        + (f", or {instead}" if instead else "")
        + f"; {_MORE}",
    )


def layout_is_not_verified(
    model_type: str, known: Collection[str], refusing: Collection[str]
) -> str:
    """Plan note: an unknown family can be trained, with the limitations listed."""
    return (
        f"model_type {model_type} is none of the verified layouts ({', '.join(sorted(known))}): "
        "it trains by the names in its headers; what reads weights by name refuses it: "
        + ", ".join(refusing)
    )


def kernel_not_available(name: str, have: Collection[str], *, planned: bool) -> ConfigError:
    """Gate 4: no available backend computes this graph."""
    return ConfigError(
        "this kernel is not available here" if planned else "unknown kernel",
        where="backend",
        found=name,
        expected=expected_name(name, sorted(have)),
        remedy=f"choose backend={'|'.join(sorted(have))}"
        + (", or write one: a class and a YAML in ./conf/backend" if planned else ""),
    )


def mobile_edge_refuses(where: str, found: object, expected: str, remedy: str) -> ConfigError:
    """Gate 5: a setting that a phone's runtime does not support."""
    return ConfigError(
        "is not compatible with deployment_target=mobile_edge",
        where=where,
        found=found,
        expected=expected,
        remedy=f"{remedy}, or deployment_target=workstation",
    )


def forced_kernel_disagrees(forced: str, chosen: str) -> ConfigError:
    """Gate 6: the named backend is not the one that the contract requires."""
    return ConfigError(
        "the named kernel contradicts the contract",
        where="backend",
        found=forced,
        expected=chosen,
        remedy=f"choose backend={chosen}, or what {forced} needs; {_MORE}",
    )


def skip_rate_out_of_range(found: float) -> ConfigError:
    """The share of rows that may be skipped is not between its bounds."""
    return ConfigError(
        "not a share of rows",
        where="max_skip_rate",
        found=found,
        expected="a number >= 0 and <= 1",
        remedy="choose one, such as 0.05",
    )


def proxy_flags_contradict(first: str, second: str) -> ConfigError:
    """Two settings of the proxy stack contradict each other."""
    return ConfigError(
        f"contradicts {second}",
        where=first,
        found="both are set",
        expected="one of them",
        remedy=f"drop {first} or {second}",
    )


def last_targets_out_of_range(found: int, seq_len: int) -> ConfigError:
    """The number of last targets must be small and fit in the sequence."""
    return ConfigError(
        "more last targets than a sequence can have",
        where="ce_last_k",
        found=found,
        expected=f"1 to {min(MOST_LAST_TARGETS, seq_len)}: at most {MOST_LAST_TARGETS} "
        f"and at most data.seq_len ({seq_len})",
        remedy="lower ce_last_k, or raise data.seq_len",
    )


def proxy_stack_incomplete(missing: Sequence[str], expected: int) -> ModelFileError:
    """Strict mode: a middle projection is missing."""
    shown = ", ".join(missing[:MOST_NAMES])
    more = f", and {len(missing) - MOST_NAMES} more" if len(missing) > MOST_NAMES else ""
    return ModelFileError(
        "middle projections of the proxy stack are absent",
        where="require_full_proxy_stack",
        found=f"{len(missing)} of {expected}: {shown}{more}",
        expected=f"all {expected}",
        remedy="take a complete checkpoint, or drop require_full_proxy_stack to train the head",
    )


def disk_too_small(place: str, needed: int, free: int, parts: str) -> SetupError:
    """Not enough free disk space for the files of the run."""
    return SetupError(
        "not enough disk",
        where=place,
        found=f"{size(free)} free",
        expected=f"at least {size(needed)}: {parts}",
        remedy="free some, or choose another place (hydra.run.dir, MENS_EXP_CACHE)",
    )


def memory_too_small(
    device: str, low: int, free: int, *, attributes: bool = False, by_scoring: bool = False
) -> SetupError:
    """Even the lower bound of the memory estimate exceeds the available memory."""
    remedy = "lower data.micro_batch_size, data.seq_len or lora.r; task=plan shows each part"
    if attributes:
        remedy = "lower attribute.tokens, or choose a smaller model: it is held in f32"
    elif by_scoring:
        remedy = (
            "choose suite=none, and score with task=evaluate on a larger device: "
            "whoever scores holds the whole base"
        )
    return SetupError(
        f"the run does not fit into the memory of {device}",
        where="memory",
        found=f"{size(free)} free",
        expected=f"at least {size(low)}, the lower bound of the estimate",
        remedy=remedy,
    )


def memory_may_be_small(device: str, low: int, high: int, free: int) -> str:
    """Warn that the interval of the memory estimate exceeds the free memory."""
    return (
        f"memory of {device}: {size(free)} free, and the run takes {size(low)} to {size(high)}; "
        "it may fail. Next: lower data.micro_batch_size or data.seq_len"
    )


def memory_beyond_class(
    gib: float, low: int, high: int, *, micro_batch: int, accumulated: int
) -> str:
    """Warn that a preset is meant for GPUs that may have too little memory for the run."""
    fewer = (
        f"data.micro_batch_size=1 trainer.accumulate_grad_batches={micro_batch * accumulated} "
        "takes the same steps in less"
        if micro_batch > 1
        else "lower data.seq_len"
    )
    return (
        f"memory: the preset is for GPUs of {gib:g} GiB, and the run takes {size(low)} to "
        f"{size(high)}. Next: {fewer}"
    )


def bf16_emulated(device: str) -> str:
    """Warn that bf16 works on any CPU, but is slow without hardware instructions."""
    return (
        f"{device} has no bf16 instructions, so bf16 products are emulated and slow. "
        "Next: quant.compute_dtype=f32 is faster there"
    )


def no_four_bit_kernels(device: str, found: str, expected: str) -> SetupError:
    """No library of bitsandbytes supports this device."""
    return SetupError(
        f"bitsandbytes has no 4-bit kernels for {device}",
        where="quant",
        found=found,
        expected=expected,
        remedy="reinstall bitsandbytes for this machine, or choose trainer=cpu",
    )


def torch_without_cuda(version: str) -> SetupError:
    """A GPU was requested, but torch is a CPU build."""
    return SetupError(
        "this torch was built without CUDA",
        where="trainer",
        found=f"torch {version}",
        expected="a CUDA build of torch",
        remedy="install one (README, CUDA machines), or choose trainer=cpu",
    )


def bf16_unsupported(device: str, capability: str) -> SetupError:
    """The device has no bf16 matrix products."""
    return SetupError(
        f"{device} has no bf16 matrix products",
        where="quant.compute_dtype",
        found=f"compute capability {capability}",
        expected="8.0 or newer for bf16",
        remedy="choose quant.compute_dtype=f32",
    )


def size(count: float) -> str:
    """Format a size in binary units: ``1.5 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:  # noqa: PLR2004  # binary units
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


_OF_ONE_MODEL = "take config.json and weights of one model, or download it again"


def embedding_of_wrong_shape(
    where: str, found: Sequence[int], expected: tuple[int, int]
) -> ModelFileError:
    """The shape of the embedding table is not (vocabulary, width)."""
    if len(found) != 2:  # noqa: PLR2004  # a matrix
        what, wanted = f"the embedding is of rank {len(found)}", "rank 2"
    elif found[0] != expected[0]:
        what, wanted = "the embedding has another vocabulary than config.json", "vocab_size"
    else:
        what, wanted = "the embedding has another width than config.json", "hidden_size"
    return ModelFileError(
        what,
        where=where,
        found=str(list(found)),
        expected=f"{list(expected)} ({wanted})",
        remedy=_OF_ONE_MODEL,
    )


def embedding_absent(where: str, tried: Sequence[str]) -> ModelFileError:
    """No shard contains the embedding table."""
    return ModelFileError(
        "no shard has the embedding",
        where=where,
        found="none of the keys",
        expected=" or ".join(tried),
        remedy="download the model again",
    )


def heads_do_not_divide(where: str, heads: int, groups: int) -> ModelFileError:
    """Grouped-query attention shares each key head among a whole number of query heads."""
    return ModelFileError(
        "query heads do not divide evenly over key and value heads",
        where=where,
        found=f"{heads} query heads, {groups} key and value heads",
        expected="num_key_value_heads that divides num_attention_heads",
        remedy=_OF_ONE_MODEL,
    )


def sequence_past_positions(found: int, most: int, model: str) -> ConfigError:
    """The sequence is longer than the model's positions."""
    return ConfigError(
        "longer than the model's context window",
        where="data.seq_len",
        found=found,
        expected=f"at most {most} for {model}",
        remedy=f"choose data.seq_len={most} or less",
    )


def ids_without_embedding(where: str, last: int, vocabulary: int) -> ModelFileError:
    """The tokenizer has ids beyond the embedding table."""
    return ModelFileError(
        "the tokenizer has ids that the model has no embedding for",
        where=where,
        found=f"id {last}",
        expected=f"less than vocab_size ({vocabulary})",
        remedy="take tokenizer.json of the same model, or resize its embedding and save it again",
    )


def quantized_already(
    where: str, found: str, formats: Iterable[str], *, is_read: bool
) -> ModelFileError:
    """Weights that are already quantized would be rounded twice, or misread."""
    return ModelFileError(
        "the weights are quantized already",
        where=where,
        found=found,
        expected=f"weights in {', '.join(sorted(formats))}",
        remedy="choose quant=prequantized, which keeps their codes; or take the model that they "
        "were made from"
        if is_read
        else "take the model that these weights were made from",
    )


def blocks_straddle(where: str, found: str, expected: str) -> ConfigError:
    """Blocks that do not divide the width silently give wrong sums (bitsandbytes on CPU)."""
    return ConfigError(
        "4-bit blocks would straddle the rows of layers",
        where=where,
        found=found,
        expected=expected,
        remedy="choose a smaller quant.block_size, leave those layers out with quant.skip, or "
        "choose backend=lora",
    )


def another_in_the_adapter(where: str, found: object, theirs: object, adapter: Path) -> ConfigError:
    """A setting differs from that of the adapter that training starts from."""
    return ConfigError(
        "differs from that of the adapter to start from",
        where=where,
        found=found,
        expected=f"{theirs}, as {adapter} has",
        remedy=f"add {where}={theirs}, or start from another adapter",
    )
