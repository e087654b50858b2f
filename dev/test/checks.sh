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
