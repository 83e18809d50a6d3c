//! Self-contained HTML pages with SVG charts, style, script and data.
//!
//! Invariant: a page loads nothing and its size does not grow with the number of points.
#![forbid(unsafe_code)]

mod chart; // axes and curves as SVG

pub use chart::{Chart, CurveStyle, Series};

use serde_json::{Map, Value};
use std::fmt::Write as _;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Content above the charts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageHeader {
    /// Heading.
    pub title: String,
    /// What the page shows, for the title of the window.
    pub kind: String,
    /// Name-value pairs, such as model, device and totals.
    pub facts: Vec<(String, String)>,
    /// Heading and text of a folded part, such as a configuration; empty for none.
    pub details: (String, String),
}

/// Renders a page.
pub fn page(header: &PageHeader, charts: &[Chart]) -> String {
    let (title, kind) = (escape(&header.title), escape(&header.kind));
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>{title}: {kind}</title>\n\
         <style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n<table>\n"
    );
    for (name, value) in &header.facts {
        let _ = writeln!(out, "<tr><th>{}<td>{}</tr>", escape(name), escape(value));
    }
    out.push_str("</table>\n");
    let (heading, text) = &header.details;
    if !text.is_empty() {
        let (heading, text) = (escape(heading), escape(text));
        let _ = writeln!(out, "<details><summary>{heading}</summary><pre>{text}</pre></details>");
    }
    let mut data = Map::new();
    for chart in charts {
        chart.write(&mut out);
        data.insert(chart.id.to_owned(), chart.data());
    }
    // `<` is escaped so that the data cannot close its script element.
    let data = Value::Object(data).to_string().replace('<', "\\u003c");
    let _ = writeln!(out, "<script type=\"application/json\" id=\"data\">{data}</script>");
    let _ = writeln!(out, "<script>{SCRIPT}</script>\n</body></html>");
    out
}

/// Formats a whole number with thousands separators: `1,512`.
pub fn thousands(n: impl TryInto<u64>) -> String {
    let digits = n.try_into().unwrap_or(u64::MAX).to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Formats a count with its noun: `1 file`, `2 files`.
pub fn counted(n: usize, thing: &str) -> String {
    let ending = match n {
        1 => "",
        _ if thing.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{} {thing}{ending}", thousands(n))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
