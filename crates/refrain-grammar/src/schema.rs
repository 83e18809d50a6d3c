//! Checks of JSON schemas: what nothing satisfies, and where an error is.

mod locate; // the smallest part of a schema that fails
mod walk; // the schemas inside a schema

pub(crate) use locate::Root;

use crate::error::GrammarError;
use serde_json::Value;
use std::collections::HashMap;
use walk::{Role, children, pointer_of};

/// Maximum number of schemas inside one schema.
const MAX_SCHEMAS: usize = 20_000;
/// Key with which a schema could change the options of the parser.
pub(crate) const OPTIONS_KEY: &str = "x-guidance";

/// Parses and checks a schema. The result is ready for the parser.
pub(crate) fn parse(text: &str) -> Result<Value, GrammarError> {
    let schema: Value =
        serde_json::from_str(text).map_err(|error| GrammarError::NotJson { reason: error.to_string() })?;
    match &schema {
        Value::Object(_) => {}
        Value::Bool(true) => return Ok(Value::Object(serde_json::Map::new())),
        Value::Bool(false) => {
            return Err(GrammarError::Unsatisfiable {
                location: "#".into(),
                reason: "schema is false".into(),
            });
        }
        _ => {
            let reason = "a schema must be an object or a boolean".into();
            return Err(GrammarError::Schema { location: "#".into(), reason });
        }
    }
    let places = Places::of(&schema)?;
    places.check_finite()?;
    let mut n_left = MAX_SCHEMAS;
    Ok(with_branches_in_place(&schema, &schema, &mut n_left))
}

/// A schema and the schemas inside it.
struct Places<'a> {
    root: &'a Value,
    list: Vec<(String, &'a Value)>,
}

impl<'a> Places<'a> {
    fn of(root: &'a Value) -> Result<Places<'a>, GrammarError> {
        let mut list = vec![("#".to_owned(), root)];
        let mut next = 0;
        while let Some((location, schema)) = list.get(next).map(|(l, s)| (l.clone(), *s)) {
            check_keys(&location, schema, root)?;
            list.extend(children(schema).map(|child| (format!("{location}{}", child.pointer), child.schema)));
            if list.len() > MAX_SCHEMAS {
                return Err(GrammarError::TooManySchemas { max: MAX_SCHEMAS });
            }
            next += 1;
        }
        Ok(Places { root, list })
    }

    /// Refuses a schema whose values would all be infinite, such as an object that requires an object like itself.
    /// Starts from "nothing has a finite value" and adds schemas until nothing changes.
    fn check_finite(&self) -> Result<(), GrammarError> {
        let idx_of: HashMap<*const Value, usize> = self
            .list
            .iter()
            .enumerate()
            .map(|(idx, (_, schema))| (std::ptr::from_ref(*schema), idx))
            .collect();
        let mut is_finite = vec![false; self.list.len()];
        loop {
            let mut has_changed = false;
            // Children come after their parents.
            for idx in (0..self.list.len()).rev() {
                let known =
                    |schema: &Value| idx_of.get(&std::ptr::from_ref(schema)).is_none_or(|&at| is_finite[at]);
                if !is_finite[idx] && has_finite_value(self.list[idx].1, self.root, &known) {
                    (is_finite[idx], has_changed) = (true, true);
                }
            }
            if !has_changed {
                break;
            }
        }
        if is_finite[0] {
            return Ok(());
        }
        // The cause is deepest among the parts that the root needs.
        let location = self.cause(&idx_of, &is_finite);
        let reason = "it requires a value inside itself without end".into();
        Err(GrammarError::Unsatisfiable { location, reason })
    }

    fn cause(&self, idx_of: &HashMap<*const Value, usize>, is_finite: &[bool]) -> String {
        let (mut idx, mut seen) = (0, vec![false; self.list.len()]);
        loop {
            seen[idx] = true;
            let schema = self.list[idx].1;
            let target = schema.get("$ref").and_then(|r| resolve(self.root, r.as_str()?));
            let needed =
                children(schema).filter(|child| child.role != Role::Unused).map(|child| child.schema);
            let next = needed.chain(target).find_map(|child| {
                idx_of.get(&std::ptr::from_ref(child)).copied().filter(|&at| !is_finite[at])
            });
            match next {
                Some(at) if !seen[at] => idx = at,
                _ => return self.list[idx].0.clone(),
            }
        }
    }
}

fn check_keys(location: &str, schema: &Value, root: &Value) -> Result<(), GrammarError> {
    let refused = |key: &str, reason: String| {
        Err(GrammarError::Schema { location: format!("{location}/{}", pointer_of(key)), reason })
    };
    let Value::Object(keys) = schema else {
        return match schema {
            Value::Bool(_) => Ok(()),
            _ => {
                let reason = "a schema must be an object or a boolean".into();
                Err(GrammarError::Schema { location: location.to_owned(), reason })
            }
        };
    };
    if keys.contains_key(OPTIONS_KEY) {
        return refused(OPTIONS_KEY, "the key is reserved".into());
    }
    let Some(reference) = keys.get("$ref") else { return Ok(()) };
    match reference.as_str() {
        None => refused("$ref", "it must be a string".into()),
        Some(text) if !text.starts_with('#') => refused(
            "$ref",
            format!("{text:?} is outside the schema; only references that begin with # are followed"),
        ),
        Some(text) if resolve(root, text).is_none() => {
            refused("$ref", format!("there is nothing at {text:?}"))
        }
        Some(_) => Ok(()),
    }
}

/// The schema that a local reference names. Percent-encoded pointers are not supported by the parser either.
fn resolve<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    root.pointer(reference.strip_prefix('#')?)
}

/// Whether a schema has a finite value, given which of its parts have one. Conditions other than structure are left to the
/// parser.
fn has_finite_value(schema: &Value, root: &Value, known: &impl Fn(&Value) -> bool) -> bool {
    let Value::Object(keys) = schema else { return true };
    let all = |key: &str| match keys.get(key) {
        Some(Value::Array(parts)) => parts.iter().all(known),
        _ => true,
    };
    let any = |key: &str| match keys.get(key) {
        Some(Value::Array(parts)) => parts.is_empty() || parts.iter().any(known),
        _ => true,
    };
    let target = keys.get("$ref").and_then(|r| resolve(root, r.as_str()?));
    let may_be = |kind: &str| match keys.get("type") {
        Some(Value::String(one)) => one == kind,
        Some(Value::Array(several)) => several.iter().any(|one| one == kind),
        _ => true,
    };
    let may_be_another = |kind: &str| match keys.get("type") {
        Some(Value::String(one)) => one != kind,
        Some(Value::Array(several)) => several.iter().any(|one| one != kind),
        _ => true,
    };
    let required = || {
        let names = keys.get("required").and_then(Value::as_array);
        let of = |name: &Value| keys.get("properties")?.get(name.as_str()?);
        names.is_none_or(|names| names.iter().filter_map(of).all(known))
    };
    let items = || {
        let n_min = keys.get("minItems").and_then(Value::as_u64).unwrap_or(0) as usize;
        let first = keys.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let n_first = n_min.min(first.len());
        first[..n_first].iter().all(known) && (n_min <= n_first || keys.get("items").is_none_or(known))
    };
    let object = may_be_another("object") || (may_be("object") && required());
    let array = may_be_another("array") || (may_be("array") && items());
    all("allOf") && any("anyOf") && any("oneOf") && target.is_none_or(known) && object && array
}

/// Replaces the branches of every `oneOf` that are mere references by what they refer to. The parser can then see that the
/// branches exclude each other, for example by a constant property.
fn with_branches_in_place(schema: &Value, root: &Value, n_left: &mut usize) -> Value {
    match schema {
        Value::Object(keys) => {
            let replaced = keys.iter().map(|(key, value)| {
                let value = match (key.as_str(), value) {
                    ("oneOf", Value::Array(branches)) => {
                        let in_place = |branch: &Value| branch_in_place(branch, root, n_left);
                        Value::Array(branches.iter().map(in_place).collect())
                    }
                    ("const" | "enum" | "default" | "examples", value) => value.clone(),
                    (_, value) => with_branches_in_place(value, root, n_left),
                };
                (key.clone(), value)
            });
            Value::Object(replaced.collect())
        }
        Value::Array(values) => {
            Value::Array(values.iter().map(|value| with_branches_in_place(value, root, n_left)).collect())
        }
        other => other.clone(),
    }
}

fn branch_in_place(branch: &Value, root: &Value, n_left: &mut usize) -> Value {
    let target = match branch {
        Value::Object(keys) if keys.len() == 1 => {
            keys.get("$ref").and_then(|r| resolve(root, r.as_str()?)).filter(|target| target.is_object())
        }
        _ => None,
    };
    let size = |value: &Value| value.to_string().len() / 32 + 1;
    match target.filter(|target| size(target) <= *n_left) {
        // Once is enough: a branch of a branch keeps its reference, so this ends.
        Some(target) => {
            *n_left -= size(target);
            target.clone()
        }
        None => with_branches_in_place(branch, root, n_left),
    }
}
