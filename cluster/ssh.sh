#!/bin/bash
# A Ray cluster on hosts that ssh reaches, and a command on the first of them, where this script runs:
#
#   bash cluster/ssh.sh "10.0.0.1 10.0.0.2 10.0.0.3" python jobs/digits.py --name digits --storage /shared/runs
#
# SIGTERM and Ctrl-C go to the command, which stops after its step and writes it; the same line resumes it.
# `ray symmetric-run` ends with `ray stop`, which ends every Ray process of yours on a host.
# Every host needs this folder, the same Python at the same place, and ~/.ray/auth_token.
set -u
read -ra hosts <<< "${1:-}"
if [ "${#hosts[@]}" -eq 0 ] || [ "$#" -lt 2 ]; then
    echo "usage: bash $0 \"HOST ...\" COMMAND ..." >&2
    exit 2
fi
shift
export RAY_AUTH_MODE=token RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
head=${hosts[0]}
case $head in *:*) head="[$head]" ;; esac    # IPv6, with its port
ray=(env "PATH=$PATH" RAY_AUTH_MODE=token RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
    ray symmetric-run --address "$head:6379" --min-nodes "${#hosts[@]}" --disable-usage-stats --)
pid=$(mktemp)
trap 'kill -TERM "$(cat "$pid")"' TERM INT

for host in "${hosts[@]:1}"; do
    # shellcheck disable=SC2029    # expanded here
    ssh "$host" "cd $(printf %q "$PWD") && $(printf '%q ' "${ray[@]}") true" &
done
# shellcheck disable=SC2016    # expanded by that shell
setsid "${ray[@]}" sh -c 'echo $$ > "$0"; exec "$@"' "$pid" "$@" &
until wait $!; code=$?; [ "$code" -eq 0 ] || ! kill -0 $! 2> /dev/null; do :; done    # a signal ends a wait
[ -s "$pid" ] || code=1    # Ray did not start, which the exit code of symmetric-run does not show
rm -f "$pid"
wait
exit "$code"
