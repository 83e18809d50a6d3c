//! Requests to the hub: redirects, scope of the token, retries.

use std::time::{Duration, Instant};

use ureq::http::{HeaderMap, Response, StatusCode, Uri, header};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body, Proxy};

use crate::env::{Env, Token};
use crate::error::HubError;
use crate::name::RepoName;
use crate::progress::{Progress, ProgressEvent};

/// Retries of failed requests.
#[derive(Debug, Clone, Copy)]
pub struct Retry {
    /// Consecutive failed attempts before giving up. An attempt with good progress resets the count.
    pub attempts: u32,
    /// Pause after the first failure; it doubles with each further one.
    pub first_pause: Duration,
    /// Maximum pause, even if the server requests a longer one.
    pub longest_pause: Duration,
    /// Time without data after which a connection counts as broken.
    pub silence: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            attempts: 5,
            first_pause: Duration::from_millis(500),
            longest_pause: Duration::from_secs(30),
            silence: Duration::from_secs(30),
        }
    }
}

impl Retry {
    fn pause(&self, n_failures: u32, requested: Option<Duration>) -> Duration {
        let doubled = self.first_pause.saturating_mul(1 << n_failures.saturating_sub(1).min(16));
        requested.map_or(doubled, |requested| requested.max(doubled)).min(self.longest_pause)
    }
}

/// A failed request.
#[derive(Debug)]
pub(crate) enum RequestFailure {
    /// A temporary failure: another attempt may succeed.
    Temporary { because: String, status: Option<u16>, pause: Option<Duration> },
    /// A permanent failure.
    Final(HubError),
}

impl RequestFailure {
    pub(crate) fn broken(because: impl ToString) -> Self {
        Self::Temporary { because: because.to_string(), status: None, pause: None }
    }
}

impl From<HubError> for RequestFailure {
    fn from(error: HubError) -> Self {
        Self::Final(error)
    }
}

/// Description of a file from the headers of a response.
#[derive(Debug, Default)]
pub(crate) struct Described {
    pub(crate) etag: Option<String>,
    pub(crate) bytes: Option<u64>,
}

/// Scheme, host and port, which a token is bound to.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ServerOrigin {
    scheme: String,
    host: String,
    port: u16,
}

impl ServerOrigin {
    fn of(uri: &Uri) -> Option<Self> {
        let scheme = uri.scheme_str()?.to_ascii_lowercase();
        let default = match scheme.as_str() {
            "https" => 443,
            "http" => 80,
            _ => return None,
        };
        // User information would appear in messages and can make one host look like another.
        if uri.authority()?.as_str().contains('@') {
            return None;
        }
        let host = uri.host().filter(|host| !host.is_empty())?.to_ascii_lowercase();
        Some(Self { scheme, host, port: uri.port_u16().unwrap_or(default) })
    }
}

/// Client of one hub.
pub(crate) struct Client {
    agent: Agent,
    endpoint: String,
    origin: ServerOrigin,
    token: Option<Token>,
    pub(crate) retry: Retry,
}

impl Client {
    pub(crate) fn new(env: &Env, retry: Retry) -> Result<Self, HubError> {
        let bad = || HubError::BadEndpoint { endpoint: env.hf_endpoint.clone() };
        let uri: Uri = env.hf_endpoint.parse().map_err(|_| bad())?;
        let origin = ServerOrigin::of(&uri).ok_or_else(bad)?;
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // Redirects are followed by this crate, so that the token stays with its origin.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .proxy(if env.use_proxy { Proxy::try_from_env() } else { None })
            .tls_config(TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build())
            .user_agent(concat!("refrain/", env!("CARGO_PKG_VERSION")))
            // Lengths and ranges must refer to the uncompressed file.
            .accept_encoding("identity")
            .timeout_resolve(Some(Duration::from_secs(15)))
            .timeout_connect(Some(Duration::from_secs(15)))
            .timeout_recv_response(Some(retry.silence.saturating_mul(2)))
            .timeout_per_read(Some(retry.silence))
            .timeout_per_write(Some(retry.silence))
            .build();
        Ok(Self {
            agent: config.into(),
            endpoint: env.hf_endpoint.clone(),
            origin,
            token: env.hf_token.clone(),
            retry,
        })
    }

    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Requests `url` from byte `from` on. The response has status 200, 206 or 416.
    pub(crate) fn get(
        &self,
        repo: &RepoName,
        url: &str,
        from: u64,
    ) -> Result<Response<Body>, RequestFailure> {
        let mut uri = parse(url)?;
        for _ in 0..MAX_REDIRECTS {
            let mut request = self.agent.get(uri.clone());
            if let Some(bearer) = self.bearer_for(&uri) {
                request = request.header(header::AUTHORIZATION, bearer);
            }
            if from > 0 {
                request = request.header(header::RANGE, format!("bytes={from}-"));
            }
            let response = request.call().map_err(|error| classify(url, &error))?;
            match response.status() {
                StatusCode::OK | StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
                    return Ok(response);
                }
                status if status.is_redirection() => uri = self.redirect(&uri, response.headers())?,
                status => return Err(self.refusal(repo, &uri, status, response.headers())),
            }
        }
        Err(HubError::BadRedirect { url: url.to_owned(), because: "too many times" }.into())
    }

    /// Requests size and checksum of a file without its content.
    pub(crate) fn describe(&self, repo: &RepoName, url: &str) -> Result<Described, RequestFailure> {
        let mut uri = parse(url)?;
        let mut described = Described::default();
        for _ in 0..MAX_REDIRECTS {
            let mut request = self.agent.head(uri.clone());
            if let Some(bearer) = self.bearer_for(&uri) {
                request = request.header(header::AUTHORIZATION, bearer);
            }
            let response = request.call().map_err(|error| classify(url, &error))?;
            let headers = response.headers();
            let status = response.status();
            let linked = text(headers, "x-linked-etag");
            // ETag and length of a redirect are not those of the file.
            let own = |name| {
                if status.is_success() { text(headers, name) } else { None }
            };
            described.etag = described.etag.or_else(|| linked.or_else(|| own("etag")).map(bare_etag));
            let bytes = text(headers, "x-linked-size").or_else(|| own("content-length"));
            described.bytes = described.bytes.or_else(|| bytes.and_then(|bytes| bytes.parse().ok()));
            if described.etag.is_some() && described.bytes.is_some() || status.is_success() {
                return Ok(described);
            }
            if !status.is_redirection() {
                return Err(self.refusal(repo, &uri, status, headers));
            }
            uri = self.redirect(&uri, headers)?;
            if ServerOrigin::of(&uri).as_ref() != Some(&self.origin) {
                // The ETag of another host is not a checksum of the hub.
                return Ok(described);
            }
        }
        Err(HubError::BadRedirect { url: url.to_owned(), because: "too many times" }.into())
    }

    /// Repeats `request` until it succeeds, fails permanently or runs out of attempts.
    pub(crate) fn with_retries<T>(
        &self,
        url: &str,
        progress: &mut dyn Progress,
        mut request: impl FnMut() -> Result<T, RequestFailure>,
    ) -> Result<T, HubError> {
        // Fail soon when offline; more attempts are for downloads in progress.
        const MAX_ATTEMPTS: u32 = 3;
        let limit = self.retry.attempts.min(MAX_ATTEMPTS);
        let url = url.split('?').next().unwrap_or(url);
        let mut n_failures = 0;
        loop {
            match request() {
                Ok(value) => return Ok(value),
                Err(RequestFailure::Final(error)) => return Err(error),
                Err(RequestFailure::Temporary { because, status, pause }) => {
                    n_failures += 1;
                    if n_failures >= limit {
                        return Err(given_up(url, n_failures, because, status));
                    }
                    self.pause(url, n_failures, limit, &because, pause, progress)?;
                }
            }
        }
    }

    /// Waits before attempt `n_failures + 1`.
    pub(crate) fn pause(
        &self,
        file: &str,
        n_failures: u32,
        limit: u32,
        because: &str,
        requested: Option<Duration>,
        progress: &mut dyn Progress,
    ) -> Result<(), HubError> {
        let after = self.retry.pause(n_failures, requested);
        tracing::debug!(file, because, ?after, "retrying");
        progress.on(ProgressEvent::Retry { file, attempt: n_failures + 1, limit, after, because });
        let until = Instant::now() + after;
        loop {
            if progress.cancelled() {
                return Err(HubError::Cancelled);
            }
            let remaining = until.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return Ok(());
            }
            std::thread::sleep(remaining.min(Duration::from_millis(50)));
        }
    }

    fn bearer_for(&self, uri: &Uri) -> Option<String> {
        let token = self.token.as_ref()?;
        (ServerOrigin::of(uri).as_ref() == Some(&self.origin)).then(|| token.bearer())
    }

    fn redirect(&self, from: &Uri, headers: &HeaderMap) -> Result<Uri, HubError> {
        let bad = |because| HubError::BadRedirect { url: without_query(from), because };
        let location = text(headers, "location").ok_or_else(|| bad("to nowhere"))?;
        let target = resolve(from, location).ok_or_else(|| bad("to an invalid address"))?;
        let secure = |uri: &Uri| uri.scheme_str().is_some_and(|scheme| scheme.eq_ignore_ascii_case("https"));
        if secure(from) && !secure(&target) {
            return Err(bad("from https to http"));
        }
        Ok(target)
    }

    /// Converts an unsuccessful response to an error.
    fn refusal(&self, repo: &RepoName, uri: &Uri, status: StatusCode, headers: &HeaderMap) -> RequestFailure {
        let url = without_query(uri);
        let with_token = self.token.is_some();
        let is_from_hub = ServerOrigin::of(uri).as_ref() == Some(&self.origin);
        let code = text(headers, "x-error-code").unwrap_or_default();
        let (id, number) = (repo.id(), status.as_u16());
        let not_found =
            || HubError::RepoNotFound { repo: repo.id(), endpoint: self.endpoint.clone(), with_token };
        let error = match number {
            // A storage host refuses expired signed addresses; the next attempt gets a new one.
            401 | 403 if !is_from_hub => {
                return RequestFailure::Temporary {
                    because: format!("status {status}"),
                    status: Some(number),
                    pause: None,
                };
            }
            401 | 403 if code == "GatedRepo" => {
                HubError::Gated { repo: id, page: format!("{}/{}", self.endpoint, repo.id()), with_token }
            }
            401 | 403 if with_token && code != "RepoNotFound" => {
                HubError::TokenRefused { repo: id, status: number }
            }
            // The hub does not reveal which private models exist.
            401 | 403 => not_found(),
            404 if code == "RevisionNotFound" => {
                HubError::RevisionNotFound { repo: id, revision: repo.revision().to_owned() }
            }
            404 if code == "RepoNotFound" || uri.path().contains("/api/models/") => not_found(),
            408 | 429 | 500..=599 => {
                let pause =
                    text(headers, "retry-after").and_then(|s| s.trim().parse().ok()).map(Duration::from_secs);
                return RequestFailure::Temporary {
                    because: format!("status {status}"),
                    status: Some(number),
                    pause,
                };
            }
            _ => HubError::Status { url, status: number },
        };
        RequestFailure::Final(error)
    }
}

const MAX_REDIRECTS: usize = 8;

/// Returns the error after the last attempt.
pub(crate) fn given_up(url: &str, attempts: u32, because: String, status: Option<u16>) -> HubError {
    let url = url.to_owned();
    match status {
        Some(429) => HubError::RateLimited { url, attempts },
        Some(status) => HubError::Status { url, status },
        None => HubError::Unreachable { url, attempts, because },
    }
}

/// Percent-encodes reserved characters of a path.
pub(crate) fn encode_path(path: &str) -> String {
    let mut encoded = String::with_capacity(path.len());
    for byte in path.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' => {
                encoded.push(char::from(byte))
            }
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

fn parse(url: &str) -> Result<Uri, HubError> {
    url.parse().map_err(|_| HubError::BadEndpoint { endpoint: url.to_owned() })
}

fn classify(url: &str, error: &ureq::Error) -> RequestFailure {
    let is_permanent = match error {
        ureq::Error::HostNotFound | ureq::Error::BadUri(_) | ureq::Error::InvalidProxyUrl => true,
        // A retry does not fix a certificate.
        ureq::Error::Tls(_) | ureq::Error::Rustls(_) | ureq::Error::Pem(_) => true,
        ureq::Error::Io(io) => io.kind() == std::io::ErrorKind::InvalidData,
        _ => false,
    };
    if is_permanent {
        HubError::Unreachable {
            url: url.split('?').next().unwrap_or(url).to_owned(),
            attempts: 1,
            because: error.to_string(),
        }
        .into()
    } else {
        RequestFailure::broken(error)
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

fn bare_etag(etag: &str) -> String {
    etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"').to_owned()
}

/// Returns an address without its query, which holds secrets in signed addresses.
fn without_query(uri: &Uri) -> String {
    let (scheme, authority) = (uri.scheme_str().unwrap_or("http"), uri.host().unwrap_or_default());
    let port = uri.port_u16().map(|port| format!(":{port}")).unwrap_or_default();
    format!("{scheme}://{authority}{port}{}", uri.path())
}

/// Resolves a `Location` header.
fn resolve(base: &Uri, location: &str) -> Option<Uri> {
    let location = location.split('#').next()?;
    let (scheme, authority) = (base.scheme_str()?, base.authority()?.as_str());
    let absolute = if location.contains("://") {
        location.to_owned()
    } else if let Some(address) = location.strip_prefix("//") {
        format!("{scheme}://{address}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else {
        let folder = base.path().rsplit_once('/').map_or("", |(folder, _)| folder);
        format!("{scheme}://{authority}{folder}/{location}")
    };
    let uri: Uri = absolute.parse().ok()?;
    ServerOrigin::of(&uri).map(|_| uri)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_resolved_against_their_address() {
        let base: Uri = "https://hub.test/a/b?x=1".parse().unwrap();
        let to = |location| resolve(&base, location).map(|uri| uri.to_string());
        assert_eq!(to("https://cdn.test/y?sig=1#f").unwrap(), "https://cdn.test/y?sig=1");
        assert_eq!(to("//cdn.test/y").unwrap(), "https://cdn.test/y");
        assert_eq!(to("/c/d?e").unwrap(), "https://hub.test/c/d?e");
        assert_eq!(to("c").unwrap(), "https://hub.test/a/c");
        assert_eq!(to("ftp://x/y"), None);
        assert_eq!(to("https://hub.test@evil.test/y"), None);
        assert_eq!(to("file:///etc/passwd"), None);
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let of = |text: &str| ServerOrigin::of(&text.parse().unwrap());
        assert_eq!(of("https://Hub.test/a"), of("https://hub.test:443/b"));
        for other in ["http://hub.test/a", "https://hub.test:8443/a", "https://hub.test.evil/a"] {
            assert_ne!(of("https://hub.test/a"), of(other));
        }
    }

    #[test]
    fn pauses_double_and_are_bounded() {
        let retry = Retry::default();
        assert_eq!(retry.pause(1, None), Duration::from_millis(500));
        assert_eq!(retry.pause(3, None), Duration::from_secs(2));
        assert_eq!(retry.pause(40, None), retry.longest_pause);
        assert_eq!(retry.pause(1, Some(Duration::from_secs(4))), Duration::from_secs(4));
        assert_eq!(retry.pause(1, Some(Duration::from_secs(86_400))), retry.longest_pause);
    }

    #[test]
    fn file_names_are_encoded() {
        assert_eq!(encode_path("a b/c+d?.gguf"), "a%20b/c%2Bd%3F.gguf");
    }
}
