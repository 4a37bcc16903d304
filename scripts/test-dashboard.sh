#!/usr/bin/env bash
# Tests the dashboard in headless Chromium against a server. Playwright is kept in FOLDER, outside the
# clone; screenshots go to SHOTS. Usage: test-dashboard.sh MODEL.gguf FOLDER SHOTS; the program is $HOTPIN.
set -euo pipefail

model=$1 folder=$2 shots=$3
here=$(dirname "$0")
wanted="playwright==1.65.2"
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)
if [ -z "$chromium" ]; then
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        echo "test-dashboard: install Chromium first (as root: apt-get install chromium)" >&2
        exit 1
    fi
    echo "installing: chromium"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
    chromium=$(command -v chromium)
fi
stamp="$wanted for $(python3 --version)"
if [ "$(cat "$folder/stamp" 2>/dev/null)" != "$stamp" ]; then
    echo "fetching $wanted"
    rm -rf "$folder"
    mkdir -p "$folder"
    python3 -m pip install --quiet --disable-pip-version-check --no-warn-script-location --no-warn-conflicts \
        --root-user-action=ignore --target "$folder" "$wanted"
    echo "$stamp" >"$folder/stamp"
fi

log=$(mktemp)
# One thread: the browser needs the other cores.
"$HOTPIN" serve "$model" --port 0 -c 512 --parallel 2 -t 1 --capacity 150MB --api-key test-key --alias tiny 2>"$log" &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; rm -f "$log"' EXIT
for _ in $(seq 600); do
    grep -q 'ready;' "$log" && break
    kill -0 "$server" 2>/dev/null || { cat "$log" >&2; exit 1; }
    sleep 0.1
done
address=$(sed -n 's|.*http://\([^ ]*\) answers.*|\1|p' "$log")
PYTHONPATH=$folder PYTHONDONTWRITEBYTECODE=1 \
    python3 "$here/../tests/dashboard.py" "$chromium" "$shots" "http://$address" test-key
kill "$server"
wait "$server" || { echo "the server did not end well:" >&2; cat "$log" >&2; exit 1; }
trap - EXIT
rm -f "$log"
