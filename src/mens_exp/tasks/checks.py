"""Compare recorded values with the current ones: single values, inputs, and certificates.

Inputs are hashed and encoded again, and certificates are measured again, if the files are on this
machine. Equality is exact.
"""

from __future__ import annotations

import copy
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from mens_exp.artifacts import provenance
from mens_exp.artifacts.certificate import ArtifactKind, Certificate, Check, Evidence, Link, Outcome
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.config.data import JsonlData
from mens_exp.config.model import HfModel
from mens_exp.config.task import (
    BudgetConfig,
    ExportFormat,
    MergeBase,
    MergeConfig,
    MergeMode,
    OllamaForm,
    ParityConfig,
)
from mens_exp.corpus.source import cache_key, load_rows
from mens_exp.corpus.split import Side
from mens_exp.errors import GateError, MensError, ModelFileError
from mens_exp.export.adapter import find
from mens_exp.export.subject import config_of
from mens_exp.layout.model_cache import hash_weights, ready_directory
from mens_exp.planning.preflight import writable_cache
from mens_exp.rows.files import resolve_files
from mens_exp.tasks.inputs import definition_of, hashes_in, tokenizer_of
from mens_exp.tasks.lineage import source_run, trained_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.config.model import ModelConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.corpus.row_files import Rows
    from mens_exp.model.sources import BaseModel
    from mens_exp.tasks.lineage import Inspected
    from mens_exp.tokenizer.load import Tokenizer

_LISTED = 4


def compared(name: str, recorded: Any, found: Any, *, step: int | None = None) -> Check:
    """Compare a value with the recorded one; equality is exact."""
    outcome = Outcome.EQUAL if recorded == found else Outcome.DIFFERS
    return _check(name, step, outcome, recorded, found, None)


def not_here(name: str, recorded: Any, why: str, *, step: int | None = None) -> Check:
    """Report a recorded value without a counterpart here, which is not an error."""
    return _check(name, step, Outcome.NOT_HERE, recorded, None, why)


def linked(link: Link, of: str, checks: Iterable[Check]) -> Iterator[Check]:
    """Label checks with their link in the chain of evidence and with the record's name."""
    for check in checks:
        yield {**check, "link": check["link"] or link, "of": check["of"] or of}


def _check(
    name: str, step: int | None, outcome: Outcome, recorded: Any, found: Any, note: str | None
) -> Check:
    return Check(
        name=name,
        step=step,
        outcome=outcome,
        recorded=recorded,
        found=found,
        note=note,
        link=None,
        of=None,
    )


def differing(checks: Sequence[Check]) -> list[Check]:
    """Return the checks that differ, in order."""
    return [check for check in checks if check["outcome"] == Outcome.DIFFERS]


def described(check: Check) -> str:
    """Describe a check in one line, with both values."""
    step = "" if check["step"] is None else f"step {check['step']}: "
    note = f" ({check['note']})" if check["note"] else ""
    return f"{step}{check['name']}: recorded {check['recorded']}, found {check['found']}{note}"


def refuse_differences(what: str, where: str, checks: Sequence[Check], remedy: str) -> None:
    """Raise an error that lists the first few differing checks by name and value.

    Raises:
        GateError: a check differs.
    """
    odd = differing(checks)
    if not odd:
        return
    more = f" and {len(odd) - _LISTED} more" if len(odd) > _LISTED else ""
    raise GateError(
        what,
        where=where,
        found="; ".join(map(described, odd[:_LISTED])) + more,
        expected="every value as it is recorded",
        remedy=remedy,
    )


T = TypeVar("T")
_ENCODED = {  # for streamed rows, those of the first window
    Side.TRAIN: ("data.train_sha256", "data.first_window.train_sha256"),
    Side.VAL: ("data.val_sha256",),
}


class InputChecks:
    """Hashes of the inputs of runs, recomputed; inputs shared by several runs are hashed once."""

    def __init__(self) -> None:
        """Start with an empty cache of hashes."""
        self._cache = writable_cache()
        self._found: dict[str, Any] = {}

    def of(self, run: RunDir, manifest: Manifest) -> Iterator[Check]:
        """Hash the base, its tokenizer and the rows again, if they are on this machine.

        Unchanged rows are encoded again, bypassing the cache.
        """
        recorded = dict(hashes_in(manifest.inputs))
        config, of = config_of(run), str(run.path)
        yield from linked(Link.BASE, of, self._base(run, config, recorded))
        rows = list(self._rows(config, recorded))
        yield from linked(Link.ROWS, of, rows)
        hold = all(check["outcome"] == Outcome.EQUAL for check in rows)
        why = "" if hold else "the rows that they are made of differ, or are not on this machine"
        yield from linked(Link.ENCODED, of, self._encoded(run, config, recorded, why))
        start = manifest.inputs.get("init_from")
        if start is not None:
            yield from linked(Link.ADAPTER, of, [_start(start, run)])

    def base_weights(self, place: Path) -> str:
        """Return the SHA-256 of a base's weights."""
        return self._once(f"base {place}", lambda: hash_weights(place))

    def _once(self, name: str, found: Callable[[], T]) -> T:
        if name not in self._found:
            self._found[name] = found()
        value: T = self._found[name]
        return value

    def _base(self, run: RunDir, config: RunConfig, recorded: dict[str, str]) -> Iterator[Check]:
        place, why = base_place(config, self._cache)
        if place is None and (damage := _damage_of(config.model, self._cache)) is not None:
            yield compared("base", "a model that can be read", damage)
        checked = set()
        if place is not None:
            weights = self.base_weights(place)  # first, because opening a damaged cache rebuilds it
            base, tokenizer = self._opened(run, config)
            found = {
                "base_weights_sha256": weights,
                **definition_of(base),
                "tokenizer_sha256": tokenizer.sha256,
                "chat_template_sha256": tokenizer.template_sha256,
            }
            for name in found.keys() & recorded.keys():
                checked.add(name)
                yield compared(f"inputs.{name}", recorded[name], found[name])
        for name in sorted(recorded.keys() - checked):
            if "." not in name:
                yield not_here(f"inputs.{name}", recorded[name], why)

    def _opened(self, run: RunDir, config: RunConfig) -> tuple[BaseModel, Tokenizer]:
        from mens_exp.model.sources import resolve

        base = resolve(config.model, self._cache)
        return base, tokenizer_of(config.tokenizer, base, run)

    def _rows(self, config: RunConfig, recorded: dict[str, str]) -> Iterator[Check]:
        names = ("data.rows_sha256", "data.first_rows_sha256")  # the second for streamed rows
        name = next((name for name in names if name in recorded), None)
        if name is None:
            return
        missing = _missing_files(config)
        if missing is not None:
            yield not_here(f"inputs.{name}", recorded[name], missing)
            return
        try:
            found = self._loaded(config).sha256
        except MensError as error:  # the original input is no longer readable
            found = str(error)
        yield compared(f"inputs.{name}", recorded[name], found)

    def _loaded(self, config: RunConfig) -> Rows:
        return self._once(f"rows {config.data!r}", lambda: load_rows(config.data, self._cache))

    def _encoded(
        self, run: RunDir, config: RunConfig, recorded: dict[str, str], why: str
    ) -> Iterator[Check]:
        """Encode both sides of the rows again, in a folder without a cache.

        Args:
            run: the run that was trained on them.
            config: the run's configuration.
            recorded: the hashes of its inputs.
            why: the reason why they cannot be encoded; empty if they can.
        """
        for side, names in _ENCODED.items():
            name = next((name for name in names if name in recorded), None)
            if name is None:
                continue
            if why:
                yield not_here(f"inputs.{name}", recorded[name], why)
            elif base_place(config, self._cache)[0] is None:
                yield not_here(f"inputs.{name}", recorded[name], "the tokenizer is not here")
            else:
                yield compared(f"inputs.{name}", recorded[name], self._digest(run, config, side))

    def _digest(self, run: RunDir, config: RunConfig, side: Side) -> str:
        from mens_exp.data.datamodule import encoded_side

        rows, (_, tokenizer) = self._loaded(config), self._opened(run, config)

        def found() -> str:
            with TemporaryDirectory() as empty:
                try:
                    counts = encoded_side(config, rows, side, tokenizer, Path(empty))[1]
                except MensError as error:
                    return str(error)
                return counts.sha256

        key = cache_key(config, rows, side, tokenizer)
        return self._once(f"encoded {side} {key!r}", found)


def base_place(config: RunConfig, cache: Path) -> tuple[Path | None, str]:
    """Return the location of the base, or None with the reason why it is missing."""
    try:
        place = ready_directory(config.model, cache)
    except MensError as error:
        return None, f"the base is not here: {error.what}"
    return place, "the base is not on this machine"


def _damage_of(model: ModelConfig, cache: Path) -> str | None:
    """Return the reason why a base on this machine cannot be read; None if there is none."""
    if isinstance(model, HfModel) and Path(model.id).is_absolute() and not Path(model.id).exists():
        return None
    try:
        ready_directory(model, cache)
    except ModelFileError as error:
        return str(error)
    except MensError:  # such as a hub that does not answer
        return None
    return None


def _missing_files(config: RunConfig) -> str | None:
    data = config.data
    if not isinstance(data, JsonlData):
        return None
    try:
        files = [
            file
            for field in ("path", "val_path")
            if (named := getattr(data, field))
            for file in resolve_files(named, f"data.{field}")
        ]
    except MensError as error:
        return str(error)
    absent = [str(file) for file in files if not file.is_file()]
    if not absent:
        return None
    return f"{', '.join(absent)}: no such file; to check the rows, put it there (bundles have none)"


def _start(start: dict[str, Any], run: RunDir) -> Check:
    """Hash the adapter that a run started from, if it still exists."""
    name, recorded = "inputs.init_from.adapter_sha256", start["adapter_sha256"]
    try:
        place = find(Path(str(start["path"])))
    except MensError:
        owner = trained_by(str(recorded), run.path)
        if owner is None:
            return not_here(name, recorded, f"{start['path']} is no longer an adapter")
        place = find(owner.path)
    return compared(name, recorded, sha256_file(place.tensors))


# Provenance fields that affect the last bits of a sum.
MACHINE = ("packages", "python", "cpu", "environment")
_RELATIVE, _ABSOLUTE = 0.01, 1e-5  # between machines (unverified guess)


def certificate_checks(
    config: RunConfig,
    found: Inspected,
    certificate: Certificate,
    writer: RunDir | None,
    *,
    files_hold: bool,
) -> Iterator[Check]:
    """Yield each figure of a certificate together with its new measurement.

    Args:
        config: the command's configuration.
        found: the inspected output.
        certificate: the certificate next to it.
        writer: the run that wrote it; None if not available.
        files_hold: whether the files match the certificate.
    """
    if not files_hold:
        yield not_here("certificate", None, "the files are not those that it is of")
        return
    own = None if writer is None else _copy_of(writer)
    if own is not None:
        yield text_check(certificate, own)
        yield from _figure_checks(certificate, own, "certificate of its run: ", tolerance=None)
    asked, why = _asked(config, found, certificate, writer)
    if asked is None:
        yield not_here("certificate", None, why)
        return
    try:
        again = _measured(asked, found)
    except (MensError, OSError) as error:
        yield not_here("certificate", None, f"it cannot be measured here: {error}")
        return
    yield from _figure_checks(certificate, again, "certificate: ", tolerance=_tolerance(writer))


def text_check(certificate: Certificate, own: Certificate) -> Check:
    """Compare a certificate with its run's copy, which lacks the later hash of the model card."""

    def parts(one: Certificate) -> dict[str, Any]:
        files = {name: sha256 for name, sha256 in one.files.items() if not name.endswith(".md")}
        return {field.name: getattr(one, field.name) for field in fields(one)} | {"files": files}

    ours, theirs = parts(certificate), parts(own)
    odd = ", ".join(name for name in ours if ours[name] != theirs[name])
    same = "as its run wrote it"
    return compared("certificate of its run: text", same, f"differs in {odd}" if odd else same)


def _copy_of(writer: RunDir) -> Certificate | None:
    return Certificate.read(writer.parity) if writer.parity.is_file() else None


def _asked(
    config: RunConfig, found: Inspected, certificate: Certificate, writer: RunDir | None
) -> tuple[RunConfig | None, str]:
    """Return the command that would reproduce the output, or the reason why there is none."""
    adapter = _adapter(certificate, found)
    if writer is not None:
        asked = config_of(writer)
        asked.trainer.accelerator = config.trainer.accelerator
        if adapter is not None:
            asked.path = str(adapter)
        elif asked.path is not None and not Path(asked.path).expanduser().exists():
            return None, f"{asked.path}, from which it was made, no longer exists"
        return asked, ""
    if adapter is None:
        return None, "neither the run that wrote it nor the one that trained it was found"
    return _like(config, found, certificate, adapter)


def _adapter(certificate: Certificate, found: Inspected) -> Path | None:
    """Return the directory of the source adapter, if its run is available."""
    sha256 = certificate.sources.get("adapter_sha256")
    run = source_run(certificate, found.path)
    if run is None:
        return None
    outputs = Manifest.read(run.manifest).outputs
    return (run.path / next(name for name, one in outputs.items() if one == sha256)).parent


def _like(
    config: RunConfig, found: Inspected, certificate: Certificate, adapter: Path
) -> tuple[RunConfig | None, str]:
    """Return a command that would have written the output, as far as the certificate shows."""
    probe, accept = certificate.probe, certificate.accepted
    if probe is not None and probe["source"].startswith("text:"):
        return None, f"its {probe['source']} is not named by a path"
    asked = copy.deepcopy(config)
    asked.path = str(adapter)
    limits = {one.name: certificate.budget.get(one.name) for one in fields(BudgetConfig)}
    tokens = asked.parity.tokens if probe is None else probe["tokens"]
    asked.parity = ParityConfig(tokens=tokens, text=None, accept=accept)
    asked.parity.budget = BudgetConfig(**limits)
    if found.adapter is not None:
        asked.task.name, asked.export.format = "export", ExportFormat[found.adapter.form]
        return asked, ""
    asked.task.name = "merge"
    published = certificate.sources.get("quantizer") is None
    asked.merge = MergeConfig(
        mode=MergeMode.subset if found.kind is ArtifactKind.TENSORS else MergeMode.full,
        base=MergeBase.original if published and certificate.evidence is Evidence.WEIGHTS else None,
        untie=certificate.sources.get("merge_untie", True),
    )
    return asked, ""


def _measured(asked: RunConfig, found: Inspected) -> Certificate:
    """Measure a command's output again; only scratch files next to it are written."""
    if asked.task.name == "export" and asked.export.format is ExportFormat.gguf:
        return _of_gguf(asked, found.path)
    if asked.task.name == "export" and _is_an_adapter(asked):
        from mens_exp.export.subject import conversion_of
        from mens_exp.tasks.certificates import certify_adapter

        return certify_adapter(asked, conversion_of(asked), found.path)
    from mens_exp.tasks.merge import decided_merge

    return decided_merge(asked).certificate(asked, found.path)


def _is_an_adapter(asked: RunConfig) -> bool:
    of_ollama = (
        asked.export.format is ExportFormat.ollama and asked.ollama.form is OllamaForm.adapter
    )
    return of_ollama or asked.export.format not in {ExportFormat.hf, ExportFormat.ollama}


def _of_gguf(asked: RunConfig, directory: Path) -> Certificate:
    from mens_exp.tasks.certificates import certify_gguf, certify_gguf_of, trained_for
    from mens_exp.tasks.merge import decided_merge

    assert asked.path is not None, "it was made of something"
    if (Path(asked.path) / "config.json").is_file():
        return certify_gguf_of(asked, Path(asked.path), directory)
    merging = decided_merge(asked)
    trained = trained_for(asked, merging.inputs, merging.choices)
    return certify_gguf(trained, directory, asked.parity, what="GGUF")


def _tolerance(writer: RunDir | None) -> str | None:
    """Return the reason why figures may differ slightly; None if they must not."""
    if writer is None:
        return "written on a machine that nothing names"
    others = other_conditions(Manifest.read(writer.manifest))
    return f"written under other conditions: {', '.join(others)}" if others else None


def other_conditions(manifest: Manifest) -> list[str]:
    """List the differences between a run's machine and libraries and the current ones."""
    here = provenance.collect(Path.cwd())
    return [name for name in MACHINE if manifest.provenance.get(name) != here[name]]


def _figure_checks(
    certificate: Certificate, again: Certificate, prefix: str, *, tolerance: str | None
) -> Iterator[Check]:
    before, after = dict(_figures(certificate)), dict(_figures(again))
    for name, recorded in before.items():
        if name in after:
            yield _figure(f"{prefix}{name}", recorded, after[name], tolerance)
        else:
            why = next((why for what, why in again.unknown.items() if what in name), "not measured")
            yield not_here(f"{prefix}{name}", recorded, why)
    for name in after.keys() - before.keys():
        yield compared(f"{prefix}{name}", "not in the certificate", after[name])


def _figure(name: str, recorded: Any, found: Any, tolerance: str | None) -> Check:
    check = compared(name, recorded, found)
    are_numbers = type(recorded) is float and type(found) is float
    if tolerance is None or not are_numbers or check["outcome"] == Outcome.EQUAL:
        return check
    if abs(recorded - found) <= _ABSOLUTE + _RELATIVE * abs(recorded):
        check["outcome"] = Outcome.CLOSE
    check["note"] = f"within {_RELATIVE:.0%} or {_ABSOLUTE:g} counts as close: {tolerance}"
    return check


def _figures(certificate: Certificate) -> Iterator[tuple[str, Any]]:
    """Yield every value and limit by its dotted name; text fields are omitted."""
    yield "evidence", str(certificate.evidence)
    for name, limit in certificate.budget.items():
        yield f"budget.{name}", limit
    yield "passed", certificate.passed
    if certificate.reference_nll is not None:
        yield "reference_nll", certificate.reference_nll
    if certificate.probe is not None:
        yield "probe.tokens", certificate.probe["tokens"]
        yield "probe.sha256", certificate.probe["sha256"]
    for name, one in certificate.comparisons.items():
        for figure in ("mean_kl", "p99_kl", "max_kl", "top1_agreement", "nll_difference"):
            yield f"{name}.{figure}", dict(one)[figure]
        yield f"{name}.worst_layer", one["worst_layer"]["layer"]
        yield f"{name}.worst_layer.relative_error", one["worst_layer"]["relative_error"]
    for name, error in certificate.tensors.items():
        yield f"{name}.max_abs", error["max_abs"]
        yield f"{name}.relative", error["relative"]
