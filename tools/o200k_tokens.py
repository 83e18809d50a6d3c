"""Writes tokenizer cases of gpt-oss (o200k), made with OpenAI's `tiktoken`, for the tests of refrain-formats.

    python3 tools/o200k_tokens.py [OUT]    (default: crates/refrain-formats/tests/data/o200k_tokens.json)

Needs tiktoken and tokenizers. The tests cover the pre-tokenizer, which splits text into words, so a small vocabulary trained
here replaces the published one, which tiktoken would download. The pattern is the one that tiktoken itself has for o200k, and
its own engine encodes the texts.
"""

import json
import pathlib
import sys
from unittest import mock

import tiktoken
import tokenizers
from tiktoken_ext import openai_public

TEXTS = [
    "Hello world, it's 2026! We'LL see 12345678 tokens...",
    "  two spaces,\ttabs\t\tand\n\nlines\r\n   \n end  ",
    "for (int i = 0; i < 10; ++i) { x[i] += 3.14e-5; } // done/\n/",
    "camelCase, PascalCase, SCREAMING_CASE, McDonald's HTMLParser's iPhones",
    "हिन्दी में लिखा हुआ पाठ, किताबें और ज़िंदगी",
    "ภาษาไทยเขียนติดกัน ที่นี่",
    "x̂ + y̌ = z̃, a̱b̲c",
    "שָׁלוֹם עולם, مَرْحَبًا بالعالم",
    "中文分词，测试！日本語のテキスト。한국어 문장",
    "🙂👍🏽 emoji ❤️ and €5",
    "Don't DON'T don’t 'tis 'S 'RE they'veto",
    "ǅungla ǅ ʰa Ωmega",
]


def pattern():
    """The pattern of o200k, without its vocabulary."""
    with mock.patch.object(openai_public, "load_tiktoken_bpe", lambda *args, **kwargs: {}):
        return openai_public.o200k_base()["pat_str"]


def main():
    here = pathlib.Path(__file__).resolve().parent.parent
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "crates/refrain-formats/tests/data/o200k_tokens.json"
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern()), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    learner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(TEXTS * 3, trainer)
    model = json.loads(learner.to_str())["model"]
    vocab = model["vocab"]
    # From the printable form of bytes to bytes, as GPT-2 defines it.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    bytes_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    ranks = {bytes(bytes_of[c] for c in token): rank for token, rank in vocab.items()}
    encoding = tiktoken.Encoding("small", pat_str=pattern(), mergeable_ranks=ranks, special_tokens={})
    cases = [dict(text=text, ids=encoding.encode(text)) for text in TEXTS]
    assert all(encoding.decode(case["ids"]) == case["text"] for case in cases)
    content = dict(
        tiktoken=tiktoken.__version__,
        tokens=sorted(vocab, key=vocab.get),
        merges=[" ".join(merge) for merge in model["merges"]],
        cases=cases,
    )
    out.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{len(vocab)} tokens, {len(cases)} texts, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
