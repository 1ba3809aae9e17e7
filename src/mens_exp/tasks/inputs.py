"""Record the inputs of a run by content hash, and rebuild its trained model from the record.

Inputs whose hashes have changed are refused, so that other content is never mistaken for them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.adapter_v3 import TENSORS_NAME, read_adapter
from mens_exp.artifacts.digest import digest, refuse_changed_adapter, sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.config.model import teacher_of
from mens_exp.corpus.source import labelling_of, load_rows
from mens_exp.errors import Problems, RequestError
from mens_exp.export import certificate
from mens_exp.export.adapter import config_of_adapter, with_scale_one
from mens_exp.planning.checks.model import other_tokenizer
from mens_exp.planning.contract import origin_of
from mens_exp.planning.preflight import writable_cache
from mens_exp.rows import readers
from mens_exp.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mens_exp.artifacts.adapter_v3 import AdapterManifest
    from mens_exp.artifacts.quantizer_record import Quantizer
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.backends.protocol import Backend
    from mens_exp.config.model import TokenizerConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.config.task import ParityConfig
    from mens_exp.corpus.row_files import Rows
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.export.certificate import Probe
    from mens_exp.export.subject import MergeInputs
    from mens_exp.model.sources import BaseModel
    from mens_exp.tokenizer.load import Tokenizer


def tokenizer_of(config: TokenizerConfig, base: BaseModel, run: RunDir) -> Tokenizer:
    """Return the tokenizer of a run.

    If the chat template was read from a file, the run's own copy is used as soon as it exists, so
    that later changes to the file do not affect the run.

    Args:
        config: the run's `tokenizer` config group.
        base: its base model.
        run: its directory.
    """
    if config.chat_template is not None and run.chat_template.is_file():
        config = dataclasses.replace(config, chat_template=str(run.chat_template))
    return load_tokenizer(config, base.directory)


def own_template(run: RunDir) -> Path | None:
    """Return a run's copy of its chat template, if it has one.

    Raises:
        RequestError: the copy is not the template that the run recorded.
    """
    if not run.chat_template.is_file():
        return None
    recorded = Manifest.read(run.manifest).inputs.get("chat_template_sha256")
    found = {"chat_template_sha256": sha256_file(run.chat_template)}
    refuse_changed({"chat_template_sha256": recorded}, found)
    return run.chat_template


def read_teacher(config: RunConfig, base: BaseModel, cache: Path) -> BaseModel | None:
    """Return the model that the objective learns from, downloaded and hashed; None if it has none.

    Raises:
        ConfigError: its tokenizer differs from the base's.
    """
    named = teacher_of(config.objective, config.model)
    if named is None or named is config.model:
        return None if named is None else base
    from mens_exp.model.sources import resolve

    teacher = resolve(named, cache)
    Problems.raise_if(list(other_tokenizer(base.directory, teacher.directory)))
    return teacher


def describe(
    base: BaseModel,
    tokenizer: Tokenizer,
    rows: Rows | None,
    data: RowsDataModule | None = None,
    teacher: BaseModel | None = None,
) -> dict[str, Any]:
    """Return the manifest's ``inputs``; without ``data``, they omit the encoded documents."""
    dated = {"chat_template_date": tokenizer.date} if tokenizer.is_dated else {}
    return {
        "base_model": base.name,
        "base_source": base.source,
        "base_weights_sha256": base.weights_sha256,
        **definition_of(base),
        **_from_hub(base),
        **({"base_made_again": list(base.made_again)} if base.made_again else {}),
        "license": base.license,
        "tokenizer_sha256": tokenizer.sha256,
        "chat_template_sha256": tokenizer.template_sha256,
        "chat_template": tokenizer.template_source,
        **dated,
        **({} if teacher is None else {"teacher": _of_teacher(teacher)}),
        **({} if rows is None else {"data": _rows_of(rows) | (_encoded(data) if data else {})}),
    }


def _of_teacher(teacher: BaseModel) -> dict[str, Any]:
    return {
        "name": teacher.name,
        "source": teacher.source,
        "weights_sha256": teacher.weights_sha256,
        **definition_of(teacher),
        **_from_hub(teacher),
    }


def definition_of(base: BaseModel) -> dict[str, str]:
    """Return hashes of a base's config.json and code, which its weights do not determine.

    The files of a model created in the cache are checked against its own list, and depend on the
    installed transformers, so they are not recorded.
    """
    if base.source not in {"directory", "hub"}:
        return {}
    found = {"base_config_sha256": sha256_file(base.directory / "config.json")}
    if base.trust_remote_code:
        code = sorted(base.directory.glob("*.py"))
        found["base_code_sha256"] = digest({file.name: sha256_file(file) for file in code})
    return found


def _rows_of(rows: Rows) -> dict[str, Any]:
    first = {"first_rows_sha256": rows.sha256} if rows.streamed else {}
    return {
        "source": rows.source,
        "rows_sha256": None if rows.streamed else rows.sha256,
        "heldout_rows": len(rows.heldout),
        **first,
        **rows.record(),
    }


def keep_bad_rows(run: RunDir, rows: Rows) -> None:
    """Write the quarantined rows, if any, into the run's directory."""
    if rows.bad:
        readers.write_quarantine(run.quarantine, rows.bad)


def _from_hub(base: BaseModel) -> dict[str, Any]:
    """Record the hub commit and, if it was requested, that its code was run."""
    pinned = {} if base.revision is None else {"base_id": base.name, "base_revision": base.revision}
    return pinned | ({"trust_remote_code": True} if base.trust_remote_code else {})


def _encoded(data: RowsDataModule) -> dict[str, Any]:
    labelling = labelling_of(data.config)
    together = labelling.rows.together
    train = {
        "train_rows": data.train_counts.documents // together,
        "train_sha256": data.train_counts.sha256,
        "train_truncated": data.train_counts.truncated,
        "train_dropped": data.train_counts.dropped,
        "train_short": data.train_counts.short,
        "train_unrolled": data.train_counts.unrolled,
    }
    return {
        **({"first_window": train} if data.rows.streamed else train),
        "val_rows": data.val_counts.documents // together,
        "val_sha256": data.val_counts.sha256,
        "truncation": labelling.truncation,
        "turns": labelling.turns,
    }


def note_origin(config: RunConfig, manifest: Manifest) -> None:
    """Refresh the contract's provenance: a newly fetched model card states a licence."""
    part = origin_of(config)
    assert manifest.contract is not None, "it trains"
    manifest.contract["provenance"] = dataclasses.asdict(part)
    place = "contract.provenance."
    for name in [name for name in manifest.unknown if name.startswith(place)]:
        if name.removeprefix(place) not in part.unknown:
            del manifest.unknown[name]


def refuse_changed(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare current inputs with those that a run recorded at its first reading.

    Args:
        recorded: ``inputs`` of that run's manifest; missing entries are not compared.
        now: the result of `describe`.

    Raises:
        RequestError: a content hash differs.
        Problems: several hashes differ.
    """
    before, after = dict(hashes_in(recorded)), dict(hashes_in(now))
    Problems.raise_if(
        [
            RequestError(
                "has changed since the run was trained on it",
                where=f"inputs.{name}",
                found=after[name],
                expected=before[name],
                remedy="restore it, or start a new run",
            )
            for name in sorted(before.keys() & after.keys())
            if before[name] != after[name]
        ]
    )


def hashes_in(inputs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every content hash of a manifest's ``inputs`` by its dotted name."""
    for name, value in inputs.items():
        if isinstance(value, dict):
            yield from hashes_in(value, f"{prefix}{name}.")
        elif name.endswith("_sha256") and value is not None:
            yield f"{prefix}{name}", str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A trained model, and the text on which others are compared with it.

    Attributes:
        config: the configuration under which the model was built.
        base: the base of the adapter.
        backend: the model, with its adapter loaded.
        probe: the text.
        sources: content hashes and names for the certificate.
    """

    config: RunConfig
    base: BaseModel
    backend: Backend
    probe: Probe
    sources: dict[str, Any]


def trained_run(subject: RunDir, theirs: RunConfig, settings: ParityConfig, cache: Path) -> Trained:
    """Build the model of a run with its adapter, and choose the text.

    Args:
        subject: the run.
        theirs: its configuration, with the device set.
        settings: the `parity` node of the command.
        cache: folder of models and rows.

    Raises:
        RequestError: the base or the tokenizer differs from that of the training.
        Problems: several of these, or the adapter differs from what the run wrote.
    """
    from mens_exp.model.sources import resolve

    base = resolve(theirs.model, cache)
    tokenizer = tokenizer_of(theirs.tokenizer, base, subject)
    refuse_changed(Manifest.read(subject.manifest).inputs, describe(base, tokenizer, None))
    manifest, backend = _trained_backend(subject, theirs, base)
    text = probe_of(theirs, tokenizer, settings, cache, longest=backend.max_positions)
    return Trained(
        config=theirs,
        base=base,
        backend=backend,
        probe=text,
        sources={
            "run": subject.path.resolve().name,
            "adapter_sha256": sha256_file(subject.adapter / TENSORS_NAME),
            "base_model": base.name,
            "base_weights_sha256": base.weights_sha256,
            "quant": manifest.quant,
        },
    )


def _trained_backend(
    subject: RunDir, theirs: RunConfig, base: BaseModel
) -> tuple[AdapterManifest, Backend]:
    """Build the model of a run, and load its adapter; return the adapter's manifest too."""
    from mens_exp.training.build import build_backend, lightning_quiet

    refuse_changed_adapter(subject.adapter)
    manifest, tensors = read_adapter(subject.adapter)
    with lightning_quiet():
        backend = build_backend(theirs, base)
    backend.load_adapter(tensors)
    return manifest, backend


def transformers_model(subject: RunDir, theirs: RunConfig, accelerator: str) -> Any:
    """Build the trained model of a run as an object of PEFT or transformers.

    Args:
        subject: the run.
        theirs: its configuration.
        accelerator: the device, as ``trainer.accelerator`` names it.

    Returns:
        PEFT's model on the base of the run; transformers' own, if the weights were trained.

    Raises:
        RequestError: the model is not one of transformers, or the base has changed since.
    """
    theirs.trainer.accelerator = accelerator
    if not subject.adapter.is_dir():
        return _own_weights(subject, accelerator)
    if not theirs.backend.spec.is_causal:
        raise RequestError(
            "the run trained a stack of projections, for which transformers has no class",
            where="backend",
            found=theirs.backend.name,
            expected="a run of backend=qlora, lora, full or burn",
            remedy=f"read its matrices from {subject.adapter}",
        )
    base = _recorded_base(subject, theirs)
    model = _trained_backend(subject, theirs, base)[1].model  # type: ignore[attr-defined]
    return model.eval()


def _own_weights(subject: RunDir, accelerator: str) -> Any:
    from transformers import AutoModelForCausalLM

    from mens_exp.training.build import device_of, lightning_quiet

    with lightning_quiet():
        model = AutoModelForCausalLM.from_pretrained(subject.weights)
    return model.to(device_of(accelerator)).eval()


def transformers_tokenizer(subject: RunDir, theirs: RunConfig) -> Any:
    """Load the tokenizer of a run as an object of transformers, with the run's chat template.

    Raises:
        RequestError: transformers has no such tokenizer.
    """
    if theirs.tokenizer.name == "vox":
        raise RequestError(
            "the vox tokenizer has no form in transformers",
            where="tokenizer",
            found=theirs.tokenizer.name,
            expected="a run with tokenizer=hf",
        )
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_recorded_base(subject, theirs).directory)
    tokenizer.chat_template = subject.chat_template.read_text("utf-8")
    return tokenizer


def _recorded_base(subject: RunDir, theirs: RunConfig) -> BaseModel:
    """Return the base of a run; refuse weights that differ from the recorded ones."""
    from mens_exp.model.sources import resolve

    base = resolve(theirs.model, writable_cache())
    recorded = Manifest.read(subject.manifest).inputs
    refuse_changed(recorded, {"base_weights_sha256": base.weights_sha256})
    return base


def trained_adapter(
    config: RunConfig, inputs: MergeInputs, quantizer: Quantizer | None, cache: Path
) -> Trained:
    """Build the model of an adapter whose run is not available.

    Args:
        config: the command's configuration; its data provides the text.
        inputs: adapter and base.
        quantizer: the quantizer of the base; None if it is unquantized.
        cache: folder of rows.
    """
    from mens_exp.training.build import build_backend, lightning_quiet

    assert inputs.base is not None, "the caller has asked"
    assert inputs.shape is not None, "the caller has asked"
    base, manifest = inputs.base, inputs.manifest
    theirs = config_of_adapter(config, manifest, base, inputs.shape, quantizer)
    tokenizer = load_tokenizer(theirs.tokenizer, base.directory)
    with lightning_quiet():
        backend = build_backend(theirs, base)
    backend.load_adapter(with_scale_one(manifest, inputs.tensors))
    text = probe_of(theirs, tokenizer, config.parity, cache, longest=backend.max_positions)
    return Trained(
        config=theirs,
        base=base,
        backend=backend,
        probe=text,
        sources={
            "adapter_sha256": inputs.sha256,
            "base_model": base.name,
            "base_weights_sha256": base.weights_sha256,
            "quant": manifest.quant,
        },
    )


def probe_of(
    theirs: RunConfig, tokenizer: Tokenizer, settings: ParityConfig, cache: Path, *, longest: int
) -> Probe:
    """Choose the text to compare on: a named file, otherwise rows, held-out ones first."""
    length = min(theirs.data.seq_len, longest)
    if settings.text is not None:
        path = Path(settings.text).expanduser()
        return certificate.probe_of_text(path, tokenizer, seq_len=length, tokens=settings.tokens)
    rows = load_rows(theirs.data, cache)
    sides = {"held out": rows.heldout, "validation": rows.val, "training": rows.train}
    labelling = dataclasses.replace(labelling_of(theirs), seq_len=length)
    return certificate.probe_of_rows(sides, tokenizer, labelling, settings.tokens)
