"""format=hf|gguf|ollama|vllm: a run as other programs serve it, merged on the way where they need.

Every directory has the hand-off record and the certificate of what lies in it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mens_exp.artifacts import atomic
from mens_exp.config.merge import MergeDtype
from mens_exp.config.task import ExportFormat, OllamaForm
from mens_exp.errors import RequestError
from mens_exp.export import ollama
from mens_exp.export.adapter import read, write
from mens_exp.export.gguf_export import FILE as GGUF
from mens_exp.export.gguf_export import export_gguf
from mens_exp.export.handoff import BackendFamily, Handoff, write_handoff
from mens_exp.export.verdict import hashes_of
from mens_exp.export.vllm import write_vllm
from mens_exp.tasks.conversion import conversion_of
from mens_exp.tasks.export_certificate import certify_adapter
from mens_exp.tasks.merging import Merging, decided_merge, settle_certified
from mens_exp.tokenizer.hf import HfTokenizer

if TYPE_CHECKING:
    from mens_exp.artifacts.certificate import Certificate
    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.conversion import Conversion
    from mens_exp.tasks.run import Run

__all__ = ["export_model"]


def export_model(config: RunConfig, run: Run) -> None:
    """Write the directory, whole or not at all, and record its hashes."""
    write_form = {
        ExportFormat.hf: _hf,
        ExportFormat.gguf: _gguf,
        ExportFormat.ollama: _ollama,
        ExportFormat.vllm: _vllm,
    }[config.format]
    console = Console()
    usual = run.dir.path / config.format.value
    out = usual if config.out is None else Path(config.out).expanduser()
    atomic.remove_stale(out.parent)
    with atomic.directory(out) as directory:
        certificate, command = write_form(config, run, directory)
        settle_certified(run, directory, out, certificate, console)
    run.manifest.results.update(
        directory=config.format.value if config.out is None else config.out,
        files_sha256=hashes_of(out),
        bytes=sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
    )
    console.print(f"Written: {out}", soft_wrap=True, markup=False)
    console.print(command.format(out=out), soft_wrap=True)


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


def _hf(config: RunConfig, run: Run, directory: Path) -> tuple[Certificate, str]:
    merging = _merged(config, run)
    merging.write_model(directory)
    _hand_off(directory, BackendFamily.TRANSFORMERS, _base_name(merging), "transformers serve")
    return merging.certificate(config, directory), "Serve it: mens-exp task=serve path={out}"


def _gguf(config: RunConfig, run: Run, directory: Path) -> tuple[Certificate, str]:
    from mens_exp.tasks.certifying import certify_gguf, certify_gguf_of
    from mens_exp.tasks.merge_certificate import trained_for

    assert config.path is not None, "validation has asked for it"
    command = (
        f"Run it: llama-server -m {{out}}/{GGUF}, or ollama create <name> -f {{out}}/Modelfile"
    )
    if (Path(config.path) / "config.json").is_file():
        source = Path(config.path)
        run.manifest.inputs.update(subject=str(source))
        export_gguf(source, directory, config.gguf.dtype, base=source.resolve().name)
        return certify_gguf_of(config, source, directory), command
    if config.merge.dtype is None:  # rounded once, by what writes GGUF
        config = dataclasses.replace(
            config, merge=dataclasses.replace(config.merge, dtype=MergeDtype.f32)
        )
    merging = _merged(config, run)
    with atomic.scratch(directory.parent) as folder:
        source = folder / "merged"
        source.mkdir()
        merging.write_model(source)
        export_gguf(source, directory, config.gguf.dtype, base=_base_name(merging))
    trained = trained_for(config, merging.inputs, merging.choices)
    what = f"written: merged, GGUF in {config.gguf.dtype.value}{merging.choices.caveat}"
    return certify_gguf(trained, directory, config.parity, what=what), command


def _ollama(config: RunConfig, run: Run, directory: Path) -> tuple[Certificate, str]:
    command = "Import it: cd {out} && ollama create <name> -f Modelfile"
    if config.ollama.form is OllamaForm.adapter:
        asked, base = _peft(config, run, directory)
        source = _tokenizer_directory(config, asked)
        _modelfile(directory, source, base=base, adapter=".")
        _hand_off(directory, BackendFamily.OLLAMA, base, None, adapter=".", tokenizer=base)
        return certify_adapter(config, asked, directory), command
    merging = _merged(config, run)
    merging.write_model(directory)
    _modelfile(directory, directory, base=".", adapter=None)
    _hand_off(directory, BackendFamily.OLLAMA, _base_name(merging), None)
    return merging.certificate(config, directory), command


def _vllm(config: RunConfig, run: Run, directory: Path) -> tuple[Certificate, str]:
    with atomic.scratch(directory.parent) as folder:
        asked, base = _peft(config, run, folder / "peft")
        owner = asked.place.run
        name = asked.place.directory.name if owner is None else owner.path.resolve().name
        write_vllm(folder / "peft", directory, base=base, name=name)
    return certify_adapter(config, asked, directory), "Serve it: the command in {out}/README.md"


def _peft(config: RunConfig, run: Run, directory: Path) -> tuple[Conversion, str]:
    """Write an adapter as a PEFT directory; return its conversion and the name of its base."""
    asked = conversion_of(config)
    assert asked.base is not None, "PEFT's form asks for it"
    manifest, tensors = read(asked.place, asked.base, asked.quant)
    write(manifest, tensors, ExportFormat.peft, directory, asked.base)
    run.manifest.inputs.update(
        subject=str(asked.place.directory),
        subject_form=asked.place.form,
        base_model=asked.base.name,
    )
    return asked, asked.base.name


def _tokenizer_directory(config: RunConfig, asked: Conversion) -> Path:
    from mens_exp.model.resolve import resolve
    from mens_exp.plan.preflight import writable_cache
    from mens_exp.tasks.subject import config_of

    owner = config if asked.place.run is None else config_of(asked.place.run)
    return resolve(owner.model, writable_cache()).directory


def _modelfile(directory: Path, source: Path, *, base: str, adapter: str | None) -> None:
    tokenizer = HfTokenizer.from_directory(source)
    text = ollama.modelfile(tokenizer, base=base, adapter=adapter)
    (directory / ollama.FILE).write_text(text, encoding="utf-8", newline="\n")


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
