//! A conversation: what is already in the cache is not evaluated again.
//!
//! `cargo run --release -p refrain --example 03_chat -- model.gguf`

use refrain::{Generate, Message, Model, Prompt, RenderOptions, Session, SessionOptions};
use std::io::Write;

fn main() -> Result<(), refrain::Error> {
    let Some(path) = std::env::args().nth(1) else {
        eprintln!("usage: 03_chat MODEL");
        return Ok(());
    };
    let model = Model::open(path)?;
    let mut session = Session::new(&model, &SessionOptions::default())?;
    let render = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let mut messages = Vec::new();
    for question in ["What is the capital of France?", "And of Italy?"] {
        println!("> {question}");
        messages.push(Message::new("user", question));
        let mut reply = String::new();
        let mut generation = session.generate(Prompt::Chat(&messages, &render), &Generate::default())?;
        for piece in &mut generation {
            let piece = piece?;
            print!("{}", piece.text);
            let _ = std::io::stdout().flush();
            reply += &piece.text;
        }
        let summary = generation.summary();
        println!("\n({} of {} prompt tokens evaluated)", summary.n_evaluated, summary.n_prompt);
        messages.push(Message::new("assistant", reply));
    }
    Ok(())
}
