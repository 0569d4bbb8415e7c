#!/usr/bin/env bash
# Does growth along another axis beat Vanilla and Untied-Grow? Run it again and it goes on where it stopped.
#
#   bash results/narrow/growth.sh DATA [WORK]
#
# DATA is made as README.md says; runs and studies are written to WORK (default: runs/narrow). Depths are even, because
# half the width needs an even number of heads.
set -euo pipefail
data=$1
work=${2:-runs/narrow}
ladder() { # name of the study, arm
    steepen study ladder --name "growth-$1" --preset "${PRESET:-mini}" --rungs "${RUNGS:-4,6,8,10}" --seeds "${SEEDS:-0,1}" \
        --arms "vanilla,untied-grow,$2" --data "$data" --runs "$work/runs" --studies "$work/studies"
}
ladder passes 'untied-2+passes=2-4-6@0.5-0.75'
ladder blocks 'vanilla+blocks=1-all@0.3'
ladder width 'vanilla+width=0.5-1@0.4'
ladder context 'vanilla+context=0.25-1@0.5'
