//! `refrain list`: the models on this machine.

use crate::cli::CliContext;
use crate::out::{Stdout, talk};
use refrain::Builtin;
use refrain_hub::{ByteSize, CATALOGUE, Format, LocalModel, ModelOrigin};
use serde_json::{Value, json};

/// List the models on this machine
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain list
  refrain list --known                        short names that can be pulled
  refrain list --json | jq -r '.models[].path'")]
pub(crate) struct Args {
    /// Also list the short names that can be pulled
    #[arg(long)]
    known: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    let inventory = context.store.list();
    let builtin = builtin_bytes()?;
    let mut out = Stdout::new();
    if args.json {
        let partial = inventory.partial.iter();
        let partial: Vec<Value> =
            partial.map(|p| json!({ "name": p.name, "path": p.path, "bytes": p.bytes })).collect();
        let mut all = json!({
            "builtin": builtin.map(|(name, bytes)| json!({ "name": name, "bytes": bytes })),
            "models": inventory.models.iter().map(to_json).collect::<Vec<_>>(),
            "partial": partial,
        });
        if args.known {
            let entry = |e: &refrain_hub::CatalogueEntry| json!({ "name": e.name, "aliases": e.aliases, "about": e.about, "repo": e.repo, "licence": e.licence });
            all["known"] = CATALOGUE.iter().map(entry).collect();
        }
        return out.json(&all);
    }
    let row = |(name, bytes): (&str, u64)| {
        [name.to_owned(), ByteSize(bytes).to_string(), "built in".to_owned(), String::new()]
    };
    let mut rows = builtin.map(row).to_vec();
    for model in &inventory.models {
        let licence = model.licence.as_ref().map_or_else(|| "licence unknown".to_owned(), |l| l.name.clone());
        rows.push([model.name.clone(), ByteSize(model.bytes).to_string(), licence, origin(model)]);
    }
    for partial in &inventory.partial {
        let state = "incomplete; pull resumes it, rm removes it".to_owned();
        rows.push([partial.name.clone(), ByteSize(partial.bytes).to_string(), state, String::new()]);
    }
    print(&mut out, &rows)?;
    if args.known {
        out.line("")?;
        let row = |e: &refrain_hub::CatalogueEntry| {
            [e.name.to_owned(), e.aliases.join(" "), e.licence.to_owned(), e.about.to_owned()]
        };
        print(&mut out, &CATALOGUE.iter().map(row).collect::<Vec<_>>())?;
    } else if inventory.models.is_empty() && !context.quiet {
        talk!("nothing is pulled yet; `refrain list --known` lists names for `refrain pull`");
    }
    Ok(())
}

/// Names and sizes of the built-in models.
fn builtin_bytes() -> anyhow::Result<[(&'static str, u64); Builtin::ALL.len()]> {
    let mut all = Builtin::ALL.map(|builtin| (builtin.name(), 0));
    for ((_, bytes), builtin) in all.iter_mut().zip(Builtin::ALL) {
        *bytes = builtin.files()?.files().iter().map(|(_, bytes)| bytes).sum();
    }
    Ok(all)
}

fn print(out: &mut Stdout, rows: &[[String; 4]]) -> anyhow::Result<()> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let (name, size, terms) = (width(0), width(1), width(2));
    let lines: Vec<String> = rows
        .iter()
        .map(|[a, b, c, d]| format!("{a:<name$}  {b:>size$}  {c:<terms$}  {d}").trim_end().to_owned())
        .collect();
    out.line(lines.join("\n"))
}

fn origin(model: &LocalModel) -> String {
    match &model.origin {
        ModelOrigin::Path => model.path.display().to_string(),
        ModelOrigin::Hub { repo } => repo.clone(),
        ModelOrigin::Package => "package index".to_owned(),
    }
}

fn to_json(model: &LocalModel) -> Value {
    let format = match model.format {
        Format::Gguf => "gguf",
        Format::Safetensors => "safetensors",
    };
    let licence = model.licence.as_ref().map(|l| json!({ "name": l.name, "url": l.url }));
    json!({
        "name": model.name,
        "path": model.path,
        "bytes": model.bytes,
        "format": format,
        "files": model.files,
        "licence": licence,
        "origin": origin(model),
    })
}
