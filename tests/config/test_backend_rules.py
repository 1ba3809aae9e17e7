from __future__ import annotations

import pytest

from mens_exp.config.overrides import check
from mens_exp.planning.preflight import preflight
from mens_exp.report import terminal

TINY = ["model=tiny_llama", "trainer=cpu", "logger=none"]
WIDE = ["model=random", "model.name=wide", "model.hidden_size=256", "model.intermediate_size=512"]
PRETRAINED, ON_HUB = ["model=smollm2_135m"], ["model=hf", "model.id=x/y"]
BLOCKS = "quant.block_size_pattern"
DOUBLES = "quant.double_quant_pattern"
ALLOWED, CONTROL = "tokenizer.allow_unrelated_rows", "tokenizer.allow_control_text"


def problems_of(*overrides):
    """Compose a command and list its problems, those of files and limits included."""
    by_key = {text.partition("=")[0]: text for text in [*TINY, *overrides]}
    checked = check(list(by_key.values()))
    problems = list(checked.problems)
    if not problems:
        problems += preflight(checked.cells[0].config)
    assert bool(list(terminal.problem_lines(problems, 80))) == bool(
        problems
    )  # as printed by the command line
    return [(problem.where, str(problem)) for problem in problems]


@pytest.mark.parametrize(
    "overrides",
    [
        ["backend=proxy"],
        ["backend=proxy", "quant=fp4", "quant.block_size=64"],
        ["backend=proxy", "objective=causal"],
        ["backend=proxy", "backend.max_layers=1", "backend.require_full_stack=true"],
        ["backend=proxy", "backend.lm_head_only=true"],
        ["backend=lora"],
        ["backend=lora", "quant.compute_dtype=f32", "lora=qv"],
        ["quant.skip=[mlp,q_proj]"],
        ["quant=int8"],
        ["quant=int8", "quant.skip=[mlp]", "lora.variant=dora"],
        [*WIDE, "model.hidden_size=96", "quant=int8"],
        ["quant=nf3", "quant.skip=[mlp]", "lora.variant=dora"],
        [*WIDE, "quant=nf2", "quant.block_size=256", "quant.double_quant=true"],
        ["quant=codebook", "quant.levels=[-1,-0.3,0,0.3,1]", "quant.double_quant=true"],
        ["quant.type_pattern={mlp:codebook}", "quant.levels=[-1,1]"],
        ["quant=uint4", "quant.type_pattern={mlp:nf2}", "quant.double_quant_pattern={mlp:true}"],
        [*WIDE, "model.hidden_size=96", "quant=mxfp4"],
        ["quant.block_size_pattern={down_proj:128}"],
        ["quant=mxfp4", "quant.type_pattern={mlp:nf4}", "quant.block_size_pattern={mlp:64}"],
        ["objective=last_k", "objective.k=0"],
        ["objective=last_k", "objective.k=8", "data.seq_len=8"],
        ["objective=last_k", "objective.k=64", "data.truncation=right"],
        ["tokenizer.chat_template=plain"],
        [*WIDE, "quant.block_size=256"],
        ["backend=burn"],
        ["backend=burn", "tokenizer=vox"],
        [*PRETRAINED, "backend=burn"],
        [*PRETRAINED, "backend=burn", "tokenizer=vox", f"{ALLOWED}=true"],
    ],
)
def test_combination_is_accepted(overrides):
    """These combinations give no problem."""
    assert problems_of(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "where", "says"),
    [
        (["backend=lora", "quant=nf4"], "quant.quant_type", "quant=none"),
        (["quant=none"], "quant.quant_type", "backend=lora"),
        (["backend=proxy", "quant=none"], "quant.quant_type", "nf4 or fp4"),
        (["backend=lora", "quant.double_quant=true"], "quant.double_quant", "no effect"),
        (["backend=lora", "quant.block_size=128"], "quant.block_size", "no effect"),
        (["backend=lora", "quant.storage_dtype=bf16"], "quant.storage_dtype", "no effect"),
        (["backend=lora", "quant.skip=[mlp]"], "quant.skip", "no effect"),
        (["quant=int8", "quant.double_quant=true"], "quant.double_quant", "quant_type=int8"),
        (["quant=int8", "quant.block_size=128"], "quant.block_size", "quant_type=int8"),
        (["quant=int8", "quant.storage_dtype=bf16"], "quant.storage_dtype", "quant_type=int8"),
        (["quant=int8", "lora.init=pissa"], "lora.init", "4 bits"),
        (["quant=int8", "lora.init=loftq"], "lora.init", "4 bits"),
        (["quant=nvfp4", "quant.block_size=64"], "quant.block_size", "quant_type=nvfp4"),
        (["quant=uint4", "quant.double_quant=true"], "quant.double_quant", "quant_type=uint4"),
        (["quant=codebook"], "quant.levels", "2 to 256"),
        (["quant=codebook", "quant.levels=[1]"], "quant.levels", "2 to 256"),
        (["quant=codebook", "quant.levels=[1,-1]"], "quant.levels", "ascending"),
        (["quant=codebook", "quant.levels=[0,1,1.00000001]"], "quant.levels", "different"),
        (["quant=codebook", "quant.levels=[0,inf]"], "quant.levels", "1e6"),
        (["quant=codebook", "quant.levels=[nan,1]"], "quant.levels", "ascending"),
        (["quant=codebook", "quant.levels=[-1e-9,1e-9]"], "quant.levels", "1e-6"),
        (["quant.type_pattern={mlp:codebook}"], "quant.levels", "2 to 256"),
        (["quant.levels=[-1,1]"], "quant.levels", "quant_type=nf4"),
        (["quant.double_quant_pattern={nothing:false}"], DOUBLES, "nothing"),
        (["quant=uint4", "quant.double_quant_pattern={mlp:true}"], DOUBLES, "as uint4"),
        (["quant=int8", "quant.double_quant_pattern={mlp:true}"], DOUBLES, "has no effect"),
        (["backend=proxy", "quant.double_quant_pattern={mlp:false}"], DOUBLES, "all of its"),
        (["quant=int4", "lora.init=pissa"], "lora.init", "4 bits"),
        (["quant=nf2", "backend=proxy"], "quant.quant_type", "nf4 or fp4"),
        ([*WIDE, "model.hidden_size=96", "quant=nf3"], "model.hidden_size", "multiple of 64"),
        (["quant=int8", "backend=lora"], "quant.quant_type", "no quantized base"),
        (["quant=int8", "backend=proxy"], "quant.quant_type", "4-bit projections"),
        ([*WIDE, "model.hidden_size=96"], "model.hidden_size", "multiple of 64"),
        (["quant.block_size=96"], "quant.block_size", "64, 128, 256"),
        (["quant.block_size=32"], "quant.block_size", ">= 64"),
        (["quant.block_size=128"], "quant.block_size", "q (64)"),
        (["quant.block_size_pattern={mlp:96}"], "quant.block_size_pattern.mlp", "64, 128, 256"),
        (["quant.block_size_pattern={mlp:128}"], BLOCKS, "128 for"),
        (["quant.block_size_pattern={nothing:128}"], BLOCKS, "nothing"),
        (["quant=mxfp4", "quant.block_size_pattern={down_proj:128}"], BLOCKS, "as mxfp4"),
        (["quant=int8", "quant.block_size_pattern={mlp:128}"], BLOCKS, "has no effect"),
        (["backend=proxy", "quant.block_size_pattern={mlp:128}"], BLOCKS, "all of its"),
        (["quant.block_size_pattern={down_proj:128}", "lora.init=pissa"], "lora.init", "4 bits"),
        (["quant.skip=[nothing]"], "quant.skip", "nothing"),
        (["quant.skip=[lm_head]"], "quant.skip", "never quantized"),
        (["quant.skip=[mlp,mlp]"], "quant.skip", "twice"),
        (["backend=proxy", "quant.skip=[mlp]"], "quant.skip", "all of its"),
        (["backend=proxy", "quant.storage_dtype=f32"], "quant.storage_dtype", "packed"),
        (["backend=proxy", "lora=qv"], "lora.targets", "proxy_stack"),
        (["backend=proxy", "lora.variant=dora"], "lora.variant", "plain LoRA"),
        (["backend=proxy", "lora.init=pissa"], "lora.init", "plain LoRA"),
        (["lora=proxy_stack"], "lora.targets", "proxy_stack"),
        (["backend=proxy", "backend.max_layers=3"], "backend.max_layers", "at most 2"),
        (
            ["backend=proxy", "backend.lm_head_only=true", "backend.max_layers=1"],
            "backend.max_layers",
            "no effect",
        ),
        (
            ["backend=proxy", "backend.lm_head_only=true", "backend.require_full_stack=true"],
            "backend.require_full_stack",
            "not a full stack",
        ),
        (["backend.composition=residual"], "backend.composition", "backend=proxy"),
        (["backend=proxy", "model.head_dim=32", "model=random"], "self_attn.o_proj", "[64, 128]"),
        (["objective=last_k", "objective.k=65"], "objective.k", "<= 64"),
        (["objective.k=2"], "objective.k", "objective=last_k"),
        (["objective=last_k", "objective.k=9", "data.seq_len=8"], "objective.k", "(8)"),
        (["backend.name=lora"], "backend.name", "set by the option"),
        ([*PRETRAINED, "backend=burn", "tokenizer=vox"], "tokenizer", "unrelated rows"),
        ([*PRETRAINED, "backend=burn", "tokenizer=vox"], "tokenizer", f"{ALLOWED}=true"),
        ([*ON_HUB, "backend=burn", "tokenizer=vox"], "tokenizer", "ids 0 to 130"),
        (["backend=burn", f"{ALLOWED}=true"], ALLOWED, "has no effect"),
        ([*PRETRAINED, "backend=burn", f"{ALLOWED}=true"], ALLOWED, "has no effect"),
        (["backend=burn", "tokenizer.allow_control_text=false"], CONTROL, "true, or tokenizer=hf"),
        (["backend=burn", "tokenizer.allow_control_text=maybe"], CONTROL, "true or false"),
    ],
)
def test_combination_is_refused(overrides, where, says):
    """Before a run directory exists; the message has the key and a valid alternative."""
    found = problems_of(*overrides)
    assert [(place, text) for place, text in found if place == where and says in text], found


@pytest.mark.parametrize(
    ("overrides", "tokenizer"),
    [
        (["model=random"], "vox"),
        (["model=tiny_gpt2"], "vox"),
        (["model=tiny_qwen2"], "vox"),
        (["experiment=smoke"], "vox"),
        (["model=tiny_llama", "tokenizer=hf"], "hf"),
        ([], "hf"),
        (["model=gpt2"], "hf"),
        (["model=hf", "model.id=here"], "hf"),
        (["preset=sigilderg_phase1", "optim=adamw"], "hf"),
    ],
)
def test_the_research_lane_encodes_for_the_weights_it_has(overrides, tokenizer):
    """Vox needs an embedding learned from scratch; pretrained weights need their own tokenizer."""
    (cell,) = check(["backend=burn", *overrides]).cells
    made = cell.config.tokenizer
    assert (made.name, made.allow_control_text) == (tokenizer, tokenizer == "vox")


def test_each_cell_of_a_sweep_has_the_tokenizer_of_its_model():
    """The default tokenizer is chosen for each cell's model."""
    checked = check(["backend=burn", "model=tiny_llama,smollm2_135m"], multirun=True)
    assert checked.problems == ()
    assert [cell.config.tokenizer.name for cell in checked.cells] == ["vox", "hf"]
