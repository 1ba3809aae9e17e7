from __future__ import annotations

import pytest

from mens_exp.config.overrides import check
from mens_exp.layout.targets import chosen, skipped
from mens_exp.planning.preflight import preflight
from mens_exp.tasks.attribute import suggested


def module(path, kl, *, parameters=100, width=20):
    """A module of 4 bits a parameter; its kind is its last name."""
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
        # Leaving out costs 12 bits for 100 parameters, 0.857 for 1,400; for 600, 5.143.
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
    """In the order of KL per extra bit, as long as the budget lasts."""
    assert suggest(extra_bits=extra_bits)["skip"] == [f"model.layers.{name}" for name in taken]


def test_cost_of_skip_is_in_bits_a_parameter():
    """4 bits, and one module in 14 of the parameters at 16 instead: 4 + 12/14."""
    made = suggest(extra_bits=0.86)
    assert made["bits_per_parameter"] == 4
    assert made["bits_per_parameter_after"] == pytest.approx(4 + 12 / 14)
    assert made["skip_share"] == pytest.approx(0.2)


def test_what_is_skipped_already_stays_skipped():
    """The override replaces the whole list."""
    made = suggest(extra_bits=0.86, already=["o_proj"])
    assert made["overrides"][0] == "quant.skip=[o_proj,model.layers.1.self_attn.q_proj]"


def test_without_a_module_that_fits_no_skip_is_suggested():
    """Only targets are left."""
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
    """In the order of KL per adapter parameter, until there is enough."""
    made = suggest(targets_share=share)
    assert made["targets"] == targets
    assert made["targets_share"] == pytest.approx(covered)
    assert made["targets_cost"] == pytest.approx(cost)


def test_rule_states_both_settings():
    """Whoever reads the override reads what chose it."""
    rule = suggest(extra_bits=0.25, targets_share=0.8)["rule"]
    assert "0.25 extra bits" in rule
    assert "80%" in rule


def test_modules_without_any_kl_are_not_left_out():
    """Bits spent on what costs nothing are wasted; one kind is adapted all the same."""
    silent = [{**one, "kl": 0.0, "share": 0.0} for one in MODULES]
    made = suggested(
        silent,  # a spread TypedDict is a dict to mypy
        variant="nf4",
        already=[],
        kept_bits=16,
        extra_bits=12,
        targets_share=0.8,
    )
    assert made["skip"] == []
    assert len(made["targets"]) >= 1


def test_overrides_compose_and_plan():
    """Our own parser takes them, and they name the modules that were meant."""
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
