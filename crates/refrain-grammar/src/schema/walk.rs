//! The schemas inside a schema.

use serde_json::Value;

/// What a schema inside another one is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Every value of the outer schema involves it.
    Needed,
    /// Values of the outer schema may involve it.
    Optional,
    /// Only references involve it.
    Unused,
}

/// A schema inside another one.
pub(super) struct Child<'a> {
    /// Its JSON pointer from the outer schema.
    pub(super) pointer: String,
    /// The keys on that path.
    pub(super) path: Vec<&'a str>,
    pub(super) schema: &'a Value,
    pub(super) role: Role,
}

/// A key as part of a JSON pointer.
pub(super) fn pointer_of(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

const INDEXES: [&str; 16] =
    ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15"];

/// The schemas inside a schema, those it needs first.
pub(super) fn children(schema: &Value) -> impl Iterator<Item = Child<'_>> {
    let keys = schema.as_object().into_iter().flatten();
    let mut found: Vec<Child<'_>> = keys.flat_map(|(key, value)| inside(schema, key, value)).collect();
    found.sort_by_key(|child| match child.role {
        Role::Needed => 0,
        Role::Optional => 1,
        Role::Unused => 2,
    });
    found.into_iter()
}

fn inside<'a>(schema: &'a Value, key: &'a str, value: &'a Value) -> Vec<Child<'a>> {
    let one =
        |role| vec![Child { pointer: format!("/{}", pointer_of(key)), path: vec![key], schema: value, role }];
    let named = |role: &dyn Fn(&str) -> Role| {
        let parts = value.as_object().into_iter().flatten();
        let child = |(name, schema): (&'a String, &'a Value)| Child {
            pointer: format!("/{}/{}", pointer_of(key), pointer_of(name)),
            path: vec![key, name],
            schema,
            role: role(name),
        };
        parts.map(child).collect()
    };
    let listed = |role| {
        let parts = value.as_array().into_iter().flatten().enumerate();
        let child = |(idx, schema): (usize, &'a Value)| Child {
            pointer: format!("/{}/{idx}", pointer_of(key)),
            path: INDEXES.get(idx).map_or(vec![], |idx| vec![key, idx]),
            schema,
            role,
        };
        parts.map(child).collect()
    };
    match key {
        "properties" => {
            let required = schema.get("required").and_then(Value::as_array);
            let is_required = |name: &str| required.is_some_and(|names| names.iter().any(|n| n == name));
            named(&|name| if is_required(name) { Role::Needed } else { Role::Optional })
        }
        "patternProperties" | "dependentSchemas" => named(&|_| Role::Optional),
        "$defs" | "definitions" => named(&|_| Role::Unused),
        "allOf" => listed(Role::Needed),
        "anyOf" | "oneOf" | "prefixItems" => listed(Role::Optional),
        "items" if value.is_array() => listed(Role::Optional),
        "items"
        | "additionalProperties"
        | "additionalItems"
        | "contains"
        | "not"
        | "if"
        | "then"
        | "else"
        | "propertyNames"
        | "unevaluatedItems"
        | "unevaluatedProperties"
            if value.is_object() || value.is_boolean() =>
        {
            one(Role::Optional)
        }
        _ => Vec::new(),
    }
}
