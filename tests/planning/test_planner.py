from __future__ import annotations

import dataclasses
import itertools

import pytest

from mens_exp.config.backend import BACKEND_SPECS, FULL_GRAPH, PROXY
from mens_exp.layout.families import FAMILIES
from mens_exp.planning.contract import (
    AdapterPart,
    ArtifactPart,
    DataPart,
    ExecPart,
    FineTuneContract,
    ModelPart,
    QuantPart,
)
from mens_exp.planning.planner import (
    Coverage,
    Environment,
    Gate,
    coverage,
    execution_plan,
    refusals,
)

ALL = frozenset(BACKEND_SPECS)


def contract(
    method="qlora",
    base="nf4",
    tokenizer="hf",
    deployment="workstation",
    *,
    targets=FULL_GRAPH,
    rank=8,
    **run,
):
    values = {"seq_len": 256, "batch_size": 1, "grad_accum": 4, "learning_rate": 1e-4}
    return FineTuneContract(
        model=ModelPart(),
        data=DataPart(tokenizer_mode=tokenizer),
        adapter=AdapterPart(method=method, rank=rank, alpha=16, dropout=0.0, targets=targets),
        quant=QuantPart(base=base, double_quant=base != "none"),
        exec=ExecPart(**{**values, "warmup_steps": 3, "seed": 1, **run}),
        artifact=ArtifactPart(deployment_target=deployment),
    )


def around(model_type="llama", **values):
    return Environment(kernels=values.pop("kernels", ALL), model_type=model_type, **values)


def gates(of, meets):
    return [gate for gate, _ in refusals(of, meets)]


def errors(of, meets):
    return [error for _, error in refusals(of, meets)]


# By hand, from REFERENCE section 2: (method, base, tokenizer, backend) -> gates for a known layout,
# and those that an unknown layout adds.
ACCEPTANCE = {
    ("qlora", "nf4", "hf", "qlora"): ([], []),
    ("qlora", "nf4", "vox", "qlora"): ([Gate.TOKENIZER], []),
    ("qlora", "fp4", "hf", "qlora"): ([], []),
    ("qlora", "int8", "hf", "qlora"): ([], []),
    ("qlora", "int8", "vox", "qlora"): ([Gate.TOKENIZER], []),
    ("lora", "int8", "hf", "lora"): ([Gate.QUANTIZED_BASE], []),
    ("qlora", "none", "hf", "qlora"): ([Gate.QUANTIZED_BASE], []),
    ("qlora", "none", "vox", "qlora"): ([Gate.QUANTIZED_BASE, Gate.TOKENIZER], []),
    ("lora", "none", "hf", "lora"): ([], []),
    ("lora", "none", "vox", "lora"): ([Gate.TOKENIZER], []),
    ("lora", "nf4", "hf", "lora"): ([Gate.QUANTIZED_BASE], []),
    ("lora", "nf4", "vox", "lora"): ([Gate.QUANTIZED_BASE, Gate.TOKENIZER], []),
    ("lora", "none", "hf", "burn"): ([], [Gate.WARM_START]),
    ("lora", "none", "vox", "burn"): ([], []),
    ("lora", "nf4", "hf", "burn"): ([Gate.QUANTIZED_BASE], [Gate.WARM_START]),
    ("lora", "none", "hf", "qlora"): ([Gate.FORCED], []),
    ("qlora", "nf4", "hf", "burn"): ([Gate.FORCED], []),
}


@pytest.mark.parametrize(
    ("asked", "layout", "deployment"),
    list(itertools.product(ACCEPTANCE, ["llama", "gpt2", None], ["workstation", "mobile_edge"])),
    ids=str,
)
def test_acceptance(asked, layout, deployment):
    """Method × base × tokenizer × backend × layout × deployment target; gates are in order."""
    method, base, tokenizer, backend = asked
    known, unknown = ACCEPTANCE[asked]
    expected = sorted([*known, *(unknown if layout is None else [])])
    made = contract(method, base, tokenizer, deployment)
    assert gates(made, around(layout, forced=backend)) == expected


@pytest.mark.parametrize(("base", "refused"), [("nf4", False), ("fp4", False), ("int8", True)])
def test_the_proxy_has_four_bits_only(base, refused):
    """The message names the supported quantizers."""
    made = contract("qlora", base, targets=PROXY)
    found = list(refusals(made, around(forced="proxy")))
    assert [gate for gate, _ in found] == ([Gate.QUANTIZED_BASE] if refused else [])
    assert all("nf4 or fp4" in str(error) for _, error in found)


@pytest.mark.parametrize("name", sorted(BACKEND_SPECS))
def test_kernel_that_is_not_here_is_refused(name):
    """The message names the available backends, and says how to add one."""
    kernel = BACKEND_SPECS[name]
    base = "nf4" if kernel.quantized else "none"
    made = contract(kernel.method, base, targets=kernel.targets)
    assert gates(made, around(forced=name)) == []
    have = ALL - {name}
    assert gates(made, around(forced=name, kernels=have)) == [Gate.KERNEL]
    (error,) = errors(made, around(forced=name, kernels=have))
    assert error.found == name
    assert all(other in str(error.remedy) for other in have)


def test_kernel_that_nobody_knows_is_refused_unless_it_is_here():
    """A backend class of the user's is accepted."""
    assert gates(contract(), around(forced="mine", kernels=ALL | {"mine"})) == []
    (error,) = errors(contract(), around(forced="qlor"))
    assert "the nearest is qlora" in str(error)


def test_proxy_needs_a_known_layout():
    """The proxy finds weights by name; the message lists the known families."""
    made = contract(targets=PROXY)
    assert gates(made, around(forced="proxy")) == []
    (error,) = errors(made, around("mamba", forced="proxy"))
    assert error.found == "model_type mamba"
    assert all(family in str(error.expected) for family in FAMILIES)


EDGE = [
    ({"seq_len": 513}, "data.seq_len", 513),
    ({"rank": 33}, "lora.r", 33),
    ({"batch_size": 2}, "data.micro_batch_size", 2),
    ({"require_full_proxy_stack": True}, "require_full_proxy_stack", True),
]


@pytest.mark.parametrize(("change", "where", "found"), EDGE)
def test_mobile_edge_has_limits(change, where, found):
    """Each limit applies to mobile_edge only; the limit itself is accepted."""
    (error,) = errors(contract(deployment="mobile_edge", **change), around(forced="qlora"))
    assert (error.where, error.found) == (where, found)
    assert errors(contract(**change), around(forced="qlora")) == []
    at_most = contract(deployment="mobile_edge", seq_len=512, rank=32, batch_size=1)
    assert errors(at_most, around(forced="qlora")) == []


@pytest.mark.parametrize("device", ["gpu", "auto"])
def test_mobile_edge_is_trained_on_cpu(device):
    """trainer=auto might use a GPU."""
    (error,) = errors(contract(deployment="mobile_edge"), around(device=device))
    assert (error.where, error.expected) == ("trainer", "cpu")


def test_mobile_edge_says_what_is_left_to_the_operator():
    """The plan has a note about it; there is none for a workstation."""
    on_edge, not_on_edge = (
        execution_plan(contract(deployment=name), around())
        for name in ("mobile_edge", "workstation")
    )
    assert "LiteRT" in on_edge.notes[0]
    assert not_on_edge.notes == ()


FLAGS = [
    ({"max_skip_rate": 1.5}, "max_skip_rate"),
    ({"max_skip_rate": -0.1}, "max_skip_rate"),
    ({"require_full_proxy_stack": True, "lm_head_only": True}, "require_full_proxy_stack"),
    ({"lm_head_only": True, "proxy_max_layers": 2}, "lm_head_only"),
    ({"ce_last_k": 65}, "ce_last_k"),
    ({"ce_last_k": 0}, "ce_last_k"),
    ({"ce_last_k": 33, "seq_len": 32}, "ce_last_k"),
]


@pytest.mark.parametrize(("run", "where"), FLAGS)
def test_contradictory_flags_are_refused(run, where):
    """Each combination has its own message."""
    found = list(refusals(contract(**run), around(forced="qlora")))
    assert [(gate, error.where) for gate, error in found] == [(Gate.FLAGS, where)]


@pytest.mark.parametrize(
    "run",
    [
        {"max_skip_rate": 0.0},
        {"max_skip_rate": 1.0},
        {"lm_head_only": True, "proxy_max_layers": 0},
        {"ce_last_k": 64},
        {"ce_last_k": 32, "seq_len": 32},
        {"require_full_proxy_stack": True, "proxy_max_layers": 2},
    ],
)
def test_flags_at_their_limits_are_accepted(run):
    """An accepted value for each refusal."""
    assert gates(contract(**run), around(forced="qlora")) == []


def test_all_refusals_come_in_the_order_of_the_gates():
    """A refusal does not hide later ones."""
    made = contract("lora", "nf4", "hf", "mobile_edge", rank=64, ce_last_k=100)
    meets = around(None, forced="burn", kernels=ALL - {"burn"}, device="gpu")
    assert gates(made, meets) == [
        Gate.QUANTIZED_BASE,
        Gate.WARM_START,
        Gate.KERNEL,
        Gate.DEPLOYMENT,
        Gate.DEPLOYMENT,
        Gate.FLAGS,
    ]


def test_every_message_says_what_to_do_next():
    """The parts are what is wrong, what was found, what is expected, and what to do next."""
    made = [
        contract("lora", "nf4", "vox"),
        contract("qlora", "none", "vox", "mobile_edge", rank=64, ce_last_k=0, max_skip_rate=2.0),
        contract(require_full_proxy_stack=True, lm_head_only=True),
    ]
    meets = [
        around(None, forced="burn", kernels=frozenset({"qlora"})),
        around(forced="lora", device="gpu"),
        around(),
    ]
    for error in itertools.chain(*map(errors, made, meets)):
        parts = (error.where, error.found, error.expected, error.remedy)
        assert None not in parts, str(error)
        assert "Next: " in str(error)


def keys(layers, prefix="model.layers", path="self_attn.o_proj"):
    return frozenset(f"{prefix}.{n}.{path}.weight" for n in range(layers))


@pytest.mark.parametrize(
    ("run", "model_type", "found", "expected"),
    [
        ({}, "llama", keys(3), Coverage(eligible=True, complete=True, matched=3, expected=3)),
        ({}, "llama", keys(2), Coverage(eligible=True, complete=False, matched=2, expected=3)),
        (
            {"proxy_max_layers": 2},
            "llama",
            keys(2),
            Coverage(eligible=True, complete=True, matched=2, expected=2),
        ),
        (
            {"lm_head_only": True},
            "llama",
            keys(3),
            Coverage(eligible=True, complete=True, matched=0, expected=0),
        ),
        (
            {},
            "gpt2",
            keys(3, "h", "attn.c_proj"),
            Coverage(eligible=True, complete=True, matched=3, expected=3),
        ),
        (
            {},
            "gpt2",
            keys(3, "transformer.h", "attn.c_proj"),
            Coverage(eligible=True, complete=True, matched=3, expected=3),
        ),
        ({}, "mamba", keys(3), Coverage(eligible=False)),
    ],
)
def test_coverage_of_the_proxy_stack(run, model_type, found, expected):
    """Middle projections found of those expected; 0 of 0 is complete."""
    made = contract(targets=PROXY, **run)
    assert coverage(made, around(model_type, keys=found, layers=3)) == expected


def test_another_graph_has_no_coverage():
    """Every field is null, and the graph has another id."""
    made = contract()
    assert coverage(made, around(keys=keys(3), layers=3)) == Coverage()
    assert execution_plan(made, around()).graph_id == "full_causal"


def test_incomplete_stack_trains_the_head_alone_unless_strict():
    """Never a partial stack; strict mode lists at most 32 missing names."""
    loose, strict = contract(targets=PROXY), contract(targets=PROXY, require_full_proxy_stack=True)
    meets = around(keys=keys(10), layers=50, forced="proxy")
    assert gates(loose, meets) == []
    assert execution_plan(loose, meets).graph_id == "lm_head_only"
    complete = dataclasses.replace(meets, layers=10)
    assert execution_plan(loose, complete).graph_id == "proxy_stack_v1_residual"
    assert gates(strict, complete) == []
    (error,) = errors(strict, meets)
    assert str(error.found).startswith("40 of 50: model.layers.10.self_attn.o_proj.weight")
    assert str(error.found).count("o_proj") == 32
    assert "and 8 more" in str(error.found)


def test_graph_of_the_proxy_is_named_by_its_composition():
    """As in the run; without headers, all projections are assumed."""
    made = dataclasses.replace(
        contract(targets=PROXY), settings={"backend.composition": "sequential"}
    )
    meets = around(keys=keys(3), layers=3, forced="proxy")
    assert execution_plan(made, meets).graph_id == "proxy_stack_v1_sequential"
    unread = dataclasses.replace(meets, keys=None)
    assert execution_plan(made, unread).graph_id == "proxy_stack_v1_sequential"
    assert coverage(made, unread) == Coverage(eligible=True, expected=3)


def test_unknown_family_is_planned_with_a_note_of_what_refuses_it():
    """The note lists the known types; a known family has no note."""
    (note,) = execution_plan(contract(), around("mamba", forced="qlora")).notes
    assert note.startswith("model_type mamba is none of the verified layouts (gemma2, ")
    assert all(family in note for family in FAMILIES)
    assert note.endswith(
        "refuses it: backend=proxy, backend=burn with tokenizer=hf, task=merge merge.mode=subset, "
        "task=export export.format=gguf"
    )
    assert execution_plan(contract(), around("llama", forced="qlora")).notes == ()
    # A model that nobody has read is not called unknown.
    assert execution_plan(contract(), around(None, forced="qlora")).notes == ()


@pytest.mark.parametrize(
    ("asked", "backend"),
    [(("qlora", "nf4"), "proxy"), (("lora", "none"), "burn")],
)
def test_what_the_note_names_refuses_an_unknown_family(asked, backend):
    """Each gives one message with the known types."""
    made = contract(*asked, targets=BACKEND_SPECS[backend].targets)
    (error,) = errors(made, around("mamba", forced=backend))
    assert f"backend={backend} reads weights by name" in str(error)
    assert all(family in str(error.expected) for family in FAMILIES)
