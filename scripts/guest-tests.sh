#!/usr/bin/env bash
# The tests of faults that need cgroups of version 2 or a clock of their own, in a virtual machine.
# Usage: guest-tests.sh MODEL FOLDER [FILTER...]. As root. Environment: CARGO_TARGET_DIR.
set -euo pipefail
cd "$(dirname "$0")/.."
model=$1 folder=$2
shift 2
[ $# -gt 0 ] || set -- memory_high a_limit_that_is_lowered groups_below frozen half_of a_disk_twenty \
    a_clock_that_is_set killed_at_any_moment
tests=$(cargo test --release --test it --no-run --message-format=json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*\/it-[^"]*\)".*/\1/p' | tail -1)
exec scripts/guest.sh "$folder" "$model" "CI=true HOTPIN_TEST_CLOCK=1 HOTPIN_TEST_MOE='$model' \
    HOTPIN_TEST_KILLS='${HOTPIN_TEST_KILLS:-4}' '$tests' --test-threads 1 --nocapture $*"
