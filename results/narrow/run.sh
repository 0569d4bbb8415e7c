#!/usr/bin/env bash
# Tune and train the narrow ladders; run it again and it goes on where it stopped.
#
#   bash results/narrow/run.sh DATA WORK [STEP…]
#
# DATA is made as README.md says; runs and studies are written to WORK. Without steps all are made, in this order, in
# which each answers most for its time: what the ladders rest on, the ladders, what is designed, what repeats data.
# OPTIONS="--dry-run --gpu h200" shows what they cost.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
data=$1 # "" for a dry run before there are any
work=$2
shift 2
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
fixed=vanilla,deep-vanilla,operator-1,loop-2,untied-2
eight=$fixed,deep-vanilla-grow,loop-grow,untied-grow
axes=untied-2+passes=2-4-6@0.5-0.75,vanilla+blocks=1-all@0.3,vanilla+context=0.25-1@0.5,vanilla+experts=1-8@0.5
width=vanilla+width=0.5-1@0.4 # even depths: half the width needs an even number of heads
study() { # name, then the words of `steepen study`
    name=$1
    shift
    # shellcheck disable=SC2086
    steepen study "$@" --name "$name" --preset mini ${data:+--data "$data"} --runs "$work/runs" --studies "$work/studies" ${OPTIONS:-}
}
step() {
    case $1 in
    rates) study rates replication:rates --arms "$fixed" --rungs 4,6 ;;
    chain) # two arms have only the sweeps that changed most for the others
        for arm in vanilla operator-1 untied-2; do
            study "chain-tuning-mini-$arm" chain-tuning --from-recipe --arms "$arm"
        done
        for arm in deep-vanilla loop-2; do
            study "chain-tuning-mini-$arm" chain-tuning --from-recipe --arms "$arm" --part embedding_lr_multiplier \
                --part head_lr_multiplier --part output_multiplier --part init_scale
        done
        ;;
    storage) study authors-storage replication:authors_storage --arms vanilla,operator-1 --rungs 5,6 --seeds 0-3 ;;
    ladder) study ladder ladder --arms "$eight" --rungs 4-8 --seeds 0 ;;
    seeds)
        study ladder-seeds replication:noise --arms "$eight" --rungs 4-7 --seeds 1
        study ladder-seeds-top replication:noise --arms "$eight" --rungs 8 --seeds 1
        ;;
    top) study ladder-top replication:noise --arms "$eight" --rungs 9,10 --seeds 0,1 ;;
    recheck-vanilla) study recheck-vanilla replication:recheck --arms vanilla --rungs 4-8 --wide ;;
    recheck) study recheck replication:recheck --arms "$fixed" --rungs 4,6,8 ;; # do the rates hold?
    forecast) study extrapolate extrapolate ;;
    transfer) study transfer transfer ;;
    ablations) study ablations ablations --rungs 4-7 --seeds 0 ;;
    design) for one in allocation growth-target growth-fraction growth-timing tpp passes; do
        study "$one" "$one"
    done ;;
    axes) # growth along other axes
        study growth-axes replication:noise --arms "$axes" --rungs 4-8 --seeds 0
        study growth-axes-width replication:noise --arms "$width" --rungs 4,6,8,10 --seeds 0
        study growth-axes-seeds replication:noise --arms "$axes" --rungs 4-7 --seeds 1
        study growth-axes-width-seeds replication:noise --arms "$width" --rungs 4,6 --seeds 1
        ;;
    depth) # KL effective depth of the ladder's two highest rungs
        for run in $(steepen runs --runs "$work/runs" --where 'depth > 6' --where status=finished --json |
            python3 -c 'import json, sys; print(*(row["run"] for row in json.load(sys.stdin)["runs"]))'); do
            steepen eval "$work/runs/$run" --data "$data" --kl-depth
        done
        ;;
    data) study data-constrained data-constrained ;;
    *) echo "run.sh: no step $1" >&2 && exit 2 ;;
    esac
}
for one in "${@:-}"; do
    if [ -n "$one" ]; then
        step "$one"
    else
        for each in ladder seeds depth recheck top forecast transfer ablations design axes data; do
            step "$each"
        done
    fi
done
