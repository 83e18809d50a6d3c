//! `refrain bench --load`: many requests of random lengths, on a model of this process or on a server.

mod http; // a server as the target

use super::{Args, find_mix, find_shape};
use crate::bars::Delayed;
use crate::cli::CliContext;
use crate::fail::{Hinted, Interrupted};
use crate::out::{Stdout, counted, short_rate, short_time, talk, thousands};
use crate::{profile, resolve, stats};
use http::ServerLoad;
use refrain::{
    Arrivals, BenchTarget, LoadListener, LoadOptions, LoadReport, LoadTarget, LocalLoad, Samples,
    ServiceOptions, SessionOptions, StepKind, run_load,
};
use refrain_report::{Chart, CurveStyle, PageHeader, Series};
use serde_json::json;
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Token ids of prompts: below those of every vocabulary in use, above most special ones.
const TOKEN_IDS: RangeInclusive<u32> = 100..=1000;

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Load")]
pub(super) struct LoadArgs {
    /// Measure a load: requests of random lengths that arrive at random times
    #[arg(long, conflicts_with_all = ["train", "seqs"])]
    pub(super) load: bool,
    /// Send the load to a server with OpenAI's API instead of a model of this process
    #[arg(long, value_name = "URL", requires = "load", conflicts_with_all = ["model", "shape"])]
    pub(super) url: Option<String>,
    /// Requests per second, or a share of the highest rate, such as 80%, which is measured first
    #[arg(long, value_name = "R|P%", default_value = "80%", requires = "load")]
    rate: Rate,
    /// Clients that send their next request when the last one has ended, instead of --rate
    #[arg(long, value_name = "N", requires = "load", conflicts_with = "rate")]
    clients: Option<NonZeroUsize>,
    /// Number of requests
    #[arg(long, value_name = "N", default_value = "200", requires = "load")]
    requests: NonZeroUsize,
    /// Prompt lengths in tokens, as a number or a range
    #[arg(long, value_name = "MIN-MAX", default_value = "16-256", requires = "load")]
    prompt_range: Lengths,
    /// Reply lengths in tokens, as a number or a range
    #[arg(long, value_name = "MIN-MAX", default_value = "16-128", requires = "load")]
    reply_range: Lengths,
    /// Maximum number of sequences that run at once; with --url, the clients that measure the highest rate
    #[arg(long, value_name = "N", default_value = "32", requires = "load")]
    max_seqs: NonZeroUsize,
    /// Longest time to the first token of a good request, in milliseconds
    #[arg(long, value_name = "MS", default_value = "1000", requires = "load")]
    ttft_limit: u32,
    /// Longest mean time between the tokens of a good request, in milliseconds
    #[arg(long, value_name = "MS", default_value = "100", requires = "load")]
    token_limit: u32,
    /// Seed of lengths and arrivals
    #[arg(long, value_name = "N", default_value = "0", requires = "load")]
    load_seed: u64,
    /// Write a page with the load over time
    #[arg(long, value_name = "FILE", requires = "load")]
    html: Option<PathBuf>,
}

/// Requests per second.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rate {
    PerSecond(f64),
    /// Share of the highest rate.
    Share(f64),
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Rate, String> {
        let positive = |text: &str| {
            let value: f64 = text.trim().parse().ok()?;
            (value > 0.0 && value <= 1e6).then_some(value)
        };
        let rate = match text.strip_suffix('%') {
            Some(share) => positive(share).map(|share| Rate::Share(share / 100.0)),
            None => positive(text).map(Rate::PerSecond),
        };
        rate.ok_or_else(|| {
            "a rate is a positive number of requests per second, or a share such as 80%".into()
        })
    }
}

/// Lengths between a minimum and a maximum.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Lengths(RangeInclusive<usize>);

impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Lengths, String> {
        let (low, high) = text.split_once('-').unwrap_or((text, text));
        match (low.trim().parse(), high.trim().parse()) {
            (Ok(low), Ok(high)) if (1..=high).contains(&low) => Ok(Lengths(low..=high)),
            _ => Err("lengths are a number from 1 up, or a range such as 16-256".into()),
        }
    }
}

pub(super) fn measure(
    args: &Args,
    on_load: LoadListener,
    spinner: Delayed,
    context: &CliContext,
) -> anyhow::Result<()> {
    let load = &args.load;
    if let Some(url) = &load.url {
        let target = ServerLoad::connect(url, context.store.env().api_key.clone())?;
        let name = format!("{} at {url}", target.model());
        drop(spinner);
        return drive(args, &target, &name, context);
    }
    // Without -c, as large as the longest request.
    let longest = load.prompt_range.0.end() + load.reply_range.0.end();
    let n_context = args.context.map_or(longest, NonZeroUsize::get);
    if longest > n_context {
        let message = format!("the longest request has {longest} tokens, the context {n_context}");
        let hint = format!("raise -c to {longest}, or lower --prompt-range or --reply-range");
        return Err(Hinted::new(message, hint).into());
    }
    let session = SessionOptions { on_load, ..args.device.tried_session(Some(n_context), context)? };
    let options = ServiceOptions {
        session,
        max_seqs: load.max_seqs.get(),
        // An open loop keeps sending, no matter how many requests wait.
        max_requests: load.requests.get().max(load.max_seqs.get()),
        kv_tokens: None,
    };
    let progress = |phase: &str| spinner.say(phase.to_owned());
    let target = match &args.shape {
        Some(name) => {
            let (shape, mix) = (find_shape(name)?, find_mix(&args.quant)?);
            LocalLoad::open(&BenchTarget::Shape(shape, mix), &options, progress)?
        }
        None => {
            let files = resolve::find(args.model.as_deref(), context)?.files()?;
            LocalLoad::open(&BenchTarget::Files(&files), &options, progress)?
        }
    };
    drop(spinner);
    let name = format!("{} on {}", target.name(), target.backend());
    drive(args, &target, &name, context)?;
    if !args.json {
        let ledger = target.ledger()?;
        for kind in [StepKind::Decode, StepKind::Mixed, StepKind::Prompt] {
            let tally = ledger.tally(kind);
            if tally.steps() > 0 {
                talk!("{} steps: {tally}", kind.name());
            }
        }
    }
    if context.verbose
        && let Some(status) = target.device_status()
    {
        stats::print_graphs(&status);
    }
    Ok(())
}

/// Sends the load and prints what it measured.
fn drive(args: &Args, target: &dyn LoadTarget, name: &str, context: &CliContext) -> anyhow::Result<()> {
    let load = &args.load;
    let listening = context.interrupt.listen();
    let cancel = listening.flag();
    let mut options = LoadOptions {
        arrivals: Arrivals::Clients(load.max_seqs.get()),
        n_requests: load.requests.get(),
        prompt_tokens: load.prompt_range.0.clone(),
        reply_tokens: load.reply_range.0.clone(),
        token_ids: TOKEN_IDS,
        seed: load.load_seed,
        ttft_limit: Duration::from_millis(load.ttft_limit.into()),
        token_limit: Duration::from_millis(load.token_limit.into()),
    };
    let run = |options: &LoadOptions, what: &str| -> anyhow::Result<LoadReport> {
        let bar = Delayed::bar(options.n_requests as u64, what);
        let report = run_load(target, options, &cancel, |n_ended| bar.set(n_ended as u64));
        drop(bar);
        if cancel.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(Interrupted.into());
        }
        match report.failed.iter().next() {
            Some((why, _)) if report.n_completed == 0 => {
                let hint = "try a single request of the longest lengths first";
                Err(Hinted::new(format!("every request failed: {why}"), hint).into())
            }
            _ => Ok(report),
        }
    };
    // The first requests compile steps and fill caches; they are not counted.
    let warm_up = LoadOptions {
        n_requests: options.n_requests.min(2 * load.max_seqs.get()),
        seed: options.seed.wrapping_add(1),
        ..options.clone()
    };
    run(&warm_up, "warming up")?;
    options.arrivals = match (load.clients, load.rate) {
        (Some(n), _) => Arrivals::Clients(n.get()),
        (None, Rate::PerSecond(rate)) => Arrivals::PerSecond(rate),
        (None, Rate::Share(share)) => {
            let peak = run(&options, "measuring the highest rate")?;
            talk!(
                "highest rate: {} requests/s, {} tok/s, with {}",
                short_rate(peak.requests_per_second()),
                short_rate(peak.tokens_per_second()),
                counted(load.max_seqs.get(), "client"),
            );
            Arrivals::PerSecond(share * peak.requests_per_second())
        }
    };
    options.seed = options.seed.wrapping_add(2);
    let report = run(&options, "measuring the load")?;
    if let Some(path) = &load.html {
        let page = page(name, &options, &report, args);
        std::fs::write(path, page).map_err(|error| {
            Hinted::new(
                format!("cannot write {}: {error}", path.display()),
                "choose another file with --html",
            )
        })?;
    }
    let mut out = Stdout::new();
    match args.json {
        true => out.json(&to_json(name, &options, &report)),
        false => print(&mut out, name, &options, &report),
    }
}

fn arrivals_text(arrivals: Arrivals) -> String {
    match arrivals {
        Arrivals::PerSecond(rate) => format!("{} requests/s", short_rate(rate)),
        Arrivals::Clients(n) => counted(n, "client"),
    }
}

fn print(out: &mut Stdout, name: &str, options: &LoadOptions, report: &LoadReport) -> anyhow::Result<()> {
    let lengths = |range: &RangeInclusive<usize>| match range.start() == range.end() {
        true => thousands(*range.start()),
        false => format!("{} to {}", thousands(*range.start()), thousands(*range.end())),
    };
    out.line(format_args!(
        "{name}: {} at {}, prompts of {} and replies of {} tokens",
        counted(options.n_requests, "request"),
        arrivals_text(options.arrivals),
        lengths(&options.prompt_tokens),
        lengths(&options.reply_tokens)
    ))?;
    out.line(format_args!(
        "output   {:>8} tok/s, {} requests/s, in {}",
        short_rate(report.tokens_per_second()),
        short_rate(report.requests_per_second()),
        short_time(report.seconds)
    ))?;
    let percentiles = |samples: &Samples| {
        let [p50, p90, p99, max] = samples.quantiles([0.5, 0.9, 0.99, 1.0]).map(short_time);
        format!("{p50:>9} {p90:>9} {p99:>9} {max:>9}")
    };
    out.line(format_args!("         {:>9} {:>9} {:>9} {:>9}", "p50", "p90", "p99", "max"))?;
    out.line(format_args!("ttft     {}", percentiles(&report.ttft)))?;
    if !report.gaps.0.is_empty() {
        out.line(format_args!("token    {}", percentiles(&report.gaps)))?;
    }
    out.line(format_args!("request  {}", percentiles(&report.latency)))?;
    out.line(format_args!(
        "goodput  {:>8} requests/s: {} of {} with a first token within {} and {} per token",
        short_rate(report.goodput()),
        thousands(report.n_good),
        thousands(report.n_completed + report.n_failed()),
        short_time(options.ttft_limit.as_secs_f64()),
        short_time(options.token_limit.as_secs_f64()),
    ))?;
    for (why, n) in &report.failed {
        out.line(format_args!("failed   {}: {why}", counted(*n, "request")))?;
    }
    Ok(())
}

fn to_json(name: &str, options: &LoadOptions, report: &LoadReport) -> serde_json::Value {
    let seconds = |samples: &Samples| match samples.0.is_empty() {
        true => serde_json::Value::Null,
        false => {
            let [p50, p90, p99, max] = samples.quantiles([0.5, 0.9, 0.99, 1.0]);
            json!({ "p50": p50, "p90": p90, "p99": p99, "max": max, "mean": samples.mean() })
        }
    };
    let (rate, clients) = match options.arrivals {
        Arrivals::PerSecond(rate) => (Some(rate), None),
        Arrivals::Clients(n) => (None, Some(n)),
    };
    json!({
        "target": name,
        "requests": options.n_requests,
        "requested_per_second": rate,
        "clients": clients,
        "prompt_tokens": [options.prompt_tokens.start(), options.prompt_tokens.end()],
        "reply_tokens": [options.reply_tokens.start(), options.reply_tokens.end()],
        "seed": options.seed,
        "seconds": report.seconds,
        "completed": report.n_completed,
        "failed": report.failed,
        "tokens": report.n_tokens,
        "tokens_per_second": report.tokens_per_second(),
        "requests_per_second": report.requests_per_second(),
        "goodput_per_second": report.goodput(),
        "good": report.n_good,
        "ttft_seconds": seconds(&report.ttft),
        "token_seconds": seconds(&report.gaps),
        "request_seconds": seconds(&report.latency),
    })
}

fn page(name: &str, options: &LoadOptions, report: &LoadReport, args: &Args) -> String {
    let percentiles = |samples: &Samples| {
        let [p50, p99] = samples.quantiles([0.5, 0.99]).map(short_time);
        format!("{p50} median, {p99} at the 99th percentile")
    };
    let (command, date) = (profile::command(), profile::date_utc(std::time::SystemTime::now()));
    let device = match &args.load.url {
        Some(_) => "that of the server".into(),
        None => profile::device_name(&args.device),
    };
    let facts = [
        ("command", command),
        ("date", date),
        ("device", device),
        ("arrivals", arrivals_text(options.arrivals)),
        ("requests", format!("{} completed, {} failed", report.n_completed, report.n_failed())),
        ("output", format!("{} tok/s", short_rate(report.tokens_per_second()))),
        ("goodput", format!("{} requests/s", short_rate(report.goodput()))),
        ("time to first token", percentiles(&report.ttft)),
        ("time between tokens", percentiles(&report.gaps)),
    ];
    let header = PageHeader {
        title: name.to_owned(),
        kind: "load".into(),
        facts: facts.map(|(name, value)| (name.to_owned(), value)).into(),
        details: Default::default(),
    };
    let curve = |value: &dyn Fn(&refrain::LoadMoment) -> Option<f64>| -> Vec<(u64, f64)> {
        let at = |moment: &refrain::LoadMoment| (1e3 * moment.seconds) as u64;
        report.moments.iter().filter_map(|moment| Some((at(moment), value(moment)?))).collect()
    };
    let state = |value: fn(&refrain::LoadState) -> f64| curve(&|moment| moment.state.as_ref().map(value));
    let mut charts = vec![Chart::new(
        "speed",
        "Tokens per second",
        "ms",
        false,
        vec![Series::new("tokens per second", CurveStyle::Curve, curve(&|m| Some(m.tokens_per_second)))],
    )];
    let running = state(|state| state.n_running as f64);
    let requests = match running.is_empty() {
        true => vec![Series::new("open", CurveStyle::Curve, curve(&|m| Some(m.n_open as f64)))],
        false => vec![
            Series::new("running", CurveStyle::Curve, running),
            Series::new("waiting", CurveStyle::Second, state(|state| state.n_waiting as f64)),
        ],
    };
    charts.push(Chart::new("requests", "Requests", "ms", false, requests));
    let kv = state(|state| 100.0 * state.kv_used);
    if !kv.is_empty() {
        let series = vec![Series::new("% of the KV blocks in use", CurveStyle::Curve, kv)];
        charts.push(Chart::new("kv", "KV blocks in use, %", "ms", false, series));
    }
    refrain_report::page(&header, &charts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_lengths_are_read_or_refused() {
        assert_eq!("2.5".parse(), Ok(Rate::PerSecond(2.5)));
        assert_eq!("80%".parse(), Ok(Rate::Share(0.8)));
        for bad in ["", "%", "0", "-1", "nan", "inf", "1e9", "x"] {
            assert!(bad.parse::<Rate>().is_err(), "{bad}");
        }
        assert_eq!("7".parse(), Ok(Lengths(7..=7)));
        assert_eq!("16-256".parse(), Ok(Lengths(16..=256)));
        for bad in ["", "0", "0-4", "8-4", "-", "a-b", "99999999999999999999"] {
            assert!(bad.parse::<Lengths>().is_err(), "{bad}");
        }
    }
}
