//! `refrain tokenize`: the tokens of a text.

use crate::cli::CliContext;
use crate::out::{Stdout, counted, talk};
use crate::{prompt, resolve};
use refrain::{Model, Tokenizer};

/// Show how a model's tokenizer splits a text
///
/// Also works with files that contain only a vocabulary. Without TEXT, all of standard input is read.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  refrain tokenize smollm2 \"Hello, world\"
  refrain tokenize ./vocab.gguf --ids --no-bos < text.txt
  refrain tokenize smollm2 --special \"<|im_start|>user\"")]
pub(crate) struct Args {
    /// A path, a short name such as smollm2, or owner/repo[:QUANT]
    #[arg(value_name = "MODEL")]
    model: String,
    /// The text; standard input by default
    #[arg(value_name = "TEXT")]
    text: Option<String>,
    /// Print only the ids, separated by spaces
    #[arg(long)]
    ids: bool,
    /// Omit the tokens that the model expects around a text, such as BOS
    #[arg(long)]
    no_bos: bool,
    /// Parse texts such as <|im_end|> as control tokens
    #[arg(long)]
    special: bool,
}

pub(crate) fn run(args: &Args, context: &CliContext) -> anyhow::Result<()> {
    let files = resolve::find(Some(&args.model), context)?.files()?;
    let tokenizer = Model::open_tokenizer(&files)?;
    let text = match &args.text {
        Some(text) => text.clone(),
        None => prompt::read_stdin(context.quiet)?,
    };
    let mut encoder = tokenizer.encode_long(&text, !args.no_bos, args.special);
    let mut out = Stdout::new();
    let (mut line, mut separator) = (String::new(), "");
    for ids in encoder.by_ref() {
        let ids = ids.map_err(refrain::Error::from)?;
        if !args.ids {
            out.text(&table(&tokenizer, &ids)?)?;
            continue;
        }
        for id in ids {
            line.push_str(separator);
            line.push_str(&id.to_string());
            separator = " ";
        }
        out.text(&line)?;
        line.clear();
    }
    if args.ids {
        out.text("\n")?;
    }
    if encoder.n_forced() > 0 && !context.quiet {
        let places = counted(encoder.n_forced(), "place");
        talk!("the text was split at {places} inside a long word: the tokens there may differ");
    }
    Ok(())
}

/// A line for each token.
fn table(tokenizer: &Tokenizer, ids: &[u32]) -> anyhow::Result<String> {
    let mut lines = String::new();
    for &id in ids {
        let piece = tokenizer.piece(id).unwrap_or_default();
        // Control tokens have no text; show their name in the vocabulary.
        let shown = match piece {
            [] => tokenizer.decode_with_special(&[id]).map_err(refrain::Error::from)?,
            bytes => quoted(bytes),
        };
        lines.push_str(&format!("{id:>7}  {shown}\n"));
    }
    Ok(lines)
}

/// Quotes bytes: as text if they are text, escaped otherwise.
fn quoted(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => format!("{text:?}"),
        Err(_) => format!("\"{}\"", bytes.escape_ascii()),
    }
}
