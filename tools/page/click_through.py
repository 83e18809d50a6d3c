"""Clicks through the web page in headless Chromium and saves screenshots.

    refrain serve --port 8792 &
    chromedriver --port=9515 &
    python3 tools/page/click_through.py http://localhost:8792 /tmp/screenshots

Needs chromium and chromedriver (Debian: chromium-driver), and nothing from PyPI. Fails at the first thing that is not as
expected, and if the browser's console has a message, such as a violation of the page's policy.
"""

import base64
import json
import pathlib
import sys
import tempfile
import time
import urllib.request

DRIVER = "http://127.0.0.1:9515"
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]


def call(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(DRIVER + path, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["value"]


class Browser:
    def __init__(self, size, folder, profile):
        args = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={size}"]
        wanted = {"browserName": "chrome", "goog:chromeOptions": {"args": args}, "goog:loggingPrefs": {"browser": "ALL"}}
        session = call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.path, self.folder = f"/session/{session['sessionId']}", folder

    def open(self, url):
        call("POST", f"{self.path}/url", {"url": url})
        self.wait("document.querySelectorAll('#model option').length > 0")

    def js(self, code):
        return call("POST", f"{self.path}/execute/sync", {"script": code, "args": []})

    def find(self, selector):
        found = call("POST", f"{self.path}/element", {"using": "css selector", "value": selector})
        return f"{self.path}/element/{next(iter(found.values()))}"

    def click(self, selector):
        call("POST", f"{self.find(selector)}/click", {})

    def type(self, selector, text):
        call("POST", f"{self.find(selector)}/value", {"text": text})

    def wait(self, condition, seconds=60):
        end = time.time() + seconds
        while not self.js(f"return !!({condition})"):
            assert time.time() < end, f"never true: {condition}"
            time.sleep(0.1)

    def shot(self, name):
        image = call("GET", f"{self.path}/screenshot")
        (self.folder / f"{name}.png").write_bytes(base64.b64decode(image))

    def close(self):
        log = call("POST", f"{self.path}/se/log", {"type": "browser"})
        call("DELETE", self.path)
        assert log == [], log


IS_RUNNING = "document.querySelector('#composer-button [aria-label=Stop]')"
LAST = "document.querySelector('.turn.assistant:last-child')"


def desktop(url, folder, profile):
    page = Browser("1280,850", folder, profile)
    page.open(url)
    page.shot("empty")
    page.type("#input", "Hello, who are you?")
    page.click("#composer-button button")
    page.wait(f"{LAST} && {LAST}.querySelector('.stats').textContent.includes('tok/s') && !{IS_RUNNING}")
    page.click("#engine-button")
    page.wait("document.querySelector('#engine').textContent.includes('Worker 0: ready')")
    page.shot("reply")
    page.click(".turn.assistant [aria-label=Regenerate]")
    page.wait(f"{LAST}.querySelector('.tools').textContent.includes('2 / 2') && !{IS_RUNNING}")
    page.click(".turn.assistant [aria-label='Previous version']")
    page.wait(f"{LAST}.querySelector('.tools').textContent.includes('1 / 2')")
    page.click(".turn.user [aria-label=Edit]")
    page.js("document.querySelector('.turn.user textarea').value = ''")
    page.type(".turn.user textarea", "Tell me a long story about a cat")
    page.click(".turn.user button.primary")
    page.wait(f"{IS_RUNNING} || {LAST}")
    if page.js(f"return !!{IS_RUNNING}"):
        page.js(f"{IS_RUNNING}?.click()")
    page.wait(f"!{IS_RUNNING}")
    page.shot("stopped")
    page.click("#settings-button")
    page.type("#setting-temperature", "abc")
    page.wait("document.querySelector('#settings-dialog').textContent.includes('abc is not a number')")
    page.shot("settings")
    page.js("document.querySelector('#settings-dialog').close()")
    page.open(url)
    page.wait("document.querySelectorAll('#conversations .item').length === 1")
    page.click("#conversations .open")
    page.wait("document.querySelectorAll('.turn').length === 2")
    page.type("#search", "story about")
    page.wait("document.querySelector('#conversations .found')")
    page.click("[aria-label='Dark or light']")
    page.shot("dark")
    page.close()


def phone(url, folder, profile):
    page = Browser("420,850", folder, profile)
    page.open(url)
    page.click("#menu-button")
    time.sleep(0.5)
    page.shot("phone")
    page.close()


def main():
    url, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for run in (desktop, phone):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            run(url, folder, profile)
    print(f"as expected; screenshots are in {folder}")


main()
