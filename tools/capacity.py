#!/usr/bin/env python3
"""How many cards a load needs: a simulation of Refrain's scheduler with measured step times.

    python3 tools/capacity.py check                      the simulation beside a measured load
    python3 tools/capacity.py cards --rate 5000          cards for 5,000 requests per second
    python3 tools/capacity.py table                      the tables of docs/scale.md

Every card runs the scheduler of `refrain-engine`: a step takes one token of each decoding sequence and fills its budget
with chunks of prompts. The time of a step comes from measured figures of one card (docs/gpu.md). Requests go to the card
with the fewest open ones, as `refrain serve --workers` and gateways do. Python's standard library is enough.
"""

import argparse
import heapq
import random
from bisect import bisect_left
from dataclasses import dataclass, field

BUDGET = 512  # tokens of a step
BESIDE = 128  # prompt tokens that a step has room for however many sequences decode


@dataclass(frozen=True)
class Profile:
    """One model on one card."""

    name: str
    decode_tok_s: dict  # sequences: tokens per second of all together
    prompt_tok_s: float  # of a prompt of 512 tokens
    mixed_ms: float  # what a step with a prompt chunk costs more: the host waits for it, and starts a new run
    max_seqs: int = 64

    def decode_s(self, rows):
        """Seconds of a step of `rows` rows: between two measured sizes, time is linear."""
        sizes = sorted(self.decode_tok_s)
        seconds = [size / self.decode_tok_s[size] for size in sizes]
        at = min(max(bisect_left(sizes, rows), 1), len(sizes) - 1)
        (a, b), (s, t) = sizes[at - 1 : at + 1], seconds[at - 1 : at + 1]
        return max(s + (t - s) * (rows - a) / (b - a), seconds[0])

    def step_s(self, n_decode, n_prompt):
        rows = n_decode + n_prompt
        if n_prompt == 0:
            return self.decode_s(rows)
        # Products of few rows read all weights, those of many are bound by arithmetic.
        largest = max(self.decode_tok_s)
        return max(self.decode_s(min(rows, largest)), rows / self.prompt_tok_s) + 1e-3 * self.mixed_ms


PROFILES = {
    profile.name: profile
    for profile in [
        # docs/gpu.md, one H200: "Many sequences" and "Prompts".
        Profile("llama-3.2-1b BF16", {1: 1474, 8: 6337, 32: 23779, 64: 41894, 256: 94464}, 171545, 1.6),
        Profile("llama-3.1-8b BF16", {1: 271, 8: 1594, 32: 5911, 64: 11194, 256: 25881}, 37756, 1.6),
        Profile("llama-3.1-8b Q4_K_M", {1: 676, 8: 2807, 32: 9154, 64: 14111, 256: 19265}, 26477, 1.6),
    ]
}


@dataclass
class Load:
    """Requests that arrive at random times."""

    rate: float  # requests per second
    prompt: tuple = (16, 256)  # tokens, uniform
    reply: tuple = (16, 128)
    n_requests: int = 800

    def requests(self, seed):
        rng, at = random.Random(seed), 0.0
        for _ in range(self.n_requests):
            at += rng.expovariate(self.rate)
            yield Request(at, rng.randint(*self.prompt), rng.randint(*self.reply))


@dataclass
class Request:
    arrived: float
    n_prompt: int  # prompt tokens that are left
    n_reply: int  # reply tokens that are left
    first: float = 0.0
    last: float = 0.0


@dataclass
class Card:
    """A card with its scheduler."""

    profile: Profile
    beside: int
    now: float = 0.0
    busy: float = 0.0
    waiting: list = field(default_factory=list)
    running: list = field(default_factory=list)

    def n_open(self):
        return len(self.waiting) + len(self.running)

    def step(self, out):
        """Runs one step that begins at `now`."""
        decoding = [r for r in self.running if r.n_prompt == 0]
        prompts = [r for r in self.running if r.n_prompt > 0]
        budget = BUDGET - len(decoding)
        if decoding:
            n_prompts = len(prompts) + len(self.waiting)
            budget = min(budget, max(self.beside, BUDGET * n_prompts // (len(decoding) + n_prompts)))
        while self.waiting and len(self.running) < self.profile.max_seqs:
            request = self.waiting.pop(0)
            self.running.append(request)
            prompts.append(request)
        n_prompt, finished = 0, []
        for request in prompts:
            n = min(request.n_prompt, budget - n_prompt)
            request.n_prompt -= n
            n_prompt += n
            if n > 0 and request.n_prompt == 0:
                finished.append(request)
        seconds = self.profile.step_s(len(decoding), n_prompt)
        self.now += seconds
        self.busy += seconds
        for request in decoding + finished:
            request.n_reply -= 1
            if request.first == 0.0:
                request.first = self.now
                out.ttft.append(self.now - request.arrived)
            else:
                out.between.append(self.now - request.last)
            request.last = self.now
            out.n_tokens += 1
        self.running = [r for r in self.running if r.n_reply > 0]


@dataclass
class Outcome:
    ttft: list = field(default_factory=list)
    between: list = field(default_factory=list)
    n_tokens: int = 0
    seconds: float = 0.0
    utilisation: float = 0.0

    def ms(self, of, share):
        values = sorted(of)
        return 1e3 * values[min(int(share * len(values)), len(values) - 1)]


def simulate(profile, load, n_cards=1, beside=BESIDE, seed=1):
    cards = [Card(profile, beside) for _ in range(n_cards)]
    out, steps = Outcome(), []  # steps: (time at which a card can begin its next one, card)
    active = [False] * n_cards
    by_load = [(0, idx) for idx in range(n_cards)]  # stale entries are skipped
    arrivals = load.requests(seed)
    arrival = next(arrivals, None)
    while arrival is not None or steps:
        if arrival is not None and (not steps or arrival.arrived <= steps[0][0]):
            while by_load[0][0] != cards[by_load[0][1]].n_open():
                heapq.heappop(by_load)
            idx = by_load[0][1]
            cards[idx].waiting.append(arrival)
            heapq.heapreplace(by_load, (cards[idx].n_open(), idx))
            if not active[idx]:
                active[idx] = True
                heapq.heappush(steps, (max(arrival.arrived, cards[idx].now), idx))
            arrival = next(arrivals, None)
            continue
        at, idx = heapq.heappop(steps)
        card = cards[idx]
        before = card.n_open()
        card.now = at
        card.step(out)
        if card.n_open() != before:
            heapq.heappush(by_load, (card.n_open(), idx))
        active[idx] = card.n_open() > 0
        if active[idx]:
            heapq.heappush(steps, (card.now, idx))
    out.seconds = max(card.now for card in cards)
    out.utilisation = sum(card.busy for card in cards) / (n_cards * out.seconds)
    return out


def highest_rate(profile, load, beside=BESIDE):
    """Requests per second of one card when all requests are there from the start."""
    out = simulate(profile, Load(1e9, load.prompt, load.reply, load.n_requests), beside=beside)
    return load.n_requests / out.seconds


def per_card(profile, load, ttft_ms, between_ms):
    """The highest rate at which one card keeps both limits for 99 of 100 requests and tokens."""
    low, high = 0.0, highest_rate(profile, load)
    for _ in range(12):
        rate = (low + high) / 2
        out = simulate(profile, Load(rate, load.prompt, load.reply, 3000))
        keeps = out.ms(out.ttft, 0.99) <= ttft_ms and out.ms(out.between, 0.99) <= between_ms
        low, high = (rate, high) if keeps else (low, rate)
    return low


def row(out):
    ttft, between = out.ttft, out.between
    return (
        f"{out.n_tokens / out.seconds:10,.0f} tok/s   first token {out.ms(ttft, 0.5):6.1f} / {out.ms(ttft, 0.99):6.1f} ms   "
        f"between {out.ms(between, 0.5):5.2f} / {out.ms(between, 0.99):5.2f} ms   busy {100 * out.utilisation:3.0f} %"
    )


# A load that was measured with `refrain bench --load` (docs/gpu.md, "Server and loads").
MEASURED = {
    "profile": "llama-3.2-1b BF16",
    "beside": BESIDE,
    "highest": 209.0,
    "rate": 0.8 * 209.0,
    "tok_s": 11784,
    "ttft": (10.4, 48.0),
    "between": (1.73, 3.77),
}


def check(_):
    profile = PROFILES[MEASURED["profile"]]
    highest = highest_rate(profile, Load(1.0), MEASURED["beside"])
    out = simulate(profile, Load(MEASURED["rate"]), beside=MEASURED["beside"])
    print(f"{'':26}measured  simulated")
    pairs = [
        ("highest rate, requests/s", MEASURED["highest"], highest),
        ("output, tok/s", MEASURED["tok_s"], out.n_tokens / out.seconds),
        ("first token, p50, ms", MEASURED["ttft"][0], out.ms(out.ttft, 0.5)),
        ("first token, p99, ms", MEASURED["ttft"][1], out.ms(out.ttft, 0.99)),
        ("between tokens, p50, ms", MEASURED["between"][0], out.ms(out.between, 0.5)),
        ("between tokens, p99, ms", MEASURED["between"][1], out.ms(out.between, 0.99)),
    ]
    for name, measured, simulated in pairs:
        print(f"{name:26}{measured:8,.1f}  {simulated:9,.1f}")


def cards(args):
    profile = PROFILES[args.model]
    load = Load(args.rate, tuple(args.prompt), tuple(args.reply))
    one = per_card(profile, load, args.first, args.between)
    n = max(1, round(args.rate / one + 0.499))
    print(f"{profile.name}: one card serves {one:.1f} requests/s within {args.first:g} and {args.between:g} ms (p99)")
    out = simulate(profile, Load(args.rate, load.prompt, load.reply, min(400 * n, 200_000)), n)
    print(f"{n} cards at {args.rate:,.0f} requests/s: {row(out)}")


def table(args):
    for profile in PROFILES.values():
        one = per_card(profile, Load(1.0), args.first, args.between)
        print(f"\n{profile.name}: {one:.1f} requests/s per card at most; at 80 %:")
        for n in [1, 10, 100, 1000]:
            out = simulate(profile, Load(0.8 * one * n, n_requests=min(400 * n, 200_000)), n)
            print(f"{n:5} cards {0.8 * one * n:10,.0f} requests/s {row(out)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("check").set_defaults(run=check)
    for name, run in [("cards", cards), ("table", table)]:
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--model", default="llama-3.1-8b BF16", choices=PROFILES)
        command.add_argument("--rate", type=float, default=1000.0, help="requests per second")
        command.add_argument("--prompt", type=int, nargs=2, default=[16, 256], help="least and most tokens of a prompt")
        command.add_argument("--reply", type=int, nargs=2, default=[16, 128], help="least and most tokens of a reply")
        command.add_argument("--first", type=float, default=200.0, help="limit of the time to the first token, ms")
        command.add_argument("--between", type=float, default=50.0, help="limit of the time between tokens, ms")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
