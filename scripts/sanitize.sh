#!/usr/bin/env bash
# A short real run of every store under valgrind's memcheck: whatever llama.cpp, or our calls into it, reads
# beyond what it has, uses before it was written or frees twice ends it with an error.
# Usage: sanitize.sh MODEL OUT. Environment: HOTPIN. What is suppressed, and why, is in scripts/valgrind.supp.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=$1 out=$2
command -v valgrind >/dev/null || {
    [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || { echo "sanitize: valgrind is missing" >&2; exit 1; }
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq valgrind >/dev/null
}
mkdir -p "$out"
export HOTPIN_CONFIG=/dev/null
for policy in "off mapped" "adaptive mapped" "adaptive direct"; do
    set -- $policy
    log=$out/valgrind-$1-$2.log
    began=$SECONDS
    said=$(valgrind --error-exitcode=99 --leak-check=full --errors-for-leak-kinds=definite --show-leak-kinds=definite \
        --num-callers=30 --suppressions="$here/valgrind.supp" --log-file="$log" \
        "$HOTPIN" run "$model" --raw -p "The sea" -n 3 --temp 0 -t 1 -c 128 --policy "$1" --store "$2" \
        --capacity 120MB 2>"$out/valgrind.stderr") || {
        echo "sanitize: policy $1, store $2: see $log" >&2
        cat "$out/valgrind.stderr" "$log" >&2
        exit 1
    }
    echo "policy $1, store $2: $(sed -n 's/.*ERROR SUMMARY: //p' "$log" | tail -1), $((SECONDS - began)) s; \"$said\""
    [ -z "${first+set}" ] && first=$said
    [ "$said" = "$first" ] || { echo "sanitize: not the same text: \"$first\"" >&2; exit 1; }
done
