#!/usr/bin/env bash
# gpu-check.sh [HOTPIN]
# What a graphics card does with a model whose experts do not fit its memory: reload (a pool of experts that
# come and go), static (whole layers' experts on the card) and the processor, one table. Needs no network
# and builds nothing: HOTPIN is a program built with Vulkan or CUDA (`make gpu`), the model is made here.
# Sizes: HOTPIN_CHECK_LAYERS, _EXPERTS, _WIDTH, _TOKENS; smaller ones for software devices.
set -euo pipefail

hotpin=${1:-${HOTPIN:-hotpin}}
layers=${HOTPIN_CHECK_LAYERS:-12} experts=${HOTPIN_CHECK_EXPERTS:-32} width=${HOTPIN_CHECK_WIDTH:-1024}
tokens=${HOTPIN_CHECK_TOKENS:-64}
work=$(mktemp -d "${TMPDIR:-/tmp}/hotpin-gpu-check.XXXXXX")
trap 'rm -rf "$work"' EXIT
began=$SECONDS

"$hotpin" demo toy --layers "$layers" --experts "$experts" --top-k 4 --width "$width" \
    --expert-width "$width" -o "$work/toy.gguf" >&2
"$hotpin" doctor "$work/toy.gguf" >"$work/doctor" || true
grep -E '^(ok|warn|fail) +device' "$work/doctor" || {
    echo "gpu-check: $hotpin finds no graphics device; build it with \`make gpu\` and see \`$hotpin doctor\`" >&2
    exit 1
}
all=$("$hotpin" inspect --json "$work/toy.gguf" | sed -nE 's/.*"expert_bytes": ?([0-9]+).*/\1/p' | head -1)

# NAME OPTIONS...: one greedy run; keeps its text, its speed and what it says of the device.
run() {
    local name=$1 text
    shift
    "$hotpin" run "$work/toy.gguf" --raw -p "A card holds what was used last." --temp 0 -n "$tokens" -c 512 \
        --journal "$work/$name.jsonl" "$@" >"$work/$name.text" 2>"$work/$name.said" || {
        cat "$work/$name.said" >&2
        return 1
    }
}
field() { grep -oE "\"$2\":[0-9.]+" "$work/$1.jsonl" | tail -1 | cut -d: -f2; }
row() {
    local name=$1 what=$2 speed hits misses uploaded ratio same
    speed=$(sed -nE 's/.*answer .*\(([0-9.]+) tok\/s\).*/\1/p' "$work/$name.said")
    hits=$(field "$name" hits || true) misses=$(field "$name" misses || true)
    uploaded=$(field "$name" uploaded_bytes || true)
    ratio=$(awk -v h="${hits:-0}" -v m="${misses:-0}" 'BEGIN { if (h + m > 0) printf "%.1f%%", 100 * h / (h + m); else print "-" }')
    same=$(cmp -s "$work/cpu.text" "$work/$name.text" && echo yes || echo no)
    awk -v n="$what" -v s="${speed:-?}" -v r="$ratio" -v u="${uploaded:-0}" -v e="$same" \
        'BEGIN { printf "%-34s %10s %9s %12.1f %12s\n", n, s, r, u / 1048576, e }'
}

run cpu
run dense --gpu-layers all --vram off
run reload25 --gpu-layers all --vram $((all / 4))
run reload50 --gpu-layers all --vram $((all / 2))
run static50 --gpu-layers all --vram off --gpu-experts $((layers / 2))
echo
printf '%-34s %10s %9s %12s %12s\n' "where experts are" "tok/s" "hits" "uploaded MiB" "text as CPU's"
row cpu "processor alone"
row dense "processor, dense on the card"
row reload25 "reload, pool of a quarter"
row reload50 "reload, pool of a half"
row static50 "static, half of the layers"
echo "pools of both sizes wrote the same text: $(cmp -s "$work/reload25.text" "$work/reload50.text" && echo yes || echo no)"
echo "$((SECONDS - began)) s in all"
