#!/bin/bash
# Compiles for data parallel. Where there is a queue: sbatch compile_dataparallel.sh
export OMP_NUM_THREADS=8
source /opt/sambaflow/venv/bin/activate
SECONDS=0

echo "COMPILE"
# -b is the batch of one rank; a PEF that was made for two ranks runs with any number of them.
python sn_boilerplate_main.py compile --data-parallel -ws 2 -b=1 --pef-name=sn_boilerplate --output-folder="pef"

echo "Duration: " $SECONDS
