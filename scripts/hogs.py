#!/usr/bin/env python3
"""Other programs beside a session: what they suffer and what the session gives back, loses and recovers.

Usage: hogs.py MODEL PROFILE [--kinds ...] [--ways ...] [--gib N] [--leave N] [--threads N]
                [--json OUT] [--other MODEL] [--warm]
Kinds: step, ramp, sawtooth, forks, stream, twin (another session on the same model), other (on --other).
Ways: none (the hog alone), adaptive, static, mlock (llama.cpp as shipped, and the whole file locked, as
--mlock does). Environment: HOTPIN. As root, on a machine with nothing else to do. The hog takes what was
available before the session began, less 1.5 GiB, or --gib. With --leave a process takes memory first, so that
N GiB are available: hogs are then as small as the time that they may take. With --warm all memory is touched
and given back before each measurement: a virtual machine that gives free memory back to its host gets it anew page
by page, and a hog would time the host. A hog wants a core of its own:
give sessions one --threads less than there are, or the hog's time is that of a queue for the processor.
"""

import argparse
import atexit
import ctypes
import json
import mmap
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).parent
HOTPIN = os.environ.get("HOTPIN", "hotpin")
ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("HOTPIN_")}, "HOTPIN_CONFIG": "/dev/null"}
LEAST = 300
RESERVE = 1 << 30
STEP_S = 0.02
STARTED, THREADS = [], []


def end(*_):
    """Nothing that was started outlives the script."""
    for child in STARTED:
        child.kill()
    os._exit(1)


atexit.register(lambda: [child.kill() for child in STARTED])
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)


def meminfo(key):
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"no {key}")


def status(pid, key):
    try:
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def psi_full_us():
    for line in pathlib.Path("/proc/pressure/memory").read_text().splitlines():
        if line.startswith("full"):
            return int(line.rsplit("=", 1)[1])
    return 0


def oom_kills():
    for line in pathlib.Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


class Session:
    """A greedy run whose tokens are timed as they come."""

    def __init__(self, way, model, profile):
        self.way, self.times, self.text = way, [], b""
        policy = {"adaptive": "adaptive", "static": "static", "mlock": "off"}[way]
        command = [HOTPIN, "run", model, "--raw", "-p", (HERE.parent / "workload/prose.txt").read_text()[:400],
                   "-n", "100000", "-c", "8192", "--temp", "0", "--policy", policy]
        if policy != "off":
            command += ["--profile", profile]
        command += THREADS
        self.locked = lock_file(model) if way == "mlock" else None
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV)
        STARTED.append(self.child)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        while piece := os.read(self.child.stdout.fileno(), 65536):
            self.times.append(time.time())
            self.text += piece

    def held(self):
        own = self.locked[1] if self.locked else 0
        return own + status(self.child.pid, "VmLck")

    def settle(self, seconds):
        """Waits until it generates and what it holds stays the same."""
        while len(self.times) < 30:
            if self.child.poll() is not None:
                sys.exit(self.child.stderr.read().decode())
            time.sleep(0.1)
        before, since = self.held(), time.time()
        while time.time() - since < seconds:
            time.sleep(0.1)
            if self.held() != before:
                before, since = self.held(), time.time()

    def rate(self, begin, end):
        return sum(begin <= t < end for t in self.times) / max(end - begin, 1e-9)

    def stop(self):
        self.child.kill()
        self.child.wait()
        if self.locked:
            self.locked[0].kill()
            self.locked[0].wait()


LOCKER = """
import ctypes, mmap, os, sys, time
file = os.open(sys.argv[1], os.O_RDONLY)
size = os.fstat(file).st_size
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
at = libc.mmap(None, size, 1, 1, file, 0)
if libc.mlock(ctypes.c_void_p(at), ctypes.c_size_t(size)) != 0:
    sys.exit(os.strerror(ctypes.get_errno()))
print("locked", flush=True)
time.sleep(1e6)
"""


def lock_file(model):
    """A process that holds the whole file locked, as a loader with --mlock does."""
    child = subprocess.Popen([sys.executable, "-c", LOCKER, model], stdout=subprocess.PIPE)
    STARTED.append(child)
    if child.stdout.readline().strip() != b"locked":
        sys.exit("the file could not be locked")
    return child, os.path.getsize(model)


class Watch:
    """Samples memory while a hog runs."""

    def __init__(self, session):
        self.session, self.samples, self.over = session, [], False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.over:
            held = self.session.held() if self.session else 0
            self.samples.append((time.time(), meminfo("MemAvailable"), held, psi_full_us()))
            time.sleep(STEP_S)

    def stop(self):
        self.over = True
        self.thread.join()
        return self.samples


def run_hog(kind, gib, model, other, profile):
    """Runs one kind to its end; returns what it says of itself."""
    began = time.time()
    hog = lambda *more: [sys.executable, str(HERE / "hog.py"), f"{gib:.2f}", *more]
    if kind in ("step", "ramp", "sawtooth"):
        rate, shape = {"step": ("0", "ramp"), "ramp": ("2", "ramp"), "sawtooth": ("2", "sawtooth")}[kind]
        child = subprocess.Popen(hog("4", rate, shape, str(LEAST)), stdout=subprocess.PIPE)
        STARTED.append(child)
        return json.loads(child.communicate()[0].splitlines()[-1])
    if kind == "forks":
        worst = 0.0
        for _ in range(30):
            before = time.time()
            children = [subprocess.Popen([sys.executable, "-c", "b = b'1' * (64 << 20)"]) for _ in range(4)]
            for child in children:
                child.wait()
            worst = max(worst, time.time() - before)
        return {"seconds": time.time() - began, "worst_touch_s": worst}
    if kind == "stream":
        drop(other)
        subprocess.run(["dd", f"if={other}", "of=/dev/null", "bs=1M", "status=none"], check=True)
        return {"seconds": time.time() - began, "touched_bytes": os.path.getsize(other)}
    second = Session("adaptive", model if kind == "twin" else other, profile)
    if kind == "other":
        second.stop()
        command = [HOTPIN, "run", other, "--raw", "-p", "The sea", "-n", "100000", "-c", "8192", "--temp", "0", *THREADS]
        second.child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV)
        STARTED.append(second.child)
        second.times = []
        threading.Thread(target=second.read, daemon=True).start()
    while not second.times:
        time.sleep(0.1)
    time.sleep(15)
    end = time.time()
    result = {"seconds": end - began, "second_tok_s": second.rate(end - 10, end), "second_locked_bytes": second.held()}
    second.stop()
    return result


BALLOON = """
import ctypes, mmap, sys, time
size = int(sys.argv[1])
block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
block.madvise(14)
ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(block)), 1, size)
print("taken", flush=True)
time.sleep(float(sys.argv[2]))
"""


def take_all_but(gib, seconds=1e6):
    """A process that holds memory for so long, or until the script ends."""
    size = meminfo("MemAvailable") - int(gib * (1 << 30))
    if size <= 0:
        sys.exit(f"no {gib} GiB are available")
    child = subprocess.Popen([sys.executable, "-c", BALLOON, str(size), str(seconds)], stdout=subprocess.PIPE)
    STARTED.append(child)
    if child.stdout.readline().strip() != b"taken":
        sys.exit("there was not so much memory")
    return child


def drop(path):
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def measure(kind, way, args, gib):
    drop(args.model)
    if args.warm:
        take_all_but(0.5, 0).wait()
    kills = oom_kills()
    session = Session(way, args.model, args.profile) if way != "none" else None
    if session:
        session.settle(3)
    watch = Watch(session)
    time.sleep(5)
    begin = time.time()
    hog = run_hog(kind, gib, args.model, args.other, args.profile)
    end = time.time()
    time.sleep(args.recovery if session else 1)
    samples = watch.stop()
    result = {"kind": kind, "way": way, "hog": hog, "oom_kills": oom_kills() - kills}
    during = [s for s in samples if begin <= s[0] <= end]
    result["least_available_mib"] = min(s[1] for s in during) >> 20
    # PSI full in the worst tenth of a second.
    step = max(1, round(0.1 / STEP_S))
    full = [(b[3] - a[3]) / max(b[0] - a[0], 1e-9) / 1e6 for a, b in zip(during, during[step:])]
    result["worst_psi_full"] = max(full, default=0.0)
    # How long the reserve was not whole.
    below, since = 0.0, None
    for at, available, _, _ in during:
        if available < RESERVE:
            since = since or at
            below = max(below, at - since)
        else:
            since = None
    result["longest_below_reserve_s"] = below
    if session:
        held = [s[2] for s in samples if s[0] < begin]
        result["held_before_mib"] = held[-1] >> 20
        result["held_least_mib"] = min(s[2] for s in during) >> 20
        first = next((s[0] for s in during if s[2] < held[-1] * 0.98), None)
        crossed = next((s[0] for s in during if s[1] < RESERVE * 1.02), None)
        result["yield_after_crossing_s"] = first - crossed if first and crossed else None
        result["tok_s_before"] = session.rate(begin - 5, begin)
        result["tok_s_during"] = session.rate(begin, end)
        back = next((s[0] for s in samples if s[0] > end and s[2] >= held[-1] * 0.95), None)
        result["recovery_s"] = back - end if back else None
        result["text"] = session.text[:4000].decode(errors="replace")
        session.stop()
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("profile")
    parser.add_argument("--kinds", default="step,ramp,sawtooth,forks,stream,twin,other")
    parser.add_argument("--ways", default="none,adaptive,static,mlock")
    parser.add_argument("--gib", type=float)
    parser.add_argument("--leave", type=float)
    parser.add_argument("--threads")
    parser.add_argument("--recovery", type=float, default=15)
    parser.add_argument("--other")
    parser.add_argument("--json")
    parser.add_argument("--warm", action="store_true")
    args = parser.parse_args()
    drop(args.model)
    if args.threads:
        THREADS.extend(["-t", args.threads])
    if args.leave:
        take_all_but(args.leave)
    gib = args.gib or (meminfo("MemAvailable") - 3 * (RESERVE // 2)) / (1 << 30)
    results, texts = [], set()
    for kind in args.kinds.split(","):
        for way in args.ways.split(","):
            if way == "none" and kind in ("twin", "other"):
                continue
            result = measure(kind, way, args, gib)
            texts.add(result.pop("text", "")[:200])
            results.append(result)
            print(json.dumps(result), flush=True)
            time.sleep(2)
    texts.discard("")
    print(f"{len(texts)} text over all sessions" if len(texts) == 1 else f"TEXTS DIFFER: {texts}")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1))
    sys.exit(len(texts) > 1 or any(r["oom_kills"] for r in results))


if __name__ == "__main__":
    main()
