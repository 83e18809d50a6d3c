//! Python's methods of strings and dictionaries.

use super::budget::Budget;
use super::error::Stop;
use super::eval::{CallArgs, Interpreter};
use super::filters;
use super::value::{ListBuilder, Val};

/// Calls `object.name(args)`.
pub(super) fn call(it: &mut Interpreter<'_>, object: &Val, name: &str, args: CallArgs) -> Result<Val, Stop> {
    let budget = it.budget;
    let result = match object {
        Val::Map(_) => dict_method(budget, object, name, args)?,
        Val::Loop(state) if name == "cycle" => {
            let values = args.positional();
            match values.len() {
                0 => return Err(Stop::failed("cycle() needs values")),
                n => Some(values[state.idx.get() % n].clone()),
            }
        }
        Val::List(list) if name == "count" => {
            let mut n = 0;
            for item in &list.items {
                n += i128::from(item.equals(args.positional().first().unwrap_or(&Val::Undefined), budget)?);
            }
            Some(Val::Int(n))
        }
        _ if object.as_str().is_some() => string_method(budget, object, name, args)?,
        _ => None,
    };
    result.ok_or_else(|| Stop::failed(format!("unknown method: a {} has no method {name}", object.kind())))
}

fn dict_method(budget: &Budget, object: &Val, name: &str, mut args: CallArgs) -> Result<Option<Val>, Stop> {
    let Val::Map(map) = object else { return Ok(None) };
    let mut out = ListBuilder::new(budget)?;
    match name {
        "get" => {
            let key = args.require(0, "key")?;
            let found = map.get(budget, &key)?.cloned();
            return Ok(Some(found.or_else(|| args.take(1, "default")).unwrap_or(Val::None)));
        }
        "keys" => map.entries.iter().try_for_each(|(key, _)| out.push(key.clone()))?,
        "values" => map.entries.iter().try_for_each(|(_, value)| out.push(value.clone()))?,
        "items" => return filters::items(budget, object).map(Some),
        _ => return Ok(None),
    }
    out.finish().map(Some)
}

fn string_method(budget: &Budget, object: &Val, name: &str, mut args: CallArgs) -> Result<Option<Val>, Stop> {
    let text = object.as_str().unwrap_or_default();
    budget.work(text.len())?;
    let every = |is: fn(char) -> bool| Val::Bool(!text.is_empty() && text.chars().all(is));
    let index = |at: Option<usize>| Val::Int(at.map_or(-1, |at| text[..at].chars().count() as i128));
    Ok(Some(match name {
        "upper" | "lower" | "title" | "capitalize" => filters::letter_case(budget, name, text)?,
        "strip" => filters::strip(budget, text, args.take(0, "chars"), true, true)?,
        "lstrip" => filters::strip(budget, text, args.take(0, "chars"), true, false)?,
        "rstrip" => filters::strip(budget, text, args.take(0, "chars"), false, true)?,
        "replace" => {
            let (old, new, n) = (args.text(0, "old")?, args.text(1, "new")?, args.int(2, "count")?);
            filters::replace(budget, text, &old, &new, n.and_then(|n| usize::try_from(n).ok()))?
        }
        "split" | "rsplit" => {
            let n = args.int(1, "maxsplit")?.and_then(|n| usize::try_from(n).ok());
            filters::split(budget, text, args.take(0, "sep"), n, name == "rsplit")?
        }
        "splitlines" => {
            let keep_ends = args.flag(0, "keepends");
            let mut out = ListBuilder::new(budget)?;
            for line in text.split_inclusive('\n') {
                let end = line.trim_end_matches('\n');
                let bare = end.strip_suffix('\r').filter(|_| end.len() < line.len()).unwrap_or(end);
                out.push(Val::str(budget, if keep_ends { line } else { bare })?)?;
            }
            out.finish()?
        }
        "join" => filters::join(budget, &args.require(0, "values")?, text)?,
        "startswith" | "endswith" => {
            let affixes = args.require(0, "affix")?;
            let affixes = match &affixes {
                Val::List(list) => list.items.as_slice(),
                one => std::slice::from_ref(one),
            };
            let mut found = false;
            for affix in affixes {
                let no = || Stop::failed(format!("{name} needs a string, not a {}", affix.kind()));
                let affix = affix.as_str().ok_or_else(no)?;
                budget.step()?;
                budget.work(affix.len())?;
                found |= if name == "startswith" { text.starts_with(affix) } else { text.ends_with(affix) };
            }
            Val::Bool(found)
        }
        "removeprefix" | "removesuffix" => {
            let affix = args.text(0, "affix")?;
            let affix = affix.as_str().unwrap_or_default();
            let bare =
                if name == "removeprefix" { text.strip_prefix(affix) } else { text.strip_suffix(affix) };
            Val::str(budget, bare.unwrap_or(text))?
        }
        "find" => index(text.find(args.text(0, "sub")?.as_str().unwrap_or_default())),
        "rfind" => index(text.rfind(args.text(0, "sub")?.as_str().unwrap_or_default())),
        "count" => Val::Int(text.matches(args.text(0, "sub")?.as_str().unwrap_or_default()).count() as i128),
        "format" => filters::brace_format(budget, text, &args)?,
        "isdigit" | "isnumeric" => every(char::is_numeric),
        "isalpha" => every(char::is_alphabetic),
        "isalnum" => every(char::is_alphanumeric),
        "isspace" => every(char::is_whitespace),
        "isascii" => Val::Bool(text.is_ascii()),
        "islower" => Val::Bool(text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)),
        "isupper" => Val::Bool(text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)),
        _ => return Ok(None),
    }))
}
