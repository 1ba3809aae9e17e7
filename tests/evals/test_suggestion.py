from __future__ import annotations

import itertools
import random

import pytest

from mens_exp.config.overrides import check
from mens_exp.config.quant import QuantConfig, QuantType
from mens_exp.evals.attribution import cheapest, patterns
from mens_exp.layout.families import FAMILIES
from mens_exp.layout.modules import linear_modules
from mens_exp.layout.shape import Shape
from mens_exp.layout.targets import chosen, quantized_modules, skipped
from mens_exp.planning.preflight import preflight
from mens_exp.tasks.attribute import suggested


def module(path, kl, *, parameters=100, width=20):
    """Return a module of 4 bits per parameter, whose kind is its last name."""
    layer = int(path.split(".")[2])
    kind = path.rpartition(".")[2]
    return {
        "path": path,
        "logical": f"l{layer}.{kind}",
        "kind": kind,
        "layer": layer,
        "parameters": parameters,
        "adapter_width": width,
        "variants": {"nf4": {"sqnr_db": 20.0, "activation_error": 0.01, "bits_per_parameter": 4.0}},
        "loss_change": 0.0,
        "loss_change_se": 0.0,
        "kl": kl,
        "share": kl,
        "rank": 1,
    }


MODULES = [
    module("model.layers.0.self_attn.q_proj", 0.10),
    module("model.layers.0.mlp.up_proj", 0.30, parameters=600, width=70),
    module("model.layers.1.self_attn.q_proj", 0.20),
    module("model.layers.1.mlp.up_proj", 0.40, parameters=600, width=70),
]  # 1,400 parameters; the shares sum to 1


def suggest(**changes):
    usual = {
        "variant": "nf4",
        "already": [],
        "kept_bits": 16,
        "extra_bits": 0.0,
        "targets_share": 0.5,
    }
    return suggested(MODULES, **(usual | changes))


@pytest.mark.parametrize(
    ("extra_bits", "taken"),
    [
        # Skipping costs 12 bits for 100 parameters, 0.857 for 1,400, and 5.143 for 600.
        (0.0, []),
        (0.85, []),
        (0.86, ["1.self_attn.q_proj"]),
        (1.72, ["1.self_attn.q_proj", "0.self_attn.q_proj"]),
        (5.20, ["1.self_attn.q_proj", "0.self_attn.q_proj"]),
        (6.86, ["1.self_attn.q_proj", "0.self_attn.q_proj", "1.mlp.up_proj"]),
        (
            12.0,
            [
                f"{p}"
                for p in (
                    "1.self_attn.q_proj",
                    "0.self_attn.q_proj",
                    "1.mlp.up_proj",
                    "0.mlp.up_proj",
                )
            ],
        ),
    ],
)
def test_skip_takes_most_kl_for_its_bits(extra_bits, taken):
    """Modules are skipped in the order of KL per extra bit until the budget is spent."""
    assert suggest(extra_bits=extra_bits)["skip"] == [f"model.layers.{name}" for name in taken]


def test_cost_of_skip_is_in_bits_a_parameter():
    """By hand: one of 14 parameters at 16 bits instead of 4 costs 4 + 12/14."""
    made = suggest(extra_bits=0.86)
    assert made["bits_per_parameter"] == 4
    assert made["bits_per_parameter_after"] == pytest.approx(4 + 12 / 14)
    assert made["skip_share"] == pytest.approx(0.2)


def test_what_is_skipped_already_stays_skipped():
    """The override includes modules that are already skipped, as it replaces the list."""
    made = suggest(extra_bits=0.86, already=["o_proj"])
    assert made["overrides"][0] == "quant.skip=[o_proj,model.layers.1.self_attn.q_proj]"


def test_without_a_module_that_fits_no_skip_is_suggested():
    """The overrides then contain only the targets."""
    assert [text.partition("=")[0] for text in suggest()["overrides"]] == ["lora.targets"]


@pytest.mark.parametrize(
    ("share", "targets", "covered", "cost"),
    [
        # KL per adapter parameter: q 0.3 / 40, up 0.7 / 140.
        (0.3, ["self_attn.q_proj"], 0.3, 40 / 180),
        (0.31, ["self_attn.q_proj", "mlp.up_proj"], 1.0, 1.0),
    ],
)
def test_targets_are_kinds_that_cover_the_share(share, targets, covered, cost):
    """Kinds are added in the order of KL per adapter parameter until the share is covered."""
    made = suggest(targets_share=share)
    assert made["targets"] == targets
    assert made["targets_share"] == pytest.approx(covered)
    assert made["targets_cost"] == pytest.approx(cost)


def test_rule_states_both_settings():
    """The rule, shown beside the overrides, states the budget and the share."""
    rule = suggest(extra_bits=0.25, targets_share=0.8)["rule"]
    assert "0.25 extra bits" in rule
    assert "80%" in rule


def test_modules_without_any_kl_are_not_left_out():
    """If no module has any KL, nothing is skipped, and at least one kind is targeted."""
    silent = [{**one, "kl": 0.0, "share": 0.0} for one in MODULES]
    made = suggested(
        silent,  # mypy treats a spread TypedDict as a dict
        variant="nf4",
        already=[],
        kept_bits=16,
        extra_bits=12,
        targets_share=0.8,
    )
    assert made["skip"] == []
    assert len(made["targets"]) >= 1


def test_overrides_compose_and_plan():
    """Our own parser accepts the overrides, and they select the intended modules."""
    from mens_exp.layout.shape import shape_of

    made = suggest(extra_bits=1.72, targets_share=0.3)
    checked = check(
        ["model=tiny_llama", "trainer=cpu", "logger=none", "task=plan", *made["overrides"]]
    )
    assert checked.problems == ()
    config = checked.cells[0].config
    assert preflight(config) == []
    shape = shape_of(config.model)
    assert [one.path for one in skipped(config.quant.skip, shape)] == sorted(made["skip"])
    assert {one.kind for one in chosen(config.lora, shape)} == {"q"}


NAMES = ("nf2", "nf4", "nf8")


def measured(generator, count=6):
    """Return modules of random sizes whose KL mostly falls with the bits."""
    found = []
    for n in range(count):
        variants = {
            name: {"bits_per_parameter": bits, "kl": generator.lognormvariate(-bits, 1.5)}
            for name, bits in zip(NAMES, (2.5, 4.127, 8.5), strict=True)
        }
        found.append(
            {"path": f"m{n}", "parameters": generator.choice([64, 100, 640]), "variants": variants}
        )
    return found


def cost(modules, names, key):
    """Sum a metric over the modules' variants; average the bits over the parameters."""
    values = [one["variants"][name][key] for one, name in zip(modules, names, strict=True)]
    if key == "kl":
        return sum(values)
    weights = [one["parameters"] for one in modules]
    return sum(map(float.__mul__, values, map(float, weights))) / sum(weights)


@pytest.mark.parametrize("seed", range(20))
def test_the_mixture_is_the_best_of_all(seed):
    """The oracle tries all 3^6 mixtures at a budget between the extremes."""
    generator = random.Random(seed)
    modules, budget = measured(generator), generator.uniform(2.6, 8.4)
    every = itertools.product(NAMES, repeat=len(modules))
    fitting = [one for one in every if cost(modules, one, "bits_per_parameter") <= budget]
    least = min(cost(modules, one, "kl") for one in fitting)
    found = cheapest(modules, NAMES, budget)
    taken = [found[one["path"]] for one in modules]
    assert cost(modules, taken, "bits_per_parameter") <= budget + 1e-6
    assert cost(modules, taken, "kl") == pytest.approx(least, rel=2e-4)


def test_the_budget_of_the_fewest_bits_and_of_none():
    """The smallest budget leaves one choice; with the largest each module takes its best."""
    modules = measured(random.Random(0), count=40)
    assert set(cheapest(modules, NAMES, 2.5).values()) == {"nf2"}
    best = {
        one["path"]: min(NAMES, key=lambda name: one["variants"][name]["kl"]) for one in modules
    }
    assert cheapest(modules, NAMES, 32) == best


def test_modules_that_cost_nothing_have_a_mixture():
    """If every KL is zero, any choice within the budget will do."""
    modules = measured(random.Random(0))
    for one in modules:
        for variant in one["variants"].values():
            variant["kl"] = 0.0
    found = cheapest(modules, NAMES, 4.2)
    taken = [found[one["path"]] for one in modules]
    assert len(found) == len(modules)
    assert cost(modules, taken, "bits_per_parameter") <= 4.2 + 1e-6


@pytest.mark.parametrize("family", [*FAMILIES])
def test_a_pattern_gives_each_module_its_quantizer(family):
    """The loader reads the pattern back, for random mixtures and for uniform ones."""
    shape = Shape(
        family=FAMILIES[family],
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=100,
        max_position_embeddings=64,
        tied=False,
    )
    inside = [one for one in linear_modules(shape) if one.layer is not None and one.stack is None]
    modules = [{"path": one.path, "layer": one.layer} for one in inside]
    generator = random.Random(family)
    by_kind = {one.kind: generator.choice(NAMES) for one in inside}
    choices = [
        {
            one.path: generator.choice(NAMES) if generator.random() < share else by_kind[one.kind]
            for one in inside
        }
        for share in (0, 0.1, 0.9)
    ]
    for chosen_ in choices:
        pattern = patterns(modules, chosen_, "nf4")
        quant = QuantConfig(type_pattern={name: QuantType(one) for name, one in pattern.items()})
        read = {path: one.quant_type.value for path, one in quantized_modules(quant, shape).items()}
        assert read == chosen_
    assert len(patterns(modules, choices[0], "nf4")) <= len(by_kind)


def test_modules_of_the_usual_quantizer_need_no_pattern():
    """Only modules that differ from the configured quantizer are listed."""
    paths = [f"model.layers.{n}.mlp.up_proj" for n in range(12)]
    modules = [{"path": path, "layer": n} for n, path in enumerate(paths)]
    usual = dict.fromkeys(paths, "nf4")
    assert patterns(modules, usual, "nf4") == {}
    assert patterns(modules, usual | {paths[1]: "nf8"}, "nf4") == {"1.mlp.up_proj": "nf8"}
    assert patterns(modules, dict.fromkeys(paths, "nf2") | {paths[11]: "nf4"}, "nf4") == {
        "mlp.up_proj": "nf2",
        "11.mlp.up_proj": "nf4",
    }
