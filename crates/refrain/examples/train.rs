//! Training: a whole run with the trainer, then single steps in your own loop.
//!
//! `cargo run --release -p refrain --example train`

use refrain::train::{
    AdamSettings, BatchRows, ConfigOverlay, StepLearner, TrainConfig, TrainEvent, TrainOptions, TrainSpec,
    Training,
};
use refrain::{DType, Device, Generate, Model, Prompt, Session, SessionOptions};
use std::path::Path;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::temp_dir().join(format!("refrain-train-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let trained = whole_run(&folder).and_then(|()| own_loop());
    std::fs::remove_dir_all(&folder)?;
    trained
}

/// The trainer: a configuration goes in; checkpoints, a log, a report and a model come out.
fn whole_run(folder: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let rhyme = "one for sorrow, two for joy, three for a girl, four for a boy.\n";
    let (text, out) = (folder.join("rhyme.txt"), folder.join("run"));
    std::fs::write(&text, rhyme.repeat(40))?;
    let config = ConfigOverlay::from_toml(&format!(
        "new = {{ arch = 'llama', n_layers = 2, hidden = 64, ffn = 128, n_heads = 4 }}
         tokenizer = {{ train = {{ vocab_size = 320 }} }}
         data = {text:?}
         out = {out:?}
         context = 32
         batch = 4
         steps = 40
         lr = 1e-2
         warmup = 5"
    ))?;
    let config = TrainConfig::default().overlay(config);
    let training = Training::prepare(config, TrainOptions::default(), &mut |_| {})?;
    println!("{} parameters, {}", training.model().n_parameters(), training.data_report());
    let finished = training.run(&|| false, &mut |event| match event {
        TrainEvent::Step { record, .. } if record.step % 10 == 0 => {
            println!("step {:>3}  loss {:.3}", record.step, record.loss);
        }
        _ => {}
    })?;
    println!(
        "loss {:.3} after {} steps",
        finished.summary.progress.loss.unwrap_or(f64::NAN),
        finished.summary.step
    );

    let model = Model::open(out.join("model.gguf"))?;
    let mut session = Session::new(&model, &SessionOptions::default())?;
    let options = Generate { max_tokens: Some(16), ..Generate::default() };
    for delta in session.generate(Prompt::Text("one for"), &options)? {
        print!("{}", delta?.text);
    }
    println!();
    Ok(())
}

/// The step API: the caller makes the batches and looks at every step.
fn own_loop() -> Result<(), Box<dyn std::error::Error>> {
    // Two rows of 16 tokens that count upwards: what follows a token is the next one.
    let (n_rows, context) = (2, 16);
    let n = n_rows * context;
    let tokens: Vec<i32> = (0..n as i32).collect();
    let targets: Vec<i32> = (1..=n as i32).collect();
    let positions: Vec<i32> = (0..n).map(|i| (i % context) as i32).collect();
    let spans: Vec<[i32; 2]> =
        (0..n).map(|i| (i / context * context) as i32).map(|first| [first, first + context as i32]).collect();
    let rows = BatchRows { tokens: &tokens, targets: &targets, positions: &positions, spans: &spans };

    let shape: refrain::train::NewModel = refrain::train::NewModel::Shape(refrain::train::ModelShape {
        arch: "qwen3".into(),
        n_layers: 2,
        hidden: 32,
        ffn: 64,
        n_heads: 2,
        n_kv_heads: None,
        head_dim: None,
        n_vocab: None,
        tied_embeddings: None,
        rope_theta: None,
        norm_eps: None,
    });
    let model = Arc::new(refrain::train::TrainedModel::fresh(shape.model_config(64, context)?, 0)?);
    let spec = TrainSpec {
        n_tokens: n,
        n_context: n,
        dtype: DType::F32,
        masters: true,
        accumulates: false,
        dropout: 0.0,
        recompute: false,
    };
    let mut learner = StepLearner::new(model, &Device::default(), spec, 1)?;
    for step in 0..20 {
        let lr = 1e-2 * (1.0 - f64::from(step) / 20.0);
        let adam = AdamSettings { lr, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, clip: Some(1.0) };
        let outcome = learner.step(&[rows], &adam, [0, 0, step as u32, 0])?;
        if step % 5 == 0 {
            println!("own step {step:>2}  loss {:.3}  gradient norm {:.2}", outcome.loss, outcome.grad_norm);
        }
    }
    let (loss, n_targets) = learner.evaluate(&rows)?;
    println!("mean loss afterwards: {:.3}", loss / n_targets as f64);
    Ok(())
}
