"""Clients that change topic against a running server: no error, flat memory, token times.

Usage: soak.py http://ADDRESS PID TOKENS [CLIENTS]; texts are those of workload/.
"""
import json
import pathlib
import sys
import threading
import time
import urllib.request

address, pid, wanted = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
clients = int(sys.argv[4]) if len(sys.argv) > 4 else 2
texts = sorted((pathlib.Path(__file__).parent.parent / "workload").glob("*.txt"))
lock = threading.Lock()
done, failures, memory, gaps, by_text = 0, [], [], [], {}


def resident_kb():
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise SystemExit("no RssAnon")


def ask(client, turn, name, text):
    global done
    began = time.monotonic()
    begin = (turn * 977 + client * 311) % max(1, len(text) - 400)
    body = {"prompt": text[begin : begin + 400], "max_tokens": 64, "temperature": 0.7, "seed": turn, "stream": True,
            "stream_options": {"include_usage": True}}
    request = urllib.request.Request(address + "/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    lines, at = [], []
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if line.startswith(b"data: "):
                lines.append(line.decode().strip())
                at.append(time.monotonic())
    assert lines[-1] == "data: [DONE]", lines[-1]
    usage = json.loads(lines[-2][6:])["usage"]
    with lock:
        done += usage["completion_tokens"]
        memory.append((done, resident_kb()))
        # Between two pieces of text, as the client sees it; the last two lines are usage and the end.
        gaps.extend(after - before for before, after in zip(at, at[1:-2]))
        tokens, seconds = by_text.get(name, (0, 0.0))
        by_text[name] = tokens + usage["completion_tokens"], seconds + time.monotonic() - began


def work(client):
    # Every text once: tokens of longer prompts touch more of the cache, which then stays.
    order = list(range(len(texts))) + [turn * len(texts) // turns % len(texts) for turn in range(turns)]
    for turn, which in enumerate(order):
        if done >= wanted:
            return
        try:
            ask(client, turn, texts[which].stem, texts[which].read_text())
        except Exception as error:
            failures.append(repr(error))
            return


def quantile(text, share):
    buckets = []
    for line in text.splitlines():
        if line.startswith("hotpin_decode_token_seconds_bucket"):
            buckets.append((line.split('"')[1], float(line.rsplit(" ", 1)[1])))
    return next(bound for bound, count in buckets if count >= share * buckets[-1][1])


turns = max(len(texts), wanted // 64 // clients + 1)
began = time.monotonic()
threads = [threading.Thread(target=work, args=(client,)) for client in range(clients)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
took = time.monotonic() - began
with urllib.request.urlopen(address + "/metrics") as response:
    metrics = response.read().decode()
# Until every client has asked each text once, longer prompts touch memory that then stays.
steady = memory[clients * len(texts):]
print(f"{done} tokens over {len(texts)} texts by {clients} clients in {took:.0f} s: {done / took:.1f} tok/s")
print(f"token time p50 <= {quantile(metrics, 0.5)} s, p99 <= {quantile(metrics, 0.99)} s (server's histogram)")
gaps.sort()
print("between two pieces at the client: " + ", ".join(
    f"p{share} {gaps[len(gaps) * share // 100] * 1000:.1f} ms" for share in (50, 90, 99)) + f" of {len(gaps)}")
print("tok/s of one client, prompt included: " + ", ".join(
    f"{name} {tokens / seconds:.1f}" for name, (tokens, seconds) in sorted(by_text.items())))
points = [memory[min(len(memory) - 1, len(memory) * part // 10)] for part in range(1, 11)]
print("anonymous memory, MB: " + ", ".join(f"{kb / 1024:.0f} at {tokens}" for tokens, kb in points))
assert not failures, failures
assert done >= wanted, done
if steady:
    assert steady[-1][1] < steady[0][1] * 1.05 + 4096, "memory grows"
else:
    print("too few tokens to judge whether memory grows")
