#!/bin/bash
#SBATCH --job-name=script
#SBATCH --output="/home/some one/jobs/slurm/%j.out"
#SBATCH --error="/home/some one/jobs/slurm/%j.err"
#SBATCH --no-requeue
#SBATCH -n 4
#SBATCH --time=0-01:00:00
#SBATCH --ntasks=4
#SBATCH --signal=USR2@60

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
    tw_pass "$1"
}
# When Slurm ends a job it signals this shell alone where it has cgroups, elsewhere all processes. PWR, TSTP and IO are ours.
tw_pass() {
    [ -n "$tw_program" ] || return
    case $1 in
        PWR) kill -s TERM "$tw_program" ;;
        TSTP) kill -s STOP "$tw_program" ;;
        IO) kill -s CONT "$tw_program" ;;
        TERM) grep -q "/job_$SLURM_JOB_ID" /proc/self/cgroup && kill -s TERM "$tw_program" && kill -s CONT "$tw_program" ;;
        *) kill -s "$1" "$tw_program" ;;
    esac
} 2>/dev/null
trap 'tw_ended $?' EXIT
for tw_name in HUP INT QUIT USR1 USR2 ALRM TERM TSTP XCPU IO PWR; do trap "tw_caught $tw_name" "$tw_name"; done
tw_write null null
tw_scratch=$(mktemp -d "${TMPDIR:-/tmp}/tilework-job.XXXXXX") || exit 1
cat >"$tw_scratch/script" <<'TILEWORK_8e225f4d11f7ee04'
#!/bin/bash
#SBATCH -n 4
srun python train.py
TILEWORK_8e225f4d11f7ee04
chmod 700 "$tw_scratch/script"
set -- /bin/bash "$tw_scratch/script"
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
