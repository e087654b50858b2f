# supervise_incidents.sh: how far a supervised run has come, what went wrong, and OUT/incidents.jsonl. Sourced by
# supervise, which sets out, metrics, incidents, hosts, slots, left_until, trained and work.

# ---------------------------------------------------------------- the state of the run, from its files
last_step() {
    tail -n 2 "$metrics" 2>/dev/null | grep -oE '^\{"step":[0-9]+' | tail -n 1 | grep -oE '[0-9]+' || echo 0
}
metrics_time() { stat -c %.6Y "$metrics" 2>/dev/null || echo 0; }
newest_checkpoint() {
    local name newest=0
    for name in "$out"/step-*; do
        name=${name##*/step-}
        if [[ $name =~ ^[0-9]+$ ]] && [ $((10#$name)) -gt "$newest" ]; then newest=$((10#$name)); fi
    done
    echo "$newest"
}
between() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.3f", (b > a ? b - a : 0) }'; }

# ---------------------------------------------------------------- incidents
json_text() { # TEXT
    local text=${1//\\/\\\\}
    text=${text//\"/\\\"}
    printf '"%s"' "${text//[[:cntrl:]]/ }"
}
json_list() { # WORD…; numbers stay numbers
    local word list=''
    for word; do
        [[ $word =~ ^[0-9]+$ ]] || word=$(json_text "$word")
        list+="${list:+,}$word"
    done
    printf '[%s]' "$list"
}

unwritten='' pending='' number=$(wc -l 2>/dev/null <"$incidents" || echo 0)

# Appends what is not written yet. If the disk is full, an incomplete line is removed and written later.
write_incidents() {
    local size
    [ -n "$unwritten" ] || return 0
    size=$(stat -c %s "$incidents" 2>/dev/null || echo 0)
    if printf '%s' "$unwritten" >>"$incidents"; then unwritten=''; else truncate -s "$size" "$incidents"; fi 2>/dev/null
}

# incident EXIT_CODE WORLD DETECTION: keeps the beginning of a line until the relaunch is complete
incident() {
    local step lost resumed
    step=$(last_step) resumed=$(newest_checkpoint) number=$((number + 1)) lost=0
    [ ! -e "$metrics" ] || lost=$(awk -F'"seconds":' -v resumed="$resumed" '/^\{"step":[0-9]+,"loss"/ {
        if (substr($1, 9) + 0 > resumed) sum += $2 + 0 } END { printf "%.3f", sum }' "$metrics")
    pending=$(printf '{"number":%d,"time":"%s","kind":"%s","message":%s,"hosts_named":%s,"ranks_named":%s,' "$number" \
        "$(date -u +%FT%TZ)" "$kind" "$(json_text "$message")" "$(json_list ${named[@]+"${named[@]}"})" \
        "$(json_list ${ranks[@]+"${ranks[@]}"})")
    pending+=$(printf '"exit_code":%s,"step":%d,"resumed_from_step":%d,"lost_steps":%d,"lost_s":%s,"detection_s":%s,' \
        "$1" "$step" "$resumed" $((step > resumed ? step - resumed : 0)) "$lost" "$3")
    pending+="\"world_before\":$2"
    ended_at=$EPOCHREALTIME back_off=null
}

# complete_incident WORLD RELAUNCH: `null` if there was no relaunch, or it did not reach a step
complete_incident() {
    local name out_now=()
    [ -n "$pending" ] || return 0
    for name in "${hosts[@]}"; do [ "${left_until[$name]}" = 0 ] || out_now+=("$name"); done
    unwritten+="$pending,\"world_after\":$1,\"hosts_left_out\":$(json_list ${out_now[@]+"${out_now[@]}"}),"
    unwritten+="\"back_off_s\":$back_off,\"relaunch_s\":$2}"$'\n'
    pending=''
    write_incidents
}

# Finds out from the lines of the program what happened: sets kind, message, named (hosts) and ranks. A failure blames
# what is lost, or else a rank that computes or reads; a rank that waits is not to blame.
judge() {
    local step line blame='' last
    local is_lost='host [^ ]+ with ranks?[ 0-9,]*[^a-z]* does not answer'
    is_lost+='|rank [0-9]+ on host [^ ]+ \(process [0-9]+\) (died|is stopped)'
    local is_busy='rank [0-9]+ on host [^ ]+ \(process [0-9]+\) has been (running|computing|reading|writing|starting)'
    kind='' message='' named=() ranks=() last=$(last_step)
    while read -r step line; do
        if [[ $line == error:* ]] && [ "$last" -gt $((step + 2)) ]; then continue; fi # of a library: training went on
        [ -n "$message" ] || message=$line
        [[ $message != error:* ]] || break
        blame=$(grep -oE "$is_lost" <<<"$line" || grep -oE "$is_busy" <<<"$line") || continue
        message=$line
        break
    done < <(cat "$work/said" 2>/dev/null)
    mapfile -t named < <(grep -oE 'host [^ ]+' <<<"$blame" | cut -d' ' -f2 | sort -u)
    mapfile -t ranks < <(grep -oE '(ranks?|,) [0-9]+' <<<"$blame" | grep -oE '[0-9]+')
    case $message in
        *"does not answer"*) kind="host does not answer" ;;
        *" died:"*) kind="rank died" ;;
        *" is stopped"*) kind="rank stopped" ;;
        *"not connected to all others"*) kind="hosts do not connect" ;;
        *" waited "* | *"no sign of life"*) kind="time-out" ;;
        error:*) kind="error" ;;
        failure:*) kind="failure" ;;
        *) kind="launcher died" ;;
    esac
}

# Returns 0 if a relaunch can succeed after this error: a disk was full or failed, or the error names a host that has
# not trained yet. `named` is then this host, which will be left out.
may_pass() {
    local name
    [[ $message =~ (No space left on device|Disk quota exceeded|Input/output error|Stale file handle) ]] && return
    [[ $message =~ "on host "([^ :]+) ]] || return
    name=$(listed_name "${BASH_REMATCH[1]}")
    [ "${#trained[@]}" -gt 0 ] && [ -n "$name" ] && [ -z "${trained[$name]:-}" ] && named=("$name")
}
