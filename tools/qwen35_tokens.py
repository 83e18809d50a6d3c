"""Writes tokenizer cases of Qwen 3.5, made with `transformers`, for the tests of refrain-formats.

    python3 tools/qwen35_tokens.py [OUT]    (default: crates/refrain-formats/tests/data/qwen35_tokens.json)

Needs transformers. The tests cover the pre-tokenizer, which splits text into words, so a small vocabulary trained here over
such words replaces the large published one; `Qwen3_5Tokenizer` encodes the texts with it. All texts are in NFC: the class
normalises to it, but GGUF files do not record that and llama.cpp does not do it.
"""

import json
import pathlib
import sys
import unicodedata

import tokenizers
import transformers

TEXTS = [
    "Hello world, it's 2026! We'LL see 12345 tokens...",
    "  two spaces,\ttabs\t\tand\n\nlines\r\n   \n end  ",
    "for (int i = 0; i < 10; ++i) { x[i] += 3.14e-5; }",
    # Combining marks: with Qwen 2's pattern they end a word.
    "हिन्दी में लिखा हुआ पाठ, किताबें और ज़िंदगी",
    "ภาษาไทยเขียนติดกัน ที่นี่",
    "x̂ + y̌ = z̃, a̱b̲c",
    "שָׁלוֹם עולם, مَرْحَبًا بالعالم",
    "中文分词，测试！日本語のテキスト。한국어 문장",
    "🙂👍🏽 emoji ❤️ and €5",
    "Don't won’t 'tis 'S 'RE",
    "مرحبا\u0301 \u0301 starts with a mark",
]


def main():
    here = pathlib.Path(__file__).resolve().parent.parent
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "crates/refrain-formats/tests/data/qwen35_tokens.json"
    texts = [unicodedata.normalize("NFC", text) for text in TEXTS]
    learner = transformers.Qwen3_5Tokenizer()._tokenizer
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    learner.train_from_iterator(texts * 3, trainer)
    model = json.loads(learner.to_str())["model"]
    vocab, merges = model["vocab"], [tuple(merge) for merge in model["merges"]]
    tokenizer = transformers.Qwen3_5Tokenizer(vocab=vocab | {"<|endoftext|>": len(vocab)}, merges=merges)
    plain = sorted(vocab, key=vocab.get)
    cases = [dict(text=text, ids=tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    for case in cases:
        assert max(case["ids"]) < len(plain) and tokenizer.decode(case["ids"]) == case["text"], case
    content = dict(
        transformers=transformers.__version__,
        tokens=plain,
        merges=[" ".join(merge) for merge in merges],
        cases=cases,
    )
    out.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{len(plain)} tokens, {len(merges)} merges, {len(cases)} texts, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
