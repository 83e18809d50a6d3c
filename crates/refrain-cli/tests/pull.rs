//! Missing models, pulled from a hub on this machine.

mod common;

use common::{Cli, Ended, stories};
use sha2::{Digest, Sha256};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const NAME: &str = "someone/stories-GGUF:Q8_0";
const FILE: &str = "stories-Q8_0.gguf";

/// A hub with one repository. It serves until the test process ends.
fn hub(content: Vec<u8>, digest: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A client may disconnect halfway; the next one is still served.
            let _ = answer(stream, &content, &digest);
        }
    });
    endpoint
}

fn answer(mut stream: TcpStream, content: &[u8], digest: &str) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    let listing = serde_json::json!({
        "sha": COMMIT,
        "cardData": { "license": "apache-2.0" },
        "siblings": [{
            "rfilename": FILE,
            "size": content.len(),
            "lfs": { "sha256": digest, "size": content.len() },
        }],
    })
    .to_string();
    let body = if request.contains("/api/models/") { listing.as_bytes() } else { content };
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    stream.write_all(head.as_bytes())?;
    if !request.starts_with("HEAD") {
        stream.write_all(body)?;
    }
    stream.flush()
}

fn sha256(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn online(cli: &Cli, endpoint: &str, args: &[&str]) -> Ended {
    let mut command = cli.command(args);
    command.env("HF_ENDPOINT", endpoint).env_remove("REFRAIN_OFFLINE").env("NO_PROXY", "127.0.0.1");
    common::ended(command.output().expect("the binary runs"))
}

#[test]
fn a_missing_model_is_announced_pulled_listed_and_removed() {
    let cli = Cli::new();
    let content = stories();
    let endpoint = hub(content.clone(), sha256(&content));

    let ended = online(&cli, &endpoint, &["run", NAME, "A cat", "--temp", "0", "-n", "4"]);
    assert!(ended.stderr.contains("is not in the local store: pulling it"), "{}", ended.stderr);
    assert!(ended.stderr.contains("licence apache-2.0"), "{}", ended.stderr);
    let text = ended.ok();

    let again = cli.run(&["run", NAME, "A cat", "--temp", "0", "-n", "4"]);
    assert!(!again.stderr.contains("pulling"), "{}", again.stderr);
    assert_eq!(again.ok(), text);

    let listed = cli.run(&["list", "--json"]).json();
    assert_eq!(listed["models"][0]["name"], NAME);
    assert_eq!(listed["models"][0]["bytes"], content.len());
    assert_eq!(listed["models"][0]["licence"]["name"], "apache-2.0");
    assert!(cli.run(&["list"]).ok().contains("apache-2.0"));

    let pulled = online(&cli, &endpoint, &["pull", NAME]).ok();
    assert!(pulled.trim_end().ends_with(FILE), "{pulled}");
    assert!(cli.run(&["rm", NAME]).ok().contains("freed"));
    assert_eq!(cli.run(&["list", "--json"]).json()["models"].as_array().map(Vec::len), Some(0));
}

#[test]
fn bytes_with_a_wrong_checksum_are_not_kept() {
    let cli = Cli::new();
    let endpoint = hub(stories(), "0".repeat(64));
    let said = online(&cli, &endpoint, &["pull", NAME]).refused();
    assert!(said.contains("sha256") || said.contains("SHA-256"), "{said}");
    assert_eq!(cli.run(&["list", "--json"]).json()["models"].as_array().map(Vec::len), Some(0));
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_a_pull_and_says_how_to_resume() {
    let cli = Cli::new();
    // A server that accepts the request and never completes its answer.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
    let mut command = cli.command(&["pull", NAME]);
    command.env("HF_ENDPOINT", endpoint).env_remove("REFRAIN_OFFLINE").env("NO_PROXY", "127.0.0.1");
    let child = command.stderr(std::process::Stdio::piped()).spawn().expect("it runs");
    let (mut stream, _) = listener.accept().expect("a request");
    stream.read_exact(&mut [0]).expect("a byte");
    let pid = child.id().to_string();
    let interrupt = || std::process::Command::new("kill").args(["-INT", &pid]).status().expect("kill");
    assert!(interrupt().success());
    // The second Ctrl-C ends the program if the first arrives while it waits for the server.
    std::thread::sleep(std::time::Duration::from_millis(300));
    interrupt();
    let ended = common::ended(child.wait_with_output().expect("it ends"));
    assert_eq!(ended.code, Some(130), "{}", ended.stderr);
}
