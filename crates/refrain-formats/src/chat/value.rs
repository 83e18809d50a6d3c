//! Values of a template. Each holds the memory it is charged for, and none can contain itself.

use std::cell::Cell;
use std::cmp::Ordering;
use std::rc::Rc;
use std::sync::Arc;

use serde_json::Value as Json;

use super::budget::{Budget, Charge, MAX_VALUE_DEPTH};
use super::error::{Stop, StopKind};
use super::program::ForLoop;

/// Memory of a value besides its elements: reference counts, charge, length.
const HEADER_BYTES: usize = 64;
const VAL_BYTES: usize = size_of::<Val>();

#[derive(Clone, Default)]
pub(super) enum Val {
    #[default]
    Undefined,
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    /// Text of the template itself.
    Literal(Arc<str>),
    Str(Rc<Text>),
    List(Rc<List>),
    Map(Rc<Dict>),
    /// Namespaces change after they are made. Values hold an index, so a namespace in itself is no cycle.
    Namespace(usize),
    Macro(usize),
    Loop(Rc<LoopState>),
    Function(GlobalFunction),
}

pub(super) struct Text {
    text: String,
    _charge: Charge,
}

pub(super) struct List {
    pub(super) items: Vec<Val>,
    pub(super) is_tuple: bool,
    depth: usize,
    _charge: Charge,
}

/// Entries in the order of insertion.
pub(super) struct Dict {
    pub(super) entries: Vec<(Val, Val)>,
    depth: usize,
    _charge: Charge,
}

/// The variable `loop`.
pub(super) struct LoopState {
    pub(super) items: Rc<List>,
    pub(super) idx: Cell<usize>,
    pub(super) nesting: usize,
    pub(super) source: Arc<ForLoop>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum GlobalFunction {
    Range,
    Dict,
    Namespace,
    RaiseException,
    StrftimeNow,
}

impl Val {
    pub(super) fn str(budget: &Budget, text: &str) -> Result<Val, Stop> {
        let charge = budget.charge(HEADER_BYTES + text.len())?;
        Ok(Val::Str(Rc::new(Text { text: text.to_owned(), _charge: charge })))
    }

    pub(super) fn list(budget: &Budget, items: Vec<Val>) -> Result<Val, Stop> {
        List::new(budget, items, false).map(Val::List)
    }

    pub(super) fn tuple(budget: &Budget, items: Vec<Val>) -> Result<Val, Stop> {
        List::new(budget, items, true).map(Val::List)
    }

    /// Later entries replace earlier ones of the same key.
    pub(super) fn map(budget: &Budget, pairs: impl IntoIterator<Item = (Val, Val)>) -> Result<Val, Stop> {
        let mut entries: Vec<(Val, Val)> = Vec::new();
        for (key, value) in pairs {
            budget.step()?;
            match find(budget, &entries, &key)? {
                Some(idx) => entries[idx].1 = value,
                None => entries.push((key, value)),
            }
        }
        Dict::build(budget, entries)
    }

    pub(super) fn from_json(budget: &Budget, json: &Json, depth: usize) -> Result<Val, Stop> {
        if depth > MAX_VALUE_DEPTH {
            return Err(StopKind::Depth { limit: MAX_VALUE_DEPTH }.into());
        }
        budget.step()?;
        Ok(match json {
            Json::Null => Val::None,
            Json::Bool(value) => Val::Bool(*value),
            Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
                (Some(value), ..) => Val::Int(value.into()),
                (_, Some(value), _) => Val::Int(value.into()),
                (.., value) => Val::Float(value.unwrap_or(f64::NAN)),
            },
            Json::String(text) => Val::str(budget, text)?,
            Json::Array(items) => {
                let items: Result<_, Stop> =
                    items.iter().map(|item| Val::from_json(budget, item, depth + 1)).collect();
                Val::list(budget, items?)?
            }
            Json::Object(map) => {
                let entries: Result<_, Stop> = map
                    .iter()
                    .map(|(key, value)| {
                        Ok((Val::str(budget, key)?, Val::from_json(budget, value, depth + 1)?))
                    })
                    .collect();
                Dict::build(budget, entries?)?
            }
        })
    }

    pub(super) fn as_str(&self) -> Option<&str> {
        match self {
            Val::Literal(text) => Some(text),
            Val::Str(text) => Some(&text.text),
            _ => None,
        }
    }

    /// An integer, also one that is a bool, as in Python.
    pub(super) fn as_int(&self) -> Option<i128> {
        match *self {
            Val::Int(value) => Some(value),
            Val::Bool(value) => Some(value.into()),
            _ => None,
        }
    }

    pub(super) fn as_float(&self) -> Option<f64> {
        match *self {
            Val::Float(value) => Some(value),
            _ => self.as_int().map(|value| value as f64),
        }
    }

    pub(super) fn is_true(&self) -> bool {
        match self {
            Val::Undefined | Val::None => false,
            Val::Bool(value) => *value,
            Val::Int(value) => *value != 0,
            Val::Float(value) => *value != 0.0,
            Val::Literal(text) => !text.is_empty(),
            Val::Str(text) => !text.text.is_empty(),
            Val::List(list) => !list.items.is_empty(),
            Val::Map(map) => !map.entries.is_empty(),
            Val::Namespace(_) | Val::Macro(_) | Val::Loop(_) | Val::Function(_) => true,
        }
    }

    /// The type, as Python programmers call it.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Val::Undefined => "undefined",
            Val::None => "none",
            Val::Bool(_) => "bool",
            Val::Int(_) | Val::Float(_) => "number",
            Val::Literal(_) | Val::Str(_) => "string",
            Val::List(list) if list.is_tuple => "tuple",
            Val::List(_) => "list",
            Val::Map(_) => "dictionary",
            Val::Namespace(_) => "namespace",
            Val::Macro(_) => "macro",
            Val::Loop(_) => "loop",
            Val::Function(_) => "function",
        }
    }

    fn depth(&self) -> usize {
        match self {
            Val::List(list) => list.depth,
            Val::Map(map) => map.depth,
            Val::Loop(state) => state.items.depth,
            _ => 0,
        }
    }

    /// The items that a loop over this value sees.
    pub(super) fn items(&self, budget: &Budget) -> Result<Rc<List>, Stop> {
        let mut items = ListBuilder::new(budget)?;
        match self {
            Val::List(list) => {
                budget.work(list.items.len() * VAL_BYTES)?;
                return Ok(list.clone());
            }
            Val::Undefined => {}
            Val::Map(map) => {
                for (key, _) in &map.entries {
                    items.push(key.clone())?;
                }
            }
            Val::Literal(_) | Val::Str(_) => {
                for c in self.as_str().unwrap_or_default().chars() {
                    items.push(Val::str(budget, c.encode_utf8(&mut [0; 4]))?)?;
                }
            }
            other => return Err(Stop::failed(format!("a {} cannot be iterated over", other.kind()))),
        }
        items.finish_list(false)
    }

    pub(super) fn equals(&self, other: &Val, budget: &Budget) -> Result<bool, Stop> {
        budget.step()?;
        Ok(match (self, other) {
            (Val::Undefined, Val::Undefined) | (Val::None, Val::None) => true,
            (Val::List(a), Val::List(b)) => {
                if a.is_tuple != b.is_tuple || a.items.len() != b.items.len() {
                    return Ok(false);
                }
                for (a, b) in a.items.iter().zip(&b.items) {
                    if !a.equals(b, budget)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Val::Map(a), Val::Map(b)) => {
                if a.entries.len() != b.entries.len() {
                    return Ok(false);
                }
                for (key, value) in &a.entries {
                    match b.get(budget, key)? {
                        Some(other) if value.equals(other, budget)? => {}
                        _ => return Ok(false),
                    }
                }
                true
            }
            (Val::Namespace(a), Val::Namespace(b)) | (Val::Macro(a), Val::Macro(b)) => a == b,
            (Val::Function(a), Val::Function(b)) => a == b,
            (Val::Loop(a), Val::Loop(b)) => Rc::ptr_eq(a, b),
            _ => match (self.as_str(), other.as_str()) {
                (Some(a), Some(b)) => {
                    budget.work(a.len().min(b.len()))?;
                    a == b
                }
                _ => match (self.as_int(), other.as_int()) {
                    (Some(a), Some(b)) => a == b,
                    _ => self.as_float().is_some_and(|a| Some(a) == other.as_float()),
                },
            },
        })
    }

    /// The order of numbers, strings and lists; an error for other pairs, as in Python.
    pub(super) fn compare(&self, other: &Val, budget: &Budget) -> Result<Ordering, Stop> {
        budget.step()?;
        if let (Some(a), Some(b)) = (self.as_str(), other.as_str()) {
            budget.work(a.len().min(b.len()))?;
            return Ok(a.cmp(b));
        }
        if let (Some(a), Some(b)) = (self.as_int(), other.as_int()) {
            return Ok(a.cmp(&b));
        }
        if let (Some(a), Some(b)) = (self.as_float(), other.as_float()) {
            return Ok(a.partial_cmp(&b).unwrap_or(Ordering::Equal));
        }
        if let (Val::List(a), Val::List(b)) = (self, other) {
            for (a, b) in a.items.iter().zip(&b.items) {
                match a.compare(b, budget)? {
                    Ordering::Equal => {}
                    order => return Ok(order),
                }
            }
            return Ok(a.items.len().cmp(&b.items.len()));
        }
        Err(Stop::failed(format!("a {} and a {} have no order", self.kind(), other.kind())))
    }
}

fn find(budget: &Budget, entries: &[(Val, Val)], key: &Val) -> Result<Option<usize>, Stop> {
    budget.work(entries.len() * VAL_BYTES)?;
    if let Some(text) = key.as_str() {
        return Ok(entries.iter().position(|(known, _)| known.as_str() == Some(text)));
    }
    for (idx, (known, _)) in entries.iter().enumerate() {
        if known.equals(key, budget)? {
            return Ok(Some(idx));
        }
    }
    Ok(None)
}

fn nested<'v>(values: impl Iterator<Item = &'v Val>) -> Result<usize, Stop> {
    let depth = values.map(Val::depth).max().unwrap_or(0) + 1;
    if depth > MAX_VALUE_DEPTH {
        return Err(StopKind::Depth { limit: MAX_VALUE_DEPTH }.into());
    }
    Ok(depth)
}

impl List {
    fn new(budget: &Budget, items: Vec<Val>, is_tuple: bool) -> Result<Rc<List>, Stop> {
        let charge = budget.charge(HEADER_BYTES + items.len() * VAL_BYTES)?;
        Ok(Rc::new(List { depth: nested(items.iter())?, items, is_tuple, _charge: charge }))
    }
}

impl Dict {
    /// Entries whose keys differ.
    fn build(budget: &Budget, entries: Vec<(Val, Val)>) -> Result<Val, Stop> {
        let charge = budget.charge(HEADER_BYTES + entries.len() * 2 * VAL_BYTES)?;
        let depth = nested(entries.iter().flat_map(|(key, value)| [key, value]))?;
        Ok(Val::Map(Rc::new(Dict { entries, depth, _charge: charge })))
    }

    pub(super) fn get(&self, budget: &Budget, key: &Val) -> Result<Option<&Val>, Stop> {
        Ok(find(budget, &self.entries, key)?.map(|idx| &self.entries[idx].1))
    }

    pub(super) fn get_str(&self, budget: &Budget, key: &str) -> Result<Option<&Val>, Stop> {
        budget.work(self.entries.len() * VAL_BYTES)?;
        Ok(self.entries.iter().find(|(known, _)| known.as_str() == Some(key)).map(|(_, value)| value))
    }
}

/// A list whose memory is charged while it grows.
pub(super) struct ListBuilder<'b> {
    budget: &'b Budget,
    items: Vec<Val>,
    charge: Charge,
}

impl<'b> ListBuilder<'b> {
    pub(super) fn new(budget: &'b Budget) -> Result<Self, Stop> {
        Ok(Self { budget, items: Vec::new(), charge: budget.charge(HEADER_BYTES)? })
    }

    pub(super) fn push(&mut self, value: Val) -> Result<(), Stop> {
        self.budget.grow(&mut self.charge, VAL_BYTES)?;
        self.items.push(value);
        Ok(())
    }

    pub(super) fn extend(&mut self, values: &[Val]) -> Result<(), Stop> {
        self.budget.grow(&mut self.charge, values.len() * VAL_BYTES)?;
        self.items.extend_from_slice(values);
        Ok(())
    }

    fn finish_list(self, is_tuple: bool) -> Result<Rc<List>, Stop> {
        let Self { items, charge, .. } = self;
        Ok(Rc::new(List { depth: nested(items.iter())?, items, is_tuple, _charge: charge }))
    }

    pub(super) fn finish(self) -> Result<Val, Stop> {
        self.finish_list(false).map(Val::List)
    }

    pub(super) fn finish_tuple(self) -> Result<Val, Stop> {
        self.finish_list(true).map(Val::List)
    }

    /// Sorts without changing the order of equal items.
    pub(super) fn sort_by(
        &mut self,
        mut compare: impl FnMut(&Val, &Val) -> Result<Ordering, Stop>,
    ) -> Result<(), Stop> {
        // The standard sorts take no comparison that can fail.
        let mut scratch = ListBuilder::new(self.budget)?;
        scratch.extend(&self.items)?;
        let n = self.items.len();
        let mut width = 1;
        while width < n {
            for start in (0..n).step_by(2 * width) {
                let (middle, end) = ((start + width).min(n), (start + 2 * width).min(n));
                let (mut left, mut right) = (start, middle);
                for slot in &mut scratch.items[start..end] {
                    let take_right = right < end
                        && (left == middle || compare(&self.items[right], &self.items[left])?.is_lt());
                    let from = if take_right { &mut right } else { &mut left };
                    *slot = self.items[*from].clone();
                    *from += 1;
                }
            }
            std::mem::swap(&mut self.items, &mut scratch.items);
            width *= 2;
        }
        Ok(())
    }

    pub(super) fn reverse(&mut self) {
        self.items.reverse();
    }
}

/// Text whose memory is charged while it grows.
pub(super) struct TextBuilder<'b> {
    budget: &'b Budget,
    text: String,
    charge: Charge,
}

impl<'b> TextBuilder<'b> {
    pub(super) fn new(budget: &'b Budget) -> Result<Self, Stop> {
        Ok(Self { budget, text: String::new(), charge: budget.charge(HEADER_BYTES)? })
    }

    pub(super) fn push_str(&mut self, text: &str) -> Result<(), Stop> {
        self.budget.grow(&mut self.charge, text.len())?;
        self.text.push_str(text);
        Ok(())
    }

    pub(super) fn push(&mut self, c: char) -> Result<(), Stop> {
        self.push_str(c.encode_utf8(&mut [0; 4]))
    }

    pub(super) fn repeat(&mut self, text: &str, n: usize) -> Result<(), Stop> {
        self.budget.grow(&mut self.charge, text.len().saturating_mul(n))?;
        self.text.push_str(&text.repeat(n));
        Ok(())
    }

    pub(super) fn finish(self) -> Val {
        Val::Str(Rc::new(Text { text: self.text, _charge: self.charge }))
    }

    pub(super) fn into_string(self) -> String {
        self.text
    }
}
