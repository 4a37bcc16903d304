#!/usr/bin/env bash
# The longer comparison: a model of 5.5 GB in 2500 MB, four domains, three interleaved repeats.
# Usage: bench-large.sh MODEL.gguf; environment: HOTPIN (the program), OUT (folder for results).
# BENCH_TOKENS, BENCH_REPEATS and BENCH_MEMORY change the protocol; say so beside the figures.
set -euo pipefail

model=${1:?usage: bench-large.sh MODEL.gguf}
HOTPIN=${HOTPIN:-hotpin}
OUT=${OUT:-out}
tokens=${BENCH_TOKENS:-150}
repeats=${BENCH_REPEATS:-3}
memory=${BENCH_MEMORY:-2500MB}
here=$(dirname "$0")
workload=$here/../workload
. "$here/common.sh"
mkdir -p "$OUT"
rm -rf "$OUT/large-journal"

heading "1/2  A profile from the part of the prose that the benchmark does not decode"
report_read_ahead "$model"
"$HOTPIN" profile "$model" --prompts "$workload/prose.txt" --skip-tokens 640 -o "$OUT/large-prose.toml"

heading "2/2  off, fetch, static and adaptive in $memory: four domains x $tokens tokens, $repeats repeats"
code=0
bench_in_limit "$model" --workload "$workload" --domains prose,rust,zh,python --tokens "$tokens" \
    --memory "$memory" --policies off,fetch,static,adaptive \
    --profile "$OUT/large-prose.toml" --repeats "$repeats" \
    --json "$OUT/large.json" --chart "$OUT/large.svg" --journal "$OUT/large-journal" || code=$?
[ "$code" -eq 0 ] || fail_with "$code"
printf '\nFigures: %s. Chart: %s. Journals: %s\n' "$OUT/large.json" "$OUT/large.svg" "$OUT/large-journal/"
