from __future__ import annotations

import pytest

from mens_exp.config.option_files import group_options
from mens_exp.config.overrides import check
from mens_exp.config.root import RunConfig
from mens_exp.config.suggestions import ALIASES, alias_of


def said(override):
    (problem,) = check([override]).problems
    return str(problem)


def test_every_name_of_ours_exists(option, nodes):
    """Each name in the aliases is a group, or a key of some option."""
    known = {*group_options(), *RunConfig.__dataclass_fields__, "hydra.run.dir"}
    for group, options in group_options().items():
        for name in options:
            node = nodes[group, name]
            known |= {f"{group}.{key}" for key in node}
            if group == "callbacks":
                known |= {f"callbacks.{one}.{key}" for one, entry in node.items() for key in entry}
    known |= {
        f"{section}.{key}"
        for section in ("adapter", "checkpoint")
        for key in option("seed=1").values[section]
    }
    assert {peer.ours for peer in ALIASES.values() if peer.ours} <= known


def test_no_name_of_theirs_is_one_of_ours():
    """mens_exp reads its own names first, so such an alias would never be used."""
    assert ALIASES.keys().isdisjoint({*group_options(), *RunConfig.__dataclass_fields__})


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "learning_rate=1e-4",
            ["optim.lr, as it is called here", "write optim.lr=1e-4", "Axolotl"],
        ),
        ("+num_train_epochs=3", ["write trainer.max_epochs=3", "Transformers"]),
        ("cutoff_len=512", ["write data.seq_len=512", "a name used in LLaMA-Factory"]),
        ("lora_rank=8", ["write lora.r=8"]),
        ("lora.rank=8", ["the nearest is lora.r ", "write lora.r=8"]),
        ("load_in_4bit=true", ["the group backend", "write backend=qlora"]),
        ("load_in_8bit=true", ["the group quant", "write quant=int8"]),
        ("optim.learning_rate=1", ["optim.learning_rate", "write optim.lr=1"]),
        ("neftune_noise_alpha=5", ["TRL", "write objective.neftune_alpha=5"]),
        ("use_liger_kernel=true", ["write model.kernels=liger", "TRL"]),
        ("deepspeed=true", ["not offered here"]),
    ],
)
def test_a_peers_name_is_told_with_ours(override, parts):
    """The message gives the setting of mens_exp to write."""
    assert all(part in said(override) for part in parts)


@pytest.mark.parametrize("key", ["data.config", "data.name"])
def test_the_configuration_of_a_dataset_is_a_subset_here(key):
    """`load_dataset(path, name)` calls it a name, and a dataset card config_name."""
    (problem,) = check(["data=hub", "data.id=a/b", f"{key}=en"]).problems
    assert "Next: write data.subset=en" in str(problem)


def test_a_name_of_nobody_is_a_typing_slip():
    """The nearest key of mens_exp is suggested, and no other tool is mentioned."""
    assert alias_of("learning_rat") is None
    assert "call" not in said("trainer.max_stpes=4").partition("expected")[0]
