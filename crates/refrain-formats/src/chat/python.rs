//! Values as Python writes them: `str()`, `repr()` and `json.dumps()`.
//!
//! Templates are written against Jinja on Python, so `{{ true }}` must say `True`, and `tojson` must put the blanks
//! where `json.dumps` puts them: models saw exactly that text.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use serde_json::Value as Json;

/// `str(value)`.
pub(super) fn to_str(value: &Value) -> String {
    if let Some(text) = value.as_str() {
        return text.to_owned();
    }
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::Seq | ValueKind::Map => {
            match serde_json::to_value(value) {
                Ok(json) => repr(&json),
                Err(_) => value.to_string(),
            }
        }
        _ => value.to_string(),
    }
}

fn repr(json: &Json) -> String {
    match json {
        Json::Null => "None".to_owned(),
        Json::Bool(true) => "True".to_owned(),
        Json::Bool(false) => "False".to_owned(),
        Json::Number(number) => number_text(number),
        Json::String(text) => quoted(text),
        Json::Array(items) => {
            let items: Vec<String> = items.iter().map(repr).collect();
            format!("[{}]", items.join(", "))
        }
        Json::Object(map) => {
            let items: Vec<String> = map.iter().map(|(k, v)| format!("{}: {}", quoted(k), repr(v))).collect();
            format!("{{{}}}", items.join(", "))
        }
    }
}

/// A string literal: single quotes unless only those occur in the text.
fn quoted(text: &str) -> String {
    use std::fmt::Write as _;
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::with_capacity(text.len() + 2);
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if (c as u32) < 0x20 || c as u32 == 0x7f => {
                // Writing to a String cannot fail.
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

fn number_text(number: &serde_json::Number) -> String {
    match number.as_f64() {
        Some(x) if number.is_f64() => float_text(x),
        _ => number.to_string(),
    }
}

/// `repr(float)`: the shortest digits that read back, an exponent below 1e-4 and from 1e16.
fn float_text(x: f64) -> String {
    let scientific = format!("{x:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    match exponent.parse::<i32>() {
        Ok(e) if !(-4..16).contains(&e) => {
            format!("{digits}e{}{:02}", if e < 0 { '-' } else { '+' }, e.unsigned_abs())
        }
        _ => {
            let plain = format!("{x}");
            if plain.contains('.') { plain } else { plain + ".0" }
        }
    }
}

/// How `json.dumps` is asked to write.
struct Style {
    ensure_ascii: bool,
    indent: Option<usize>,
    sort_keys: bool,
    item_separator: String,
    key_separator: String,
}

/// The `tojson` filter: `json.dumps(value, ensure_ascii=False, ..)`, without HTML escapes.
pub(super) fn tojson(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let json = serde_json::to_value(value).map_err(|e| {
        Error::new(ErrorKind::BadSerialization, "tojson cannot write this value").with_source(e)
    })?;
    let indent: Option<usize> = kwargs.get("indent")?;
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let (item, key) = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }, ": "),
        Some([item, key]) => (item.as_str(), key.as_str()),
        Some(other) => {
            let detail = format!("tojson takes two separators, got {}", other.len());
            return Err(Error::new(ErrorKind::InvalidOperation, detail));
        }
    };
    let style = Style {
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent: indent.map(|n| n.min(64)),
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        item_separator: item.to_owned(),
        key_separator: key.to_owned(),
    };
    kwargs.assert_all_used()?;
    let mut out = String::new();
    dump(&mut out, &json, &style, 0);
    Ok(Value::from(out))
}

fn dump(out: &mut String, json: &Json, style: &Style, depth: usize) {
    match json {
        Json::Null => out.push_str("null"),
        Json::Bool(b) => out.push_str(if *b { "true" } else { "false" }),
        Json::Number(number) => out.push_str(&number_text(number)),
        Json::String(text) => dump_string(out, text, style),
        Json::Array(items) if items.is_empty() => out.push_str("[]"),
        Json::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                separate(out, style, i, depth + 1);
                dump(out, item, style, depth + 1);
            }
            new_line(out, style, depth);
            out.push(']');
        }
        Json::Object(map) if map.is_empty() => out.push_str("{}"),
        Json::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            if style.sort_keys {
                entries.sort_by(|a, b| a.0.cmp(b.0));
            }
            out.push('{');
            for (i, (key, value)) in entries.into_iter().enumerate() {
                separate(out, style, i, depth + 1);
                dump_string(out, key, style);
                out.push_str(&style.key_separator);
                dump(out, value, style, depth + 1);
            }
            new_line(out, style, depth);
            out.push('}');
        }
    }
}

fn separate(out: &mut String, style: &Style, index: usize, depth: usize) {
    if index > 0 {
        out.push_str(&style.item_separator);
    }
    new_line(out, style, depth);
}

fn new_line(out: &mut String, style: &Style, depth: usize) {
    if let Some(indent) = style.indent {
        out.push('\n');
        out.extend(std::iter::repeat_n(' ', indent * depth));
    }
}

fn dump_string(out: &mut String, text: &str, style: &Style) {
    use std::fmt::Write as _;
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 || (style.ensure_ascii && !c.is_ascii()) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a String cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::value::Serde;
    use serde_json::json;

    fn python(value: Json) -> String {
        to_str(&Value::from(Serde(value)))
    }

    #[test]
    fn values_print_as_python_prints_them() {
        assert_eq!(python(json!(null)), "None");
        assert_eq!(python(json!(true)), "True");
        assert_eq!(python(json!(["a", 1, 2.0, null])), "['a', 1, 2.0, None]");
        assert_eq!(python(json!({"k": "it's", "n": {"x": false}})), r#"{'k': "it's", 'n': {'x': False}}"#);
        assert_eq!(python(json!("plain 'text'")), "plain 'text'");
    }

    #[test]
    fn floats_print_as_python_prints_them() {
        for (x, text) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (123_456_789_012_345.6, "123456789012345.6"),
            (1e-4, "0.0001"),
            (1.5e-7, "1.5e-07"),
            (-2.5e300, "-2.5e+300"),
        ] {
            assert_eq!(float_text(x), text);
        }
    }
}
