#!/bin/bash
# A Ray cluster on hosts that ssh reaches, and a command on the first of them, where this script runs:
#
#   bash cluster/ssh.sh "10.0.0.1 10.0.0.2 10.0.0.3" python jobs/digits.py --name digits --storage /shared/runs
#
# SIGTERM and Ctrl-C go to the command, which stops after its step and writes it; the same line resumes it. A signal
# before Ray is up waits for the command for 60 s, and then ends Ray: exit code 143.
# `ray symmetric-run` ends with `ray stop`, which ends every Ray process of yours on a host.
# Every host needs this folder, the same Python at the same place, and ~/.ray/auth_token.
set -u
read -r -d '' -a hosts <<< "${1:-}"    # on one line or several
if [ "${#hosts[@]}" -eq 0 ] || [ "$#" -lt 2 ]; then
    echo "usage: bash $0 \"HOST ...\" COMMAND ..." >&2
    exit 2
fi
shift
export RAY_AUTH_MODE=token RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
name=${hosts[0]}    # this host, whose /etc/hosts may say 127.0.1.1
head=$({ getent ahostsv4 "$name"; getent ahosts "$name"; } | awk '$1 !~ /^(127\.|::1$|fe80:)/ {print $1; exit}')
head=${head:-$(hostname -I | cut -d ' ' -f 1)}
head=${head:-$name}    # without a network
case $head in *:*) head="[$head]" ;; esac    # IPv6, with its port
ray=(env "PATH=$PATH" RAY_AUTH_MODE=token RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
    ray symmetric-run --address "$head:6379" --min-nodes "${#hosts[@]}" --disable-usage-stats --)
pid=$(mktemp)
job='' stopped='' ended='' patience=60

# Stops the command after its step. As long as it has not started, Ray gets some time to start it, and ends in order.
stop() {
    stopped=yes
    [ "$job" ] || return
    if [ ! -s "$pid" ]; then
        echo "ssh.sh: a signal came before the command has started: waiting for it for up to $patience s" >&2
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
        echo "ssh.sh: the command has not started: Ray is ended; other hosts wait for it for 300 s at most" >&2
        kill -TERM -- "-$job"
        ray stop
    fi
}
trap stop TERM INT

for host in "${hosts[@]:1}"; do
    # shellcheck disable=SC2029    # expanded here
    ssh "$host" "cd $(printf %q "$PWD") && $(printf '%q ' "${ray[@]}") true" &
done
# shellcheck disable=SC2016    # expanded by that shell
setsid "${ray[@]}" sh -c 'echo $$ > "$0"; exec "$@"' "$pid" "$@" &
job=$!
if [ "$stopped" ] && [ -z "${signalled:-}" ]; then stop; fi    # the signal came before the line above
until wait "$job"; code=$?; [ "$code" -eq 0 ] || ! kill -0 "$job" 2> /dev/null; do :; done    # a signal ends a wait
[ -s "$pid" ] || code=1    # Ray did not start, which the exit code of symmetric-run does not show
# Stopped before the start, or (241, symmetric-run's code of SIGTERM) before the command has taken over the signal.
if [ "$stopped" ] && { [ "$ended" ] || [ ! -s "$pid" ] || [ "$code" -eq 241 ]; }; then code=143; fi
rm -f "$pid"
wait
exit "$code"
