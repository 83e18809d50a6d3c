//! Jinja's tests: `value is defined`.

use super::error::Stop;
use super::eval::{CallArgs, Interpreter};
use super::ops;
use super::program::CompareOp;
use super::value::Val;

/// Whether `value is name(args)`.
pub(super) fn apply(it: &Interpreter<'_>, name: &str, value: &Val, mut args: CallArgs) -> Result<bool, Stop> {
    let compare = |op, args: &mut CallArgs| ops::compare(op, value, &args.require(0, "other")?, it.budget);
    Ok(match name {
        "defined" => !matches!(value, Val::Undefined),
        "undefined" => matches!(value, Val::Undefined),
        "none" => matches!(value, Val::None),
        "boolean" => matches!(value, Val::Bool(_)),
        "true" => matches!(value, Val::Bool(true)),
        "false" => matches!(value, Val::Bool(false)),
        "integer" | "int" => matches!(value, Val::Int(_)),
        "float" => matches!(value, Val::Float(_)),
        "number" => matches!(value, Val::Int(_) | Val::Float(_) | Val::Bool(_)),
        "string" => value.as_str().is_some(),
        "mapping" => matches!(value, Val::Map(_)),
        "sequence" => matches!(value, Val::List(_) | Val::Map(_)) || value.as_str().is_some(),
        "iterable" => {
            matches!(value, Val::List(_) | Val::Map(_) | Val::Undefined) || value.as_str().is_some()
        }
        "callable" => matches!(value, Val::Macro(_) | Val::Function(_)),
        "odd" | "even" => {
            let number = value.as_int().ok_or_else(|| Stop::failed(format!("{name} needs an integer")))?;
            (number % 2 == 0) == (name == "even")
        }
        "divisibleby" => match (value.as_int(), args.int(0, "num")?) {
            (Some(value), Some(by)) => {
                value.checked_rem(by).ok_or_else(|| Stop::failed("division by zero"))? == 0
            }
            _ => return Err(Stop::failed("divisibleby needs two integers")),
        },
        "eq" | "equalto" | "==" => compare(CompareOp::Eq, &mut args)?,
        "ne" | "!=" => compare(CompareOp::Ne, &mut args)?,
        "lt" | "lessthan" | "<" => compare(CompareOp::Lt, &mut args)?,
        "le" | "<=" => compare(CompareOp::Lte, &mut args)?,
        "gt" | "greaterthan" | ">" => compare(CompareOp::Gt, &mut args)?,
        "ge" | ">=" => compare(CompareOp::Gte, &mut args)?,
        "in" => compare(CompareOp::In, &mut args)?,
        "sameas" => {
            let other = args.require(0, "other")?;
            value.kind() == other.kind() && value.equals(&other, it.budget)?
        }
        "lower" | "upper" => {
            let text = value.as_str().unwrap_or_default();
            it.budget.work(text.len())?;
            let (lower, upper) = (text.chars().any(char::is_lowercase), text.chars().any(char::is_uppercase));
            if name == "lower" { lower && !upper } else { upper && !lower }
        }
        "startingwith" | "endingwith" => {
            let (text, part) = (value.as_str().unwrap_or_default(), args.text(0, "part")?);
            let part = part.as_str().unwrap_or_default();
            it.budget.work(part.len())?;
            if name == "startingwith" { text.starts_with(part) } else { text.ends_with(part) }
        }
        _ => return Err(Stop::failed(format!("unknown test: test {name} is unknown"))),
    })
}
