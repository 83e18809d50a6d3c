//! The `refrain` binary: the only place that picks a backend.
//!
//! Invariant: the result goes to standard output, all talk to standard error.
//! Invariant: a command holds no business logic; it parses, calls the library and prints.
// Doc comments of arguments are help texts for a terminal, where brackets are no links.
#![allow(rustdoc::broken_intra_doc_links)]
#![forbid(unsafe_code)]

mod cli; // what can be typed
mod opts; // flags that commands share
mod prompt; // what to continue: arguments, files, standard input
mod reply; // a reply, streamed
mod resolve; // from a name to a model
mod profile; // where the time on a device went
mod stats; // what a reply took

mod batch;
mod bench;
mod chat;
mod completions;
mod doctor;
mod finetune;
mod inspect;
mod list;
mod merge;
mod perplexity;
mod plan;
mod pull;
mod reference;
mod rm;
mod run;
mod tokenize;
mod train;
mod trial;

mod bars; // progress
mod fail; // errors and hints
mod interrupt; // Ctrl-C
mod out; // terminal and pipes

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
