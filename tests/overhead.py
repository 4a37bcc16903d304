"""What the server costs: the same greedy answer from `hotpin run` and, streamed, from `hotpin serve`.

Usage: overhead.py MODEL.gguf PAIRS [ARGUMENTS of both]; the program is $HOTPIN. In turns, A B B A. The time of
`run` is what it reports for prompt and answer, without start and loading; that of the server is the
client's, from before the connection to the end of the stream.
"""
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request

model, pairs, more = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
program = os.environ.get("HOTPIN", "hotpin")
environment = dict(os.environ, HOTPIN_CONFIG="/dev/null")
PROMPT, TOKENS = "Tell me about the sea.", 256
REPORT = re.compile(r"prompt (\d+) tokens in ([\d.]+) s .*answer (\d+) tokens in ([\d.]+) s")


def run():
    command = [program, "run", model, "-p", PROMPT, "-n", str(TOKENS), "--temp", "0", "-c", "1024", *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    prompt_tokens, prompt_s, tokens, decode_s = REPORT.search(done.stderr).groups()
    return float(prompt_s) + float(decode_s), int(tokens), done.stdout.strip()


def serve(address):
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": TOKENS, "stream": True,
            "stream_options": {"include_usage": True}, "cache_prompt": False}
    request = urllib.request.Request(address + "/v1/chat/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=600) as response:
        lines = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: ")]
    took = time.monotonic() - began
    chunks = [json.loads(line) for line in lines[:-1]]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    return took, chunks[-1]["usage"]["completion_tokens"], text.strip()


def http_cpu_s(pid):
    """CPU time of the thread that speaks HTTP."""
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/stat") as stat:
            name, rest = stat.read().split("(", 1)[1].rsplit(")", 1)
        if name == "hotpin-http":
            fields = rest.split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    raise SystemExit("no thread hotpin-http")


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
    ratios, times = [], {"run": [], "serve": []}
    serve(address)
    run()
    for pair in range(pairs):
        order = ("run", "serve") if pair % 2 == 0 else ("serve", "run")
        taken = {which: run() if which == "run" else serve(address) for which in order}
        assert taken["run"][1:] == taken["serve"][1:], "both say the same"
        for which in order:
            times[which].append(taken[which][0])
        ratios.append(taken["serve"][0] / taken["run"][0])
    http_s = http_cpu_s(server.pid) / (pairs + 1) / taken["serve"][1]
finally:
    server.terminate()
    server.wait()
ratios.sort()
# The interval of the median by order statistics: at least 95% for any distribution.
rank = 0
chance = 0.5 ** pairs
total, term = 0.0, chance
while total + term <= 0.025:
    total += term
    rank += 1
    term = term * (pairs - rank + 1) / rank
low, high = ratios[max(rank - 1, 0)], ratios[min(pairs - rank, pairs - 1)]
print(f"{pairs} pairs of {taken['run'][1]} tokens; run {statistics.median(times['run']):.3f} s, "
      f"server {statistics.median(times['serve']):.3f} s (medians)")
print(f"the HTTP thread takes {http_s * 1e6:.0f} us of CPU a token")
print(f"server / run: median {statistics.median(ratios):.4f}, 95% interval {low:.4f} to {high:.4f}")
