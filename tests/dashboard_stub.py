"""A server with the shapes of docs/api.md and made-up values: sizes, texts and failures that a small
real model does not have. Used by dashboard.py only."""
import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
HOSTILE = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"


class Stub:
    """Serves `page` with `layers` x `experts`, of which `moving` change each tick."""

    def __init__(self, page, layers=60, experts=250, moving=300, governed=True, controls=True, text="m", port=0):
        self.page, self.layers, self.experts, self.moving = page, layers, experts, moving
        self.governed, self.controls, self.text = governed, controls, text
        self.random = random.Random(1)
        self.residence = ["."] * (layers * experts)
        self.score = ["A"] * (layers * experts)
        self.move(layers * experts)
        self.started, self.number, self.stopping = time.monotonic(), 0, False
        self.failed, self.vram = None, None
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                stub.answer(self)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # a page that went away
        self.port = self.server.server_address[1]
        self.address = "http://127.0.0.1:%d" % self.port
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self):
        self.stopping = True
        self.server.shutdown()
        self.server.server_close()

    def move(self, count):
        for _ in range(count):
            at = self.random.randrange(len(self.residence))
            self.residence[at] = self.random.choice("PPt..")
            self.score[at] = self.random.choice(BASE64)

    def entry(self, number):
        change = {"layer": 1, "expert": 2, "reason": self.text if self.text != "m" else "fill", "score": 0.5}
        return {
            "t_s": number / 10, "capacity_bytes": 8 << 30, "binding": "host",
            "ceilings": {"model": 60 << 30, "configured": 12 << 30, "host": 8 << 30, "pressure": 9 << 30},
            "pin_budget_bytes": 6 << 30, "pin_limit": "share", "pinned_bytes": 5 << 30, "transit_bytes": 2 << 30,
            "available_bytes": 4 << 30, "cgroup_available_bytes": None, "decode_tokens": 1, "hit_ratio": 0.9,
            "stall_ms": 3.5, "major_faults": 1, "drift": number % 100 == 50, "pinned": [change] * (number % 3),
            "unpinned": [], "lock_error": self.text if self.text != "m" and number % 10 == 0 else None,
            "lost_bytes": None, "quiet_ticks": 0, **({"vram": self.vram} if self.vram else {}),
        }

    def tick(self, experts):
        n = self.number
        tick = {
            "number": n if self.governed else None, "uptime_s": time.monotonic() - self.started,
            "tick": self.entry(n) if self.governed else None, "pressure_cause": None, "paused": False,
            "totals": {"decode_tokens": n, "prompt_tokens": 9, "hits": 90 * n, "pinned_hits": 80 * n, "misses": 10 * n,
                       "fetch_bytes": n << 22, "stall_ms": 3.5 * n, "decode_ms": 90.0 * n, "major_faults": n,
                       "pressure_stall_ms": None, "drift_events": n // 100, "lock_errors": 0},
            "requests": {"queued": 0, "running": 1, "finished": 1, "cancelled": 0, "failed": 0, "refused": 0,
                         "prompt_tokens": 9, "cached_tokens": 0, "generated_tokens": n},
        }
        if self.failed:
            tick["failed"] = self.failed
        if experts and self.governed:
            tick["experts"] = {"residence": "".join(self.residence), "score": "".join(self.score)}
        return tick

    def state(self):
        layer = {"block": 0, "experts": self.experts, "top_k": 8, "expert_bytes": 4 << 20}
        return {
            "version": "0", "phase": "ready", "loading": None, "controls": self.controls, "now": self.tick(True),
            "layers": [dict(layer, block=block) for block in range(self.layers)],
            "model": {"id": self.text, "file_bytes": 64 << 30, "architecture": self.text, "expert_bytes": 60 << 30,
                      "token_cycle_bytes": 1 << 30, "policy": "adaptive" if self.governed else "off", "store": "mapped",
                      "n_ctx": 4096, "parallel": 2, "n_batch": 512, "n_ubatch": 512, "threads": 2},
            "recent_requests": [{"id": self.text, "at_s": 1.5, "outcome": self.text, "prompt_tokens": 9,
                                 "cached_tokens": 0, "completion_tokens": 20, "queue_s": 0.1, "prompt_s": 0.5, "decode_s": 2.0}],
        }

    def answer(self, request):
        path = request.path.split("?")[0]
        if path == "/":
            return self.send(request, self.page, "text/html; charset=utf-8")
        if path == "/api/state":
            return self.send(request, json.dumps(self.state()).encode())
        if path == "/api/journal":
            entries = [{"number": n, "entry": self.entry(n)} for n in range(max(0, self.number - 100), self.number)]
            return self.send(request, json.dumps({"entries": entries, "before": None}).encode())
        if path.startswith("/api/explain/"):
            layer, expert = map(int, path.split("/")[-2:])
            told = {"layer": layer, "block": 0, "expert": expert, "bytes": 4 << 20, "residence": "pinned", "since_s": 1.0,
                    "score": 0.25, "place": 7, "experts": len(self.residence), "pinned": None, "unpinned": None,
                    "evicted_s": None, "now_s": self.number / 10, "text": self.text}
            return self.send(request, json.dumps(told).encode())
        if path == "/api/events":
            return self.events(request)
        request.send_error(404)

    def send(self, request, body, kind="application/json"):
        request.send_response(200)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def events(self, request):
        request.send_response(200)
        request.send_header("Content-Type", "text/event-stream")
        request.end_headers()
        try:
            while not self.stopping:
                self.number += 1
                self.move(self.moving)
                message = "event: tick\ndata: " + json.dumps(self.tick(True)) + "\n\n"
                request.wfile.write(message.encode())
                time.sleep(0.1)
        except OSError:
            pass
        request.close_connection = True
