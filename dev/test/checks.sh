# checks.sh: sourced by the scripts that print `pass NAME: WHAT` or `FAIL NAME: WHAT` for each check and end with
# `N passed, N failed`.
passed=0 failed=0

pass() {
    echo "pass $1: ${2:0:300}"
    passed=$((passed + 1))
}
fail() {
    echo "FAIL $1: ${2:0:800}"
    failed=$((failed + 1))
}

# bad NAME PATTERN COMMAND… : exit code 1, one line on standard error, an error that matches, and neither an output
# bad.tok nor a part of another one left behind
bad() {
    local name=$1 pattern=$2 code left
    shift 2
    timeout -k 1 60 "$@" </dev/null >.out 2>.err
    code=$?
    left=$(compgen -G 'bad.tok*'; compgen -G 'bad.*.partial')
    if [ "$code" != 1 ] || [ "$(wc -l <.err)" != 1 ] || ! grep -qE "^error: .*$pattern" .err; then
        fail "$name" "exit code $code, expected 1 and 'error: …$pattern': $(cat .err)"
    elif [ "$left" ]; then fail "$name" "left behind: $left"
    else pass "$name" "$(cat .err)"; fi
}

# same NAME FILE FILE : the files, which may be pipes, have the same bytes, and some
same() {
    cat "$2" >.first
    cat "$3" >.second
    if [ -s .first ] && cmp .first .second >.out 2>&1; then pass "$1" "$(wc -c <.first) bytes"
    else fail "$1" "$(cat .out) $(head -c 100 .first) / $(head -c 100 .second)"; fi
}

# program_for OPTION… : the program next to $program that takes these options
program_for() {
    local name=train_llama3 end=
    case " $* " in
        *" --prompt "* | *" --prompts "* | *" --chat "*) name=generate_llama3 ;;
        *" --eval "* | *" --score "* | *" --choices "*) name=eval_llama3 ;;
        *" --export "*) name=convert_llama3 ;;
        *" --plan "* | *" --world "* | *" --cluster "*) name=plan_llama3 ;;
    esac
    case $program in *_cuda) end=_cuda ;; esac
    echo "${program%/*}/$name$end"
}
