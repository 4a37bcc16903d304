"""What the server costs: the same greedy answer from `hotpin run` and from `hotpin serve`, whole and streamed.

Usage: overhead.py MODEL.gguf ROUNDS [ARGUMENTS of both]; the program is $HOTPIN, $TOKENS the length of
the answer. In turns, A B C C B A, each in a process of its own: where a process's memory comes to lie makes
it a few percent faster or slower for as long as it lives, which must not be taken for the server's doing.
The time of `run` is what it reports for prompt and answer, without start and loading; that of the server is
the client's, from before the connection to the end of the answer, and, beside it, what the server reports
for prompt and answer, as `run` does.
"""
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request

model, rounds, more = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
program = os.environ.get("HOTPIN", "hotpin")
environment = dict(os.environ, HOTPIN_CONFIG="/dev/null")
PROMPT, TOKENS = "Tell me about the sea.", int(os.environ.get("TOKENS", "256"))
REPORT = re.compile(r"prompt (\d+) tokens in ([\d.]+) s .*answer (\d+) tokens in ([\d.]+) s")


def run():
    command = [program, "run", model, "-p", PROMPT, "-n", str(TOKENS), "--temp", "0", "-c", "1024", *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    prompt_tokens, prompt_s, tokens, decode_s = REPORT.search(done.stderr).groups()
    return {"s": float(prompt_s) + float(decode_s)}, (int(tokens), done.stdout.strip())


def http_cpu_s(pid):
    """CPU time of the thread that speaks HTTP."""
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/stat") as stat:
            name, rest = stat.read().split("(", 1)[1].rsplit(")", 1)
        if name == "hotpin-http":
            fields = rest.split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    raise SystemExit("no thread hotpin-http")


def ask(address, stream):
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": TOKENS, "stream": stream,
            "cache_prompt": False}
    if stream:
        body["stream_options"] = {"include_usage": True}
    request = urllib.request.Request(address + "/v1/chat/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=600) as response:
        answer = response.read().decode()
    took = time.monotonic() - began
    if stream:
        chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
        last = chunks[-1]
    else:
        last = json.loads(answer)
        text = last["choices"][0]["message"]["content"]
    inside = last["timings"]["prompt_s"] + last["timings"]["decode_s"]
    return {"s": took, "inside": inside}, (last["usage"]["completion_tokens"], text.strip())


def serve(stream):
    server = subprocess.Popen([program, "serve", model, "--port", "0", "--parallel", "1", "-c", "1024", *more],
                              env=environment, stderr=subprocess.PIPE, text=True)
    try:
        address = None
        for line in server.stderr:
            found = re.search(r"(http://\S+) answers", line)
            address = found.group(1) if found else address
            if "ready;" in line:
                break
        assert address, "the server did not start"
        before = http_cpu_s(server.pid)
        times, answer = ask(address, stream)
        return dict(times, http=(http_cpu_s(server.pid) - before) / answer[0]), answer
    finally:
        server.terminate()
        server.wait()


ways = {"run": run, "whole": lambda: serve(False), "stream": lambda: serve(True)}
times = {way: [] for way in ways}
# The first one reads the file into the page cache, if there is room.
ways["run"]()
for turn in range(rounds):
    order = list(ways) if turn % 2 == 0 else list(ways)[::-1]
    taken = {way: ways[way]() for way in order}
    assert taken["run"][1] == taken["whole"][1] == taken["stream"][1], "all say the same"
    for way in ways:
        times[way].append(taken[way][0])
tokens = taken["run"][1][0]

# The interval of a median by order statistics: at least 95% for any distribution.
rank, total, term = 0, 0.0, 0.5 ** rounds
while total + term <= 0.025:
    total += term
    rank += 1
    term = term * (rounds - rank + 1) / rank


def compared(what, way, clock):
    ours = [taken[clock] for taken in times[way]]
    ratios = sorted(a / b["s"] for a, b in zip(ours, times["run"]))
    low, high = ratios[max(rank - 1, 0)], ratios[min(rounds - rank, rounds - 1)]
    print(f"{what} {statistics.median(ours):.3f} s; / run: median {statistics.median(ratios):.4f}, "
          f"95% interval {low:.4f} to {high:.4f}")


print(f"{rounds} rounds of {tokens} tokens; run {statistics.median(t['s'] for t in times['run']):.3f} s")
for way in ("whole", "stream"):
    compared(f"{way}, at the client:", way, "s")
    compared(f"{way}, as the server reports:", way, "inside")
    http = statistics.median(taken["http"] for taken in times[way])
    print(f"{way}: the HTTP thread takes {http * 1e6:.0f} us of CPU a token")
