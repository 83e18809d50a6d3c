//! Measurements of a reply, as a summary and as JSON.

use crate::out::{counted, short_rate, short_time, talk, thousands};
use crate::reply::ShownReply;
use crate::speculate;
use refrain::trial::MethodChoice;
use refrain::{
    Accounting, DType, Finish, ModelFiles, ProcessMemory, QuantizedWeights, Session, Status, StepKind, Tally,
    Upload,
};
use refrain_hub::ByteSize;
use serde_json::{Value, json};
use std::time::Duration;

/// The name of the reason why a reply ended.
pub(crate) fn finish_word(finish: Option<&Finish>) -> &'static str {
    match finish {
        Some(Finish::EndOfTurn) => "end_of_turn",
        Some(Finish::Complete) => "complete",
        Some(Finish::MaxTokens) => "max_tokens",
        Some(Finish::StopText) => "stop_text",
        Some(Finish::ContextFull) => "context_full",
        Some(Finish::Cancelled) => "cancelled",
        None => "unfinished",
    }
}

/// Prints a summary on standard error.
pub(crate) fn print(session: &Session, reply: &ShownReply, load: Duration, seed: u64) {
    let summary = &reply.summary;
    let read = bytes_per_token(session, reply);
    let ledger = session.ledger();
    let decode = ledger.tally(StepKind::Decode);
    let rate = speculate::decode_rate(&ledger);
    talk!("decode   {:>13}   {}{decode}", counted(summary.n_generated, "token"), speed(rate, read));
    if let Some(verify) = speculate::verify_steps(&ledger) {
        talk!("verify   {verify}");
    }
    if let Some(line) = speculate::line(&ledger) {
        talk!("{line}");
    }
    let prefill = summary.prefill.as_secs_f64();
    let rate = if prefill > 0.0 { summary.n_evaluated as f64 / prefill } else { 0.0 };
    let held = match summary.n_prompt - summary.n_evaluated {
        0 => String::new(),
        n => format!(", {} more from the cache", thousands(n)),
    };
    let evaluated = counted(summary.n_evaluated, "token");
    talk!("prefill  {evaluated:>13}   {} tok/s  ({}{held})", short_rate(rate), short_time(prefill));
    let status = session.device_status();
    if let Some(status) = &status {
        print_device(status);
    }
    if let Some(line) = bits_line(false, status.as_ref()) {
        talk!("{line}");
    }
    if let Some(choice) = session.graph_choice() {
        talk!("method   {}: {}", choice.method, choice.because);
    }
    let resident = ProcessMemory::of_this_process().map_or_else(String::new, |r| {
        format!(", {} resident now, {} at most", ByteSize(r.now), ByteSize(r.most))
    });
    let weights = ByteSize(session.model().weight_bytes() as u64);
    talk!("memory   {weights} of weights{resident}");
    let why = match summary.finish {
        Some(Finish::EndOfTurn) => "at the end of the turn",
        Some(Finish::Complete) => "where the grammar is complete",
        Some(Finish::MaxTokens) => "at the limit of -n",
        Some(Finish::StopText) => "at a stop text",
        Some(Finish::ContextFull) => "with a full context",
        Some(Finish::Cancelled) => "by Ctrl-C",
        None => "early",
    };
    talk!("run      ended {why}; seed {seed}, opened in {}", short_time(load.as_secs_f64()));
}

/// Graphs and memory of a CUDA device.
fn print_device(status: &Status) {
    print_graphs(status);
    if let Some(products) = &status.prompt_products {
        talk!("prompts  multiplied by {products}");
    }
    talk!("device   {}", memory_line(&status.memory));
    talk!("weights  {}", upload_line(&status.upload));
}

/// What --reproducible means on this device.
pub(crate) fn bits_line(is_wanted: bool, status: Option<&Status>) -> Option<String> {
    let because = match status {
        Some(status) if status.reproducible => "every number of rows runs the same kernels",
        None if is_wanted => "on the CPU, results never depend on how work is divided",
        Some(_) | None => return None,
    };
    Some(format!("bits     reproducible: {because}"))
}

/// Prints the graphs in use and how long it took to make them.
pub(crate) fn print_graphs(status: &Status) {
    for graph in &status.graphs {
        let same = if graph.bit_exact { "bit-exact" } else { "within the kernels' tolerance" };
        let (recorded, verified) = (graph.record_time.as_secs_f64(), graph.verify_time.as_secs_f64());
        talk!(
            "graph    step of {}: verified against eager ({same}), {} nodes by {}, recorded in {}, verified in {}",
            crate::out::counted(graph.n_tokens, "token"),
            graph.n_nodes,
            graph.method,
            short_time(recorded),
            short_time(verified)
        );
    }
    let compared = &status.compared;
    if compared.n_steps > 0 {
        let each = compared.took.as_secs_f64() / compared.n_steps as f64;
        talk!(
            "verify   {} compared with eager, {} differed, {} each",
            crate::out::counted(compared.n_steps as usize, "step"),
            compared.n_mismatches,
            short_time(each)
        );
    }
    for told in &status.unfused {
        talk!("unfused  {told}");
    }
}

/// Upload speed of the weights.
pub(crate) fn upload_line(upload: &Upload) -> String {
    let rate = upload.bytes_per_second() / 1e9;
    format!(
        "{} uploaded in {}, {rate:.1} GB/s",
        ByteSize(upload.bytes),
        short_time(upload.took.as_secs_f64())
    )
}

/// How the quantised weights of a folder are stored, and what they become in memory; `None` if there are none.
pub(crate) fn quantized_line(files: &ModelFiles) -> Option<String> {
    let ModelFiles::Hf(folder) = files else { return None };
    let QuantizedWeights { stored_as, n_weights, file_bytes, memory_bytes, dtypes } = folder.quantized()?;
    let (blocks, floats): (Vec<DType>, Vec<DType>) = dtypes.iter().partition(|dtype| dtype.is_quantized());
    let named = |verb: &str, dtypes: &[DType]| {
        let names: Vec<&str> = dtypes.iter().map(|dtype| dtype.name()).collect();
        format!("{verb} {}", names.join(" and "))
    };
    let mut parts = Vec::new();
    if !blocks.is_empty() {
        parts.push(named("loaded as", &blocks));
    }
    if !floats.is_empty() {
        parts.push(named("decoded to", &floats));
    }
    Some(format!(
        "{} in {stored_as}, {}: {} in the files, {} in memory",
        counted(*n_weights, "weight"),
        parts.join(" and "),
        ByteSize(*file_bytes),
        ByteSize(*memory_bytes),
    ))
}

/// Memory of a model on a device.
pub(crate) fn memory_line(memory: &Accounting) -> String {
    let m = memory;
    let [weights, kv, arena, work] =
        [m.weight_bytes, m.kv_bytes, m.arena_bytes, m.workspace_bytes].map(ByteSize);
    let [all, free, device] = [m.total(), m.free_bytes, m.device_bytes].map(ByteSize);
    let shared = match (m.unified, m.host_weight_bytes) {
        (false, _) => String::new(),
        (true, 0) => ", shared with the host, which has no second copy of the weights".to_owned(),
        (true, bytes) => {
            format!(", shared with the host, which keeps {} of the weights as well", ByteSize(bytes))
        }
    };
    let pinned = match m.pinned_bytes {
        0 => String::new(),
        bytes => format!(", and {} of weights in pinned host memory", ByteSize(bytes)),
    };
    format!(
        "{weights} of weights, {kv} of KV, {arena} of arena, {work} of workspace: {all} of {free} free, {device} in all{shared}{pinned}"
    )
}

fn speed(rate: Option<f64>, bytes_per_token: usize) -> String {
    let Some(rate) = rate else { return String::new() };
    let gigabytes = rate * bytes_per_token as f64 / 1e9;
    format!("{} tok/s  ({} each, {gigabytes:.1} GB/s)   ", short_rate(rate), short_time(1.0 / rate))
}

/// Bytes that a step reads, halfway through the reply.
fn bytes_per_token(session: &Session, reply: &ShownReply) -> usize {
    let position = reply.summary.n_prompt + reply.summary.n_generated / 2;
    session.plan(1).map_or(0, |plan| {
        let traffic = plan.traffic();
        traffic.weight_bytes + traffic.kv_bytes(position)
    })
}

/// The reply and its measurements as one object.
pub(crate) fn to_json(session: &Session, reply: &ShownReply, name: &str, load: Duration, seed: u64) -> Value {
    let summary = &reply.summary;
    let ledger = session.ledger();
    let (prefill, decode) = (ledger.tally(StepKind::Prompt), ledger.tally(StepKind::Decode));
    let ms = |d: Duration| d.as_secs_f64() * 1e3;
    json!({
        "model": name,
        "text": reply.shown,
        "tokens": reply.tokens,
        "finish": match &reply.error {
            Some(_) => "error",
            None => finish_word(summary.finish.as_ref()),
        },
        "error": reply.error.as_ref().map(crate::fail::one_line),
        "n_prompt": summary.n_prompt,
        "n_evaluated": summary.n_evaluated,
        "n_generated": summary.n_generated,
        "seed": seed,
        "device": session.backend(),
        "context": session.context(),
        "timings": {
            "load_ms": ms(load),
            "prefill_ms": ms(summary.prefill),
            "decode_ms": ms(summary.decode),
            "decode_tokens_per_second": speculate::decode_rate(&ledger),
        },
        "ledger": {
            "prefill": tally_json(prefill),
            "decode": tally_json(decode),
            "verify": tally_json(ledger.tally(StepKind::Verify)),
        },
        "speculation": speculate::tally_json(ledger.speculation()),
        "graph_method": session.graph_choice().map(choice_json),
    })
}

/// The recording method and the reason for it.
fn choice_json(choice: &MethodChoice) -> Value {
    json!({
        "method": choice.method.to_string(),
        "because": choice.because,
        "remembered": choice.remembered,
    })
}

pub(crate) fn tally_json(tally: &Tally) -> Value {
    let reasons: serde_json::Map<_, _> =
        tally.reasons().map(|(label, n, _)| (label.to_owned(), json!(n))).collect();
    json!({
        "steps": tally.steps(),
        "replayed": tally.replayed,
        "launches": tally.launches,
        "repeated": tally.repeated,
        "not_repeated": tally.not_repeated.as_ref().map(ToString::to_string),
        "host_steps": tally.host_steps,
        "eager": tally.eager,
        "failed": tally.failed,
        "unused": tally.discarded,
        "reasons": reasons,
    })
}
