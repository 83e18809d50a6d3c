//! Pulls from hubs that disconnect, lie, corrupt data and refuse requests.

mod support;

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use refrain_hub::{Disk, DiskFile, Env, HubError, ModelName, RealDisk, Silent, Store, Token};
use support::{Calls, Notes, Reply, Repo, Request, Server, env, hasty, store};

const FILE: &str = "m-Q4_K_M.gguf";
const BYTES: usize = 100_000;

fn name() -> ModelName {
    ModelName::parse("o/r").unwrap()
}

/// A server with a correct listing. `misbehave` answers requests for files, given the number of the request.
fn serve(misbehave: impl Fn(usize, &Request, Reply) -> Reply + Send + Sync + 'static) -> Server {
    let (repo, calls) = (Repo::with_model(BYTES), Calls::default());
    Server::start(move |request| match request.is_listing() {
        true => repo.answer(request),
        false => misbehave(calls.next(), request, repo.answer(request)),
    })
}

/// Checks that a failed download leaves nothing that looks complete or is known to be wrong.
fn blobs(folder: &Path) -> Vec<String> {
    let blobs = fs::read_dir(folder.join("huggingface/hub/models--o--r/blobs")).unwrap();
    blobs.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn assert_right(model: &refrain_hub::LocalModel) {
    assert_eq!(fs::read(&model.path).unwrap(), Repo::with_model(BYTES).content(FILE));
}

#[test]
fn an_interrupted_download_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(|n, _, reply| if n < 2 { reply.cut_after(30_000) } else { reply });
    let mut notes = Notes::default();
    assert_right(&store(folder.path(), &server).pull(&name(), &mut notes).unwrap());
    let ranges: Vec<_> = server.downloads().iter().map(Request::from).collect();
    assert_eq!(ranges, [None, Some(30_000), Some(60_000)]);
    assert!(notes.has("retry 2") && notes.has("retry 3"), "{:?}", notes.lines);
}

#[test]
fn a_download_that_keeps_failing_keeps_its_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(|_, _, reply| reply.cut_after(10_000));
    let store = store(folder.path(), &server);
    let error = store.pull(&name(), &mut Silent).unwrap_err();
    assert!(
        matches!(error, HubError::Interrupted { got: 30_000, want: 100_000, attempts: 3, .. }),
        "{error:?}"
    );
    assert_eq!(store.list().partial[0].bytes, 30_000);
    assert_eq!(store.find(&name()).unwrap(), None);
}

#[test]
fn the_download_restarts_if_the_server_ignores_ranges() {
    let folder = tempfile::tempdir().unwrap();
    let content = Repo::with_model(BYTES).content(FILE);
    let server = serve(move |n, _, _| {
        let reply = Reply::body(200, content.clone());
        if n == 0 { reply.cut_after(40_000) } else { reply }
    });
    assert_right(&store(folder.path(), &server).pull(&name(), &mut Silent).unwrap());
    assert_eq!(server.downloads()[1].from(), Some(40_000));
}

#[test]
fn a_wrong_range_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let content = Repo::with_model(BYTES).content(FILE);
    let server = serve(move |n, request, reply| match n {
        0 => reply.cut_after(40_000),
        1 => Reply::body(206, &content[50_000..]).header("Content-Range", "bytes 50000-99999/100000"),
        _ => Reply::file(&content, request),
    });
    assert_right(&store(folder.path(), &server).pull(&name(), &mut Silent).unwrap());
}

#[test]
fn a_refused_range_restarts_the_download() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(|n, _, reply| match n {
        0 => reply.cut_after(40_000),
        1 => Reply::status(416),
        _ => reply,
    });
    assert_right(&store(folder.path(), &server).pull(&name(), &mut Silent).unwrap());
    assert_eq!(server.downloads()[2].from(), None);
}

#[test]
fn a_silent_connection_times_out() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(|n, _, reply| match n {
        0 => Reply { silence: Some(Duration::from_secs(4)), ..reply.cut_after(20_000) },
        _ => reply,
    });
    let patience = refrain_hub::Retry { silence: Duration::from_millis(200), ..hasty() };
    let begin = Instant::now();
    let store = Store::open(env(folder.path(), &server)).with_retry(patience);
    assert_right(&store.pull(&name(), &mut Silent).unwrap());
    assert!(begin.elapsed() < Duration::from_secs(3));
    assert_eq!(server.downloads()[1].from(), Some(20_000));
}

#[test]
fn a_length_that_differs_from_the_listing_is_refused() {
    for extra in [-1_i64, 1] {
        let folder = tempfile::tempdir().unwrap();
        let server = serve(move |_, _, mut reply| {
            reply.body.resize((BYTES as i64 + extra) as usize, 0);
            Reply { length: Some(reply.body.len() as u64), ..reply }
        });
        let error = store(folder.path(), &server).pull(&name(), &mut Silent).unwrap_err();
        let announced = (BYTES as i64 + extra) as u64;
        assert!(
            matches!(error, HubError::SizeMismatch { got, want: 100_000, .. } if got == announced),
            "{error}"
        );
        assert!(blobs(folder.path()).is_empty());
        assert_eq!(server.downloads().len(), 2);
    }
}

#[test]
fn an_endless_body_is_cut_off_at_the_known_length() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(|_, _, mut reply| {
        reply.body.extend(vec![7; 1_000_000]);
        Reply { length: None, ..reply }
    });
    let error = store(folder.path(), &server).pull(&name(), &mut Silent).unwrap_err();
    assert!(matches!(error, HubError::TooLong { want: 100_000, .. }), "{error}");
    assert!(blobs(folder.path()).is_empty());
}

#[test]
fn a_short_body_without_a_length_is_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(|n, _, reply| match n {
        0 => Reply { length: None, ..reply.cut_after(50_000) },
        _ => reply,
    });
    assert_right(&store(folder.path(), &server).pull(&name(), &mut Silent).unwrap());
    assert_eq!(server.downloads()[1].from(), Some(50_000));
}

#[test]
fn corrupt_bytes_are_discarded_and_downloaded_again() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(|n, _, mut reply| {
        if n == 0 {
            reply.body[77_777] ^= 1;
        }
        reply
    });
    let mut notes = Notes::default();
    assert_right(&store(folder.path(), &server).pull(&name(), &mut notes).unwrap());
    assert!(notes.has("restart m-Q4_K_M.gguf has the sha256"), "{:?}", notes.lines);
    assert_eq!(server.downloads().len(), 2);
}

#[test]
fn repeatedly_corrupt_downloads_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(|_, _, mut reply| {
        reply.body[77_777] ^= 1;
        reply
    });
    let store = store(folder.path(), &server);
    let error = store.pull(&name(), &mut Silent).unwrap_err();
    assert!(matches!(error, HubError::DigestMismatch { algorithm: "sha256", .. }), "{error}");
    assert_eq!(server.downloads().len(), 2);
    assert!(blobs(folder.path()).is_empty());
    assert_eq!(store.find(&name()).unwrap(), None);
}

#[test]
fn small_files_are_verified_by_their_git_checksum() {
    let folder = tempfile::tempdir().unwrap();
    let repo = Repo::new("o/r", &[("config.json", b"{}"), ("model.safetensors", b"w")]);
    let server = Server::start(move |request| match request.path.ends_with("config.json") {
        true => Reply::body(200, "[]"),
        false => repo.answer(request),
    });
    let error = store(folder.path(), &server).pull(&name(), &mut Silent).unwrap_err();
    assert!(matches!(error, HubError::DigestMismatch { algorithm: "git sha1", .. }), "{error}");
}

#[test]
fn a_corrupt_partial_download_is_detected() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(|_, _, reply| reply);
    let store = store(folder.path(), &server);
    let repo_folder = folder.path().join("huggingface/hub/models--o--r/blobs");
    fs::create_dir_all(&repo_folder).unwrap();
    let content = Repo::with_model(BYTES).content(FILE);
    let leftover = repo_folder.join(format!("{}.incomplete", support::sha256(&content)));
    for length in [10, BYTES, BYTES + 1] {
        fs::write(&leftover, vec![0; length]).unwrap();
        assert_right(&store.pull(&name(), &mut Silent).unwrap());
        store.remove(&name()).unwrap();
        fs::create_dir_all(&repo_folder).unwrap();
    }
}

#[test]
fn refusals_become_specific_errors() {
    let with = |token: Option<&str>, status: u16, code: &'static str| {
        let folder = tempfile::tempdir().unwrap();
        let server = Server::start(move |_| Reply::status(status).header("X-Error-Code", code));
        let env = Env { hf_token: token.and_then(Token::new), ..env(folder.path(), &server) };
        let error = Store::open(env).with_retry(hasty()).pull(&name(), &mut Silent).unwrap_err();
        (error, server.requests().len(), server.url())
    };
    let (error, n_requests, url) = with(None, 401, "GatedRepo");
    assert_eq!(error.to_string(), "o/r is gated: accept its terms first");
    assert_eq!(
        error.hint().unwrap(),
        format!("accept the terms at {url}/o/r, then set HF_TOKEN to an access token of that account")
    );
    assert_eq!(n_requests, 1);
    let (error, ..) = with(Some("t"), 403, "GatedRepo");
    assert!(error.hint().unwrap().ends_with("with the account of HF_TOKEN"));
    assert!(matches!(with(None, 401, "").0, HubError::RepoNotFound { with_token: false, .. }));
    assert!(matches!(with(Some("t"), 401, "").0, HubError::TokenRefused { status: 401, .. }));
    assert!(matches!(with(Some("t"), 403, "").0, HubError::TokenRefused { status: 403, .. }));
    assert!(matches!(with(None, 404, "").0, HubError::RepoNotFound { .. }));
    assert!(matches!(with(None, 404, "RevisionNotFound").0, HubError::RevisionNotFound { .. }));
    assert!(matches!(with(None, 418, ""), (HubError::Status { status: 418, .. }, 1, _)));
    assert!(matches!(with(None, 429, ""), (HubError::RateLimited { attempts: 3, .. }, 3, _)));
    assert!(matches!(with(None, 500, ""), (HubError::Status { status: 500, .. }, 3, _)));
}

#[test]
fn temporary_refusals_are_retried() {
    for status in [408, 429, 500, 503] {
        let folder = tempfile::tempdir().unwrap();
        let server = serve(move |n, _, reply| match n {
            0 => Reply::status(status).header("Retry-After", "1"),
            _ => reply,
        });
        let mut notes = Notes::default();
        assert_right(&store(folder.path(), &server).pull(&name(), &mut notes).unwrap());
        assert!(notes.has(&format!("retry 2 status {status}")), "{:?}", notes.lines);
    }
}

#[test]
fn an_expired_signature_gets_a_fresh_one() {
    let folder = tempfile::tempdir().unwrap();
    let content = Repo::with_model(BYTES).content(FILE);
    let calls = Calls::default();
    let storage = Server::start(move |request| match calls.next() {
        0 => Reply::status(403),
        _ => Reply::file(&content, request),
    });
    let elsewhere = storage.url();
    let server = serve(move |_, _, _| Reply::status(302).header("Location", format!("{elsewhere}/x")));
    assert_right(&store(folder.path(), &server).pull(&name(), &mut Silent).unwrap());
    assert_eq!(server.downloads().len(), 2);
}

#[test]
fn endless_and_invalid_redirects_are_refused() {
    for location in ["/again", "ftp://x/y", "http://"] {
        let folder = tempfile::tempdir().unwrap();
        let server = Server::start(move |_| Reply::status(302).header("Location", location));
        let error = store(folder.path(), &server).pull(&name(), &mut Silent).unwrap_err();
        assert!(matches!(error, HubError::BadRedirect { .. }), "{location}: {error}");
        assert!(server.requests().len() <= 8);
    }
}

#[test]
fn invalid_listings_and_names_outside_the_cache_are_refused() {
    for listing in ["<html>", "{}", r#"{"sha":"../../../x","siblings":[]}"#] {
        let folder = tempfile::tempdir().unwrap();
        let server = Server::start(move |_| Reply::body(200, listing));
        let error = store(folder.path(), &server).pull(&name(), &mut Silent).unwrap_err();
        assert!(matches!(error, HubError::BadListing { .. }), "{listing}: {error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

#[test]
fn an_unreachable_endpoint_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let gone = Server::start(|_| Reply::status(500)).url();
    let pull = |endpoint: &str| {
        let env = Env { hf_endpoint: endpoint.to_owned(), ..Env::rooted(folder.path()) };
        Store::open(env).with_retry(hasty()).pull(&name(), &mut Silent).unwrap_err()
    };
    let error = pull(&gone);
    assert!(matches!(&error, HubError::Unreachable { url, .. } if url.starts_with(&gone)), "{error}");
    for endpoint in ["huggingface.co", "ftp://x", "", "http://"] {
        assert!(matches!(pull(endpoint), HubError::BadEndpoint { .. }), "{endpoint}");
    }
}

/// A disk with limited space, which it reports or which only a write reveals.
struct SmallDisk {
    says: Option<u64>,
    room: u64,
}

struct SmallFile {
    file: Box<dyn DiskFile>,
    room: u64,
}

impl Disk for SmallDisk {
    fn free_bytes(&self, _path: &Path) -> Option<u64> {
        self.says
    }

    fn append(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(SmallFile { file: RealDisk.append(path)?, room: self.room }))
    }
}

impl io::Write for SmallFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(self.room as usize);
        if n == 0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.room -= n as u64;
        self.file.write(&bytes[..n])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl DiskFile for SmallFile {
    fn sync(&mut self) -> io::Result<()> {
        self.file.sync()
    }
}

#[test]
fn a_model_that_cannot_fit_is_refused_before_the_first_byte() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(|_, _, reply| reply);
    let store = store(folder.path(), &server).with_disk(SmallDisk { says: Some(50_000), room: 0 });
    let error = store.pull(&name(), &mut Silent).unwrap_err();
    assert!(matches!(error, HubError::NoSpace { need, free: Some(50_000), .. } if need > 100_000), "{error}");
    assert!(error.to_string().ends_with("48.8 KiB free"), "{error}");
    assert!(error.hint().unwrap().starts_with("remove models that are no longer needed"));
    assert!(server.downloads().is_empty());
}

#[test]
fn a_pull_resumes_after_the_disk_was_full() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve(|_, _, reply| reply);
    let full = store(folder.path(), &server).with_disk(SmallDisk { says: None, room: 60_000 });
    let error = full.pull(&name(), &mut Silent).unwrap_err();
    assert!(matches!(error, HubError::NoSpace { free: None, .. }), "{error}");
    assert_eq!(server.downloads().len(), 1, "a full disk is no broken connection");
    assert_right(&store(folder.path(), &server).pull(&name(), &mut Silent).unwrap());
    assert_eq!(server.downloads()[1].from(), Some(60_000));
}

#[test]
fn an_unwritable_store_is_an_error_with_path_and_hint() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "in the way").unwrap();
    let server = serve(|_, _, reply| reply);
    let env = Env { hf_cache: file.join("hub"), ..env(folder.path(), &server) };
    let error = Store::open(env).with_retry(hasty()).pull(&name(), &mut Silent).unwrap_err();
    assert!(matches!(&error, HubError::Write { path, .. } if path.starts_with(&file)), "{error}");
    assert!(error.hint().unwrap().contains("HF_HOME"));
}

#[test]
#[cfg(unix)]
fn a_read_only_store_still_finds_its_models() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let server = serve(|_, _, reply| reply);
    let store = store(folder.path(), &server);
    let model = store.pull(&name(), &mut Silent).unwrap();
    let folders = ["huggingface/hub", "huggingface/hub/models--o--r", "huggingface/hub/models--o--r/blobs"];
    let set = |mode| {
        for path in folders {
            fs::set_permissions(folder.path().join(path), fs::Permissions::from_mode(mode)).unwrap();
        }
    };
    set(0o555);
    assert_eq!(store.find(&name()).unwrap().unwrap(), model);
    // The model is complete, so nothing needs to be written.
    assert_eq!(store.pull(&name(), &mut Silent).unwrap(), model);
    let other = store.pull(&ModelName::parse("o/other").unwrap(), &mut Silent);
    set(0o755);
    // Root can write anyway and then finds no files of this model.
    assert!(matches!(other, Err(HubError::Write { .. } | HubError::Status { status: 404, .. })), "{other:?}");
}
