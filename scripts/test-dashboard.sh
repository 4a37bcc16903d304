#!/usr/bin/env bash
# Tests the dashboard in headless Chromium against a server. Playwright is kept in FOLDER, outside the
# clone; screenshots go to SHOTS. Usage: test-dashboard.sh MODEL.gguf FOLDER SHOTS; the program is $HOTPIN.
set -euo pipefail

model=$1 folder=$2 shots=$3
here=$(dirname "$0")
. "$here/common.sh"
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
keep_packages "$folder" playwright==1.65.2

# One thread: the browser needs the other cores.
start_server "$model" --port 0 -c 512 --parallel 2 -t 1 --capacity 150MB --api-key test-key --alias tiny
PYTHONPATH=$folder PYTHONDONTWRITEBYTECODE=1 \
    python3 "$here/../tests/dashboard.py" "$chromium" "$shots" "http://$address" test-key
stop_server
