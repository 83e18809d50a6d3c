//! The `refrain` binary: the only place that picks a backend.
//!
//! Invariant: the result goes to standard output, all talk to standard error.
//! Invariant: a command holds no business logic; it parses, calls the library and prints.
#![forbid(unsafe_code)]

mod cli; // what can be typed
mod opts; // flags that commands share
mod prompt; // what to continue: arguments, files, standard input
mod resolve; // from a name to a model
mod reply; // a reply, streamed
mod stats; // what a reply took

mod run;
mod chat;
mod perplexity;
mod inspect;
mod tokenize;
mod plan;
mod pull;
mod list;
mod rm;
mod doctor;
mod completions;
mod reference;

mod out; // terminal and pipes
mod bars; // progress
mod interrupt; // Ctrl-C
mod fail; // errors and hints

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    fail::install_panic_hook();
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return fail::usage(&error),
    };
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail::report(&error),
    }
}
