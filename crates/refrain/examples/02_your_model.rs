//! Greedy generation with a model of your own, and the ledger of its steps.
//!
//! `cargo run --release -p refrain --example 02_your_model -- model.gguf "The capital of France is"`

use refrain::{Generate, Model, Prompt, SamplingParams, Session, SessionOptions, StepKind};

fn main() -> Result<(), refrain::Error> {
    let mut args = std::env::args().skip(1);
    let (Some(path), Some(prompt)) = (args.next(), args.next()) else {
        eprintln!("usage: 02_your_model MODEL PROMPT");
        return Ok(());
    };
    let model = Model::open(path)?;
    let mut session = Session::new(&model, &SessionOptions::default())?;
    let options =
        Generate { sampling: Some(SamplingParams::greedy()), max_tokens: Some(48), ..Generate::default() };
    let mut text = String::new();
    for delta in session.generate(Prompt::Text(&prompt), &options)? {
        text += &delta?.text;
    }
    println!("{text}");
    let ledger = session.ledger();
    for kind in [StepKind::Prompt, StepKind::Decode] {
        let tally = ledger.tally(kind);
        println!("{kind:?}: {tally}, {:.1} tokens/s", tally.tokens_per_second().unwrap_or(0.0));
    }
    Ok(())
}
