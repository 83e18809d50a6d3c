//! A hundred stories at once from one model.
//!
//! ```sh
//! cargo run --release -p refrain --example 06_many_requests
//! ```

use refrain::{Generate, Model, Prompt, SamplingParams, Service, ServiceOptions};
use std::time::Instant;

fn main() -> Result<(), refrain::Error> {
    let service = Service::new(&Model::builtin()?, &ServiceOptions::default())?;
    let began = Instant::now();
    let replies: Vec<_> = (0..100)
        .map(|seed| {
            let sampling = SamplingParams { seed, ..service.model().sampling() };
            let options = Generate { sampling: Some(sampling), max_tokens: Some(60), ..Generate::default() };
            service.submit(Prompt::Text("Once upon a time"), &options)
        })
        .collect::<Result<_, _>>()?;
    let mut n_tokens = 0;
    for (idx, reply) in replies.into_iter().enumerate() {
        let (text, summary) = reply.text()?;
        n_tokens += summary.n_generated;
        if idx % 25 == 0 {
            println!("{idx:>2}: Once upon a time{text}\n");
        }
    }
    let took = began.elapsed().as_secs_f64();
    println!("{n_tokens} tokens in {took:.2} s, {:.0} tok/s", n_tokens as f64 / took);
    Ok(())
}
