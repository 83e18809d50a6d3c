//! Checks the dependencies between crates. Edges point down only; adding one is a decision made here.

use crate::shell::output;
use anyhow::{Result, bail};
use serde_json::Value;
use std::collections::BTreeSet;

/// Each crate with the workspace crates that it may depend on, from the top down.
const EDGES: &[(&str, &[&str])] = &[
    (
        "refrain-cli",
        &["refrain", "refrain-driver", "refrain-hub", "refrain-report", "refrain-server", "refrain-worker"],
    ),
    ("refrain-server", &["refrain", "refrain-worker"]),
    ("refrain-worker", &["refrain"]),
    (
        "refrain",
        &[
            "refrain-cpu",
            "refrain-cuda",
            "refrain-driver",
            "refrain-engine",
            "refrain-formats",
            "refrain-grammar",
            "refrain-graph",
            "refrain-hub",
            "refrain-models",
            "refrain-quant",
            "refrain-report",
            "refrain-tensor",
            "refrain-train",
        ],
    ),
    (
        "refrain-train",
        &[
            "refrain-formats",
            "refrain-graph",
            "refrain-models",
            "refrain-reference",
            "refrain-report",
            "refrain-tensor",
        ],
    ),
    ("refrain-engine", &["refrain-grammar", "refrain-graph", "refrain-models", "refrain-tensor"]),
    ("refrain-grammar", &["refrain-formats"]),
    ("refrain-models", &["refrain-formats", "refrain-graph", "refrain-tensor"]),
    ("refrain-hub", &[]),
    ("refrain-quant", &["refrain-cpu", "refrain-formats", "refrain-tensor"]),
    ("refrain-formats", &["refrain-tensor"]),
    ("refrain-cuda", &["refrain-driver", "refrain-graph", "refrain-kernels", "refrain-tensor"]),
    ("refrain-kernels", &["refrain-driver", "refrain-graph", "refrain-reference", "refrain-tensor"]),
    ("refrain-driver", &[]),
    ("refrain-cpu", &["refrain-graph", "refrain-reference", "refrain-tensor"]),
    ("refrain-testkit", &["refrain-graph", "refrain-reference", "refrain-tensor"]),
    ("refrain-reference", &["refrain-graph", "refrain-tensor"]),
    ("refrain-graph", &["refrain-tensor"]),
    ("refrain-tensor", &[]),
    ("refrain-report", &[]),
    ("xtask", &[]),
];

/// Compares the table with the manifests. Dev-dependencies are not restricted; only they may use the test kit, which never
/// ships.
pub(crate) fn check() -> Result<()> {
    let metadata = output("cargo", &["metadata", "--no-deps", "--format-version", "1"])?;
    let wrong = wrong_edges(&serde_json::from_str(&metadata)?);
    if wrong.is_empty() {
        println!("crate edges: all {} crates match the table", EDGES.len());
        return Ok(());
    }
    bail!("crate edges differ from the table in xtask/src/edges.rs:\n  {}", wrong.join("\n  "));
}

fn wrong_edges(metadata: &Value) -> Vec<String> {
    let empty = Vec::new();
    let packages = metadata["packages"].as_array().unwrap_or(&empty);
    let names: BTreeSet<&str> = packages.iter().filter_map(|p| p["name"].as_str()).collect();
    let mut wrong = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let Some((_, allowed)) = EDGES.iter().find(|(n, _)| *n == name) else {
            wrong.push(format!("{name} is not in the table"));
            continue;
        };
        for dependency in package["dependencies"].as_array().unwrap_or(&empty) {
            let to = dependency["name"].as_str().unwrap_or_default();
            let ships = dependency["kind"].as_str() != Some("dev");
            if names.contains(to) && ships && (to == "refrain-testkit" || !allowed.contains(&to)) {
                wrong.push(format!("{name} depends on {to}"));
            }
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_workspace_has_only_the_edges_of_the_table() {
        check().unwrap();
    }

    #[test]
    fn the_table_only_points_down() {
        for (i, (name, allowed)) in EDGES.iter().enumerate() {
            for to in *allowed {
                let below = EDGES[i + 1..].iter().any(|(n, _)| n == to);
                assert!(below, "{name} -> {to} points up");
            }
        }
    }

    #[test]
    fn an_edge_that_points_up_is_reported() {
        let tensor =
            json!({ "name": "refrain-tensor", "dependencies": [{ "name": "refrain-graph", "kind": null }] });
        let graph = json!({ "name": "refrain-graph", "dependencies": [] });
        let wrong = wrong_edges(&json!({ "packages": [tensor, graph] }));
        assert_eq!(wrong, ["refrain-tensor depends on refrain-graph"]);
    }
}
