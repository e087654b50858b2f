#!/usr/bin/env bash
# mpirun.sh ARGUMENT…: Open MPI's mpirun with these arguments, set up for runs on several hosts that must not hang. For
# example: dev/launch/mpirun.sh --hostfile hosts -np 16 ./train_llama3 --model … --out out/a --resume auto
#
#   INTERFACE=eth0  the network that connects the hosts, if they have several
#   GRACE=30        seconds that mpirun may take to end after the program has reported an error or a failure. When the
#                   link to a host is cut, mpirun may wait for that host for ever; then this script ends it
#
# The exit code is the program's: 0 done, 1 an error to be fixed, 2 a failure of the run, 75 saved and ended by a
# signal.
# SIGUSR1 (save), SIGUSR2 and SIGTERM (save and end) to this script reach all ranks.
set -uo pipefail
grace=${GRACE:-30}
options=(--mca oob_tcp_keepalive_time 10 --mca oob_tcp_keepalive_intvl 5 --mca oob_tcp_keepalive_probes 3)
if [ -n "${INTERFACE:-}" ]; then
    options+=(--mca oob_tcp_if_include "$INTERFACE" --mca btl_tcp_if_include "$INTERFACE")
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkfifo "$work/errors"
tee "$work/said" <"$work/errors" >&2 &
mpirun "${options[@]}" "$@" 2>"$work/errors" &
launcher=$!
# SIGTERM would make mpirun kill its ranks at once; SIGUSR2 makes the program save
trap 'kill -USR1 "$launcher"' USR1
trap 'kill -USR2 "$launcher"' USR2 TERM

deadline=
while kill -0 "$launcher" 2>/dev/null; do
    sleep 1 &
    wait $! # returns early when a signal arrives
    if [ -z "$deadline" ] && grep -qaE '^(failure|error): ' "$work/said"; then deadline=$((SECONDS + grace)); fi
    if [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ]; then
        echo "mpirun.sh: mpirun has not ended $grace s after the message above: it is ended now" >&2
        kill -TERM "$launcher"
        sleep 2
        kill -KILL "$launcher" 2>/dev/null
        wait "$launcher"
        exit 2
    fi
done
wait "$launcher"
