# What the scripts of this folder share. [RunID] [--size tiny|small]: without a size, the model has 1.5 billion parameters.
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
SIZE=${SIZE:-full}
RUN=$(date +%m%d%y.%H)
while [ $# -gt 0 ]; do
  case $1 in
    --size) SIZE=$2; shift 2 ;;
    --size=*) SIZE=${1#--size=}; shift ;;
    *) RUN=$1; shift ;;
  esac
done
case $SIZE in
  tiny) MODEL="--size tiny --max_seq_length 16 -b 4 --per_device_train_batch_size 4"; STEPS=${STEPS:-20} ;;
  small) MODEL="--size small --max_seq_length 128 -b 8 --per_device_train_batch_size 8"; STEPS=${STEPS:-50} ;;
  full)
    MODEL="--config_name $HERE/configs/gpt2_config_xl_50260.json --max_seq_length 1024 -b 16 --per_device_train_batch_size 16"
    STEPS=${STEPS:-100} ;;
  *) echo "--size $SIZE: expected tiny, small or full" >&2; exit 2 ;;
esac
ROOT=/data/ANL/results
[ -w $ROOT ] || ROOT=$(pwd)/results
SCRATCH=/data/scratch
[ -w $SCRATCH ] || SCRATCH=$(pwd)/scratch
OUTDIR=${OUTDIR:-$SCRATCH/$(id -un)/GPT_RUN}
OUTPUT=${RESULTS:-$ROOT}/$(hostname)/$(id -un)/$RUN/Gpt1.5B.out
mkdir -p "$(dirname "$OUTPUT")" "$OUTDIR"
export SIZE OUTDIR
set -o pipefail
HOOK="$HERE/transformers_hook.py"
BOTH="--module_name gpt2_pretrain --task_name clm --output_dir=$OUTDIR/hf_output --overwrite_output_dir --do_train
  --cache $OUTDIR/cache/ --tokenizer_name gpt2 --model_name gpt2 --non_split_head --skip_broadcast_patch --no_index_select_patch"

# Whether a command of Slurm's is here, and Slurm answers.
queue() {
  command -v "$1" > /dev/null && timeout 20 sinfo > /dev/null 2>&1
}

compile() { # name, further arguments; a PEF that is there already is used again
  local name=$1; shift
  if [ -e "$OUTDIR/$name/$name.pef" ]; then
    echo "$OUTDIR/$name/$name.pef is there already"
  else
    python "$HOOK" compile $BOTH $MODEL --mac-v2 --pef-name="$name" --output-folder="$OUTDIR" "$@"
  fi
}

train() { # name, further arguments; what starts the processes stands in $START
  local name=$1; shift
  $START python "$HOOK" run $BOTH $MODEL --max_grad_norm_clip 1.0 --skip_checkpoint ${DATADIR:+--data_dir "$DATADIR"} \
    --logging_steps 1 --max_steps 900000 --learning_rate 0.00025 --steps_this_run "$STEPS" \
    ${MIN_THROUGHPUT:+--min_throughput "$MIN_THROUGHPUT"} ${MAX_THROUGHPUT:+--max_throughput "$MAX_THROUGHPUT"} \
    --pef="$OUTDIR/$name/$name.pef" "$@"
}
