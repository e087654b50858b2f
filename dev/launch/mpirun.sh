#!/usr/bin/env bash
# mpirun.sh ARGUMENT…: Open MPI's mpirun with these arguments, set up for runs on several hosts that must not hang. For
# example: dev/launch/mpirun.sh --hostfile hosts -np 16 ./train_llama3 --model … --out out/a --resume auto
#
#   INTERFACE=eth0    the network that connects the hosts, if they have several
#   GRACE=30          seconds that mpirun may take to end after the program has reported a failure. When the link to a
#                     host is cut, mpirun may wait for that host for ever; then this script ends it
#   ERROR_GRACE=3600  the same after a line that begins with "error: ", counted from the last growth of metrics.jsonl in
#                     --out. It is long because a library may print such a line in a run that goes on
#
# The exit code is the program's: 0 done, 1 an error to be fixed, 2 a failure of the run, 75 saved and ended by a
# signal, or ended before it had begun. mpirun itself also exits with 1 if it cannot start the program; then no line
# begins with "error: ".
# SIGUSR1 (save), SIGUSR2 and SIGTERM (save and end) to this script reach all ranks.
#
# The program ends a run that waits longer than --timeout. This script ends an
# mpirun that hangs after that. An mpirun that hangs before it has started the program is not ended;
# dev/launch/supervise does that.
set -uo pipefail
grace=${GRACE:-30} error_grace=${ERROR_GRACE:-3600}
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
# SIGTERM would make mpirun kill its ranks at once; SIGUSR2 makes the program save
launcher= ended=
trap '[ -z "$launcher" ] || kill -USR1 "$launcher"' USR1
trap 'ended=1; [ -z "$launcher" ] || kill -USR2 "$launcher"' USR2 TERM
[ -z "$ended" ] || exit 75
mkfifo "$work/errors"
tee "$work/said" <"$work/errors" >&2 &
copier=$!
mpirun "${options[@]}" "$@" 2>"$work/errors" &
launcher=$!
[ -z "$ended" ] || kill -USR2 "$launcher"

# wait_until_gone PROCESS SECONDS
wait_until_gone() {
    local tries=$(($2 * 10))
    while kill -0 "$1" 2>/dev/null && [ $((tries--)) -gt 0 ]; do sleep 0.1; done
}

# reported WORD: has a line begun with the word? mpirun's --tag-output puts a tag before it
reported() { grep -sqaE "^(.*\[[0-9]+,[0-9]+\]<stderr>: ?)?$1: " "$work/said"; }
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

size=$(metrics_size) failed_at='' stuck_since='' # the times: when a failure, or an error, was reported
while kill -0 "$launcher" 2>/dev/null; do
    sleep 0.2 &
    wait $! # returns early when a signal arrives
    if [ -z "$failed_at" ] && reported failure; then failed_at=$SECONDS; fi
    if [ -z "$stuck_since" ] && reported error; then stuck_since=$SECONDS; fi
    if [ -n "$stuck_since" ] && [ "$(metrics_size)" != "$size" ]; then stuck_since=$SECONDS size=$(metrics_size); fi
    if [ -n "$failed_at" ] && [ $((SECONDS - failed_at)) -ge "$grace" ]; then code=2 limit=$grace
    elif [ -n "$stuck_since" ] && [ $((SECONDS - stuck_since)) -ge "$error_grace" ]; then code=1 limit=$error_grace
    else continue; fi
    echo "mpirun.sh: mpirun has not ended $limit s after the message above: it is ended now" >&2
    end_mpirun 2>/dev/null
    wait_until_gone "$copier" 2
    exit "$code"
done
wait "$launcher"
code=$?
wait_until_gone "$copier" 2 # it prints the last lines
if [ "$code" -ge 128 ]; then # a rank was killed; what the program said tells whether it was the first to end
    if reported failure; then code=2
    elif reported error; then code=1
    elif [ -n "$ended" ] && [ "$code" = 140 ]; then code=75; fi # SIGUSR2 came before anything could handle it
fi
exit "$code"
