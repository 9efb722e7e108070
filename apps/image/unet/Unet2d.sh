#!/bin/bash
# ./Unet2d.sh compile|run|pcompile|prun <image size> <batch size> <num of instances> <RunID> [--size tiny|small]
# compile and run: one instance. pcompile and prun: data parallel. Output goes to Unet2d.out in the results of the RunID.
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
if [ $# -ne 5 ]; then sed -n 2,3p "${BASH_SOURCE[0]}" >&2; exit 2; fi
set -o pipefail
COMMAND=$1 IM=$2 BS=$3 NP=$4 RUN=$5
OUTDIR=$(pwd)/out/Unet2d
ROOT=/data/ANL/results
[ -w $ROOT ] || ROOT=$(pwd)/results
RESULTS=${RESULTS:-$ROOT}/$(hostname)/$(id -un)/$RUN
mkdir -p "$RESULTS"
OUTPUT=$RESULTS/Unet2d.out
echo "Using $OUTPUT for output"
ONE=unet_train_${BS}_${IM}_single_${NUM_TILES}
MANY=unet_train_${BS}_${IM}_NP_${NUM_TILES}
if [ "$COMMAND" = compile -o "$COMMAND" = run ] && [ "$NP" -ne 1 ]; then
  echo "$COMMAND is for 1 instance, found $NP; for more: pcompile and prun" >&2; exit 2
fi

case $COMMAND in
  compile) compile $ONE ;;
  run) START=one; train $ONE --log-dir "$RESULTS/log_dir_unet_${IM}_${BS}_single_${NUM_TILES}" ;;
  pcompile) compile $MANY --data-parallel -ws 2 ;;
  prun)
    export OUTDIR MODEL DATA EPOCHS
    if queue sbatch; then
      sbatch --wait --output="$RESULTS/slurm-%A.out" --gres=rdu:1 --tasks-per-node "$NP" --nodes 1 --nodelist "$(hostname)" \
        "$HERE/unet_batch.sh" "$NP" "${NUM_WORKERS:-0}" "$BS" "$IM" "$RUN"
    else
      "$HERE/unet_batch.sh" "$NP" "${NUM_WORKERS:-0}" "$BS" "$IM" "$RUN"
    fi ;;
  *) echo "$COMMAND: expected compile, run, pcompile or prun" >&2; exit 2 ;;
esac 2>&1 | tee -a "$OUTPUT"
