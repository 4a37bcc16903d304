#!/usr/bin/env python3
"""Another program that takes memory: touches GIB gibibytes at RATE GB/s, holds them, and exits.

Usage: hog.py GIB HOLD_SECONDS [RATE]
Prints the time (seconds since the epoch) at which it begins, has it all, and exits.
"""

import mmap
import sys
import time

CHUNK = 64 << 20


def available():
    """MemAvailable in bytes."""
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    raise SystemExit("hog: /proc/meminfo has no MemAvailable")


def main():
    total = int(float(sys.argv[1]) * (1 << 30))
    hold = float(sys.argv[2])
    rate = float(sys.argv[3]) * 1e9 if len(sys.argv) > 3 else 1e9
    began = time.time()
    print(f"hog: begins at {began:.1f}", flush=True)
    held = []
    touch = b"\1" * CHUNK
    while len(held) * CHUNK < total:
        block = mmap.mmap(-1, CHUNK)
        block.write(touch)
        held.append(block)
        ahead = len(held) * CHUNK / rate - (time.time() - began)
        if ahead > 0:
            time.sleep(ahead)
    mib = len(held) * CHUNK >> 20
    print(f"hog: holds {mib} MiB at {time.time():.1f}, {available() >> 20} MiB available", flush=True)
    time.sleep(hold)
    print(f"hog: exits at {time.time():.1f}", flush=True)


if __name__ == "__main__":
    main()
