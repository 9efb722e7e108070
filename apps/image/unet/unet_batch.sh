#!/bin/bash
# ./unet_batch.sh <num of instances> <num workers> [<batch size> <image size> <RunID>]: the instances of a data parallel run.
# Unet2d.sh prun and unet_all.sh start it, in a job where there is a queue.
INSTANCES=$1 WORKERS=$2 BATCH=${3:-256} IMAGE=${4:-256} RUN=${5:-unet}
MINE=${SLURM_SUBMIT_DIR:-$(pwd)}
FOLDER=${UNET:-$(dirname "${BASH_SOURCE[0]}")}
[ -e "$FOLDER/settings.sh" ] || FOLDER=$MINE
GIVEN_MODEL=$MODEL GIVEN_DATA=$DATA
source "$FOLDER/settings.sh" --size "${SIZE:-full}"
MODEL=${GIVEN_MODEL:-$MODEL} DATA=${GIVEN_DATA:-$DATA}
IM=$IMAGE BS=$BATCH NUM_WORKERS=$WORKERS
OUTDIR=${OUTDIR:-$MINE/out/Unet2d}
SECONDS=0
echo "Model: UNET_TRAIN"
echo "Date: " $(date +%m/%d/%y)
echo "Time: " $(date +%H:%M)
START="srun --mpi=pmi2"
command -v srun > /dev/null && [ -n "$SLURM_JOB_ID" ] || START="tilework launch --no-tag -n $INSTANCES --"
train "unet_train_${BS}_${IM}_NP_${NUM_TILES}" --data-parallel --reduce-on-rdu
STATE=$?
echo "Duration: " $SECONDS
exit $STATE
