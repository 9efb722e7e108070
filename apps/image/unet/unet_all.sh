#!/bin/bash
# ./unet_all.sh <image size> <batch size> [--size tiny|small]: compiles for data parallel, then trains with $NN instances (2).
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
if [ $# -ne 2 ]; then sed -n 2p "${BASH_SOURCE[0]}" >&2; exit 2; fi
set -e
RUN=${RUN:-unet_all}
echo "Model: UNET"
echo "COMPILE"
"$HERE/Unet2d.sh" pcompile "$1" "$2" "${NN:-2}" "$RUN" --size "$SIZE"
echo "RUN"
echo "NN=${NN:-2}"
"$HERE/Unet2d.sh" prun "$1" "$2" "${NN:-2}" "$RUN" --size "$SIZE"
