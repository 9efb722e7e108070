#!/bin/bash
# ./unet_compile_run_inf_rl.sh compile|test|run <image size> <batch size> [--size tiny|small]
# $OUTDIR: where PEFs go. $DATADIR: pictures with masks; synthetic ones without it.
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
if [ $# -ne 3 ]; then sed -n 2,3p "${BASH_SOURCE[0]}" >&2; exit 2; fi
IM=$2 BS=$3
OUTDIR=${OUTDIR:-$(pwd)}/out
NAME=unet_train_${BS}_${IM}_single_${NUM_TILES}
case $1 in
  compile) compile $NAME ;;
  test) one python "$HERE/hook.py" test --in-channels=3 --in-width="$IM" --in-height="$IM" --batch-size="$BS" \
    --pef="$OUTDIR/$NAME/$NAME.pef" $MODEL ;;
  run) START=one; train $NAME ;;
  *) echo "$1: expected compile, test or run" >&2; exit 2 ;;
esac
