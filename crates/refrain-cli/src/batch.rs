//! `refrain batch`: answers many prompts from a file, in order, into another file.

mod line;
pub(crate) mod answers; // the file that holds the answers

use crate::bars::Delayed;
use crate::cli::CliContext;
use crate::fail::{self, Hinted, Interrupted};
use crate::grammar::GrammarOpts;
use crate::opts::{DeviceOpts, LineLora, SamplingOpts};
use crate::out::{counted, short_rate, short_time, talk, thousands};
use crate::resolve;
use crate::speculate::{self, SpeculateOpts};
use answers::{AnswerFile, lines};
use line::{BatchAnswer, BatchAsk, BatchLine};
use refrain::{
    EngineError, Generate, Grammar, GrammarSource, Model, NamedLora, Prompt, Reply, SamplingParams, Service,
    ServiceOptions, SessionOptions,
};
use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// A raw text has no end of turn.
const RAW_MAX_TOKENS: usize = 256;
/// Requests submitted per sequence that can run. Answers that wait to be written occupy no row.
const SUBMITTED_PER_ROW: usize = 4;

/// Answer many prompts from a file, many at once
///
/// Each line of IN is a JSON object: OpenAI's batch format (custom_id, url, body), or a plain line with a prompt or
/// messages and optionally max_tokens, temperature, top_p, top_k, min_p, seed, stop, frequency_penalty,
/// presence_penalty, repeat_penalty, logit_bias, response_format (as in OpenAI's API), adapter (see --lora; or its name as model) and id. OUT gets one line per line of IN, in the same order: text, finish
/// and token counts, or an error. A line that cannot be answered does not stop the others. If OUT exists, the command
/// continues after its last line. Blank lines are skipped.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain batch stories prompts.jsonl -o stories.jsonl
  refrain batch smollm2 questions.jsonl -o answers.jsonl --seqs 64 --temp 0
  refrain batch ./model.gguf openai-batch.jsonl -o results.jsonl -n 200 --overwrite
  echo '{\"prompt\": \"A cat\", \"max_tokens\": 20, \"seed\": 1}' > in.jsonl && refrain batch stories in.jsonl -o out.jsonl")]
pub(crate) struct Args {
    /// A path, a short name such as smollm2, or owner/repo[:QUANT]
    #[arg(value_name = "MODEL")]
    model: String,
    /// The prompts, one JSON object per line
    #[arg(value_name = "IN.jsonl")]
    input: PathBuf,
    /// File for the answers
    #[arg(short, long, value_name = "OUT.jsonl")]
    output: PathBuf,
    /// Start over if OUT exists
    #[arg(long)]
    overwrite: bool,
    /// Continue plain prompts without the chat template
    #[arg(long)]
    raw: bool,
    /// Maximum number of sequences that run at once
    #[arg(long, value_name = "N", default_value = "32")]
    seqs: NonZeroUsize,
    /// Context size in tokens, prompt and answer of a line together [default: the smaller of 4096 and the model's
    /// limit]
    #[arg(short, long, value_name = "N")]
    context: Option<usize>,
    /// Tokens in the KV cache for all running sequences [default: --seqs times -c, at most 32768]
    #[arg(long, value_name = "N")]
    kv_tokens: Option<usize>,
    /// Load an adapter that lines choose by "adapter": NAME; may be repeated. Without a name, apply the adapter to every
    /// line; =SCALE multiplies its contribution
    #[arg(long, value_name = "NAME=DIR | DIR[=SCALE]")]
    lora: Vec<LineLora>,
    #[command(flatten)]
    sampling: SamplingOpts,
    #[command(flatten)]
    speculate: SpeculateOpts,
    #[command(flatten)]
    grammar: GrammarOpts,
    #[command(flatten)]
    device: DeviceOpts,
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    args.device.session(args.context, context)?;
    args.speculate.check(args.device.verify.is_some())?;
    resolve::check(&args.model, context)?;
    let source = args.grammar.source()?;
    let n_lines = lines(&args.input)?.count() as u64;
    if n_lines == 0 {
        let message = format!("{} has no lines", args.input.display());
        return Err(
            Hinted::new(message, "write one JSON object per line, such as {\"prompt\": \"A cat\"}").into()
        );
    }
    let mut out = AnswerFile::open(&args.input, &args.output, args.overwrite)?;
    if out.n_done > 0 && !context.quiet {
        talk!("continuing after {} of {}", counted(out.n_done, "line"), args.output.display());
    }
    if out.n_done as u64 == n_lines {
        return Ok(());
    }
    let model = with_adapters(resolve::find(Some(&args.model), context)?.open()?, &args.lora)?;
    let speculation = args.speculate.options(context)?;
    let mut grammars = Grammars::default();
    if let Some(source) = &source {
        // Refused here, not on every line.
        grammars.compile(&model, source)?;
    }
    let service = args.device.start_with(args.context, context, |session| {
        let (max_seqs, kv_tokens) = (args.seqs.get(), args.kv_tokens);
        let max_requests = SUBMITTED_PER_ROW * max_seqs;
        let session = SessionOptions { speculation: speculation.clone(), ..session.clone() };
        Service::new(&model, &ServiceOptions { session, max_seqs, max_requests, kv_tokens })
    })?;
    if !context.quiet {
        let (name, backend, holds) = (model.name(), service.backend(), thousands(service.context()));
        talk!("{name} on {backend}, {} at once, context {holds}", counted(args.seqs.get(), "sequence"));
    }
    let listening = context.interrupt.listen();
    let seed = args.sampling.params(&model).seed;
    let mut work = BatchRun { args, service, source, grammars, seed, cancel: listening.flag() };
    let (began, bar) = (Instant::now(), Delayed::bar(n_lines, "answering"));
    let tally = work.answer_all(&mut out, began, &bar)?;
    drop(bar);
    if work.is_cancelled() {
        if !context.quiet {
            let (done, all) = (thousands(out.n_done), thousands(n_lines as usize));
            talk!("{done} of {all} lines are answered; run the same command again to continue");
        }
        return Err(Interrupted.into());
    }
    if !context.quiet {
        let seconds = began.elapsed().as_secs_f64();
        let rate = short_rate(tally.n_tokens as f64 / seconds.max(f64::MIN_POSITIVE));
        let failed = match tally.n_failed {
            0 => String::new(),
            n => format!(", {} with an error", counted(n, "line")),
        };
        let (answered, took) = (counted(tally.n_answered, "line"), short_time(seconds));
        talk!("{answered} answered{failed}, {}, {rate} tok/s, {took}", counted(tally.n_tokens, "token"));
        if let Some(line) = speculate::line(&work.service.ledger()?) {
            talk!("{line}");
        }
    }
    Ok(())
}

/// The model with the adapters of the flags: one for every line, or several that lines choose from.
fn with_adapters(model: Model, flags: &[LineLora]) -> anyhow::Result<Model> {
    if let [LineLora::Every(lora)] = flags {
        return Ok(model.with_lora(&lora.folder, lora.scale)?);
    }
    if flags.is_empty() {
        return Ok(model);
    }
    let named = flags.iter().map(|flag| match flag {
        LineLora::Named { name, folder } => {
            Ok(NamedLora { name: name.clone(), folder: folder.clone(), scale: 1.0 })
        }
        LineLora::Every(lora) => {
            let message =
                format!("--lora {} has no name, and there is another --lora", lora.folder.display());
            Err(Hinted::new(message, "give each adapter a name: --lora NAME=DIR"))
        }
    });
    Ok(model.with_loras(&named.collect::<Result<Vec<_>, _>>()?)?)
}

#[derive(Default)]
struct BatchTally {
    n_answered: usize,
    n_failed: usize,
    n_tokens: usize,
}

struct BatchRun<'a> {
    args: &'a Args,
    service: Service,
    /// What the flags demand of lines without a format of their own.
    source: Option<GrammarSource>,
    grammars: Grammars,
    /// Seed of the first line; it increases by one per line.
    seed: u64,
    cancel: Arc<AtomicBool>,
}

/// Compiled grammars. Many lines have the same.
#[derive(Default)]
struct Grammars {
    /// The most recently used last.
    known: Vec<Grammar>,
}

impl Grammars {
    const MAX: usize = 32;

    fn compile(&mut self, model: &Model, source: &GrammarSource) -> Result<Grammar, refrain::Error> {
        let grammar = match self.known.iter().position(|grammar| grammar.source() == source) {
            Some(idx) => self.known.remove(idx),
            None => model.grammar(source)?,
        };
        if self.known.len() == Grammars::MAX {
            self.known.remove(0);
        }
        self.known.push(grammar.clone());
        Ok(grammar)
    }
}

/// A submitted line, or the reason why it was not submitted.
struct PendingLine {
    line: BatchLine,
    reply: Result<Reply, String>,
}

impl BatchRun<'_> {
    fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }

    fn answer_all(
        &mut self,
        out: &mut AnswerFile,
        began: Instant,
        bar: &Delayed,
    ) -> anyhow::Result<BatchTally> {
        let most = SUBMITTED_PER_ROW * self.args.seqs.get();
        let mut asked = lines(&self.args.input)?.enumerate().skip(out.n_done);
        let (mut pending, mut tally) = (VecDeque::new(), BatchTally::default());
        loop {
            while pending.len() < most && !self.is_cancelled() {
                let Some((idx, asked)) = asked.next() else { break };
                let (number, bytes) = asked.map_err(|error| Hinted::io("read", &self.args.input, error))?;
                pending.push_back(self.submit(idx, BatchLine::read(number, &bytes))?);
            }
            let Some(PendingLine { line, reply }) = pending.pop_front() else { return Ok(tally) };
            let answered = match reply.map(Reply::text) {
                Ok(Ok((_, summary))) if summary.finish == Some(refrain::Finish::Cancelled) => {
                    return Ok(tally);
                }
                Ok(Ok((text, summary))) => Ok(BatchAnswer { text, summary }),
                Ok(Err(error)) => Err(keeps_going(error)?),
                Err(error) => Err(error),
            };
            match &answered {
                Ok(answer) => tally.n_tokens += answer.summary.n_generated,
                Err(_) => tally.n_failed += 1,
            }
            tally.n_answered += 1;
            out.write(&line.answer(self.service.model().name(), answered))?;
            bar.set(out.n_done as u64);
            let rate = tally.n_tokens as f64 / began.elapsed().as_secs_f64().max(f64::MIN_POSITIVE);
            bar.say(format!("{} tok/s", short_rate(rate)));
        }
    }

    fn submit(&mut self, idx: usize, line: BatchLine) -> anyhow::Result<PendingLine> {
        let reply = match &line.ask {
            Ok(ask) => match self
                .prepare(idx, ask)
                .and_then(|(tokens, options)| self.service.submit(Prompt::Tokens(&tokens), &options))
            {
                Ok(reply) => Ok(reply),
                Err(error) => Err(keeps_going(error)?),
            },
            Err(error) => Err(error.clone()),
        };
        Ok(PendingLine { line, reply })
    }

    /// The prompt tokens of a line and its options.
    fn prepare(&mut self, idx: usize, ask: &BatchAsk) -> Result<(Vec<u32>, Generate), refrain::Error> {
        let model = self.service.model();
        let source = ask.source.as_ref().or(self.source.as_ref());
        let is_chat = !self.args.raw && model.chat_template().is_some();
        let (tokens, is_raw) = match ask {
            BatchAsk { tokens: Some(tokens), .. } => (tokens.clone(), true),
            BatchAsk { text: Some(text), is_plain, .. } if !(is_chat && *is_plain) => {
                (model.text_tokens(text)?, true)
            }
            ask => (chat_tokens(model, &ask.turns(), source.is_none())?, false),
        };
        let usual =
            SamplingParams { seed: self.seed.wrapping_add(idx as u64), ..self.args.sampling.params(model) };
        let mut options =
            self.args.sampling.generate(ask.sampling.over(usual), is_raw.then_some(RAW_MAX_TOKENS));
        options.max_tokens = ask.max_tokens.or(options.max_tokens);
        options.stop.extend(ask.stop.iter().cloned());
        let of_server = ask.model.as_ref().filter(|name| model.adapter_names().contains(*name));
        options.adapter = ask.adapter.as_ref().or(of_server).cloned();
        options.cancel = Some(self.cancel.clone());
        options.grammar = source.map(|source| self.grammars.compile(model, source)).transpose()?;
        Ok((tokens, options))
    }
}

/// Text that follows a grammar has no room for thinking.
fn chat_tokens(
    model: &Model,
    messages: &[refrain::Message],
    may_think: bool,
) -> Result<Vec<u32>, refrain::Error> {
    let thinking = if may_think { None } else { Some(false) };
    let options =
        refrain::RenderOptions { add_generation_prompt: true, thinking, ..refrain::RenderOptions::default() };
    Ok(model.tokenizer().encode_chat(&model.render(messages, &options)?)?)
}

/// The text of an error that concerns one line. An error that ends the engine is returned, so that no line gets an answer
/// and the batch can be continued.
fn keeps_going(error: refrain::Error) -> anyhow::Result<String> {
    if let refrain::Error::Engine(engine) = &error
        && engine.stops().is_some()
    {
        return Err(error.into());
    }
    let hint = match &error {
        // The names to choose from belong into the answer.
        refrain::Error::Engine(EngineError::NoAdapterNamed { .. }) => error.hint(),
        _ => None,
    };
    let text = fail::one_line(&error.into());
    Ok(hint.map_or(text.clone(), |hint| format!("{text}; {hint}")))
}
