#!/usr/bin/env bash
# Tests in miri. Usage: miri.sh TARGET_FOLDER. Needs a nightly toolchain (HOTPIN_NIGHTLY) with miri.
set -euo pipefail
cd "$(dirname "$0")/.."
nightly=${HOTPIN_NIGHTLY:-nightly}
cargo "+$nightly" miri --version >/dev/null 2>&1 || {
    echo "miri: missing; 'rustup +nightly component add miri rust-src' installs it" >&2
    exit 1
}
export PROPTEST_DISABLE_FAILURE_PERSISTENCE=1 CARGO_TARGET_DIR=$1/miri PROPTEST_CASES=${PROPTEST_CASES:-2} \
    MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-deterministic-floats"
# Otherwise miri rounds exp2 at random, and ranks of equal things would differ.
cargo "+$nightly" miri test -p hotpin-controllers --lib -- --test-threads 1 -Z unstable-options --report-time
cargo "+$nightly" miri test --manifest-path tests/pages/Cargo.toml -- --test-threads 1
