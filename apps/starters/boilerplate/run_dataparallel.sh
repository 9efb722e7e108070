#!/bin/bash
# Trains on two ranks, after compile_dataparallel.sh. Where there is a queue: sbatch --gres=rdu:2 run_dataparallel.sh
set -e
set -x
MODEL_NAME="FFNLogReg"
SECONDS=0

echo "Model: ${MODEL_NAME}"
echo "Date: " $(date +%m/%d/%y)
echo "Time: " $(date +%H:%M)

echo "RUN"
/opt/mpich-3.3.2/bin/mpirun -np 2 python sn_boilerplate_main.py run --data-parallel --reduce-on-rdu --pef=pef/sn_boilerplate/sn_boilerplate.pef "$@"

echo "Duration: " $SECONDS
