#!/usr/bin/env bash
# chaos.sh [INCIDENTS [SEED]]: a supervised run on four hosts to which something happens every few seconds: a rank is
# killed or frozen, a host is frozen, a link is cut, the disk of --out is full, mpirun is killed. The run must finish
# all its steps with the checkpoint of a run without interruption, and leave nothing on any host. Prints the measured
# goodput and what it is made of. The same SEED repeats the same choices, but not the same moments. With LAUNCHER=srun
# the run is a Slurm job. Sourced by hosts.sh.
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    INCIDENTS=${1:-50} SEED=${2:-1} HOSTS=4 exec "$(dirname "$0")/hosts.sh" chaos
fi

# random N: sets `drawn` to a whole number from 0 to N - 1
random() { drawn=$((RANDOM % $1)); }
seconds_since() { awk -v a="$1" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.3f", b - a }'; }
median() { sort -n | awk '{ x[NR] = $1 } END { print (NR ? x[int((NR + 1) / 2)] : 0) }'; }
ranks_on() { on "$1" sh -c 'for process in $(pgrep -x train_llama3); do
    [ "$(ps -o sid= -p "$process" | tr -d " ")" = "$process" ] || echo "$process"; done'; }
lines() { wc -l 2>/dev/null <"$out/incidents.jsonl" || echo 0; } # one is complete when the run has recovered
more_lines() { [ "$(lines)" -gt "$1" ]; }
running() { ! gone "$launched"; }

# later SECONDS COMMAND…: in the background
mending=()
later() {
    local after=$1
    shift
    { sleep "$after" && "$@"; } >/dev/null 2>&1 &
    mending+=("$!")
}

# pick_rank FIRST_HOST: sets `host` and `rank_process` to a rank of the run, on this host or a later one
pick_rank() {
    local i processes
    for ((i = 0; i < 40; i++)); do
        random $((5 - $1))
        host=n$(($1 + drawn))
        mapfile -t processes < <(ranks_on "$host")
        if [ "${#processes[@]}" -gt 0 ]; then
            random "${#processes[@]}"
            rank_process=${processes[drawn]}
            return
        fi
        sleep 0.3
        running || return 1
    done
    return 1
}

# Its processes are ended, and it works again.
revive() {
    on "$1" sh -c 'pkill -KILL -x "train_llama3|orted"; kill -CONT -1'
}

# inject KIND: sets `host` to where it happened
inject() {
    random 4
    case $1 in
        kill_rank) pick_rank 1 && on "$host" kill -KILL "$rank_process" ;;
        freeze_rank) pick_rank 1 && on "$host" kill -STOP "$rank_process" ;;
        freeze_host)
            pick_rank 2 && on "$host" sh -c 'kill -STOP -1' # not n1, where supervise runs
            later 7 revive "$host" ;;
        cut_link)
            local pause=$((3 + drawn))
            pick_rank 1 && link "$host" down
            later "$pause" link "$host" up ;;
        fill_disk)
            host=disk
            head -c 60M /dev/zero >build/hosts/disk/full
            later $((2 + drawn)) rm -f "$top/build/hosts/disk/full" ;;
        kill_mpirun)
            host=n1
            wait_for 10 on n1 pkill -KILL -f '^(mpirun|srun --mpi=pmix) ' ;;
    esac 2>/dev/null
}

# The time of a step, and of a save, without incidents, on the same hosts.
chaos_undisturbed() {
    launch 4 8 mpirun --steps 120 --save-every 15 --out "$work/undisturbed"
    ends 120
    [ "$code" = 0 ] || fail "chaos: the undisturbed run" "exit code $code: $(tail -n 2 "$work/said")"
    step_seconds=$(grep -oE '"seconds":[0-9.]+' "$work/undisturbed/metrics.jsonl" | cut -d: -f2 | median)
    save_seconds=$(grep -oE ' saved .* in [0-9.]+ s' "$work/said" | grep -oE '[0-9.]+ s$' | cut -d' ' -f1 | median)
    clean_up
}

# chaos_lines WALL USEFUL: checks that each line of incidents.jsonl has all fields, and prints the number of lines,
# their kinds, the goodput and its losses, and the options of plan_llama3 that follow from them. There, hosts do not
# fail until a failure is noticed, so that time is not part of the MTBF.
chaos_lines() {
    python3 - "$out/incidents.jsonl" "$1" "$2" <<'END'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
wall, useful = map(float, sys.argv[2:])
keys = set("number time kind message hosts_named ranks_named exit_code step resumed_from_step lost_steps lost_s "
           "detection_s world_before world_after hosts_left_out back_off_s relaunch_s".split())
assert all(set(line) == keys for line in lines)
assert [line["number"] for line in lines] == list(range(1, len(lines) + 1))
failures = [line for line in lines if line["kind"] != "hosts returned"]
count = max(1, len(failures))
seconds = lambda group, *names: sum(line[name] or 0 for line in group for name in names)
relaunched = max(1, sum(line["relaunch_s"] is not None for line in failures))
detection, back_off = seconds(failures, "detection_s") / count, seconds(failures, "back_off_s") / count
relaunch = seconds(failures, "relaunch_s") / relaunched
losses = {name: seconds(failures, name + "_s") for name in ("detection", "back_off", "relaunch", "lost")}
losses["returned hosts"] = seconds([line for line in lines if line not in failures], "detection_s", "back_off_s",
                                   "relaunch_s", "lost_s")
losses["saves and others"] = wall - useful - sum(losses.values())
kinds = [line["kind"] for line in lines]
print(len(lines), ", ".join("%d x %s" % (kinds.count(kind), kind) for kind in sorted(set(kinds))), sep="\t")
shares = ", ".join("%s %.1f %%" % (name, 100 * loss / wall) for name, loss in losses.items())
print("chaos: goodput %.1f %%: %.1f of %.1f s; the rest: %s" % (100 * useful / wall, useful, wall, shares))
steps = seconds(failures, "lost_steps") / count
print("chaos: a failure every %.2f s; mean: detection %.2f s, back-off %.2f s, relaunch %.2f s" %
      (wall / count, detection, back_off, relaunch), end=", ")
print("and %.1f steps lost, which took %.2f s" % (steps, losses["lost"] / count))
print("--mtbf %.6f --detect %.3f --relaunch %.3f" % (4 * (wall / count - detection) / 3600, detection,
                                                     back_off + relaunch))
END
}

# chaos_report WALL: the cost of the incidents, and the command that simulates such a run
chaos_report() {
    local printed lines kinds useful
    useful=$(awk -v n="$steps" -v s="$step_seconds" 'BEGIN { print n * s }')
    if ! printed=$(chaos_lines "$1" "$useful"); then
        fail "chaos: incidents.jsonl" "a line is not valid: $(tail -n 1 "$out/incidents.jsonl")"
        return
    fi
    IFS=$'\t' read -r lines kinds <<<"$printed"
    if [ "$(grep -c '^supervise: launching' "$work/said")" = $((lines + 1)) ]; then
        pass "chaos: every relaunch has a valid line of incidents.jsonl" "$lines lines: $kinds"
    else
        fail "chaos: every relaunch has a valid line of incidents.jsonl" \
            "$lines lines, $(grep -c '^supervise: launching' "$work/said") launches"
    fi
    sed -n '2,3p' <<<"$printed"
    echo "chaos: simulate with plan_llama3 --model $work/model --world 8 --hosts 4 --steps $steps --save-every 15" \
        "--step-seconds $step_seconds --save-seconds $save_seconds --repair 0 $(sed -n 4p <<<"$printed")"
}

# chaos: INCIDENTS of them; SEED chooses
chaos() {
    local i kind start wall before tenths host rank_process
    local kinds=(kill_rank freeze_rank freeze_host cut_link fill_disk kill_mpirun)
    incidents=${INCIDENTS:-6} RANDOM=${SEED:-1} steps=$((${INCIDENTS:-6} * 150))
    train+=(--deterministic --seq 64 --timeout 3 --lr 1e-3 --min-lr 1e-3)
    local trains=(--steps "$steps" --save-every 15 --keep 2) options=(--return-after 8 --back-off 4 --give-up 10)
    chaos_undisturbed
    begin chaos
    out=build/hosts/disk/out
    start=$EPOCHREALTIME
    if [ "${LAUNCHER:-mpirun}" = srun ]; then
        on n1 env OMP_WAIT_POLICY=passive sbatch --wait --nodes 4 --ntasks-per-node 2 --no-kill --open-mode=append \
            --output "$work/said" --wrap "exec dev/launch/supervise --grace 2 --silence 30 ${options[*]} \
            --launch-options --overcommit -- $program ${train[*]} ${trains[*]} --out $out" >/dev/null 2>&1 &
        launched=$!
    else supervise "n1:2 n2:2 n3:2 n4:2" "${options[@]}" -- "${trains[@]}"; fi
    wait_for 60 step_beyond "$out" 5
    : >"$work/injected"
    for ((i = 1; i <= incidents; i++)); do
        kind=${kinds[(i - 1) % 6]}
        if [ "$incidents" -gt 6 ]; then
            random 6
            kind=${kinds[drawn]}
        fi
        random 40
        tenths=$drawn
        while [ $((tenths--)) -gt 0 ] && ! step_beyond "$out" $((steps * i / (incidents + 1))); do sleep 0.1; done
        running || break
        host=nobody before=$(lines)
        inject "$kind"
        echo "$EPOCHREALTIME $(date -u +%T) $kind $host at step $(step_of "$out")" >>"$work/injected"
        random 3 # one in three follows at once, the others wait until the run has recovered, or was not interrupted
        [ "$drawn" = 0 ] && [ "$incidents" -gt 6 ] || wait_for 15 more_lines "$before"
    done
    wait "${mending[@]}" 2>/dev/null
    [ "$i" -gt "$incidents" ] || fail "chaos: $incidents incidents" "the run ended after $((i - 1)) of them"
    supervised_ends "chaos: $incidents incidents under ${LAUNCHER:-mpirun}, seed ${SEED:-1}" 0 600 audit_passes \
        nothing_of_open_mpi
    wall=$(seconds_since "$start")
    cp "$out/incidents.jsonl" "$work/chaos-incidents.jsonl"
    "$program" "${train[@]}" --ranks 8 --steps "$steps" --out "$work/uninterrupted" >"$work/audit" 2>&1
    if [ "$(checkpoint_hash "$out")" = "$(checkpoint_hash "$work/uninterrupted")" ]; then
        pass "chaos: the checkpoint of a run without interruption on one host" "$(checkpoint_hash "$out")"
    else fail "chaos: the checkpoint of a run without interruption on one host" "another one"; fi
    chaos_report "$wall"
}
short_chaos() { INCIDENTS=6 chaos; }
