#!/usr/bin/env bash
# A session that changes topic, through the API: a server for each policy in a memory cgroup of its own, cold,
# two clients, six texts. Usage: soak.sh MODEL.gguf PROFILE.toml TOKENS [POLICY...]; as root.
# Environment: HOTPIN (the program), SOAK_MEMORY (2500MB in bytes), SOAK_STORE (auto).
set -euo pipefail

model=${1:?usage: soak.sh MODEL.gguf PROFILE.toml TOKENS [POLICY...]} profile=$2 tokens=$3
shift 3
policies=("${@:-adaptive}")
memory=${SOAK_MEMORY:-2500000000}
HOTPIN=${HOTPIN:-hotpin}
here=$(dirname "$0")
. "$here/common.sh"

if [ -d /sys/fs/cgroup/memory ]; then
    group=/sys/fs/cgroup/memory/hotpin-soak-$$ limit=memory.limit_in_bytes
else
    group=/sys/fs/cgroup/hotpin-soak-$$ limit=memory.max
fi
mkdir "$group"
echo "$memory" >"$group/$limit"
# The program, in the group. It is what start_server starts.
inside=$(mktemp)
cleanup() {
    kill "${server:-}" 2>/dev/null && wait "$server" 2>/dev/null || true
    rm -f "$inside" "${log:-}"
    rmdir "$group"
}
trap cleanup EXIT
report_read_ahead "$model"
printf '#!/bin/sh\necho $$ >%s/cgroup.procs\nexec %s "$@"\n' "$group" "$HOTPIN" >"$inside"
chmod +x "$inside"

for policy in "${policies[@]}"; do
    heading "$policy: $tokens tokens in $memory bytes"
    python3 - "$model" <<'PY'
import os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
PY
    HOTPIN=$inside start_server "$model" --port 0 --parallel 2 -c 1024 --policy "$policy" \
        --profile "$profile" --store "${SOAK_STORE:-auto}"
    trap cleanup EXIT
    code=0
    python3 "$here/../tests/soak.py" "http://$address" "$server" "$tokens" 2 || code=$?
    stop_server
    trap cleanup EXIT
    [ "$code" -eq 0 ] || exit "$code"
done
