//! A conversation: each turn evaluates only what is new.
//!
//! `cargo run --release -p refrain --example 03_chat -- model.gguf`

use refrain::{Builtin, Chat, ChatOptions, Generate, Model, Session, SessionOptions};
use std::io::Write;

fn main() -> Result<(), refrain::Error> {
    let model = match std::env::args().nth(1) {
        Some(path) => Model::open(path)?,
        None => Builtin::Chat.open()?,
    };
    let session = Session::new(&model, &SessionOptions::default())?;
    let mut chat = Chat::new(session, ChatOptions::default())?;
    for question in ["What is the capital of France?", "And of Italy?"] {
        println!("> {question}");
        let mut reply = chat.send(question, &Generate::default())?;
        for delta in &mut reply {
            print!("{}", delta?.text);
            let _ = std::io::stdout().flush();
        }
        let summary = reply.summary();
        println!("\n({} of {} prompt tokens evaluated)", summary.n_evaluated, summary.n_prompt);
    }
    Ok(())
}
