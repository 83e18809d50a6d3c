//! Texts of any length: chunks have the tokens of the whole text.

mod tokenizer_common;

use proptest::prelude::*;
use refrain_formats::tokenizer::long::{
    ChunkEnd, CutSizes, Cutter, TextChunk, encode_all, floor_boundary, in_parallel,
};
use refrain_formats::tokenizer::{Tokenizer, VocabSpec};
use std::sync::LazyLock;
use tokenizer_common::{byte_level, merged_pieces, sentence_piece};

const END: &str = "<|im_end|>";
const SIZES: CutSizes = CutSizes { chunk: 64, window: 24 };

/// Chunks of a text that arrives in parts of at least `part_bytes`.
fn split(mut cutter: Cutter<'_>, text: &str, part_bytes: usize) -> Vec<TextChunk> {
    let (mut chunks, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let end = (part_bytes..=rest.len()).find(|&at| rest.is_char_boundary(at)).unwrap_or(rest.len());
        cutter.buffer().push_str(&rest[..end]);
        rest = &rest[end..];
        cutter.chunks(rest.is_empty(), &mut chunks).unwrap();
    }
    chunks
}

/// Tokenizes a text that arrives in parts and is split into small chunks; also returns the number of
/// forced splits.
fn in_chunks(tokenizer: &Tokenizer, text: &str, part_bytes: usize) -> (Vec<u32>, usize, usize) {
    let chunks = split(Cutter::new(tokenizer, SIZES, None, false), text, part_bytes);
    let joined: String = chunks.iter().map(TextChunk::text).collect();
    assert_eq!(joined, text);
    let encoded = encode_all(tokenizer, &chunks, false, 3).unwrap();
    let n_forced = encoded.iter().filter(|tokens| tokens.is_forced).count();
    (encoded.into_iter().flat_map(|tokens| tokens.ids).collect(), n_forced, chunks.len())
}

fn tokenizers() -> &'static [Tokenizer; 4] {
    static ALL: LazyLock<[Tokenizer; 4]> = LazyLock::new(|| {
        let llama = VocabSpec { pre: Some("llama-bpe".to_owned()), ..byte_level() };
        [byte_level(), llama, sentence_piece(), merged_pieces()]
            .map(|spec| Tokenizer::from_spec(&spec).unwrap())
    });
    &ALL
}

#[test]
fn a_chunked_text_has_the_tokens_of_the_whole() {
    let text = "Hello the hell.\n\n  and the  end. \nthe\tan\r\n   x\n\n\n".repeat(40);
    for tokenizer in tokenizers() {
        let whole = tokenizer.encode(&text, false, false).unwrap();
        let (ids, n_forced, n_chunks) = in_chunks(tokenizer, &text, 100);
        assert!(n_chunks > 15);
        assert_eq!(n_forced, 0);
        assert_eq!(ids, whole);
    }
}

#[test]
fn a_text_without_boundaries_is_split_anyway() {
    let mut n_compared = 0;
    for tokenizer in tokenizers() {
        for text in ["€".repeat(500), "aaa".repeat(500), " ".repeat(1000), "\n".repeat(1000)] {
            let (ids, n_forced, n_chunks) = in_chunks(tokenizer, &text, 90);
            assert!(n_chunks > 5 && n_forced == n_chunks - 1, "{n_forced} of {n_chunks}");
            // One of these tokenizers adds a space after some tokens that stand for spaces.
            let is_lossless = |text: &str| {
                tokenizer.decode(&tokenizer.encode(text, false, false).unwrap()).unwrap() == text
            };
            if text.char_indices().take(3).all(|(at, _)| is_lossless(&text[at..])) {
                assert_eq!(tokenizer.decode(&ids).unwrap(), text);
                n_compared += 1;
            }
        }
    }
    assert!(n_compared >= 12, "{n_compared} of 16");
}

#[test]
fn separators_are_found_across_parts() {
    let tokenizer = &tokenizers()[0];
    let text = format!("one{END}{}{END}three", "two words ".repeat(30));
    for part_bytes in [1, 5, 7, 200] {
        let chunks = split(Cutter::new(tokenizer, SIZES, Some(END.to_owned()), false), &text, part_bytes);
        let mut documents = vec![String::new()];
        for chunk in &chunks {
            documents.last_mut().unwrap().push_str(chunk.text());
            if chunk.end == ChunkEnd::Separator {
                documents.push(String::new());
            }
        }
        assert_eq!(documents, ["one", "two words ".repeat(30).as_str(), "three"]);
    }
}

#[test]
fn a_long_text_has_the_tokens_of_the_whole() {
    let text = format!("Hello the hell.\n\n  and the{END}  end. \nthe\tan\r\n <tool>  x\n").repeat(20_000);
    for (idx, tokenizer) in tokenizers().iter().enumerate() {
        let (add_special, parse_special) = (idx % 2 == 0, idx % 2 == 1);
        let mut encoder = tokenizer.encode_long(&text, add_special, parse_special).with_threads(2);
        let parts: Vec<Vec<u32>> = encoder.by_ref().collect::<Result<_, _>>().unwrap();
        assert!(parts.len() > 1, "{} parts", parts.len());
        assert_eq!(encoder.n_forced(), 0);
        assert!(parts.concat() == tokenizer.encode(&text, add_special, parse_special).unwrap());
    }
}

#[test]
fn only_the_first_tokens_are_made_if_no_more_are_wanted() {
    let text = "the end of the hall ".repeat(200_000);
    let tokenizer = &tokenizers()[0];
    let whole = tokenizer.encode(&text[..100_000], true, false).unwrap();
    let first = tokenizer.encode_long(&text, true, false).at_least(1_000).unwrap();
    assert!(first.len() >= 1_000 && first.len() < 2_000_000, "{}", first.len());
    assert_eq!(first[..10_000], whole[..10_000]);
    assert_eq!(
        tokenizer.encode_long("", true, false).at_least(5).unwrap(),
        tokenizer.encode("", true, false).unwrap()
    );
    assert_eq!(floor_boundary("aé", 2), 1);
}

#[test]
fn results_of_threads_are_in_order() {
    let items: Vec<usize> = (0..1000).collect();
    for n_threads in [0, 1, 2, 7, 5000] {
        assert!(in_parallel(&items, n_threads, |i| i * 2).into_iter().eq((0..1000).map(|i| i * 2)));
    }
    assert_eq!(in_parallel(&[0; 0], 4, |i| *i), [0; 0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn any_chunked_text_has_the_tokens_of_the_whole_unless_a_split_was_forced(
        words in prop::collection::vec("( |\n|the|hello|an|\\. |\n\n|aaaa|é|  )", 1..200),
        part_bytes in 1..300usize, which in 0..3usize,
    ) {
        let text = words.concat();
        let tokenizer = &tokenizers()[which];
        let (ids, n_forced, _) = in_chunks(tokenizer, &text, part_bytes);
        if n_forced == 0 {
            prop_assert_eq!(ids, tokenizer.encode(&text, false, false).unwrap());
        } else {
            prop_assert_eq!(tokenizer.decode(&ids).unwrap(), tokenizer.decode(&tokenizer.encode(&text, false, false).unwrap()).unwrap());
        }
    }
}
