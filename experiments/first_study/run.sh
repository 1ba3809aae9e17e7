#!/bin/sh
# Run both cycles, compare their arms, and ask for the promotion. Usage, from the repository's root:
#
#     sh experiments/first_study/run.sh [directory] [jobs at a time]
#
# Started again, it goes on where it was stopped. Exit code: that of the promotion (4: not promoted).
set -eu
here=$(dirname "$0")
out=${1:-outputs/first_study}
jobs=${2:-2}
python=${PYTHON:-python}

mens() { "$python" -m mens_exp "$@"; }

suite="suite=humaneval suite.path=$out/data/suite.jsonl suite.items=24 suite.max_new_tokens=48 suite.batch_size=16"
common="$suite data=jsonl data.path=$out/data/train.jsonl data.micro_batch_size=2 data.val_max_tokens=2000
    trainer=cpu trainer.max_steps=12 trainer.accumulate_grad_batches=1 logger=none hydra.launcher.threads=1"

# What each arm is. The learning rates were chosen on seed 0, which is of no cycle.
qlora="backend=qlora optim.lr=2e-3"
single_quant="backend=qlora quant.double_quant=false optim.lr=2e-3"
burn="backend=burn tokenizer=hf optim.lr=2e-3"
full="backend=full optim.lr=1e-4"

sweep() { # <cycle> <arm> <seeds> <overrides>
    where=$out/$1/$2
    if [ -e "$where/sweep.json" ]; then
        mens "sweep.resume=$where" "hydra.launcher.n_jobs=$jobs"
    else
        # shellcheck disable=SC2086  # words
        mens -m "seed=$3" $4 $common "hydra.launcher.n_jobs=$jobs" "hydra.sweep.dir=$where"
    fi
    rm -rf "$where"/*/checkpoints # 1.5 GB for each run of the full arm
}

compare() { # <name> <factors> <primary> <reference> <paths>
    [ -e "$out/$1/compare.json" ] && return
    rm -rf "${out:?}/$1"
    mens task=compare "path='$5'" "compare.factors=[$2]" "compare.primary=$3" "compare.reference='$4'" \
        logger=none "hydra.run.dir=$out/$1"
}

[ -e "$out/data/suite.jsonl" ] || "$python" "$here/tasks.py" "$out/data"

# The suite's digest is a scorecard's; an evaluation of the base tells it, before any of a cycle.
if [ ! -e "$out/suite/scorecard.json" ]; then
    rm -rf "$out/suite"
    # shellcheck disable=SC2086
    mens task=evaluate path=base trainer.accelerator=cpu $suite "hydra.run.dir=$out/suite"
fi
digest=$("$python" -c "import json, sys; print(json.load(open(sys.argv[1]))['suite_digest'])" \
    "$out/suite/scorecard.json")

for cycle in cycle1 cycle2; do
    [ $cycle = cycle1 ] && seeds=1,2,3,4,5,6 || seeds=7,8,9,10,11,12
    if ! grep -q "\"$cycle\"" "$out/decisions.jsonl" 2>/dev/null; then
        rm -rf "$out/open_$cycle"
        mens task=promote "promote.open_cycle=$cycle" "ledger=$out/decisions.jsonl" "promote.suite_digest=$digest" \
            "promote.seeds=[$seeds]" "promote.arms=[burn,qlora]" promote.factor=backend \
            "hydra.run.dir=$out/open_$cycle"
    fi
    sweep $cycle qlora $seeds "$qlora"
    sweep $cycle burn $seeds "$burn"
    sweep $cycle single_quant $seeds "$single_quant"
    sweep $cycle full $seeds "$full"
    compare $cycle/burn_against_qlora backend task_success qlora "$out/$cycle/qlora,$out/$cycle/burn"
done

for arm in qlora single_quant full burn; do
    eval "$arm=$out/cycle1/$arm,$out/cycle2/$arm"
done
compare double_quant quant.double_quant val_loss true "$qlora,$single_quant"
compare full backend,optim.lr task_success "backend=qlora, optim.lr=0.002" "$qlora,$full"
compare burn backend task_success qlora "$qlora,$burn"

# A challenger's adapter needs its certificate.
first=$(ls -d "$out"/cycle1/burn/0_*)
if [ ! -e "$out/certificate/parity.json" ]; then
    rm -rf "$out/certificate"
    mens task=merge "path=$first" "out=$out/certificate" "hydra.run.dir=$out/merge"
fi

mens task=promote policy=burn_production "ledger=$out/decisions.jsonl" \
    "path='$out/cycle1/burn_against_qlora/compare.json,$out/cycle2/burn_against_qlora/compare.json'" \
    "promote.parity=$out/certificate/parity.json"
