#!/usr/bin/env bash
# bad_input.sh [PROGRAM [GROUP]]: whatever a user gets wrong ends in one sentence with what was given and what to do.
# A refused run prints one line `error: …` in all (not one a rank), exits with 1 within 5 seconds, leaves no stack
# trace, and no file that was there before is changed. `pass` lines show the sentence, so that people can judge it.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
program=$(realpath "${1:-build/cpu-fp32/train_llama3}")
generator=$(program_for --prompt) evaluator=$(program_for --eval) converter=$(program_for --export)
planner=$(program_for --plan) tokens=${program%/*}/tokens_llama3 hosts=${program%/*}/check_hosts
top=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1 \
    LC_ALL=C OMPI_MCA_odls_base_sigkill_timeout=0 # mpirun would wait a second before it ends the ranks of a refused run

# ---------------------------------------------------------------- how a run is judged

state() { find . -type f ! -name .log -printf '%C@ %i %p\n' | sort; } # whoever writes to a file changes its ctime

# what is wrong with a refusal that left `.log` and the exit code $1; the sentence has to match $2. Nothing: it is as it
# should be
complaint() {
    local code=$1 pattern=$2 log sentence rest
    log=$(tr -d '\0' <.log)
    sentence=$'\n'$log
    sentence=${sentence#*$'\n'error: } rest=${sentence#*$'\n'} sentence=error:\ ${sentence%%$'\n'*}
    if [ "$code" = 124 ]; then echo "still running after 5 s"
    elif [[ $log =~ Sanitizer|Segmentation|core\ dumped|Assertion|smashing|process\ received\ signal|Failing\ at ]]; \
        then
        echo "a crash: $(tail -n 1 .log)"
    elif [[ $'\n'$log != *$'\n'error:\ * || $'\n'$rest = *$'\n'error:\ * ]]; then
        echo "$(grep -ac '^error: ' \
            .log) lines begin with 'error: ', expected 1; exit code $code; the output ends with:" \
            "$(tail -n 2 .log | tr '\n' ' ')"
    elif [ "$code" != 1 ]; then echo "exit code $code, expected 1; $sentence"
    elif ! [[ $sentence =~ $pattern ]]; then echo "the sentence does not match '$pattern': $sentence"
    fi
}

# judge PATTERN COMMAND… : runs it; into `wrong` what is wrong with how it was refused, into `took` its milliseconds
judge() {
    local pattern=$1 before after code changed=''
    shift
    before=$(state)
    took=${EPOCHREALTIME/./}
    timeout -k 1 5 "$@" </dev/null >.log 2>&1
    code=$?
    took=$(((${EPOCHREALTIME/./} - took) / 1000))
    wrong=$(complaint "$code" "$pattern")
    after=$(state)
    [ "$before" = "$after" ] || changed=$(comm -23 <(echo "$before") <(echo "$after") | cut -d' ' -f3- | tr '\n' ' ')
    [ -z "$changed" ] || wrong="changed or removed: $changed${wrong:+; $wrong}"
}

# refused NAME PATTERN COMMAND… : COMMAND as a whole is refused as the head of this file says
refused() {
    local name=$1 wrong took
    shift
    judge "$@"
    if [ -n "$wrong" ]; then
        fail "$name" "$wrong"
    else
        pass "$name" "$took ms, $(grep -am1 '^error: ' .log | cut -c8-)"
    fi
}

by=
# bad NAME PATTERN OPTIONS… : the program that takes these options refuses them on one rank. Where the options do not
# tell which program is meant, by=PROGRAM before the call does.
bad() { local name=$1 pattern=$2; shift 2; refused "$name" "$pattern" "${by:-$(program_for "$@")}" "$@"; }

# everywhere NAME PATTERN OPTIONS… : also on three ranks as threads, and on two as processes
everywhere() {
    local name=$1 pattern=$2 by
    shift 2
    by=$(program_for "$@")
    refused "$name" "$pattern" "$by" "$@"
    refused "$name, 3 threads" "$pattern" "$by" "$@" --ranks 3
    [ -z "$have_mpi" ] || refused "$name, 2 processes" "$pattern" "${mpi[@]}" -np 2 "$by" "$@"
}

of_tokens() { by=$tokens bad "$@"; } # tokens_llama3 refuses the options

# converted NAME DIR TARGET [OPTION…] : the last checkpoint of the run in DIR becomes the model TARGET
converted() {
    local name=$1 dir=$2 target=$3
    shift 3
    works "$name" "$converter" --model "$dir/latest" --export "$target" "$@"
}

# works NAME COMMAND… : the neighbour of a bad input that is good
works() {
    local name=$1 code
    shift
    timeout -k 1 20 "$@" </dev/null >.log 2>&1
    code=$?
    if [ "$code" = 0 ]; then pass "$name" "exit code 0"; else fail "$name" "exit code $code: $(tail -n 1 .log)"; fi
}

# ---------------------------------------------------------------- good input, and tools to spoil it
# le BYTES NUMBER : little-endian
le() {
    local i byte text='' n=$2
    for ((i = 0; i < $1; i++, n >>= 8)); do printf -v byte '\\x%02x' $((n & 255)); text+=$byte; done
    printf '%b' "$text"
}

# spoil NEW OLD OFFSET BYTES NUMBER : a copy with one number of a binary file replaced
spoil() { cp "$2" "$1" && le "$4" "$5" | dd of="$1" bs=1 seek="$3" conv=notrunc status=none; }

# config DIR [SED…] : a directory with the good config.json, changed
config() {
    mkdir -p "$1"
    sed -E "${2:-}" >"$1/config.json" <<'END'
{
  "model_type": "llama",
  "hidden_size": 32,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "intermediate_size": 48,
  "vocab_size": 600,
  "max_position_embeddings": 256,
  "attention_bias": false,
  "rope_theta": 500000,
  "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
                   "original_max_position_embeddings": 128}
}
END
}

fixture=$top/dev/test/fixtures/base
header_length=$(($(od -An -tu8 -N8 "$fixture/model.safetensors")))
header() { tail -c +9 "$fixture/model.safetensors" | head -c "$header_length"; }

# weights DIR : the fixture's directory with the header of its weights taken from stdin
weights() {
    mkdir -p "$1"
    cp "$fixture/config.json" "$1/"
    cat >"$1/.header"
    { le 8 "$(wc -c <"$1/.header")"; cat "$1/.header"; tail -c +$((9 + header_length)) "$fixture/model.safetensors"; \
        } >"$1/model.safetensors"
    rm "$1/.header"
}

prepare() {
    "$top/dev/test/sample_text.sh" sample
    VOCAB_SIZE=600 "$top/dev/data/text.sh" good sample/0?.txt >.log 2>&1 || {
        cat .log
        fail "the good input" "dev/data/text.sh refuses the text of dev/test/sample_text.sh"
        exit 1
    }
    config model
    train=(--model model --data good/train.tok --seq 16 --batch 1 --steps 1 --threads 1)
    works "the good input trains" "$program" "${train[@]}" --out first
    converted "the trained model is exported" first trained
    { printf LLM3TOK1; le 4 1; le 4 2; le 4 256; le 4 0; le 8 100; head -c 32 /dev/zero; for ((i = 0; i < 100; i++)); \
        do le 2 $((i * 37 % 256)); done; } >bytes.tok
    evaluate=(--eval bytes.tok --seq 8 --batch 1 --threads 1)
    works "the good weights are evaluated" "$evaluator" --model "$fixture" "${evaluate[@]}"
    mpi=(mpirun --oversubscribe --bind-to none) have_mpi=1
    if ! command -v mpirun >/dev/null || ! "${mpi[@]}" -np 1 "$program" "${train[@]}" >.log 2>&1; then
        have_mpi=
        echo "no mpirun, or a build without MPI: the cases with processes are left out"
    fi
}

# ---------------------------------------------------------------- the command line
options_of_model="model vocab-size tokenizer tp cp pp dp-shard dp-replicate pp-schedule pp-chunks pp-light-ends
    sharding wrap slots lora-rank lora-alpha lora-targets base adapters threads timeout transport ranks
    deterministic help version"
contract="$options_of_model data val tail workers doc-mask seq batch accum accumulate reduce-dtype offload recompute
    logit-rows steps lr min-lr warmup weight-decay beta1 beta2 eps clip optimizer out save-every
    save-mode keep after-save resume allow-changes val-every val-batches seed trace recipe lr-schedule
    z-loss outlier-window"

# lists_options PROGRAM OPTION… : --help of PROGRAM names each option, on one screen; it is left in help.PROGRAM
lists_options() {
    local listing=$1 name=${1##*/} code missing='' option help
    shift
    help=help.$name
    "$listing" --help >"$help" 2>.log
    code=$?
    for option in "$@"; do grep -qE -- " --$option( |$)" "$help" || missing+=" --$option"; done
    if [ "$code" != 0 ] || [ -s .log ]; then fail "$name --help" "exit code $code, on stderr: $(head -n 1 .log)"
    elif [ -n "$missing" ]; then fail "$name --help lists every option" "missing:$missing"
    elif [ "$(wc -l <"$help")" -gt 50 ]; then fail "$name --help lists every option" "$(wc -l <"$help") lines"
    else pass "$name --help lists every option" "$# of $#, $(wc -l <"$help") lines"; fi
}

# explains PROGRAM GROUP FIRST LAST : --help GROUP explains its options, of which FIRST and LAST are the outermost
explains() {
    "$1" --help "$2" >group 2>.log
    local code=$? first last
    first=$(sed -nE '1,2s/^  (--[a-z-]+) .*/\1/p' group) last=$(sed -nE 's/^  (--[a-z-]+) .*/\1/p' group | tail -n 1)
    if [ "$code" = 0 ] && [ "$(head -n 1 group)" = "$2" ] && [ "$first $last" = "$3 $4" ]; then
        pass "${1##*/} --help $2 explains the group" "$first to $last, $(wc -l <group) lines"
    else fail "${1##*/} --help $2 explains the group" "exit code $code, '$first' to '$last': $(head -n 1 .log)"; fi
}

help_of_groups() {
    explains "$program" mesh --tp --dp-replicate
    explains "$generator" mesh --tp --dp-replicate
    explains "$program" run --out --version
}

# shellcheck disable=SC2086
help_text() {
    local each
    lists_options "$program" $contract
    lists_options "$generator" $options_of_model prompt prompts chat max-tokens temperature top-p seq seed
    lists_options "$evaluator" $options_of_model eval score choices seq batch doc-mask
    lists_options "$converter" $options_of_model export dtype merge
    lists_options "$planner" $contract cluster search simulate world mtbf hosts spares repair detect relaunch \
        step-seconds save-seconds pause-seconds plan
    lists_options "$hosts" $contract cluster
    lists_options "$tokens" tokenizer out-train out-val val-fraction field conversations pack threads slice \
        save-seconds train-tokenizer vocab-size upgrade encode decode audit out help version
    help_of_groups
    for each in "$program" "$generator" "$evaluator" "$converter" "$planner" "$hosts"; do version_of "$each"; done
}

# version_of PROGRAM : --version says what a bug report needs, in lines "what: …"
version_of() {
    local name=${1##*/} code missing='' what features
    "$1" --version >version 2>.log
    code=$?
    for what in precision compiler "the build uses" "this processor has" MPI cJSON zlib; do
        grep -qE "^$what: .+" version || missing+=" $what"
    done
    grep -qE "^$name [0-9]+\.[0-9]+\.[0-9]+, commit ([^ ]*[0-9a-f]{7,}(-dirty)?|unknown)$" version || missing+=" commit"
    grep -qE "^cJSON: [0-9]+\.[0-9]+\.[0-9]+$" version || missing+=" the number of cJSON"
    features=$(sed -n 's/^this processor has: //p' version)
    if grep -qw avx512_bf16 /proc/cpuinfo && [[ $features != *AVX512_BF16* ]]; then missing+=" AVX512_BF16"; fi
    if [ "$code" != 0 ] || [ -s .log ] || [ -n "$missing" ]; then
        fail "$name --version" "exit code $code, missing:$missing, on stderr: $(head -n 1 .log)"
    else
        pass "$name --version" "$(tr '\n' ';' <version)"
    fi
}

# bad_values NAME VALUE… : the option refuses each of the values, added to the command in `working`
bad_values() {
    local name=$1 value wrong took
    shift
    for value; do
        judge "--$name .*(expected|needs a value)" "${working[@]}" "--$name" "$value"
        [ -z "$wrong" ] || { fail "--$name '$value', ${working[0]##*/}" "$wrong"; return; }
    done
    pass "values of --$name, ${working[0]##*/}" "$# bad ones refused; the last: $(grep -am1 '^error: ' .log | cut -c8-)"
}

# values_listed : the options in lines of --help on standard input. With a number: letters, nothing, two numbers, a
# number and more, beyond its range; a fraction where it is whole. With choices: nothing, all of them, another one.
values_listed() {
    local name kind number='N|T|B|K|R|V|X|SEQ|BYTES|SECONDS|HOURS|N\|auto' choices='[a-z0-9_]+\|[a-z0-9_:N|]+'
    while read -r name kind; do
        case $kind in
        X | SECONDS | HOURS) bad_values "$name" seven "" "1 2" 3x nan inf -5 1e400 ;;
        [A-Z] | SEQ | BYTES | 'N|auto') bad_values "$name" seven "" "1 2" 3x nan inf -5 1e400 2.5 99999999999 ;;
        *) bad_values "$name" "" "$kind" nonsense ;;
        esac
    done < <(sed -nE "s/^  --([a-z0-9-]+) ($number|$choices)( .*)?$/\1 \2/p")
}

option_values() {
    local working=("$program" "${train[@]}") known=help.${program##*/}
    "$program" --help all >"$known"
    values_listed <"$known"
    bad_values wrap size size: size:0 size:-5 size:3x size:N size:99999999999999999999 block:3 :3
    bad_values recompute every every: every:0 every:-1 every:2.5 every:N full:2 none:
    bad_values pp-schedule gpipe 1f1b:2
    # the options that other programs do not share with the trainer
    working=("$generator" --prompt hello)
    values_listed < <(grep -vxFf "$known" "help.${generator##*/}")
    working=("$converter" --export none)
    values_listed < <(grep -vxFf "$known" "help.${converter##*/}")
    working=("$planner" --world 2)
    values_listed < <(grep -vxFf "$known" "help.${planner##*/}")
    working=("$tokens" --tokenizer good/tokenizer.model --out-train none.tok --out-val none.tok sample/00.txt)
    values_listed <"help.${tokens##*/}"
}

command_line() {
    local option
    everywhere "an unknown option" "--modle.*--help" "${train[@]}" --modle tiny
    everywhere "an unknown group of options" "--help meshes: expected all, or a group" --help meshes
    bad "a stray word" "unknown option tiny" "${train[@]}" tiny
    bad "one dash" "unknown option -seq" "${train[@]}" -seq 16
    bad "two options as one" 'unknown option --tp\|cp' "${train[@]}" '--tp|cp' 1
    bad "an option of 5,000 letters" "unknown option" "${train[@]}" "--$(printf 'x%.0s' {1..5000})"
    bad "a flag with a value" "--deterministic takes no value" "${train[@]}" --deterministic=yes
    everywhere "a value that is no number" "--steps many: expected a whole number" "${train[@]}" --steps many
    bad "more loader workers than there may be" "--workers 65: expected a whole number from 0 to 64" "${train[@]}" \
        --workers 65
    works "more loader workers than samples" "$program" "${train[@]}" --workers 64
    bad "an option without its value" "--steps needs a value" "${train[@]}" --steps
    bad "no data at all" "--data is missing" --model tiny
    of_tokens "a name with control characters of C1" $'cannot read   31m 32m\xc3\xbc\xe2\x80\xa6:' --tokenizer \
        good/tokenizer.model --encode $'\xc2\x9b31m\x9b32m\xc3\xbc\xe2\x80\xa6'
    for option in model data val tokenizer out; do bad "--$option ''" \
        "--$option.*needs a value" "${train[@]}" "--$option" ""; done
    for option in prompts export eval score choices; do bad "--$option ''" \
        "--$option.*needs a value" --model trained "--$option" ""; done
    for option in encode decode; do of_tokens "--$option ''" "--$option needs a value" "--$option" ""; done
    bad "a model that is none" "--model llama9.*(preset|directory)" "${train[@]}" --model llama9
    bad "generate_llama3 with an option of training" \
        "unknown option --steps: generate_llama3 --help lists all options" --model trained --prompt hello --steps 3
    bad "eval_llama3 with an option of training" "unknown option --out: eval_llama3 --help lists all options" \
        --model trained --eval good/val.tok --out o
    bad "convert_llama3 with an option of training" "unknown option --seq: convert_llama3 --help lists all options" \
        --model trained --export elsewhere --seq 16
    by=$planner bad "a plan of an interleaved pipeline without stages" \
        "--pp-schedule has no effect without --pp: add --pp N" --pp-schedule interleaved --world 4
    bad "an interleaved pipeline with automatically one stage" "--pp-schedule has no effect without --pp: add --pp N" \
        "${train[@]}" --pp auto --dp-shard 1 --pp-schedule interleaved
    by=$planner bad "plan_llama3 with an unknown option" "unknown option --modle: plan_llama3 --help" --modle tiny
    by=$hosts bad "check_hosts with an unknown option" "unknown option --modle: check_hosts --help" --modle tiny
    help_text
    option_values
}

# ---------------------------------------------------------------- token files
token_files() {
    local i count
    local data=(--model model --seq 16 --batch 1 --steps 1 --threads 1 --data)
    everywhere "a token file that is not there" "nowhere.tok" "${data[@]}" nowhere.tok
    everywhere "a glob without a match" "no token file at .*text.sh" "${data[@]}" 'good/*.tokens'
    : >empty.tok
    bad "an empty token file" "empty.tok is not a token file" "${data[@]}" empty.tok
    bad "a directory as token file" "good is a directory, expected a regular file" "${data[@]}" good
    head -c 40 good/train.tok >header.tok
    bad "half a header" "header.tok is not a token file" "${data[@]}" header.tok
    head -c 1001 good/train.tok >short.tok
    everywhere "a truncated token file" "short.tok is truncated.*1001 bytes" "${data[@]}" short.tok
    cp sample/00.txt text.tok
    bad "a text as token file" "text.tok is not a token file" "${data[@]}" text.tok
    spoil version.tok good/train.tok 8 4 7
    bad "another version" "version 7, expected 1" "${data[@]}" version.tok
    spoil width.tok good/train.tok 12 4 3
    bad "tokens of 3 bytes" "width 3.*expected width 2 or 4" "${data[@]}" width.tok
    spoil flags.tok good/train.tok 20 4 2
    bad "a flag that is none" "flags 2.*expected" "${data[@]}" flags.tok
    for count in $((1 << 63)) -1 $((1 << 62)) $((1 << 61)) 0; do
        spoil count.tok good/train.tok 24 8 "$count"
        bad "a count of $(printf %u "$count") tokens" "count.tok is truncated or damaged" "${data[@]}" count.tok
    done
    spoil narrow.tok good/train.tok 16 4 601
    bad "a vocabulary larger than the model's" "vocabulary of 601 tokens, the model has 600" "${data[@]}" narrow.tok
    cp good/train.tok large.tok
    for ((i = 0; i < 2000; i++)); do printf '\xff\xff'; done | dd of=large.tok bs=1 seek=192 conv=notrunc status=none
    head -c 4192 large.tok >tokens.tok
    spoil large.tok tokens.tok 24 8 2000
    everywhere "tokens outside the vocabulary" "large.tok: token [0-9]+ is 65535, the vocabulary has 600" \
        "${data[@]}" large.tok
    everywhere "validation tokens outside the vocabulary" "large.tok: token [0-9]+ is 65535" "${train[@]}" --val \
        large.tok
    everywhere "evaluated tokens outside the vocabulary" "large.tok: token [0-9]+ is 65535" --model trained --eval \
        large.tok --seq 16 --threads 1
    { cat good/tokenizer.model; printf 'IHF1aXRlIG90aGVy %d\n' "$(wc -l <good/tokenizer.model)"; } >other.model
    everywhere "a tokenizer that does not match" "tokenized with a different tokenizer than other.model" \
        "${train[@]}" --tokenizer other.model
    everywhere "a tokenizer that does not match, evaluated" \
        "tokenized with a different tokenizer than other.model" --model trained --eval good/val.tok --seq 16 \
        --tokenizer other.model
    bad "a tokenizer that is not there" "none.model" "${train[@]}" --tokenizer none.model
    bad "a tokenizer that is not there, evaluated" "none.model" --model trained --eval good/val.tok --seq 16 \
        --tokenizer none.model
    everywhere "a sequence longer than the data" "no file with the 129 tokens.*100 tokens in all" --model model --data \
        bytes.tok --seq 128 --batch 1 --threads 1
    everywhere "a sequence longer than the model's positions" "--seq 257 exceeds the 256 positions" "${train[@]}" \
        --seq 257
    bad "a step larger than the data" "1 data ranks x batch 4 x accum 9 = 36.*--tail pad" --model model --data \
        bytes.tok --seq 8 --batch 4 --accum 9 --steps 1 --threads 1
    works "the same step with --tail pad" "$program" --model model --data bytes.tok --seq 8 --batch 4 --accum 9 \
        --steps 1 --threads 1 --tail pad
    bad "a step larger than the data, 3 threads" "3 data ranks x batch 5 x accum 1 = 15" --model model --data \
        bytes.tok --seq 8 --batch 5 --steps 1 --threads 1 --ranks 3
}

# ---------------------------------------------------------------- config.json
# bad_config NAME PATTERN SED [DIR] : the good config.json changed by SED
bad_config() {
    config changed "$3"
    bad "config.json: $1" "changed/config.json.*$2" "${train[@]}" --model changed
}

# bad_config_text NAME PATTERN TEXT : this instead of it
bad_config_text() {
    mkdir -p changed
    printf '%s' "$3" >changed/config.json
    bad "config.json: $1" "changed/config.json.*$2" "${train[@]}" --model changed
}

configs() {
    mkdir -p bare
    bad "a directory without config.json" "bare/config.json" "${train[@]}" --model bare
    bad_config_text "empty" "JSON" ""
    bad_config_text "not JSON" "JSON" "hidden_size = 32"
    bad_config_text "an array" "JSON object" "[1, 2, 3]"
    bad_config_text "cut off" "JSON" "$(head -c 100 model/config.json)"
    bad_config_text "nested 100,000 deep" "JSON" "$(printf '{"a":%.0s' {1..100000})"
    bad_config "no hidden_size" '"hidden_size" is missing' '/hidden_size/d'
    bad_config "negative" '"num_hidden_layers" is -2, expected 1 to' 's/("num_hidden_layers": )2/\1-2/'
    bad_config "zero heads" '"num_attention_heads" is 0, expected 1 to' 's/("num_attention_heads": )4/\10/'
    bad_config "a fraction" '"hidden_size" is 32.5, expected a whole number' 's/("hidden_size": )32/\132.5/'
    bad_config "a number as a string" '"hidden_size" must be a number' 's/("hidden_size": )32/\1"32"/'
    bad_config "a number beyond all" '"vocab_size" is 1e\+30, expected' 's/("vocab_size": )600/\11e30/'
    bad_config "heads that do not divide" '4 query heads.*3 key/value heads' 's/("num_key_value_heads": )2/\13/'
    bad_config "more key/value heads than heads" '4 query heads.*8 key/value heads' 's/("num_key_value_heads": )2/\18/'
    bad_config "an odd head dimension" 'head dimension 7 is odd' 's/("num_key_value_heads": 2),/\1, "head_dim": 7,/'
    bad_config "an unknown rope_type" 'rope.*"yarn"' 's/"rope_type": "llama3"/"rope_type": "yarn"/'
    bad_config "rope_scaling as a word" 'rope_scaling' '/"rope_scaling"/{N; s/("rope_scaling": ).*/\1"llama3"/}'
    bad_config "rope_scaling without its factor" '"factor" is missing' 's/"factor": 8, //'
    bad_config "rope frequencies the wrong way round" 'high_freq_factor' 's/("high_freq_factor": )4/\11/'
    bad_config "another model_type" '"mistral"' 's/"model_type": "llama"/"model_type": "mistral"/'
    bad_config "biases" 'attention_bias.*true' 's/("attention_bias": )false/\1true/'
    bad_config "tied weights as a word" 'tie_word_embeddings' \
        's/("attention_bias": false)/\1, "tie_word_embeddings": "yes"/'
    config huge 's/("hidden_size": )32/\11048576/; s/("num_hidden_layers": )2/\12000/
        s/("num_attention_heads": )4/\165536/; s/("intermediate_size": )48/\116777216/'
    everywhere "config.json: a model larger than all memory" "GB|larger|memory" "${train[@]}" --model huge
    bad "config.json: its plan" "GB|larger|memory" --model huge --plan
    bad "more tokens a micro-batch than can be counted" "--batch 1048576" --model llama3.1-405b --plan --batch 1048576
}

# ---------------------------------------------------------------- tokenizer.model
# bad_tokenizer NAME PATTERN : what stands in bad.model is refused
bad_tokenizer() {
    of_tokens "tokenizer: $1" "tokenizer bad.model.*$2" --encode sample/00.txt --tokenizer bad.model
    cp good/tokenizer.model bad.model
}

tokenizers() {
    local lines id
    lines=$(wc -l <good/tokenizer.model)
    : >bad.model; bad_tokenizer "empty" "0 bytes"
    sed -i '5s/.*/?? 4/' bad.model; bad_tokenizer "not base64" "line 5.*base64"
    sed -i '5d' bad.model; bad_tokenizer "a gap in the ranks" "line 5.*expected rank 4"
    sed -i '5s/ / 0/' bad.model; bad_tokenizer "a rank with a zero in front" "line 5.*expected rank 4"
    sed -i '5s/ //' bad.model; bad_tokenizer "no rank" "line 5.*expected rank 4.*base64 and one space"
    sed -i '300s/.*/IA== 299/' bad.model; bad_tokenizer "a token twice" "line 300.*again"
    head -n 100 good/tokenizer.model >bad.model; bad_tokenizer "bytes that are missing" "no token for the single byte"
    head -c 5000 "$program" >bad.model; bad_tokenizer "a program" "found the byte 0x"
    head -c $(($(wc -c <good/tokenizer.model) - 6)) good/tokenizer.model >bad.model; bad_tokenizer "cut off" \
        "line $lines.*expected"
    printf '{"version": "1.0"}' >bad.model; bad_tokenizer "a tokenizer.json without a model" "needs the model '\?'"
    printf '{"model": {"type": "Unigram"}}' >bad.model; bad_tokenizer "a tokenizer.json of another kind" \
        "needs the model 'Unigram', which this program does not implement"
    printf '\n\n\n' >bad.model; bad_tokenizer "blank lines" "line 1"
    of_tokens "tokenizer: a directory" "good is a directory, expected a regular file" --encode sample/00.txt \
        --tokenizer good
    of_tokens "--encode without a tokenizer" "--tokenizer is missing, which --encode needs" --encode sample/00.txt
    of_tokens "--decode without a tokenizer" "--tokenizer is missing, which --decode needs" --decode sample/00.txt
    of_tokens "--encode of nothing" "nothing.txt" --encode nothing.txt --tokenizer good/tokenizer.model
    of_tokens "--encode of a directory" "good.*directory" --encode good --tokenizer good/tokenizer.model
    of_tokens "--decode of a directory" "good.*directory" --decode good --tokenizer good/tokenizer.model
    mkfifo pipe
    of_tokens "--encode of a named pipe" "pipe is a pipe, expected a file of text" --encode pipe --tokenizer \
        good/tokenizer.model
    of_tokens "--encode of a device" "/dev/zero is a device, expected a file of text" --encode /dev/zero --tokenizer \
        good/tokenizer.model
    of_tokens "--decode of a named pipe" "pipe is a pipe, expected a file of token ids" --decode pipe --tokenizer \
        good/tokenizer.model
    of_tokens "tokenizer: a named pipe" "pipe is a pipe, expected a regular file" --encode sample/00.txt \
        --tokenizer pipe
    of_tokens "tokenizer: a device" "/dev/zero is a device, expected a regular file" --encode sample/00.txt \
        --tokenizer /dev/zero
    works "--encode of a pipe" "$tokens" --encode <(cat sample/00.txt) --tokenizer good/tokenizer.model
    for id in 600 -1 99999999999999999999; do
        echo "$id" >ids
        of_tokens "--decode of $id" "ids: id .* is outside the tokenizer's 0 to 599" --decode ids --tokenizer \
            good/tokenizer.model
    done
    echo "12 and 13" >ids
    of_tokens "--decode of words" "ids: .*expected token ids" --decode ids --tokenizer good/tokenizer.model
}

# ---------------------------------------------------------------- model.safetensors
# bad_header NAME PATTERN SED : the fixture's header changed by SED
bad_header() {
    header | sed -E "$3" | weights changed
    cmp -s changed/model.safetensors "$fixture/model.safetensors" &&
        fail "safetensors: $1" "the edit no longer matches the fixture"
    bad "safetensors: $1" "changed.*$2" --model changed "${evaluate[@]}"
}

# bad_weights NAME PATTERN : what stands in changed/model.safetensors
bad_weights() { bad "safetensors: $1" "changed/model.safetensors.*$2" --model changed "${evaluate[@]}"; }

safetensors() {
    local k='"model.layers.0.self_attn.k_proj.weight":\{"dtype":"F32","shape":\[32,64\],"data_offsets":\[' n
    header | weights changed
    head -c 100000 "$fixture/model.safetensors" >changed/model.safetensors
    everywhere "safetensors: truncated" "changed/model.safetensors.*truncated" --model changed "${evaluate[@]}"
    head -c 1000 "$fixture/model.safetensors" >changed/model.safetensors; bad_weights "header cut off" \
        "not a safetensors file"
    head -c 5 "$fixture/model.safetensors" >changed/model.safetensors; bad_weights "5 bytes" "not a safetensors file"
    for n in -1 $((1 << 63)) 0 100000000 343385; do
        spoil changed/model.safetensors "$fixture/model.safetensors" 0 8 "$n"
        bad_weights "a header of $(printf %u "$n") bytes" "not a safetensors file"
    done
    printf 'weights, weights, weights' | weights changed; bad_weights "header not JSON" "header is not a JSON object"
    printf '["F32", [1, 2]]' | weights changed; bad_weights "header an array" "header is not a JSON object"
    printf '[%.0s' {1..100000} | weights changed; bad_weights "nested 100,000 deep" "header is not a JSON object"
    bad_header "offsets beyond the file" "lies at bytes.*truncated" "s/$k[0-9,]+/${k//\\/}900000,908192/"
    bad_header "offsets before the data" "lies at bytes" "s/$k[0-9,]+/${k//\\/}-8192,0/"
    bad_header "offsets backwards" "lies at bytes" "s/$k[0-9,]+/${k//\\/}195072,186880/"
    bad_header "offsets as words" "offsets|lies at bytes" "s/$k[0-9,]+/${k//\\/}\"a\",\"b\"/"
    bad_header "offsets with a fraction" "offsets|lies at bytes" "s/$k[0-9,]+/${k//\\/}186880.5,195072.5/"
    bad_header "one offset" "data_offsets" "s/$k[0-9,]+/${k//\\/}186880/"
    bad_header "tensors that overlap" "overlap" "s/$k[0-9,]+/${k//\\/}131328,139520/"
    bad_header "a tensor twice" "twice|again|overlap" \
        's/"model.layers.1.self_attn.k_proj.weight"/"model.layers.0.self_attn.k_proj.weight"/'
    bad_header "a shape turned round" "k_proj.weight is 64 x 32 .*has 32 x 64" "s/($k)/\1/; s/\[32,64\]/[64,32]/"
    bad_header "a shape beyond all" "shape" 's/\[32,64\]/[1e300,64]/'
    bad_header "a negative shape" "shape" 's/\[32,64\]/[-32,-64]/'
    bad_header "a shape as a word" "shape" 's/\[32,64\]/"32x64"/'
    header | sed -E 's/,"model.norm.weight":\{[^}]*\}//' | weights changed # the last one: its bytes go too
    truncate -s -256 changed/model.safetensors
    bad "safetensors: a tensor missing" "changed.*tensor model.norm.weight is missing" --model changed "${evaluate[@]}"
    bad_header "a tensor too many" "tensor model.extra.weight is not part of the model" \
        's/\{"__metadata__"/{"model.extra.weight":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"__metadata__"/'
    bad_header "a name with a line end" "tensor " \
        's/\{"__metadata__"/{"a\\nerror: b":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"__metadata__"/'
    spoil changed/model.safetensors "$fixture/model.safetensors" $((8 + header_length)) 4 $((0x7fc00000)); bad \
        "safetensors: not a number among the weights" "expected a finite number" --model changed "${evaluate[@]}"
    { cat "$fixture/model.safetensors"; printf 'more than there should be'; } >changed/model.safetensors; bad_weights \
        "bytes behind the last tensor" "bytes"
    bad_header "another dtype" "dtype F64, expected F32" '0,/"F32"/s//"F64"/'
    bad_header "a tensor that is a number" "dtype|tensor" 's/\{"__metadata__"/{"model.extra.weight":7,"__metadata__"/'
    header | weights changed
    rm changed/model.safetensors
    echo '{"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}' >changed/model.safetensors.index.json
    bad "safetensors: a file of the index missing" "model-00001-of-00001.safetensors" --model changed "${evaluate[@]}"
    echo '{"weight_map": {"lm_head.weight": "../trained/model.safetensors"}}' >changed/model.safetensors.index.json
    bad "safetensors: an index that leads elsewhere" "index.json" --model changed "${evaluate[@]}"
    echo '[]' >changed/model.safetensors.index.json
    bad "safetensors: an index without a map" "weight_map" --model changed "${evaluate[@]}"
    rm -r changed
}

# ---------------------------------------------------------------- requests of --score, tasks of --choices
# request NAME PATTERN LINE : a file of a good line and LINE is refused as requests of --score;   task: as tasks of
# --choices
request() {
    printf '{"context":"the","continuation":" man"}\n%s\n' "$3" >bad.jsonl
    bad "--score: $1" "$2" --model trained --score bad.jsonl --threads 1
}
task() {
    printf '{"context":"the","endings":["man","ship"],"label":0}\n%s\n' "$3" >bad.jsonl
    bad "--choices: $1" "$2" --model trained --choices bad.jsonl --threads 1
}

requests() {
    local deep
    everywhere "--score of nothing" "cannot read nowhere.jsonl" --model trained --score nowhere.jsonl
    bad "--score of a directory" "cannot read \.: Is a directory" --model trained --score .
    request "no JSON" "bad.jsonl, line 2 is not a JSON object" 'the man'
    request "half a line" "line 2 is not a JSON object" '{"context":"the","contin'
    request "a list" "line 2 is not a JSON object" '["the", "man"]'
    request "two objects on a line" \
        "line 2: found '[{]\"conte.*after the end" '{"context":"a","continuation":"b"}{"context"'
    request "a key twice" "line 2: the key \"context\" occurs twice" '{"context":"a","context":"b","continuation":"c"}'
    request "no continuation" "line 2: expected \"context\" and \"continuation\", or" '{"context":"the"}'
    request "a text and ids" "line 2: expected \"context\" and" '{"context":"the","continuation_ids":[1]}'
    request "a zero byte in a text" "line 2: found .u0000 in a text" '{"context":"a\u0000b","continuation":"c"}'
    request "a number instead of a text" "\"continuation\" must be a text" '{"context":"the","continuation":3}'
    request "an empty continuation" "line 2: the continuation has no tokens" '{"context":"the","continuation":""}'
    request "ids without a context" "line 2: \"context_ids\" is empty" '{"context_ids":[],"continuation_ids":[1]}'
    request "no list" "\"context_ids\" must be a list" '{"context_ids":7,"continuation_ids":[1]}'
    request "an id beyond the vocabulary" "holds 600, expected ids from 0 to 599" \
        '{"context_ids":[1],"continuation_ids":[600]}'
    request "a negative id" "holds -1, expected" '{"context_ids":[-1],"continuation_ids":[6]}'
    request "half an id" "holds 1.5, expected" '{"context_ids":[1.5],"continuation_ids":[6]}'
    request "a huge id" "holds 1e\+300, expected" '{"context_ids":[1e300],"continuation_ids":[6]}'
    request "no id" "holds something that is not a number" '{"context_ids":["a"],"continuation_ids":[6]}'
    deep=$(printf '%2000s' '' | tr ' ' '[')
    request "deep nesting" "line 2 is not a JSON object" "{\"context\":$deep"
    printf '\n \n' >bad.jsonl
    bad "--score: empty lines alone" "bad.jsonl holds no requests" --model trained --score bad.jsonl
    printf '{"context_ids":[1],"continuation_ids":[2,3,4]}' >good.jsonl
    bad "--score: a continuation longer than --seq" \
        "line 1: the continuation has 3 tokens, and --seq is 2: use a larger --seq" --model trained --score good.jsonl \
        --seq 2
    works "--score of ids without a tokenizer" "$evaluator" --model "$fixture" --score good.jsonl
    printf '{"context":"a","continuation":"b"}' >good.jsonl
    bad "--score of texts without a tokenizer" "texts need a tokenizer, .* give \"context_ids\"" --model "$fixture" \
        --score good.jsonl
    works "--score of a text" "$evaluator" --model trained --score good.jsonl
    everywhere "--score without weights" "tiny has no weights: eval_llama3 needs" --model tiny --score good.jsonl
    bad "--score and --eval" "expected one of --eval, --score and --choices, found several" --model trained --score \
        good.jsonl --eval good/val.tok
    by=$evaluator bad "nothing to evaluate" "expected one of --eval, --score and --choices, found none" --model \
        trained
    bad "--score with --doc-mask" "--doc-mask has no effect with --score" --model trained --score good.jsonl --doc-mask
    task "one ending" "a list of at least two texts" '{"context":"the","endings":["man"],"label":0}'
    task "an empty ending" "must hold texts that are not empty" '{"context":"the","endings":["man",""],"label":0}'
    task "an ending that is no text" "must hold texts that are not empty" \
        '{"context":"a","endings":["man",1],"label":0}'
    task "no label" "\"label\" must be the number of the right ending, from 0 to 1" \
        '{"context":"a","endings":["b","c"]}'
    task "a label beyond the endings" "\"label\" must be" '{"context":"a","endings":["b","c"],"label":2}'
    task "a label in words" "\"label\" must be" '{"context":"a","endings":["b","c"],"label":"one"}'
    printf '{"context":"the","endings":["man","ship"],"label":1}' >good.jsonl
    works "--choices" "$evaluator" --model trained --choices good.jsonl
    works "--choices after each save" "$program" "${train[@]}" --steps 2 --save-every 1 --out chosen --after-save \
        "'$evaluator' --model \"\$1\" --choices good.jsonl"
    if [ "$(grep -c '"accuracy"' chosen/after-save.log)" = 2 ]; then
        pass "--choices after each save, its accuracies" "$(tail -n 1 chosen/after-save.log)"
    else fail "--choices after each save, its accuracies" "expected 2: $(tail -n 2 chosen/after-save.log)"; fi
}

# ---------------------------------------------------------------- doing instead of training
tasks() {
    everywhere "--prompt without weights" "has no weights: generate_llama3 needs" --model model --prompt hello
    bad "--prompt from a preset" "tiny has no weights" --model tiny --prompt hello
    bad "--prompt without a tokenizer" "--prompt needs a tokenizer" --model "$fixture" --prompt hello
    bad "--prompt with a tokenizer that is too large" "has 600 tokens, but the model.s vocabulary has 256" --model \
        "$fixture" --prompt hello --tokenizer good/tokenizer.model
    bad "--prompt beyond the model's positions" "--max-tokens is 300, together more than the model.s 256 positions" \
        --model trained --prompt hello --max-tokens 300
    bad "--prompt and --chat" "expected --prompt or --prompts, or --chat, found both" --model trained --prompt hello \
        --chat
    by=$generator bad "nothing to generate" "expected --prompt or --prompts, or --chat, found none" --model trained
    mkdir -p lone # with a file of version 1, which does not say where documents end
    python3 -c 'import struct, sys
b = open("good/train.tok", "rb").read()
open("lone/train.tok", "wb").write(b[:8] + struct.pack("<I", 1) + b[12:64] + b[192:])'
    everywhere "--doc-mask of a file that does not say where its documents end" \
        "lone/train.tok is a token file of version 1, which does not say where its documents end: .*tokens_llama3 " \
        "${train[@]}" --data lone/train.tok --doc-mask
    works "that file is brought to version 2" "$tokens" --upgrade lone/train.tok --tokenizer good/tokenizer.model
    works "… and says where its documents end" "$program" "${train[@]}" --data lone/train.tok --doc-mask
    everywhere "--doc-mask without a tokenizer" \
        "--doc-mask needs a tokenizer, .* next to bytes.tok: give one with --tokenizer" --model "$fixture" \
        "${evaluate[@]}" --doc-mask
    works "an evaluation with --doc-mask" "$evaluator" --model trained --eval good/val.tok --seq 16 --doc-mask
    works "a plan with --doc-mask" "$planner" --doc-mask
    everywhere "--eval without weights" "has no weights: eval_llama3 needs" --model model --eval good/val.tok
    bad "--export without weights" "has no weights: convert_llama3 needs" --model model --export elsewhere
    by=$converter bad "nothing to write" "--export DIR or FILE.gguf is missing" --model trained --dtype bf16
    bad "--eval of nothing" "nowhere.tok" --model trained --eval nowhere.tok
    everywhere "ranks that do not fit the mesh" "dp-shard 4 .*= 4 ranks, but [123]" "${train[@]}" --dp-shard 4
    bad "--dp-shard 3 with 2 ranks" "tp 1 x cp 1 x pp 1 x dp-shard 3 x dp-replicate 1 = 3 ranks, but 2 " \
        "${train[@]}" --dp-shard 3 --ranks 2
    bad "--dp-replicate 4 with 6 ranks" \
        "dp-shard 1 x dp-replicate 4 = 4 ranks, but 6 .*choose tp x .* x dp-replicate = .*1 x 1 x 1 x 2 x 3" \
        "${train[@]}" --dp-replicate 4 --ranks 6
    bad "two sizes left open" "--dp-shard auto and --dp-replicate auto: only one of them" "${train[@]}" --dp-shard \
        auto --dp-replicate auto --ranks 2
    bad "--val-every without --val" "--val-every has no effect without --val" "${train[@]}" --val-every 5
    of_tokens "--encode and --decode at once" "--encode and --decode are two tasks: give one of them" \
        --encode good/val.tok --decode good/val.tok --tokenizer good/tokenizer.model
    bad "--min-lr below 0" "--min-lr -0.5: expected 0 or more, or -1" "${train[@]}" --min-lr -0.5
    bad "--offload without --out" "--offload all keeps state in files under --out: add --out" "${train[@]}" --offload \
        all
    bad "an optimizer that is none" "--optimizer sgd: expected one of adamw\|muon" "${train[@]}" --optimizer sgd
    everywhere "a momentum for AdamW" "--optimizer adamw:0.9: expected one of adamw.muon.muon:X" "${train[@]}" \
        --optimizer adamw:0.9
    bad "a momentum that never forgets" "--optimizer muon:1: expected one of" "${train[@]}" --optimizer muon:1
    bad "a decay that is longer than the run" "a decay of 200 steps do not fit into the 9 steps" "${train[@]}" \
        --steps 9 --lr-schedule wsd:200
    bad "a decay of no steps" "--lr-schedule wsd:0: expected one of" "${train[@]}" --lr-schedule wsd:0
    bad "--save-every without --out" "--save-every has no effect without --out" "${train[@]}" --save-every 5
    bad "--keep without --out" "--keep has no effect without --out" "${train[@]}" --keep 2
    bad "--after-save without --out" "--after-save has no effect without --out" "${train[@]}" --after-save true
    bad "--save-mode without --out" "--save-mode has no effect without --out" "${train[@]}" --save-mode async
    bad "--save-mode of another kind" "--save-mode later: expected one of sync.async" "${train[@]}" --save-mode later \
        --out saved
    bad "--allow-changes without --resume" "--allow-changes has no effect without --resume" "${train[@]}" \
        --allow-changes
    bad "--resume auto without --out" "--resume auto looks for checkpoints in --out: add --out" "${train[@]}" \
        --resume auto
    bad "--resume of nothing" "--resume nowhere: no checkpoint found; expected a directory step-00000000" \
        "${train[@]}" --resume nowhere
    bad "--resume of a model" "--resume trained: no checkpoint found" "${train[@]}" --resume trained
    of_tokens "--audit without --out" "--out is missing, which --audit needs" --audit
    of_tokens "--audit of no run" "--audit: cannot read trained/samples.jsonl" --audit --out trained
    works "a run that saves" "$program" "${train[@]}" --steps 1 --out saved
    bad "--resume with another learning rate" \
        "--resume saved/step-00000001: .*--lr 0.1, was 0.0003; --min-lr 0.01, was 3e-05.*--allow-changes" \
        "${train[@]}" --steps 1 --resume saved --lr 0.1
    bad "--resume with another optimizer" \
        "--resume saved/step-00000001: .*--optimizer muon, was adamw.*: give --optimizer adamw, or start a new run" \
        "${train[@]}" --steps 1 --resume saved --optimizer muon --allow-changes
    bad "--resume with --doc-mask, which the run before had not" \
        "--resume saved/step-00000001: .*--doc-mask on, was off.*--allow-changes" "${train[@]}" --steps 1 --resume \
        saved --doc-mask
    bad "--resume with other data" "--resume saved/step-00000001: .*data [0-9a-f]+, was [0-9a-f]+" "${train[@]}" \
        --steps 1 --resume saved --data good/val.tok
    works "a run of two steps that saves" "$program" "${train[@]}" --steps 2 --lr 1e-3 --min-lr 1e-3 --out saved2
    bad "--resume behind --steps" \
        "--resume saved2/step-00000002 has finished step 2, but --steps is 1: use a larger --steps" "${train[@]}" \
        --steps 1 --lr 1e-3 --min-lr 1e-3 --resume saved2
    bad "--transport mpi without mpirun" "mpirun" "${train[@]}" --transport mpi
    of_tokens "tokens_llama3 with nothing to do" "one of .*--encode, --decode and --audit.*tokens_llama3 --help"
    of_tokens "tokens_llama3 with an option of train_llama3" "unknown option --model: tokens_llama3 --help" \
        --audit --model tiny
    of_tokens "tokens_llama3 with an option that has no effect" "--out has no effect with --encode" \
        --encode sample/00.txt --tokenizer good/tokenizer.model --out a
    everywhere "a model larger than this host's memory" "needs [0-9.]+ GB of memory on .*, but [0-9.]+ GB are free" \
        --model llama3-70b --data good/train.tok --seq 4096 --batch 1
    [ -n "$have_mpi" ] || return
    refused "--ranks 3 under mpirun -np 2" "--ranks 3, but mpirun started 2" "${mpi[@]}" -np 2 "$program" \
        "${train[@]}" --ranks 3
    refused "--transport threads under mpirun -np 2" "--transport threads .*2 processes were started" "${mpi[@]}" -np \
        2 "$program" "${train[@]}" --transport threads
    refused "ranks started with different options" "rank 1 was started with different options" "${mpi[@]}" -np 1 \
        "$program" "${train[@]}" : -np 1 "$program" "${train[@]}" --seed 5
    refused "a file that only the second rank lacks" "nowhere.tok" "${mpi[@]}" -np 1 "$program" "${train[@]}" : -np 1 \
        "$program" "${train[@]}" --data nowhere.tok
}

# ---------------------------------------------------------------- options of earlier versions
# replaced NAME PATTERN OPTIONS… : training refuses the options, and the command that it names, which matches, works
replaced() {
    local name=$1 pattern=$2 wrong took command code
    shift 2
    judge " is not an option of this program any more: run $pattern\$" "$program" "$@"
    if [ -n "$wrong" ]; then
        fail "$name" "$wrong"
        return
    fi
    command=$(sed -n 's/^error: .* any more: run //p' .log)
    timeout -k 1 20 bash -c "$command" </dev/null >.log 2>&1
    code=$?
    if [ "$code" = 0 ]; then pass "$name" "$command"
    else fail "$name" "exit code $code of $command: $(tail -n 1 .log)"; fi
}

retired_options() {
    local old
    replaced "--generate" "$generator --model trained --prompt 'a man'\\\\''s ship' --max-tokens 3 --seed 7" --model \
        trained --generate "a man's ship" --max-tokens 3 --lr 1e-3 --seed 7 --data good/train.tok
    replaced "--generate=TEXT" "$generator --model=trained --prompt='' --max-tokens=3" --model=trained --generate= \
        --max-tokens=3 --out=o
    replaced "--eval" "$evaluator --model trained --eval good/val.tok --seq 16 --doc-mask" --model trained --eval \
        good/val.tok --seq 16 --steps 3 --doc-mask --recompute full
    replaced "--choices" "$evaluator --model trained --choices good.jsonl" --model trained --choices good.jsonl --out o
    replaced "--export" "$converter --model trained --export new/model --dtype bf16" --model trained --export \
        new/model --dtype bf16 --seq 16
    replaced "--plan" "$planner --model model --world 4 --tp 2 --seq 16" --plan --model model --world 4 --tp 2 --seq 16
    replaced "--check-hosts" "$hosts --ranks 2" --check-hosts --ranks 2
    replaced "--audit" "$tokens --out=saved --audit" --model tiny --out=saved --audit --deterministic --ranks 2
    cp sample/00.txt 'a b'
    replaced "--encode" "$tokens --encode 'a b' --tokenizer good/tokenizer.model" --model=tiny --encode 'a b' --chat \
        --tokenizer good/tokenizer.model
    by=$program bad "--world alone" "run $planner --model model .*--world 8$" "${train[@]}" --world 8
    for old in muon-momentum:muon:X lr-decay:wsd:N max-skips:10 check-replicas:100 start-timeout:120 outlier-z:6; do
        bad "--${old%%:*}" "--${old%%:*} was removed: .*${old#*:}" "${train[@]}" "--${old%%:*}" 1
    done
    bad "--choices-every" "was removed: eval_llama3 computes it: add --save-every N --after-save" "${train[@]}" \
        --choices-every 1
    bad "an option of earlier versions" "--matmul-choices was removed: it made training no faster" "${train[@]}" \
        --matmul-choices choices.json
    works "a run with a config.txt" "$program" "${train[@]}" --out described
    mapfile -t old < <(sed 's/ /\n/' described/config.txt)
    works "config.txt of an earlier version, given back" "$program" --world 0 --dtype fp32 --choices-every 0 \
        --max-tokens 100 --temperature 0.8 --top-p 0.95 --muon-momentum 0.95 --lr-decay 0 --max-skips 10 --outlier-z 6 \
        --check-replicas 100 --start-timeout 120 --simulate all --spares 0 "${old[@]}" --out given_back
    bad "config.txt with another --temperature" "run $generator .* --temperature 0.5$" "${old[@]}" --temperature 0.5
    by=$planner bad "--eval in a plan" "any more: run $evaluator --eval good/val.tok$" --eval good/val.tok
}

# ---------------------------------------------------------------- tensor, context and pipeline parallelism
meshes() {
    local axis big=(--plan --world 16384 --model llama3.1-405b --seq 8192 --tp 8 --cp 16 --pp 16)
    everywhere "a mesh of more ranks than there are" \
        "tp 2 x cp 2 x pp 1 x dp-shard 2 x dp-replicate 1 = 8 ranks, but [123] .*start 8 ranks, or choose tp x .* = " \
        "${train[@]}" --tp 2 --cp 2 --dp-shard 2
    bad "a tp that is no part of the ranks" \
        "tp 2 x cp 1 x pp 1 x dp-shard 1 x .* = 2 ranks, but 3 were started: start 2 ranks, or .*, 1 x 1 x 1 x 3 x 1" \
        "${train[@]}" --tp 2 --ranks 3
    bad "a mesh of 16,384 that does not make them up" \
        "dp-shard 4 x dp-replicate 1 = 8192 ranks, but 16384 are planned: .* = 8 x 16 x 16 x (4 x 2|8 x 1), 8 x" \
        "${big[@]}" --dp-shard 4
    works "the same with --dp-shard 8" "$planner" "${big[@]}" --dp-shard 8
    bad "two sizes left open, tp and pp" "--tp auto and --pp auto: only one of them follows" "${train[@]}" --tp auto \
        --pp auto --dp-shard 1 --ranks 2
    bad "--tp over the key/value heads" \
        "--tp 4 does not divide model's 4 query heads and 2 key/value heads.*use --tp 1, 2$" "${train[@]}" --tp 4 \
        --ranks 4
    bad "--tp that is no part of the heads" \
        "--tp 3 does not divide model's 4 query heads and 2 key/value heads.*use --tp 1, 2$" "${train[@]}" --tp 3 \
        --ranks 3
    bad "--tp over the key/value heads, planned" \
        "--tp 16 does not divide llama3.1-405b's 128 query heads and 8 key/value heads.*use --tp 1, 2, 4, 8$" --plan \
        --world 16 --model llama3.1-405b --tp 16
    bad "--cp that does not divide the sequence" \
        "--cp 3 splits .* 6 equal parts, and --seq 16 is not .*: use --seq 12 or --seq 18, or --cp 1, 2, 4, 8$" \
        "${train[@]}" --cp 3 --ranks 3
    bad "--cp of more chunks than tokens" \
        "--cp 16 splits each sequence into 32 .*--seq 16 .*: use --seq 32, or --cp 1, 2, 4, 8$" --model model --plan \
        --world 16 --seq 16 --cp 16
    bad "more pipeline stages than blocks" \
        "--pp 3 x --pp-chunks 1 = 3 virtual stages, but model has 2 blocks: use at most 2 virtual stages" \
        "${train[@]}" --pp 3 --ranks 3
    bad "more virtual stages than blocks" \
        "--pp 2 x --pp-chunks 2 = 4 virtual stages, but model has 2 blocks: use at most 2 virtual stages" \
        "${train[@]}" --pp 2 --ranks 2 --accum 2 --pp-schedule interleaved
    bad "light ends without a block" \
        "= 5 virtual stages, the first and the last with one block fewer, but model has 2 blocks: use at most 4" \
        "${train[@]}" --pp 5 --ranks 5 --pp-light-ends
    works "light ends of a block each" "$program" "${train[@]}" --pp 2 --ranks 2 --pp-light-ends
    bad "interleaving that does not divide --accum" \
        "interleaved needs --accum to be a multiple of --pp 2, and --accum is 3: use --accum 2 or 4" --model tiny \
        --plan --world 2 --pp 2 --accum 3 --pp-schedule interleaved
    bad "--pp-chunks of 1f1b" "--pp-schedule 1f1b with --pp-chunks 2: 1f1b has one virtual stage per rank" \
        "${train[@]}" --pp 2 --ranks 2 --pp-chunks 2
    bad "interleaving of one virtual stage" \
        "--pp-schedule interleaved with --pp-chunks 1: .*interleaved has two or more" "${train[@]}" --pp 2 --ranks 2 \
        --pp-schedule interleaved --pp-chunks 1
    everywhere "--pp-schedule without --pp" "--pp-schedule has no effect without --pp" "${train[@]}" --pp-schedule \
        interleaved
    bad "--pp-chunks without --pp" "--pp-chunks has no effect without --pp" "${train[@]}" --pp-chunks 2
    bad "--pp-light-ends without --pp" "--pp-light-ends has no effect without --pp" "${train[@]}" --pp-light-ends
    for axis in tp cp pp; do
        bad "--prompt with --$axis" "without --tp, --cp and --pp: remove them" --model trained --prompt hello \
            --"$axis" 2 --ranks 2
    done
}

# ---------------------------------------------------------------- where results go
outputs() {
    echo "mine" >file
    mkdir -p holds/step-00000001 half index
    echo '{"step":1}' | tee holds/metrics.jsonl half/plan.json half/layout.json >/dev/null
    cp model/config.json half/config.json
    echo '{"weight_map": {}}' >index/model.safetensors.index.json
    everywhere "--out where a file is" "--out file" "${train[@]}" --out file
    bad "--out below a file" "--out file/below" "${train[@]}" --out file/below
    bad "--out where nothing can be made" "--out /proc/below" "${train[@]}" --out /proc/below
    bad "--out where nothing can be written" "/proc" "${train[@]}" --out /proc
    everywhere "--out that holds a run" "--out holds already holds a run" "${train[@]}" --out holds
    bad "--out that holds a plan and a layout" "half" "${train[@]}" --out half
    bad "--plan --out that holds a plan" "half" --plan --out half
    everywhere "--export onto another model" "trained exists already and is another model" --model "$fixture" \
        --export trained
    bad "--export of a model onto itself, in another dtype" "trained exists already and is another model" --model \
        trained --export trained --dtype bf16
    bad "--export onto a config.json" "half" --model trained --export half
    bad "--export onto a model in several files" "index" --model trained --export index
    bad "--export below a file" "cannot create the directory --export good/train.tok/where" --model trained --export \
        good/train.tok/where
    bad "--export where a file is" "--export file" --model trained --export file
}

# ---------------------------------------------------------------- cluster files, and timelines
# bad_plan NAME PATTERN OPTIONS… : refused by plan_llama3
bad_plan() { by=$planner bad "$@"; }

# bad_cluster NAME PATTERN SED [OPTIONS…] : a good cluster file changed by SED
bad_cluster() {
    local name=$1 pattern=$2 edit=$3
    shift 3
    sed -E "$edit" "$top/dev/results/cluster-cpu-amd-epyc.json" >cluster.json
    cmp -s cluster.json "$top/dev/results/cluster-cpu-amd-epyc.json" &&
        fail "cluster file: $name" "the edit no longer matches the file"
    bad_plan "cluster file: $name" "cluster.json.*$pattern" --cluster cluster.json --world 2 "$@"
}

clusters() {
    local good=$top/dev/results/cluster-cpu-amd-epyc.json
    works "the good cluster file" "$planner" --cluster "$good" --world 2
    works "a cluster of devices" "$planner" --cluster "$top/dev/clusters/h100-8.json" --world 64
    works "a cluster of measured devices" "$planner" --cluster "$top/dev/clusters/h200-8.json" --world 64
    by=$program bad "--cluster of a training run" "run $planner .*--cluster" "${train[@]}" --cluster "$good"
    works "a search" "$planner" --cluster "$top/dev/clusters/h100-8.json" --world 4 --model tiny --search
    works "failing hosts" "$planner" --mtbf 1 --hosts 2 --step-seconds 1 --save-seconds 1 --pause-seconds 1 --spares 1
    bad_plan "--spares without failures" "--spares has no effect without --mtbf" --spares 1
    bad_plan "--mtbf of no time" "--mtbf 0: expected a number from" --mtbf 0
    bad_plan "--mtbf without the time of a step" "add --step-seconds X, or --cluster FILE" --mtbf 100
    bad_plan "--mtbf without the number of hosts" "add --hosts N, or --cluster FILE" --mtbf 100 --step-seconds 1
    bad_plan "--mtbf without the time of a save" "add --save-seconds X, or --cluster FILE" --mtbf 100 --step-seconds 1 \
        --hosts 2
    bad_plan "--mtbf by a cluster file without storage" '"storage_bytes_per_s", .*add it, or --save-seconds X' \
        --mtbf 100 --cluster "$good" --world 2
    bad_plan "a pause longer than its save" "--pause-seconds 2 exceeds --save-seconds 1" --mtbf 100 --step-seconds 1 \
        --hosts 2 --save-seconds 1 --pause-seconds 2
    bad_plan "--mtbf of a search" "--mtbf simulates failures of one layout" --mtbf 100 --search --cluster "$good"
    bad_plan "--search without a cluster" "--search compares .* --cluster FILE" --world 4 --search
    bad_plan "--simulate of something else" "--simulate half: expected .*all\|stages" --world 4 --simulate half
    bad_plan "--simulate with --search" "--simulate stages has no effect with --search" --cluster "$good" --world 4 \
        --search --simulate stages
    bad_plan "--search with --out" "--search prints a list of layouts, and --out" \
        --cluster "$top/dev/clusters/h100-8.json" \
        --world 4 --search --out plan
    grep -v '"memory_bytes_per_host"' "$top/dev/clusters/h100-8.json" >lacks.json
    bad_plan "--search by a cluster that does not say how much memory there is" "lacks memory_bytes_per_host" \
        --cluster lacks.json --world 4 --search
    bad_plan "--cluster of nothing" "nowhere.json" --cluster nowhere.json
    bad_plan "--cluster of a directory" "good" --cluster good
    echo '[1, 2]' >list.json
    bad_plan "--cluster of a list" "list.json is not a JSON object" --cluster list.json
    head -c 3000 "$good" >half.json
    bad_plan "--cluster cut off" "half.json is not a JSON object" --cluster half.json
    bad_plan "--cluster that is a config.json" '"name" must be a text' --cluster model/config.json
    bad_cluster "no memory rate" '"memory_bytes_per_s" is missing' '/"memory_bytes_per_s"/d'
    bad_cluster "a negative memory rate" '"memory_bytes_per_s" is -1' 's/("memory_bytes_per_s": )[0-9]+/\1-1/'
    bad_cluster "rates of a rack" '"rates_of" is "rack", expected one of host' 's/("rates_of": )"host"/\1"rack"/'
    bad_cluster "rates of a device, and no word of how many" '"ranks_per_host" is missing' \
        's/("rates_of": )"host"/\1"device"/'
    bad_cluster "no cores" '"cores_per_host" is missing' '/"cores_per_host"/d'
    bad_cluster "matmuls that are no list" '"matmuls" must be a list' 's/"matmuls": \[/"matmuls": 7, "was": [/'
    bad_cluster "no matmuls in this dtype" '"matmuls" has no row of linear_forward in fp32' \
        '/"fp32","op":"linear_forward"/d'
    bad_cluster "no attention" '"attention" has no row of attention_forward' 's/"attention": \[/"was": [/'
    bad_cluster "a matmul without its K" 'row 1 of "matmuls": "K" is missing' 's/,"K":256//'
    bad_cluster "a rate as a word" 'row [0-9]+ of "matmuls": "flops_per_s" must be a number' \
        's/("M":2048.*"flops_per_s":)[0-9]+/\1"fast"/'
    bad_cluster "an op that is none" 'row 1 of "matmuls": "op" is "linear"' 's/"linear_forward"/"linear"/'
    bad_cluster "a dtype that is none" '"dtype" is "fp8", expected one of fp32' 's/"fp32"/"fp8"/'
    bad_cluster "no collectives" '"collectives" has no row of all_gather, and there are no "links"' \
        's/"collectives": \[/"was": [/'
    bad_cluster "a collective without its latency" 'row 1 of "collectives": "latency_s" is missing' \
        's/"latency_s":[0-9.e-]*,//'
    bad_cluster "more bytes than times" 'row 1 of "collectives": "measured_bytes" has 11 and "measured_s" 10' \
        's/"measured_bytes":\[256/"measured_bytes":[128,256/'
    bad_cluster "bytes that fall" 'row 1 of "collectives": number 2 of "measured_bytes"' \
        's/"measured_bytes":\[256,1024/"measured_bytes":[256,128/'
    bad_cluster "links without those between hosts" \
        '"links": "between_hosts" is missing: add it; a group of 4 ranks on 2 hosts' \
        's/"collectives": \[/"links":{"within_host":{"latency_s":0,"bytes_per_s":1e9}},"was": [/' --world 4
    local row='{"transport":"threads","ranks":9,"hosts":1,"op":"all_gather","latency_s":1,"bytes_per_s":1}'
    sed "/\"mpi\"/d; s/.*\"threads\",\"ranks\":8.*sum.*/  $row]}/" "$good" >lacks.json
    bad_plan "--transport that the cluster file lacks" '"collectives" has no row of all_gather over mpi' \
        --world 2 --transport mpi --cluster lacks.json
    echo "{}" >timeline.json
    everywhere "--trace onto a file" "--trace timeline.json exists already" "${train[@]}" --trace timeline.json
    everywhere "--trace below nothing" "cannot create --trace no/where.json" "${train[@]}" --trace no/where.json
    bad_plan "--trace of an estimate without a cluster" "--trace new.json: an estimated timeline needs a cluster" \
        --trace new.json
    bad_plan "--trace of a plan onto a file" "--trace timeline.json exists already" --cluster "$good" --trace \
        timeline.json
    if [ -e new.json ] || [ -e no ]; then
        fail "a refused --trace leaves nothing" "$(ls -d new.json no 2>&1)"
    else
        pass "a refused --trace leaves nothing" "no file was made"
    fi
}

# ---------------------------------------------------------------- adapters
precision=fp32 other=bf16
if "$program" --version | grep -q '^precision: bf16'; then precision=bf16 other=fp32; fi

# spoiled_adapters NAME PATTERN SED : --adapters whose configuration is changed is refused
spoiled_adapters() {
    rm -rf spoiled
    cp -r adapters spoiled
    sed -i -E "$3" spoiled/adapter_config.json
    bad "$1" "$2" --model trained --eval good/val.tok --seq 16 --adapters spoiled
}

# spoiled_stored NAME PATTERN FILE SED : a model of 8 bits whose FILE is changed, as long as it was, is refused
spoiled_stored() {
    rm -rf spoiled
    cp -r stored spoiled
    LC_ALL=C sed -i -E "$4" "spoiled/$3"
    bad "$1" "$2" --model spoiled --eval good/val.tok --seq 16
}

# a model whose files are in 8 bits
stored() {
    works "a model is exported in 8 bits" "$converter" --model trained --export stored --dtype int8
    works "… and evaluated" "$evaluator" --model stored --eval good/val.tok --seq 16
    works "… and adapted" "$program" "${train[@]}" --model stored --lora-rank 4 --out beside
    works "adapters beside a model whose weights are rounded while it streams in" "$program" "${train[@]}" --model \
        trained --base int8 --lora-rank 4 --out rounded
    works "… go on beside its 8-bit files" "$program" "${train[@]}" --model stored --lora-rank 4 --resume rounded \
        --steps 2 --lr 1e-3 --min-lr 1e-3 --allow-changes
    works "… and merged, in 8 bits again" "$converter" --model stored --adapters beside/latest --export again --merge \
        --dtype int8
    works "… and all of it" "$converter" --model trained --export all --dtype int8:all
    everywhere "a model of 8 bits trained itself" \
        "--model stored has int8 weights, and int8 weights cannot be trained, .* rounding error: add --lora-rank 16" \
        "${train[@]}" --model stored
    bad "a model of 8 bits trained itself, planned" \
        "--model stored has int8 weights, and int8 weights cannot be trained" --plan --model stored --seq 16 --world 2
    bad "a model of 8 bits resumed" "--resume stored: no checkpoint found" "${train[@]}" --resume stored
    bad "a model of 8 bits beside another --base" \
        "--base (fp32|bf16): the weights of --model stored are stored as --base int8: remove --base" "${train[@]}" \
        --model stored --lora-rank 4 --base "$precision"
    bad "a model of 8 bits, all of it asked for" \
        "--base int8:all: the weights of --model stored are stored as --base int8: remove --base" "${train[@]}" \
        --model stored --lora-rank 4 --base int8:all
    bad "a model of 8 bits exported as such" "--export --dtype int8:all: the weights of stored are int8 already" \
        --model stored --export twice --dtype int8:all
    bad "a model of 8 bits exported with --base" \
        "--export --base int8: an export of stored always dequantizes its int8 weights: remove --base" --model stored \
        --base int8 --export twice
    bad "--dtype and --base of 8 bits" \
        "--export --base int8 --dtype int8: --dtype alone decides how weights are written: remove --base" --model \
        trained --base int8 --export twice --dtype int8
    bad "a tp that would cut a block of a model of 8 bits" \
        "use a smaller --tp, or dequantize the model with convert_llama3 --export DIR" --model stored --eval \
        good/val.tok --seq 16 --ranks 2 --tp 2
    mkdir -p halfcopied && cp stored/config.json halfcopied
    bad "a model of 8 bits without its weights" \
        "halfcopied/config.json describes int8 weights, but there is no model.safetensors" "${train[@]}" --model \
        halfcopied --lora-rank 4
    if "$planner" --model stored --seq 16 --lora-rank 4 --world 4 2>&1 | grep -q -- "--base"; then
        fail "the plan of a model of 8 bits" "offers another --base"
    else
        pass "the plan of a model of 8 bits" "offers no other --base"
    fi
    bad "--dtype that is none" "--dtype int4: expected one of fp32.fp16.bf16.int8.int8:all.q8_0" \
        --model trained --export four --dtype int4
    spoiled_stored "8 bits whose scales are missing" \
        "tensor .*q_proj.weight is int8, but its scales model.layers.0.self_attn.q_proj.weight.scale are missing" \
        model.safetensors 's/layers.0.self_attn.q_proj.weight.scale/layers.0.self_attn.q_proj.weight.skale/'
    spoiled_stored "8 bits whose scales are no floats" "q_proj.weight.scale have another length or dtype" \
        model.safetensors 's/(q_proj.weight.scale":\{"dtype":")F32(","shape":\[)([0-9]+)/\1I32\2\3/'
    spoiled_stored "8 bits that config.json does not have" \
        "tensor model.layers.0.self_attn.q_proj.weight is int8, but quantization_config .* says otherwise" \
        config.json '/quantization_config/d'
    spoiled_stored "more in 8 bits than there is" \
        "tensor model.embed_tokens.weight is not int8, but quantization_config in config.json says otherwise" \
        config.json 's/"all_tensors": false/"all_tensors": true/'
    spoiled_stored "8 bits of another kind" \
        'the weights are quantized by bitsandbytes; the only supported method is absmax_int8_block64' config.json \
        's/"method": "[a-z0-9_]*"/"quant_method": "bitsandbytes"/'
    spoiled_stored "8 bits of which is not told" '"all_tensors" of "quantization_config" must be true or false' \
        config.json 's/"all_tensors": false/"all_tensors": 0/'
}

adapters() {
    local lora=("${train[@]}" --model trained --lora-rank 4)
    works "adapters are trained" "$program" "${lora[@]}" --out adapting
    mkdir adapters
    cp adapting/latest/adapter_{config.json,model.safetensors} adapters/
    works "and evaluated, beside a model in 8 bits" "$evaluator" --model trained --adapters adapters --base int8 \
        --eval good/val.tok --seq 16
    works "and go on" "$program" "${train[@]}" --model trained --adapters adapters --base int8 --out adapted
    works "another run" "$program" "${train[@]}" --seed 2 --out second
    converted "another model" second another
    works "a run of a whole model" "$program" "${train[@]}" --out whole
    everywhere "a quantized base without adapters" \
        "--base int8 needs adapters: int8 weights cannot .*; add --lora-rank 16, or use --base (fp32|bf16)" \
        "${train[@]}" --base int8
    bad "all of it in 8 bits without adapters" "--base int8:all needs adapters" "${train[@]}" --base int8:all
    bad "--base of a dtype that is none" "--base int4: expected one of auto\|fp32\|bf16\|int8\|int8:all" "${lora[@]}" \
        --base int4
    bad "--base of another precision" "--base (fp32|bf16): this build computes in" "${lora[@]}" --base "$other"
    everywhere "adapters on a matrix that is none" \
        '--lora-targets q,head: a block has no linear layer "head": expected some of q,k,v,o,gate,up,down' \
        "${lora[@]}" --lora-targets q,head
    bad "adapters on nothing" '--lora-targets q,,v: a block has no linear layer ""' "${lora[@]}" --lora-targets q,,v
    bad "adapters wider than the model" "--lora-rank 33 exceeds the hidden size of trained, 32" "${train[@]}" --model \
        trained --lora-rank 33
    bad "Muon for adapters" "--optimizer muon trains the matrices of the blocks, which are frozen .*rank 4" \
        "${lora[@]}" --optimizer muon
    bad "--lora-alpha without adapters" "--lora-alpha has no effect without --lora-rank" "${train[@]}" --lora-alpha 3
    bad "--lora-targets without adapters" "--lora-targets has no effect without --lora-rank" "${train[@]}" \
        --lora-targets q
    bad "--lora-rank of an evaluation" "--lora-rank 4 creates adapters to be trained, and eval_llama3 does not train" \
        --model trained --eval good/val.tok --seq 16 --lora-rank 4
    bad "--merge without adapters" "--merge adds adapters to the model.s weights, and there are no adapters" --model \
        trained --export merged --merge
    bad "a window of one step" "--outlier-window 1: expected 2 or more steps" "${train[@]}" --outlier-window 1
    bad "--export of adapters as they are" "--export with --adapters would only copy the adapters: add --merge" \
        --model trained --adapters adapters --export copied
    bad "--export of a model in 8 bits" \
        "--export --base int8 --dtype fp32: --dtype alone decides how weights are written: remove --base" \
        --model trained --base int8 --export rounded
    bad "--export onto adapters" "adapters exists already and is another model" --model trained --export adapters
    bad "--adapters that are not there" "--adapters nowhere: cannot read nowhere/adapter_config.json" --model trained \
        --adapters nowhere --eval good/val.tok --seq 16
    bad "--adapters of another rank" "--lora-rank 8, but the adapters in adapters have 4" "${lora[@]}" \
        --lora-rank 8 --adapters adapters
    bad "--adapters of another alpha" "--lora-alpha 4, but the adapters in adapters have 8" "${lora[@]}" \
        --lora-alpha 4 --adapters adapters
    bad "--adapters of other matrices" \
        "--lora-targets q,v, but the adapters in adapters have q,k,v,o,gate,up,down" "${lora[@]}" --lora-targets \
        q,v --adapters adapters
    bad "--adapters of another model" \
        "adapters/adapter_model.safetensors: tensor .*q_proj.lora_A.weight is 4 x 32 F32, but the model .* has 4 x 64" \
        --model "$fixture" "${evaluate[@]}" --adapters adapters
    spoiled_adapters "adapters of another kind" '"peft_type" is "IA3", which is not supported: expected LORA' \
        's/"LORA"/"IA3"/'
    spoiled_adapters "adapters with a bias" '"bias" is "all"' 's/"none"/"all"/'
    spoiled_adapters "DoRA" '"use_dora" is true' 's/"r": 4/"use_dora": true, "r": 4/'
    spoiled_adapters "adapters of several ranks" '"rank_pattern" is \{"q_proj":2\}' \
        's/"r": 4/"rank_pattern": {"q_proj": 2}, "r": 4/'
    spoiled_adapters "adapters without a rank" '"r" is missing' 's/"r": 4,//'
    spoiled_adapters "adapters with another rank than their tensors" 'is 4 x 32 F32, but the model .* has 2 x 32' \
        's/"r": 4/"r": 2/'
    spoiled_adapters "adapters on the head" '"target_modules" has "lm_head"' 's/"q_proj"/"lm_head"/'
    spoiled_adapters "adapters on a pattern" '"target_modules" is not a list of names' \
        's/"target_modules": .*/"target_modules": "all-linear"/'
    spoiled_adapters "a tensor that adapts nothing" \
        'tensor base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight does not belong to this model' \
        's/"q_proj", //'
    bad "a checkpoint of adapters resumed without them" \
        "--resume adapted/step-00000001 holds adapters of rank 4: resume with --lora-rank 4" "${train[@]}" --resume \
        adapted --steps 2
    bad "a checkpoint of adapters without its model" "--resume adapted/step-00000001 holds adapters: add --model" \
        --data good/train.tok --seq 16 --batch 1 --threads 1 --lora-rank 4 --base int8 --resume adapted --steps 2
    bad "a checkpoint of a whole model resumed with adapters" \
        "--resume whole/step-00000001 holds a whole model, but --lora-rank 4 trains adapters" "${lora[@]}" --resume \
        whole --steps 2
    bad "a checkpoint of adapters beside another base" "--base fp32, was int8|--base bf16, was int8" "${lora[@]}" \
        --resume adapted --steps 2
    bad "a checkpoint of adapters beside another model" "base model [0-9a-f]{16}, was [0-9a-f]{16}" "${train[@]}" \
        --model another --lora-rank 4 --base int8 --resume adapted --steps 2
    bad "--adapters and --resume" "--adapters adapters and --resume adapted both give the adapters to start from" \
        "${lora[@]}" --adapters adapters --base int8 --resume adapted --steps 2
    bad "a tp that would cut a block of 8 bits" \
        "--tp 2 would split self_attn.o_proj.weight within a block of 64 int8 weights" "${lora[@]}" --base int8 --tp \
        2 --ranks 2
    works "… and one that does not" "$planner" --model llama3-8b --world 8 --tp 8 --base int8 --lora-rank 16
}

# ---------------------------------------------------------------- a standard output that is full or closed
# into FILE COMMAND… : COMMAND with its standard output there.   without_output COMMAND… : with none
into() { local file=$1; shift; "$@" >"$file"; }
without_output() { "$@" >&-; }
export -f into without_output
# full NAME COMMAND… : a result that cannot be written is an error
full() {
    local name=$1
    shift
    refused "$name into a full standard output" "standard output cannot be written: No space left on device; " \
        bash -c 'into /dev/full "$@"' - "$@"
}

# trains_without NAME HOW : training does not need its progress lines, and says so once
trains_without() {
    local code notes
    rm -rf unseen
    timeout -k 1 20 bash -c "$2"' "$@"' - "$program" "${train[@]}" --steps 3 --warmup 0 --out unseen </dev/null 2>.log
    code=$?
    notes=$(grep -c "^note: standard output is full or closed: progress lines are lost, and training continues$" .log)
    if [ "$code $notes $(wc -l <.log) $(grep -c '"loss"' unseen/metrics.jsonl)" = "0 1 1 3" ]; then
        pass "$1" "exit code 0, $(cat .log)"
    else
        fail "$1" "exit code $code, $notes notes, expected 0 and 1: $(tail -n 2 .log)"
    fi
}

results() {
    echo 12 >ids
    full "--help" "$program" --help
    full "--version" "$program" --version
    full "tokens_llama3 --help" "$tokens" --help
    full "tokens_llama3 --version" "$tokens" --version
    full "plan_llama3 --help" "$planner" --help
    full "--encode" "$tokens" --encode sample/00.txt --tokenizer good/tokenizer.model
    full "--decode" "$tokens" --decode ids --tokenizer good/tokenizer.model
    full "generate_llama3 --help" "$generator" --help
    full "eval_llama3 --help" "$evaluator" --help
    full "convert_llama3 --help" "$converter" --help
    full "plan_llama3" "$planner" --world 2
    full "--eval" "$evaluator" --model trained --eval good/val.tok --seq 16 --threads 1
    full "--eval on 2 ranks" "$evaluator" --model trained --eval good/val.tok --seq 16 --threads 1 --ranks 2
    full "--prompt" "$generator" --model trained --prompt hello --max-tokens 20 --threads 1
    works "a run to audit" "$program" "${train[@]}" --out audited
    full "--audit" "$tokens" --audit --out audited
    refused "--eval into a closed standard output" "standard output cannot be written: it is closed; " \
        bash -c 'without_output "$@"' - "$evaluator" --model trained --eval good/val.tok --seq 16 --threads 1
    trains_without "training into a full standard output goes on" 'into /dev/full'
    trains_without "training into a closed standard output goes on" without_output
}

# ---------------------------------------------------------------- text without text
corpora() {
    local name
    mkdir -p none
    : >blank.txt
    refused "text.sh with a folder without files" "none" "$top/dev/data/text.sh" tokens none
    refused "text.sh with an empty text" "blank.txt|text" "$top/dev/data/text.sh" tokens blank.txt
    refused "text.sh with a text that is not there" "nothing.txt does not exist" "$top/dev/data/text.sh" tokens \
        nothing.txt
    refused "text.sh without a text" "expected an output folder and at least one text" "$top/dev/data/text.sh" tokens
    refused "text.sh into a file" "file" "$top/dev/data/text.sh" file sample/00.txt
    refused "texts.sh without a folder" "given 0 arguments, expected one" "$top/dev/data/texts.sh"
    refused "texts.sh into a file" "file cannot be created" "$top/dev/data/texts.sh" file
    mkdir -p few-texts
    for name in bash dirname mkdir mktemp rm grep; do ln -sf "$(type -P "$name")" few-texts/; done
    refused "texts.sh without Debian's programs" "there is no apt-get here" \
        env PATH="$PWD/few-texts" "$top/dev/data/texts.sh" texts
    command -v python3 >/dev/null || return
    printf 'not R' >not-r.rdx
    refused "r_strings.py with a file that is not R's" "not-r.rdx: .*expected the data of an R package" \
        python3 "$top/dev/data/r_strings.py" not-r.rdx texts-out
}

# ---------------------------------------------------------------- building without the libraries
# make in a folder of programs with neither a compiler nor MPI says which packages it would install, and nothing else
building() {
    local name said
    mkdir -p few
    for name in sh make grep id; do ln -sf "$(type -P "$name")" few/; done
    ln -sf "$(type -P true)" few/apt-get
    said=$(PATH=$PWD/few make -n -C "$top" demo 2>&1 >.log | head -n 1)
    if [ -z "$said" ] && grep -q "installing .*cjson" .log; then
        pass "make without the libraries" "$(grep -am1 installing .log)"
    else
        fail "make without the libraries" "on stderr: $said"
    fi
}

. "$top/dev/test/bad_input_reading.sh"
prepare
if [ "${2:-all}" != all ]; then
    "$2"
    echo "$passed passed, $failed failed"
    exit $((failed > 0))
fi
command_line
token_files
configs
tokenizers
safetensors
requests
tasks
retired_options
meshes
outputs
clusters
adapters
stored
results
corpora
building
unreachable_and_endless_inputs
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
