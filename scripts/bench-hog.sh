#!/usr/bin/env bash
# Adaptive control without a cgroup while another program takes memory: decodes six domains, starts a
# hog that touches HOG_GIB at 1 GB/s ten seconds in, and checks the output's hash against a run of `off`
# without a hog. Usage: bench-hog.sh MODEL   (env: HOTPIN, OUT, HOG_GIB, HOG_HOLD_S, HOG_TOKENS)
set -euo pipefail
cd "$(dirname "$0")/.."

model=$1
hotpin=${HOTPIN:-hotpin}
out=${OUT:-out}
gib=${HOG_GIB:-12}
hold=${HOG_HOLD_S:-10}
journal=$out/hog-journal
mkdir -p "$out"
rm -rf "$journal"

"$hotpin" bench "$model" --workload workload --tokens "${HOG_TOKENS:-600}" --warm --repeats 1 \
    --policies off,adaptive --json "$out/hog.json" --journal "$journal" &
bench=$!
trap 'kill "$bench" 2>/dev/null || true' EXIT
# The journal of the second run appears when its control loop starts.
until compgen -G "$journal/*adaptive*" >/dev/null; do
    kill -0 "$bench" 2>/dev/null || { echo "bench-hog: the bench ended before its second run" >&2; exit 1; }
    sleep 0.1
done
sleep 10
scripts/hog.py "$gib" "$hold"
wait "$bench"
trap - EXIT
"$hotpin" journal "$journal"/*adaptive* --chart "$out/hog.svg"
