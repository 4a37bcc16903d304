#!/usr/bin/env bash
# Keeps clones apart that build into one target folder. Usage: own-target.sh TARGET_FOLDER
#
# Cargo names what it builds of this workspace by paths within the workspace and takes it for fresh
# while the sources are older, so after a build in another clone it would hand out that clone's program.
# Ageing its records makes it build ours again; llama.cpp and the other dependencies stay built.
set -euo pipefail
shopt -s nullglob

cd "$(dirname "$0")/.."
owner=$1/.hotpin-clone
[ "$(cat "$owner" 2>/dev/null)" = "$PWD" ] && exit 0
mkdir -p "$1"
records=("$1"/*/.fingerprint/hotpin*/dep-* "$1"/*/*/.fingerprint/hotpin*/dep-*)
[ ${#records[@]} -eq 0 ] || touch -c -d @0 "${records[@]}"
echo "$PWD" >"$owner"
