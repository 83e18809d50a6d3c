//! Plots decoding speed over time: `docs/history.tsv` as `docs/history.svg`.
//!
//! A row holds a date, a commit, a machine, a shape, its weights and tokens per second. Rows with the same date and commit
//! form a version; versions are plotted in file order. A row with the commit `llama.cpp` is a reference: its rate is drawn
//! as a dashed line, and its date is not used.

use crate::shell::root;
use anyhow::{Context, Result, bail, ensure};
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;

const HEAD: &str = "date\tcommit\tmachine\tshape\tweights\ttokens_per_second";
/// Commit of the rows that hold a reference instead of a version.
const REFERENCE: &str = "llama.cpp";
const WIDTH: f64 = 1060.0;
const HEIGHT: f64 = 500.0;
/// Margins around the curves: left for the axis, right for names, bottom for versions.
const LEFT: f64 = 84.0;
const RIGHT: f64 = 300.0;
const TOP: f64 = 60.0;
const BOTTOM: f64 = 56.0;
/// Minimum distance between the names of curves.
const NAME_HEIGHT: f64 = 15.0;

#[derive(Debug, Clone, PartialEq)]
struct HistoryRow {
    date: String,
    commit: String,
    machine: String,
    shape: String,
    weights: String,
    rate: f64,
}

/// Rates of one shape with one kind of weights, for each version that was measured.
#[derive(Default)]
struct Curve {
    name: String,
    points: Vec<(usize, f64)>, // version, tokens per second
    reference: Option<f64>,    // tokens per second of llama.cpp
}

/// Curves and scales of the plot.
struct Picture<'a> {
    title: String,
    legend: String,
    versions: Vec<(&'a str, &'a str)>, // date and commit
    curves: Vec<Curve>,
    low: f64,
    high: f64,
}

pub(crate) fn plot() -> Result<()> {
    let path = picture();
    fs::write(&path, draw(&read()?)?)?;
    println!("wrote {}", path.display());
    Ok(())
}

fn picture() -> PathBuf {
    root().join("docs/history.svg")
}

fn read() -> Result<Vec<HistoryRow>> {
    let path = root().join("docs/history.tsv");
    parse(&fs::read_to_string(&path)?).with_context(|| path.display().to_string())
}

fn parse(text: &str) -> Result<Vec<HistoryRow>> {
    let mut lines = text.lines();
    ensure!(lines.next() == Some(HEAD), "the first line must be {HEAD:?}");
    let row = |(i, line): (usize, &str)| {
        let fields: Vec<&str> = line.split('\t').collect();
        let [date, commit, machine, shape, weights, rate] = fields.as_slice() else {
            bail!("line {}: {} fields, must be 6, separated by tabs", i + 2, fields.len());
        };
        let rate: f64 = rate.parse().with_context(|| format!("line {}: {rate:?}", i + 2))?;
        ensure!(rate.is_finite() && rate > 0.0, "line {}: {rate} tokens per second", i + 2);
        let [date, commit, machine, shape, weights] =
            [date, commit, machine, shape, weights].map(|field| (*field).to_owned());
        Ok(HistoryRow { date, commit, machine, shape, weights, rate })
    };
    lines.enumerate().filter(|(_, line)| !line.trim().is_empty()).map(row).collect()
}

fn draw(rows: &[HistoryRow]) -> Result<String> {
    ensure!(!rows.is_empty(), "the table has no rows");
    let picture = Picture::new(rows);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n\
         <text x=\"{LEFT}\" y=\"22\" font-size=\"15\">{}</text>\n\
         <text x=\"{LEFT}\" y=\"42\" fill=\"#555\">{}</text>\n",
        escape(&picture.title),
        escape(&picture.legend)
    );
    picture.axes(&mut svg);
    picture.curves(&mut svg);
    picture.names(&mut svg);
    svg.push_str("</svg>\n");
    Ok(svg)
}

impl<'a> Picture<'a> {
    fn new(rows: &'a [HistoryRow]) -> Picture<'a> {
        let mut versions: Vec<(&str, &str)> = Vec::new();
        let mut curves: Vec<Curve> = Vec::new();
        let machine = rows.first().map_or("", |row| &row.machine);
        let is_one = rows.iter().all(|row| row.machine == machine);
        for row in rows {
            let on = if is_one { String::new() } else { format!(", {}", row.machine) };
            let name = format!("{} {}{on}", row.shape, row.weights);
            let idx = curves.iter().position(|c| c.name == name).unwrap_or_else(|| {
                curves.push(Curve { name, ..Curve::default() });
                curves.len() - 1
            });
            if row.commit == REFERENCE {
                curves[idx].reference = Some(row.rate);
                continue;
            }
            let version = (row.date.as_str(), row.commit.as_str());
            let version_idx = versions.iter().position(|v| *v == version).unwrap_or_else(|| {
                versions.push(version);
                versions.len() - 1
            });
            curves[idx].points.push((version_idx, row.rate));
        }
        curves.retain(|curve| !curve.points.is_empty());
        let on = if is_one { format!(" on one {machine}") } else { String::new() };
        let (low, high) = span(rows);
        let title = format!("Decoding at batch 1{on}, tokens per second, log scale");
        let has_reference = curves.iter().any(|curve| curve.reference.is_some());
        let legend = if has_reference {
            format!("solid: Refrain; dashed, in the same colour: {REFERENCE} on the same kind of GPU")
        } else {
            String::new()
        };
        Picture { title, legend, versions, curves, low, high }
    }

    fn x(&self, version: usize) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * version as f64 / (self.versions.len().max(2) - 1) as f64
    }

    /// The scale is logarithmic: equal factors have equal heights.
    fn y(&self, rate: f64) -> f64 {
        HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (rate / self.low).ln() / (self.high / self.low).ln()
    }

    fn axes(&self, svg: &mut String) {
        for rate in ticks(self.low, self.high) {
            let (y, right) = (self.y(rate), WIDTH - RIGHT);
            let _ = writeln!(
                svg,
                "<path d=\"M{LEFT} {y:.1}H{right}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{:.1}\" \
                 text-anchor=\"end\" fill=\"#555\">{}</text>",
                LEFT - 8.0,
                y + 4.0,
                grouped(rate)
            );
        }
        let (x, y) = (20.0, TOP + (HEIGHT - TOP - BOTTOM) / 2.0);
        let _ = writeln!(
            svg,
            "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\" fill=\"#555\" transform=\"rotate(-90 {x} {y})\">\
             tokens per second (log scale)</text>"
        );
        for (i, (date, commit)) in self.versions.iter().enumerate() {
            let (x, y) = (self.x(i), HEIGHT - BOTTOM + 20.0);
            let _ = writeln!(
                svg,
                "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\" fill=\"#555\">{}<tspan x=\"{x:.1}\" \
                 dy=\"15\">{}</tspan></text>",
                escape(commit),
                escape(date)
            );
        }
    }

    fn curves(&self, svg: &mut String) {
        for (i, curve) in self.curves.iter().enumerate() {
            let colour = colour(i);
            let place = |(v, rate): &(usize, f64)| (self.x(*v), self.y(*rate));
            let points: Vec<String> =
                curve.points.iter().map(place).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                points.join(" ")
            );
            if let Some(reference) = curve.reference {
                let _ = writeln!(
                    svg,
                    "<path d=\"M{LEFT} {:.1}H{}\" stroke=\"{colour}\" stroke-dasharray=\"5 4\">\
                     <title>{}, {REFERENCE}: {}</title></path>",
                    self.y(reference),
                    WIDTH - RIGHT,
                    escape(&curve.name),
                    grouped(reference)
                );
            }
            for point in &curve.points {
                let ((x, y), name, rate) = (place(point), escape(&curve.name), grouped(point.1));
                let _ = writeln!(
                    svg,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{colour}\"><title>{name}: {rate}</title>\
                     </circle>"
                );
            }
        }
    }

    /// Writes each curve's name next to its last point, from the top down; a name that would cover another moves below it.
    fn names(&self, svg: &mut String) {
        let last = |curve: &Curve| curve.points.last().map_or(self.low, |(_, rate)| *rate);
        let mut names: Vec<(usize, f64)> = self.curves.iter().map(last).enumerate().collect();
        names.sort_by(|a, b| b.1.total_cmp(&a.1));
        let mut free = f64::NEG_INFINITY;
        for (i, rate) in names {
            let y = self.y(rate).max(free);
            free = y + NAME_HEIGHT;
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{}\">{}: {}{}</text>",
                WIDTH - RIGHT + 12.0,
                y + 4.0,
                colour(i),
                escape(&self.curves[i].name),
                grouped(rate),
                self.curves[i]
                    .reference
                    .map_or_else(String::new, |r| format!(" ({REFERENCE} {})", grouped(r)))
            );
        }
    }
}

/// Lowest and highest rate of the scale, a little beyond the measured ones.
fn span(rows: &[HistoryRow]) -> (f64, f64) {
    let rates = || rows.iter().map(|row| row.rate);
    (rates().fold(f64::INFINITY, f64::min) / 1.15, rates().fold(0.0, f64::max) * 1.15)
}

/// 1, 2 and 5 times powers of ten within a range.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let powers = (low.log10().floor() as i32)..=(high.log10().ceil() as i32);
    let all = powers.flat_map(|p| [1.0, 2.0, 5.0].map(|m| m * 10f64.powi(p)));
    all.filter(|rate| (low..=high).contains(rate)).collect()
}

fn colour(i: usize) -> String {
    // The golden angle keeps neighbouring hues apart for any number of curves.
    format!("hsl({:.0} 65% 42%)", i as f64 * 137.508 % 360.0)
}

/// A number with a comma between groups of three digits: `1,465`, `60.2`.
fn grouped(number: f64) -> String {
    let text = number.to_string();
    let (whole, fraction) = text.split_at(text.find('.').unwrap_or(text.len()));
    let mut out = String::new();
    for (i, digit) in whole.chars().enumerate() {
        if i > 0 && (whole.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out + fraction
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stored_plot_matches_the_table() {
        let drawn = draw(&read().unwrap()).unwrap();
        let stored = fs::read_to_string(picture()).unwrap_or_default();
        assert!(stored == drawn, "docs/history.svg is out of date\nhint: cargo xtask plot-history");
    }

    #[test]
    fn an_invalid_row_is_refused_with_its_line_number() {
        let row = |row: &str| parse(&format!("{HEAD}\n{row}\n"));
        assert!(parse("date\n").is_err());
        assert!(row("2026-01-01\tabc\tH200").unwrap_err().to_string().contains("line 2: 3 fields"));
        assert!(row("2026-01-01\tabc\tH200\ts\tw\tfast").is_err());
        assert!(row("2026-01-01\tabc\tH200\ts\tw\t-1").is_err());
        assert_eq!(row("2026-01-01\tabc\tH200\ts\tw\t12.5").unwrap()[0].rate, 12.5);
    }

    #[test]
    fn a_single_version_with_a_single_rate_is_plotted() {
        let rows = parse(&format!("{HEAD}\n2026-01-01\ta<b\tH200\ts\tw\t100\n")).unwrap();
        let svg = draw(&rows).unwrap();
        assert!(!svg.contains("NaN") && !svg.contains("inf") && svg.contains("a&lt;b"), "{svg}");
    }

    #[test]
    fn a_reference_is_a_dashed_line_and_no_version() {
        let text = format!("{HEAD}\n-\tllama.cpp\tH200\ts\tw\t50\n2026-01-01\tabc\tH200\ts\tw\t1234.5\n");
        let svg = draw(&parse(&text).unwrap()).unwrap();
        assert_eq!(svg.matches("stroke-dasharray").count(), 1, "{svg}");
        assert!(svg.contains("s w: 1,234.5 (llama.cpp 50)") && svg.contains("log scale"), "{svg}");
        assert_eq!(svg.matches("<circle").count(), 1, "{svg}");
    }
}
