#!/usr/bin/env bash
# checkpoints.sh [PROGRAM] [all] [GROUP…] : whatever happens to a run that saves, it comes back from a whole checkpoint
# and ends with the bits of the run that nothing happened to; an export is whole, or is not there. Groups: shim, points
# (a crash at the n-th change of a file, power lost or not), kills (random ranks at random moments), errors (the n-th
# change fails), damage, refusals (what a save or an export cannot do), signals, after_save (the command that runs after
# each save). With `all` every n, and more kills.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
program=$(realpath "${1:-build/cpu-fp32/train_llama3}")
convert=$(program_for --export x) evaluate=$(program_for --eval x)
shift
all=
[ "${1:-}" != all ] || { all=1; shift; }
groups=${*:-shim points errors kills damage refusals signals after_save}
top=$PWD
work=$(mktemp -d)
started=() # processes that may be left over
mounted=
trap 'end_started; [ -z "$mounted" ] || umount "$mounted"; chattr -R -i "$work" 2>/dev/null; rm -rf "$work"' EXIT
cd "$work"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1 \
    LC_ALL=C OMPI_MCA_odls_base_sigkill_timeout=0 # mpirun would wait a second before it ends the ranks of a refused run

now() { echo $((${EPOCHREALTIME/./} / 1000)); } # ms
end_started() { for pid in ${started[@]+"${started[@]}"}; do kill -KILL "$pid" 2>/dev/null; done; }
gone() { ! kill -0 "$1" 2>/dev/null; }
wait_until() { # SECONDS COMMAND… : until COMMAND succeeds
    local limit=$(($(now) + $1 * 1000))
    shift
    until "$@"; do [ "$(now)" -lt "$limit" ] || return 1; sleep 0.02; done
}

# ---------------------------------------------------------------- a run that saves, and what is left of it
prepare() {
    "$top/dev/test/sample_text.sh" sample
    VOCAB_SIZE=600 "$top/dev/data/text.sh" text sample >.log 2>&1 || {
        cat .log
        fail "the data" "dev/data/text.sh refuses the text of dev/test/sample_text.sh"
        exit 1
    }
    mkdir model
    cat >model/config.json <<'END_OF_CONFIG'
{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
 "intermediate_size": 48, "vocab_size": 600, "max_position_embeddings": 256, "rope_theta": 500000}
END_OF_CONFIG
    run=("$program" --model "$work/model" --data "$work/text/train.tok" --seq 16 --batch 1 --threads 1 \
        --deterministic --out out --keep 2 --resume auto
        --lr 0.001 --min-lr 0.001) # a schedule that --steps does not change
    saves=(--steps 6 --save-every 2) # three checkpoints, of which the first is deleted
    mpi=(mpirun --oversubscribe --bind-to none) have_mpi=1
    if ! command -v mpirun >/dev/null || ! "${mpi[@]}" -np 1 "$program" --version >.log 2>&1 ||
        grep -q '^MPI: not in this build' .log; then
        have_mpi=
        echo "no mpirun, or a build without MPI: the checks with processes are left out"
    fi
    if [ "$(uname)" != Linux ]; then
        groups=$(printf '%s\n' $groups | grep -vxE 'shim|points|errors')
        echo "dev/test/crash_shim.c is for Linux: crash points are left out"
        return
    fi
    "${CC:-cc}" -O1 -shared -fPIC -o shim.so "$top/dev/test/crash_shim.c" -ldl &&
        "${CC:-cc}" -O1 -DTOOL -o tool "$top/dev/test/crash_shim.c" ||
        { fail "dev/test/crash_shim.c" "does not build"; exit 1; }
}

# in_folder FOLDER COMMAND… : there; what it says comes into FOLDER.log
in_folder() {
    local folder=$1
    shift
    (cd "$folder" && exec timeout -k 1 60 "$@" </dev/null >"$work/$folder.log" 2>&1)
}
# error_lines LOG : the lines with which a run ended, or its last line
error_lines() { grep -aE '^(error|failure): ' "$1" || tail -n 1 "$1"; }

sums() { (cd "$1/out" && sha256sum step-*/* && readlink latest) 2>/dev/null; }
figures() { sed -nE 's/^\{"step":([0-9]+),"loss":([^,]*),"grad_norm":([^,}]*).*/\1 \2 \3/p' "$1/out/metrics.jsonl"; }
newest() { ls -d "$1"/out/step-* 2>/dev/null | tail -n 1 | sed 's/.*step-0*//'; }
# the last step that FOLDER's log has behind a word
told() { sed -nE "s/.*$2.*step-0*([0-9]+).*/\1/p" "$1.log" | tail -n 1; }

# complaint FOLDER REFERENCE CODE : what is wrong with a run that ended with exit code CODE. Nothing: it is as
# if nothing had happened to it
complaint() {
    local left
    left=$(find "$1" -name '.saving-*' -o -name '.deleting-*' | head -n 3 | tr '\n' ' ')
    if [ "$3" != 0 ]; then echo "exit code $3: $(error_lines "$1.log")"
    elif [ "$(sums "$1")" != "$(sums "$2")" ]; then
        echo "other checkpoints: $(diff <(sums "$2") <(sums "$1") | grep -m2 '^[<>]' | tr '\n' ' ')"
    elif [ "$(figures "$1")" != "$(figures "$2")" ]; then
        echo "other figures in metrics.jsonl: $(diff <(figures "$2") <(figures "$1") | grep -m2 '^[<>]' | tr '\n' ' ')"
    elif [ -n "$left" ]; then echo "left behind: $left"
    fi
}

# ---------------------------------------------------------------- the file system that loses what was not synced finds
# out who saves badly
# lost_after HOW NAMES DATA : at how many crash points that saver's file is not whole, or older than it said
lost_after() {
    local how=$1 names=$2 data=$3 at said found points=0 lost=0
    for ((at = 1; at <= 20; at++)); do
        rm -rf dead
        mkdir -p dead/root dead/state
        CRASH_ROOT=dead/root CRASH_STATE=dead/state CRASH_AT=$at LD_PRELOAD=$work/shim.so "$work/tool" save dead/root \
            "$how" >dead/log 2>&1
        [ "$(wc -l <dead/state/calls)" = "$at" ] || break # it has finished
        points=$((points + 1))
        said=$(sed -n 's/^saved //p' dead/log | tail -n 1)
        if [ "$names" = kill ]; then found=$(cat dead/root/current 2>/dev/null)
        else
            ./tool rebuild dead/state dead/root dead/found "$names" "$data" "$at" &&
                found=$(tr '\0' 0 2>/dev/null <dead/found/current)
        fi
        if [ "${#found}" != 1000 ] && [ -n "$found$said" ] || [ -n "${found//${found:0:1}/}" ] ||
            [ "${found:0:1}" -lt "${said:-0}" ] 2>/dev/null; then
            lost=$((lost + 1))
        fi
    done
    echo "$lost of $points"
} 2>/dev/null

shim() {
    local how way lost
    for way in "kill -" "synced empty" "synced half" "all zeros" "all half" "mixed half"; do
        lost=$(lost_after whole $way)
        if [ "$lost" = "0 of 18" ]; then
            pass "a saver that syncs file and directory, $way" "its file is lost at $lost crash points"
        else
            fail "a saver that syncs file and directory, $way" \
                "its file is lost at $lost crash points, expected 0 of 18"
        fi
    done
    for how in "in-place kill -" "in-place synced empty" "rename synced empty" "rename all zeros" "rename all half" \
        "rename mixed half" "file synced empty"; do
        lost=$(lost_after $how)
        if [ "${lost%% *}" -gt 0 ]; then
            pass "a bad saver is caught: $how" "its file is lost at $lost crash points"
        else
            fail "a bad saver is caught: $how" "its file is lost at $lost crash points"
        fi
    done
    lost=$(lost_after rename kill -)
    if [ "$lost" = "0 of 12" ]; then
        pass "a saver that renames, killed with the power on" "its file is lost at $lost crash points"
    else
        fail "a saver that renames, killed with the power on" "its file is lost at $lost crash points, expected 0 of 12"
    fi
}

# ---------------------------------------------------------------- a crash at the n-th change of a file
# under_shim FOLDER AT COMMAND… : a run in FOLDER/root, with what is there; AT is CRASH_AT=n, it dies in place of the
# n-th call, or ERROR_AT=n, that call fails
under_shim() {
    local folder=$1 at=$2
    shift 2
    rm -rf "$folder/state"
    mkdir -p "$folder/root" "$folder/state"
    in_folder "$folder/root" env CRASH_ROOT=. CRASH_STATE="$work/$folder/state" "$at" LD_PRELOAD="$work/shim.so" "$@"
} 2>/dev/null

# crash_points MODE CALLS : all, or some, and of those by which the last checkpoint becomes one every other, sync and
# async in turns
crash_points() {
    if [ -n "$all" ]; then seq "$2"
    else
        seq $((${#1} + 4)) $(($2 / 4)) "$2"
        grep -E ' (rename|symlink|fsync /out$|fsync [^ ]*/.saving-[^/]*$)' "whole-$1/state/calls" | tail -n 8 |
            awk -v odd=$((${#1} % 2)) 'NR % 2 == odd { print $1 }'
    fi | sort -nu
}

# counted WORD… : how often each number occurs, ` 2 (3 times)`
counted() { printf '%s\n' "$@" | sort -n | uniq -c | awk '{ printf " %s (%s times)", $2, $1 }'; }

# points_of MODE : crash points of a run with --save-mode MODE; after each, what the disk may hold, and the same command
# again
points_of() {
    local mode=$1 command=("${run[@]}" "${saves[@]}" --ranks 2 --save-mode "$1") at calls what wrong said way code \
        dies=0
    local -A good=() bad=() from=()
    rm -rf "whole-$mode"
    under_shim "whole-$mode" CRASH_AT=0 "${command[@]}"
    code=$?
    wrong=$(complaint "whole-$mode/root" "whole-sync/root" "$code")
    [ -z "$wrong" ] || { fail "$mode: nothing happens" "$wrong"; return; }
    calls=$(wc -l <"whole-$mode/state/calls")
    for at in $(crash_points "$mode" "$calls"); do
        rm -rf dead
        under_shim dead "CRASH_AT=$at" "${command[@]}"
        code=$?
        [ "$code" = 137 ] || continue # it had fewer calls to make
        dies=$((dies + 1))
        what=$(tail -n 1 dead/state/calls)
        said=$(told dead/root saved)
        for way in "killed" "names as synced, empty files" "all names, zeros" "any names, half files"; do
            rm -rf found
            case $way in
                killed) cp -a dead/root found ;;
                names*) ./tool rebuild dead/state dead/root found synced empty ;;
                all*) ./tool rebuild dead/state dead/root found all zeros ;;
                any*) ./tool rebuild dead/state dead/root found mixed half "$at" ;;
            esac
            wrong=
            [ ! -L found/out/latest ] || [ -s found/out/latest/trainer.json ] ||
                wrong="latest leads to $(readlink found/out/latest), which is not whole"
            in_folder found "${command[@]}"
            wrong=${wrong:-$(complaint found whole-sync/root $?)}
            code=$(told found "resumed from") # the step that it came back from
            [ -n "$wrong" ] || [ "${code:-0}" -ge "${said:-0}" ] ||
                wrong="step $said was said to be saved, the run came back from step ${code:-0}"
            from[$way]+="${code:-0} "
            if [ -z "$wrong" ]; then good[$way]=$((${good[$way]:-0} + 1)); else bad[$way]+="call $what: $wrong; "; fi
        done
    done
    for way in "killed" "names as synced, empty files" "all names, zeros" "any names, half files"; do
        what="a crash while it saves, $mode, $way"
        if [ -n "${bad[$way]:-}" ] || [ "${good[$way]:-0}" != "$dies" ] || [ "$dies" -lt 5 ]; then
            fail "$what" "${good[$way]:-0} of $dies crash points are as they should be; ${bad[$way]:-}"
        else
            pass "$what" "$dies crash points of $calls; came back from step$(counted ${from[$way]})"
        fi
    done
}

# the run that comes back loses power, too, at some call
points_again() {
    local command=("${run[@]}" "${saves[@]}" --ranks 2) at calls count=0 second wrong bad= from=
    calls=$(wc -l <whole-sync/state/calls)
    RANDOM=3
    for ((at = 20; at <= calls; at += ${all:+-15} + 20)); do
        second=$((RANDOM % 50 + 1))
        rm -rf dead again found
        under_shim dead "CRASH_AT=$at" "${command[@]}"
        mkdir again
        ./tool rebuild dead/state dead/root again/root mixed half "$at"
        under_shim again "CRASH_AT=$second" "${command[@]}"
        ./tool rebuild again/state again/root found mixed zeros "$second"
        in_folder found "${command[@]}"
        wrong=$(complaint found whole-sync/root $?)
        [ -z "$wrong" ] || bad+="call $at, then call $(tail -n 1 again/state/calls): $wrong; "
        from+=" $(told found "resumed from")"
        count=$((count + 1))
    done
    if [ -n "$bad" ]; then
        fail "two crashes, one after the other" "$bad"
    else
        pass "two crashes, one after the other" "$count times; came back from step$from"
    fi
}

# an_export FOLDER COMMAND… : under the name of the export in FOLDER is nothing, or all of it; the same command then
# succeeds. Prints what is wrong
an_export() {
    local folder=$1 code
    shift
    if [ -e "$folder/exported" ] && ! diff -r whole-export/root/exported "$folder/exported" >.diff 2>&1; then
        echo "it is not whole: $(head -n 1 .diff)"
        return
    fi
    in_folder "$folder" "$@"
    code=$?
    if [ "$code" != 0 ]; then echo "exit code $code: $(error_lines "$folder.log")"
    else diff -r whole-export/root/exported "$folder/exported" 2>&1 | head -n 1; fi
}

# crash points of an export of the last checkpoint; after each, what the disk may hold, and the same command again
points_of_export() {
    local command=("$convert" --model "$work/whole-sync/root/out/step-00000006" --export exported --threads 1)
    local at calls wrong way dies=0 bad=""
    rm -rf whole-export
    under_shim whole-export CRASH_AT=0 "${command[@]}" ||
        { fail "an export: nothing happens" "$(error_lines whole-export/root.log)"; return; }
    calls=$(wc -l <whole-export/state/calls)
    for ((at = 1; at <= calls; at += ${all:+-2} + 3)); do
        rm -rf dead
        under_shim dead "CRASH_AT=$at" "${command[@]}"
        [ $? = 137 ] || continue
        dies=$((dies + 1))
        for way in "killed" "synced empty" "all zeros" "mixed half"; do
            rm -rf found
            if [ "$way" = killed ]; then cp -a dead/root found
            else ./tool rebuild dead/state dead/root found $way "$at"; fi
            wrong=$(an_export found "${command[@]}")
            [ -z "$wrong" ] || bad+="call $(tail -n 1 dead/state/calls), $way: $wrong; "
        done
    done
    if [ -n "$bad" ] || [ "$dies" -lt 5 ]; then fail "a crash during an export" "$dies crash points of $calls; $bad"
    else pass "a crash during an export" "$dies crash points of $calls; it was whole or missing, and then succeeded"; fi
}

points() { points_of sync; points_of async; points_again; points_of_export; }

# names_file LOG : it has one line of an error, which names a file under --out
names_file() {
    [ "$(grep -acE '^(error|failure): ' "$1")" = 1 ] && grep -a '^error: ' "$1" | grep -qE 'out.*Input/output error'
}

# in place of a crash, the n-th change of a file fails: the run ends with one line that names a file, or with all that
# it should have done
errors() {
    local command=("${run[@]}" "${saves[@]}" --ranks 2) at calls step=1 code wrong count=0 ended=0 bad="" ends
    rm -rf whole-sync
    under_shim whole-sync CRASH_AT=0 "${command[@]}"
    calls=$(wc -l <whole-sync/state/calls)
    [ -n "$all" ] || step=$((calls / 8))
    for ((at = 3; at <= calls; at += step)); do
        rm -rf dead
        under_shim dead "ERROR_AT=$at" "${command[@]}"
        code=$?
        count=$((count + 1))
        wrong=
        if [ "$code" = 1 ]; then
            ended=$((ended + 1))
            names_file dead/root.log || wrong="not one line that names a file: $(error_lines dead/root.log)"
        else
            wrong=$(complaint dead/root whole-sync/root "$code")
        fi
        [[ $wrong != "left behind"*/.deleting-* ]] || wrong= # the next run removes it
        in_folder dead/root "${command[@]}"
        wrong=${wrong:-$(complaint dead/root whole-sync/root $?)}
        [ -z "$wrong" ] || bad+="call $(sed -n "${at}p" dead/state/calls): $wrong; "
    done
    if [ -n "$bad" ] || [ "$ended" = 0 ]; then
        fail "a change of a file fails" "$bad"
    else
        ends="$ended runs ended with an error that names the file, the others did without"
        pass "a change of a file fails" \
            "$count calls of $calls; $ends; the next one had the bits of a run without errors"
    fi
}

# ---------------------------------------------------------------- random ranks killed at random moments
ranks_of() { # the processes that LAUNCHER started
    local stat line fields
    for stat in /proc/[0-9]*/stat; do # not every machine has ps
        { read -r line <"$stat"; } 2>/dev/null || continue
        read -r -a fields <<<"${line##*) }" # state, parent, …
        if [ "${fields[1]}" = "$1" ]; then echo "${line%% *}"; fi
    done
}

# kills_of RANKS COUNT MODE : each time the same command goes on with what the last one left; whole runs on the way are
# judged, too
kills_of() {
    local ranks=$1 count=$2 name="$1 processes, --save-mode $3" killed=0 whole=0 bad="" reached=""
    local code start took victim launcher wrong ends ms
    local command=("${mpi[@]}" -np "$ranks" "${run[@]}" --steps 60 --save-every 3 --save-mode "$3" --timeout 5)
    rm -rf unhurt hurt
    mkdir unhurt hurt
    start=$(now)
    in_folder unhurt "${command[@]}"
    wrong=$(complaint unhurt unhurt $?)
    took=$(($(now) - start))
    [ -z "$wrong" ] || { fail "$name: nothing happens" "$wrong"; return; }
    while [ "$killed" -lt "$count" ] && [ -z "$bad" ]; do
        (cd hurt && exec "${command[@]}" </dev/null >"$work/hurt.log" 2>&1) &
        launcher=$!
        started=("$launcher")
        ms=$((RANDOM % took))
        sleep "$((ms / 1000)).$(printf %03d $((ms % 1000)))"
        victim=$(ranks_of "$launcher" | sort -n | sed -n "$((RANDOM % ranks + 1))p")
        [ -n "$victim" ] && kill -KILL "$victim" 2>/dev/null && killed=$((killed + 1)) &&
            reached+=" $(figures hurt 2>/dev/null | tail -n 1 | cut -d' ' -f1)"
        if ! wait_until 15 gone "$launcher"; then
            bad="still running 15 s after rank process $victim was killed"
            end_started
        fi
        wait "$launcher" 2>/dev/null
        code=$?
        started=()
        if [ "$code" = 0 ] && [ -z "$bad" ]; then
            bad=$(complaint hurt unhurt 0)
            whole=$((whole + 1))
            rm -rf hurt
            mkdir hurt
        elif [ "$code" = 1 ]; then bad="$(grep -a '^error: ' hurt.log)"
        fi
    done
    [ -n "$bad" ] || { in_folder hurt "${command[@]}"; bad=$(complaint hurt unhurt $?); }
    if [ -n "$bad" ]; then
        fail "random ranks killed, $name" "after $killed kills: $bad"
    else
        ends="$((whole + 1)) came to their end with the bits of an unhurt run, which takes $took ms"
        pass "random ranks killed, $name" "$killed kills, after steps$reached; $ends"
    fi
}

kills() {
    [ -n "$have_mpi" ] || return
    RANDOM=7
    kills_of 2 $([ -n "$all" ] && echo 15 || echo 2) sync
    kills_of 3 $([ -n "$all" ] && echo 15 || echo 2) async
}

# ---------------------------------------------------------------- damaged checkpoints
# refused NAME PATTERN FOLDER COMMAND… : exit code 1, one line `error: …` like PATTERN, and the checkpoints that there
# were are as before
refused() {
    local name=$1 pattern=$2 folder=$3 before code after said kept
    shift 3
    before=$(sums "$folder")
    in_folder "$folder" "$@"
    code=$?
    after=$(sums "$folder")
    said=$(grep -a '^error: ' "$folder.log")
    kept=$(find "$folder"/out/.saving-* "$folder"/exported* -type f -size +0 2>/dev/null | head -n 1)
    if [ "$code" != 1 ]; then fail "$name" "exit code $code, expected 1: $(tail -n 1 "$folder.log")"
    elif [ "$(grep -c . <<<"$said")" != 1 ] || ! grep -qaE -- "$pattern" <<<"$said"; then
        fail "$name" "expected one line 'error: …$pattern…': ${said:-$(tail -n 1 "$folder.log")}"
    elif [ "$(grep -vxFc -- "$after" <<<"$before")" != 0 ]; then
        fail "$name" "checkpoints changed: $(diff <(echo "$before") <(echo "$after") | grep -m2 '^[<>]' | tr '\n' ' ')"
    elif [ -n "$kept" ]; then fail "$name" "keeps the room of $kept"
    else pass "$name" "${said#error: }"; fi
}

# flip FILE BYTE : one bit of it
flip() {
    local byte
    byte=$(od -An -tu1 -j "$2" -N 1 "$1")
    printf "$(printf '\\x%02x' $((byte ^ 16)))" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}

copy() { rm -rf "$1" && cp -a base "$1"; }
damage() {
    local resume file name size at last step=step-00000006
    rm -rf base
    mkdir base
    in_folder base "${run[@]}" "${saves[@]}" --ranks 2 || { fail "a run that saves" "$(tail -n 1 base.log)"; return; }
    resume=("${run[@]}" --steps 8 --ranks 2)
    for file in base/out/$step/*; do
        name=${file##*/}
        size=$(wc -c <"$file")
        for at in 0 $((size / 2)) $((size - 1)); do
            copy hurt
            flip "hurt/out/$step/$name" "$at"
            refused "$name with a flipped bit in byte $at" "$step/$name" hurt "${resume[@]}"
        done
        copy hurt
        truncate -s $((size - 7)) "hurt/out/$step/$name"
        refused "$name cut short by 7 bytes" "$step/$name" hurt "${resume[@]}"
        copy hurt
        rm "hurt/out/$step/$name"
        refused "$name missing" "$step/$name" hurt "${resume[@]}"
    done
    copy hurt
    mkdir hurt/other
    sed 's/"hidden_size": 32/"hidden_size": 64/' model/config.json >hurt/other/config.json
    refused "another model's checkpoint" "$step" hurt "${resume[@]}" --model other
    last=$(sums base)
    copy hurt
    in_folder hurt "${resume[@]}"
    if [ $? = 0 ] && [ "$(newest hurt)" = 8 ] && [ "$(sums base)" = "$last" ]; then
        pass "the same, undamaged" "resumes from step 6 and ends at 8"
    else
        fail "the same, undamaged" "$(tail -n 1 hurt.log)"
    fi
}

# ---------------------------------------------------------------- saves that cannot be
has_steps() { [ "$(figures "$1" 2>/dev/null | wc -l)" -ge "$2" ]; }
refusals() {
    local launcher before export=("$convert" --model out/step-00000006 --export exported --threads 1)
    rm -rf base
    mkdir base
    in_folder base "${run[@]}" "${saves[@]}" --ranks 2 || { fail "a run that saves" "$(tail -n 1 base.log)"; return; }

    mkdir two
    (cd two && exec "${run[@]}" --steps 100000000 --ranks 2 </dev/null >first 2>&1) &
    launcher=$!
    started=("$launcher")
    wait_until 20 has_steps two 3
    refused "two runs with one --out" "out.*(run|process)" two "${run[@]}" --steps 8
    if gone "$launcher"; then
        fail "the first of them goes on" "$(tail -n 1 two/first)"
    else
        pass "the first of them goes on" "$(grep -c '"loss"' two/out/metrics.jsonl) steps"
    fi
    kill -KILL "$launcher" 2>/dev/null
    wait "$launcher" 2>/dev/null
    started=()

    copy hurt
    if [ "$(id -u)" != 0 ]; then chmod 555 hurt/out; else chattr +i hurt/out 2>/dev/null; fi
    if touch hurt/out/probe 2>/dev/null; then
        echo "no way to make a directory that this user cannot write into: left out"
    else refused "a directory without permission" "out" hurt "${run[@]}" --steps 8 --ranks 2; fi
    chattr -i hurt/out 2>/dev/null
    chmod 755 hurt/out

    copy hurt
    before=$(du -k --apparent-size hurt/out/step-00000006/* | sort -n | tail -n 1 | cut -f1) # kB of the largest file
    (
        ulimit -f $((before / 2))
        refused "files may not grow so large" "out.*: File too large" hurt "${run[@]}" --steps 8 --ranks 2
        echo "$passed $failed" >counts
    )
    read -r passed failed <counts

    mkdir full
    if mount -t tmpfs -o size=64m tmpfs full 2>/dev/null; then
        mounted=$work/full
        cp -a base/. full/
        mount -o "remount,size=$(($(du -sk full | cut -f1) + $(du -sk full/out/step-00000006 | cut -f1) / 2))k" \
            "$mounted"
        refused "a full disk" "out.*: No space left on device" full "${run[@]}" --steps 8 --ranks 2
        before=$(du -k full/out/latest/model.safetensors | cut -f1)
        mount -o "remount,size=$(($(du -sk full | cut -f1) + before / 2))k" "$mounted"
        refused "a full disk: an export" "exported.*: No space left on device" full "${export[@]}"
        mount -o remount,size=64m "$mounted"
        in_folder base "${run[@]}" --steps 8 --ranks 2
        in_folder full "${run[@]}" --steps 8 --ranks 2
        before=$(complaint full base $?)
        if [ -z "$before" ]; then
            pass "with more room it goes on" "from step 6 to 8"
        else
            fail "with more room it goes on" "$before"
        fi
        if in_folder full "${export[@]}" && [ "$(echo full/exported*)" = full/exported ]; then
            pass "with more room the export succeeds" "$(ls full/exported | tr '\n' ' ')"
        else
            fail "with more room the export succeeds" "$(error_lines full.log); $(echo full/exported*)"
        fi
        umount "$mounted" && mounted=
    else echo "no tmpfs may be mounted: a full disk is left out"; fi
}

# ---------------------------------------------------------------- signals
newer_than() { [ "$(newest "$1")" != "$2" ]; } # FOLDER STEP

# saves_on NAME SIGNAL : the run in `told` saves when it gets SIGNAL; after USR1 it goes on
saves_on() {
    local name="$1: SIG$2 saves" before steps
    before=$(newest told)
    kill "-$2" "$launcher"
    if ! wait_until 10 newer_than told "$before"; then
        fail "$name" "no checkpoint within 10 s: $(tail -n 1 told.log)"
        end_started
        wait "$launcher" 2>/dev/null
        return 1
    fi
    [ "$2" = USR1 ] || return 0
    steps=$(wc -l <told/out/metrics.jsonl)
    if wait_until 10 has_steps told $((steps + 3)); then
        pass "$name and goes on" "step-$(newest told), then 3 more steps"
    else
        fail "$name and goes on" "no more steps: $(tail -n 1 told.log)"
    fi
}

# goes_on_after NAME SIGNAL LAUNCH… : two more steps after $steps have the bits of a run that got no signal
goes_on_after() {
    local name="$1: goes on after SIG$2" code wrong=""
    shift 2
    rm -rf untold
    mkdir untold
    in_folder untold "$@" --steps $((steps + 2)) && in_folder told "$@" --steps $((steps + 2))
    code=$?
    [ "$(cat untold/out/latest/* | sha256sum)" = "$(cat told/out/latest/* | sha256sum)" ] ||
        wrong="other bits in step-$(newest told) than in step-$(newest untold) of a run without signals"
    [ "$(figures untold)" = "$(figures told)" ] || wrong="other figures in metrics.jsonl"
    if [ "$code" = 0 ] && [ -z "$wrong" ]; then
        pass "$name" "step $steps to $((steps + 2)), the bits of a run without signals"
    else
        fail "$name" "exit code $code, $wrong: $(tail -n 1 told.log)"
    fi
}

# signalled NAME SIGNALS LAUNCH… : each of SIGNALS saves; the last one also ends the run with exit code 75, and what
# comes after has the bits of a run that got none
signalled() {
    local name=$1 signals=$2 launcher signal ends ended steps code
    shift 2
    rm -rf told
    mkdir told
    (cd told && exec "$@" --steps 100000000 </dev/null >"$work/told.log" 2>&1) &
    launcher=$!
    started=("$launcher")
    wait_until 20 has_steps told 3
    for signal in $signals; do saves_on "$name" "$signal" || return; done
    ends="$name: SIG$signal saves and ends"
    if ! wait_until 10 gone "$launcher"; then
        fail "$ends" "still running 10 s later: $(tail -n 1 told.log)"
        end_started
    fi
    wait "$launcher" 2>/dev/null
    code=$?
    started=()
    steps=$(figures told | tail -n 1 | cut -d' ' -f1)
    if [ "$code" != 75 ] || [ "$(newest told)" != "$steps" ]; then
        ended="exit code $code, the last step is $steps, the last checkpoint of step $(newest told)"
        fail "$ends" "$ended: $(tail -n 1 told.log)"
        return
    fi
    pass "$ends" "exit code 75, the last step and checkpoint is $steps"
    goes_on_after "$name" "$signal" "$@"
}

signals() {
    signalled "2 threads" "USR1 USR2" "${run[@]}" --ranks 2
    signalled "2 threads" TERM "${run[@]}" --ranks 2
    [ -z "$have_mpi" ] || signalled "2 processes" "USR1 USR2" "${mpi[@]}" -np 2 "${run[@]}"
}

# ---------------------------------------------------------------- --after-save
# commanded FOLDER COMMAND LAUNCH… : a run in a new FOLDER with --after-save COMMAND; sets `code` and `ms`
commanded() {
    local folder=$1 command=$2 start
    shift 2
    rm -rf "$folder"
    mkdir "$folder"
    start=$(now)
    in_folder "$folder" "$@" --after-save "$command"
    code=$?
    ms=$(($(now) - start))
}

# each_copied NAME LAUNCH… : a command that copies gets each checkpoint, whole and after `latest` has reached it, also
# those that --keep removes; a run resumes from the oldest copy and ends with the same bits
each_copied() {
    local name="$1: --after-save gets each checkpoint" path latest wrong="" copies="" command
    shift
    command='readlink out/latest >>latest; sleep 0.3; echo "$1" >>paths; mkdir -p copies; cp -r "$1" copies'
    commanded copied "$command" "$@" "${saves[@]}"
    mkdir -p copied/copies
    while read -r path latest; do
        copies+="${path##*/} "
        [ "$path" = "$work/copied/out/${path##*/}" ] || wrong="\"\$1\" is $path"
        [[ ! ${path##*/} > $latest ]] || wrong="latest leads to $latest when the command for $path starts"
    done < <(paste -d ' ' copied/paths copied/latest)
    [ "$copies" = "step-00000002 step-00000004 step-00000006 " ] || wrong="the commands got: $copies"
    for path in 4 6; do
        diff -r copied/out/step-0000000$path copied/copies/step-0000000$path >/dev/null || wrong="another copy of $path"
    done
    [ "$(ls -d copied/out/step-* | wc -l)" = 2 ] || wrong="--keep 2 leaves $(ls copied/out | grep step- | tr '\n' ' ')"
    if [ "$code" = 0 ] && [ -z "$wrong" ]; then pass "$name" "$copies; --keep 2 leaves two of them"
    else fail "$name" "exit code $code, $wrong: $(tail -n 1 copied.log)"; fi

    name="${name%%:*}: a run resumes from the copy of a checkpoint that --keep has removed"
    rm -rf again
    mkdir again
    in_folder again "$@" --steps 6 --resume ../copied/copies/step-00000002
    code=$?
    if [ "$code" = 0 ] && diff -r copied/out/step-00000006 again/out/step-00000006 >/dev/null; then
        pass "$name" "its checkpoint of step 6 has the same bytes"
    else fail "$name" "exit code $code: $(tail -n 1 again.log)"; fi
}

# failing_command NAME COMMAND HOW LAUNCH… : the run says for each checkpoint that the command ended HOW, and ends well
failing_command() {
    local name="$1: --after-save \"$2\" is reported and not fatal" command=$2 how=$3 note notes
    shift 3
    note="^note: --after-save failed for out/step-0000000[246]: the command ended $how; its output"
    commanded failing "$command" "$@" "${saves[@]}"
    notes=$(grep -cE "$note" failing.log)
    if [ "$code" = 0 ] && [ "$notes" = 3 ] && [ "$(grep -c broken failing/out/after-save.log)" = 3 ]; then
        pass "$name" "$(grep -m1 '^note: --after-save' failing.log)"
    else fail "$name" "exit code $code, $notes notes, expected 3: $(tail -n 1 failing.log)"; fi
}

# slow_command NAME LAUNCH… : all steps are trained while the first command runs; the run waits for the last command,
# for longer than ranks may wait for each other; a checkpoint that --keep 1 removed before its turn is reported
slow_command() {
    local name="$1: a slow --after-save does not delay training, and the run waits for it" trained wrong=""
    local removed="^note: --after-save was not run for out/step-00000004: "
    shift
    commanded slow 'sleep 2; wc -l <out/metrics.jsonl >>trained; ls "$1/trainer.json" >>whole' \
        "$@" "${saves[@]}" --keep 1 --timeout 0.4
    trained=$(tr '\n' ' ' <slow/trained)
    [ "$trained" = "6 6 " ] || wrong+=", $trained steps when the commands ended, expected 6 6"
    [ "$(wc -l <slow/whole)" = 2 ] || wrong+=", $(wc -l <slow/whole) checkpoints at the end of their commands"
    [ "$(ls -d slow/out/step-*)" = slow/out/step-00000006 ] || wrong+=", left $(ls slow/out | tr '\n' ' ')"
    grep -q "$removed" slow.log || wrong+=", no note about step 4"
    if [ "$code" = 0 ] && [ -z "$wrong" ]; then
        pass "$name" "two commands of 2 s, the run took $ms ms; $(grep -m1 '^note: --after-save' slow.log)"
    else fail "$name" "exit code $code$wrong: $(tail -n 1 slow.log)"; fi
}

lines_in() { [ "$(wc -l 2>/dev/null <"$1" || echo 0)" -ge "$2" ]; } # FILE COUNT

# signals to mpirun while a command runs
undisturbed_command() {
    local name="2 processes: signals to the launcher do not reach the command of --after-save" launcher code
    rm -rf told
    mkdir told
    (cd told && exec "${mpi[@]}" -np 2 "${run[@]}" --steps 100000000 \
        --after-save 'echo >>begun; sleep 1; echo >>done' </dev/null >"$work/told.log" 2>&1) &
    launcher=$!
    started=("$launcher")
    wait_until 20 has_steps told 3
    kill -USR1 "$launcher"
    wait_until 10 lines_in told/begun 1
    kill -USR1 "$launcher"
    wait_until 10 lines_in told/begun 2
    kill -USR2 "$launcher"
    wait "$launcher"
    code=$?
    started=()
    if [ "$code" = 75 ] && lines_in told/done 3; then pass "$name" "exit code 75, three commands have ended"
    else fail "$name" "exit code $code, $(wc -l <told/done) of 3 commands ended: $(tail -n 1 told.log)"; fi
}

# killed_run NAME LAUNCH… : whoever reads the output of a run is not kept waiting by a command that outlives the run
killed_run() {
    local name="$1: a running command of --after-save does not keep the output of a killed run open" launcher reader
    local start rank
    shift
    rm -rf told
    mkdir told
    mkfifo told/output
    cat told/output >told.log &
    reader=$!
    (cd told && exec "$@" --steps 100000000 --save-every 10 --after-save 'echo $$ >>begun; sleep 20' \
        </dev/null >output 2>&1) &
    launcher=$!
    started=("$launcher" "$reader")
    wait_until 20 lines_in told/begun 1
    start=$(now)
    rank=$(ranks_of "$launcher" | sort -n | head -n 1)
    [ "$1" = mpirun ] || rank=$launcher
    kill -KILL "$rank"
    [ "$rank" != "$launcher" ] || wait "$launcher" 2>/dev/null
    if wait_until 10 gone "$reader"; then pass "$name" "closed after $(($(now) - start)) ms"
    else fail "$name" "still open 10 s after the kill: $(tail -n 1 told.log)"; fi
    end_started
    kill -KILL -- "-$(cat told/begun)" # its process group
    wait "$launcher" 2>/dev/null
    started=()
}

# a command of a rank under mpirun starts a program that would connect to other ranks, were it a rank itself
program_as_command() {
    local name="2 processes: the command of --after-save can run eval_llama3"
    commanded evaluated "'$evaluate' --model \"\$1\" --eval '$work/text/train.tok' --seq 16 --threads 1" \
        "${mpi[@]}" -np 2 "${run[@]}" --steps 2
    if [ "$code" = 0 ] && grep -q '^{"file":.*"loss":' evaluated/out/after-save.log; then
        pass "$name" "$(grep '^{' evaluated/out/after-save.log)"
    else fail "$name" "exit code $code: $(tail -n 1 evaluated/out/after-save.log)"; fi
}

after_save() {
    each_copied "2 threads" "${run[@]}" --ranks 2
    failing_command "2 threads" "echo broken; exit 3" "with exit code 3" "${run[@]}" --ranks 2
    failing_command "2 threads, async" 'echo broken; kill -KILL $$' "by signal 9" "${run[@]}" --ranks 2 \
        --save-mode async
    slow_command "2 threads" "${run[@]}" --ranks 2
    killed_run "2 threads" "${run[@]}" --ranks 2
    [ -n "$have_mpi" ] || return
    each_copied "2 processes" "${mpi[@]}" -np 2 "${run[@]}"
    failing_command "2 processes" "echo broken; exit 3" "with exit code 3" "${mpi[@]}" -np 2 "${run[@]}"
    slow_command "2 processes" "${mpi[@]}" -np 2 "${run[@]}"
    killed_run "2 processes" "${mpi[@]}" -np 2 "${run[@]}"
    undisturbed_command
    program_as_command
}

prepare
for group in $groups; do
    start=$(now)
    "$group"
    echo "$group: $(($(now) - start)) ms"
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
