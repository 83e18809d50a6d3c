//! The manifests in `deploy` name flags, ports and paths that the binary has.

mod common;

use common::Cli;
use serde::Deserialize;
use serde_yaml_ng::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;

fn manifests() -> Vec<(PathBuf, Vec<Value>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kubernetes");
    let mut all = Vec::new();
    for entry in std::fs::read_dir(&folder).expect("the folder of manifests") {
        let path = entry.expect("an entry").path();
        let text = std::fs::read_to_string(&path).expect("a manifest");
        let documents = serde_yaml_ng::Deserializer::from_str(&text);
        let documents = documents.map(|document| Value::deserialize(document).expect("YAML")).collect();
        all.push((path, documents));
    }
    assert!(all.len() >= 2, "{} manifests in {}", all.len(), folder.display());
    all
}

/// The pod of a deployment.
fn pods(documents: &[Value]) -> impl Iterator<Item = &Value> {
    documents.iter().map(|document| &document["spec"]["template"]["spec"]).filter(|pod| pod.is_mapping())
}

fn containers(pod: &Value) -> Vec<&Value> {
    pod["containers"].as_sequence().expect("containers").iter().collect()
}

fn strings(value: &Value) -> Vec<&str> {
    value.as_sequence().expect("a list").iter().map(|item| item.as_str().expect("a string")).collect()
}

/// The value after a flag.
fn value_of<'a>(args: &[&'a str], flag: &str) -> Option<&'a str> {
    args.iter().position(|arg| *arg == flag).and_then(|at| args.get(at + 1).copied())
}

#[test]
fn commands_have_flags_of_the_binary_and_ports_agree() {
    let help = Cli::new().run(&["serve", "--help"]).ok();
    let known = |flag: &str| help.split_whitespace().any(|word| word.trim_end_matches(['.', ',']) == flag);
    let mut n_commands = 0;
    for (path, documents) in manifests() {
        for pod in pods(&documents) {
            for container in containers(pod) {
                let port = container["ports"][0]["containerPort"].as_u64().expect("a port").to_string();
                let args = strings(&container["args"]);
                assert_eq!(value_of(&args, "--port"), Some(port.as_str()), "{}", path.display());
                if strings(&container["command"]) != ["refrain"] {
                    continue;
                }
                n_commands += 1;
                assert_eq!(args[0], "serve");
                for flag in args.iter().filter(|arg| arg.starts_with("--")) {
                    assert!(known(flag), "{}: serve has no {flag}", path.display());
                }
                let grace = pod["terminationGracePeriodSeconds"].as_u64().expect("a period");
                let drain: u64 = value_of(&args, "--drain").expect("--drain").parse().expect("seconds");
                assert!(drain < grace, "{drain} s to drain, {grace} s until the pod is killed");
                let mounted = container["volumeMounts"].as_sequence().expect("mounts");
                for file in [value_of(&args, "--api-key-file").expect("a key file"), "/models/model.gguf"] {
                    let is_below =
                        |mount: &Value| mount["mountPath"].as_str().is_some_and(|at| file.starts_with(at));
                    assert!(mounted.iter().any(is_below), "{file} is in no volume");
                }
            }
        }
        for service in documents.iter().filter(|document| document["kind"] == "Service") {
            let selector = &service["spec"]["selector"];
            let is_selected =
                |document: &Value| document["spec"]["template"]["metadata"]["labels"] == *selector;
            assert!(documents.iter().any(is_selected), "{}: a service without pods", path.display());
        }
    }
    assert!(n_commands > 0, "no manifest runs refrain");
}

#[test]
fn probes_and_metrics_have_paths_that_the_server_answers() {
    let cli = Cli::new();
    let mut command = cli.command(&["serve", "--port", "0", "--threads", "1", "--device", "cpu"]);
    let mut process = command.stderr(Stdio::piped()).spawn().expect("the server starts");
    let mut log = BufReader::new(process.stderr.take().expect("a pipe")).lines().map_while(Result::ok);
    let line = log.find(|line| line.contains("http://")).expect("an address");
    let address = line[line.find("http://").expect("an address") + 7..].trim().to_owned();
    log.find(|line| line.contains("ready on")).expect("a worker is ready");
    let status = |path: &str| {
        let mut stream = TcpStream::connect(&address).expect("a connection");
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).expect("a request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer.split_whitespace().nth(1).expect("a status").to_owned()
    };
    let mut n_paths = 0;
    for (path, documents) in manifests() {
        for document in &documents {
            let template = &document["spec"]["template"];
            let is_ours = |container: &&Value| container["command"][0] == "refrain";
            if !template.is_mapping() || !containers(&template["spec"]).iter().any(is_ours) {
                continue;
            }
            for container in containers(&template["spec"]) {
                for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
                    let at = container[probe]["httpGet"]["path"].as_str().expect("a path");
                    assert_eq!(status(at), "200", "{}: {probe} {at}", path.display());
                    n_paths += 1;
                }
            }
            let at = template["metadata"]["annotations"]["prometheus.io/path"].as_str().expect("a path");
            assert_eq!(status(at), "200", "{at}");
        }
    }
    assert_eq!(n_paths, 3);
    process.kill().expect("it runs");
    process.wait().expect("it ends");
}
