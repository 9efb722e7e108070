#!/bin/bash
#SBATCH --job-name="night run"
#SBATCH --no-requeue
#SBATCH --output=logs/%x-%j.out
#SBATCH --error=logs/%x-%j.err
#SBATCH --time=1-01:01:01
#SBATCH --ntasks=32
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=16
#SBATCH --cpus-per-task=2
#SBATCH --dependency=afterok:12:14,afterany:13
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --chdir="/data/my runs"
#SBATCH --comment="{\"note\": \"a \\\"b\\\" \\\\ #c\", \"sweep\": \"7\"}"
#SBATCH --exclusive
#SBATCH --gres=rdu:1
#SBATCH --nodelist=tw[1-2]
#SBATCH --partition=tiles

export TILEWORK_TILES=job:2
# Tilework: how it ends is noted here, for when Slurm has forgotten the job.
tw_note='/home/some one/jobs/slurm'/$SLURM_JOB_ID.json
tw_started=$(date +%s.%N) tw_signals= tw_program= tw_scratch=
tw_write() {
    printf '{"started": %s, "ended": %s, "exit_code": %s, "signals": "%s", "nodes": "%s", "runs": %d}\n' \
        "$tw_started" "$1" "$2" "${tw_signals# }" "$SLURM_JOB_NODELIST" "$((SLURM_RESTART_COUNT + 1))" >"$tw_note.new" &&
        mv -f "$tw_note.new" "$tw_note"
} 2>/dev/null
tw_ended() {
    tw_write "$(date +%s.%N)" "$1"
    [ -z "$tw_scratch" ] || rm -rf "$tw_scratch"
}
tw_caught() {
    tw_signals="$tw_signals $1" tw_interrupted=1
    [ "$1" != TERM ] || tw_write null null
    [ "$1" != TERM ] || [ $SECONDS -lt 90118 ] || scontrol requeue "$SLURM_JOB_ID"
    tw_pass "$1"
}
tw_pass() { :; }  # Slurm signals the tasks of srun itself
trap 'tw_ended $?' EXIT
for tw_name in HUP INT QUIT USR1 USR2 ALRM TERM TSTP XCPU IO PWR; do trap "tw_caught $tw_name" "$tw_name"; done
tw_write null null
set -- srun --cpus-per-task=2 --mpi=pmi2 python train.py
(trap - INT QUIT && exec "$@") &
tw_program=$!
for tw_name in $tw_signals; do tw_pass "$tw_name"; done
while :; do
    tw_interrupted=
    wait "$tw_program"
    tw_code=$?
    [ -n "$tw_interrupted" ] || break
done
exit "$tw_code"
