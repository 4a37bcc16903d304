#!/usr/bin/env bash
# gpu-check.sh [HOTPIN]
# What a graphics card does with a model whose experts do not fit its memory: reload (a pool of experts that
# come and go), static (whole layers' experts on the card) and the processor, in one table. Needs no network
# and builds nothing: HOTPIN is a program built with Vulkan or CUDA (`make gpu`), the model is made here. It ends
# within five minutes on any device: a small model is timed first, and the largest is taken that leaves enough
# time for all runs. HOTPIN_CHECK_LAYERS, _EXPERTS, _WIDTH and _TOKENS take the place of that choice; a run
# that has no time left has no figures.
set -euo pipefail

hotpin=${1:-${HOTPIN:-hotpin}}
# All in all, seconds, and what is kept of it for the table.
limit_s=285 end_s=5
tokens=${HOTPIN_CHECK_TOKENS:-64}
# Layers, experts of each, width: a GB on a card, a few MB on a software device.
sizes=("12 32 1024" "8 16 512" "4 8 256")
command -v "$hotpin" >/dev/null 2>&1 || {
    echo "gpu-check: there is no program $hotpin; \`make gpu\` builds it" >&2
    exit 1
}
work=$(mktemp -d "${TMPDIR:-/tmp}/hotpin-gpu-check.XXXXXX")
trap 'rm -rf "$work"' EXIT
began=$SECONDS

left() { echo $((limit_s - end_s - SECONDS + began)); }

# SECONDS COMMAND...: the command, for so long at most. In the foreground, so that Ctrl-C reaches it.
within() {
    local most=$1
    shift
    [ "$most" -ge 1 ] && timeout --foreground "$most" "$@"
}

make_toy() {
    within "$(left)" "$hotpin" demo toy --layers "$1" --experts "$2" --top-k 4 --width "$3" --expert-width "$3" \
        --force -o "$work/toy.gguf" >&2
}

# NAME SECONDS TOKENS OPTIONS...: one greedy run; keeps its text, its speed and what it says of the device.
run() {
    local name=$1 most=$2 count=$3 code=0
    shift 3
    within "$most" "$hotpin" run "$work/toy.gguf" --raw -p "A card holds what was used last." --temp 0 \
        -n "$count" -c 512 --journal "$work/$name.jsonl" "$@" >"$work/$name.text" 2>"$work/$name.said" || code=$?
    [ "$code" -eq 0 ] && return
    rm -f "$work/$name.text"
    if [ "$code" -eq 124 ] || [ "$most" -lt 1 ]; then
        echo "gpu-check: $name did not end within $most s" >&2
    else
        sed "s/^/gpu-check: $name: /" "$work/$name.said" >&2
    fi
}
answer_s() { sed -nE 's/.*answer [0-9]+ tokens in ([0-9.]+) s.*/\1/p' "$work/$1.said"; }

# Weights that a token touches, as a multiple of a layer's of width 1.
touched() { awk -v l="$1" -v w="$3" 'BEGIN { print l * w * w }'; }

# The first of the sizes of which all runs have time. A token is taken to need time in proportion to the weights
# that it touches, which is too much where a device waits rather than computes.
choose() {
    local probe=8 size answer whole_s
    # The first run compiles what the device computes with.
    run warm "$(($(left) / 2))" 2 --gpu-layers all --vram off
    whole_s=$SECONDS
    run probe "$(($(left) / 3))" "$probe" --gpu-layers all --vram off
    whole_s=$((SECONDS - whole_s + 1)) answer=$(answer_s probe)
    for size in "${sizes[@]}"; do
        # shellcheck disable=SC2086 # three numbers
        awk -v a="${answer:-1e9}" -v n="$probe" -v big="$(touched $size)" -v little="$(touched ${sizes[-1]})" \
            -v t="$tokens" -v start="$whole_s" -v left="$(left)" \
            'BEGIN { exit !(5 * (2 * start + 1.5 * a / n * big / little * t) < left) }' && break
    done
    echo "$size"
}

# shellcheck disable=SC2086
make_toy ${sizes[-1]}
within "$(left)" "$hotpin" doctor "$work/toy.gguf" >"$work/doctor" || true
grep -qE '^ *(ok|warn|fail) +device link' "$work/doctor" || {
    grep -E '^ *(ok|warn|fail) +device' "$work/doctor" >&2 || true
    echo "gpu-check: $hotpin uses no graphics device here. Build it with \`make gpu\` (Vulkan) or" \
        "\`cargo build --release --features cuda\`, check the driver (\`vulkaninfo --summary\`, \`nvidia-smi\`), or" \
        "name Mesa's software device with GGML_VK_VISIBLE_DEVICES=0, which shows counts and equality but no speed" >&2
    exit 1
}
if [ -n "${HOTPIN_CHECK_LAYERS:-}${HOTPIN_CHECK_EXPERTS:-}${HOTPIN_CHECK_WIDTH:-}" ]; then
    layers=${HOTPIN_CHECK_LAYERS:-12} experts=${HOTPIN_CHECK_EXPERTS:-32} width=${HOTPIN_CHECK_WIDTH:-1024}
else
    read -r layers experts width <<<"$(choose)"
fi
make_toy "$layers" "$experts" "$width"
all=$("$hotpin" inspect --json "$work/toy.gguf" | sed -nE 's/.*"expert_bytes": ?([0-9]+).*/\1/p' | head -1)

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

# Each may take its part of the time that is left.
run cpu "$(($(left) / 5))" "$tokens"
run dense "$(($(left) / 4))" "$tokens" --gpu-layers all --vram off
run reload25 "$(($(left) / 3))" "$tokens" --gpu-layers all --vram $((all / 4))
run reload50 "$(($(left) / 2))" "$tokens" --gpu-layers all --vram $((all / 2))
run static50 "$(left)" "$tokens" --gpu-layers all --vram off --gpu-experts $((layers / 2))
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
echo "$((SECONDS - began)) s in all; $tokens tokens a run, $layers layers of $experts experts, $((all / 1048576)) MiB of them"
for name in cpu dense reload25 reload50 static50; do
    [ -e "$work/$name.text" ] || exit 1
done
