#!/usr/bin/env bash
# The demo on a model that is there already: profile, benchmark, one answer.
# Usage: demo.sh MODEL.gguf; environment: HOTPIN (the program), OUT (folder for results).
# DEMO_TOKENS, DEMO_REPEATS and DEMO_MEMORY make it shorter or harder.
set -euo pipefail

model=${1:?usage: demo.sh MODEL.gguf}
HOTPIN=${HOTPIN:-hotpin}
OUT=${OUT:-out}
tokens=${DEMO_TOKENS:-100}
repeats=${DEMO_REPEATS:-2}
memory=${DEMO_MEMORY:-45%}
here=$(dirname "$0")
workload=$here/../workload
. "$here/common.sh"
mkdir -p "$OUT"
# Journals of an earlier demo would be taken for this one's.
rm -rf "$OUT/journal"
trap 'printf "\ndemo: stopped before its end; see the last lines above\n" >&2' ERR

heading "1/4  The model"
"$HOTPIN" inspect "$model"
report_read_ahead "$model"

heading "2/4  A profile from English prose only"
echo "Which experts does prose use? The later part of the text is counted; the benchmark decodes its beginning."
"$HOTPIN" profile "$model" --prompts "$workload/prose.txt" --skip-tokens 640 -o "$OUT/prose.toml"

heading "3/4  Four policies in $memory of the model's size, while the topic drifts away from the profile"
cat <<TEXT
  off       llama.cpp as it is: pages come in by page fault
  static    the profile's hottest experts are locked once (HotPin)
  fetch     what the router picked is read at once, nothing is locked
  adaptive  the locked set follows the workload under feedback control
Each decodes the same $tokens tokens of prose, Rust, Chinese and Python. They take turns; repeats: $repeats.
TEXT
started=$SECONDS
trap - ERR
code=0
bench_in_limit "$model" --workload "$workload" --domains prose,rust,zh,python --tokens "$tokens" \
    --memory "$memory" --policies off,static,fetch,adaptive --profile "$OUT/prose.toml" \
    --repeats "$repeats" --json "$OUT/demo.json" --chart "$OUT/demo.svg" --journal "$OUT/journal" ||
    code=$?
echo "That took $((SECONDS - started)) s."
[ "$code" -eq 0 ] || fail_with "$code"

heading "4/4  One answer, with all the memory that this machine has to spare"
echo "> Why is the sky blue?"
"$HOTPIN" run "$model" -p "Why is the sky blue?" -n 60 --temp 0

heading "What to do next"
cat <<TEXT
  $OUT/demo.svg      the chart
  $OUT/demo.json     every figure
  $OUT/journal/      what adaptive decided at each tick, and by which rule (one JSON object a line)

The model is a small one made for this demo: it shows the mechanism, not good answers. With your own:
  $HOTPIN inspect MODEL.gguf
  $HOTPIN run MODEL.gguf -p "Hello"
README.md goes on from there.
TEXT
