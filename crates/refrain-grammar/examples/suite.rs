//! Counts what passes of the official JSON Schema test suite (MIT licence):
//!
//! ```sh
//! git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
//! cargo run --release -p refrain-grammar --example suite -- JSON-Schema-Test-Suite/tests/draft2020-12
//! ```
//!
//! A schema is compiled or refused. Where it is compiled, valid values must be accepted and invalid ones not, as compact JSON
//! text. A grammar demands more than a schema: keys in the order of the schema, and numbers without superfluous digits.
//! So a valid value may be refused; an invalid value that is accepted is a fault.

use refrain_grammar::{Grammar, GrammarSource, Vocabulary};
use serde_json::Value;
use std::path::PathBuf;

#[derive(Default)]
struct Counts {
    refused: usize,
    compiled: usize,
    valid: usize,
    accepted: usize,
    invalid: usize,
    faults: usize,
}

fn accepts(grammar: &Grammar, text: &str) -> bool {
    let mut matcher = grammar.matcher();
    text.bytes().all(|byte| matcher.accept(u32::from(byte)).is_ok()) && matcher.may_end().unwrap_or(false)
}

fn main() {
    let folder: PathBuf = std::env::args().nth(1).expect("usage: suite FOLDER").into();
    let words: Vec<Vec<u8>> = (0..=254).map(|byte| vec![byte]).collect();
    let vocabulary = Vocabulary::of_words(&words).expect("a vocabulary of bytes");
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    let mut all = Counts::default();
    println!("{:24} {:>8} {:>8} {:>14} {:>14}", "file", "compiled", "refused", "valid", "invalid");
    for path in files {
        let text = std::fs::read_to_string(&path).expect("a file");
        let groups: Vec<Value> = serde_json::from_str(&text).expect("JSON");
        let mut counts = Counts::default();
        for group in &groups {
            let source = GrammarSource::JsonSchema(group["schema"].to_string());
            let Ok(grammar) = vocabulary.compile(&source) else {
                counts.refused += 1;
                continue;
            };
            counts.compiled += 1;
            for test in group["tests"].as_array().into_iter().flatten() {
                let accepted = accepts(&grammar, &test["data"].to_string());
                match test["valid"] == true {
                    true => {
                        (counts.valid, counts.accepted) =
                            (counts.valid + 1, counts.accepted + usize::from(accepted))
                    }
                    false => {
                        (counts.invalid, counts.faults) =
                            (counts.invalid + 1, counts.faults + usize::from(accepted))
                    }
                }
                if accepted != (test["valid"] == true) {
                    println!(
                        "    {} {}: {} / {}",
                        if accepted { "FAULT" } else { "not accepted" },
                        path.display(),
                        group["description"],
                        test["description"]
                    );
                }
            }
        }
        print(&path.file_stem().unwrap_or_default().to_string_lossy(), &counts);
        for (sum, n) in [
            (&mut all.refused, counts.refused),
            (&mut all.compiled, counts.compiled),
            (&mut all.valid, counts.valid),
            (&mut all.accepted, counts.accepted),
            (&mut all.invalid, counts.invalid),
            (&mut all.faults, counts.faults),
        ] {
            *sum += n;
        }
    }
    print("all", &all);
}

fn print(name: &str, counts: &Counts) {
    let Counts { refused, compiled, valid, accepted, invalid, faults } = counts;
    let rejected = invalid - faults;
    println!(
        "{name:24} {compiled:>8} {refused:>8} {:>14} {:>14}",
        format!("{accepted} of {valid}"),
        format!("{rejected} of {invalid}")
    );
}
