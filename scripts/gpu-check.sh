#!/usr/bin/env bash
# gpu-check.sh [HOTPIN]
# What a graphics card does with a model whose experts do not fit its memory: reload (a pool of experts that
# come and go), static (whole layers' experts on the card) and the processor, in one table. Needs no network
# and builds nothing: HOTPIN is a program built with Vulkan or CUDA (`make gpu`), the model is made here.
# Sizes: HOTPIN_CHECK_LAYERS, _EXPERTS, _WIDTH, _TOKENS; smaller ones for software devices.
# HOTPIN_CHECK_RUN_S bounds each run; one that takes longer has no figures.
set -euo pipefail

hotpin=${1:-${HOTPIN:-hotpin}}
layers=${HOTPIN_CHECK_LAYERS:-12} experts=${HOTPIN_CHECK_EXPERTS:-32} width=${HOTPIN_CHECK_WIDTH:-1024}
tokens=${HOTPIN_CHECK_TOKENS:-64} run_s=${HOTPIN_CHECK_RUN_S:-40}
command -v "$hotpin" >/dev/null 2>&1 || {
    echo "gpu-check: there is no program $hotpin; \`make gpu\` builds it" >&2
    exit 1
}
work=$(mktemp -d "${TMPDIR:-/tmp}/hotpin-gpu-check.XXXXXX")
trap 'rm -rf "$work"' EXIT
began=$SECONDS

"$hotpin" demo toy --layers "$layers" --experts "$experts" --top-k 4 --width "$width" \
    --expert-width "$width" -o "$work/toy.gguf" >&2
"$hotpin" doctor "$work/toy.gguf" >"$work/doctor" || true
grep -qE '^ *(ok|warn|fail) +device link' "$work/doctor" || {
    grep -E '^ *(ok|warn|fail) +device' "$work/doctor" >&2 || true
    echo "gpu-check: $hotpin uses no graphics device here. Build it with \`make gpu\` (Vulkan) or" \
        "\`cargo build --release --features cuda\`, check the driver (\`vulkaninfo --summary\`, \`nvidia-smi\`), or" \
        "name Mesa's software device with GGML_VK_VISIBLE_DEVICES=0, which shows counts and equality but no speed" >&2
    exit 1
}
all=$("$hotpin" inspect --json "$work/toy.gguf" | sed -nE 's/.*"expert_bytes": ?([0-9]+).*/\1/p' | head -1)

# NAME OPTIONS...: one greedy run; keeps its text, its speed and what it says of the device.
run() {
    local name=$1
    shift
    timeout "$run_s" "$hotpin" run "$work/toy.gguf" --raw -p "A card holds what was used last." --temp 0 \
        -n "$tokens" -c 512 --journal "$work/$name.jsonl" "$@" >"$work/$name.text" 2>"$work/$name.said" || {
        local code=$?
        rm -f "$work/$name.text"
        if [ "$code" -eq 124 ]; then
            echo "gpu-check: $name did not end within $run_s s" >&2
        else
            sed "s/^/gpu-check: $name: /" "$work/$name.said" >&2
        fi
    }
}
field() { grep -oE "\"$2\":[0-9.]+" "$work/$1.jsonl" 2>/dev/null | tail -1 | cut -d: -f2; }
speed() { sed -nE 's/.*answer .*\(([0-9.]+) tok\/s\).*/\1/p' "$work/$1.said"; }
same() { cmp -s "$work/$1.text" "$work/$2.text" && echo yes || echo no; }
row() {
    local name=$1 what=$2 hits misses uploaded
    if [ ! -e "$work/$name.text" ]; then
        printf '%-30s %9s\n' "$what" "failed"
        return
    fi
    hits=$(field "$name" hits || true) misses=$(field "$name" misses || true)
    uploaded=$(field "$name" uploaded_bytes || true)
    awk -v n="$what" -v s="$(speed "$name")" -v slots="$(field "$name" slots || true)" -v h="${hits:-0}" \
        -v m="${misses:-0}" -v u="${uploaded:-0}" -v c="$(same cpu "$name")" 'BEGIN {
            ratio = h + m > 0 ? sprintf("%.1f%%", 100 * h / (h + m)) : "-"
            printf "%-30s %9s %6s %8s %13.1f %14s\n", n, s == "" ? "?" : s, slots == "" ? 0 : slots, ratio, u / 1048576, c
        }'
}

run cpu
run dense --gpu-layers all --vram off
run reload25 --gpu-layers all --vram $((all / 4))
run reload50 --gpu-layers all --vram $((all / 2))
run static50 --gpu-layers all --vram off --gpu-experts $((layers / 2))
echo
grep -E '^ *(ok|warn|fail) +device' "$work/doctor" | sed -E 's/^ *[a-z]+ +//'
echo
printf '%-30s %9s %6s %8s %13s %14s\n' "where experts are" "tok/s" "slots" "hits" "uploaded MiB" "text as CPU's"
row cpu "processor alone"
row dense "processor, dense on the card"
row reload25 "reload, pool of a quarter"
row reload50 "reload, pool of a half"
row static50 "static, half of the layers"
echo
echo "pools of both sizes wrote the same text: $(same reload25 reload50)"
echo "$((SECONDS - began)) s in all; $tokens tokens a run, experts of $((all / 1048576)) MiB"
for name in cpu dense reload25 reload50 static50; do
    [ -e "$work/$name.text" ] || exit 1
done
