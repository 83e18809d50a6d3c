//! Two conversations with one model, from two threads: the weights are loaded once.
//!
//! `cargo run --release -p refrain --example 05_two_sessions`

use refrain::{Generate, Model, Prompt, Session, SessionOptions};

fn main() -> Result<(), refrain::Error> {
    let model = Model::builtin()?;
    let options = SessionOptions { context: Some(256), ..SessionOptions::default() };
    let prompts = ["Once upon a time, a cat", "One day, a little boat"];
    let stories = std::thread::scope(|scope| {
        let story = |prompt| {
            // The first session loads the weights; the second one shares them and adds its own KV cache.
            let mut session = Session::new(&model, &options)?;
            let generate = Generate { max_tokens: Some(80), ..Generate::default() };
            let deltas = session.generate(Prompt::Text(prompt), &generate)?;
            let text: String = deltas.map(|delta| Ok(delta?.text)).collect::<Result<_, refrain::Error>>()?;
            Ok::<_, refrain::Error>(format!("{prompt}{text}"))
        };
        let threads = prompts.map(|prompt| scope.spawn(move || story(prompt)));
        threads.map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    for story in stories {
        println!("{}\n", story?);
    }
    Ok(())
}
