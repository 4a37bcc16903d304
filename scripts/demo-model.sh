#!/usr/bin/env bash
# Makes a demo model unless the one that is there was made from the same sources with the same options.
# Usage: demo-model.sh OUT.gguf DENSE.gguf [options of `hotpin demo model`]; environment: HOTPIN.
# OUT.gguf.recipe beside the model holds a hash of everything that its bytes depend on.
set -euo pipefail

out=$1 dense=$2
shift 2
cd "$(dirname "$0")/.."
recipe=$({
    echo "$*"
    sha256sum <"$dense"
    # The builder, what it uses of the engine, its texts, and the version of llama.cpp.
    find src/demo src/engine/capture* src/engine/gguf_write.rs src/engine/quantize.rs workload/*.txt \
        -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
    grep -A 1 '^name = "llama-cpp-sys-4"' Cargo.lock
} | sha256sum | cut -d' ' -f1)

# Two builds at once (another clone, CI) wait for each other.
exec 9>"$out.lock"
flock 9
if [ -s "$out" ] && [ "$(cat "$out.recipe" 2>/dev/null)" = "$recipe" ]; then
    exit 0
fi
[ -s "$out" ] && echo "$out was made by another version of the builder: making it again"
rm -f "$out.recipe"
"$HOTPIN" demo model --from "$dense" "$@" --force -o "$out"
echo "$recipe" >"$out.recipe"
