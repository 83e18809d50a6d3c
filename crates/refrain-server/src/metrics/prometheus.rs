//! The text format of Prometheus, with vLLM's names as aliases: routers and dashboards read those.

use super::{Histogram, Metrics};
use refrain_worker::{BackendStatus, LoadStatus, WorkerState, WorkerStatus};
use std::fmt::Write as _;
use std::sync::atomic::Ordering;

/// All metrics as text.
pub(crate) fn render(metrics: &Metrics, status: &BackendStatus, models: &[&str]) -> String {
    let mut page = Page::default();
    of_server(&mut page, metrics);
    of_workers(&mut page, status);
    of_vllm(&mut page, metrics, status, models);
    page.text
}

#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        self.text.push_str(name);
        for (idx, (label, text)) in labels.iter().enumerate() {
            let before = if idx == 0 { '{' } else { ',' };
            let _ = write!(self.text, "{before}{label}=\"");
            for c in text.chars() {
                match c {
                    '\\' => self.text.push_str("\\\\"),
                    '"' => self.text.push_str("\\\""),
                    '\n' => self.text.push_str("\\n"),
                    c => self.text.push(c),
                }
            }
            self.text.push('"');
        }
        let end = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.text, "{end} {value}");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.head(name, kind, help);
        self.line(name, &[], value);
    }

    fn histogram(&mut self, name: &str, help: &str, labels: &[(&str, &str)], histogram: &Histogram) {
        self.head(name, "histogram", help);
        let (buckets, total, sum) = histogram.snapshot();
        let bucket = format!("{name}_bucket");
        let bounds = buckets.iter().map(|(bound, n)| (bound.to_string(), *n));
        for (bound, n) in bounds.chain([("+Inf".to_owned(), total)]) {
            let labels: Vec<_> = labels.iter().copied().chain([("le", bound.as_str())]).collect();
            self.line(&bucket, &labels, n as f64);
        }
        self.line(&format!("{name}_sum"), labels, sum);
        self.line(&format!("{name}_count"), labels, total as f64);
    }
}

fn of_server(page: &mut Page, metrics: &Metrics) {
    let count = |n: &std::sync::atomic::AtomicUsize| n.load(Ordering::Relaxed) as f64;
    let total = |n: &std::sync::atomic::AtomicU64| n.load(Ordering::Relaxed) as f64;
    page.one("refrain_uptime_seconds", "gauge", "Time since the start", metrics.uptime().as_secs_f64());
    page.one("refrain_requests_open", "gauge", "Requests being served", count(&metrics.n_open));
    let help = "Requests without their first token";
    page.one("refrain_requests_waiting", "gauge", help, count(&metrics.n_waiting));
    let help = "Prompt tokens received";
    page.one("refrain_prompt_tokens_total", "counter", help, total(&metrics.n_prompt_tokens));
    let help = "Tokens delivered";
    page.one("refrain_generated_tokens_total", "counter", help, total(&metrics.n_generated_tokens));
    page.one(
        "refrain_tokens_per_second",
        "gauge",
        "Tokens delivered in the last seconds",
        metrics.tokens_per_second(),
    );
    page.head("refrain_responses_total", "counter", "Responses by endpoint and status");
    for ((endpoint, status), n) in metrics.responses() {
        let labels = [("endpoint", endpoint), ("status", &status.to_string())];
        page.line("refrain_responses_total", &labels, n as f64);
    }
    page.head("refrain_finished_total", "counter", "Ended choices by reason");
    for (reason, n) in metrics.finish_reasons() {
        page.line("refrain_finished_total", &[("reason", reason)], n as f64);
    }
    let help = "Time to the first token";
    page.histogram("refrain_time_to_first_token_seconds", help, &[], &metrics.first_token);
    page.histogram("refrain_inter_token_seconds", "Time between tokens", &[], &metrics.inter_token);
    page.histogram("refrain_request_seconds", "Time of whole requests", &[], &metrics.duration);
}

fn of_workers(page: &mut Page, status: &BackendStatus) {
    page.head("refrain_worker_ready", "gauge", "Whether a worker serves requests");
    for worker in &status.workers {
        let labels = [("worker", &*worker.idx.to_string()), ("backend", &*worker.backend)];
        let ready = f64::from(u8::from(worker.state == WorkerState::Ready));
        page.line("refrain_worker_ready", &labels, ready);
    }
    page.head("refrain_worker_restarts_total", "counter", "Processes that replaced a failed one");
    for worker in &status.workers {
        let labels = [("worker", &*worker.idx.to_string())];
        page.line("refrain_worker_restarts_total", &labels, worker.n_restarts as f64);
    }
    type Read = fn(&LoadStatus) -> f64;
    let per_model: [(&str, &str, &str, Read); 11] = [
        ("refrain_running", "gauge", "Requests that take part in steps", |l| l.n_running as f64),
        ("refrain_waiting", "gauge", "Requests waiting for capacity", |l| l.n_waiting as f64),
        ("refrain_preemptions_total", "counter", "Preemptions", |l| l.n_preempted as f64),
        ("refrain_kv_blocks", "gauge", "KV blocks in all", |l| l.kv_blocks as f64),
        ("refrain_kv_blocks_used", "gauge", "KV blocks held by requests", |l| l.kv_blocks_used as f64),
        ("refrain_prefix_hit_tokens_total", "counter", "Prompt tokens found in the prefix cache", |l| {
            l.n_prefix_hit_tokens as f64
        }),
        ("refrain_worker_prompt_tokens_total", "counter", "Prompt tokens of workers", |l| {
            l.n_prompt_tokens as f64
        }),
        ("refrain_worker_generated_tokens_total", "counter", "Tokens generated by workers", |l| {
            l.n_generated_tokens as f64
        }),
        ("refrain_steps_failed_total", "counter", "Steps that failed", |l| l.steps.failed as f64),
        ("refrain_guessed_tokens_total", "counter", "Guessed tokens that were checked", |l| {
            l.steps.guessed as f64
        }),
        ("refrain_accepted_tokens_total", "counter", "Guessed tokens that were accepted", |l| {
            l.steps.accepted as f64
        }),
    ];
    for (name, kind, help, read) in per_model {
        page.head(name, kind, help);
        for (worker, load) in loads(status) {
            let labels = [("worker", &*worker.idx.to_string()), ("model", &*load.model)];
            page.line(name, &labels, read(load));
        }
    }
    page.head("refrain_guess_acceptance", "gauge", "Fraction of checked guesses that were accepted");
    for (worker, load) in loads(status).filter(|(_, load)| load.steps.guessed > 0) {
        let labels = [("worker", &*worker.idx.to_string()), ("model", &*load.model)];
        let rate = load.steps.accepted as f64 / load.steps.guessed as f64;
        page.line("refrain_guess_acceptance", &labels, rate);
    }
    page.head("refrain_steps_total", "counter", "Steps by how they ran");
    for (worker, load) in loads(status) {
        for (how, n) in [("replayed", load.steps.replayed), ("eager", load.steps.eager)] {
            let labels = [("worker", &*worker.idx.to_string()), ("model", &*load.model), ("how", how)];
            page.line("refrain_steps_total", &labels, n as f64);
        }
    }
    page.head("refrain_steps_not_replayed_total", "counter", "Steps that were not replayed, by reason");
    for (worker, load) in loads(status) {
        for (reason, n) in &load.steps.reasons {
            let idx = worker.idx.to_string();
            let labels = [("worker", &*idx), ("model", &*load.model), ("reason", reason)];
            page.line("refrain_steps_not_replayed_total", &labels, *n as f64);
        }
    }
}

fn of_vllm(page: &mut Page, metrics: &Metrics, status: &BackendStatus, models: &[&str]) {
    type Read = fn(&LoadStatus) -> f64;
    let share = |load: &LoadStatus| load.kv_blocks_used as f64 / load.kv_blocks.max(1) as f64;
    let sums: [(&str, &str, Read); 8] = [
        ("vllm:num_requests_running", "gauge", |l| l.n_running as f64),
        ("vllm:num_requests_waiting", "gauge", |l| l.n_waiting as f64),
        ("vllm:num_preemptions_total", "counter", |l| l.n_preempted as f64),
        ("vllm:prefix_cache_queries_total", "counter", |l| l.n_prompt_tokens as f64),
        ("vllm:prefix_cache_hits_total", "counter", |l| l.n_prefix_hit_tokens as f64),
        ("vllm:prompt_tokens_total", "counter", |l| l.n_prompt_tokens as f64),
        ("vllm:generation_tokens_total", "counter", |l| l.n_generated_tokens as f64),
        ("vllm:kv_cache_usage_perc", "gauge", |_| 0.0),
    ];
    for (name, kind, read) in sums {
        page.head(name, kind, "Alias of vLLM's metric");
        for model in models {
            let of_model = || loads(status).map(|(_, load)| load).filter(|load| load.model == *model);
            let value = match name {
                // The fullest worker decides whether another request fits.
                "vllm:kv_cache_usage_perc" => of_model().map(share).fold(0.0, f64::max),
                _ => of_model().map(read).sum::<f64>() + 0.0,
            };
            page.line(name, &[("model_name", model)], value);
        }
    }
    page.head("vllm:request_success_total", "counter", "Alias of vLLM's metric");
    let label = models.first().copied().unwrap_or_default();
    for (reason, n) in metrics.finish_reasons() {
        let labels = [("model_name", label), ("finished_reason", reason)];
        page.line("vllm:request_success_total", &labels, n as f64);
    }
    let help = "Alias of vLLM's metric";
    let labels = [("model_name", label)];
    page.histogram("vllm:time_to_first_token_seconds", help, &labels, &metrics.first_token);
    page.histogram("vllm:inter_token_latency_seconds", help, &labels, &metrics.inter_token);
    page.histogram("vllm:e2e_request_latency_seconds", help, &labels, &metrics.duration);
}

fn loads(status: &BackendStatus) -> impl Iterator<Item = (&WorkerStatus, &LoadStatus)> {
    status.workers.iter().flat_map(|worker| worker.models.iter().map(move |load| (worker, load)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_worker::StepCounts;

    #[test]
    fn labels_are_escaped_and_every_line_belongs_to_a_declared_metric() {
        let reasons = vec![("no \"bucket\"\nfor it".to_owned(), 3)];
        let steps = StepCounts { replayed: 5, guessed: 8, accepted: 6, reasons, ..StepCounts::default() };
        let load =
            LoadStatus { model: "a\\b".into(), kv_blocks: 4, kv_blocks_used: 1, steps, ..Default::default() };
        let worker = WorkerStatus {
            idx: 0,
            pid: None,
            backend: "cpu".into(),
            state: WorkerState::Ready,
            n_restarts: 2,
            last_failure: None,
            models: vec![load],
        };
        let text = render(&Metrics::new(), &BackendStatus { workers: vec![worker] }, &["a\\b"]);
        assert!(text.contains(r#"reason="no \"bucket\"\nfor it"} 3"#), "{text}");
        assert!(text.contains(r#"vllm:kv_cache_usage_perc{model_name="a\\b"} 0.25"#), "{text}");
        assert!(text.contains(r#"refrain_guess_acceptance{worker="0",model="a\\b"} 0.75"#), "{text}");
        assert!(text.contains("refrain_worker_restarts_total{worker=\"0\"} 2"), "{text}");
        let mut declared = String::new();
        for line in text.lines() {
            match line.strip_prefix("# TYPE ") {
                Some(name) => declared = name.split(' ').next().unwrap_or_default().to_owned(),
                None if line.starts_with('#') => {}
                None => assert!(line.starts_with(&declared), "{line} after {declared}"),
            }
        }
    }
}
