"""Every causal model that transformers has: what training one does.

    make families    # trains them, and writes families.json and docs/measured/families.md
    python tests/support/families.py --page    # prints the page of families.json

Each family is made tiny with random weights and trained for one step through the command line:
packed first, and as the refusal's own remedy says where it is refused. The differences are those
of the probe before step 1, which compares loss and gradient with transformers alone, in f32.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

RECORD = Path(__file__).with_name("families.json")
# Sizes under the names that configurations use; a model with other names keeps its own, if small.
_SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "model_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "dff"), 128),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "feed_forward_proj_dim"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("head_dim", "v_head_dim", "global_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_hidden_size"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "state_size", "mamba_d_state"), 64),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("rotary_dim", "qk_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "mamba_d_ssm"), 64),
    **dict.fromkeys(("mamba_n_heads", "attention_window_size"), 4),
    "linear_num_heads": 4,
    "linear_head_dim": 64,  # a 4-bit block needs as many
    "vocab_size": 320,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
    "attention_types": [[["global", "local"], 1]],
    "init_std": 0.1,
    "is_decoder": True,
}
# Far from the defaults, so that an ignored setting is noticed.
_SETTINGS = {
    **dict.fromkeys(("logits_scaling", "embedding_multiplier"), 3.0),
    **dict.fromkeys(("logit_scale", "lm_head_multiplier", "residual_multiplier"), 0.3),
    **dict.fromkeys(("final_logit_softcapping", "logits_soft_cap"), 3.0),
    **dict.fromkeys(("attention_multiplier", "key_multiplier"), 0.3),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "hidden_dropout"), 0.2),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "residual_dropout"), 0.2),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop"), 0.2),
    **dict.fromkeys(("router_jitter_noise", "input_jitter_noise", "jitter_noise"), 0.2),
    "sliding_window": 9,
}
_MOST_PARAMETERS = 20_000_000


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result for a family: how it trains, or why not; differences are relative, in float32."""

    model_type: str
    how: str
    loss: float | None = None
    gradient: float | None = None
    reason: str = ""


def model_types():
    """Return the causal model types of the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def make_fitting(model_type, directory):
    """Make a family, with its default settings if the unusual ones do not fit."""
    with warnings.catch_warnings(), _silence():
        warnings.simplefilter("ignore")
        heads = dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 4)
        for settings in ({}, heads, dict.fromkeys(_SETTINGS)):
            try:
                return make_tiny(model_type, directory, **settings)
            except Exception:  # any error of a family's code
                continue
        return make_tiny(model_type, directory, **heads, **dict.fromkeys(_SETTINGS))


def make_tiny(model_type, directory, **settings):
    """Save a tiny model with random weights and a byte-level tokenizer.

    Raises whatever transformers raises where the sizes do not fit the family.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config_class = CONFIG_MAPPING[model_type]
    known = vars(config_class())
    wanted = _SIZES | _SETTINGS | settings  # None keeps the family's default
    sizes = {name: size for name, size in wanted.items() if name in known and size is not None}
    config = config_class(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with torch.device("meta"):
            count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if count > _MOST_PARAMETERS:
            raise ValueError(f"{count} parameters at the smallest sizes known")
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # scales of norms and biases, so that an error is noticed
                    parameter.add_(0.1 * torch.randn_like(parameter))
        ids = torch.arange(3, 40)[None]
        model.eval()(input_ids=ids, labels=ids, use_cache=False)  # it was built, so it can run
        model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        source = _tokenizer() / name
        if source.exists():
            shutil.copyfile(source, directory / name)
    return directory


def _tokenizer():
    from mens_exp.config.compose import compose, typed
    from mens_exp.model.sources import resolve
    from mens_exp.planning.preflight import writable_cache

    model = typed(compose([["model=tiny_llama"]])[0].values).model
    return resolve(model, writable_cache()).directory


def outcome(model_type, directory, *overrides):
    """Train a family for one step, following the remedy of a refusal."""
    try:
        made = make_fitting(model_type, directory / "model")
    except Exception as error:  # any error of a family's code
        first = (str(error) or type(error).__name__).splitlines()[0][:100]
        return Outcome(model_type=model_type, how="not made", reason=first)
    changes, how = [], "packed"
    for attempt in range(5):
        code, said, manifest = _train(made, directory / f"run{attempt}", [*changes, *overrides])
        if code == 0:
            part = manifest["data_contract"]["probe"]["reference"]
            words = ", ".join([how, *(one for one in changes if "packing" not in one)])
            return Outcome(
                model_type=model_type, how=words, loss=part["loss"], gradient=part["gradient"]
            )
        if code == 1:
            return Outcome(model_type=model_type, how="crashed", reason=said)
        if "backend=lora quant=none" in said and "quant=none" not in changes:
            changes += ["backend=lora", "quant=none"]
        elif "data.packing=false" in said and "data.packing=false" not in changes:
            changes.append("data.packing=false")
            how = "unpacked"
        elif "lora=attention" in said and "lora=attention" not in changes:
            changes.append("lora=attention")
        elif "quant.skip" in said and not any("quant.skip" in one for one in changes):
            names = re.findall(r"([\w.]+): 4-bit blocks would straddle", said)
            changes.append(f"quant.skip=[{','.join(dict.fromkeys(names))}]")
        elif "set lora.targets=[" in said and not any("targets" in one for one in changes):
            changes.append(said[said.index("lora.targets=[") :].split("]")[0] + "]")
        else:
            break
    return Outcome(model_type=model_type, how="refused", reason=said)


def _train(model, run, overrides):
    from mens_exp import cli

    said = io.StringIO()
    with (
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        code = cli.main(
            [
                "model=hf",
                f"model.id={model}",
                "trainer=cpu",
                "logger=none",
                "suite=none",
                "suite.items=0",
                "trainer.max_steps=1",
                "trainer.accumulate_grad_batches=2",
                "data.val_max_tokens=200",
                "data=jsonl",
                f"data.path={_rows(run.parent)}",
                "data.seq_len=192",
                "data.val_frac=0.1",
                "data.heldout_frac=0.1",
                f"hydra.run.dir={run}",
                *overrides,
            ]
        )
    manifest = run / "manifest.json"
    record = json.loads(manifest.read_text("utf-8")) if manifest.exists() else {}
    return code, _refusal(said.getvalue()), record


def _rows(directory):
    """Write sixty small functions, and return the file."""
    rows = [
        {"prompt": f"Add {n}.", "response": f"def add_{n}(x):\n    return x + {n}\n"}
        for n in range(60)
    ]
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


def _refusal(text):
    """Return the message of a refusal: its first line, the value found and the remedy."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept, on = [], False
    for line in lines:
        word = line.split(" ", 1)[0]
        if word in {"found", "expected", "next"} and kept:
            on = True
            if word != "expected":
                kept.append(line.split(" ", 1)[1].strip())
        elif on and word == "The":
            break
        elif not on:
            kept = [line]
    return "; ".join(kept) or (lines[-1] if lines else "")


@contextlib.contextmanager
def _silence():
    with (
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        yield


def entry(found):
    """Return a family's record."""
    if found.loss is None:
        return {"trains": found.how, "difference": "", "reason": _plain(found.reason)}
    bound = _bound(max(found.loss, found.gradient))
    return {"trains": found.how, "difference": bound, "reason": ""}


def _bound(difference):
    """Return the next power of ten, which is the same on every machine."""
    power = math.ceil(math.log10(max(difference, 1e-6)))
    return f"≤ 1e{power}"


def _plain(reason):
    """Remove what differs from run to run, and what a table cannot contain."""
    place = re.sub(r"/\S+/model[:/ ]*", "", reason)
    return place.split("; report this")[0].replace("|", "/")


def page():
    """Return the page of the recorded families."""
    from mens_exp.layout.families import _EXPERTS

    record = json.loads(RECORD.read_text("utf-8"))
    experts = ", ".join(f"`{name}`" for name in sorted(_EXPERTS))
    lines = [_HEAD.format(version=record["transformers"], experts=experts)]
    for name, one in record["families"].items():
        cells = [f"`{name}`", one["trains"], one["difference"], one["reason"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    """Record all families, or those named; with --page, print the page instead."""
    if sys.argv[1:] == ["--page"]:
        print(page(), end="")
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    found = {}
    for name in sys.argv[1:] or model_types():
        with tempfile.TemporaryDirectory() as place:
            found[name] = entry(outcome(name, Path(place)))
            print(name, *found[name].values(), flush=True)
    record = {"transformers": metadata.version("transformers"), "families": found}
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")


_HEAD = """# Model families

This table is generated by training every causal model type of transformers {version} for one step
(`make families`). Each model is tiny, with random weights, and with scaled logits, dropout and
short windows wherever its configuration has and allows them. If a refusal says what to set, that is
set, and the second column shows it.

The difference is that of the check before step 1: our loss and gradient compared with those of
transformers alone, in f32 over the same quantized weights
([The data contract](../method/data_contract.md#the-comparison-with-transformers)).

Experts get adapters with `lora=experts`, through PEFT's `target_parameters`, in {experts}.
Other mixtures of experts refuse it and train with `lora=attention`.

PEFT adds the update of an expert to its weight in the format of the weight. In bf16, an update
smaller than 1/512 to 1/256 of its weight is rounded away in training and generation; a merge adds
in f32 and rounds once. Set `quant.compute_dtype=f32` where small updates of experts matter. Other
modules keep weight and update apart.

| model type | trains | difference | why not |
|---|---|---|---|"""


if __name__ == "__main__":
    main()
