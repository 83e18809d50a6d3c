//! What grammars cost with a model's vocabulary: `cargo run --release -p refrain-grammar --example cost -- MODEL.gguf [N]`.
//!
//! With `N`, only the first N tokens are used, to see the cost of a smaller vocabulary. Texts are random: every token that may
//! come next is equally probable, which is harder for the parser than what a model writes.

use refrain_formats::ModelFiles;
use refrain_formats::tokenizer::{TokenKind, Tokenizer};
use refrain_grammar::{GrammarSource, Vocabulary};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SCHEMA: &str = include_str!("realistic.json");

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().expect("usage: cost MODEL.gguf [N]");
    let n = args.next().map(|n| n.parse::<usize>().expect("a number of tokens"));
    let ModelFiles::Gguf(files) = ModelFiles::open(path).expect("a model") else {
        panic!("give a GGUF file")
    };
    let tokenizer = Arc::new(Tokenizer::from_gguf(files.metadata()).expect("a tokenizer"));
    let began = Instant::now();
    let vocabulary = match n {
        None => Vocabulary::of(&tokenizer).expect("a vocabulary"),
        Some(n) => Vocabulary::of_words(&words(&tokenizer, n)).expect("a vocabulary"),
    };
    println!("vocabulary of {} tokens: {:.0?}", vocabulary.n_tokens(), began.elapsed());
    let cases = [
        ("schema", GrammarSource::JsonSchema(SCHEMA.into())),
        ("json object", GrammarSource::JsonObject),
        ("regex", GrammarSource::Regex(r"[A-Z][a-z ,']{10,80}\. (yes|no) [0-9]{1,3}%".into())),
        ("lark", GrammarSource::Lark("start: sum\nsum: (product \"+\")* product\nproduct: (atom \"*\")* atom\natom: NUMBER | \"(\" sum \")\"\nNUMBER: /[0-9]{1,9}/\n".into())),
    ];
    for (name, source) in cases {
        let began = Instant::now();
        let grammar = vocabulary.compile(&source).expect("a grammar");
        let compiled = began.elapsed();
        let began = Instant::now();
        let mut matcher = grammar.matcher();
        let started = began.elapsed();
        let (mut times, mut forced, mut rng) = (Vec::new(), 0, fastrand::Rng::with_seed(1));
        let mut mask = vec![0; vocabulary.mask_words()];
        while times.len() < 2000 {
            if matcher.is_complete() || matcher.n_accepted() > 400 {
                matcher = grammar.matcher();
            }
            let began = Instant::now();
            let next = matcher.forced().expect("forced tokens");
            forced += next.len();
            for token in next {
                matcher.accept(token).expect("a forced token");
            }
            if matcher.is_complete() {
                continue;
            }
            matcher.mask(&[], &mut mask).expect("a mask");
            let n_set: u32 = mask.iter().map(|word| word.count_ones()).sum();
            let spent = began.elapsed();
            if n_set == 0 {
                matcher = grammar.matcher();
                continue;
            }
            let mut at = rng.u32(..n_set);
            let token = (0..vocabulary.n_tokens() as u32)
                .filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1)
                .find(|_| at.checked_sub(1).map(|less| at = less).is_none())
                .expect("an allowed token");
            let began = Instant::now();
            matcher.accept(token).expect("an allowed token");
            times.push(spent + began.elapsed());
        }
        times.sort_unstable();
        let mean: Duration = times.iter().sum::<Duration>() / times.len() as u32;
        let at = |share: f64| times[(times.len() as f64 * share) as usize];
        println!(
            "{name:12} compiled {compiled:.1?}, new text {started:.1?}; per token: mean {mean:.0?}, p50 {:.0?}, p99 {:.0?}, max {:.0?}; {forced} forced",
            at(0.5),
            at(0.99),
            at(0.9999),
        );
    }
}

fn words(tokenizer: &Tokenizer, n: usize) -> Vec<Vec<u8>> {
    let word = |id: u32| match tokenizer.kind(id) {
        Some(TokenKind::Normal | TokenKind::UserDefined | TokenKind::Byte) => {
            tokenizer.piece(id).filter(|bytes| bytes.first() != Some(&0xff)).unwrap_or_default().to_vec()
        }
        _ => Vec::new(),
    };
    (0..n.min(tokenizer.vocab_size()) as u32).map(word).collect()
}
