#!/usr/bin/env bash
# Fuzzes every reader of files for some seconds each. Usage: fuzz.sh SECONDS FOLDER; in FOLDER is the build,
# and for each target what was found so far. Needs cargo-fuzz and a nightly toolchain (HOTPIN_NIGHTLY).
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=$1 folder=$2 nightly=${HOTPIN_NIGHTLY:-nightly}
cargo fuzz --version >/dev/null 2>&1 || {
    echo "fuzz: cargo-fuzz is missing; 'cargo install cargo-fuzz' installs it" >&2
    exit 1
}
rustc "+$nightly" --version >/dev/null 2>&1 || {
    echo "fuzz: there is no $nightly toolchain; 'rustup toolchain install nightly' installs it" >&2
    exit 1
}
mkdir -p "$folder"
# llama.cpp's downloads, which nobody calls here, call a library that llama-cpp-sys-4 ships and does not build. Coverage
# keeps every function alive, so the linker asks for it.
binding=$(cargo metadata --format-version 1 --manifest-path fuzz/Cargo.toml | python3 -c '
import json, sys
packages = json.load(sys.stdin)["packages"]
print(next(p["manifest_path"] for p in packages if p["name"] == "llama-cpp-sys-4").removesuffix("/Cargo.toml"))')
"${CXX:-c++}" -std=c++17 -O1 -fPIC -c "$binding/llama.cpp/vendor/cpp-httplib/httplib.cpp" -o "$folder/httplib.o"
export RUSTFLAGS="-Clink-arg=$folder/httplib.o ${RUSTFLAGS:-}"
for target in fuzz/fuzz_targets/*.rs; do
    target=$(basename "$target" .rs)
    echo "### $target"
    mkdir -p "$folder/$target"
    # The first folder is where new inputs go; those that are committed are read.
    cargo "+$nightly" fuzz run --strip-dead-code --target-dir "$folder/target" "$target" "$folder/$target" \
        "fuzz/corpus/$target" -- "-max_total_time=$seconds" -max_len=16384 -timeout=10 -rss_limit_mb=2048 \
        -print_final_stats=1 2>&1 | tee "$folder/$target.log" |
        { grep -E "^#[0-9]+.*(INITED|DONE)|stat::(number_of_executed|average_exec)|ERROR|panicked|SUMMARY|^error" || true; } || {
        tail -40 "$folder/$target.log" >&2
        exit 1
    }
done
