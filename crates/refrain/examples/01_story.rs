//! The smallest program: the built-in model continues a story.
//!
//! `cargo run --release -p refrain --example 01_story`

use refrain::{Generate, Model, Prompt, Session, SessionOptions};
use std::io::Write;

fn main() -> Result<(), refrain::Error> {
    let model = Model::builtin()?;
    let mut session = Session::new(&model, &SessionOptions::default())?;
    let options = Generate { max_tokens: Some(200), ..Generate::default() };
    let prompt = "Once upon a time";
    print!("{prompt}");
    for delta in session.generate(Prompt::Text(prompt), &options)? {
        print!("{}", delta?.text);
        let _ = std::io::stdout().flush();
    }
    println!();
    Ok(())
}
