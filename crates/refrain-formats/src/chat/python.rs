//! Values as Python writes them: `str()`, `repr()` and `json.dumps()`.
//!
//! Templates are written for Jinja on Python: `{{ true }}` must print `True`, and `tojson` must put its spaces where
//! `json.dumps` puts them. Models were trained on exactly that text.

use super::budget::Budget;
use super::error::Stop;
use super::value::{TextBuilder, Val};

/// Writes `str(value)`.
pub(super) fn write_str(out: &mut TextBuilder<'_>, value: &Val, budget: &Budget) -> Result<(), Stop> {
    match value.as_str() {
        Some(text) => out.push_str(text),
        None => write_repr(out, value, budget),
    }
}

/// `str(value)`; strings are shared, not copied.
pub(super) fn to_str(value: &Val, budget: &Budget) -> Result<Val, Stop> {
    if value.as_str().is_some() {
        return Ok(value.clone());
    }
    let mut out = TextBuilder::new(budget)?;
    write_repr(&mut out, value, budget)?;
    Ok(out.finish())
}

/// Writes `repr(value)`; nothing for an undefined value.
pub(super) fn write_repr(out: &mut TextBuilder<'_>, value: &Val, budget: &Budget) -> Result<(), Stop> {
    budget.step()?;
    match value {
        Val::Undefined => Ok(()),
        Val::None => out.push_str("None"),
        Val::Bool(true) => out.push_str("True"),
        Val::Bool(false) => out.push_str("False"),
        Val::Int(number) => out.push_str(&number.to_string()),
        Val::Float(number) => out.push_str(&float_text(*number)),
        Val::Literal(_) | Val::Str(_) => write_quoted(out, value.as_str().unwrap_or_default()),
        Val::List(list) => {
            out.push(if list.is_tuple { '(' } else { '[' })?;
            for (idx, item) in list.items.iter().enumerate() {
                if idx > 0 {
                    out.push_str(", ")?;
                }
                write_repr(out, item, budget)?;
            }
            out.push_str(match (list.is_tuple, list.items.len()) {
                (true, 1) => ",)",
                (true, _) => ")",
                (false, _) => "]",
            })
        }
        Val::Map(map) => {
            out.push('{')?;
            for (idx, (key, value)) in map.entries.iter().enumerate() {
                if idx > 0 {
                    out.push_str(", ")?;
                }
                write_repr(out, key, budget)?;
                out.push_str(": ")?;
                write_repr(out, value, budget)?;
            }
            out.push('}')
        }
        Val::Namespace(_) | Val::Macro(_) | Val::Loop(_) | Val::Function(_) => {
            out.push_str(&format!("<{}>", value.kind()))
        }
    }
}

/// A string literal: single quotes unless only those occur in the text.
fn write_quoted(out: &mut TextBuilder<'_>, text: &str) -> Result<(), Stop> {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote)?;
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.push('\\').and_then(|()| out.push(c)),
            c if (c as u32) < 0x20 || c as u32 == 0x7f => out.push_str(&format!("\\x{:02x}", c as u32)),
            c => out.push(c),
        }?;
    }
    out.push(quote)
}

/// `repr(float)`: the shortest digits that read back, an exponent below 1e-4 and from 1e16.
pub(super) fn float_text(x: f64) -> String {
    if !x.is_finite() {
        return if x.is_nan() { "nan".into() } else { (if x > 0.0 { "inf" } else { "-inf" }).into() };
    }
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

/// Arguments of `json.dumps`.
pub(super) struct JsonStyle {
    pub(super) ensure_ascii: bool,
    pub(super) indent: Option<usize>,
    pub(super) sort_keys: bool,
    pub(super) item_separator: String,
    pub(super) key_separator: String,
}

/// Writes `json.dumps(value)`, without HTML escapes.
pub(super) fn write_json(
    out: &mut TextBuilder<'_>,
    value: &Val,
    style: &JsonStyle,
    depth: usize,
    budget: &Budget,
) -> Result<(), Stop> {
    budget.step()?;
    match value {
        Val::None => out.push_str("null"),
        Val::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        Val::Int(number) => out.push_str(&number.to_string()),
        Val::Float(number) => out.push_str(&float_text(*number)),
        Val::Literal(_) | Val::Str(_) => {
            write_json_string(out, value.as_str().unwrap_or_default(), style.ensure_ascii)
        }
        Val::List(list) if list.items.is_empty() => out.push_str("[]"),
        Val::List(list) => {
            out.push('[')?;
            for (idx, item) in list.items.iter().enumerate() {
                separate(out, style, idx, depth + 1)?;
                write_json(out, item, style, depth + 1, budget)?;
            }
            new_line(out, style, depth)?;
            out.push(']')
        }
        Val::Map(map) if map.entries.is_empty() => out.push_str("{}"),
        Val::Map(map) => {
            let _charge = budget.charge(map.entries.len() * size_of::<&(Val, Val)>())?;
            let mut entries: Vec<_> = map.entries.iter().collect();
            if style.sort_keys {
                entries.sort_by(|a, b| a.0.as_str().cmp(&b.0.as_str()));
            }
            out.push('{')?;
            for (idx, (key, value)) in entries.into_iter().enumerate() {
                separate(out, style, idx, depth + 1)?;
                match key.as_str() {
                    Some(key) => write_json_string(out, key, style.ensure_ascii)?,
                    None => {
                        out.push('"')?;
                        write_json(out, key, style, depth, budget)?;
                        out.push('"')?;
                    }
                }
                out.push_str(&style.key_separator)?;
                write_json(out, value, style, depth + 1, budget)?;
            }
            new_line(out, style, depth)?;
            out.push('}')
        }
        Val::Undefined | Val::Namespace(_) | Val::Macro(_) | Val::Loop(_) | Val::Function(_) => {
            Err(Stop::failed(format!("tojson cannot write a value of type {}", value.kind())))
        }
    }
}

fn separate(out: &mut TextBuilder<'_>, style: &JsonStyle, idx: usize, depth: usize) -> Result<(), Stop> {
    if idx > 0 {
        out.push_str(&style.item_separator)?;
    }
    new_line(out, style, depth)
}

fn new_line(out: &mut TextBuilder<'_>, style: &JsonStyle, depth: usize) -> Result<(), Stop> {
    match style.indent {
        Some(indent) => {
            out.push('\n')?;
            out.repeat(" ", indent * depth)
        }
        None => Ok(()),
    }
}

fn write_json_string(out: &mut TextBuilder<'_>, text: &str, ensure_ascii: bool) -> Result<(), Stop> {
    out.push('"')?;
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 || (ensure_ascii && !c.is_ascii()) => c
                .encode_utf16(&mut [0; 2])
                .iter()
                .try_for_each(|unit| out.push_str(&format!("\\u{unit:04x}"))),
            c => out.push(c),
        }?;
    }
    out.push('"')
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value as Json, json};

    fn python(value: Json) -> String {
        let budget = Budget::new(0);
        let value = Val::from_json(&budget, &value, 0).unwrap();
        to_str(&value, &budget).unwrap().as_str().unwrap().to_owned()
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
