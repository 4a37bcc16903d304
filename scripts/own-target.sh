#!/usr/bin/env bash
# Keeps clones apart that build into one target folder. Usage: own-target.sh TARGET_FOLDER
#
# Cargo names what it builds of this workspace by paths within the workspace and takes it for fresh by
# the dates of the sources, so after a build in another clone it would hand out that clone's program.
# New dates make it build ours again; llama.cpp and the other dependencies stay built.
set -euo pipefail

cd "$(dirname "$0")/.."
owner=$1/.hotpin-clone
[ "$(cat "$owner" 2>/dev/null)" = "$PWD" ] && exit 0
mkdir -p "$1"
find Cargo.toml controllers sim src tests benches workload -type f -exec touch -c {} +
echo "$PWD" >"$owner"
