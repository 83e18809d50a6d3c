//! Pulls from a working hub.

mod support;

use std::fs;
use std::path::Path;

use refrain_hub::{Env, Format, HubError, ModelName, ModelOrigin, Silent, Store, Token};
use support::{COMMIT, Calls, Notes, Reply, Repo, Server, env, git_sha1, hasty, pattern, sha256, store};

fn name(text: &str) -> ModelName {
    ModelName::parse(text).unwrap()
}

fn serve(repo: &Repo) -> Server {
    let repo = repo.clone();
    Server::start(move |request| repo.answer(request))
}

#[test]
fn a_gguf_is_stored_in_the_layout_of_the_hub_tools() {
    let folder = tempfile::tempdir().unwrap();
    let repo = Repo::with_model(300_000);
    let server = serve(&repo);
    let store = store(folder.path(), &server);
    assert_eq!(store.find(&name("o/r")).unwrap(), None);

    let mut notes = Notes::default();
    let model = store.pull(&name("o/r"), &mut notes).unwrap();
    let content = repo.content("m-Q4_K_M.gguf");
    assert_eq!(fs::read(&model.path).unwrap(), content);
    assert_eq!(
        notes.lines,
        ["plan 1 files 300000 bytes mit", "start m-Q4_K_M.gguf 0/300000", "done m-Q4_K_M.gguf"]
    );
    assert_eq!((model.name.as_str(), model.format, model.bytes), ("o/r:Q4_K_M", Format::Gguf, 300_000));
    assert_eq!(model.licence.as_ref().unwrap().name, "mit");
    assert_eq!(model.origin, ModelOrigin::Hub { repo: "o/r".to_owned() });

    let cache = folder.path().join("huggingface/hub/models--o--r");
    assert_eq!(fs::read_to_string(cache.join("refs/main")).unwrap(), COMMIT);
    assert_eq!(model.path, cache.join("snapshots").join(COMMIT).join("m-Q4_K_M.gguf"));
    let blobs: Vec<_> = fs::read_dir(cache.join("blobs")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(blobs, [sha256(&content).as_str()]);
    #[cfg(unix)]
    assert_eq!(fs::read_link(&model.path).unwrap(), Path::new("../../blobs").join(sha256(&content)));

    assert_eq!(store.find(&name("o/r")).unwrap().unwrap(), model);
    assert_eq!(store.list().models, [model]);
}

#[test]
fn a_second_pull_requests_only_the_listing() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(&Repo::with_model(1000));
    let store = store(folder.path(), &server);
    let first = store.pull(&name("o/r"), &mut Silent).unwrap();
    assert_eq!(store.pull(&name("o/r:q4_k_m"), &mut Silent).unwrap(), first);
    assert_eq!(server.downloads().len(), 1);
}

#[test]
fn all_files_of_a_split_model_are_pulled() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (pattern(5000), pattern(4000));
    let (first, second) = ("big/m-Q8_0-00001-of-00002.gguf", "big/m-Q8_0-00002-of-00002.gguf");
    let server = serve(&Repo::new("o/r", &[(second, &b), (first, &a), ("m-Q2_K.gguf", b"GGUF")]));
    let model = store(folder.path(), &server).pull(&name("o/r:Q8_0"), &mut Silent).unwrap();
    assert!(model.path.ends_with(first));
    assert_eq!(model.files.len(), 2);
    assert_eq!(fs::read(&model.files[1]).unwrap(), b);
    assert_eq!(server.downloads().len(), 2);
}

#[test]
fn a_folder_is_pulled_with_config_and_tokenizer_only() {
    let folder = tempfile::tempdir().unwrap();
    let weights = pattern(2000);
    let files: &[(&str, &[u8])] = &[
        ("README.md", b"x"),
        ("config.json", b"{}"),
        ("model.safetensors", &weights),
        ("pytorch_model.bin", b"x"),
        ("tokenizer.json", b"{ }"),
    ];
    let server = serve(&Repo::new("o/r", files));
    let model = store(folder.path(), &server).pull(&name("o/r"), &mut Silent).unwrap();
    assert_eq!(model.format, Format::Safetensors);
    assert_eq!(fs::read(model.path.join("config.json")).unwrap(), b"{}");
    assert_eq!(fs::read(model.path.join("model.safetensors")).unwrap(), weights);
    assert_eq!(server.downloads().len(), 3);
    let blob = folder.path().join("huggingface/hub/models--o--r/blobs").join(git_sha1(b"{}"));
    assert!(blob.is_file(), "small files are named by git's checksum");
}

#[test]
fn headers_of_files_complete_the_listing() {
    let folder = tempfile::tempdir().unwrap();
    let repo = Repo::with_model(5000);
    let content = repo.content("m-Q4_K_M.gguf");
    let server = Server::start(move |request| {
        if request.is_listing() {
            return Reply::body(
                200,
                format!(r#"{{"sha":"{COMMIT}","siblings":[{{"rfilename":"m-Q4_K_M.gguf"}}]}}"#),
            );
        }
        let reply = Reply::file(&content, request);
        let linked = format!("\"{}\"", sha256(&content));
        reply.header("X-Linked-Etag", linked).header("X-Linked-Size", content.len())
    });
    let model = store(folder.path(), &server).pull(&name("o/r"), &mut Silent).unwrap();
    assert_eq!(fs::read(model.path).unwrap(), repo.content("m-Q4_K_M.gguf"));
}

#[test]
fn nothing_is_downloaded_without_a_checksum() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(|request| match request.is_listing() {
        true => Reply::body(200, format!(r#"{{"sha":"{COMMIT}","siblings":[{{"rfilename":"m.gguf"}}]}}"#)),
        false => Reply::body(200, "GGUF").header("ETag", "\"../../../evil\""),
    });
    let error = store(folder.path(), &server).pull(&name("o/r"), &mut Silent).unwrap_err();
    assert!(matches!(error, HubError::NoDigest { .. }), "{error}");
    assert!(server.downloads().is_empty());
}

#[test]
fn the_token_is_sent_to_the_endpoint_but_not_to_redirect_targets() {
    let folder = tempfile::tempdir().unwrap();
    let repo = Repo::with_model(5000);
    let content = repo.content("m-Q4_K_M.gguf");
    let storage = Server::start(move |request| Reply::file(&content, request));
    let elsewhere = format!("{}/signed?secret=1", storage.url());
    let hub = Server::start(move |request| match request.path.as_str() {
        // The first redirect is that of a renamed repository, the second that of a large file.
        "/o/r/resolve/0123456789abcdef0123456789abcdef01234567/m-Q4_K_M.gguf" => {
            Reply::status(307).header("Location", "/moved/m")
        }
        "/moved/m" => Reply::status(302).header("Location", &elsewhere),
        _ => repo.answer(request),
    });
    let env = Env { hf_token: Token::new("hf_secret"), ..env(folder.path(), &hub) };
    Store::open(env).with_retry(hasty()).pull(&name("o/r"), &mut Silent).unwrap();
    assert_eq!(hub.requests().len(), 3);
    for request in hub.requests() {
        assert_eq!(request.header("authorization"), Some("Bearer hf_secret"), "{}", request.path);
    }
    let stored = storage.requests();
    assert_eq!(stored.len(), 1);
    assert_eq!(stored[0].header("authorization"), None);
}

#[test]
fn concurrent_pulls_download_once() {
    let folder = tempfile::tempdir().unwrap();
    let repo = Repo::with_model(200_000);
    let served = repo.clone();
    let server = Server::start(move |request| {
        let mut reply = served.answer(request);
        if !request.is_listing() {
            // Slow enough that the other pull has to wait.
            std::thread::sleep(std::time::Duration::from_millis(300));
            reply.silence = None;
        }
        reply
    });
    let pull = || {
        let mut notes = Notes::default();
        let model = store(folder.path(), &server).pull(&name("o/r"), &mut notes).unwrap();
        assert_eq!(fs::read(model.path).unwrap(), repo.content("m-Q4_K_M.gguf"));
        notes
    };
    let notes = std::thread::scope(|scope| {
        let pulls: Vec<_> = (0..4).map(|_| scope.spawn(pull)).collect();
        pulls.into_iter().map(|pull| pull.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(server.downloads().len(), 1);
    assert_eq!(notes.iter().filter(|notes| notes.has("start")).count(), 1);
}

#[test]
fn the_next_pull_resumes_a_cancelled_one() {
    let folder = tempfile::tempdir().unwrap();
    let repo = Repo::with_model(2_000_000);
    let server = serve(&repo);
    let store = store(folder.path(), &server);
    let mut notes = Notes { cancel_at: Some(500_000), ..Notes::default() };
    assert!(matches!(store.pull(&name("o/r"), &mut notes), Err(HubError::Cancelled)));
    let partial = &store.list().partial[0];
    assert_eq!(partial.name, "o/r");
    assert!((500_000..2_000_000).contains(&partial.bytes));
    assert_eq!(store.find(&name("o/r")).unwrap(), None);

    let model = store.pull(&name("o/r"), &mut Silent).unwrap();
    assert_eq!(fs::read(model.path).unwrap(), repo.content("m-Q4_K_M.gguf"));
    assert_eq!(server.downloads()[1].from(), Some(partial.bytes as usize));
    assert!(store.list().partial.is_empty());
}

#[test]
fn offline_uses_local_models_and_no_network() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(&Repo::with_model(1000));
    let offline = Store::open(Env { offline: true, ..env(folder.path(), &server) });
    let error = offline.pull(&name("o/r"), &mut Silent).unwrap_err();
    assert_eq!(
        error.to_string(),
        "o/r is not on this machine, and it cannot be pulled because Refrain is offline"
    );
    assert!(server.requests().is_empty());
    let model = store(folder.path(), &server).pull(&name("o/r"), &mut Silent).unwrap();
    assert_eq!(offline.pull(&name("o/r"), &mut Silent).unwrap(), model);
}

#[test]
fn a_newer_commit_is_pulled_and_unchanged_files_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let repo = Repo::new("o/r", &[("config.json", b"{}"), ("model.safetensors", b"one")]);
    let calls = Calls::default();
    let newer = "f".repeat(40);
    let newer_of_server = newer.clone();
    let server = Server::start(move |request| {
        if request.is_listing() && calls.next() > 0 {
            let mut repo = repo.clone();
            repo.files[0].1 = b"{ }".to_vec();
            return Reply::body(200, repo.listing().replace(COMMIT, &newer_of_server));
        }
        if request.path.contains(&newer_of_server) {
            return Reply::file(b"{ }", request);
        }
        repo.answer(request)
    });
    let store = store(folder.path(), &server);
    store.pull(&name("o/r"), &mut Silent).unwrap();
    let model = store.pull(&name("o/r"), &mut Silent).unwrap();
    assert!(model.path.ends_with(&newer));
    assert_eq!(fs::read(model.path.join("config.json")).unwrap(), b"{ }");
    assert_eq!(fs::read(model.path.join("model.safetensors")).unwrap(), b"one");
    assert_eq!(server.downloads().len(), 3);
}
