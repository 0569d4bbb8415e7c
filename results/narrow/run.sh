#!/usr/bin/env bash
# Tune and train the narrow ladders; run it again and it goes on where it stopped.
#
#   bash results/narrow/run.sh DATA [WORK]
#
# DATA is made as README.md says; runs and studies are written to WORK (default: runs/narrow).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
data=$1
work=${2:-runs/narrow}
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
study() { # name, then the words of `steepen study`
    name=$1
    shift
    steepen study "$@" --name "$name" --preset mini --data "$data" --runs "$work/runs" --studies "$work/studies"
}
arms=vanilla,operator-1,untied-grow
study rates replication:rates --arms vanilla,deep-vanilla,operator-1,loop-2,untied-2 --rungs 4,6
for arm in vanilla operator-1 untied-2; do
    study "chain-tuning-mini-$arm" chain-tuning --from-recipe --arms "$arm"
done
study ladder ladder --arms "$arms" --rungs 4-8 --seeds 0,1
study ladder-seeds replication:noise --arms "$arms" --rungs 4-6 --seeds 2,3
study recheck replication:recheck --arms "$arms" --rungs 8
study authors-storage replication:authors_storage --arms vanilla,operator-1 --rungs 5,6 --seeds 0-3
