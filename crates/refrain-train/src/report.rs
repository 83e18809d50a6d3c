//! A run as a self-contained HTML page with SVG curves, style, script and data.

use crate::log::{EvalRecord, LogLine, StepRecord};
use refrain_report::{Chart, CurveStyle, PageHeader, Series, counted, thousands};

/// Content above the curves.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReportHeader {
    /// Title of the page.
    pub title: String,
    /// Name-value pairs, such as model, device and totals.
    pub facts: Vec<(String, String)>,
    /// The configuration as text.
    pub config: String,
}

/// Renders the page of a run.
pub fn page(header: &ReportHeader, lines: &[LogLine]) -> String {
    let (steps, evals) = split(lines);
    let totals = totals(&steps, &evals);
    let header = PageHeader {
        title: header.title.clone(),
        kind: "training".into(),
        facts: header.facts.iter().cloned().chain(totals).collect(),
        details: ("Configuration".into(), header.config.clone()),
    };
    refrain_report::page(&header, &charts(&steps, &evals))
}

fn split(lines: &[LogLine]) -> (Vec<StepRecord>, Vec<EvalRecord>) {
    let (mut steps, mut evals) = (Vec::new(), Vec::new());
    for line in lines {
        match line {
            LogLine::Step(record) => steps.push(*record),
            LogLine::Eval(record) => evals.push(*record),
        }
    }
    (steps, evals)
}

fn totals(steps: &[StepRecord], evals: &[EvalRecord]) -> Vec<(String, String)> {
    let mut facts = vec![("steps".to_owned(), thousands(steps.len()))];
    let mut add = |name: &str, value: String| facts.push((name.to_owned(), value));
    if let Some(last) = steps.last() {
        add("last loss", format!("{:.4} (step {})", last.loss, thousands(shown(last.step))));
    }
    let finite = evals.iter().filter(|record| record.eval_loss.is_finite());
    if let Some(best) = finite.min_by(|a, b| a.eval_loss.total_cmp(&b.eval_loss)) {
        add(
            "best held-out loss",
            format!("{:.4} (after step {})", best.eval_loss, thousands(shown(best.step))),
        );
    }
    let bad: Vec<u64> = steps.iter().filter(|record| !record.loss.is_finite()).map(|r| r.step).collect();
    if let Some(first) = bad.first() {
        add(
            "loss not finite",
            format!("{}, first at step {}", counted(bad.len(), "step"), thousands(shown(*first))),
        );
    }
    facts
}

/// The number of a step as messages have it: the first is 1, while the log counts from 0.
fn shown(step: u64) -> u64 {
    step.saturating_add(1)
}

fn charts(steps: &[StepRecord], evals: &[EvalRecord]) -> Vec<Chart> {
    let of =
        |value: fn(&StepRecord) -> f64| steps.iter().map(|r| (shown(r.step), value(r))).collect::<Vec<_>>();
    let loss = of(|r| r.loss);
    let smooth = smoothed(&loss);
    let held_out = evals.iter().map(|r| (shown(r.step), r.eval_loss)).collect();
    let curve = |name, points| Series::new(name, CurveStyle::Curve, points);
    vec![
        Chart::new(
            "loss",
            "Loss",
            "step",
            false,
            vec![
                Series::new("each step", CurveStyle::Raw, loss),
                Series::new("smoothed", CurveStyle::Curve, smooth),
                Series::new("held out", CurveStyle::Dots, held_out),
            ],
        ),
        Chart::new("lr", "Learning rate", "step", false, vec![curve("learning rate", of(|r| r.lr))]),
        Chart::new(
            "norm",
            "Gradient norm before clipping",
            "step",
            true,
            vec![curve("norm", of(|r| r.grad_norm))],
        ),
        Chart::new(
            "speed",
            "Tokens per second",
            "step",
            false,
            vec![curve("tokens per second", of(|r| r.tok_s))],
        ),
    ]
}

/// Exponential moving average over about a fortieth of the run.
fn smoothed(points: &[(u64, f64)]) -> Vec<(u64, f64)> {
    let span = (points.len() as f64 / 40.0).clamp(1.0, 200.0);
    let keep = 1.0 - 1.0 / span;
    let (mut mean, mut weight) = (0.0, 0.0);
    let mut smooth = Vec::with_capacity(points.len());
    for &(step, value) in points {
        if value.is_finite() {
            mean = keep * mean + (1.0 - keep) * value;
            weight = keep * weight + (1.0 - keep);
            smooth.push((step, mean / weight));
        } else {
            smooth.push((step, f64::NAN));
        }
    }
    smooth
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn run(n_steps: u64) -> Vec<LogLine> {
        let step = |i: u64| {
            let loss = 2.0 + 3.0 / (1.0 + i as f64);
            LogLine::Step(StepRecord {
                step: i,
                loss,
                grad_norm: 10.0 / (1 + i) as f64,
                lr: 3e-4,
                tok_s: 9e3,
            })
        };
        let eval = |i: u64| LogLine::Eval(EvalRecord { step: i * 10, eval_loss: 3.0 - i as f64 * 0.01 });
        (0..n_steps).map(step).chain((0..n_steps / 10).map(eval)).collect()
    }

    fn header() -> ReportHeader {
        ReportHeader {
            title: "a & b</title><script>".into(),
            facts: vec![("device".into(), "<b>cpu</b>".into())],
            config: "lr = \"</pre>\"".into(),
        }
    }

    #[test]
    fn a_page_is_self_contained_and_escapes_its_texts() {
        let page = page(&header(), &run(100));
        assert_eq!(page.matches("</script>").count(), 2);
        assert_eq!(page.matches("<script").count(), 2);
        assert_eq!(page.matches("</pre>").count(), page.matches("<pre").count());
        for bad in ["http", "<b>", "src=", "@import", "url("] {
            assert!(!page.contains(bad), "{bad}");
        }
        assert!(page.contains("a &amp; b&lt;/title&gt;&lt;script&gt;"));
        assert!(page.contains("best held-out loss<td>2.9100 (after step 91)"), "{page}");
        assert_eq!(page.matches("<svg").count(), 4);
        assert!(page.contains("prefers-color-scheme:dark"));
    }

    #[test]
    fn a_page_does_not_grow_with_the_run() {
        let (short, long) = (page(&header(), &run(3_000)).len(), page(&header(), &run(100_000)).len());
        assert!(long < short * 3 / 2, "{short} and {long}");
    }

    #[test]
    fn empty_runs_and_runs_without_finite_numbers_have_pages() {
        let bad = StepRecord { step: 4, loss: f64::NAN, grad_norm: f64::INFINITY, lr: 0.0, tok_s: 0.0 };
        let far =
            StepRecord { step: u64::MAX, loss: f64::MAX, grad_norm: f64::MIN_POSITIVE, lr: -1.0, tok_s: 1.0 };
        let cases =
            [vec![bad], vec![far], vec![far, bad], vec![StepRecord { step: u64::MAX - 1, ..far }, far]];
        let cases = cases.map(|records| records.into_iter().map(LogLine::Step).collect());
        for lines in [vec![], run(1)].into_iter().chain(cases) {
            let page = page(&header(), &lines);
            assert!(!page.contains("NaN\"") && !page.contains("inf\""), "{page}");
            assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
        }
        let page = page(&header(), &[LogLine::Step(bad)]);
        assert!(page.contains("loss not finite<td>1 step, first at step 5"), "{page}");
    }

    #[test]
    fn the_data_for_the_script_matches_the_curves() {
        let page = page(&header(), &run(20));
        let start = page.find("id=\"data\">").unwrap() + 10;
        let end = start + page[start..].find("</script>").unwrap();
        let data: Value = serde_json::from_str(&page[start..end]).unwrap();
        assert_eq!(data["loss"]["series"][0][1][0], json!([1, 5.0]));
        assert_eq!(data["lr"]["series"][0][1].as_array().unwrap().len(), 20);
        assert_eq!((&data["loss"]["first"], &data["loss"]["last"]), (&json!(1), &json!(20)));
    }
}
