//! `refrain embed`: vectors of texts.

mod line;

use crate::bars::Delayed;
use crate::batch::answers::{AnswerFile, lines};
use crate::cli::CliContext;
use crate::fail::{Hinted, Interrupted};
use crate::opts::{DeviceOpts, LoraOpts};
use crate::out::{Stdout, counted, short_rate, short_time, talk, thousands};
use crate::resolve;
use clap::ValueEnum;
use line::{EmbedLine, EmbedTexts};
use refrain::graph::RunError;
use refrain::{EmbedOptions, Embedder, Embedding, EngineError, Pooling, StepKind};
use serde_json::json;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Lines that are embedded together: enough texts for full steps.
const LINES_AT_ONCE: usize = 256;

/// Turn texts into vectors
///
/// Similar texts have similar vectors: their dot product is near 1. Each TEXT, or each line of IN, is pooled as the model's
/// files recommend and scaled to length 1. Prints one JSON array per text. Texts longer than the model takes are cut at
/// their end, and the number of cut texts is reported.
///
/// Each line of IN is a JSON object: OpenAI's batch format (custom_id, url /v1/embeddings, body with an input), or a plain
/// line with a text and optionally an id. OUT gets one line per line of IN, in the same order: the embedding and the
/// number of tokens, or an error. If OUT exists, the command continues after its last line.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain embed ./all-MiniLM-L6-v2 \"A cat sleeps.\" \"A kitten naps.\"
  refrain embed ./bge-small.gguf \"What is a refrain?\" --json | jq .embeddings[0].embedding
  refrain embed ./all-MiniLM-L6-v2 -f texts.jsonl -o vectors.jsonl
  refrain embed ./qwen3-embedding -f openai-batch.jsonl -o results.jsonl --pooling last")]
pub(crate) struct Args {
    /// A path, a short name, or owner/repo[:QUANT]
    #[arg(value_name = "MODEL")]
    model: String,
    /// The texts
    #[arg(value_name = "TEXT", required_unless_present = "file", conflicts_with = "file")]
    texts: Vec<String>,
    /// Texts, one JSON object per line
    #[arg(short, long, value_name = "IN.jsonl", requires = "output")]
    file: Option<PathBuf>,
    /// File for the vectors of -f
    #[arg(short, long, value_name = "OUT.jsonl", requires = "file")]
    output: Option<PathBuf>,
    /// Start over if OUT exists
    #[arg(long, requires = "output")]
    overwrite: bool,
    /// How the vector of a text follows from those of its tokens [default: as the model's files recommend]
    #[arg(long, value_name = "POOLING")]
    pooling: Option<PoolingArg>,
    /// Do not scale vectors to length 1
    #[arg(long)]
    no_normalize: bool,
    /// Refuse longer texts instead of cutting them
    #[arg(long)]
    no_cut: bool,
    /// Maximum number of tokens of a text [default: as the model's files recommend]
    #[arg(short, long, value_name = "N")]
    context: Option<usize>,
    /// Print one JSON object
    #[arg(long, conflicts_with = "file")]
    json: bool,
    #[command(flatten)]
    lora: LoraOpts,
    #[command(flatten)]
    device: DeviceOpts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PoolingArg {
    /// The mean over all tokens
    Mean,
    /// The first token
    Cls,
    /// The last token
    Last,
}

impl PoolingArg {
    fn pooling(self) -> Pooling {
        match self {
            PoolingArg::Mean => Pooling::Mean,
            PoolingArg::Cls => Pooling::Cls,
            PoolingArg::Last => Pooling::Last,
        }
    }
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    if args.device.profile.is_some() {
        let hint = "profile a model that generates text, or run without --profile";
        return Err(Hinted::new("embedding steps cannot be profiled yet", hint).into());
    }
    args.device.session(args.context, context)?;
    resolve::check(&args.model, context)?;
    let mut file = match (&args.file, &args.output) {
        (Some(input), Some(output)) => {
            let n_lines = lines(input)?.count() as u64;
            if n_lines == 0 {
                let message = format!("{} has no lines", input.display());
                let hint = "write one JSON object per line, such as {\"text\": \"A cat sleeps.\"}";
                return Err(Hinted::new(message, hint).into());
            }
            let answers = AnswerFile::open(input, output, args.overwrite)?;
            if answers.n_done > 0 && !context.quiet {
                talk!("continuing after {} of {}", counted(answers.n_done, "line"), output.display());
            }
            if answers.n_done as u64 == n_lines {
                return Ok(());
            }
            Some((input, answers, n_lines))
        }
        _ => None,
    };
    let model = args.lora.apply(resolve::find(Some(&args.model), context)?.open()?)?;
    let embedder = args.device.start_with(args.context, context, |session| {
        Embedder::new(
            &model,
            &EmbedOptions {
                session: session.clone(),
                pooling: args.pooling.map(PoolingArg::pooling),
                normalizes: !args.no_normalize,
                cuts: !args.no_cut,
            },
        )
    })?;
    if !context.quiet {
        let (backend, pooling, most) = (embedder.backend(), embedder.pooling(), embedder.max_tokens());
        let name = model.name();
        talk!("{name} on {backend}, {pooling} pooling, texts of up to {} tokens", thousands(most));
    }
    let began = Instant::now();
    let mut tally = EmbedTally::default();
    match &mut file {
        Some((input, answers, n_lines)) => {
            let bar = Delayed::bar(*n_lines, "embedding");
            let listening = context.interrupt.listen();
            let cancel = listening.flag();
            let mut asked = lines(input)?.enumerate().skip(answers.n_done).map(|(_, line)| line);
            loop {
                let part: Vec<_> = asked
                    .by_ref()
                    .take(LINES_AT_ONCE)
                    .collect::<Result<_, _>>()
                    .map_err(|error: std::io::Error| Hinted::io("read", input, error))?;
                if part.is_empty() || cancel.load(Ordering::Relaxed) {
                    break;
                }
                let read = part.iter().map(|(number, bytes)| EmbedLine::read(*number, bytes)).collect();
                embed_lines(&embedder, read, answers, &mut tally)?;
                bar.set(answers.n_done as u64);
            }
            drop(bar);
            if cancel.load(Ordering::Relaxed) {
                if !context.quiet {
                    let (done, all) = (thousands(answers.n_done), thousands(*n_lines as usize));
                    talk!("{done} of {all} lines are embedded; run the same command again to continue");
                }
                return Err(Interrupted.into());
            }
        }
        None => print_texts(args, &embedder, &mut tally)?,
    }
    tally.say(&embedder, began.elapsed().as_secs_f64(), context);
    Ok(())
}

#[derive(Default)]
struct EmbedTally {
    n_texts: usize,
    n_failed: usize,
    n_tokens: usize,
    n_cut: usize,
}

impl EmbedTally {
    fn add(&mut self, texts: &[Embedding]) {
        self.n_texts += texts.len();
        self.n_tokens += texts.iter().map(|text| text.n_tokens).sum::<usize>();
        self.n_cut += texts.iter().filter(|text| text.n_cut > 0).count();
    }

    fn say(&self, embedder: &Embedder, seconds: f64, context: &CliContext) {
        // What was left out is said even with --quiet: the vectors do not show it.
        if self.n_cut > 0 {
            let (n_cut, most) = (counted(self.n_cut, "text"), thousands(embedder.max_tokens()));
            talk!(
                "{n_cut} had more than {most} tokens, and only the first {most} count; -c or --no-cut change this"
            );
        }
        if context.quiet {
            return;
        }
        let failed = match self.n_failed {
            0 => String::new(),
            n => format!(", {} with an error", counted(n, "line")),
        };
        let rate = short_rate(self.n_tokens as f64 / seconds.max(f64::MIN_POSITIVE));
        let (texts, tokens) = (counted(self.n_texts, "text"), thousands(self.n_tokens));
        talk!("{texts} embedded{failed}, {tokens} tokens, {rate} tok/s, {}", short_time(seconds));
        if embedder.device_status().is_some() {
            talk!("embed    {}", embedder.ledger().tally(StepKind::Embed));
        }
    }
}

fn print_texts(args: &Args, embedder: &Embedder, tally: &mut EmbedTally) -> anyhow::Result<()> {
    let embedded = embedder.embed(&args.texts)?;
    tally.add(&embedded);
    let mut out = Stdout::new();
    if args.json {
        let of_text = |(text, embedding): (&String, &Embedding)| {
            json!({
                "text": text,
                "embedding": embedding.vector,
                "tokens": embedding.n_tokens,
                "cut_tokens": embedding.n_cut,
            })
        };
        return out.json(&json!({
            "model": embedder.model().name(),
            "pooling": embedder.pooling().name(),
            "normalized": !args.no_normalize,
            "dimensions": embedder.dimensions(),
            "embeddings": args.texts.iter().zip(&embedded).map(of_text).collect::<Vec<_>>(),
        }));
    }
    for embedding in &embedded {
        out.line(json!(embedding.vector))?;
    }
    Ok(())
}

/// Embeds lines together. If a text cannot be embedded, each line is tried alone, so that only its own line fails.
fn embed_lines(
    embedder: &Embedder,
    read: Vec<EmbedLine>,
    answers: &mut AnswerFile,
    tally: &mut EmbedTally,
) -> anyhow::Result<()> {
    let texts: Vec<&str> = read.iter().flat_map(EmbedLine::texts).collect();
    let mut all = embedder.embed(&texts).ok().map(Vec::into_iter);
    for line in read {
        let embedded = match (&line.ask, &mut all) {
            (Err(error), _) => Err(error.clone()),
            (Ok(EmbedTexts::Texts(texts)), Some(all)) => Ok(all.by_ref().take(texts.len()).collect()),
            (Ok(EmbedTexts::Texts(texts)), None) => match embedder.embed(texts) {
                Ok(embedded) => Ok(embedded),
                Err(error) => Err(keeps_going(error)?),
            },
            (Ok(EmbedTexts::Tokens(tokens)), _) => match embedder.embed_tokens(tokens.clone()) {
                Ok(vectors) => {
                    let of_text = |(vector, text): (Vec<f32>, &Vec<u32>)| Embedding {
                        vector,
                        n_tokens: text.len(),
                        n_cut: 0,
                    };
                    Ok(vectors.into_iter().zip(tokens).map(of_text).collect())
                }
                Err(error) => Err(keeps_going(error)?),
            },
        };
        match &embedded {
            Ok(embedded) => tally.add(embedded),
            Err(_) => tally.n_failed += 1,
        }
        answers.write(&line.answer(embedder.model().name(), embedded))?;
    }
    Ok(())
}

/// The text of an error that concerns one line. An error that ends the embedder is returned, so that no line gets an
/// answer and the command can be continued.
fn keeps_going(error: refrain::Error) -> anyhow::Result<String> {
    let ends = matches!(
        error,
        refrain::Error::Engine(EngineError::Stopped(_) | EngineError::Run(RunError::ContextLost { .. }))
    );
    if ends {
        return Err(error.into());
    }
    Ok(format!("{:#}", anyhow::Error::from(error)))
}
