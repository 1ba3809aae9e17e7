"""The fine-tune contract: the meaning of a run, independent of where and how it is recorded.

Two runs with the same digest learn the same thing from the same data. The parts contain the values
that determine which backend runs. `settings` holds every setting that changes what is learned. Each
field declares whether it does, so that none can be forgotten. Settings of user-defined classes
always count, so that runs are considered different rather than wrongly considered equal.
"""

from __future__ import annotations

import dataclasses
import functools
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.config.backend import FULL_GRAPH, ProxyConfig
from mens_exp.config.data import JsonlData, MixData, StdlibData, SyntheticData
from mens_exp.config.data_sources import GivenData, sources_of
from mens_exp.config.model import BundledModel, HfModel, teacher_of
from mens_exp.corpus import synthetic
from mens_exp.corpus.given_rows import read_given
from mens_exp.errors import MensError
from mens_exp.layout import hub
from mens_exp.layout.checkpoint_files import attribution_required, license_of
from mens_exp.layout.families import family_in
from mens_exp.layout.model_cache import hash_weights
from mens_exp.layout.shape import family_for
from mens_exp.planning.learned_settings import learned_settings
from mens_exp.rows.files import resolve_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mens_exp.config.lora import LoraConfig
    from mens_exp.config.root import RunConfig

_VERSION = 1  # increment when the same meaning gets a different digest
_DIGESTED = ("model", "data", "adapter", "quant", "exec", "settings")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPart:
    """The frozen base, identified by its content.

    Attributes:
        hf_repo: Hub id, or path of a directory; None for other sources.
        weights_sha256: SHA-256 of the weights file, if the configuration pins it.
        config_sha256: SHA-256 of a directory's config.json.
        tokenizer_sha256: SHA-256 of a directory's tokenizer.json.
    """

    hf_repo: str | None = None
    weights_sha256: str | None = None
    config_sha256: str | None = None
    tokenizer_sha256: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPart:
    """The training data.

    Attributes:
        train_file: SHA-256 over the row files; None for other sources.
        generated_from: inputs of a generated corpus other than the settings; for a user-defined
            class, the SHA-256 of its rows.
        tokenizer_mode: ``hf`` or ``vox``.
    """

    train_file: str | None = None
    generated_from: str | None = None
    tokenizer_mode: str = "hf"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterPart:
    """The trained part: ``lora`` or ``qlora``, on the full graph or on the proxy stack."""

    method: str
    rank: int
    alpha: int
    dropout: float
    targets: str = FULL_GRAPH


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantPart:
    """The storage of the base: the name of a quantizer, or ``none``."""

    base: str
    double_quant: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """A change of trainer.max_steps: it was ``total`` until ``step`` steps had been taken."""

    step: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecPart:
    """Execution settings of training; None leaves a choice open, or does not apply to the graph.

    ``extensions`` is None unless steps that were taken before a resumption with more steps differ
    from those of an uninterrupted run. The last five apply to the proxy stack: strict key matching,
    the largest share of rows that may be skipped, training the head only, the number of middle
    layers, and the number of last targets.
    """

    seq_len: int
    batch_size: int
    grad_accum: int
    learning_rate: float
    warmup_steps: int | None
    seed: int
    epochs: int | None = None
    max_steps: int | None = None
    extensions: tuple[Extension, ...] | None = None
    require_full_proxy_stack: bool = False
    max_skip_rate: float | None = None
    lm_head_only: bool = False
    proxy_max_layers: int | None = None
    ce_last_k: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactPart:
    """The artifact that a run keeps, and the machine it is meant for."""

    adapter_schema_version: int = 3
    deployment_target: str = "workstation"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvenancePart:
    """The origin of the base; unknown values are None.

    Attributes:
        base_family: model_type of the base.
        upstream_model_id: Hub id, path of a directory, or the name of another source.
        license_class: the weights' licence, as named by their publisher.
        attribution_required: whether the licence requires attribution.
    """

    base_family: str | None = None
    upstream_model_id: str | None = None
    license_class: str | None = None
    attribution_required: bool | None = None

    @property
    def unknown(self) -> dict[str, str]:
        """The reason why each None part is unknown, keyed by its name."""
        reasons = {
            "base_family": "the model's files could not be read",
            "upstream_model_id": "the model has no name",
            "license_class": "no publisher's card states one",
            "attribution_required": "the licence is unknown"
            if self.license_class is None
            else f"what {self.license_class} asks is not known here",
        }
        return {name: why for name, why in reasons.items() if getattr(self, name) is None}


@dataclass(frozen=True, kw_only=True, slots=True)
class FineTuneContract:
    """The meaning of a run.

    Attributes:
        settings: every setting that changes what is learned, by dotted path; file names are
            replaced by content hashes.
    """

    model: ModelPart
    data: DataPart
    adapter: AdapterPart
    quant: QuantPart
    exec: ExecPart
    artifact: ArtifactPart = ArtifactPart()
    provenance: ProvenancePart = ProvenancePart()
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of everything that changes what is learned.

        None values are omitted, so that adding a setting does not change older digests.
        """
        return recorded_digest({"version": _VERSION, **dataclasses.asdict(self)})

    def record(self) -> dict[str, Any]:
        """Return the parts as plain JSON, for the manifest and the plan."""
        return {"version": _VERSION, "digest": self.digest, **dataclasses.asdict(self)}

    @property
    def unknown(self) -> dict[str, str]:
        """The reason why each null part of the record is unknown, by dotted path in a manifest."""
        reasons = self.provenance.unknown
        return {f"contract.provenance.{name}": why for name, why in reasons.items()}


def recorded_digest(record: Mapping[str, Any]) -> str:
    """Recompute the digest of a contract stored in a manifest, ignoring the digest stored there."""
    learned = {name: _known(record.get(name) or {}) for name in _DIGESTED}
    return digest({"version": record.get("version"), **learned})


def _known(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if value is not None}


def contract_of(config: RunConfig, extensions: Sequence[Extension] = ()) -> FineTuneContract:
    """Build the contract of a configuration; files that can be read are hashed.

    Args:
        config: the whole configuration.
        extensions: extensions of a resumed run that change what it learns.
    """
    settings = learned_settings(config)
    settings["lora.targets"] = sorted(set(config.lora.targets))  # their order is irrelevant
    model, data = _model_part(config), _data_part(config)
    for path, content in _contents(config).items():
        if content is not None:
            settings[path] = content  # the location of a file is irrelevant
    kernel = config.backend.spec
    trainer = config.trainer
    return FineTuneContract(
        model=model,
        data=data,
        adapter=AdapterPart(
            method=kernel.method,
            **_adapter_values(config.lora),
            targets=kernel.targets,
        ),
        quant=QuantPart(base=config.quant.quant_type.value, double_quant=config.quant.double_quant),
        exec=ExecPart(
            seq_len=config.data.seq_len,
            batch_size=config.data.micro_batch_size,
            grad_accum=trainer.accumulate_grad_batches,
            learning_rate=config.optim.lr,
            warmup_steps=getattr(config.schedule, "warmup_steps", None),
            seed=config.seed,
            epochs=trainer.max_epochs if trainer.max_epochs > 0 else None,
            max_steps=trainer.max_steps if trainer.max_steps > 0 else None,
            extensions=tuple(extensions) or None,
            **_proxy_part(config),
        ),
        artifact=ArtifactPart(deployment_target=config.deployment_target.value),
        provenance=origin_of(config),
        settings=settings,
    )


def _adapter_values(lora: LoraConfig) -> dict[str, Any]:
    """Return rank, alpha and dropout; virtual tokens are the rank of prompt tuning."""
    if lora.spec.on_embedding:
        return {"rank": lora.spec.rank(lora), "alpha": lora.spec.alpha(lora), "dropout": 0.0}
    return {"rank": lora.r, "alpha": lora.alpha, "dropout": lora.dropout}


def _proxy_part(config: RunConfig) -> dict[str, Any]:
    """Return the values of the proxy stack, if it is the graph."""
    backend, objective = config.backend, config.objective
    if not isinstance(backend, ProxyConfig):
        return {}
    return {
        "require_full_proxy_stack": backend.require_full_stack,
        "lm_head_only": backend.lm_head_only,
        "proxy_max_layers": backend.max_layers,
        "ce_last_k": objective.spec.last_tokens(objective) or None,
    }


def _model_part(config: RunConfig) -> ModelPart:
    named = getattr(config.model, "id", None)
    directory = Path(str(named)).expanduser() if named else None
    return ModelPart(
        hf_repo=named,
        weights_sha256=getattr(config.model, "sha256", None),
        config_sha256=_hash(directory / "config.json") if directory else None,
        tokenizer_sha256=_hash(directory / "tokenizer.json") if directory else None,
    )


def _contents(config: RunConfig) -> dict[str, Any]:
    """Return the content of every file named by a setting, keyed by the setting's path."""
    template = config.tokenizer.chat_template
    return {
        "data.path": _rows_hash(config, "path"),
        "data.val_path": _rows_hash(config, "val_path"),
        "data.sources": _sources(config),
        "objective.teacher": _teacher(config),
        "tokenizer.chat_template": _hash(Path(template).expanduser()) if template else None,
    }


def _teacher(config: RunConfig) -> str | None:
    """Hash a teacher that is a directory; a Hub model is pinned by its commit."""
    teacher = teacher_of(config.objective, config.model)
    if teacher is config.model or not isinstance(teacher, HfModel):
        return None
    try:
        directory = hub.local(teacher.id)
        if directory is None:
            return None
        weights = _hash_of_shards(directory, _states(directory))
        return digest({"weights": weights, "config": sha256_file(directory / "config.json")})
    except (MensError, OSError):
        return None  # reported by preflight


def _states(directory: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return name, size, modification time and inode of every shard of a directory."""
    found = ((file.name, file.stat()) for file in sorted(directory.glob("*.safetensors")))
    return tuple((name, one.st_size, one.st_mtime_ns, one.st_ino) for name, one in found)


@functools.cache
def _hash_of_shards(directory: Path, states: tuple[tuple[str, int, int, int], ...]) -> str:
    """Hash the shards of a directory; cached, because a command builds several contracts."""
    del states  # part of the cache key, so that changed shards are hashed again
    return hash_weights(directory)


def _sources(config: RunConfig) -> list[dict[str, Any]] | None:
    """Return the sources of a mix, with each path replaced by the content of its files."""
    if not isinstance(config.data, MixData):
        return None
    try:
        sources = sources_of(config.data)
    except MensError:
        return None  # reported by validation
    found = []
    for entry, source in zip(config.data.sources, sources, strict=True):
        # The name of a source is irrelevant too.
        settings = {name: value for name, value in entry.items() if name != "name"}
        if isinstance(source.data, JsonlData) and (path := _files_hash(source.data.path)):
            settings["path"] = path
        elif isinstance(source.data, GivenData) and (rows := _given_hash(source.data)):
            settings["rows"] = rows
        found.append(settings)
    return found


def _given_hash(data: GivenData) -> str | None:
    """Hash the rows of a user-defined class; None if they cannot be read."""
    try:
        return read_given(data).sha256
    except MensError:
        return None  # reported by preflight


def _rows_hash(config: RunConfig, name: str) -> str | None:
    """Hash the row files named by a setting, in order; None if one cannot be read."""
    if not isinstance(config.data, JsonlData) or not getattr(config.data, name):
        return None
    return _files_hash(getattr(config.data, name))


def _files_hash(names: Any) -> str | None:
    try:
        files = resolve_files(names, "data.path")
    except MensError:
        return None  # reported by preflight
    hashes = [_hash(file) for file in files]
    return None if None in hashes else digest(hashes)


def _data_part(config: RunConfig) -> DataPart:
    made_of = None
    if isinstance(config.data, StdlibData):  # the corpus is the interpreter's own library
        made_of = f"Python {platform.python_version()}"
    elif isinstance(config.data, SyntheticData):
        made_of = synthetic.made_by()
    elif isinstance(config.data, GivenData) and (rows := _given_hash(config.data)):
        made_of = f"rows {rows}"  # the class may read them from anywhere
    return DataPart(
        train_file=_rows_hash(config, "path"),
        generated_from=made_of,
        tokenizer_mode=config.tokenizer.name,
    )


def _hash(path: Path) -> str | None:
    try:
        return sha256_file(path) if path.is_file() else None
    except OSError:
        return None  # reported by preflight, by name


def origin_of(config: RunConfig) -> ProvenancePart:
    """Return the origin of the base; the licence is from the configuration or the model card."""
    model = config.model
    family, licence = None, model.license if isinstance(model, BundledModel) else None
    try:
        if isinstance(model, HfModel):
            directory = hub.describe(model)
            family, licence = family_in(directory).model_type, license_of(directory.path)
        else:
            family = family_for(model).model_type
    except MensError:
        pass  # preflight reports the reason
    return ProvenancePart(
        base_family=family,
        upstream_model_id=getattr(model, "id", None) or model.name,
        license_class=licence,
        attribution_required=attribution_required(licence),
    )
