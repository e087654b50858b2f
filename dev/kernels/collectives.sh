#!/usr/bin/env bash
# collectives.sh [--check] [--rounds N] : the page of collectives, over the programs in $COLLECTIVES (one a precision),
# and the cluster file $CLUSTER, where a relative path counts from the repository's root. Ends with
# `N passed, N failed`.
# --check: a few small sizes, and the cluster file is thrown away.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
cluster=${CLUSTER:-build/cluster.json}
command="make -C dev/kernels collectives${*:+ ARGS=\"$*\"}"
commit=$(git describe --always --dirty 2>/dev/null || echo none)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0 check=
case " $* " in *" --check "*) check=1 ;; esac

# part NAME COMMAND… : shows the output, adds up its last `N passed, N failed`; what does not get there has failed
part() {
    local name=$1 counts
    shift
    timeout 300 "$@" --into "$work/cluster.json" --command "$command" --commit "$commit" </dev/null 2>&1 |
        tee "$work/out" | grep -vE '^[0-9]+ passed, [0-9]+ failed$'
    counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$work/out" | tail -n 1)
    if [ -z "$counts" ]; then
        echo "FAIL $name: ended before its last line"
        failed=$((failed + 1))
    else
        passed=$((passed + $(cut -d' ' -f1 <<<"$counts")))
        failed=$((failed + $(cut -d' ' -f3 <<<"$counts")))
    fi
}

programs=($COLLECTIVES)
for program in "${programs[@]}"; do part "rates of $program" "$program" rates "$@"; done
part threads "${programs[0]}" threads "$@" # bytes are bytes: one precision will do
if command -v mpirun >/dev/null && grep -q DHAVE_MPI "$(dirname "${programs[0]}")/flags"; then
    for ranks in 2 3 4 8; do
        part "mpi, $ranks ranks" mpirun --oversubscribe --bind-to none -np "$ranks" "${programs[0]}" mpi "$@"
    done
else
    echo "no mpirun, or no MPI in this build: its exchanges are left out"
fi
if [ -z "$check" ] && [ "$failed" = 0 ]; then
    mkdir -p "$(dirname "$cluster")" && mv "$work/cluster.json" "$cluster" && echo "wrote $cluster"
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
