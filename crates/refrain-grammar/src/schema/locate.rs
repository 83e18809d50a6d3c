//! Finds the smallest part of a schema that fails.
//!
//! The parser's messages rarely say where in a schema the error is. So parts of the schema are compiled by themselves: the
//! error is in the innermost part that fails alone.

use super::walk::children;
use serde_json::{Value, json};

/// Maximum number of parts that are compiled to find an error.
const MAX_TRIALS: usize = 200;
/// Name under which the whole schema is available to its parts.
const WHOLE: &str = "refrain-whole-schema";

/// A schema whose parts can be compiled by themselves.
pub(crate) struct Root<'a> {
    schema: &'a Value,
    /// The schema with references that work from inside [`WHOLE`].
    moved: Value,
}

impl<'a> Root<'a> {
    pub(crate) fn new(schema: &'a Value) -> Root<'a> {
        let mut moved = schema.clone();
        move_references(&mut moved);
        Root { schema, moved }
    }

    /// The innermost part that fails, with its JSON pointer and error. `compile` returns the error of a schema.
    pub(crate) fn locate<E>(&self, whole: E, mut compile: impl FnMut(Value) -> Result<(), E>) -> (String, E) {
        let (mut pointer, mut path, mut schema, mut error) =
            (String::new(), Vec::<String>::new(), self.schema, whole);
        let mut n_trials = 0;
        'down: loop {
            for child in children(schema) {
                // The parser's references cannot contain these.
                let is_plain = |key: &&str| !key.is_empty() && !key.contains(['/', '~', '%', '#']);
                if child.path.is_empty() || !child.path.iter().all(is_plain) {
                    continue;
                }
                n_trials += 1;
                if n_trials > MAX_TRIALS {
                    break 'down;
                }
                let inner: Vec<String> =
                    path.iter().cloned().chain(child.path.iter().map(|key| (*key).to_owned())).collect();
                if let Err(found) = compile(self.part(&inner)) {
                    (pointer, path, schema, error) =
                        (format!("{pointer}{}", child.pointer), inner, child.schema, found);
                    continue 'down;
                }
            }
            break;
        }
        (format!("#{pointer}"), error)
    }

    fn part(&self, path: &[String]) -> Value {
        json!({ "$ref": format!("#/$defs/{WHOLE}/{}", path.join("/")), "$defs": { WHOLE: self.moved } })
    }
}

fn move_references(value: &mut Value) {
    match value {
        Value::Object(keys) => {
            for (key, value) in keys {
                match value {
                    Value::String(reference) if key == "$ref" => {
                        if let Some(pointer) = reference.strip_prefix('#') {
                            *reference = format!("#/$defs/{WHOLE}{pointer}");
                        }
                    }
                    value => move_references(value),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(move_references),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
