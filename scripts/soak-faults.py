#!/usr/bin/env python3
"""A server for hours among random hogs, changes of capacity and drift. At every sample what the kernel has
locked is what the books say, memory is flat, no request fails, and every answer is what `--policy off` says.
Some hogs come while other programs keep the processors busy.

Usage: soak-faults.py MODEL PROFILE SECONDS [STORE] [SEED]; as root, since hogs share a memory cgroup with
the server. Environment: HOTPIN, SOAK_BYTES (the group's limit; 2.5e9), SOAK_ARGS (more
arguments of the server), SOAK_CONFIG (its settings file).
"""

import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

HERE = pathlib.Path(__file__).parent
HOTPIN = os.environ.get("HOTPIN", "hotpin")
MODEL, PROFILE, SECONDS = sys.argv[1], sys.argv[2], float(sys.argv[3])
STORE = sys.argv[4] if len(sys.argv) > 4 else "direct"
RANDOM = random.Random(int(sys.argv[5]) if len(sys.argv) > 5 else 1)
LIMIT = int(float(os.environ.get("SOAK_BYTES", "2.5e9")))
V1 = pathlib.Path("/sys/fs/cgroup/memory")
GROUP = (V1 if V1.is_dir() else pathlib.Path("/sys/fs/cgroup")) / f"hotpin-soak-{os.getpid()}"
TEXTS = sorted((HERE.parent / "workload").glob("*.txt"))
PROMPTS = [text[begin:begin + 400] for text in (path.read_text() for path in TEXTS)
           for begin in range(0, max(1, len(text) - 400), max(1, len(text) // 3))]
failures, done, over, answers = [], [0], threading.Event(), {}


def inside(command, **more):
    """A command in the group from its first instruction on."""
    shell = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(GROUP / "cgroup.procs"), *command]
    return subprocess.Popen(shell, env=environment(), **more)


def environment():
    env = {k: v for k, v in os.environ.items() if not k.startswith("HOTPIN_")}
    return {**env, "HOTPIN_CONFIG": os.environ.get("SOAK_CONFIG", "/dev/null")}


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer soak"}
    request = urllib.request.Request(address + path, data, headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        return response.read().decode()


def complete(prompt):
    """The greedy answer, the whole prompt decoded, so that it does not depend on what was asked before."""
    answer = json.loads(ask("/v1/completions", {"prompt": prompt, "max_tokens": 48, "temperature": 0,
                                                "cache_prompt": False}))
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


def client(number):
    """Drift: a text for some requests, then another one."""
    draw = random.Random(number)
    while not over.is_set():
        first = draw.randrange(len(PROMPTS))
        for _ in range(draw.randint(2, 6)):
            prompt = PROMPTS[(first + draw.randrange(3)) % len(PROMPTS)]
            try:
                text, tokens = complete(prompt)
                answers.setdefault(prompt, set()).add(text)
                done[0] += tokens
            except Exception as error:
                failures.append(repr(error))
                return
            if over.is_set():
                return


def metric(text, name):
    return float(next(line for line in text.splitlines() if line.startswith(name + " ")).split()[1])


def locked_kb():
    """By the kernel, mapping by mapping: whole mappings that are flagged as locked."""
    total, size = 0, 0
    for line in pathlib.Path(f"/proc/{server.pid}/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            size = int(line.split()[1])
        elif line.startswith("VmFlags:") and " lo" in line:
            total += size
    return total


def compare():
    """Control is paused meanwhile, so that nothing moves between the two looks."""
    ask("/api/control/pause", {})
    try:
        for _ in range(50):
            time.sleep(0.1)
            before = locked_kb() << 10
            metrics = ask("/metrics")
            books = int(metric(metrics, "hotpin_locked_bytes"))
            whole = books + int(metric(metrics, "hotpin_program_locked_bytes"))
            if before == whole == locked_kb() << 10:
                return books, 0
        return books, before - whole
    finally:
        ask("/api/control/resume", {})


def anonymous_kb():
    for line in pathlib.Path(f"/proc/{server.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    return 0


def oom_kills():
    for name in ("memory.oom_control", "memory.events"):
        path = GROUP / name
        if path.exists():
            return int(next(l for l in path.read_text().splitlines() if l.startswith("oom_kill ")).split()[1])
    return 0


def hog(shape):
    gib = RANDOM.uniform(0.1, 0.5) * LIMIT / (1 << 30)
    rate = RANDOM.choice(["0.1", "0.3", "0.6"])
    taker = inside([sys.executable, str(HERE / "hog.py"), f"{gib:.2f}", f"{RANDOM.uniform(1, 5):.1f}", rate, shape],
                   stdout=subprocess.PIPE)
    taker.communicate()
    if taker.returncode != 0:
        failures.append(f"a hog ended with {taker.returncode}")


def disturb():
    """One random disturbance, to its end."""
    kind = RANDOM.choice(["ramp", "sawtooth", "busy", "capacity", "stream", "pause"])
    if kind in ("ramp", "sawtooth"):
        hog(kind)
    elif kind == "busy":
        # A ramp while two other programs want each processor.
        others = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2 * os.cpu_count())]
        try:
            hog("ramp")
        finally:
            for other in others:
                other.kill()
                other.wait()
    elif kind == "capacity":
        ask("/api/control/capacity", {"bytes": int(RANDOM.uniform(0.1, 1.0) * LIMIT)})
        time.sleep(3)
        ask("/api/control/capacity", {"bytes": None})
    elif kind == "stream":
        inside(["dd", f"if={MODEL}", "of=/dev/null", "bs=1M", "count=500", "status=none"]).wait()
    else:
        time.sleep(RANDOM.uniform(1, 5))
    return kind


def soak():
    clients = [threading.Thread(target=client, args=(number,)) for number in range(2)]
    for thread in clients:
        thread.start()
    began, samples, kinds = time.time(), [], {}
    while time.time() - began < SECONDS and not failures:
        kind = disturb()
        kinds[kind] = kinds.get(kind, 0) + 1
        books, difference = compare()
        samples.append((time.time() - began, books, difference, anonymous_kb() - (books >> 10 if STORE == "direct" else 0)))
        if difference:
            failures.append(f"the kernel has {difference} bytes more locked than the books, which say {books}")
        print(f"{samples[-1][0]:7.0f} s {kind:9} locked {books >> 20} MiB, {done[0]} tokens, "
              f"anonymous {anonymous_kb() >> 10} MiB", flush=True)
    over.set()
    for thread in clients:
        thread.join()
    quarter = max(1, len(samples) // 4)
    first, last = (max(s[3] for s in part) for part in (samples[quarter:2 * quarter] or samples, samples[-quarter:]))
    print(f"{done[0]} tokens, {len(samples)} samples, disturbances {kinds}; anonymous memory beside locks at most "
          f"{first >> 10} MiB in the second quarter, {last >> 10} MiB in the last; {oom_kills()} killed")
    if last > first * 1.1 + 16384:
        failures.append("memory grows")
    if oom_kills():
        failures.append("something was killed for want of memory")


def yields():
    """How long it took to give back what others needed, by the journal."""
    entries = map(json.loads, JOURNAL.read_text().splitlines())
    times = sorted(e["yield_ms"] for e in entries if e.get("yield_ms") is not None)
    if not times:
        return "memory never ran short"
    return f"memory ran short {len(times)} times and was given back after {times[len(times) // 2]:.0f} ms (median), " \
           f"{times[-1]:.0f} ms at most"


def serve(command):
    """Starts a server, and returns when it answers."""
    global server, address
    server = command(stderr=subprocess.PIPE, text=True)
    said = ""
    while "ready;" not in said:
        line = server.stderr.readline()
        if not line:
            sys.exit(said)
        said += line
    errors = server.stderr
    threading.Thread(target=lambda: [sys.stderr.write(line) for line in errors], daemon=True).start()
    address = "http://" + said.split("http://")[1].split(" ")[0]


def end():
    server.terminate()
    if (code := server.wait()) != 0:
        failures.append(f"the server ended with {code}")


def compare_answers():
    """Asks llama.cpp as it is what was asked before."""
    serve(lambda **more: subprocess.Popen([*SERVE, "--policy", "off"], env=environment(), **more))
    wrong = [prompt for prompt, texts in answers.items() if texts != {complete(prompt)[0]}]
    end()
    print(f"{len(answers)} prompts, {len(wrong)} of them with an answer that is not stock's")
    if wrong:
        failures.append(f"wrong answers to {wrong}")


GROUP.mkdir()
JOURNAL = pathlib.Path(tempfile.mkdtemp()) / "journal"
SERVE = [HOTPIN, "serve", MODEL, "--port", "0", "--parallel", "1", "-c", "1024", "--api-key", "soak"]
MANAGED = ["--profile", PROFILE, "--store", STORE, "--journal", str(JOURNAL), *os.environ.get("SOAK_ARGS", "").split()]
limit = GROUP / ("memory.limit_in_bytes" if V1.is_dir() else "memory.max")
limit.write_text(str(LIMIT))
try:
    serve(lambda **more: inside([*SERVE, *MANAGED], **more))
    soak()
finally:
    over.set()
    end()
    for _ in range(100):
        try:
            GROUP.rmdir()
            break
        except OSError:
            time.sleep(0.1)
print(yields())
compare_answers()
print("\n".join(failures) or "no failure")
sys.exit(bool(failures))
