"""task=merge, and the formats of task=export that need an adapter.

export.format=peft|v2|v3 converts an adapter to another format. export.format=hf|gguf|ollama|vllm
writes a model for other programs, merged first if they need it; all formats share one merge
decision. Every directory contains the hand-off record and the certificate of its contents.
"""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import refuse_changed_model, sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.backends.saved_model import copy_tokenizer
from mens_exp.config.task import ExportFormat, MergeDtype, OllamaForm
from mens_exp.errors import RequestError
from mens_exp.export import gguf
from mens_exp.export.adapter import find, read, write
from mens_exp.export.certificate import CARD_NAME, hashes_of
from mens_exp.export.gguf import GGUF_FILE as GGUF
from mens_exp.export.gguf import export_gguf
from mens_exp.export.gguf_layout import refuse_unwritable
from mens_exp.export.handoff import (
    BackendFamily,
    Handoff,
    for_ollama,
    write_handoff,
    write_vllm,
)
from mens_exp.export.merge_choices import MOVED, decide, deltas_of
from mens_exp.export.subject import config_of, conversion_of, gather
from mens_exp.planning.preflight import writable_cache
from mens_exp.report import terminal, wording
from mens_exp.report.document import Note, Step
from mens_exp.report.evidence_views import card_section, certificate_document, verdict
from mens_exp.report.summary import base_command, load
from mens_exp.report.write import render_card
from mens_exp.tasks.inputs import describe, own_template, refuse_changed, tokenizer_of
from mens_exp.tokenizer.implementations import HfTokenizer
from mens_exp.training.wandb_mirror import mirror

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mens_exp.artifacts.certificate import Certificate
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.config.root import RunConfig
    from mens_exp.export.merge import Merge, MergedModel
    from mens_exp.export.merge_choices import Choices
    from mens_exp.export.subject import Conversion, MergeInputs
    from mens_exp.lora.method import Change
    from mens_exp.tasks.run import Run

_SERVE = Step("python -m mens_exp task=serve path={out}", "serve it")
_READ = Step("cat {out}/README.md", "read how vLLM serves it")


def merge(config: RunConfig, run: Run) -> None:
    """Write the merged weights atomically, and record their sources."""
    from mens_exp.export.merge import refuse_full_disk, write_tensors

    merging = decided_merge(config)
    choices = merging.choices
    merging.note(run)
    of_run = merging.inputs.run
    mirror(config, run, [] if of_run is None else [("adapter", str(of_run.path.absolute()))])
    terminal.show(Note(f"Base: {choices.why}."))
    usual = run.dir.merged_tensors if choices.only_merged else run.dir.merged
    out = usual if config.out is None else Path(config.out).expanduser()
    atomic.remove_stale(out.parent)
    refuse_full_disk(out, choices.all_places, choices.dtype)
    if choices.only_merged:
        with atomic.stream(out) as file:
            write_tensors(file, choices.all_places, merging.what, of_model=False)
            file.flush()
            written = Path(file.name)
            keep_if_certified(run, written, out, merging.certificate(config, written))
    else:
        with atomic.directory(out) as written:
            merging.write_model(written)
            keep_if_certified(run, written, out, merging.certificate(config, written))
    files = {"": out} if out.is_file() else {f"/{one.name}": one for one in sorted(out.iterdir())}
    run.manifest.results.update(
        out=str(config.out or usual.name),
        out_bytes=sum(one.stat().st_size for one in files.values()),
        out_sha256={f"{out.name}{name}": sha256_file(one) for name, one in files.items()},
    )
    size = run.manifest.results["out_bytes"] / 2**20
    notes = [f"{len(choices.layers)} layers merged, {choices.dtype}, {size:.1f} MiB"]
    if choices.unties:
        notes.append("The head had the embedding's weight; it has its own weight now.")
    if choices.moves_embedding:
        notes.append(f"merge.untie=false: {MOVED}.")
    terminal.show(*map(Note, notes))
    terminal.say(f"Merged: {out}")
    if not choices.only_merged:
        terminal.say_next(
            [Step(wording.command("task=serve", ("path", wording.path(out))), "serve it")]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Merging:
    """An adapter, its base, and the decided merge.

    Attributes:
        inputs: adapter and base, read.
        choices: the output's extent, format and base weights.
        deltas: the delta added to each weight, by logical name.
    """

    inputs: MergeInputs
    choices: Choices
    deltas: Mapping[str, Change]

    @property
    def what(self) -> Merge:
        """The operation on a checkpoint's tensors."""
        from mens_exp.export.merge import Merge

        choices = self.choices
        return Merge(deltas=self.deltas, dtype=choices.dtype, quantizer=choices.quantizer)

    def write_model(self, directory: Path) -> None:
        """Write the complete model into an empty directory."""
        from mens_exp.export.merge import write_directory

        model = _model(self.inputs, self.choices)
        write_directory(directory, self.choices.places, self.what, model)

    def certificate(self, config: RunConfig, written: Path) -> Certificate:
        """Compare the output with the trained model."""
        from mens_exp.tasks.certificates import certify_merge

        return certify_merge(config, self.inputs, self.choices, self.deltas, written)

    def note(self, run: Run) -> None:
        """Record the adapter and the base of the merge."""
        run.manifest.inputs.update(_read(self.inputs))
        run.manifest.results.update(_decided(self.choices))
        if self.choices.moves_embedding:
            run.manifest.notes.append(f"merge.untie=false: {MOVED}")


def decided_merge(config: RunConfig) -> Merging:
    """Read adapter and base, and decide the settings that the command leaves open.

    Raises:
        MensError: they do not belong together, or cannot be merged as requested.
    """
    inputs = gather(config, writable_cache())
    if inputs.run is not None and config.base is None:
        _refuse_changed_base(inputs, inputs.run)
    choices = decide(inputs, config.merge)
    return Merging(inputs=inputs, choices=choices, deltas=deltas_of(inputs, choices))


def _refuse_changed_base(inputs: MergeInputs, run: RunDir) -> None:
    """Refuse a base whose configuration or tokenizer is not that of training.

    `decide` compares the weights.

    Raises:
        RequestError: a hash differs.
        Problems: several hashes differ.
    """
    assert inputs.base is not None, "an adapter of a run has one"
    recorded = Manifest.read(run.manifest).inputs | {"base_weights_sha256": None}
    tokenizer = tokenizer_of(config_of(run).tokenizer, inputs.base, run)
    refuse_changed(recorded, describe(inputs.base, tokenizer, None))


def keep_if_certified(run: Run, written: Path, out: Path, certificate: Certificate) -> None:
    """Record and show a certificate, and keep or set aside its output.

    Raises:
        GateError: it is over the budget, and the command does not accept that.
    """
    from mens_exp.export.certificate import keep_or_set_aside

    certificate.write(run.dir.parity)
    run.manifest.results.update(parity=verdict(certificate))
    terminal.show(*certificate_document(certificate).parts)
    keep_or_set_aside(written, out, certificate, card_section(certificate))


def _read(inputs: MergeInputs) -> dict[str, Any]:
    """Return the manifest's ``inputs``."""
    read = {
        "adapter": inputs.where,
        "adapter_schema": inputs.schema,
        "adapter_sha256": inputs.sha256,
        "base_weights_sha256": inputs.weights_sha256(),
        "base_shards": [shard.name for shard in inputs.shards],
    }
    base = inputs.base
    if base is None:
        return read
    named = {"base_model": base.name, "base_source": base.source, "license": base.license}
    return read | named | ({"base_revision": base.revision} if base.revision else {})


def _decided(choices: Choices) -> dict[str, Any]:
    return {
        "mode": "subset" if choices.only_merged else "full",
        "base": "original" if choices.quantizer is None else "dequantized",
        "base_reason": choices.why,
        "quantizer": None if choices.quantizer is None else dict(choices.quantizer),
        "dtype": choices.dtype,
        "merged_keys": {one.logical: one.name for one in choices.all_places if one.logical},
        "untied": choices.unties,
        "embedding_moves": choices.moves_embedding,
    }


def _model(inputs: MergeInputs, choices: Choices) -> MergedModel:
    from mens_exp.export.merge import MergedModel

    assert inputs.base is not None, "bare shards make no directory"
    assert inputs.model is not None, "bare shards make no directory"
    run, learned_ids = inputs.run, True
    if run is not None:
        learned_ids = config_of(run).tokenizer.name == "hf"
    template = None if run is None else own_template(run)
    return MergedModel(
        base=inputs.base,
        config=inputs.model.config,
        unties=choices.unties,
        tokenizer=learned_ids,
        chat_template=template,
        model_card=run.model_card if run is not None and run.model_card.is_file() else None,
        card_lines=_card_lines(inputs, choices),
    )


def _card_lines(inputs: MergeInputs, choices: Choices) -> list[str]:
    """Return the lines of the model card."""
    assert inputs.base is not None, "bare shards make no directory"
    has_pair, many = inputs.manifest.form.has_pair, len(choices.layers)
    kind = "LoRA" if has_pair else inputs.manifest.variant
    how = "W + (B A) · alpha / r, summed in f32" if has_pair else "computed in f32"
    what = f"`{inputs.base.name}` with a {kind} adapter merged into {many} layers"
    lines = [
        f"{what}: {how} and rounded once to {choices.dtype}.",
        "",
        f"- base: {choices.why}",
        f"- sha256 of the adapter: `{inputs.sha256}`",
        f"- sha256 of the base's weights: `{inputs.base.weights_sha256}`",
    ]
    if choices.unties:
        lines.append("- the head has a separate weight; in the base it is the embedding table")
    if choices.moves_embedding:
        lines.append(f"- {MOVED}")
    return lines


def export_adapter(config: RunConfig, run: Run) -> None:
    """Write an adapter in another format, with its certificate, and record its hash."""
    from mens_exp.tasks.certificates import certify_adapter

    asked = conversion_of(config)
    out = Path(config.out).expanduser() if config.out else run.dir.adapter
    manifest, tensors = read(asked.place, asked.base, asked.quant)
    with atomic.directory(out) as temporary:
        write(manifest, tensors, config.export.format, temporary, asked.base)
        _complete(config, asked.place.run, temporary)
        keep_if_certified(run, temporary, out, certify_adapter(config, asked, temporary))
    written = find(out)
    after, _ = read(written, asked.base, asked.quant)
    run.manifest.inputs.update(
        subject=str(asked.place.directory),
        subject_form=asked.place.form,
        tensors_sha256=sha256_file(asked.place.tensors),
        base_model=manifest.base_model,
    )
    run.manifest.results.update(
        adapter="adapter" if config.out is None else config.out,
        form=written.form,
        layers=len(after.layer_order),
        parameters=sum(values.size for values in tensors.values()),
        tensors_sha256=sha256_file(written.tensors),
        tensors_bytes=written.tensors.stat().st_size,
    )
    if asked.place.form == "peft" and asked.quant is None:
        run.manifest.notes.append(
            "PEFT's format does not record how the base was quantized during training: "
            "recorded as none, unless export.base_quant says otherwise"
        )
    if asked.base is not None and manifest.base_model != asked.base.name:
        run.manifest.notes.append(
            f"the adapter names its base {manifest.base_model}; names and shapes are those of "
            f"{asked.base.name}"
        )
    size = written.tensors.stat().st_size / 2**20
    terminal.say(
        f"The adapter in {_FORMS[asked.place.form]} is now in {_FORMS[written.form]}: "
        f"{len(after.layer_order)} layers, {size:.1f} MiB"
    )
    terminal.say(f"Adapter: {out}")
    base = None
    if written.form == "peft" and asked.place.run is not None:
        base = base_command(load(asked.place.run))
        terminal.say(f"The Python code that loads it is in {out / CARD_NAME}.")
    if base is not None:
        terminal.say_next([Step(base, "write the base model that this code loads")])


_FORMS = {"v2": "schema v2", "v3": "schema v3", "peft": "PEFT's form"}


def _complete(config: RunConfig, subject: RunDir | None, out: Path) -> None:
    """Add the tokenizer, the chat template and the model card to a run's PEFT adapter."""
    if config.export.format is not ExportFormat.peft or subject is None:
        return
    if subject.peft.is_dir():
        copy_tokenizer(subject.peft, out)
    template = own_template(subject)
    if template is not None:
        atomic.write_text(out / template.name, template.read_text("utf-8"))
    card = render_card(load(subject), with_adapter=True)
    atomic.write_text(out / CARD_NAME, card)


def export_model(config: RunConfig, run: Run) -> None:
    """Write the directory atomically, and record its hashes."""
    write_form = {
        ExportFormat.hf: _hf,
        ExportFormat.gguf: _gguf,
        ExportFormat.ollama: _ollama,
        ExportFormat.vllm: _vllm,
    }[config.export.format]
    usual = run.dir.path / config.export.format.value
    out = usual if config.out is None else Path(config.out).expanduser()
    atomic.remove_stale(out.parent)
    with atomic.directory(out) as directory:
        certificate, step = write_form(config, run, directory)
        keep_if_certified(run, directory, out, certificate)
    run.manifest.results.update(
        directory=config.export.format.value if config.out is None else config.out,
        files_sha256=hashes_of(out),
        bytes=sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
    )
    terminal.say(f"Written: {out}")
    terminal.say_next([Step(step.command.format(out=shlex.quote(wording.path(out))), step.purpose)])


def _merged(config: RunConfig, run: Run) -> Merging:
    merging = decided_merge(config)
    if merging.choices.only_merged:
        raise RequestError(
            "other programs run whole models",
            where="path",
            found="the proxy stack" if merging.choices.is_proxy else "merge.mode=subset",
            expected="an adapter of a causal graph, merged whole",
            remedy="merge its projections with task=merge",
        )
    merging.note(run)
    return merging


def _base_name(merging: Merging) -> str:
    assert merging.inputs.base is not None, "a whole model has one"
    return merging.inputs.base.name


def _hf(config: RunConfig, run: Run, directory: Path) -> tuple[Certificate, Step]:
    merging = _merged(config, run)
    merging.write_model(directory)
    _hand_off(directory, BackendFamily.TRANSFORMERS, _base_name(merging), "transformers serve")
    return merging.certificate(config, directory), _SERVE


def _gguf(config: RunConfig, run: Run, directory: Path) -> tuple[Certificate, Step]:
    from mens_exp.tasks.certificates import certify_gguf, certify_gguf_of, trained_for

    assert config.path is not None, "validation has asked for it"
    step = Step(f"llama-server -m {{out}}/{GGUF}", "serve it with llama.cpp")
    if (Path(config.path) / "config.json").is_file():
        source = Path(config.path)
        refuse_changed_model(source)
        run.manifest.inputs.update(subject=str(source))
        export_gguf(source, directory, config.gguf.dtype, base=source.resolve().name)
        return certify_gguf_of(config, source, directory), step
    if config.merge.dtype is None:  # rounded once, by the GGUF writer
        config = dataclasses.replace(
            config, merge=dataclasses.replace(config.merge, dtype=MergeDtype.f32)
        )
    merging = _merged(config, run)
    assert merging.inputs.base is not None, "a whole model has one"
    refuse_unwritable(merging.inputs.base.directory)  # earlier checks miss a newly created base
    with atomic.scratch(directory.parent) as folder:
        source = folder / "merged"
        source.mkdir()
        merging.write_model(source)
        export_gguf(source, directory, config.gguf.dtype, base=_base_name(merging))
    trained = trained_for(config, merging.inputs, merging.choices)
    what = f"written: merged, GGUF in {config.gguf.dtype.value}{merging.choices.caveat}"
    return certify_gguf(trained, directory, config.parity, what=what), step


def _ollama(config: RunConfig, run: Run, directory: Path) -> tuple[Certificate, Step]:
    from mens_exp.tasks.certificates import certify_adapter

    step = Step("cd {out} && ollama create <name> -f Modelfile", "import it into Ollama")
    if config.ollama.form is OllamaForm.adapter:
        asked, base = _peft(config, run, directory)
        source = _tokenizer_directory(config, asked)
        _modelfile(directory, source, base=base, adapter=f"./{gguf.ADAPTER_FILE}")
        _hand_off(directory, BackendFamily.OLLAMA, base, None, adapter=".", tokenizer=base)
        return certify_adapter(config, asked, directory), step
    merging = _merged(config, run)
    merging.write_model(directory)
    _modelfile(directory, directory, base=".", adapter=None)
    _hand_off(directory, BackendFamily.OLLAMA, _base_name(merging), None)
    return merging.certificate(config, directory), step


def _vllm(config: RunConfig, run: Run, directory: Path) -> tuple[Certificate, Step]:
    from mens_exp.tasks.certificates import certify_adapter

    with atomic.scratch(directory.parent) as folder:
        asked, base = _peft(config, run, folder / "peft")
        owner = asked.place.run
        name = asked.place.directory.name if owner is None else owner.path.resolve().name
        write_vllm(folder / "peft", directory, base=base, name=name)
    return certify_adapter(config, asked, directory), _READ


def _peft(config: RunConfig, run: Run, directory: Path) -> tuple[Conversion, str]:
    """Write an adapter as a PEFT directory; return its conversion and the name of its base."""
    asked = conversion_of(config)
    assert asked.base is not None, "PEFT's form asks for it"
    manifest, tensors = read(asked.place, asked.base, asked.quant)
    if config.export.format is ExportFormat.ollama:
        manifest, tensors = for_ollama(manifest, tensors)
    write(manifest, tensors, ExportFormat.peft, directory, asked.base)
    if config.export.format is ExportFormat.ollama:
        gguf.write_gguf_adapter(directory / gguf.ADAPTER_FILE, manifest, tensors, asked.base)
    run.manifest.inputs.update(
        subject=str(asked.place.directory),
        subject_form=asked.place.form,
        base_model=asked.base.name,
    )
    return asked, asked.base.name


def _tokenizer_directory(config: RunConfig, asked: Conversion) -> Path:
    from mens_exp.export.subject import config_of
    from mens_exp.model.sources import resolve
    from mens_exp.planning.preflight import writable_cache

    owner = config if asked.place.run is None else config_of(asked.place.run)
    return resolve(owner.model, writable_cache()).directory


def _modelfile(directory: Path, source: Path, *, base: str, adapter: str | None) -> None:
    tokenizer = HfTokenizer.from_directory(source)
    text = gguf.modelfile(tokenizer, base=base, adapter=adapter)
    (directory / gguf.MODELFILE).write_text(text, encoding="utf-8", newline="\n")


def _hand_off(
    directory: Path,
    family: BackendFamily,
    base: str,
    notes: str | None,
    *,
    adapter: str | None = None,
    tokenizer: str = ".",
) -> None:
    record = Handoff(
        backend_family=family,
        base_model=base,
        artifact_dir=".",
        adapter_path=adapter,
        tokenizer_source=tokenizer,
        prompt_format="the tokenizer's chat template",
        notes=notes,
    )
    write_handoff(record, directory)
