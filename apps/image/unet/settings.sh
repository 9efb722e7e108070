# What the scripts of this folder share. --size tiny or --size small, anywhere among the arguments, makes the model and the data
# small enough for a laptop; without it they are those of the paper.
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
SIZE=full
ARGUMENTS=()
while [ $# -gt 0 ]; do
  case $1 in
    --size) SIZE=$2; shift 2 ;;
    --size=*) SIZE=${1#--size=}; shift ;;
    *) ARGUMENTS+=("$1"); shift ;;
  esac
done
set -- "${ARGUMENTS[@]}"
case $SIZE in
  tiny) MODEL="--init-features 4 --depth 2"; DATA="--num-samples 64"; EPOCHS=${EPOCHS:-2} ;;
  small) MODEL="--init-features 16 --depth 3"; DATA="--num-samples 512"; EPOCHS=${EPOCHS:-4} ;;
  full) MODEL="--init-features 32"; DATA=""; EPOCHS=${EPOCHS:-10} ;;
  *) echo "--size $SIZE: expected tiny, small or full" >&2; exit 2 ;;
esac
[ -z "$DATADIR" ] || DATA="$DATA --data-dir $DATADIR"
[ -z "$MIN_THROUGHPUT" ] || DATA="$DATA --min-throughput $MIN_THROUGHPUT"
NUM_TILES=4 # in the names of the PEFs; a smaller machine has fewer
CORES=$(nproc)
TILES=$((CORES < NUM_TILES ? CORES : NUM_TILES))
export SIZE

# Whether a command of Slurm's is here, and Slurm answers.
queue() {
  command -v "$1" > /dev/null && timeout 20 sinfo > /dev/null 2>&1
}

# One process where there is no queue; in a queue, one of its tasks.
one() {
  if queue srun; then srun --nodelist "$(hostname)" "$@"; else "$@"; fi
}

# Compiles into $OUTDIR, unless the PEF is there already.
compile() { # name, further arguments
  local name=$1; shift
  if [ -e "$OUTDIR/$name/$name.pef" ]; then
    echo "$OUTDIR/$name/$name.pef is there already"
  else
    python "$HERE/compile.py" compile --mac-v2 --in-channels=3 --in-width="$IM" --in-height="$IM" --batch-size="$BS" \
      --enable-conv-tiling --num-tiles=$TILES --pef-name="$name" --output-folder="$OUTDIR" $MODEL "$@"
  fi
}

train() { # the PEF's name, further arguments; what starts the processes stands in $START
  local name=$1; shift
  $START python "$HERE/hook.py" run --data-in-memory --num-workers="${NUM_WORKERS:-0}" --enable-tiling --in-channels=3 \
    --in-width="$IM" --in-height="$IM" --batch-size="$BS" --epochs $EPOCHS --pef="$OUTDIR/$name/$name.pef" $MODEL $DATA "$@"
}
