#!/usr/bin/env bash
# Train the ladders of this directory; run it again and it continues where it stopped.
#
#   bash results/h200-mini/run.sh [SECONDS]
#
# Starts no run that would not end within SECONDS (default: a day), so that it fits a time limit. Records of
# finished runs are kept in runs/ and studies/ beside this file; with $OUT set, also as one archive there.
# Needs data made as README.md says. Variables: PYTHON, DATA, PRESET, WORK, ARMS, RUNGS, SEED_RUNGS, TUNE_RUNGS,
# EPOCHS, OPTIONS (more options of `steepen study`).
set -uo pipefail
started=$SECONDS
limit=${1:-86400}
here=$(cd "$(dirname "$0")" && pwd)
KEEP=${KEEP:-$here}
PYTHON=${PYTHON:-python}
DATA=${DATA:-data/h200-mini}
PRESET=${PRESET:-$here/preset.yaml}
WORK=${WORK:-runs/h200-mini}
ARMS=${ARMS:-vanilla,deep-vanilla,operator-1,loop-2,untied-2,untied-grow}
RUNGS=${RUNGS:-2-5}
SEED_RUNGS=${SEED_RUNGS:-2-4}
TUNE_RUNGS=${TUNE_RUNGS:-2,4}
EPOCHS=${EPOCHS:-4}
OPTIONS=${OPTIONS:-}

restore() { # what was kept before: a finished run is not repeated
    mkdir -p "$WORK/runs" "$WORK/studies" "$KEEP/runs" "$KEEP/studies"
    cp -rn "$KEEP/runs/." "$WORK/runs/"
    cp -rn "$KEEP/studies/." "$WORK/studies/"
}

keep() { # spec and record of every finished run, journal and recipes of every study
    for record in "$WORK"/runs/*/record.json; do
        [ -e "$record" ] || continue
        run=$(basename "$(dirname "$record")")
        mkdir -p "$KEEP/runs/$run"
        cp "$WORK/runs/$run/spec.json" "$record" "$KEEP/runs/$run/"
    done
    for study in "$WORK"/studies/*/; do
        [ -e "$study/study.json" ] || continue
        mkdir -p "$KEEP/studies/$(basename "$study")"
        cp "$study"/study.json "$KEEP/studies/$(basename "$study")/"
        cp "$study"/*.yaml "$KEEP/studies/$(basename "$study")/" 2>/dev/null
    done
    if [ -n "${OUT:-}" ]; then tar -czf "$OUT/h200-mini.tar.gz" -C "$KEEP" runs studies; fi
    echo "$(ls "$KEEP/runs" | wc -l) runs finished, $((SECONDS - started)) s."
}

study() { # name, then the words of `steepen study`
    name=$1
    shift
    left=$((limit - (SECONDS - started) - 5))
    if [ "$left" -le 10 ]; then keep; exit 0; fi
    echo "== $name ($left s left)"
    # shellcheck disable=SC2086
    PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m steepen study "$@" --name "$name" \
        --preset "$PRESET" --data "$DATA" --epochs "$EPOCHS" --budget "${left}s" --runs "$WORK/runs" \
        --studies "$WORK/studies" $OPTIONS >"$WORK/$name.txt" 2>"$WORK/$name.log"
    code=$?
    tail -n 3 "$WORK/$name.log"
    if [ "$code" -ne 0 ]; then keep; exit "$((code == 1 ? 0 : code))"; fi  # 1: the time is over, or a run failed
}

restore
recipes=$(for arm in ${ARMS//,/ }; do printf -- '--recipe %s ' "$WORK/studies/tuning/recipe-$arm.yaml"; done)
study tuning h200_mini:learning_rates --arms "$ARMS" --rungs "$TUNE_RUNGS"
# shellcheck disable=SC2086
study tuned ladder --arms "$ARMS" --rungs "$RUNGS" $recipes
# shellcheck disable=SC2086
study seeds h200_mini:seeds --arms "$ARMS" --rungs "$SEED_RUNGS" --seeds 0,1 $recipes
study untuned ladder --arms "$ARMS" --rungs "$RUNGS" --recipe paper
study untuned-seeds h200_mini:seeds --arms "$ARMS" --rungs "$SEED_RUNGS" --seeds 0,1 --recipe paper
study smallest-rung h200_mini:seeds --arms "$ARMS" --rungs "${RUNGS%%-*}" --seeds 0,1,2,3 --recipe paper
keep
