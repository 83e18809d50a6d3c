//! Jinja's filters: `value | trim`.

use std::cmp::Ordering;

use super::budget::Budget;
use super::error::Stop;
use super::eval::{CallArgs, Interpreter};
use super::predicates;
use super::python::{self, JsonStyle};
use super::value::{ListBuilder, TextBuilder, Val};

/// Widths and precisions in formats, and spaces of an indent.
const MAX_WIDTH: usize = 1000;

/// `value | name(args)`.
pub(super) fn apply(
    it: &mut Interpreter<'_>,
    name: &str,
    value: Val,
    mut args: CallArgs,
) -> Result<Val, Stop> {
    let budget = it.budget;
    match name {
        "default" | "d" => {
            let (default, also_false) = (args.take(0, "default_value"), args.flag(1, "boolean"));
            let missing = matches!(value, Val::Undefined) || (also_false && !value.is_true());
            return if missing { Ok(default.unwrap_or(Val::Literal("".into()))) } else { Ok(value) };
        }
        "tojson" => return tojson(budget, &value, args),
        "safe" => return Ok(value),
        "string" => return python::to_str(&value, budget),
        "bool" => return Ok(Val::Bool(value.is_true())),
        "attr" => return it.attr(&value, args.text(0, "name")?.as_str().unwrap_or_default()),
        "items" => return items(budget, &value),
        "length" | "count" => return length(budget, &value),
        "int" => return Ok(to_int(&value, budget)?.or(args.take(0, "default")).unwrap_or(Val::Int(0))),
        "float" => {
            budget.work(value.as_str().map_or(0, str::len))?;
            let parsed = value.as_float().or_else(|| value.as_str()?.trim().parse().ok()).map(Val::Float);
            return Ok(parsed.or(args.take(0, "default")).unwrap_or(Val::Float(0.0)));
        }
        "abs" => {
            return match (value.as_int(), value.as_float()) {
                (Some(number), _) => Ok(Val::Int(number.saturating_abs())),
                (_, Some(number)) => Ok(Val::Float(number.abs())),
                _ => Err(Stop::failed(format!("abs needs a number, not a {}", value.kind()))),
            };
        }
        "round" => return round(&value, &mut args),
        "pprint" => {
            let mut out = TextBuilder::new(budget)?;
            python::write_repr(&mut out, &value, budget)?;
            return Ok(out.finish());
        }
        "map" | "select" | "reject" | "selectattr" | "rejectattr" => return each(it, name, &value, args),
        _ => {}
    }
    if let Some(result) = on_text(budget, name, &value, &mut args)? {
        return Ok(result);
    }
    match on_list(it, name, &value, args)? {
        Some(result) => Ok(result),
        None => Err(Stop::failed(format!("unknown filter: filter {name} is unknown"))),
    }
}

/// Filters of strings; other values are converted first, as in Jinja.
fn on_text(budget: &Budget, name: &str, value: &Val, args: &mut CallArgs) -> Result<Option<Val>, Stop> {
    if !matches!(
        name,
        "trim"
            | "upper"
            | "lower"
            | "title"
            | "capitalize"
            | "replace"
            | "indent"
            | "split"
            | "lines"
            | "escape"
            | "e"
            | "format"
    ) {
        return Ok(None);
    }
    let value = python::to_str(value, budget)?;
    let text = value.as_str().unwrap_or_default();
    budget.work(text.len())?;
    Ok(Some(match name {
        "trim" => strip(budget, text, args.take(0, "chars"), true, true)?,
        "replace" => {
            let (old, new) = (args.require(0, "old")?, args.require(1, "new")?);
            let (old, new) = (python::to_str(&old, budget)?, python::to_str(&new, budget)?);
            let count = args.int(2, "count")?.and_then(|n| usize::try_from(n).ok());
            replace(budget, text, &old, &new, count)?
        }
        "indent" => indent(budget, text, args)?,
        "split" => {
            let n = args.int(1, "maxsplits")?.and_then(|n| usize::try_from(n).ok());
            split(budget, text, args.take(0, "split"), n, false)?
        }
        "lines" => {
            let mut out = ListBuilder::new(budget)?;
            for line in text.lines() {
                out.push(Val::str(budget, line)?)?;
            }
            out.finish()?
        }
        "escape" | "e" => {
            budget.work(text.len().saturating_mul(CHAR_WORK))?;
            let mut out = TextBuilder::new(budget)?;
            for c in text.chars() {
                match c {
                    '&' => out.push_str("&amp;"),
                    '<' => out.push_str("&lt;"),
                    '>' => out.push_str("&gt;"),
                    '"' => out.push_str("&#34;"),
                    '\'' => out.push_str("&#39;"),
                    c => out.push(c),
                }?;
            }
            out.finish()
        }
        "format" => percent_format(text, args.positional(), budget)?,
        _ => letter_case(budget, name, text)?,
    }))
}

fn on_list(it: &Interpreter<'_>, name: &str, value: &Val, mut args: CallArgs) -> Result<Option<Val>, Stop> {
    let budget = it.budget;
    Ok(Some(match name {
        "join" => {
            let separator = python::to_str(&args.take(0, "d").unwrap_or_default(), budget)?;
            let values = match args.take(1, "attribute") {
                Some(attribute) => {
                    let mut out = ListBuilder::new(budget)?;
                    for item in &value.items(budget)?.items {
                        out.push(by_path(it, item, &attribute)?)?;
                    }
                    out.finish()?
                }
                None => value.clone(),
            };
            join(budget, &values, separator.as_str().unwrap_or_default())?
        }
        "first" => value.items(budget)?.items.first().cloned().unwrap_or_default(),
        "last" => value.items(budget)?.items.last().cloned().unwrap_or_default(),
        "list" => {
            let mut out = ListBuilder::new(budget)?;
            out.extend(&value.items(budget)?.items)?;
            out.finish()?
        }
        "reverse" => {
            let mut out = ListBuilder::new(budget)?;
            out.extend(&value.items(budget)?.items)?;
            out.reverse();
            match value.as_str() {
                Some(_) => join(budget, &out.finish()?, "")?,
                None => out.finish()?,
            }
        }
        "sort" => {
            let reverse = args.flag(0, "reverse");
            let (sensitive, attribute) = (args.flag(1, "case_sensitive"), args.take(2, "attribute"));
            let mut out = ListBuilder::new(budget)?;
            out.extend(&value.items(budget)?.items)?;
            out.sort_by(|a, b| {
                let key = |item: &Val| match &attribute {
                    Some(attribute) => by_path(it, item, attribute),
                    None => Ok(item.clone()),
                };
                let order = compare_keys(&key(a)?, &key(b)?, sensitive, budget)?;
                Ok(if reverse { order.reverse() } else { order })
            })?;
            out.finish()?
        }
        "dictsort" => {
            let (sensitive, by) = (args.flag(0, "case_sensitive"), args.take(1, "by"));
            let reverse = args.flag(2, "reverse");
            let by_value = by.is_some_and(|by| by.as_str() == Some("value"));
            let Val::List(pairs) = items(budget, value)? else { return Ok(None) };
            let mut out = ListBuilder::new(budget)?;
            out.extend(&pairs.items)?;
            out.sort_by(|a, b| {
                let key = |pair: &Val| it.item(pair, &Val::Int(i128::from(by_value)));
                let order = compare_keys(&key(a)?, &key(b)?, sensitive, budget)?;
                Ok(if reverse { order.reverse() } else { order })
            })?;
            out.finish()?
        }
        "min" | "max" => {
            let wanted = if name == "min" { Ordering::Less } else { Ordering::Greater };
            let mut best = Val::Undefined;
            for (idx, item) in value.items(budget)?.items.iter().enumerate() {
                if idx == 0 || compare_keys(item, &best, false, budget)? == wanted {
                    best = item.clone();
                }
            }
            best
        }
        "sum" => {
            let (attribute, start) = (args.take(0, "attribute"), args.take(1, "start"));
            let mut sum = start.unwrap_or(Val::Int(0));
            for item in &value.items(budget)?.items {
                let item = match &attribute {
                    Some(attribute) => by_path(it, item, attribute)?,
                    None => item.clone(),
                };
                sum = super::ops::binary(super::program::BinaryOp::Add, sum, item, budget)?;
            }
            sum
        }
        "unique" => {
            let mut seen: Vec<Val> = Vec::new();
            let mut out = ListBuilder::new(budget)?;
            'items: for item in &value.items(budget)?.items {
                for known in &seen {
                    if known.equals(item, budget)? {
                        continue 'items;
                    }
                }
                out.push(item.clone())?;
                seen.push(item.clone());
            }
            out.finish()?
        }
        "batch" | "slice" => chunks(budget, name, value, &mut args)?,
        "groupby" => group_by(it, value, &args.require(0, "attribute")?)?,
        _ => return Ok(None),
    }))
}

/// Numbers and strings; strings without regard to letter case unless `sensitive`.
fn compare_keys(a: &Val, b: &Val, sensitive: bool, budget: &Budget) -> Result<Ordering, Stop> {
    match (a.as_str(), b.as_str()) {
        (Some(a), Some(b)) if !sensitive => {
            budget.work(a.len().min(b.len()))?;
            budget.step()?;
            Ok(a.chars().flat_map(char::to_lowercase).cmp(b.chars().flat_map(char::to_lowercase)))
        }
        _ => a.compare(b, budget),
    }
}

/// `map`, `select` and `reject`, of items or of an attribute of each.
fn each(it: &mut Interpreter<'_>, name: &str, value: &Val, mut args: CallArgs) -> Result<Val, Stop> {
    let budget = it.budget;
    let items = value.items(budget)?;
    let mut out = ListBuilder::new(budget)?;
    if name == "map" {
        let attribute = args.take(usize::MAX, "attribute");
        let default = args.take(usize::MAX, "default");
        let filter = args.take(0, "filter");
        for item in &items.items {
            let mapped = match (&attribute, filter.as_ref().and_then(Val::as_str)) {
                (Some(attribute), _) => match (by_path(it, item, attribute)?, &default) {
                    (Val::Undefined, Some(default)) => default.clone(),
                    (mapped, _) => mapped,
                },
                (None, Some(filter)) => {
                    let args = args.copy(budget)?.after(1);
                    budget.deeper(|| apply(it, filter, item.clone(), args))?
                }
                (None, None) => return Err(Stop::failed("map needs a filter or an attribute")),
            };
            out.push(mapped)?;
        }
        return out.finish();
    }
    let by_attribute = name.ends_with("attr");
    let attribute = if by_attribute { Some(args.require(0, "attribute")?) } else { None };
    let n_own = usize::from(by_attribute);
    let test = args.take(n_own, "test");
    for item in &items.items {
        let tested = match &attribute {
            Some(attribute) => by_path(it, item, attribute)?,
            None => item.clone(),
        };
        let passes = match test.as_ref().and_then(Val::as_str) {
            Some(test) => predicates::apply(it, test, &tested, args.copy(budget)?.after(n_own + 1))?,
            None => tested.is_true(),
        };
        if passes != name.starts_with("reject") {
            out.push(item.clone())?;
        }
    }
    out.finish()
}

/// An attribute such as `function.name` or an index.
fn by_path(it: &Interpreter<'_>, value: &Val, path: &Val) -> Result<Val, Stop> {
    let Some(names) = path.as_str() else { return it.item(value, path) };
    it.budget.work(names.len())?;
    let mut found = value.clone();
    for name in names.split('.') {
        it.budget.step()?;
        found = match name.parse::<i128>() {
            Ok(idx) if !matches!(found, Val::Map(_)) => it.item(&found, &Val::Int(idx))?,
            _ => it.attr(&found, name)?,
        };
    }
    Ok(found)
}

fn tojson(budget: &Budget, value: &Val, mut args: CallArgs) -> Result<Val, Stop> {
    let indent = args.int(0, "indent")?.map(|n| usize::try_from(n).unwrap_or(0).min(64));
    let (mut item, mut key) = (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned());
    if let Some(Val::List(separators)) = args.take(usize::MAX, "separators") {
        match separators.items.as_slice() {
            [a, b] => {
                item = a.as_str().unwrap_or_default().to_owned();
                key = b.as_str().unwrap_or_default().to_owned();
            }
            other => {
                return Err(Stop::failed(format!("tojson takes two separators, got {}", other.len())));
            }
        }
    }
    let _charge = budget.charge(item.len() + key.len())?;
    let style = JsonStyle {
        ensure_ascii: args.flag(usize::MAX, "ensure_ascii"),
        indent,
        sort_keys: args.flag(usize::MAX, "sort_keys"),
        item_separator: item,
        key_separator: key,
    };
    if let Some((name, _)) = args.named().first() {
        return Err(Stop::failed(format!("tojson has no parameter {name}")));
    }
    let mut out = TextBuilder::new(budget)?;
    python::write_json(&mut out, value, &style, 0, budget)?;
    Ok(out.finish())
}

/// The entries of a dictionary as pairs.
pub(super) fn items(budget: &Budget, value: &Val) -> Result<Val, Stop> {
    let mut out = ListBuilder::new(budget)?;
    match value {
        Val::Map(map) => {
            for (key, value) in &map.entries {
                out.push(Val::tuple(budget, vec![key.clone(), value.clone()])?)?;
            }
        }
        Val::Undefined => {}
        other => return Err(Stop::failed(format!("a {} has no items", other.kind()))),
    }
    out.finish()
}

fn length(budget: &Budget, value: &Val) -> Result<Val, Stop> {
    let n = match value {
        Val::List(list) => list.items.len(),
        Val::Map(map) => map.entries.len(),
        Val::Undefined => 0,
        _ => match value.as_str() {
            Some(text) => {
                budget.work(text.len())?;
                text.chars().count()
            }
            None => return Err(Stop::failed(format!("a {} has no length", value.kind()))),
        },
    };
    Ok(Val::Int(n as i128))
}

fn to_int(value: &Val, budget: &Budget) -> Result<Option<Val>, Stop> {
    if let Some(number) = value.as_int() {
        return Ok(Some(Val::Int(number)));
    }
    budget.work(value.as_str().map_or(0, str::len))?;
    let text = value.as_str().map(str::trim);
    if let Some(number) = text.and_then(|text| text.parse().ok()) {
        return Ok(Some(Val::Int(number)));
    }
    let number: Option<f64> = value.as_float().or_else(|| text?.parse().ok());
    Ok(number.filter(|number| number.is_finite()).map(|number| Val::Int(number as i128)))
}

fn round(value: &Val, args: &mut CallArgs) -> Result<Val, Stop> {
    let places = args.int(0, "precision")?.unwrap_or(0).clamp(-300, 300) as i32;
    let method = args.take(1, "method");
    let Some(number) = value.as_float() else {
        return Err(Stop::failed(format!("round needs a number, not a {}", value.kind())));
    };
    let scale = 10f64.powi(places);
    let scaled = number * scale;
    let rounded = match method.as_ref().and_then(Val::as_str) {
        Some("ceil") => scaled.ceil(),
        Some("floor") => scaled.floor(),
        _ => scaled.round(),
    };
    Ok(Val::Float(rounded / scale))
}

/// What an operation on each character costs, compared with copying its bytes.
const CHAR_WORK: usize = 8;

pub(super) fn letter_case(budget: &Budget, name: &str, text: &str) -> Result<Val, Stop> {
    budget.work(text.len().saturating_mul(CHAR_WORK))?;
    let mut out = TextBuilder::new(budget)?;
    let mut starts_word = true;
    for c in text.chars() {
        let upper = match name {
            "upper" => true,
            "lower" => false,
            _ => starts_word,
        };
        if upper {
            c.to_uppercase().try_for_each(|c| out.push(c))?;
        } else {
            c.to_lowercase().try_for_each(|c| out.push(c))?;
        }
        starts_word = name == "title" && (c.is_whitespace() || matches!(c, '-' | '(' | '{' | '[' | '<'));
    }
    Ok(out.finish())
}

pub(super) fn strip(
    budget: &Budget,
    text: &str,
    chars: Option<Val>,
    at_start: bool,
    at_end: bool,
) -> Result<Val, Stop> {
    let chars = chars.filter(|chars| !matches!(chars, Val::None | Val::Undefined));
    let set: Option<&str> = chars.as_ref().and_then(Val::as_str);
    budget.work(text.len().saturating_mul(set.map_or(1, str::len)))?;
    let drop = |c: char| set.map_or_else(|| c.is_whitespace(), |set| set.contains(c));
    let text = if at_start { text.trim_start_matches(drop) } else { text };
    Val::str(budget, if at_end { text.trim_end_matches(drop) } else { text })
}

pub(super) fn replace(
    budget: &Budget,
    text: &str,
    old: &Val,
    new: &Val,
    count: Option<usize>,
) -> Result<Val, Stop> {
    let (old, new) = (old.as_str().unwrap_or_default(), new.as_str().unwrap_or_default());
    let mut out = TextBuilder::new(budget)?;
    let mut end = 0;
    for (start, found) in text.match_indices(old).take(count.unwrap_or(usize::MAX)) {
        out.push_str(&text[end..start])?;
        out.push_str(new)?;
        end = start + found.len();
    }
    out.push_str(&text[end..])?;
    Ok(out.finish())
}

fn indent(budget: &Budget, text: &str, args: &mut CallArgs) -> Result<Val, Stop> {
    let width = args.take(0, "width").unwrap_or(Val::Int(4));
    let (first, blank) = (args.flag(1, "first"), args.flag(2, "blank"));
    let spaces;
    let indent = match width.as_int() {
        Some(n) => {
            spaces = " ".repeat(usize::try_from(n).unwrap_or(0).min(MAX_WIDTH));
            spaces.as_str()
        }
        None => width.as_str().unwrap_or_default(),
    };
    let mut out = TextBuilder::new(budget)?;
    for (idx, line) in text.split('\n').enumerate() {
        if idx > 0 {
            out.push('\n')?;
        }
        if (idx > 0 || first) && (blank || !line.is_empty()) {
            out.push_str(indent)?;
        }
        out.push_str(line)?;
    }
    Ok(out.finish())
}

pub(super) fn split(
    budget: &Budget,
    text: &str,
    separator: Option<Val>,
    most: Option<usize>,
    from_end: bool,
) -> Result<Val, Stop> {
    let mut out = ListBuilder::new(budget)?;
    let separator = separator.filter(|value| !matches!(value, Val::None | Val::Undefined));
    let parts = most.map_or(usize::MAX, |most| most.saturating_add(1));
    match separator.as_ref().and_then(Val::as_str) {
        Some("") => return Err(Stop::failed("the separator is empty")),
        Some(separator) if from_end => {
            for part in text.rsplitn(parts, separator) {
                out.push(Val::str(budget, part)?)?;
            }
            out.reverse();
        }
        Some(separator) => {
            for part in text.splitn(parts, separator) {
                out.push(Val::str(budget, part)?)?;
            }
        }
        None => {
            let mut remaining = text.trim_start();
            let mut n = 1;
            while !remaining.is_empty() {
                let end = remaining.find(char::is_whitespace).filter(|_| n < parts);
                let (part, after) = remaining.split_at(end.unwrap_or(remaining.len()));
                out.push(Val::str(budget, part)?)?;
                remaining = after.trim_start();
                n += 1;
            }
        }
    }
    out.finish()
}

pub(super) fn join(budget: &Budget, values: &Val, separator: &str) -> Result<Val, Stop> {
    let mut out = TextBuilder::new(budget)?;
    for (idx, value) in values.items(budget)?.items.iter().enumerate() {
        if idx > 0 {
            out.push_str(separator)?;
        }
        python::write_str(&mut out, value, budget)?;
    }
    Ok(out.finish())
}

/// `batch(n)`: lists of `n` items; `slice(n)`: `n` lists.
fn chunks(budget: &Budget, name: &str, value: &Val, args: &mut CallArgs) -> Result<Val, Stop> {
    let n = args.int(0, "count")?.and_then(|n| usize::try_from(n).ok()).filter(|&n| n > 0);
    let n = n.ok_or_else(|| Stop::failed(format!("{name} needs a count above 0")))?;
    let fill = args.take(1, "fill_with");
    let items = value.items(budget)?;
    let mut out = ListBuilder::new(budget)?;
    let len = items.items.len();
    let n_lists = if name == "batch" { len.div_ceil(n) } else { n };
    let mut start = 0;
    for idx in 0..n_lists {
        let size = if name == "batch" { n.min(len - start) } else { len / n + usize::from(idx < len % n) };
        let mut list = ListBuilder::new(budget)?;
        list.extend(&items.items[start..start + size])?;
        start += size;
        let full = if name == "batch" { n } else { len.div_ceil(n) };
        if let Some(fill) = &fill {
            for _ in size..full {
                list.push(fill.clone())?;
            }
        }
        out.push(list.finish()?)?;
    }
    out.finish()
}

fn group_by(it: &Interpreter<'_>, value: &Val, attribute: &Val) -> Result<Val, Stop> {
    let budget = it.budget;
    let mut sorted = ListBuilder::new(budget)?;
    for item in &value.items(budget)?.items {
        sorted.push(Val::tuple(budget, vec![by_path(it, item, attribute)?, item.clone()])?)?;
    }
    let key = |pair: &Val| it.item(pair, &Val::Int(0));
    sorted.sort_by(|a, b| compare_keys(&key(a)?, &key(b)?, true, budget))?;
    let mut out = ListBuilder::new(budget)?;
    let mut group: Option<(Val, ListBuilder<'_>)> = None;
    for pair in &sorted.finish()?.items(budget)?.items {
        let (name, item) = (key(pair)?, it.item(pair, &Val::Int(1))?);
        match &mut group {
            Some((known, items)) if known.equals(&name, budget)? => items.push(item)?,
            _ => {
                let mut items = ListBuilder::new(budget)?;
                items.push(item)?;
                if let Some((name, items)) = group.replace((name, items)) {
                    out.push(Val::tuple(budget, vec![name, items.finish()?])?)?;
                }
            }
        }
    }
    if let Some((name, items)) = group {
        out.push(Val::tuple(budget, vec![name, items.finish()?])?)?;
    }
    out.finish()
}

/// A format specification: `[0][width][.precision][type]`.
#[derive(Default)]
struct Spec {
    zero: bool,
    left: Option<bool>,
    width: usize,
    precision: Option<usize>,
    kind: Option<char>,
}

impl Spec {
    fn parse(text: &str) -> Result<Spec, Stop> {
        let bad = || Stop::failed(format!("the format {} is not supported", crate::error::quoted(text)));
        let mut spec = Spec::default();
        let mut remaining = text;
        if let Some(after) = remaining.strip_prefix(['-', '<']) {
            (spec.left, remaining) = (Some(true), after);
        } else if let Some(after) = remaining.strip_prefix('>') {
            (spec.left, remaining) = (Some(false), after);
        }
        if let Some(after) = remaining.strip_prefix('0') {
            (spec.zero, remaining) = (true, after);
        }
        let number = |text: &mut &str| {
            let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
            let (digits, after) = text.split_at(end);
            *text = after;
            if digits.is_empty() { Some(0) } else { digits.parse().ok().filter(|&n| n <= MAX_WIDTH) }
        };
        spec.width = number(&mut remaining).ok_or_else(bad)?;
        if let Some(after) = remaining.strip_prefix('.') {
            remaining = after;
            spec.precision = Some(number(&mut remaining).ok_or_else(bad)?);
        }
        let mut kinds = remaining.chars();
        spec.kind = kinds.next();
        if kinds.next().is_some() { Err(bad()) } else { Ok(spec) }
    }

    fn write(&self, out: &mut TextBuilder<'_>, value: &Val, budget: &Budget) -> Result<(), Stop> {
        let mismatch = |kind| Stop::failed(format!("the format {kind} does not fit a {}", value.kind()));
        let text = match self.kind {
            Some(kind @ ('d' | 'i' | 'u' | 'x' | 'X' | 'o')) => {
                let number = to_int(value, budget)?
                    .and_then(|number| number.as_int())
                    .ok_or_else(|| mismatch(kind))?;
                let digits = match kind {
                    'x' => format!("{:x}", number.unsigned_abs()),
                    'X' => format!("{:X}", number.unsigned_abs()),
                    'o' => format!("{:o}", number.unsigned_abs()),
                    _ => number.unsigned_abs().to_string(),
                };
                Val::str(budget, &if number < 0 { format!("-{digits}") } else { digits })?
            }
            Some(kind @ ('f' | 'F')) => {
                let number = value.as_float().ok_or_else(|| mismatch(kind))?;
                Val::str(budget, &format!("{number:.*}", self.precision.unwrap_or(6)))?
            }
            Some('r') => {
                let mut out = TextBuilder::new(budget)?;
                python::write_repr(&mut out, value, budget)?;
                out.finish()
            }
            Some('s') | None => python::to_str(value, budget)?,
            Some(kind) => return Err(Stop::failed(format!("the format {kind} is not supported"))),
        };
        let text = text.as_str().unwrap_or_default();
        let is_text = matches!(self.kind, Some('s' | 'r') | None);
        let text = match self.precision.filter(|_| is_text).and_then(|n| text.char_indices().nth(n)) {
            Some((end, _)) => &text[..end],
            None => text,
        };
        let padding = self.width.saturating_sub(text.chars().count());
        // Without a type, `str.format` aligns text on the left.
        let by_default = self.kind.is_none() && value.as_str().is_some();
        if self.left.unwrap_or(by_default) {
            out.push_str(text)?;
            return out.repeat(" ", padding);
        }
        if self.zero && !is_text {
            let (sign, digits) = text.split_at(usize::from(text.starts_with('-')));
            out.push_str(sign)?;
            out.repeat("0", padding)?;
            return out.push_str(digits);
        }
        out.repeat(" ", padding)?;
        out.push_str(text)
    }
}

/// `"%s: %d" % values`.
pub(super) fn percent_format(format: &str, values: &[Val], budget: &Budget) -> Result<Val, Stop> {
    let mut out = TextBuilder::new(budget)?;
    let mut values = values.iter();
    let mut remaining = format;
    while let Some((text, after)) = remaining.split_once('%') {
        out.push_str(text)?;
        if let Some(after) = after.strip_prefix('%') {
            out.push('%')?;
            remaining = after;
            continue;
        }
        let end = after.find(|c: char| c.is_ascii_alphabetic());
        let end = end.ok_or_else(|| Stop::failed("a % without a format"))? + 1;
        let value = values.next().ok_or_else(|| Stop::failed("too few values for the format"))?;
        budget.step()?;
        Spec::parse(&after[..end])?.write(&mut out, value, budget)?;
        remaining = &after[end..];
    }
    out.push_str(remaining)?;
    Ok(out.finish())
}

/// `"{} {name}".format(values)`.
pub(super) fn brace_format(budget: &Budget, format: &str, args: &CallArgs) -> Result<Val, Stop> {
    let mut out = TextBuilder::new(budget)?;
    let mut next = 0;
    let mut remaining = format;
    while let Some(at) = remaining.find(['{', '}']) {
        let (text, after) = remaining.split_at(at);
        out.push_str(text)?;
        if let Some(after) = after.strip_prefix("{{").or_else(|| after.strip_prefix("}}")) {
            out.push_str(&remaining[at..=at])?;
            remaining = after;
            continue;
        }
        let (field, after) = after
            .strip_prefix('{')
            .and_then(|field| field.split_once('}'))
            .ok_or_else(|| Stop::failed("a brace without its partner in a format"))?;
        let (name, spec) = field.split_once(':').unwrap_or((field, ""));
        let value = match name.parse::<usize>() {
            Ok(idx) => args.positional().get(idx),
            Err(_) if name.is_empty() => {
                next += 1;
                args.positional().get(next - 1)
            }
            Err(_) => args.named().iter().find(|(known, _)| &**known == name).map(|(_, value)| value),
        };
        let value = value.ok_or_else(|| {
            Stop::failed(format!("no value for {} in a format", crate::error::quoted(name)))
        })?;
        budget.step()?;
        Spec::parse(spec)?.write(&mut out, value, budget)?;
        remaining = after;
    }
    out.push_str(remaining)?;
    Ok(out.finish())
}
