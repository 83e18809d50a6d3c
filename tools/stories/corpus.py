"""Splits the log of generate.py into stories and keeps the clean ones.

    python3 corpus.py SMOLLM2.gguf LOG.npy OUT_DIR [--length 288]

Writes to OUT_DIR: stories.txt and heldout-stories.txt, with <|endoftext|> between stories, and chains.txt: some stories of
stories.txt again, three to a document, so that the model sees positions beyond a story's end.
"""

import argparse
import collections
import json
import multiprocessing
import pathlib
import re
import time

import numpy as np

import smollm
from gguf_io import Reader

END = "<|endoftext|>\n"
FIRST = 1 << 20
WORD = re.compile(r"[A-Za-z']+")
LEAKS = re.compile(
    r"\b(the story|this story|stories|happy ending|happy end|simple words|sentences?|assistant|AI|SmolLM|as they say|"
    r"history|kill\w*|murder\w*|sex\w*|drunk|drugs?|guns?|blood\w*|corpse|suicide|rape\w*|naked|alcohol|beer|wine|"
    r"cigarettes?|Hitler|Jesus|Nazi|dead|died|dies|die|death|hospital|adults?|pregnant)\b",
    re.IGNORECASE,
)
TWICE = re.compile(r"\b(?!(?:very|so|no|ha|bye|far|many|that|had)\b)([a-z']{2,}),? \1\b", re.IGNORECASE)


def clean(text):
    """The story with normalised spacing, or None and the reason why it is dropped."""
    text = re.sub(r"\s+", " ", text).strip()
    if not text.isascii() or not text[:1].isupper():
        return None, "letters"
    if not re.search(r"""[.!?]"?$""", text) or text.count('"') % 2:
        return None, "punctuation"
    if re.search(r"""'[A-Z]|\s'|[.,!?]'| [.,!?]|[.,!?][.,!?]|"[.,!?]|[a-z][A-Z]""", text):
        return None, "punctuation"
    if LEAKS.search(text):
        return None, "subject"
    words = [w.lower() for w in WORD.findall(text)]
    if not 25 <= len(words) <= 200 or max(map(len, words)) > 14:
        return None, "length"
    if TWICE.search(text) or text.lower().count("once upon a time") > 1:
        return None, "repeats"
    sentences = [s.strip().lower() for s in re.split(r"[.!?]", text) if len(s.split()) > 2]
    if len(sentences) < 3 or len(set(sentences)) < len(sentences) or max(len(s.split()) for s in sentences) > 40:
        return None, "repeats"
    triples = list(zip(words, words[1:], words[2:]))
    if len(set(triples)) < 0.88 * len(triples):
        return None, "repeats"
    content = collections.Counter(w for w in words if len(w) > 3)
    if content and max(content.values()) > 4 + len(words) / 25:
        return None, "repeats"
    return text, "kept"


def stories_of(rows):
    """The finished stories of some rows of the log, cleaned, and counts of the reasons why others were dropped."""
    kept, why = [], collections.Counter()
    for row in rows:
        starts = np.flatnonzero(row & FIRST)
        row = row & (FIRST - 1)
        for begin, end in zip(starts, starts[1:]):
            if end - begin >= LENGTH - N_SHARED - 1:
                why["unfinished"] += 1
                continue
            ids = row[begin:end].tolist()
            ids = ids[len(ids) - ids[::-1].index(ASSISTANT) + 1 :]
            text, reason = clean(b"".join([BYTES[i] for i in ids]).decode("utf-8", "replace"))
            why[reason] += 1
            if text:
                kept.append(text)
    return kept, why


def known_words(stories, least):
    """Drops stories with a word that few others use: mostly typos and invented names."""
    counts = collections.Counter()
    for story in stories:
        counts.update(set(WORD.findall(story)))
    return [s for s in stories if all(counts[w] >= least for w in WORD.findall(s))]


def chains(stories):
    """A fiftieth of the stories, three to a document."""
    few = stories[: max(3, len(stories) // 50)]
    return ["\n\n".join(few[i : i + 3]) for i in range(0, len(few) - 2, 3)]


def setup(path, length):
    """Data that the worker processes share with their parent."""
    global BYTES, ASSISTANT, N_SHARED, LENGTH
    import prompts

    reader = Reader(path)
    tokenizer = smollm.tokenizer_of(reader)
    alphabet = smollm.byte_alphabet()
    BYTES = [bytes(alphabet.get(c, 63) for c in t) for t in reader.meta["tokenizer.ggml.tokens"]]
    ASSISTANT = tokenizer.encode("<|im_start|>assistant", add_special_tokens=False).ids[-1]
    N_SHARED = len(tokenizer.encode(prompts.SHARED, add_special_tokens=False).ids)
    LENGTH = length


def main():
    args = argparse.ArgumentParser()
    args.add_argument("model")
    args.add_argument("log")
    args.add_argument("out", type=pathlib.Path)
    args.add_argument("--length", type=int, default=288)
    args.add_argument("--least", type=int, default=20, help="drop stories with a word that fewer stories use")
    a = args.parse_args()
    began = time.perf_counter()
    setup(a.model, a.length)
    log = np.load(a.log)
    with multiprocessing.get_context("fork").Pool() as pool:
        parts = pool.map(stories_of, np.array_split(log, min(len(log), 128)), chunksize=1)
    why = sum((w for _, w in parts), collections.Counter())
    stories = list(dict.fromkeys(s for part, _ in parts for s in part))
    print(dict(why), f"{time.perf_counter() - began:.1f} s", flush=True)
    stories = known_words(stories, a.least)
    np.random.default_rng(0).shuffle(stories)
    words = sum(s.count(" ") + 1 for s in stories)
    print(f"{len(stories)} stories, {words / 1e6:.2f} M words, {time.perf_counter() - began:.1f} s", flush=True)
    n_held = min(len(stories) // 20, 6000)
    a.out.mkdir(parents=True, exist_ok=True)
    parts = {"heldout-stories": stories[:n_held], "stories": stories[n_held:], "chains": chains(stories[n_held:])}
    for name, texts in parts.items():
        (a.out / f"{name}.txt").write_text(END.join(text + "\n" for text in texts))
    summary = dict(dropped=why, stories=len(stories), held_out=n_held, words=words)
    (a.out / "corpus.json").write_text(json.dumps(summary))
    for story in stories[:12]:
        print("-", story)


if __name__ == "__main__":
    main()
