"""The dashboard in headless Chromium: real clicks on a server with a real model, and synthetic data for
what a small model does not show. Screenshots go to FOLDER.

Usage: dashboard.py CHROMIUM FOLDER http://ADDRESS KEY; the server was just started, has the test model,
and has answered nothing yet."""
import json
import os
import pathlib
import re
import sys
import threading
import time
import urllib.request

from playwright.sync_api import expect, sync_playwright

from dashboard_stub import HOSTILE, Stub

chromium, folder, address, key = sys.argv[1:5]
PAGE = (pathlib.Path(__file__).parent / "../src/server/dashboard.html").read_bytes()
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync"]
FRAME_MS = 16
PATIENCE_MS = 60_000
# Times what the page does in its animation frames, and counts what a screen reader would be told.
PROBE = """
window.frameTimes = [];
const real = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = callback => real(at => {
  const start = performance.now();
  callback(at);
  const script = performance.now() - start, channel = new MessageChannel();
  // The first task after a frame comes when style, layout and paint are done.
  channel.port1.onmessage = () => window.frameTimes.push([script, performance.now() - start]);
  channel.port2.postMessage(0);
});
window.told = 0;
addEventListener("DOMContentLoaded", () => {
  const observer = new MutationObserver(() => { window.told++; });
  for (const live of document.querySelectorAll("[aria-live]")) observer.observe(live, { childList: true, characterData: true, subtree: true });
});
"""


class Watched:
    """A page, with everything that it complains of and asks for."""

    def __init__(self, browser, at, width=1280, height=900, **more):
        self.at = at
        self.context = browser.new_context(viewport={"width": width, "height": height}, **more)
        self.context.add_init_script(PROBE)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.complaints, self.requests = [], []
        self.page.on("console", lambda m: m.type in ("error", "warning") and self.complaints.append(m.text))
        self.page.on("pageerror", lambda e: self.complaints.append(str(e)))
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.goto(at)

    def __getattr__(self, name):
        return getattr(self.page, name)

    def log_in(self):
        self.page.get_by_role("textbox", name="API key").fill(key)
        self.page.get_by_role("button", name="Use key").click()
        expect(self.page.locator("#link")).to_have_text("live")

    def text(self, selector):
        return self.page.locator(selector).inner_text()

    def cells(self):
        return sum(int(text.split()[0].replace(",", "")) for text in self.page.locator("#legend b").all_inner_texts())

    def until(self, what, check, seconds=60):
        end = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < end, f"never: {what}"
            self.page.wait_for_timeout(100)

    def done(self, excused=()):
        """Nothing went outside, and nothing was complained of but what the test provoked."""
        outside = [url for url in self.requests if not url.startswith((self.at, "data:"))]
        assert not outside, outside
        left = [c for c in self.complaints if not any(e in c for e in excused)]
        assert not left, left
        self.context.close()


def api(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data=data)
    request.add_header("Authorization", "Bearer " + key)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


class Generating:
    """A request that runs while the test looks at the page."""

    def __init__(self, prompt, tokens):
        body = {"prompt": prompt, "max_tokens": tokens, "seed": 1}
        self.answer = None
        self.thread = threading.Thread(target=self.run, args=(body,))
        self.thread.start()

    def run(self, body):
        self.answer = api("/v1/completions", body)

    def end(self):
        self.thread.join(timeout=300)
        assert self.answer, "the request has not ended"
        return self.answer["usage"]


def shot(page, name):
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=os.path.join(folder, f"dashboard-{name}.png"), full_page=True)


def wrong_key_is_refused(page):
    expect(page.locator("#login")).to_be_visible()
    expect(page.locator("#live")).to_be_hidden()
    page.get_by_role("textbox", name="API key").fill("not the key \u263a")
    page.get_by_role("button", name="Use key").click()
    expect(page.locator("#login-says")).to_have_text("The server refused this key.")
    expect(page.locator("#live")).to_be_hidden()
    assert page.evaluate("sessionStorage.length") == 0
    page.log_in()
    stored = page.evaluate("[Object.values(sessionStorage), localStorage.length, document.cookie, location.href]")
    assert stored == [[key], 0, "", address + "/"], stored


def the_map_has_every_expert(page):
    layers = api("/api/state")["layers"]
    total = sum(layer["experts"] for layer in layers)
    page.until("the legend counts all experts", lambda: page.cells() == total)
    rows, columns = len(layers), layers[-1]["experts"]
    box = page.locator("#map canvas").bounding_box()
    page.locator("#map").click(position={"x": box["width"] - 5, "y": box["height"] - 5})
    expect(page.locator("#explain h3")).to_have_text(f"Layer {rows - 1}, expert {columns - 1}")
    told = api(f"/api/explain/{rows - 1}/{columns - 1}")
    expect(page.locator("#explain")).to_contain_text(f"of {total:,}")
    expect(page.locator("#explain")).to_contain_text(told["text"].split(" (")[0])
    expect(page.locator("#explain")).to_contain_text(re.compile(r"it is \d+\.\d s now"))


def pause_really_pauses(page):
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.locator("#control-says")).to_contain_text("Paused")
    expect(page.locator("#paused")).to_be_visible()
    before = page.evaluate("document.querySelector('#map canvas').toDataURL()")
    request = Generating("The sea is", 48)
    page.until("speed is shown", lambda: page.text("[data-figure=speed]")[:4] not in ("0.00", "\u2013"))
    page.until("a hit ratio is shown", lambda: "%" in page.text("[data-figure=hits]"))
    usage = request.end()
    assert usage["completion_tokens"] > 16, usage
    state = api("/api/state?")["now"]
    assert state["paused"] and state["tick"]["pinned_bytes"] == 0, state["tick"]
    assert not any(e["entry"]["pinned"] for e in api("/api/journal?limit=1000")["entries"]), "pinned while paused"
    assert state["tick"]["transit_bytes"] > 0, "nothing was loaded"
    assert page.evaluate("document.querySelector('#map canvas').toDataURL()") != before, "the map stands still"
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#paused")).to_be_hidden()
    request = Generating("Once upon a time", 96)
    page.until("experts are pinned", lambda: api("/api/state")["now"]["tick"]["pinned_bytes"] > 0)
    page.until("the map shows them", lambda: not page.text("#legend b >> nth=0").startswith("0 "))
    return request


def requests_are_listed(page, request):
    used = request.end()
    page.until("the request is listed", lambda: page.locator("#requests tbody tr").count() == 2)
    cells = page.locator("#requests tbody tr").first.locator("th, td").all_inner_texts()
    assert cells[1] == "finished" and cells[4] == str(used["completion_tokens"]), cells
    last = api("/api/state")["recent_requests"][-1]
    assert cells[0] == f"{last['at_s']:.1f} s" and cells[2] == str(last["prompt_tokens"]), (cells, last)


def capacity_is_set(page):
    size, button = page.get_by_label("Ceiling on capacity"), page.get_by_role("button", name="Set ceiling")
    size.fill("2 bananas")
    button.click()
    expect(page.locator("#control-says")).to_contain_text("bananas")
    expect(page.locator("#control-says")).to_have_attribute("data-is", "bad")
    size.fill("64MiB")
    button.click()
    expect(page.locator("#control-says")).to_contain_text("64.0 MiB")
    row = page.locator("[data-ceiling=configured]")
    expect(row.locator("td")).to_have_text("64.0 MiB")
    expect(row.locator(".badge")).to_be_visible()
    expect(page.locator("#chart-says")).to_contain_text("capacity 64.0 MiB, set by configured")
    tick = api("/api/state")["now"]["tick"]
    assert tick["capacity_bytes"] == 64 << 20 and tick["pinned_bytes"] <= 64 << 20, tick
    page.get_by_role("button", name="Remove ceiling").click()
    expect(row.locator("td")).to_have_text("none")
    size.fill("150MB")
    size.press("Enter")
    expect(row.locator("td")).to_have_text("143 MiB")


def journal_tells_reasons(page):
    journal = page.locator("#journal")
    expect(journal.locator("li", has_text="pinned:").first).to_be_visible()
    expect(journal.locator("li", has_text="Capacity fell").first).to_be_visible()
    line = journal.locator("li:has(summary)").first
    page.get_by_role("button", name="Follow").click()
    line.locator("summary").click()
    button = line.locator(".cells button").first
    layer, expert = button.inner_text()[1:].split("/")
    button.click()
    expect(page.locator("#explain h3")).to_have_text(f"Layer {layer}, expert {expert}")
    page.get_by_role("button", name="Held").click()
    shown = journal.locator("li:visible").count()
    page.get_by_label("quiet seconds too").check()
    page.until("quiet seconds are listed", lambda: journal.locator("li:visible").count() > shown)
    page.get_by_label("quiet seconds too").uncheck()


def keyboard_is_enough(page):
    names = page.evaluate("""[...document.querySelectorAll('button, input, select, [tabindex="0"]')]
      .filter(n => !n.labels?.length && !n.textContent.trim() && !n.getAttribute('aria-label') && !n.getAttribute('aria-labelledby'))
      .map(n => n.outerHTML)""")
    assert not names, names
    page.locator("#layer").fill("0")
    page.locator("#expert").fill("1")
    page.locator("#expert").press("Enter")
    expect(page.locator("#explain h3")).to_have_text("Layer 0, expert 1")
    page.locator("#map").focus()
    for press, layer, expert in [("ArrowRight", 0, 2), ("ArrowDown", 1, 2), ("Home", 1, 0), ("ArrowLeft", 1, 0), ("PageDown", 9, 0)]:
        page.keyboard.press(press)
        expect(page.locator("#peek")).to_contain_text(f"Layer {layer}, expert {expert}:")
    expect(page.locator("#explain h3")).to_have_text("Layer 9, expert 0")
    page.locator("#chart").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#chart-says")).to_contain_text("ago: capacity")
    page.evaluate("document.activeElement.blur()")
    expect(page.locator("#chart-says")).to_contain_text("Now: capacity")


def with_a_real_model(browser):
    page = Watched(browser, address + "/")
    wrong_key_is_refused(page)
    the_map_has_every_expert(page)
    request = pause_really_pauses(page)
    requests_are_listed(page, request)
    capacity_is_set(page)
    journal_tells_reasons(page)
    keyboard_is_enough(page)
    others = [("phone", Watched(browser, address + "/", 360, 780, device_scale_factor=2, has_touch=True, is_mobile=True)),
              ("dark", Watched(browser, address + "/", color_scheme="dark"))]
    request = Generating("fn main() {", 64)
    for name, other in others:
        other.log_in()
        other.until("cells", lambda: other.cells() > 0)
        wide = other.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1], f"{name}: {wide}"
    page.wait_for_timeout(2000)
    shot(page, "desktop")
    for name, other in others:
        other.locator("#map").tap(position={"x": 60, "y": 20}) if name == "phone" else other.locator("#map").hover(position={"x": 60, "y": 20})
        expect(other.locator("#explain h3" if name == "phone" else "#peek")).to_contain_text("Layer")
        shot(other, name)
        other.done(excused=["401"])
    request.end()
    page.done(excused=["401", "400"])


def frames(page, name):
    """Asserts on the page's work in its animation frames, ms."""
    page.evaluate("window.frameTimes = []; window.told = 0")
    page.wait_for_timeout(5000)
    times = page.evaluate("window.frameTimes")
    assert len(times) >= 20, f"{name}: {len(times)} frames in 5 s"
    script, whole = sorted(t[0] for t in times), sorted(t[1] for t in times)
    at = lambda sorted_, share: sorted_[int(len(sorted_) * share)]
    print(f"dashboard: {name}: {len(times)} frames; script {at(script, .5):.1f} ms median, {at(script, .95):.1f} at 95%, "
          f"{script[-1]:.1f} at most; with layout and paint {at(whole, .5):.1f} median, {at(whole, .95):.1f} at 95%")
    # Whole frames are in wall time, which other programs of this machine lengthen: their median is asserted.
    assert at(script, .95) < FRAME_MS and at(whole, .5) < FRAME_MS, f"{name}: frames are too long"


def with_15000_experts(browser):
    for moving, size in [(300, (1280, 900, 1)), (15_000, (1280, 900, 1)), (300, (360, 780, 2))]:
        stub = Stub(PAGE, moving=moving)
        page = Watched(browser, stub.address + "/", size[0], size[1], device_scale_factor=size[2])
        expect(page.locator("#link")).to_have_text("live")
        page.until("15,000 cells", lambda: page.cells() == 15_000)
        page.locator("#map").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#say-cell")).to_have_text("m")
        frames(page, f"15,000 experts, {moving} moved a tick, {size[0]} px")
        told = page.evaluate("window.told")
        assert told <= 1, f"a screen reader was told {told} things in 5 s"
        if moving == 300:
            shot(page, f"15000-{size[0]}")
        wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1], wide
        page.done()
        stub.stop()


def hostile_text_stays_text(browser):
    stub = Stub(PAGE, layers=2, experts=8, moving=2, text=HOSTILE)
    page = Watched(browser, stub.address + "/")
    expect(page.locator("#model")).to_contain_text(HOSTILE)
    page.locator("#map").click(position={"x": 5, "y": 5})
    expect(page.locator("#explain p").first).to_have_text(HOSTILE)
    expect(page.locator("#requests tbody")).to_contain_text(HOSTILE)
    expect(page.locator("#journal ol")).to_contain_text("A lock was refused: " + HOSTILE)
    assert page.evaluate("[window.hacked, document.images.length, document.scripts.length]") == [None, 0, 1]
    page.done()
    # The policy of the page holds even where its script would not.
    page = Watched(browser, stub.address + "/")
    refused = page.evaluate("""async () => {
      const refused = [];
      addEventListener("securitypolicyviolation", event => refused.push(event.effectiveDirective));
      try { document.body.innerHTML = "<b>x</b>"; } catch { }
      await fetch("http://127.0.0.1:9/", { mode: "no-cors" }).catch(() => 0);
      document.body.append(Object.assign(new Image(), { src: "http://127.0.0.1:9/x.png" }));
      document.body.append(Object.assign(document.createElement("iframe"), { src: "http://127.0.0.1:9/" }));
      await new Promise(done => setTimeout(done, 500));
      return [...new Set(refused)].sort();
    }""")
    assert refused == ["connect-src", "frame-src", "img-src", "require-trusted-types-for"], refused
    page.context.close()
    stub.stop()


def a_lost_server_is_named_and_found_again(browser):
    stub = Stub(PAGE, layers=4, experts=16)
    page = Watched(browser, stub.address + "/")
    expect(page.locator("#link")).to_have_text("live")
    port = stub.port
    stub.stop()
    expect(page.locator("#link")).to_contain_text("connection lost")
    expect(page.locator("body")).to_have_class("stale")
    page.until("another try", lambda: len([u for u in page.requests if u.endswith("/api/state")]) >= 3)
    stub = Stub(PAGE, layers=5, experts=16, port=port)
    page.get_by_role("button", name="Try now").click()
    expect(page.locator("#link")).to_have_text("live")
    page.until("the new map", lambda: page.cells() == 80)
    page.done(excused=["ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_INCOMPLETE_CHUNKED", "ERR_EMPTY_RESPONSE"])
    stub.stop()


def a_loop_that_ended_is_named(browser):
    stub = Stub(PAGE, layers=2, experts=8)
    page = Watched(browser, stub.address + "/")
    expect(page.locator("#link")).to_have_text("live")
    expect(page.locator("#failed")).to_be_hidden()
    stub.failed = "the tick panicked"
    expect(page.locator("#failed")).to_contain_text("the tick panicked")
    page.done()
    stub.stop()


def the_tier_in_a_devices_memory_is_told(browser):
    stub = Stub(PAGE, layers=2, experts=8)
    page = Watched(browser, stub.address + "/")
    summary = page.locator("#summary")
    expect(summary).to_contain_text("are missing.")
    expect(summary).not_to_contain_text("graphics device")
    pool = {"arrangement": "reload", "pool_bytes": 3 << 20, "static_bytes": 0, "rule": "yield", "binding": "memory",
            "hits": 30, "misses": 10}
    stub.vram = pool
    for words in ["A pool of 3", "\u201cyield\u201d", "\u201cmemory\u201d", "75% of the routed experts"]:
        expect(summary).to_contain_text(words)
    stub.vram = {**pool, "arrangement": "static", "static_bytes": 8 << 20, "hits": 0, "misses": 0}
    expect(summary).to_contain_text("of whole layers\u2019 experts on the graphics device")
    expect(summary).not_to_contain_text("of the routed experts")
    page.done()
    stub.stop()


def without_regulation_or_key(browser):
    stub = Stub(PAGE, governed=False, controls=False)
    page = Watched(browser, stub.address + "/")
    expect(page.locator("#off")).to_be_visible()
    for hidden in ("#memory", "#experts", "#journal"):
        expect(page.locator(hidden)).to_be_hidden()
    page.done()
    stub.stop()
    stub = Stub(PAGE, layers=2, experts=8, controls=False)
    page = Watched(browser, stub.address + "/")
    expect(page.locator("#closed")).to_be_visible()
    expect(page.get_by_role("button", name="Pause", exact=True)).to_be_disabled()
    page.done()
    stub.stop()


os.makedirs(folder, exist_ok=True)
with sync_playwright() as playwright:
    chrome = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
    for check in [with_a_real_model, with_15000_experts, hostile_text_stays_text,
                  a_lost_server_is_named_and_found_again, a_loop_that_ended_is_named, the_tier_in_a_devices_memory_is_told,
                  without_regulation_or_key]:
        check(chrome)
        print("dashboard:", check.__name__, "ok", flush=True)
    chrome.close()
