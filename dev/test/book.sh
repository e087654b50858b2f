#!/usr/bin/env bash
# book.sh [NN…]: checks the book (dev/book/check.py) and runs the commands of its chapters, or of those that begin
# with NN. The commands train on data/kjv, as `make demo` does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ -f data/kjv/train.tok ] || dev/data/kjv.sh data/kjv >/dev/null
exec python3 dev/book/check.py run "$@"
