"""task=export, task=push and task=serve: hand a run to a colleague, the hub, or clients.

export packs a bundle, writes the format of another program, or the base model alone. push uploads
the adapter with its card and records. serve runs an OpenAI-compatible server for a merged model
until Ctrl-C.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import digest, refuse_changed_model, sha256_file
from mens_exp.config.task import ExportFormat, ExportKind, export_kind
from mens_exp.errors import SetupError
from mens_exp.export import bundle
from mens_exp.export.bundle import pack
from mens_exp.export.certificate import hashes_of
from mens_exp.export.handoff import BackendFamily, Handoff, write_handoff
from mens_exp.export.serving import serving
from mens_exp.export.subject import subject_of
from mens_exp.layout.model_cache import hash_shards
from mens_exp.planning.preflight import writable_cache
from mens_exp.report import terminal, wording
from mens_exp.report.document import Step
from mens_exp.tasks.run import Cancelled

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.run import Run


def export(config: RunConfig, run: Run) -> None:
    """Write the output in ``format`` and record its hash."""
    if export_kind(config) is ExportKind.base:
        _base(config, run)
    elif config.export.format is ExportFormat.bundle:
        _bundle(config, run)
    elif config.export.format in {ExportFormat.peft, ExportFormat.v2, ExportFormat.v3}:
        from mens_exp.tasks.merge import export_adapter

        export_adapter(config, run)
    else:
        from mens_exp.tasks.merge import export_model

        export_model(config, run)


def _bundle(config: RunConfig, run: Run) -> None:
    assert config.path is not None, "validation has asked for it"
    subject = subject_of(config.path)
    name = f"{subject.path.resolve().name}.tar.gz"
    archive = Path(config.out).expanduser() if config.out else run.dir.path / name
    hashes = pack(subject, archive, checkpoints=config.export.checkpoints)
    run.manifest.inputs.update(subject=str(subject.path), files_sha256=hashes)
    run.manifest.results.update(
        bundle=name if config.out is None else config.out,
        bundle_sha256=sha256_file(archive),
        bundle_bytes=archive.stat().st_size,
        files=len(hashes),
    )
    terminal.say(f"{len(hashes)} files, {archive.stat().st_size / 2**20:.1f} MiB")
    terminal.say(f"Bundle: {archive}")
    unpacked = subject.path.resolve().name
    verify = wording.command("task=inspect", ("path", unpacked), "inspect.verify=true")
    unpack = f"tar xzf {shlex.quote(archive.name)}"
    terminal.say_next([Step(f"{unpack} && {verify}", "verify it elsewhere")])


def _base(config: RunConfig, run: Run) -> None:
    """Write the command's own model as a directory, byte for byte, and record its hashes."""
    from mens_exp.export.merge import write_base
    from mens_exp.model.sources import resolve

    base = resolve(config.model, writable_cache())
    out = Path(config.out).expanduser() if config.out else run.dir.path / "hf"
    atomic.remove_stale(out.parent)
    with atomic.directory(out) as directory:
        write_base(directory, base)
        record = Handoff(
            backend_family=BackendFamily.TRANSFORMERS,
            base_model=base.name,
            artifact_dir=".",
            tokenizer_source=".",
            prompt_format="the tokenizer's chat template",
            notes="transformers serve",
        )
        write_handoff(record, directory)
    read = {"base_source": base.source, "base_weights_sha256": base.weights_sha256}
    run.manifest.inputs.update(base_model=base.name, **read)
    hashes = hashes_of(out)
    run.manifest.results.update(directory=config.out or "hf", files_sha256=hashes)
    terminal.say(f"Written: {out}")
    terminal.say("Python code that loads it, with an adapter in PEFT's form:")
    place = json.dumps(wording.path(out))
    terminal.say(f"  base = AutoModelForCausalLM.from_pretrained({place})")
    terminal.say('  model = PeftModel.from_pretrained(base, "<adapter>")')
    served = wording.command("task=serve", ("path", wording.path(out)))
    terminal.say_next([Step(served, "serve it")])


def push(config: RunConfig, run: Run) -> None:
    """Upload in one commit and record the commit."""
    assert config.path is not None, "validation has asked for it"
    assert config.push.repo is not None, "validation has asked for it"
    subject = subject_of(config.path)
    message = config.push.message or f"mens_exp run {subject.path.resolve().name}"
    run.manifest.inputs.update(subject=str(subject.path))
    pushed = bundle.push(subject, config.push.repo, private=config.push.private, message=message)
    run.manifest.results.update(asdict(pushed))
    terminal.say(f"Pushed: {pushed.url} (commit {pushed.commit})")
    terminal.say_next([Step(f"hf download {config.push.repo}", "fetch it elsewhere")])


def serve(config: RunConfig, run: Run) -> None:
    """Start the server, print how to query it, and wait for Ctrl-C or SIGTERM.

    Raises:
        SetupError: the server ended by itself.
        Problems: a file of the model differs from what its run wrote.
    """
    assert config.path is not None, "validation has asked for it"
    model = Path(config.path)
    hashes = hash_shards(model, refuse_changed_model(model))
    run.manifest.inputs.update(subject=str(model), base_weights_sha256=digest(hashes))
    asked = config.serve
    try:
        with serving(model, host=asked.host, port=asked.port, token_env=asked.token_env) as server:
            run.manifest.results.update(url=server.url, model=server.model)
            run.save()
            terminal.say(f"Serving {server.model} at {server.url}; Ctrl-C ends it.")
            terminal.say_next([Step(server.curl, "ask it something")])
            code = server.process.wait()
    except (Cancelled, KeyboardInterrupt):
        terminal.say("Stopped.")
        return
    raise SetupError(
        "the server ended by itself",
        where="task=serve",
        found=f"exit code {code}; its own words stand above",
    )
