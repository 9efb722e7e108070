#!/bin/bash
# ./Gpt1.5B_run.sh [RunID] [--size tiny|small]: the instances of a data parallel run. Gpt1.5B_compile.sh starts it.
FOLDER=$(dirname "${BASH_SOURCE[0]}")
[ -e "$FOLDER/settings.sh" ] || FOLDER=${APP:-$SLURM_SUBMIT_DIR}
source "$FOLDER/settings.sh"
echo "Using $OUTPUT for output"
START="srun --mpi=pmi2"
command -v srun > /dev/null && [ -n "$SLURM_JOB_ID" ] || START="tilework launch --no-tag -n ${INSTANCES:-2} --"
train gpt15 --data-parallel --reduce-on-rdu
