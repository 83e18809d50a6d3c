//! Axes and curves as SVG.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::escape;

const WIDTH: f64 = 1200.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 26.0;
/// Maximum points of a curve: one per two units of width.
const MAX_POINTS: usize = 550;
/// Minimum ratio of the largest to the smallest value for a logarithmic axis, if one is allowed.
const LOG_RATIO: f64 = 50.0;

const LARGEST: f64 = 1e300;

/// Style of a curve; the classes are in `page.css`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CurveStyle {
    /// A line in the first colour.
    Curve,
    /// A faint line in the first colour, for what another curve smooths.
    Raw,
    /// A line in the second colour.
    Second,
    /// A line in the second colour, with dots.
    Dots,
}

impl CurveStyle {
    fn name(self) -> &'static str {
        match self {
            Self::Curve => "curve",
            Self::Raw => "raw",
            Self::Second | Self::Dots => "second",
        }
    }
}

/// A curve: values over steps or another count, with gaps where they are not finite.
#[derive(Debug, Clone)]
pub struct Series {
    name: &'static str,
    style: CurveStyle,
    points: Vec<(u64, f64)>,
    steps: Option<(u64, u64)>, // first and last step, before thinning
}

impl Series {
    /// A curve through these points.
    pub fn new(name: &'static str, style: CurveStyle, points: Vec<(u64, f64)>) -> Self {
        let steps = || points.iter().map(|(step, _)| *step);
        let steps = steps().min().zip(steps().max());
        Self { name, style, points: thinned(&points), steps }
    }

    fn finite(&self) -> impl Iterator<Item = (u64, f64)> + Clone {
        self.points.iter().copied().filter(|(_, value)| value.is_finite())
    }
}

/// Reduces the points to as many as can be seen: the means of equal parts.
fn thinned(points: &[(u64, f64)]) -> Vec<(u64, f64)> {
    let n_together = points.len().div_ceil(MAX_POINTS).max(1);
    let mean = |part: &[(u64, f64)]| {
        let (step, _) = part[part.len() / 2];
        // A part with a non-finite value stays a gap, so that the gap remains visible.
        (step, part.iter().map(|(_, value)| value).sum::<f64>() / part.len() as f64)
    };
    points.chunks(n_together).map(mean).collect()
}

/// A chart of one or more curves.
#[derive(Debug, Clone)]
pub struct Chart {
    pub(crate) id: &'static str,
    title: &'static str,
    series: Vec<Series>,
    x_name: &'static str,
    steps: (u64, u64),
    scale: ChartScale,
    names: Vec<(u64, f64, String)>,
}

/// The vertical axis.
#[derive(Debug, Clone, Copy)]
struct ChartScale {
    low: f64,
    high: f64,
    is_log: bool,
}

impl ChartScale {
    /// Covers the values with a small margin.
    fn new(values: impl Iterator<Item = f64> + Clone, may_be_log: bool) -> Self {
        let low = values.clone().fold(f64::INFINITY, f64::min);
        let high = values.fold(f64::NEG_INFINITY, f64::max);
        // Far from the range where differences overflow.
        let (low, high) = (low.max(-LARGEST), high.min(LARGEST));
        if low > high {
            return Self { low: 0.0, high: 1.0, is_log: false };
        }
        if may_be_log && low > 0.0 && high / low > LOG_RATIO {
            return Self { low: low * 0.9, high: high * 1.1, is_log: true };
        }
        let margin = match (high - low) * 0.05 {
            margin if margin > 0.0 => margin,
            _ if high != 0.0 => high.abs() * 0.1,
            _ => 1.0,
        };
        let low = if low >= 0.0 { (low - margin).max(0.0) } else { low - margin };
        Self { low, high: high + margin, is_log: false }
    }

    fn y(self, value: f64) -> f64 {
        let value = value.clamp(self.low, self.high);
        let share = if self.is_log {
            (value.ln() - self.low.ln()) / (self.high.ln() - self.low.ln())
        } else {
            (value - self.low) / (self.high - self.low)
        };
        TOP + (1.0 - share) * (HEIGHT - TOP - BOTTOM)
    }

    fn ticks(self) -> Vec<f64> {
        if !self.is_log {
            return ticks(self.low, self.high, 5);
        }
        let powers = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
        let all = powers.flat_map(|power| [1.0, 3.0].map(|digit| digit * 10f64.powi(power)));
        all.filter(|tick| (self.low..=self.high).contains(tick)).take(24).collect()
    }
}

/// About `n` round numbers in a range.
fn ticks(low: f64, high: f64, n: usize) -> Vec<f64> {
    let rough = (high - low) / n as f64;
    if !rough.is_finite() || rough <= 0.0 {
        return Vec::new();
    }
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(rough);
    let first = (low / step).ceil();
    (0..4 * n).map(|i| (first + i as f64) * step).take_while(|tick| *tick <= high).collect()
}

impl Chart {
    /// A chart with this element id and title over `x_name`, such as `step`. A wide range may get a logarithmic axis.
    pub fn new(
        id: &'static str,
        title: &'static str,
        x_name: &'static str,
        may_be_log: bool,
        series: Vec<Series>,
    ) -> Self {
        let ranges = || series.iter().filter_map(|series| series.steps);
        let first = ranges().map(|(first, _)| first).min().unwrap_or(0);
        let last = ranges().map(|(_, last)| last).max().unwrap_or(0);
        let scale =
            ChartScale::new(series.iter().flat_map(|series| series.finite().map(|(_, v)| v)), may_be_log);
        let steps = (first, last.max(first.saturating_add(1)));
        Self { id, title, x_name, steps, scale, series, names: Vec::new() }
    }

    /// Marks points and writes a name next to each, in turn above and below.
    #[must_use]
    pub fn with_names(mut self, names: Vec<(u64, f64, String)>) -> Self {
        self.names = names;
        self
    }

    fn x(&self, step: f64) -> f64 {
        let (first, last) = (self.steps.0 as f64, self.steps.1 as f64);
        LEFT + (step - first) / (last - first).max(1.0) * (WIDTH - LEFT - RIGHT)
    }

    /// Writes the chart, its legend and the line under it.
    pub(crate) fn write(&self, out: &mut String) {
        let (id, title) = (self.id, escape(self.title));
        let log = if self.scale.is_log { ", logarithmic" } else { "" };
        let _ = writeln!(out, "<h2>{title}{log}</h2>");
        self.key(out);
        let _ = writeln!(
            out,
            "<svg id=\"{id}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title} by {}\">",
            self.x_name
        );
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for tick in self.scale.ticks() {
            let (y, label) = (self.scale.y(tick), number(tick));
            let _ = writeln!(
                out,
                "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{right}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
                LEFT - 8.0,
                y + 4.0
            );
        }
        for tick in
            ticks(self.steps.0 as f64, self.steps.1 as f64, 8).into_iter().filter(|t| t.fract() == 0.0)
        {
            let x = self.x(tick);
            let _ = writeln!(
                out,
                "<path class=\"grid\" d=\"M{x:.1} {TOP}V{bottom}\"/>\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{tick}</text>",
                HEIGHT - 8.0
            );
        }
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 28.0,
            HEIGHT - 8.0,
            escape(self.x_name)
        );
        self.series.iter().for_each(|series| self.curve(series, out));
        for (i, (step, value, name)) in self.names.iter().enumerate().filter(|(_, (_, v, _))| v.is_finite()) {
            let (x, y) = (self.x(*step as f64), self.scale.y(*value));
            // Near the right edge, names end at their point.
            let (dx, anchor) = if x < 0.8 * WIDTH { (6.0, "start") } else { (-6.0, "end") };
            let dy = if i % 2 == 0 { -7.0 } else { 16.0 };
            let _ = writeln!(
                out,
                "<circle class=\"dot\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>",
                x + dx,
                (y + dy).clamp(TOP, bottom - 4.0),
                escape(name)
            );
        }
        let _ = writeln!(out, "<line class=\"cursor\" y1=\"{TOP}\" y2=\"{bottom}\"/>");
        let _ = writeln!(
            out,
            "</svg>\n<pre class=\"hover\" id=\"{id}-hover\">Point at the chart to read its values.</pre>"
        );
    }

    fn key(&self, out: &mut String) {
        if self.series.len() < 2 {
            return;
        }
        out.push_str("<p class=\"key\">");
        for series in self.series.iter().filter(|series| !series.points.is_empty()) {
            let style = match series.style {
                CurveStyle::Curve => "background:var(--first)",
                CurveStyle::Raw => "background:var(--first);opacity:.35",
                CurveStyle::Second | CurveStyle::Dots => "background:var(--second)",
            };
            let _ = write!(out, "<span><i style=\"{style}\"></i>{}</span>", escape(series.name));
        }
        out.push_str("</p>\n");
    }

    fn curve(&self, series: &Series, out: &mut String) {
        let (mut path, mut is_open) = (String::new(), false);
        for (step, value) in &series.points {
            if !value.is_finite() {
                is_open = false;
                continue;
            }
            let command = if is_open { 'L' } else { 'M' };
            let _ = write!(path, "{command}{:.1} {:.1}", self.x(*step as f64), self.scale.y(*value));
            is_open = true;
        }
        if !path.is_empty() {
            let _ = writeln!(out, "<path class=\"{}\" d=\"{path}\"/>", series.style.name());
        }
        // A point between two gaps has no line; a dot shows it.
        if series.style == CurveStyle::Dots || series.finite().count() == 1 {
            for (step, value) in series.finite() {
                let (x, y) = (self.x(step as f64), self.scale.y(value));
                let _ = writeln!(out, "<circle class=\"dot\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>");
            }
        }
    }

    /// Data for the script: step range and the points of each curve.
    pub(crate) fn data(&self) -> Value {
        let rounded = |value: f64| value as f32;
        let points = |series: &Series| -> Vec<Value> {
            series.finite().map(|(step, value)| json!([step, rounded(value)])).collect()
        };
        let series: Vec<Value> =
            self.series.iter().map(|series| json!([series.name, points(series)])).collect();
        let (first, last) = self.steps;
        json!({ "left": LEFT, "width": WIDTH - LEFT - RIGHT, "x": self.x_name, "first": first, "last": last, "series": series })
    }
}

/// Formats a number for an axis.
fn number(value: f64) -> String {
    let magnitude = value.abs();
    if value != 0.0 && !(1e-3..1e6).contains(&magnitude) {
        return format!("{value:.1e}");
    }
    let text = format!("{value:.4}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    let whole = text.split('.').next().unwrap_or(text);
    // Only numbers of at least 10,000 need a separator, and below 1,000,000 they have at most one.
    match whole.len().checked_sub(3) {
        Some(at) if magnitude >= 1e4 => format!("{},{}", &text[..at], &text[at..]),
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_on_an_axis_are_short() {
        let texts = [0.0, 0.25, 1234.5, 60_000.0, -123_456.5, 2e6].map(number);
        assert_eq!(texts, ["0", "0.25", "1234.5", "60,000", "-123,456.5", "2.0e6"]);
    }

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks(0.0, 10.0, 5), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(0.93, 1.11, 4), [0.95, 1.0, 1.05, 1.1].map(|t: f64| (t / 0.05).round() * 0.05));
        assert_eq!(ticks(1.0, 1.0, 5), [0.0; 0]);
        assert_eq!(ticks(f64::NEG_INFINITY, 1.0, 5), [0.0; 0]);
    }

    #[test]
    fn a_wide_range_of_norms_is_drawn_on_a_logarithmic_axis() {
        let chart = |values: [f64; 2]| {
            let points = values.into_iter().zip(0..).map(|(value, step)| (step, value)).collect();
            Chart::new("x", "x", "step", true, vec![Series::new("x", CurveStyle::Curve, points)])
        };
        assert!(chart([1e-3, 1e3]).scale.is_log);
        assert!(!chart([1.0, 2.0]).scale.is_log);
        assert!(!chart([0.0, 1e3]).scale.is_log);
        let scale = chart([1e-3, 1e3]).scale;
        assert!((scale.y(1e-3) + scale.y(1e3) - 2.0 * scale.y(1.0)).abs() < 1.0);
    }

    #[test]
    fn every_point_is_inside_the_chart() {
        for values in [[0.0, 0.0], [5.0, 5.0], [-1.0, 2.0], [f64::MIN, f64::MAX], [1e-300, 1e300]] {
            let points: Vec<_> = values.into_iter().zip(0..).map(|(value, step)| (step, value)).collect();
            let chart = Chart::new("x", "x", "step", true, vec![Series::new("x", CurveStyle::Curve, points)]);
            for value in values {
                let y = chart.scale.y(value);
                assert!((TOP - 0.1..=HEIGHT - BOTTOM + 0.1).contains(&y), "{value} at {y} of {values:?}");
            }
        }
    }

    #[test]
    fn names_are_written_next_to_points_inside_the_chart() {
        let points = vec![(10, 1.0), (20, 3.0)];
        let chart =
            Chart::new("x", "x", "KiB", false, vec![Series::new("x", CurveStyle::Curve, points.clone())]);
        let names = points.iter().map(|(step, value)| (*step, *value, format!("<file {step}>"))).collect();
        let mut out = String::new();
        chart.with_names(names).write(&mut out);
        assert!(out.contains("text-anchor=\"start\">&lt;file 10&gt;</text>"), "{out}");
        assert!(out.contains("text-anchor=\"end\">&lt;file 20&gt;</text>"), "{out}");
        assert_eq!(out.matches("<circle").count(), 2);
    }

    #[test]
    fn a_non_finite_value_leaves_a_gap() {
        let points = vec![(0, 1.0), (1, 2.0), (2, f64::NAN), (3, 1.0), (4, 2.0)];
        let mut out = String::new();
        Chart::new("x", "x", "step", false, vec![Series::new("x", CurveStyle::Curve, points)])
            .write(&mut out);
        let curve = out.lines().find(|line| line.contains("class=\"curve\"")).unwrap();
        assert_eq!((curve.matches('M').count(), curve.matches('L').count()), (2, 2), "{curve}");
    }

    #[test]
    fn long_runs_are_thinned_to_means() {
        let points: Vec<_> = (0..10_000u64).map(|i| (i, (i % 2) as f64)).collect();
        let series = Series::new("x", CurveStyle::Curve, points);
        assert!(series.points.len() <= MAX_POINTS);
        assert_eq!(series.steps, Some((0, 9_999)));
        assert!(series.points.iter().all(|(_, value)| (0.4..0.6).contains(value)));
    }

    #[test]
    fn axis_numbers_are_short() {
        assert_eq!(
            [0.0, 0.5, 3.0, 1500.0, 3e-4, 2e7].map(number),
            ["0", "0.5", "3", "1500", "3.0e-4", "2.0e7"]
        );
    }
}
