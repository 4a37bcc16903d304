#!/usr/bin/env bash
# Runs the official OpenAI client and a Prometheus parser against a server. The packages are kept in
# FOLDER, outside the clone. Usage: test-clients.sh MODEL.gguf FOLDER; the program is $HOTPIN.
set -euo pipefail

model=$1 folder=$2
here=$(dirname "$0")
wanted="openai==3.57.0 prometheus_client==0.26.0"
# Some of their dependencies are compiled for one version of Python.
stamp="$wanted for $(python3 --version)"
if [ "$(cat "$folder/stamp" 2>/dev/null)" != "$stamp" ]; then
    echo "fetching $wanted"
    rm -rf "$folder"
    mkdir -p "$folder"
    # shellcheck disable=SC2086 # two words
    python3 -m pip install --quiet --disable-pip-version-check --no-warn-script-location --no-warn-conflicts \
        --root-user-action=ignore --target "$folder" $wanted
    echo "$stamp" >"$folder/stamp"
fi

log=$(mktemp)
"$HOTPIN" serve "$model" --port 0 -c 512 --parallel 2 --capacity 200MB --api-key test-key --alias tiny \
    --chat-template "$here/../tests/data/chat/hermes.jinja" 2>"$log" &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; rm -f "$log"' EXIT
for _ in $(seq 600); do
    grep -q 'ready;' "$log" && break
    kill -0 "$server" 2>/dev/null || { cat "$log" >&2; exit 1; }
    sleep 0.1
done
address=$(sed -n 's|.*http://\([^ ]*\) answers.*|\1|p' "$log")
PYTHONPATH=$folder PYTHONDONTWRITEBYTECODE=1 python3 "$here/../tests/clients.py" "http://$address" test-key
kill "$server"
wait "$server" || { echo "the server did not end well:" >&2; cat "$log" >&2; exit 1; }
trap - EXIT
rm -f "$log"
