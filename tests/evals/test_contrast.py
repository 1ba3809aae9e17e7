"""The guard against confounded contrasts, tested on contracts of real configurations."""

from __future__ import annotations

import copy
from enum import Enum

import pytest

from mens_exp.evals.contrast import Guard, applied, guard, implied_by, without_seed
from mens_exp.planning.contract import contract_of, recorded_digest
from mens_exp.planning.learned_settings import learned_settings

INPUTS = {"base_weights_sha256": "b", "data.rows_sha256": "r", "data.train_sha256": "t"}
MACHINE = {"commit": "c", "packages": {"torch": "2.6"}, "cpu": {"model": "x"}}


def side(config, **inputs):
    return {
        "contract": contract_of(config).record(),
        "inputs": {**INPUTS, **inputs},
        "provenance": MACHINE,
    }


def held(config, arm, reference, *factors):
    return guard(side(config(*arm)), side(config(*reference)), factors)


def backends(config, arm, reference):
    implied = implied_by(
        lambda name: learned_settings(config(f"backend={name}")),
        arm[0].removeprefix("backend="),
        reference[0].removeprefix("backend="),
    )
    return guard(side(config(*arm)), side(config(*reference)), ["backend"], implied)


@pytest.mark.parametrize(
    ("factor", "one", "other"),
    [
        ("quant.double_quant", "true", "false"),
        ("optim.lr", "1e-4", "3e-4"),
        ("lora.targets", "[q_proj]", "[v_proj]"),
        ("lora.r", "4", "32"),
        ("trainer.max_steps", "5", "50"),
    ],
)
def test_a_declared_factor_and_the_seed_may_differ(tiny_config, factor, one, other):
    """A contrast that changes only its factor and the seed is not confounded."""
    found = held(tiny_config, [f"{factor}={one}", "seed=1"], [f"{factor}={other}"], factor)
    assert found == Guard(confounded_by=(), environment=(), moved_inputs=())


def test_an_undeclared_difference_is_named(tiny_config):
    """A change of the rank beside the declared factor is reported."""
    arm = ["quant.double_quant=false", "lora.r=8"]
    found = held(tiny_config, arm, [], "quant.double_quant")
    assert found.confounded_by == ("lora.r",)


def test_a_group_is_a_factor_of_all_its_settings(tiny_config):
    """The factor `lora` covers every setting of the group, here rank and targets."""
    arm = ["lora=attention", "lora.r=8"]
    assert not held(tiny_config, arm, [], "lora").confounded_by
    assert held(tiny_config, arm, [], "lora.targets").confounded_by == ("lora.r",)


def test_a_factor_s_name_is_whole(tiny_config):
    """A factor matches a whole name: `lora.r` is not `lora.rank_pattern`, and `lor` is no group."""
    assert held(tiny_config, ["lora.r=8"], [], "lor").confounded_by == ("lora.r",)


def test_what_a_backend_implies_is_part_of_that_factor(tiny_config):
    """Burn implies another quantizer, other targets and another tokenizer."""
    found = backends(tiny_config, ["backend=burn"], ["backend=qlora"])
    assert found.confounded_by == ()
    turned = backends(tiny_config, ["backend=qlora"], ["backend=burn"])
    assert turned.confounded_by == ()


def test_what_both_arms_share_sets_them_not_apart(tiny_config):
    """An implied setting that both arms share, here the tokenizer, does not confound."""
    burn, qlora = ["backend=burn", "tokenizer=hf"], ["backend=qlora"]
    assert backends(tiny_config, burn, qlora).confounded_by == ()
    assert backends(tiny_config, qlora, burn).confounded_by == ()


def test_a_shared_tokenizer_has_one_content(tiny_config):
    """The factor backend explains another tokenizer digest only if tokenizer.name differs."""
    implied = implied_by(
        lambda name: learned_settings(tiny_config(f"backend={name}")), "burn", "qlora"
    )
    reference = side(tiny_config(), tokenizer_sha256="one")
    for tokenizer, causes in (("vox", ()), ("hf", ("another content of tokenizer_sha256",))):
        arm = side(
            tiny_config("backend=burn", f"tokenizer={tokenizer}"), tokenizer_sha256="another"
        )
        assert guard(arm, reference, ["backend"], implied).confounded_by == causes


def test_what_a_backend_does_not_imply_still_confounds(tiny_config):
    """A learning rate or targets set by hand confound, even where burn sets the targets itself."""
    arm = ["backend=burn", "optim.lr=1e-3"]
    assert backends(tiny_config, arm, ["backend=qlora"]).confounded_by == ("optim.lr",)
    arm = ["backend=burn", "lora.targets=[q_proj]"]
    assert backends(tiny_config, arm, ["backend=qlora"]).confounded_by == ("lora.targets",)


def test_without_the_backend_as_factor_its_implications_confound(tiny_config):
    """With double quantization as the factor, the other settings of burn confound."""
    found = held(tiny_config, ["backend=burn"], [], "quant.double_quant")
    assert {"backend.name", "quant.quant_type", "tokenizer.name"} <= set(found.confounded_by)


def test_other_rows_confound_whatever_the_contract_says(tiny_config):
    """Equal settings with other row contents are confounded."""
    config = tiny_config()
    arm = side(config, **{"data.rows_sha256": "others"})
    found = guard(arm, side(config), ["optim.lr"])
    assert found.confounded_by == ("another content of data.rows_sha256",)


def test_a_base_of_another_configuration_confounds_where_both_recorded_it(tiny_config):
    """Digests of config.json are compared only if both records have one (old ones have not)."""
    one, other = ({"base_config_sha256": text} for text in ("one", "other"))
    arm, reference = side(tiny_config(), **one), side(tiny_config(), **other)
    named = ("another content of base_config_sha256",)
    assert guard(arm, reference, ["optim.lr"]).confounded_by == named
    assert guard(arm, side(tiny_config()), ["optim.lr"]).confounded_by == ()


def test_an_objective_brings_its_teacher(tiny_config):
    """The factor objective covers the teacher; with any other factor, another teacher confounds."""
    arm = side(tiny_config("objective=distillation"), **{"teacher.weights_sha256": "one"})
    found = guard(arm, side(tiny_config()), ["objective"])
    assert (found.confounded_by, found.moved_inputs) == ((), ("teacher.weights_sha256",))
    other = side(tiny_config("objective=distillation"), **{"teacher.weights_sha256": "other"})
    named = ("another content of teacher.weights_sha256",)
    assert guard(arm, other, ["optim.lr"]).confounded_by == named
    assert guard(arm, other, ["objective.teacher"]).confounded_by == ()


def test_a_length_moves_documents_but_never_rows(tiny_config):
    """data.seq_len may change how documents are cut, but not the digest of the rows."""
    arm = side(tiny_config("data.seq_len=64"), **{"data.train_sha256": "cut"})
    reference = side(tiny_config("data.seq_len=32"))
    found = guard(arm, reference, ["data.seq_len"])
    assert (found.confounded_by, found.moved_inputs) == ((), ("data.train_sha256",))
    arm["inputs"]["data.rows_sha256"] = "others"
    assert guard(arm, reference, ["data.seq_len"]).confounded_by


def test_another_machine_is_labelled_and_refuses_nothing(tiny_config):
    """Other versions and processors are listed by name but do not confound."""
    arm = side(tiny_config())
    arm["provenance"] = {"commit": "d", "packages": {"torch": "2.7"}, "cpu": {"model": "y"}}
    found = guard(arm, side(tiny_config()), ["optim.lr"])
    assert found.confounded_by == ()
    assert found.environment == ("commit", "torch 2.7 and 2.6", "cpu")


def test_steps_in_other_forms_are_labelled_and_refuse_nothing(tiny_config):
    """Other forms of the steps are listed by name; records of earlier releases have none."""
    forms = {"attention": "by document 1", "dropout": "SFC64, 15 bits"}
    arm = side(tiny_config()) | {"numerics": forms}
    reference = side(tiny_config()) | {"numerics": forms | {"attention": "blocks of queries 1"}}
    assert guard(arm, reference, ["optim.lr"]).environment == ("numerics of attention",)
    assert guard(arm, arm, ["optim.lr"]).environment == ()
    earlier = side(tiny_config()) | {"numerics": None}
    found = guard(arm, earlier, ["optim.lr"])
    assert found.environment == ("numerics of attention", "numerics of dropout")
    assert found.confounded_by == ()


def test_an_edited_part_confounds_though_no_setting_differs(tiny_config):
    """Editing a part of the recorded contract confounds even if all settings agree."""
    arm = side(tiny_config())
    arm["contract"]["adapter"]["method"] = "another"
    found = guard(arm, side(tiny_config()), ["optim.lr"])
    assert found.confounded_by == ("a part of the contract that no setting explains",)


def other(value):
    """Return a different value of the same type."""
    if isinstance(value, Enum):
        return next(one for one in type(value) if one is not value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, "another"]
    if isinstance(value, dict):
        return {**value, "q_proj": 3}
    return f"{value}_another"


LEAVES = (
    "model.hidden_size model.init_seed data.seq_len data.micro_batch_size data.packing "
    "data.val_frac data.source tokenizer.name tokenizer.chat_template quant.quant_type "
    "quant.double_quant quant.compute_dtype lora.targets lora.r lora.alpha lora.dropout "
    "lora.rank_pattern lora.variant objective.name backend.name optim.lr optim.betas "
    "schedule.kind schedule.warmup_steps schedule.warmup_frac trainer.max_steps "
    "trainer.max_epochs trainer.accumulate_grad_batches trainer.gradient_clip_val"
)


@pytest.mark.parametrize("path", LEAVES.split())
def test_any_setting_put_into_the_other_s_record_gives_its_digest(tiny_config, path):
    """The other record with this one setting replaced has the digest of this record."""
    reference, arm = tiny_config(), tiny_config()
    *groups, name = path.split(".")
    parent = arm
    for group in groups:
        parent = getattr(parent, group)
    setattr(parent, name, other(getattr(parent, name)))
    theirs, mine = contract_of(reference).record(), contract_of(arm).record()
    assert recorded_digest(mine) != recorded_digest(theirs)
    assert recorded_digest(applied(mine, theirs, [path])) == recorded_digest(mine)


def test_records_are_left_as_they_were(tiny_config):
    """The guard does not modify the records it is given."""
    mine, theirs = (contract_of(tiny_config(f"lora.r={r}")).record() for r in (4, 8))
    before = copy.deepcopy((mine, theirs))
    applied(without_seed(mine), without_seed(theirs), ["lora.r"])
    assert (mine, theirs) == before
