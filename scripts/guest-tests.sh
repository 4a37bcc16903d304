#!/usr/bin/env bash
# The tests of faults that need cgroups of version 2 or a clock of their own, in a virtual machine, on a toy
# model: the processor may have to be emulated. It is as large as the model of the other tests and has as many
# dense weights, but computes a tenth.
# Usage: guest-tests.sh FOLDER [FILTER...]. As root. Environment: CARGO_TARGET_DIR, HOTPIN, both of a build that is
# not for this processor alone.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
shift
[ $# -gt 0 ] || set -- memory_high a_limit_that_is_lowered groups_below frozen half_of a_disk_twenty \
    memory_is_given_back_at_once a_clock_that_is_set killed_at_any_moment
mkdir -p "$folder/model"
model=$folder/model/toy.gguf
[ -e "$model" ] || "$HOTPIN" demo toy --layers 4 --width 832 --experts 54 --expert-width 640 --top-k 2 -o "$model"
tests=$(cargo test --release --no-default-features --test it --no-run --message-format=json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*\/it-[^"]*\)".*/\1/p' | tail -1)
exec scripts/guest.sh "$folder" "$model" "CI=true HOTPIN_TEST_CLOCK=1 HOTPIN_TEST_MOE='$model' \
    HOTPIN_TEST_KILLS='${HOTPIN_TEST_KILLS:-4}' '$tests' --test-threads 1 --nocapture $*"
