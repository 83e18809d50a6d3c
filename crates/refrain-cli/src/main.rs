//! The `refrain` binary: the only place that picks a backend.
//!
//! Invariant: results go to standard output, messages to standard error.
//! Invariant: a command has no business logic; it parses, calls the library and prints.
// Doc comments of arguments are help texts for a terminal, where brackets and addresses are not links.
#![allow(rustdoc::bare_urls, rustdoc::broken_intra_doc_links)]
#![forbid(unsafe_code)]

mod cli; // commands and global flags
mod opts; // flags shared by several commands
mod prompt; // prompts from arguments, files and standard input
mod reply; // streaming a reply
mod resolve; // from a name to a model
mod grammar; // text that follows a grammar
mod profile; // profiles of a device
mod speculate; // flags of guessed tokens
mod stats; // measurements of a reply

mod batch;
mod bench;
mod chat;
mod compare;
mod completions;
mod convert;
mod doctor;
mod embed;
mod finetune;
mod imatrix;
mod inspect;
mod list;
mod merge;
mod perplexity;
mod plan;
mod pull;
mod quantize;
mod reference;
mod rm;
mod run;
mod serve;
mod show;
mod tokenize;
mod train;
mod trial;
mod worker;

mod bars; // progress bars
mod fail; // errors and hints
mod interrupt; // Ctrl-C
mod out; // output to terminals and pipes
mod usage; // the command line, and errors in it

use std::process::ExitCode;

fn main() -> ExitCode {
    fail::install_panic_hook();
    let cli = match usage::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(error) => return usage::report(&error),
    };
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail::report(&error),
    }
}
