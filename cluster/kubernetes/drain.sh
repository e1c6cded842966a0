#!/bin/sh
# Drains the Ray node of this container, and waits until its raylet has ended: drain.sh SECONDS
# Runs of raytf with workers here stop after their step, write it, and continue on other nodes.
set -eu
seconds=$1
for process in /proc/[0-9]*; do
    # The first word alone: Ray's other processes have the raylet's socket and its node's id among their options.
    case $(tr '\0' '\n' 2>/dev/null < "$process/cmdline" | head -n 1) in
    */raylet) raylet=$process ;;
    esac
done
[ -n "${raylet:-}" ] || exit 0    # it has ended by itself
value() { tr '\0' '\n' < "$raylet/cmdline" | sed -n "s/^--$1=//p"; }
ray drain-node --address "$(value 'gcs-address')" --node-id "$(value 'node[-_]id')" \
    --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "the pod is to end" --deadline-remaining-seconds "$seconds"
until [ "$seconds" -le 0 ] || [ ! -d "$raylet" ]; do
    sleep 1
    seconds=$((seconds - 1))
done
