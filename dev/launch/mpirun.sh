#!/usr/bin/env bash
# mpirun.sh ARGUMENT…: Open MPI's mpirun with these arguments, set up for runs on several hosts that must not hang. For
# example: dev/launch/mpirun.sh --hostfile hosts -np 16 ./train_llama3 --model … --out out/a --resume auto
#
#   INTERFACE=eth0  the network that connects the hosts, if they have several
#   GRACE=30        seconds that mpirun may take to end after the program has reported an error or a failure. When the
#                   link to a host is cut, mpirun may wait for that host for ever; then this script ends it. A library
#                   may also print a line that begins with "error: "; if metrics.jsonl in --out grows during these
#                   seconds, the run goes on, and the line is ignored
#
# The exit code is the program's: 0 done, 1 an error to be fixed, 2 a failure of the run, 75 saved and ended by a
# signal.
# SIGUSR1 (save), SIGUSR2 and SIGTERM (save and end) to this script reach all ranks.
#
# Who ends a run in which something hangs: the program does, when a rank has waited for --timeout, or for
# --start-timeout while ranks connect, and it prints why. This script ends mpirun if mpirun hangs after that. Nobody
# ends an mpirun that hangs before it has started the program, for example in ssh.
set -uo pipefail
grace=${GRACE:-30}
options=(--mca oob_tcp_keepalive_time 10 --mca oob_tcp_keepalive_intvl 5 --mca oob_tcp_keepalive_probes 3)
if [ -n "${INTERFACE:-}" ]; then
    options+=(--mca oob_tcp_if_include "$INTERFACE" --mca btl_tcp_if_include "$INTERFACE")
fi
metrics=
for ((i = 1; i <= $#; i++)); do
    next=$((i + 1))
    case ${!i} in
        --out) metrics=${!next:-}/metrics.jsonl ;;
        --out=*) metrics=${!i#--out=}/metrics.jsonl ;;
    esac
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkfifo "$work/errors"
tee "$work/said" <"$work/errors" >&2 &
copier=$!
mpirun "${options[@]}" "$@" 2>"$work/errors" &
launcher=$!
# SIGTERM would make mpirun kill its ranks at once; SIGUSR2 makes the program save
trap 'kill -USR1 "$launcher"' USR1
trap 'kill -USR2 "$launcher"' USR2 TERM

# wait_until_gone PROCESS SECONDS
wait_until_gone() {
    local tries=$(($2 * 10))
    while kill -0 "$1" 2>/dev/null && [ $((tries--)) -gt 0 ]; do sleep 0.1; done
}

# reported WORD: has a line begun with the word, from line $first on? mpirun's --tag-output puts a tag before it
reported() { tail -n "+$first" "$work/said" | grep -qaE "^(.*\[[0-9]+,[0-9]+\]<stderr>: ?)?($1): "; }
metrics_size() { wc -c 2>/dev/null <"$metrics" || echo 0; }

# Ends mpirun with its ssh connections and its ranks on this host. Removes what mpirun leaves on this host when it is
# killed: its directory, and the shared memory of its ranks, whose name contains the number of their job.
end_mpirun() {
    local host children directory job
    host=$(hostname).$(id -u)
    directory=${TMPDIR:-/tmp}/ompi.$host/pid.$launcher
    job=$(sed -n '1s/\..*//p' "$directory/contact.txt" 2>/dev/null) # of mpirun; the ranks have the next one
    children=$(pgrep -P "$launcher")
    kill -TERM "$launcher"
    wait_until_gone "$launcher" 1
    kill -KILL "$launcher" $children 2>/dev/null
    wait "$launcher"
    rm -rf "$directory"
    [ -z "$job" ] || rm -f "/dev/shm/vader_segment.$host.$(printf %x $((job + 1)))."*
}

first=1 deadline=
while kill -0 "$launcher" 2>/dev/null; do
    sleep 0.2 &
    wait $! # returns early when a signal arrives
    lines=$(wc -l <"$work/said")
    if [ -z "$deadline" ] && reported "failure|error"; then
        deadline=$((SECONDS + grace)) ignored=$lines before=$(metrics_size)
    fi
    [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ] || continue
    if ! reported failure && [ "$(metrics_size)" != "$before" ]; then # the line came from a library, and the run trains
        first=$((ignored + 1)) deadline=
        continue
    fi
    echo "mpirun.sh: mpirun has not ended $grace s after the message above: it is ended now" >&2
    end_mpirun 2>/dev/null
    wait_until_gone "$copier" 2
    if reported failure; then exit 2; fi
    exit 1
done
wait "$launcher"
code=$?
wait_until_gone "$copier" 2 # it prints the last lines
if [ "$code" -ge 128 ]; then # a rank was killed; what the program said tells whether it was the first to end
    first=1
    if reported failure; then code=2
    elif reported error; then code=1; fi
fi
exit "$code"
