//! Finding, listing and removing models.

mod support;

use std::fs;
use std::path::Path;

use refrain_hub::{Env, Format, HubError, ModelName, ModelOrigin, Silent, Store};
use support::{COMMIT, Repo, Server, store};

fn name(text: &str) -> ModelName {
    ModelName::parse(text).unwrap()
}

fn two_quants() -> (tempfile::TempDir, Server, Store) {
    let repo = Repo::new("o/r", &[("m-Q4_0.gguf", b"GGUF small"), ("m-Q8_0.gguf", b"GGUF rather larger")]);
    let server = Server::start(move |request| repo.answer(request));
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path(), &server);
    store.pull(&name("o/r:Q4_0"), &mut Silent).unwrap();
    store.pull(&name("o/r:Q8_0"), &mut Silent).unwrap();
    (folder, server, store)
}

fn names(store: &Store) -> Vec<String> {
    store.list().models.into_iter().map(|model| model.name).collect()
}

#[test]
fn listing_an_empty_store_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(Env::rooted(&folder.path().join("none")));
    assert_eq!(store.list(), refrain_hub::Inventory::default());
    assert_eq!(store.find(&name("smollm2")).unwrap(), None);
    assert!(matches!(store.remove(&name("smollm2")), Err(HubError::NotHere { .. })));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn removing_one_quantisation_keeps_the_other() {
    let (_folder, _server, store) = two_quants();
    assert_eq!(names(&store), ["o/r:Q4_0", "o/r:Q8_0"]);
    let removed = store.remove(&name("o/r:q8_0")).unwrap();
    assert_eq!((removed.n_files, removed.bytes), (1, 18));
    assert_eq!(names(&store), ["o/r:Q4_0"]);
    let left = store.find(&name("o/r")).unwrap().unwrap();
    assert_eq!(fs::read(left.path).unwrap(), b"GGUF small");
    assert!(matches!(store.remove(&name("o/r:Q8_0")), Err(HubError::NotHere { .. })));
}

#[test]
fn a_repository_is_removed_with_its_last_model_or_by_name() {
    let (folder, _server, store) = two_quants();
    let cache = folder.path().join("huggingface/hub/models--o--r");
    store.remove(&name("o/r:Q8_0")).unwrap();
    store.remove(&name("o/r:Q4_0")).unwrap();
    assert!(!cache.exists());

    let (folder, _server, store) = two_quants();
    let removed = store.remove(&name("o/r")).unwrap();
    assert_eq!(removed.n_files, 2);
    assert!(removed.bytes >= 28);
    assert!(!folder.path().join("huggingface/hub/models--o--r").exists());
    assert!(names(&store).is_empty());
}

#[test]
fn a_blob_that_another_snapshot_still_needs_is_kept() {
    let (folder, _server, store) = two_quants();
    let snapshots = folder.path().join("huggingface/hub/models--o--r/snapshots");
    let other = snapshots.join("f".repeat(40));
    fs::create_dir(&other).unwrap();
    let link = fs::read_link(snapshots.join(COMMIT).join("m-Q8_0.gguf")).unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink(link, other.join("renamed.gguf")).unwrap();
    assert_eq!(store.remove(&name("o/r:Q8_0")).unwrap().bytes, 0);
    assert_eq!(fs::read(other.join("renamed.gguf")).unwrap(), b"GGUF rather larger");
}

#[test]
fn paths_are_found_but_never_removed() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(Env::rooted(folder.path()));
    let file = folder.path().join("m.gguf");
    fs::write(&file, "GGUF").unwrap();
    let by_path = name(file.to_str().unwrap());
    let model = store.find(&by_path).unwrap().unwrap();
    assert_eq!((model.format, model.bytes, model.origin), (Format::Gguf, 4, ModelOrigin::Path));
    let error = store.remove(&by_path).unwrap_err();
    assert!(matches!(error, HubError::OutsideStore { .. }), "{error}");
    assert!(file.exists());
    let by_folder = store.find(&name(folder.path().to_str().unwrap())).unwrap().unwrap();
    assert_eq!((by_folder.path.as_path(), by_folder.format), (file.as_path(), Format::Gguf));
    assert_eq!(store.find(&name("./not/here.gguf")).unwrap(), None);
    assert!(matches!(store.pull(&name("./not/here.gguf"), &mut Silent), Err(HubError::PathGiven { .. })));
    assert!(matches!(store.pull(&by_path, &mut Silent), Err(HubError::PathGiven { .. })));
}

#[test]
#[cfg(unix)]
fn a_link_loop_has_its_own_error() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(Env::rooted(folder.path()));
    let [a, b] = ["a", "b"].map(|name| folder.path().join(name));
    std::os::unix::fs::symlink(&a, &b).unwrap();
    std::os::unix::fs::symlink(&b, &a).unwrap();
    let by_path = name(a.to_str().unwrap());
    let error = store.find(&by_path).unwrap_err();
    assert!(matches!(error, HubError::BrokenLink { .. }), "{error}");
    assert!(!error.hint().unwrap().contains("did you mean"), "{error}");
    assert!(matches!(store.pull(&by_path, &mut Silent), Err(HubError::PathGiven { .. })));
}

#[test]
fn a_users_folder_is_used_unless_it_is_ambiguous() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(Env::rooted(folder.path()));
    let by_path = name(folder.path().to_str().unwrap());
    assert_eq!(store.find(&by_path).unwrap().unwrap().path, folder.path(), "empty: for others to complain");
    fs::write(folder.path().join("a-Q4_0.gguf"), "GGUF").unwrap();
    fs::write(folder.path().join("b-Q4_0.gguf"), "GGUF").unwrap();
    assert!(matches!(store.find(&by_path), Err(HubError::Ambiguous { .. })));
}

#[test]
#[cfg(unix)]
fn a_folder_that_leads_out_of_the_store_is_not_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (outside, env) = (folder.path().join("precious"), Env::rooted(folder.path()));
    fs::create_dir_all(outside.join("blobs")).unwrap();
    fs::create_dir_all(&env.hf_cache).unwrap();
    std::os::unix::fs::symlink(&outside, env.hf_cache.join("models--o--r")).unwrap();
    let error = Store::open(env).remove(&name("o/r")).unwrap_err();
    assert!(matches!(error, HubError::OutsideStore { .. }), "{error}");
    assert!(outside.join("blobs").exists());
}

#[test]
fn incomplete_downloads_are_listed_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let env = Env::rooted(folder.path());
    let blobs = env.hf_cache.join("models--o--r/blobs");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join("abc.incomplete"), [0; 500]).unwrap();
    let scratch = env.refrain_home.join("models/smollm2-135m/.partial/wheels");
    fs::create_dir_all(&scratch).unwrap();
    fs::write(scratch.join("x.whl"), [0; 70]).unwrap();
    let store = Store::open(env);
    let partial: Vec<_> = store.list().partial.into_iter().map(|p| (p.name, p.bytes)).collect();
    assert_eq!(partial, [("o/r".to_owned(), 500), ("smollm2:135m".to_owned(), 70)]);
    assert!(store.list().models.is_empty());
    store.remove(&name("o/r:Q4_0")).unwrap();
    store.remove(&name("smollm2")).unwrap();
    assert_eq!(store.list(), refrain_hub::Inventory::default());
}

#[test]
fn nothing_is_removed_during_a_pull() {
    let (folder, _server, store) = two_quants();
    let locks = folder.path().join("huggingface/hub/.locks/models--o--r");
    let lock = fs::read_dir(&locks).unwrap().next().unwrap().unwrap().path();
    let held = fs::File::open(&lock).unwrap();
    held.lock().unwrap();
    assert!(matches!(store.remove(&name("o/r")), Err(HubError::Busy { .. })));
    assert_eq!(names(&store).len(), 2);
    drop(held);
    store.remove(&name("o/r")).unwrap();
}

#[test]
fn the_closest_name_may_be_a_local_model() {
    let (_folder, _server, store) = two_quants();
    assert_eq!(store.nearest("o/r:Q4_1").as_deref(), Some("o/r:Q4_0"));
    assert_eq!(store.nearest("smolm2").as_deref(), Some("smollm2"));
    assert_eq!(store.nearest("nonsense"), None);
    let error = store.remove(&name("o/r:Q5_0")).unwrap_err();
    assert!(error.hint().unwrap().starts_with("did you mean `o/r:"), "{:?}", error.hint());
}

#[test]
fn a_cache_filled_by_other_tools_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let env = Env::rooted(folder.path());
    let make = |path: &str, content: &str| {
        let path = env.hf_cache.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    };
    make(&format!("models--a--b/snapshots/{COMMIT}/config.json"), "{}");
    make(&format!("models--a--b/snapshots/{COMMIT}/model.safetensors"), "w");
    make("models--a--b/refs/main", COMMIT);
    // Half a split model, a repository without snapshots, and unrelated entries.
    make(&format!("models--c--d/snapshots/{COMMIT}/m-00001-of-00002.gguf"), "GGUF");
    make("models--c--d/refs/main", COMMIT);
    make("models--e--f/refs/main", "../../..");
    make("datasets--x--y/refs/main", COMMIT);
    make("models--gpt2/refs/main", COMMIT);
    make("version.txt", "1");
    let store = Store::open(env);
    assert_eq!(names(&store), ["a/b:safetensors"]);
    let model = store.find(&name("a/b")).unwrap().unwrap();
    assert!(model.path.join("config.json").is_file());
    assert!(model.path.ends_with(Path::new("snapshots").join(COMMIT)));
    assert_eq!(store.find(&name(&format!("a/b@{COMMIT}"))).unwrap().unwrap().path, model.path);
    for text in ["c/d", "e/f", "x/y"] {
        assert_eq!(store.find(&name(text)).unwrap(), None, "{text}");
    }
}
