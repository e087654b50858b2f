#!/usr/bin/env bash
# chaos.sh [INCIDENTS [SEED]]: a supervised run on four hosts in which something fails every few seconds: a killed rank,
# a frozen rank or host, a cut link, a full disk, a killed mpirun. It must survive INCIDENTS failures (50), and its last
# checkpoint must be that of a run without failures. The last lines are the measured goodput, next to the one that
# plan_llama3 --mtbf simulates from the measured times. Needs root; the hosts are namespaces of this machine.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
top=$PWD
. dev/test/checks.sh
. dev/test/cluster.sh
. dev/test/hosts_supervise.sh
export LC_ALL=C
wanted=${1:-50}
RANDOM=${2:-1}
hosts=4 steps=$((wanted * 60)) every=20
program=build/cpu-fp32/train_llama3
work=build/hosts/work
disk=build/disk # of --out: a file system that can be filled

end_all() {
    cluster_stop 2>/dev/null
    umount "$disk" 2>/dev/null
}
trap end_all EXIT
mkdir -p "$disk"
mount -t tmpfs -o size=120m tmpfs "$disk" || exit
cluster_start $hosts || exit
mkdir -p "$work"
supervised_data

# one_rank HOST SIGNAL: sends a signal to one rank on a host
one_rank() {
    on "$1" sh -c 'for process in $(pgrep -x train_llama3); do
        session=$(ps -o sid= -p "$process" | tr -d " ")
        if [ "$session" != "$process" ]; then kill -"$1" "$process"; break; fi
    done' _ "$2"
}
later() { (sleep "$1"; shift; "$@") & } # later SECONDS COMMAND…

# incident: makes something fail; sets `what`
incident() {
    local host=n$((RANDOM % hosts + 1)) other=n$((RANDOM % (hosts - 1) + 2))
    case $((RANDOM % 6)) in
        0) what="a killed rank on $host"; one_rank "$host" KILL ;;
        1) what="a frozen rank on $host"; one_rank "$host" STOP ;;
        2) what="all processes frozen on $host"; signal_host "$host" STOP all ;;
        3) what="a cut link to $other"; link "$other" down; later 8 link "$other" up ;;
        4) what="a full disk"; head -c 200m /dev/zero >"$disk/filled" 2>/dev/null; later 4 rm -f "$disk/filled" ;;
        5) what="a killed mpirun"; on n1 pkill -KILL -x mpirun ;;
    esac
}

# ---------------------------------------------------------------- without failures
"$program" "${supervised_train[@]}" --ranks 4 --steps "$steps" --save-every $every --keep 2 --out "$work/calm" \
    >"$work/said" 2>&1
reference=$(hash_of_run "$work/calm")

# ---------------------------------------------------------------- with failures
out=$disk/run
start=$EPOCHREALTIME
RETURN_AFTER=5 GIVE_UP=20 supervise $hosts 0 "$out" --steps "$steps" --save-every $every --keep 2
while [ "$(incidents "$out")" -lt "$wanted" ] && ! supervisor_gone; do
    before=$(incidents "$out") reached=$(steps_of "$out")
    sleep $((RANDOM % 4 + 1))
    incident
    if wait_for 90 has_incidents "$out" $((before + 1)); then echo "incident $(incidents "$out") at step $reached: $what"
    else
        fail "chaos" "$what was not survived within 90 s: $(tail -n 3 "$out.said")"
        break
    fi
done
caused=$(incidents "$out")
wait_for 900 supervisor_gone
wait "$supervisor"
code=$?
wall=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
if [ "$code" = 0 ] && [ "$caused" -ge "$wanted" ]; then pass "the run survives $wanted incidents" "in $wall s"
else fail "the run survives $wanted incidents" "exit code $code after $caused: $(tail -n 3 "$out.said")"; fi
hash=$(hash_of_run "$out")
if [ "$hash" = "$reference" ]; then pass "its last checkpoint is that of a run without failures" "$hash"
else fail "its last checkpoint is that of a run without failures" "$hash, expected $reference"; fi

left=$(for ((i = 1; i <= hosts; i++)); do
    on "n$i" pgrep -x train_llama3 | sed "s/^/process on n$i: /"
    on "n$i" sh -c 'ls /dev/shm | grep ^llama3-' | sed "s/^/on n$i: /"
done)
if [ -z "$left" ]; then pass "no process and no shared memory is left" "on $hosts hosts"
else fail "no process and no shared memory is left" "$left"; fi
bad=$(python3 -c 'import json, sys
for line in open(sys.argv[1]): json.loads(line)' "$out/incidents.jsonl" 2>&1 | tail -n 1)
if [ -z "$bad" ]; then pass "each line of incidents.jsonl is JSON" "$(incidents "$out") lines"
else fail "each line of incidents.jsonl is JSON" "$bad"; fi

# ---------------------------------------------------------------- goodput
# mean KEY: the mean of a key of the incidents' "seconds", without nulls
mean() { grep -o "\"$1\":[0-9.]*" "$out/incidents.jsonl" | awk -F: '{ s += $2; n++ } END { printf "%.3f", n ? s / n : 0 }'; }
median() { sort -g | awk '{ x[NR] = $1 } END { print x[int((NR + 1) / 2)] }'; }
step=$(grep -oE '"seconds":[0-9.]+' "$out/metrics.jsonl" | cut -d: -f2 | median)
save=$(grep -ao 'saved .* in [0-9.]* s' "$out.said" | sed 's/.* in \(.*\) s/\1/' | median)
[ "$save" != 0.00 ] || save=0.01
detect=$(mean detection) back_off=$(mean back_off) relaunch=$(mean relaunch)
mtbf=$(awk -v w="$wall" -v n="$caused" -v h=$hosts 'BEGIN { printf "%.6f", w / n * h / 3600 }')
between=$(awk -v r="$relaunch" -v b="$back_off" 'BEGIN { printf "%.3f", r + b + 1 }') # 1 s: looking at the hosts
awk -v s="$step" -v n="$steps" -v w="$wall" -v i="$caused" -v d="$detect" -v b="$back_off" -v r="$relaunch" -v save="$save" 'BEGIN {
    printf "measured goodput: %.1f %% (%d steps of %.3f s in %.1f s; %d incidents; means: detection %.1f s, back-off %.1f s, relaunch %.1f s; a save %.2f s)\n",
        100 * s * n / w, n, s, w, i, d, b, r, save }'
command=(build/cpu-fp32/plan_llama3 --model "$work/chaos" --seq 128 --batch 4 --world 4 --hosts "$hosts" --mtbf "$mtbf"
    --steps "$steps" --step-seconds "$step" --save-seconds "$save" --save-every "$every" --detect "$detect"
    --relaunch "$between" --repair 0)
echo "${command[*]}"
"${command[@]}" | grep -A20 "goodput, simulated" | head -n 8
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
