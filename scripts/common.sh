# What the scripts share. Sourced, not run.

# No settings of whoever runs them.
export HOTPIN_CONFIG=/dev/null

heading() { printf '\n== %s\n' "$*"; }

# Says how far page faults on FILE's disk read ahead, and how to change it. Changes nothing.
report_read_ahead() {
    python3 - "$1" <<'PY'
import os, sys
number = os.stat(sys.argv[1]).st_dev
device = os.path.realpath("/sys/dev/block/%d:%d" % (os.major(number), os.minor(number)))
# A partition has no queue of its own.
for folder in (device, os.path.dirname(device)):
    path = os.path.join(folder, "queue", "read_ahead_kb")
    try:
        with open(path) as setting:
            kb = int(setting.read())
    except (OSError, ValueError):
        continue
    print("read_ahead_kb is %d (%s)." % (kb, path))
    if kb > 128:
        print("With so much, every page fault of plain llama.cpp reads far more than it uses; Linux's")
        print("default is 128. To compare at that, as root:  echo 128 > %s" % path)
    break
else:
    print("read_ahead_kb is not known: no block device is found for this file.")
PY
}

# Runs `$HOTPIN bench` with the given arguments. Where no memory cgroup can be made, runs it again
# without a limit, and says what that means.
bench_in_limit() {
    local errors code=0
    errors=$(mktemp)
    { "$HOTPIN" bench "$@" 2>&1 >&3 | tee "$errors" >&2; } 3>&1 || code=$?
    if [ "$code" -ne 0 ] && grep -q 'cannot limit the runs' "$errors"; then
        heading "No memory limit can be set here, so the runs go without one"
        echo "A limit needs root, or a memory cgroup that this user may write. Without it every policy may use"
        echo "all of the RAM, and the differences between them mostly vanish: the outputs are still compared,"
        echo "but the speeds below say nothing about a model that is larger than memory."
        code=0
        "$HOTPIN" bench "$@" --no-cgroup || code=$?
    fi
    rm -f "$errors"
    return "$code"
}

# Tells a failed bench apart and ends the script with its exit code.
fail_with() {
    printf '\nThe benchmark failed (exit code %s): %s\n' "$1" \
        "a run failed, or the outputs of two policies differ; the lines above say which." >&2
    exit "$1"
}

# Keeps Python packages (`name==version` each) in FOLDER, outside the clone. Usage: keep_packages FOLDER WANTED...
keep_packages() {
    local folder=$1 stamp
    shift
    # Some of their dependencies are compiled for one version of Python.
    stamp="$* for $(python3 --version)"
    [ "$(cat "$folder/stamp" 2>/dev/null)" = "$stamp" ] && return
    echo "fetching $*"
    rm -rf "$folder"
    mkdir -p "$folder"
    python3 -m pip install --quiet --disable-pip-version-check --no-warn-script-location --no-warn-conflicts \
        --root-user-action=ignore --target "$folder" "$@"
    echo "$stamp" >"$folder/stamp"
}

# Starts `$HOTPIN serve` with the given arguments and waits until it is ready; `$address` is where it
# answers. It ends with the script.
start_server() {
    log=$(mktemp)
    "$HOTPIN" serve "$@" 2>"$log" &
    server=$!
    trap 'kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; rm -f "$log"' EXIT
    for _ in $(seq 600); do
        grep -q 'ready;' "$log" && break
        kill -0 "$server" 2>/dev/null || { cat "$log" >&2; exit 1; }
        sleep 0.1
    done
    address=$(sed -n 's|.*http://\([^ ]*\) answers.*|\1|p' "$log")
}

# Tells the server to end; one that does not end well is a failure.
stop_server() {
    kill "$server"
    wait "$server" || { echo "the server did not end well:" >&2; cat "$log" >&2; exit 1; }
    trap - EXIT
    rm -f "$log"
}
