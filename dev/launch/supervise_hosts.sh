# supervise_hosts.sh: the hosts of a supervised run, and the layouts that fit on them. Sourced by supervise, which sets
# hosts, slots (ranks of each host), ssh, launcher, run, command, planner, and the sizes of the full layout.
#
#   left_until[HOST]  0: the host may be used; else the second from which it may be used again
#   blamed[HOST]      how many incidents named the host, or found that it did not answer
#   running           number of the launch that runs; '': none does

# ---------------------------------------------------------------- hosts
# at HOST SCRIPT ARGUMENT…: runs a shell script there, within ten seconds
at() {
    local reach=()
    if [ "$launcher" = srun ]; then reach=(srun --overlap --mpi=none --quiet -N 1 -n 1 -w "$1")
    else read -ra reach <<<"$ssh $1"; fi
    if [ "$1" = "$(hostname)" ] || [ "$1" = "$(hostname -s)" ]; then reach=(); fi
    timeout -k 1 10 ${reach[@]+"${reach[@]}"} sh -s -- "${@:3}" <<<"$2"
} 2>/dev/null 9>&-

# The script that cleans a host. It kills all processes of run $1, including stopped ones and orted, except those of
# launch $2. Then it removes shared memory that killed processes have left: files of this user that no process has
# mapped. It prints the name by which the host calls itself.
clean='for process in $(grep -lz -e "^LLAMA3_RUN=$1-" /proc/[0-9]*/environ) \
        $(grep -lz -e "^run-$1-" /proc/[0-9]*/cmdline); do
        process=${process%/*}
        grep -qzxF -e "LLAMA3_RUN=$1-$2" $process/environ || grep -qzxF -e "run-$1-$2" $process/cmdline ||
            kill -KILL ${process#/proc/}
    done
    for file in /dev/shm/vader_segment.$(hostname).$(id -u).* /dev/shm/llama3-$(id -u)-*; do
        [ ! -e $file ] || grep -qF -e $file /proc/[0-9]*/maps || rm -f $file
    done
    hostname'

# exit_of PROCESS: waits for its end, also if signals arrive meanwhile, and returns its exit code
exit_of() {
    local exit_code
    while :; do
        wait "$1"
        exit_code=$?
        [ "$exit_code" -gt 128 ] && kill -0 "$1" 2>/dev/null || return "$exit_code"
    done
}

# visit HOST…: cleans these hosts, all at once; sets `silent` to those that do not answer
visit() {
    local name i=0 processes=()
    silent=()
    for name; do
        at "$name" "$clean" "$run" "${running:-none}" >"$work/name.$name" &
        processes+=($!)
    done
    for name; do
        if exit_of "${processes[i]}"; then real_name[$(cat "$work/name.$name")]=$name; else silent+=("$name"); fi
        i=$((i + 1))
    done
}

# listed_name HOST: the name of a host in the list, where it may have another one than it calls itself; '': none
listed_name() {
    if [ -z "$1" ] || [ -n "${slots[$1]:-}" ]; then echo "$1"; else echo "${real_name[$1]:-}"; fi
}

# leave_out HOST…: hosts of the list, or as they call themselves
leave_out() {
    local name
    for name; do
        name=$(listed_name "$name")
        [ -n "$name" ] || continue
        left_until[$name]=$((EPOCHSECONDS + return_after)) blamed[$name]=$((blamed[$name] + 1))
    done
}

# take_back SINCE: hosts that may return by then are used again if they answer
take_back() {
    local name due=()
    for name in "${hosts[@]}"; do
        if [ "${left_until[$name]}" != 0 ] && [ "${left_until[$name]}" -le "$1" ]; then due+=("$name"); fi
    done
    [ ${#due[@]} -gt 0 ] || return 1
    visit "${due[@]}"
    for name in "${due[@]}"; do left_until[$name]=0; done
    for name in ${silent[@]+"${silent[@]}"}; do left_until[$name]=$((EPOCHSECONDS + return_after)); done
    [ ${#silent[@]} -lt ${#due[@]} ]
}

# ---------------------------------------------------------------- layouts
is_power_of_two() { [ $(($1 & ($1 - 1))) = 0 ]; }

# layout_options D: the options of a layout with D data-parallel ranks. Shards keep their size if that is possible.
layout_options() {
    local d=$1 replicas=1
    if [ "$shard" != auto ] && [ $((d % shard)) = 0 ]; then replicas=$((d / shard)); fi
    if [ "$shard" = auto ] && [ "$replicate" != auto ] && [ $((d % replicate)) = 0 ]; then replicas=$replicate; fi
    layout=(--accum $((accum * full_data_ranks / d)))
    if [ "$d" != "$full_data_ranks" ]; then layout+=(--dp-shard $((d / replicas)) --dp-replicate "$replicas"); fi
}

# Sets `options` to those of the run, without --trace: a plan has a timeline only if it has a cluster file.
options_of_plan() {
    local i
    options=()
    for ((i = 1; i < ${#command[@]}; i++)); do
        case ${command[i]} in
            --trace=*) ;;
            --trace) i=$((i + 1)) ;; # the next word is its value
            *) options+=("${command[i]}") ;;
        esac
    done
}

# Does plan_llama3 accept the layout? It writes its plan to a directory, which must not contain another plan. What it
# says about layouts that it refuses is collected in `refusals`.
layout_fits() {
    local d=$1 world=$(($1 * model_ranks)) options
    [ "$d" != "$full_data_ranks" ] || return 0
    if [ -z "${fits[$d]:-}" ]; then
        rm -rf "$work/plan"
        options_of_plan
        "$planner" "${options[@]}" "${layout[@]}" --world "$world" --simulate stages --out "$work/plan" >/dev/null \
            2>"$work/plan-errors" 9>&-
        fits[$d]=$?
        [ "${fits[$d]}" = 0 ] ||
            refusals+="supervise: plan_llama3 with $world ranks: $(tail -n 1 "$work/plan-errors")"$'\n'
    fi
    [ "${fits[$d]}" = 0 ]
}

# Chooses the largest layout of the available hosts, those that failed least often first. Sets world, layout, and used,
# a list of HOST:RANKS. If there is none, it prints why plan_llama3 has refused layouts, and returns 1.
choose_layout() {
    local name d left ranks=0 available=()
    while read -r _ name; do
        [ "${left_until[$name]}" = 0 ] || continue
        available+=("$name") ranks=$((ranks + slots[$name]))
    done < <(for name in "${hosts[@]}"; do echo "${blamed[$name]} $name"; done | sort -s -n -k 1,1)
    for ((d = full_data_ranks; d > 0; d--)); do
        world=$((d * model_ranks)) left=$((d * model_ranks)) used=()
        if [ "$world" -gt "$ranks" ] || [ $((accum * full_data_ranks % d)) != 0 ]; then continue; fi
        [ -z "$deterministic" ] || [ "$d" = "$full_data_ranks" ] || is_power_of_two "$d" || continue
        layout_options "$d"
        layout_fits "$d" || continue
        for name in "${available[@]}"; do
            [ "$left" -gt 0 ] || break
            used+=("$name:$((left < slots[$name] ? left : slots[$name]))") left=$((left - slots[$name]))
        done
        return 0
    done
    printf '%s' "$refusals" >&2
    refusals=''
    return 1
}
