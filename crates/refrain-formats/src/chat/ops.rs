//! Operators.

use super::budget::Budget;
use super::error::Stop;
use super::program::{BinaryOp, CompareOp};
use super::python;
use super::value::{ListBuilder, TextBuilder, Val};

pub(super) fn binary(op: BinaryOp, left: Val, right: Val, budget: &Budget) -> Result<Val, Stop> {
    match op {
        BinaryOp::Eq => compare(CompareOp::Eq, &left, &right, budget).map(Val::Bool),
        BinaryOp::Ne => compare(CompareOp::Ne, &left, &right, budget).map(Val::Bool),
        BinaryOp::Lt => compare(CompareOp::Lt, &left, &right, budget).map(Val::Bool),
        BinaryOp::Lte => compare(CompareOp::Lte, &left, &right, budget).map(Val::Bool),
        BinaryOp::Gt => compare(CompareOp::Gt, &left, &right, budget).map(Val::Bool),
        BinaryOp::Gte => compare(CompareOp::Gte, &left, &right, budget).map(Val::Bool),
        BinaryOp::In => compare(CompareOp::In, &left, &right, budget).map(Val::Bool),
        // The caller evaluates the right side only where it decides.
        BinaryOp::ScAnd | BinaryOp::ScOr => Ok(right),
        BinaryOp::Concat => {
            let mut out = TextBuilder::new(budget)?;
            python::write_str(&mut out, &left, budget)?;
            python::write_str(&mut out, &right, budget)?;
            Ok(out.finish())
        }
        BinaryOp::Add => add(&left, &right, budget),
        BinaryOp::Mul => multiply(&left, &right, budget),
        BinaryOp::Rem if left.as_str().is_some() => {
            let args = match &right {
                Val::List(list) if list.is_tuple => list.items.as_slice(),
                other => std::slice::from_ref(other),
            };
            super::filters::percent_format(left.as_str().unwrap_or_default(), args, budget)
        }
        BinaryOp::Sub | BinaryOp::Div | BinaryOp::FloorDiv | BinaryOp::Rem | BinaryOp::Pow => {
            arithmetic(op, &left, &right)
        }
    }
}

pub(super) fn compare(op: CompareOp, left: &Val, right: &Val, budget: &Budget) -> Result<bool, Stop> {
    Ok(match op {
        CompareOp::Eq => left.equals(right, budget)?,
        CompareOp::Ne => !left.equals(right, budget)?,
        CompareOp::Lt => left.compare(right, budget)?.is_lt(),
        CompareOp::Lte => left.compare(right, budget)?.is_le(),
        CompareOp::Gt => left.compare(right, budget)?.is_gt(),
        CompareOp::Gte => left.compare(right, budget)?.is_ge(),
        CompareOp::In => contains(right, left, budget)?,
        CompareOp::NotIn => !contains(right, left, budget)?,
    })
}

pub(super) fn contains(container: &Val, value: &Val, budget: &Budget) -> Result<bool, Stop> {
    match container {
        Val::Undefined => Ok(false),
        Val::Map(map) => Ok(map.get(budget, value)?.is_some()),
        Val::List(list) => {
            for item in &list.items {
                if item.equals(value, budget)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        _ => match (container.as_str(), value.as_str()) {
            (Some(text), Some(part)) => {
                budget.work(text.len())?;
                Ok(text.contains(part))
            }
            _ => Err(Stop::failed(format!("cannot look for a {} in a {}", value.kind(), container.kind()))),
        },
    }
}

pub(super) fn negate(value: &Val) -> Result<Val, Stop> {
    match (value.as_int(), value.as_float()) {
        (Some(value), _) => value.checked_neg().map(Val::Int).ok_or_else(overflow),
        (_, Some(value)) => Ok(Val::Float(-value)),
        _ => Err(Stop::failed(format!("a {} cannot be negated", value.kind()))),
    }
}

fn overflow() -> Stop {
    Stop::failed("the number is too large")
}

fn unsupported(op: &str, left: &Val, right: &Val) -> Stop {
    Stop::failed(format!("{op} does not work on a {} and a {}", left.kind(), right.kind()))
}

fn add(left: &Val, right: &Val, budget: &Budget) -> Result<Val, Stop> {
    if let (Some(left), Some(right)) = (left.as_str(), right.as_str()) {
        let mut out = TextBuilder::new(budget)?;
        out.push_str(left)?;
        out.push_str(right)?;
        return Ok(out.finish());
    }
    if let (Val::List(a), Val::List(b)) = (left, right)
        && a.is_tuple == b.is_tuple
    {
        let mut out = ListBuilder::new(budget)?;
        out.extend(&a.items)?;
        out.extend(&b.items)?;
        return if a.is_tuple { out.finish_tuple() } else { out.finish() };
    }
    match (left.as_int(), right.as_int(), left.as_float(), right.as_float()) {
        (Some(a), Some(b), ..) => a.checked_add(b).map(Val::Int).ok_or_else(overflow),
        (.., Some(a), Some(b)) => Ok(Val::Float(a + b)),
        _ => Err(unsupported("+", left, right)),
    }
}

fn multiply(left: &Val, right: &Val, budget: &Budget) -> Result<Val, Stop> {
    for (value, n) in [(left, right), (right, left)] {
        let Some(n) = n.as_int() else { continue };
        // More than fits in memory is refused by the budget.
        let n = usize::try_from(n.max(0)).unwrap_or(usize::MAX);
        if let Some(text) = value.as_str() {
            let mut out = TextBuilder::new(budget)?;
            if !text.is_empty() {
                out.repeat(text, n)?;
            }
            return Ok(out.finish());
        }
        if let Val::List(list) = value {
            let mut out = ListBuilder::new(budget)?;
            for _ in 0..if list.items.is_empty() { 0 } else { n } {
                out.extend(&list.items)?;
            }
            return if list.is_tuple { out.finish_tuple() } else { out.finish() };
        }
    }
    match (left.as_int(), right.as_int(), left.as_float(), right.as_float()) {
        (Some(a), Some(b), ..) => a.checked_mul(b).map(Val::Int).ok_or_else(overflow),
        (.., Some(a), Some(b)) => Ok(Val::Float(a * b)),
        _ => Err(unsupported("*", left, right)),
    }
}

fn arithmetic(op: BinaryOp, left: &Val, right: &Val) -> Result<Val, Stop> {
    let sign = match op {
        BinaryOp::Sub => "-",
        BinaryOp::Div => "/",
        BinaryOp::FloorDiv => "//",
        BinaryOp::Rem => "%",
        _ => "**",
    };
    let (Some(x), Some(y)) = (left.as_float(), right.as_float()) else {
        return Err(unsupported(sign, left, right));
    };
    if y == 0.0 && matches!(op, BinaryOp::Div | BinaryOp::FloorDiv | BinaryOp::Rem) {
        return Err(Stop::failed("division by zero"));
    }
    if let (Some(a), Some(b)) = (left.as_int(), right.as_int()) {
        let floor = |a: i128, b: i128| {
            let (quotient, remainder) = (a.checked_div(b)?, a.checked_rem(b)?);
            let inexact = remainder != 0 && (remainder < 0) != (b < 0);
            Some(if inexact { (quotient - 1, remainder + b) } else { (quotient, remainder) })
        };
        let result = match op {
            BinaryOp::Sub => a.checked_sub(b),
            BinaryOp::FloorDiv => floor(a, b).map(|(quotient, _)| quotient),
            BinaryOp::Rem => floor(a, b).map(|(_, remainder)| remainder),
            BinaryOp::Pow if b >= 0 => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
            _ => return Ok(Val::Float(if op_is_division(op) { x / y } else { x.powf(y) })),
        };
        return result.map(Val::Int).ok_or_else(overflow);
    }
    Ok(Val::Float(match op {
        BinaryOp::Sub => x - y,
        BinaryOp::Div => x / y,
        BinaryOp::FloorDiv => (x / y).floor(),
        BinaryOp::Rem => x - y * (x / y).floor(),
        _ => x.powf(y),
    }))
}

fn op_is_division(op: BinaryOp) -> bool {
    matches!(op, BinaryOp::Div)
}

/// `value[idx]`; undefined outside of it.
pub(super) fn item(value: &Val, idx: i128, budget: &Budget) -> Result<Val, Stop> {
    let position = |len: usize| {
        let idx = if idx < 0 { idx.checked_add(len as i128)? } else { idx };
        usize::try_from(idx).ok().filter(|&idx| idx < len)
    };
    if let Val::List(list) = value {
        return Ok(position(list.items.len()).map(|idx| list.items[idx].clone()).unwrap_or_default());
    }
    let Some(text) = value.as_str() else { return Ok(Val::Undefined) };
    budget.work(text.len())?;
    match position(text.chars().count()).and_then(|idx| text.chars().nth(idx)) {
        Some(c) => Val::str(budget, c.encode_utf8(&mut [0; 4])),
        None => Ok(Val::Undefined),
    }
}

/// `value[start:stop:step]`.
pub(super) fn slice(value: &Val, bounds: [Option<i128>; 3], budget: &Budget) -> Result<Val, Stop> {
    if bounds[2] == Some(0) {
        return Err(Stop::failed("a slice with a step of 0"));
    }
    if let Some(text) = value.as_str() {
        budget.work(text.len())?;
        let n_chars = text.chars().count();
        if bounds[2].unwrap_or(1) == 1 {
            // A range of characters is a range of bytes.
            let (start, stop) = range(bounds, n_chars);
            let byte = |idx: i128| {
                let mut all = text.char_indices().map(|(at, _)| at).chain([text.len()]);
                all.nth(idx as usize).unwrap_or(text.len())
            };
            return Val::str(budget, if start < stop { &text[byte(start)..byte(stop)] } else { "" });
        }
        let _charge = budget.charge(n_chars * size_of::<char>())?;
        let chars: Vec<char> = text.chars().collect();
        let mut out = TextBuilder::new(budget)?;
        for idx in indices(bounds, n_chars) {
            out.push(chars[idx])?;
        }
        return Ok(out.finish());
    }
    let items: &[Val] = match value {
        Val::List(list) => &list.items,
        Val::Undefined | Val::None => &[],
        other => return Err(Stop::failed(format!("a {} cannot be sliced", other.kind()))),
    };
    let mut out = ListBuilder::new(budget)?;
    for idx in indices(bounds, items.len()) {
        out.push(items[idx].clone())?;
    }
    if matches!(value, Val::List(list) if list.is_tuple) { out.finish_tuple() } else { out.finish() }
}

/// First index and end of a slice, as Python clamps them.
fn range([start, stop, step]: [Option<i128>; 3], len: usize) -> (i128, i128) {
    let (len, forward) = (len as i128, step.unwrap_or(1) > 0);
    let (low, high) = if forward { (0, len) } else { (-1, len - 1) };
    let clamp = |idx: i128| (if idx < 0 { idx.saturating_add(len) } else { idx }).clamp(low, high);
    let (first, last) = if forward { (low, high) } else { (high, low) };
    (start.map_or(first, clamp), stop.map_or(last, clamp))
}

fn indices(bounds: [Option<i128>; 3], len: usize) -> impl Iterator<Item = usize> {
    let step = bounds[2].unwrap_or(1);
    let (start, stop) = range(bounds, len);
    let inside = move |&idx: &i128| if step > 0 { idx < stop } else { idx > stop };
    std::iter::successors(Some(start), move |idx| idx.checked_add(step))
        .take_while(inside)
        .map(|idx| idx as usize)
}
