#!/bin/bash
# ./Gpt1.5B_compile.sh [RunID] [--size tiny|small]: compiles for data parallel, then starts Gpt1.5B_run.sh with $INSTANCES
# instances (2) on $NODES nodes (1), in a job where there is a queue.
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
echo "Using $OUTPUT for output"
INSTANCES=${INSTANCES:-2} NODES=${NODES:-1}
export INSTANCES
{
  compile gpt15 --data-parallel -ws 2 || exit
  if queue sbatch; then
    sbatch --output="$HOME/slurm-%A.out" --ntasks "$INSTANCES" --gres=rdu:1 --ntasks-per-node $((INSTANCES / NODES)) \
      --nodes "$NODES" "$HERE/Gpt1.5B_run.sh" "$RUN"
  else
    "$HERE/Gpt1.5B_run.sh" "$RUN"
  fi
} 2>&1 | tee -a "$OUTPUT"
