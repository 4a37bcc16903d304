#!/usr/bin/env bash
# A short real run of every store under valgrind's memcheck: whatever llama.cpp, or our calls into it, reads
# beyond what it has, uses before it was written or frees twice ends it with an error. Of MODEL without store
# `direct`, which needs minutes for a token of it here, and of a toy with it.
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
toy=$out/toy.gguf
"$HOTPIN" demo toy --layers 2 --experts 8 --force -o "$toy" >/dev/null

# Usage: checked FILE CAPACITY TOKENS POLICY STORE
checked() {
    local log=$out/valgrind-$(basename "$1" .gguf)-$4-$5.log began=$SECONDS
    said=$(valgrind --error-exitcode=99 --leak-check=full --errors-for-leak-kinds=definite --show-leak-kinds=definite \
        --num-callers=30 --suppressions="$here/valgrind.supp" --log-file="$log" \
        "$HOTPIN" run "$1" --raw -p "The sea" -n "$3" --temp 0 -t 1 -c 128 --policy "$4" --store "$5" \
        --capacity "$2" 2>"$out/valgrind.stderr") || {
        echo "sanitize: $1, policy $4, store $5: see $log" >&2
        cat "$out/valgrind.stderr" "$log" >&2
        exit 1
    }
    echo "$(basename "$1"), policy $4, store $5: $(sed -n 's/.*ERROR SUMMARY: //p' "$log" | tail -1), $((SECONDS - began)) s; \"$said\""
    [ "$4" = off ] && first=$said
    [ "$said" = "$first" ] || { echo "sanitize: not the same text: \"$first\"" >&2; exit 1; }
}

for how in "off mapped" "adaptive mapped" "adaptive direct"; do
    # shellcheck disable=SC2086
    checked "$toy" 3MB 8 $how
done
for how in "off mapped" "adaptive mapped"; do
    # shellcheck disable=SC2086
    checked "$model" 120MB 3 $how
done
rm "$toy"
