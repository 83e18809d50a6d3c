//! Runs the real binary, with its own store and no network.
#![allow(dead_code)] // Each test file uses only some of it.

use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

pub(crate) struct Cli {
    pub(crate) home: tempfile::TempDir,
}

/// Output and exit code of a command.
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Cli {
    pub(crate) fn new() -> Cli {
        Cli { home: tempfile::tempdir().expect("a temporary folder") }
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_refrain"));
        command
            .args(args)
            .env("REFRAIN_HOME", self.home.path().join("refrain"))
            .env("HF_HOME", self.home.path().join("hf"))
            .env("REFRAIN_OFFLINE", "1")
            .env_remove("REFRAIN_LOG")
            .env_remove("HF_HUB_CACHE")
            .current_dir(self.home.path())
            .stdin(Stdio::null());
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Ended {
        ended(self.command(args).output().expect("the binary runs"))
    }

    /// Runs with something on standard input.
    pub(crate) fn pipe(&self, args: &[&str], input: &[u8]) -> Ended {
        let mut command = self.command(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the binary runs");
        let mut stdin = child.stdin.take().expect("a pipe");
        // A command that fails early does not read its input; the test checks the result.
        let _ = stdin.write_all(input);
        drop(stdin);
        ended(child.wait_with_output().expect("it ends"))
    }

    /// Writes a file into the folder in which commands run.
    pub(crate) fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.home.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(&path, bytes).expect("a file");
        path
    }

    /// A tiny model of random weights with a tokenizer and a chat template, in the folder `tiny`.
    pub(crate) fn tiny_chat_model(&self) -> PathBuf {
        let golden = golden("llama");
        for name in ["config.json", "model.safetensors"] {
            self.file(&format!("tiny/{name}"), std::fs::read(golden.join(name)).expect("a golden"));
        }
        self.file("tiny/tokenizer.json", tiny_tokenizer().to_string());
        let template = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant {% endif %}";
        let config = serde_json::json!({ "chat_template": template, "eos_token": "</s>" });
        self.file("tiny/tokenizer_config.json", config.to_string());
        self.home.path().join("tiny")
    }
}

/// A small encoder with a WordPiece vocabulary, which takes texts of 16 tokens.
pub(crate) fn encoder(cli: &Cli) -> PathBuf {
    let folder = cli.home.path().join("encoder");
    std::fs::create_dir_all(folder.join("1_Pooling")).expect("a folder");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(golden("bert").join(name), folder.join(name)).expect("a copy");
    }
    let special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"];
    let words = ["a", "cat", "kitten", "sleeps", "naps", "##s", "."];
    let vocab: serde_json::Map<String, Value> =
        special.iter().chain(&words).map(|word| word.to_string()).zip((0..).map(Value::from)).collect();
    let added = |(id, content): (usize, &&str)| {
        json!({ "id": id, "content": content, "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false })
    };
    let piece = |text: &str| json!({ "SpecialToken": { "id": text, "type_id": 0 } });
    let around = json!({ "type": "TemplateProcessing",
        "single": [piece("[CLS]"), { "Sequence": { "id": "A", "type_id": 0 } }, piece("[SEP]")],
        "pair": [piece("[CLS]"), { "Sequence": { "id": "A", "type_id": 0 } }, piece("[SEP]")],
        "special_tokens": {
            "[CLS]": { "id": "[CLS]", "ids": [2], "tokens": ["[CLS]"] },
            "[SEP]": { "id": "[SEP]", "ids": [3], "tokens": ["[SEP]"] },
        } });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": special.iter().enumerate().map(added).collect::<Vec<_>>(),
        "normalizer": { "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                        "strip_accents": null, "lowercase": true },
        "pre_tokenizer": { "type": "BertPreTokenizer" },
        "post_processor": around,
        "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": true },
        "model": { "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                   "max_input_chars_per_word": 100, "vocab": vocab },
    });
    let write =
        |name: &str, value: &Value| std::fs::write(folder.join(name), value.to_string()).expect("a file");
    write("tokenizer.json", &tokenizer);
    write(
        "1_Pooling/config.json",
        &json!({ "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false }),
    );
    write("sentence_bert_config.json", &json!({ "max_seq_length": 16 }));
    folder
}

pub(crate) fn ended(output: Output) -> Ended {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output is UTF-8");
    Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

impl Ended {
    /// The output of a command that succeeded.
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self.stdout
    }

    /// The JSON output of a command that succeeded.
    #[track_caller]
    pub(crate) fn json(self) -> serde_json::Value {
        serde_json::from_str(&self.ok()).expect("one JSON object")
    }

    /// The message of a failed command: an error and a hint, no internals, nothing on standard output.
    #[track_caller]
    pub(crate) fn refused(self) -> String {
        assert_eq!(self.code, Some(1), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        assert_eq!(self.stdout, "");
        let error = self.stderr.lines().find(|line| line.starts_with("error: "));
        let error = error.unwrap_or_else(|| panic!("no error: {}", self.stderr));
        assert!(!error.ends_with('.'), "{error}");
        assert!(self.stderr.lines().any(|line| line.starts_with("hint: ")), "no hint: {}", self.stderr);
        for internal in ["has a bug", "Error {", "Some(", "::"] {
            assert!(!self.stderr.contains(internal), "{internal} in {}", self.stderr);
        }
        self.stderr
    }

    /// The message of a command with a usage error.
    #[track_caller]
    pub(crate) fn misused(self) -> String {
        assert_eq!(self.code, Some(2), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        assert_eq!(self.stdout, "");
        self.stderr
    }
}

/// A folder of golden models.
pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../refrain-models/tests/goldens").join(name)
}

/// The file of the built-in model.
pub(crate) fn stories() -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../refrain/assets/stories.gguf");
    std::fs::read(path).expect("the built-in model")
}

/// A tokenizer of 128 tokens at most: the printable characters of ASCII and some control tokens.
fn tiny_tokenizer() -> serde_json::Value {
    let special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"];
    // Byte-level vocabularies write a blank as U+0120 and a line end as U+010A.
    let characters = ('!'..='~').chain(['\u{120}', '\u{10a}']).map(String::from);
    let vocab: serde_json::Map<String, serde_json::Value> = special
        .iter()
        .map(|s| s.to_string())
        .chain(characters)
        .zip((0..).map(serde_json::Value::from))
        .collect();
    let added: Vec<serde_json::Value> = special
        .iter()
        .enumerate()
        .map(|(id, content)| {
            serde_json::json!({
                "id": id, "content": content, "special": true, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false,
            })
        })
        .collect();
    let byte_level = serde_json::json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    serde_json::json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": [],
        },
    })
}
