#!/usr/bin/env python3
"""Another program that takes memory: touches it piece by piece, holds it, exits, and says how that went.

Usage: hog.py GIB HOLD_SECONDS [RATE] [SHAPE] [LEAST]
RATE is in GB/s (default 1; 0 is as fast as it goes). SHAPE is ramp (default: once up, hold, exit) or sawtooth
(up, hold, all given back, three times). It stops growing while less than LEAST MiB (default 300) are
available, so that a machine whose memory nobody gives back is not taken down.
Prints when it begins, has it all, and exits (seconds since the epoch), then one line of JSON.
"""

import ctypes
import json
import mmap
import sys
import time

CHUNK = 2 << 20
HUGE = 14  # MADV_HUGEPAGE
SWEEPS = {"ramp": 1, "sawtooth": 3}


def available():
    """MemAvailable in bytes."""
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    raise SystemExit("hog: /proc/meminfo has no MemAvailable")


class Hog:
    def __init__(self, total, rate, least):
        self.total, self.rate, self.least = total, rate, least
        self.worst_s, self.touched, self.busy_s, self.stopped = 0.0, 0, 0.0, False

    def sweep(self, hold):
        # One reservation, so that only touching costs. Private, since shared memory has small pages.
        block = mmap.mmap(-1, self.total + CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.madvise(HUGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(block))
        start += -start % CHUNK
        began, done = time.monotonic(), 0
        while done < self.total:
            # Asking costs, so it is done every 32 MiB.
            if done % (16 * CHUNK) == 0 and available() < self.least << 20:
                self.stopped = True
                break
            before = time.monotonic()
            ctypes.memset(start + done, 1, CHUNK)
            took = time.monotonic() - before
            self.worst_s = max(self.worst_s, took)
            self.busy_s += took
            done += CHUNK
            ahead = done / self.rate - (time.monotonic() - began) if self.rate else 0
            if ahead > 0:
                time.sleep(ahead)
        seconds = time.monotonic() - began
        self.touched = max(self.touched, done)
        print(f"hog: holds {done >> 20} MiB at {time.time():.3f}, {available() >> 20} MiB available", flush=True)
        time.sleep(hold)
        # A ctypes view keeps the mapping; the address space goes with the process.
        block.madvise(mmap.MADV_DONTNEED)
        return seconds


def main():
    words = sys.argv[1:] + [None] * 5
    total = int(float(words[0]) * (1 << 30)) // CHUNK * CHUNK
    hold, shape = float(words[1]), words[3] or "ramp"
    hog = Hog(total, float(words[2] or 1) * 1e9, int(words[4] or 300))
    print(f"hog: begins at {time.time():.3f}", flush=True)
    seconds = [hog.sweep(hold) for _ in range(SWEEPS[shape])]
    print(f"hog: exits at {time.time():.3f}", flush=True)
    print(json.dumps({"touched_bytes": hog.touched, "seconds": max(seconds), "busy_s": hog.busy_s,
                      "worst_touch_s": hog.worst_s, "stopped": hog.stopped}), flush=True)


if __name__ == "__main__":
    main()
