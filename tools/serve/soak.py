#!/usr/bin/env python3
"""Runs `refrain serve` under random requests, cancels and kills, and looks for leaks.

    python3 tools/serve/soak.py REFRAIN [--minutes 10] [--clients 12] [-- FLAGS OF SERVE]

Clients stream completions of random lengths with fixed seeds, close some connections early, and send some embeddings if a
model embeds. Every minute or so the worker is killed. Every complete reply must be the one that the same seed gave before.
At each pause without requests, nothing may be left open, no KV block may be in use, and the server may have no more files
than at the first pause. Memory of the server and of its worker may grow by at most 20 % and 32 MiB from the second pause
on. Needs only the standard library. Exit code 1 means that something of this was violated.
"""

import argparse
import http.client
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time


def start(refrain, flags):
    server = subprocess.Popen([refrain, "serve", "--port", "0", *flags], stderr=subprocess.PIPE, text=True)
    port = None
    for line in server.stderr:
        if "http://" in line:
            port = int(line.rsplit(":", 1)[1].split("/")[0].strip().rstrip('"},'))
        if "ready on" in line:
            break
    threading.Thread(target=lambda: [None for _ in server.stderr], daemon=True).start()
    if port is None:
        sys.exit("the server did not start")
    return server, port


def call(port, method, path, body=None, timeout=600):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


class Soak:
    def __init__(self, port, embeds):
        self.port, self.embeds = port, embeds
        self.lock, self.known, self.faults = threading.Lock(), {}, []
        self.counts = dict.fromkeys(["whole", "cancelled", "embedded", "kills"], 0)
        self.running = threading.Event()
        self.ended = False

    def note(self, what):
        with self.lock:
            self.counts[what] += 1

    def fault(self, text):
        with self.lock:
            self.faults.append(text)
        print("FAULT", text, flush=True)

    def client(self, number):
        choose = random.Random(number)
        while not self.ended:
            self.running.wait(1)
            if not self.running.is_set():
                continue
            try:
                if self.embeds and choose.random() < 0.1:
                    self.embed(choose)
                else:
                    self.complete(choose)
            except OSError as error:
                self.fault(f"client {number}: {error!r}")
                time.sleep(1)

    def embed(self, choose):
        texts = ["cat " * choose.randrange(1, 12) for _ in range(choose.randrange(1, 30))]
        status, reply = call(self.port, "POST", "/v1/embeddings", {"model": self.embeds, "input": texts})
        if status != 200 or len(reply["data"]) != len(texts):
            self.fault(f"embeddings: {status} {str(reply)[:300]}")
        self.note("embedded")

    def complete(self, choose):
        seed, n = choose.randrange(40), choose.choice([1, 5, 40, 150, 400])
        body = {"prompt": "Once upon a time", "seed": seed, "max_tokens": n, "ignore_eos": True, "stream": True}
        stop_after = choose.randrange(1, 60) if choose.random() < 0.3 else None
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                return self.fault(f"completion: {response.status} {response.read()[:300]}")
            text, n_events = "", 0
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    return self.compare((seed, n), text)
                event = json.loads(line[6:])
                if "error" in event:
                    return self.fault(f"stream: {event}")
                text += event["choices"][0]["text"]
                n_events += 1
                if n_events == stop_after:
                    self.note("cancelled")
                    return None
            return self.fault("a stream ended without [DONE]")
        finally:
            connection.close()

    def compare(self, key, text):
        self.note("whole")
        with self.lock:
            before = self.known.setdefault(key, text)
        if before != text:
            self.fault(f"seed and length {key} gave another text")


def resident_mib(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def measure(port, server):
    """Waits until nothing is open, and measures what is left."""
    deadline = time.time() + 60
    while True:
        status = call(port, "GET", "/status")[1]
        worker = status["backend"]["workers"][0]
        open_now = status["n_open"], sum(m["n_running"] + m["n_waiting"] for m in worker["models"])
        blocks = sum(model["kv_blocks_used"] for model in worker["models"])
        if (open_now == (0, 0) and blocks == 0 and worker["pid"]) or time.time() > deadline:
            break
        time.sleep(0.5)
    files = len(os.listdir(f"/proc/{server.pid}/fd"))
    mib = resident_mib(server.pid), resident_mib(worker["pid"]) if worker["pid"] else 0.0
    return {"open": open_now, "blocks": blocks, "files": files, "mib": mib, "pid": worker["pid"]}


def main():
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser()
    parser.add_argument("refrain")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--embeds", help="name of a served model that embeds")
    args = parser.parse_args(sys.argv[1:split])
    server, port = start(args.refrain, sys.argv[split + 1 :])
    soak = Soak(port, args.embeds)
    for number in range(args.clients):
        threading.Thread(target=soak.client, args=(number,), daemon=True).start()
    end, pauses, choose = time.time() + args.minutes * 60, [], random.Random(0)
    while time.time() < end:
        soak.running.set()
        work_until = min(end, time.time() + 60)
        while time.time() < work_until:
            time.sleep(choose.uniform(5, 25))
            pid = call(port, "GET", "/status")[1]["backend"]["workers"][0]["pid"]
            if pid and choose.random() < 0.5:
                os.kill(pid, choose.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGABRT]))
                soak.note("kills")
        soak.running.clear()
        time.sleep(3)
        found = measure(port, server)
        pauses.append(found)
        print(f"{len(pauses)}: {found} {soak.counts}", flush=True)
        if found["open"] != (0, 0) or found["blocks"]:
            soak.fault(f"left behind: {found}")
        if found["files"] > pauses[0]["files"] + 2:
            soak.fault(f"{found['files']} files, {pauses[0]['files']} at the first pause")
    soak.ended = True
    if len(pauses) > 2:
        for idx, name in enumerate(["server", "worker"]):
            before, after = pauses[1]["mib"][idx], pauses[-1]["mib"][idx]
            if after > before * 1.2 + 32:
                soak.fault(f"the {name} grew from {before:.0f} to {after:.0f} MiB")
    server.terminate()
    code = server.wait(60)
    if code != 0:
        soak.fault(f"the server ended with {code}")
    print(json.dumps({"counts": soak.counts, "faults": len(soak.faults), "pauses": len(pauses)}))
    sys.exit(1 if soak.faults else 0)


if __name__ == "__main__":
    main()
