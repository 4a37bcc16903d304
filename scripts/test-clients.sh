#!/usr/bin/env bash
# Runs the official OpenAI client and a Prometheus parser against a server. The packages are kept in
# FOLDER, outside the clone. Usage: test-clients.sh MODEL.gguf FOLDER; the program is $HOTPIN.
set -euo pipefail

model=$1 folder=$2
here=$(dirname "$0")
. "$here/common.sh"
keep_packages "$folder" openai==3.57.0 prometheus_client==0.26.0

start_server "$model" --port 0 -c 512 --parallel 2 --capacity 200MB --api-key test-key --alias tiny \
    --chat-template "$here/../tests/data/chat/hermes.jinja"
PYTHONPATH=$folder PYTHONDONTWRITEBYTECODE=1 python3 "$here/../tests/clients.py" "http://$address" test-key
stop_server
