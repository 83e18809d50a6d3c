//! API keys: who may send requests, and how many.

mod rate; // what a key may send per minute

use crate::error::{ApiError, ServeError};
use axum::http::{HeaderMap, StatusCode, header};
use rate::{KeyRates, Limit};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use subtle::ConstantTimeEq;

/// Maximum size of a key file.
const MAX_FILE_BYTES: usize = 1 << 20;
const MIN_KEY_CHARS: usize = 8;

/// The keys that a server accepts. Without any, everybody may send requests.
#[derive(Clone, Debug, Default)]
pub struct ApiKeys {
    keys: Vec<Arc<ApiKey>>,
}

/// A key. Only its digest is kept, so that comparing takes the same time whatever is sent.
#[derive(Debug)]
pub(crate) struct ApiKey {
    digest: [u8; 32],
    name: String,
    /// Maximum number of open requests.
    max_open: Option<usize>,
    /// Whether its requests share KV blocks with others.
    pub(crate) shares_prefix: bool,
    per_minute: KeyRates,
    /// Outlives the key if the file is read again.
    n_open: Arc<AtomicUsize>,
}

fn digest(key: &[u8]) -> [u8; 32] {
    Sha256::digest(key).into()
}

impl ApiKeys {
    /// Whether requests need a key.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Adds a key without limits.
    pub fn add(&mut self, name: &str, key: &str) {
        let key = ApiKey {
            digest: digest(key.as_bytes()),
            name: name.to_owned(),
            max_open: None,
            shares_prefix: true,
            per_minute: KeyRates::default(),
            n_open: Arc::default(),
        };
        self.keys.push(Arc::new(key));
    }

    /// Adds the keys of a file: one per line, with settings after it.
    pub fn read(&mut self, path: &Path) -> Result<(), ServeError> {
        let unreadable = |source| ServeError::Read { path: path.to_owned(), source };
        let n_bytes = std::fs::metadata(path).map_err(unreadable)?.len();
        if n_bytes > MAX_FILE_BYTES as u64 {
            let source =
                std::io::Error::other(format!("it has {n_bytes} bytes, the maximum is {MAX_FILE_BYTES}"));
            return Err(unreadable(source));
        }
        let text = std::fs::read_to_string(path).map_err(unreadable)?;
        for (idx, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            self.keys.push(Arc::new(read_line(line, path, idx + 1)?));
        }
        Ok(())
    }

    /// Continues the counts of the same keys in `old`.
    pub(crate) fn continues(self, old: &ApiKeys) -> ApiKeys {
        let continued = |key: Arc<ApiKey>| {
            let Some(before) = old.keys.iter().find(|before| before.digest == key.digest) else { return key };
            // Nobody else has it yet.
            let Ok(mut key) = Arc::try_unwrap(key) else { return before.clone() };
            key.n_open = before.n_open.clone();
            key.per_minute.continues(&before.per_minute);
            Arc::new(key)
        };
        ApiKeys { keys: self.keys.into_iter().map(continued).collect() }
    }

    /// Finds the key of a request.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<Option<Arc<ApiKey>>, ApiError> {
        if self.keys.is_empty() {
            return Ok(None);
        }
        let denied = |code, message: &str| {
            let hint = "send the header `Authorization: Bearer KEY`";
            Err(ApiError::new(StatusCode::UNAUTHORIZED, code, message).hint(hint))
        };
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
            let (scheme, key) = value.as_bytes().split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then_some(key.trim_ascii())
        });
        // Anthropic's clients send this one.
        let Some(sent) = bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes())) else {
            return denied("missing_api_key", "this server asks for an API key");
        };
        let sent = digest(sent);
        let mut found = None;
        for key in &self.keys {
            if bool::from(key.digest.ct_eq(&sent)) {
                found = Some(key.clone());
            }
        }
        match found {
            Some(key) => Ok(Some(key)),
            None => denied("invalid_api_key", "the API key is not known to this server"),
        }
    }
}

fn read_line(line: &str, path: &Path, line_number: usize) -> Result<ApiKey, ServeError> {
    let path: PathBuf = path.to_owned();
    let wrong = |reason: String| ServeError::KeyLine { path: path.clone(), line: line_number, reason };
    let mut words = line.split_whitespace();
    let key = words.next().unwrap_or_default();
    if key.len() < MIN_KEY_CHARS {
        return Err(wrong(format!(
            "the key has {} characters, at least {MIN_KEY_CHARS} are needed",
            key.len()
        )));
    }
    let mut read = ApiKey {
        digest: digest(key.as_bytes()),
        name: format!("line {line_number}"),
        max_open: None,
        shares_prefix: true,
        per_minute: KeyRates::default(),
        n_open: Arc::default(),
    };
    for word in words {
        let number = |n: &str| match n.parse::<u32>() {
            Ok(n) if n > 0 => Ok(n),
            _ => Err(wrong(format!("{word} is not a number from 1 to {}", u32::MAX))),
        };
        match word.split_once('=') {
            Some(("name", name)) => read.name = name.to_owned(),
            Some(("concurrent", n)) => read.max_open = Some(number(n)? as usize),
            Some(("requests-per-minute", n)) => read.per_minute.requests = Some(Limit::new(number(n)?)),
            Some(("tokens-per-minute", n)) => read.per_minute.tokens = Some(Limit::new(number(n)?)),
            None if word == "no-prefix-cache" => read.shares_prefix = false,
            _ => return Err(wrong(format!("the setting {word:?} is not known"))),
        }
    }
    Ok(read)
}

/// A request of a key that is being served.
pub(crate) struct KeyUse {
    key: Arc<ApiKey>,
}

impl ApiKey {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Writes the headers that say what is left of its limits.
    pub(crate) fn write_limits(&self, headers: &mut HeaderMap) {
        self.per_minute.write_headers(headers, Instant::now());
    }
}

fn limited(message: String, hint: &str, retry_after: Duration) -> ApiError {
    let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", message);
    ApiError { retry_after: Some(retry_after), ..error }.hint(hint)
}

impl KeyUse {
    /// Takes one of the key's places for a request with this many tokens, and counts both.
    pub(crate) fn open(key: &Arc<ApiKey>, n_tokens: usize) -> Result<KeyUse, ApiError> {
        let n_before = key.n_open.fetch_add(1, Ordering::Relaxed);
        let used = KeyUse { key: key.clone() };
        if let Some(max) = key.max_open.filter(|max| n_before >= *max) {
            let message = format!("the key {} has {n_before} open requests, the maximum is {max}", key.name);
            return Err(limited(message, "wait until one of them has ended", Duration::from_secs(1)));
        }
        key.per_minute.take(&key.name, n_tokens, Instant::now())?;
        Ok(used)
    }

    /// Counts tokens of the reply.
    pub(crate) fn count(&self, n_tokens: usize) {
        if let Some(tokens) = &self.key.per_minute.tokens {
            tokens.charge(n_tokens, Instant::now());
        }
    }
}

impl Drop for KeyUse {
    fn drop(&mut self) {
        self.key.n_open.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())])
    }

    #[test]
    fn a_key_is_accepted_as_bearer_or_in_a_header_of_its_own() {
        let mut keys = ApiKeys::default();
        assert!(keys.check(&HeaderMap::new()).unwrap().is_none());
        keys.add("one", "sk-correct");
        assert!(keys.check(&headers("authorization", "Bearer sk-correct")).unwrap().is_some());
        assert!(keys.check(&headers("authorization", "bearer  sk-correct ")).unwrap().is_some());
        assert!(keys.check(&headers("x-api-key", "sk-correct")).unwrap().is_some());
        for wrong in ["Bearer sk-wrong", "Bearer ", "Bearer", "Basic sk-correct", ""] {
            let error = keys.check(&headers("authorization", wrong)).unwrap_err();
            assert_eq!(error.status, StatusCode::UNAUTHORIZED, "{wrong}");
        }
        assert_eq!(keys.check(&HeaderMap::new()).unwrap_err().code, Some("missing_api_key"));
    }

    #[test]
    fn a_key_file_has_settings_and_its_errors_do_not_show_the_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        std::fs::write(&path, "# ours\n\nsecret-key-1 name=ci concurrent=1 no-prefix-cache\n").unwrap();
        let mut keys = ApiKeys::default();
        keys.read(&path).unwrap();
        let key = keys.check(&headers("x-api-key", "secret-key-1")).unwrap().unwrap();
        assert!(!key.shares_prefix);
        let open = KeyUse::open(&key, 1).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(KeyUse::open(&key, 1).err().unwrap().status, StatusCode::TOO_MANY_REQUESTS);
        // Reading the file again does not forget what is open.
        let mut again = ApiKeys::default();
        again.read(&path).unwrap();
        let again = again.continues(&keys);
        let reread = again.check(&headers("x-api-key", "secret-key-1")).unwrap().unwrap();
        assert_eq!(KeyUse::open(&reread, 1).err().unwrap().status, StatusCode::TOO_MANY_REQUESTS);
        drop(open);
        assert!(KeyUse::open(&key, 1).is_ok());
        for line in [
            "secret-key-2 concurrent=0",
            "secret-key-2 tokens-per-minute=-1",
            "secret-key-2 speed=9",
            "short",
        ] {
            std::fs::write(&path, line).unwrap();
            let error = ApiKeys::default().read(&path).unwrap_err().to_string();
            assert!(error.contains("line 1") && !error.contains("secret"), "{error}");
        }
    }
}
