//! What a person at a terminal sees.
#![cfg(unix)]

mod common;

use common::Cli;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::process::Child;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// A program on a terminal of its own.
struct Terminal {
    child: Child,
    keyboard: File,
    screen: Receiver<Vec<u8>>,
    shown: String,
}

impl Terminal {
    fn start(cli: &Cli, args: &[&str]) -> Terminal {
        let control = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
        grantpt(&control).expect("access to the terminal");
        unlockpt(&control).expect("an unlocked terminal");
        let name = ptsname(&control, Vec::new()).expect("the terminal's name").into_string().expect("a path");
        let side = || OpenOptions::new().read(true).write(true).open(&name).expect("the program's side");
        let mut command = cli.command(args);
        command.env("TERM", "xterm").env("COLUMNS", "100").stdin(side()).stdout(side()).stderr(side());
        let child = command.spawn().expect("the binary runs");
        let keyboard = File::from(control);
        let mut output = keyboard.try_clone().expect("a second handle");
        let (sender, screen) = mpsc::channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // Reading fails once the program has ended.
            while let Ok(n @ 1..) = output.read(&mut buffer) {
                if sender.send(buffer[..n].to_vec()).is_err() {
                    break;
                }
            }
        });
        Terminal { child, keyboard, screen, shown: String::new() }
    }

    /// Waits for a text on the screen, and forgets what came before.
    #[track_caller]
    fn expect(&mut self, text: &str) {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.shown.find(text) {
                self.shown.drain(..at + text.len());
                return;
            }
            match self.screen.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(bytes) => self.shown.push_str(&String::from_utf8_lossy(&bytes)),
                Err(error) => panic!("no {text:?} ({error}): {}", self.shown),
            }
        }
    }

    fn enter(&mut self, line: &str) {
        self.keyboard.write_all(format!("{line}\r").as_bytes()).expect("a line is entered");
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Fails when the program has ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_chat_asks_before_it_overwrites_a_file() {
    let cli = Cli::new();
    let path = cli.file("talk.json", "precious");
    let mut terminal = Terminal::start(&cli, &["chat", "--device", "cpu"]);
    terminal.expect("> ");
    for answer in ["", "n", "no thanks"] {
        terminal.enter("/save talk.json");
        terminal.expect("talk.json exists. Overwrite it? [y/N] ");
        terminal.enter(answer);
        terminal.expect("talk.json was not changed");
        assert_eq!(std::fs::read_to_string(&path).expect("a file"), "precious");
    }
    terminal.enter("/save talk.json");
    terminal.expect("[y/N] ");
    terminal.enter("y");
    terminal.expect("written to");
    assert_ne!(std::fs::read_to_string(&path).expect("a file"), "precious");
    terminal.enter("/exit");
    assert!(terminal.child.wait().expect("it ends").success());
}
