#!/bin/bash
#SBATCH --job-name=raytf
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#
# A Ray cluster on the nodes of a Slurm job, and a command on its first node:
#
#   sbatch --nodes 4 cluster/slurm.sh python jobs/digits.py --name digits --num-workers 32 --storage /shared/runs
#
# 120 s before the time limit Slurm signals this shell (at a preemption, too, where slurm.conf has
# PreemptParameters=send_user_signal). The command gets SIGTERM, stops after its step and writes it; the job is
# queued again, and the same command resumes at the next step. A job whose node fails is queued again by Slurm itself.
# A step with its checkpoint must take less than these 120 s: Slurm ends a job at its limit, and does not queue it again.
# A signal before Ray is up waits for the command for 60 s, and then ends the job: exit code 143.
# After scancel --signal=TERM --batch JOB the command stops in the same way, and the job is not queued again. A plain
# scancel ends all processes of Ray at once.
# --exclusive, as `ray symmetric-run` ends with `ray stop`, which ends every Ray process of yours on a node. It gives the
# job all CPUs of a node, and its memory by --mem=0 alone.
# Every node needs the same Python in PATH, and the same home, with Ray's token.
# No Slurm has run this script: tests run it on network namespaces with srun and scontrol of their own.
set -u
if [ "$#" -eq 0 ]; then
    echo "usage: sbatch slurm.sh COMMAND ..." >&2
    exit 2
fi
pid=$(mktemp) result=$(mktemp)
job='' requeue='' stopped='' ended='' patience=60

# Stops the command after its step. As long as it has not started, Ray gets some time to start it, and ends in order.
stop() {
    stopped=yes
    [ "$job" ] || return
    if [ ! -s "$pid" ]; then
        echo "slurm.sh: a signal came before the command has started: waiting for it for up to $patience s" >&2
        for _ in $(seq "$patience"); do
            if [ -s "$pid" ] || ! kill -0 "$job" 2> /dev/null; then break; fi
            sleep 1
        done
    fi
    signalled=yes
    if [ -s "$pid" ]; then
        kill -TERM "$(cat "$pid")"
    elif kill -0 "$job" 2> /dev/null; then
        ended=yes
        echo "slurm.sh: the command has not started: the job ends" >&2
        kill -TERM "$job"
    fi
}
trap 'requeue=yes; stop' USR1
trap stop TERM

export RAY_AUTH_MODE=token RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
[ -e ~/.ray/auth_token ] || (umask 077 && ray get-auth-token --generate > /dev/null)
name=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)    # this node, whose /etc/hosts may say 127.0.1.1
head=$({ getent ahostsv4 "$name"; getent ahosts "$name"; } | awk '$1 !~ /^(127\.|::1$|fe80:)/ {print $1; exit}')
head=${head:-$(hostname -I | cut -d ' ' -f 1)}
case $head in *:*) head="[$head]" ;; esac    # IPv6, with its port

# The first node's task ends with the command; those of the others start Ray again if it ends there. So the first task to
# end is the command's, and srun ends the others 10 s later, by SIGKILL: its own exit code is theirs.
# shellcheck disable=SC2016    # expanded on the node
if [ -z "$stopped" ]; then
    srun --wait=10 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c '
        result=$0
        if [ "$SLURM_NODEID" = 0 ]; then ray symmetric-run "$@"; echo $? > "$result"; exit; fi
        while :; do ray symmetric-run "$@"; sleep 5; done' "$result" \
        --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" --num-cpus "$SLURM_CPUS_PER_TASK" \
        --disable-usage-stats -- sh -c 'echo $$ > "$0"; exec "$@"' "$pid" "$@" &
    job=$!
    if [ "$stopped" ] && [ -z "${signalled:-}" ]; then stop; fi    # the signal came before the line above
    while kill -0 "$job" 2> /dev/null; do wait "$job"; done    # a signal ends a wait
fi
code=$(cat "$result")
[ -s "$pid" ] || code=1    # Ray did not start, which the exit code of symmetric-run does not show
# Stopped before the start, or (241, symmetric-run's code of SIGTERM) before the command has taken over the signal.
if [ "$stopped" ] && { [ "$ended" ] || [ ! -s "$pid" ] || [ "$code" = 241 ]; }; then code=143; fi
rm -f "$pid" "$result"
if [ "${code:-1}" -eq 143 ] && [ "$requeue" ]; then
    # of an array by task: one task has the id of the array, whose requeue would be that of all
    scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
fi
exit "${code:-1}"
