#!/usr/bin/env bash
# Tune and train the narrow ladders; run it again and it goes on where it stopped.
#
#   bash results/narrow/run.sh DATA WORK [STEP…]
#
# DATA is made as README.md says; runs and studies are written to WORK. The steps are named below. Without any, those of the
# ladder and of the claims are made, in the order of what each decides for its FLOPs (docs/log.md); steps that tune, register
# and score have to be named. What compares with the ladders trains only what is new: the published rows of runs.csv are the
# reference. OPTIONS="--dry-run --gpu h200" shows what the steps cost, also with DATA "" before there are any.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ $# -lt 2 ]; then
    echo "usage: run.sh DATA WORK [STEP…], with the steps" >&2
    sed -n 's/^    \([a-z0-9-]*\)).*/  \1/p' "$0" >&2
    exit 2
fi
data=$1
work=$2
shift 2
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
fixed=vanilla,deep-vanilla,operator-1,loop-2,untied-2
eight=$fixed,deep-vanilla-grow,loop-grow,untied-grow
axes=untied-2+passes=2-4-6@0.5-0.75,vanilla+blocks=1-all@0.3,vanilla+context=0.25-1@0.5,vanilla+experts=1-8@0.5
width=vanilla+width=0.5-1@0.4 # even depths: half the width needs an even number of heads
half=mini+base_tokens=12582912 # 1.5 to 4 tokens per parameter from d8 to d5; the paper's 1B tokens are 0.7 to 8
wide=--powers=-2,-1,0,1,2
low=ladder,ladder-seeds,ladder-seeds-top,ladder-vanilla,ladder-more-seeds # up to d8
ladder=$low,ladder-top,ladder-top-seeds,ladder-top-10,ladder-forecast
study() { # name, then the words of `steepen study`; PRESET is mini unless it is set
    name=$1
    shift
    # shellcheck disable=SC2086
    steepen study "$@" --name "$name" --preset "${PRESET:-mini}" ${data:+--data "$data"} --runs "$work/runs" \
        --studies "$work/studies" ${OPTIONS:-}
}
shape() { # name, two lower depths, top depth: three rates at each, of two seeds at the lower ones
    study "$1" replication:recheck --arms vanilla --rungs "$2" --seeds 0,1
    study "$1-top" replication:recheck --arms vanilla --rungs "$3"
}
step() {
    case "$1 ${OPTIONS:-}" in "register "*--dry-run* | "score "*--dry-run* | "depth "*--dry-run*)
        echo "$1 trains nothing" && return
        ;;
    esac
    case $1 in
    rates) study rates replication:rates --arms "$fixed" --rungs 4,6 ;;
    chain) # two arms have only the sweeps that changed most for the others
        for arm in vanilla operator-1 untied-2; do
            study "chain-tuning-mini-$arm" chain-tuning --from-recipe --arms "$arm"
        done
        for arm in deep-vanilla loop-2; do # each from the paper's settings
            for part in learning_rate embedding_lr_multiplier head_lr_multiplier output_multiplier init_scale; do
                study "alone-$arm-$part" chain-tuning --from-recipe --arms "$arm" --part "$part"
            done
        done
        ;;
    storage) study authors-storage replication:authors_storage --arms vanilla,operator-1 --rungs 5,6 --seeds 0-3 ;;
    ladder) study ladder ladder --arms "$eight" --rungs 4-8 --seeds 0 ;;
    seeds) study ladder-seeds replication:noise --arms "$eight" --rungs 4-6 --seeds 1 ;;
    seeds-top) study ladder-seeds-top replication:noise --arms "$eight" --rungs 7,8 --seeds 1 ;;
    more-seeds) study ladder-more-seeds replication:noise --arms "$eight" --rungs 4-6 --seeds 2,3 ;;
    top)
        nine=untied-grow:9,deep-vanilla-grow:9,untied-2:9,deep-vanilla:9,loop-grow:9,loop-2:9,operator-1:9,vanilla:9
        study ladder-top replication:noise --cells "vanilla:10,$nine" --seeds 0
        ;;
    top-10) # untied-grow with all tokens that DATA has (a dry run without DATA shows those of its recipe)
        ten=untied-grow:10,untied-2:10,deep-vanilla:10,deep-vanilla-grow:10,loop-grow:10,loop-2:10,operator-1:10
        study ladder-top-10 replication:noise --cells "$ten" --seeds 0 --shorten
        ;;
    top-seeds) study ladder-top-seeds replication:noise --cells vanilla:10,vanilla:9,untied-grow:9,operator-1:9 --seeds 1 ;;
    recheck-low)
        study recheck-low replication:recheck --arms operator-1,untied-2 --rungs 4,5 --seeds 0,1 $wide
        study recheck-low-6 replication:recheck --arms operator-1,untied-2 --rungs 6 $wide
        study recheck-low-fixed replication:recheck --arms deep-vanilla,loop-2 --rungs 4,5 $wide
        ;;
    recheck-vanilla) study recheck-vanilla replication:recheck --arms vanilla --rungs 4-8 $wide ;;
    recheck) study recheck replication:recheck --arms vanilla,operator-1,untied-2 --rungs 8 ;; # do the rates hold?
    recheck-12) study recheck-12 replication:recheck --arms vanilla --rungs 12 --powers=-1 ;;
    recheck-top) study recheck-top replication:recheck --arms vanilla --rungs 9,10 --seeds 1 ;;
    register) # before `forecast` is trained; then commit forecasts.jsonl
        # Fitted to rungs below the last number, a fifth of the FLOPs at most; d4 lies above their law (docs/log.md).
        for target in vanilla:1.84e16:2.35e15 operator-1:1.41e16:2.35e15 untied-grow:1.89e16:3.78e15; do
            IFS=: read -r arm flops below <<<"$target"
            ! grep -qs "\"arm\": \"$arm\"" "$here/forecasts.jsonl" || continue
            steepen fit "$here/runs.csv" --reference vanilla --where "study=$low" --where 'depth > 4' \
                --where "flops < $below" --budget "$flops" --register "$work/all-arms.jsonl"
            grep "\"arm\": \"$arm\"" "$work/all-arms.jsonl" >>"$here/forecasts.jsonl"
            rm "$work/all-arms.jsonl"
        done
        ;;
    forecast)
        [ -f "$here/forecasts.jsonl" ] || { echo "run.sh: register first, and commit forecasts.jsonl" >&2 && exit 1; }
        study ladder-forecast replication:noise --cells vanilla:12,operator-1:11 --seeds 0
        ;;
    score) # adds what was measured to forecasts.jsonl
        steepen fit "$here/runs.csv" --reference vanilla --score "$here/forecasts.jsonl" \
            --where "study=$ladder"
        ;;
    fp8) PRESET=mini+precision=fp8 study fp8 replication:noise --arms vanilla --rungs 5,6,8 --seeds 0,1 ;;
    shape) # Vanilla with other batches, and with other widths at depths of 5e13 to 8e14 FLOPs (docs/log.md)
        for batch in 4096 16384; do
            PRESET=mini+batch_tokens=$batch shape "shape-batch-$batch" 4,5 6
        done
        PRESET=mini+aspect=16+head_dim=16 shape shape-aspect-16 6,7 8
        PRESET=mini+aspect=64+head_dim=64 shape shape-aspect-64 2,3 4
        ;;
    vocabulary) # the same text with half and twice the tokenizer's entries, prepared as DATA-2048 and DATA-8192
        for size in 2048 8192; do
            PRESET=mini+tokenizer=bpe:$size data=${data:+$data-$size} shape "shape-vocabulary-$size" 4,5 6
        done
        ;;
    transfer) study transfer replication:transferred --arms operator-1 --rungs 4-8 --seeds 0 ;;
    adamw) study adamw replication:adamw --arms vanilla --rungs 4,5,6 ;;
    coda) study ablations-coda replication:noise --arms loop-2-no-coda-injection --rungs 4-8 --seeds 0 ;;
    core) study ablations-core replication:noise --arms loop-2-nci-2-c-3 --rungs 6,7,9 --seeds 0 ;;
    random) study ablations-random replication:noise --arms random-loop-grow --rungs 5-8 --seeds 0 ;;
    random-4) study ablations-random-4 replication:noise --arms random-loop-grow --rungs 4 --seeds 0 ;;
    width) study ablations-width replication:noise --arms width-only-vanilla,width-only-operator-1 --rungs 3-7 --seeds 0 ;;
    passes) PRESET=$half study passes replication:tied_passes ;;
    target) PRESET=$half study growth-target growth-target ;;
    timing) study growth-timing growth-timing --arms untied-grow ;;
    tpp) study tpp tpp --arms vanilla ;;
    tokens) # ladders with about the best tokens per parameter of d6 (docs/log.md)
        for arm in vanilla:8.5 operator-1:8.5 untied-2:8.5 untied-grow:12; do
            study "tokens-${arm%:*}" replication:noise --arms "${arm%:*}" --tpp "${arm#*:}" --rungs 4-9 --seeds 0 --shorten
        done
        ;;
    around) study around replication:around --arms "${eight#vanilla,}" ;; # tokens per parameter and ρ at d6
    axes) # growth along other axes
        study growth-axes replication:noise --arms "$axes" --rungs 4-8 --seeds 0
        study growth-axes-width replication:noise --arms "$width" --rungs 4,6,8,10 --seeds 0
        study growth-axes-seeds replication:noise --arms "$axes" --rungs 4-7 --seeds 1
        study growth-axes-width-seeds replication:noise --arms "$width" --rungs 4,6 --seeds 1
        ;;
    depth) # KL effective depth of the finished runs at d8 and d10
        for depth in 8 10; do
            steepen runs --runs "$work/runs" --where depth=$depth --where status=finished --json |
                python3 -c 'import json, sys; print(*(row["run"] for row in json.load(sys.stdin)["runs"]), sep="\n")' |
                sed "s#^#$work/runs/#" | xargs -r steepen eval --data "$data" --kl-depth
        done
        ;;
    data) PRESET=$half study data-constrained data-constrained --part grid ;;
    *) echo "run.sh: no step $1; run.sh alone lists them" >&2 && exit 2 ;;
    esac
}
for one in "${@:-}"; do
    if [ -n "$one" ]; then
        step "$one"
    else
        for each in ladder seeds fp8 data passes transfer forecast top coda core random random-4 target adamw tpp timing \
            around width top-10 seeds-top depth recheck-12 recheck-top more-seeds top-seeds tokens shape vocabulary axes; do
            step "$each"
        done
    fi
done
