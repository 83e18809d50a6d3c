//! What all requests share, the routes, and the checks before each request.

use crate::api;
use crate::error::ApiError;
use crate::keys::{ApiKey, ApiKeys};
use crate::metrics::{Metrics, lock};
use crate::page;
use crate::served::Models;
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use refrain_worker::TokenBackend;
use serde_json::Value;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Bodies above this size are parsed where they may block.
const LARGE_BODY_BYTES: usize = 16 << 10;

/// The part of the log with a line for each request.
pub(crate) const REQUEST_LOG: &str = "refrain_server::requests";

/// What all requests share.
pub(crate) struct App {
    pub(crate) models: Models,
    pub(crate) backend: Arc<dyn TokenBackend>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) keys: Mutex<Arc<ApiKeys>>,
    pub(crate) limits: Limits,
    pub(crate) is_draining: AtomicBool,
}

/// Limits on requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) max_body_bytes: usize,
    pub(crate) body_timeout: Duration,
    /// Open requests without any progress for this long mean that the server is not healthy.
    pub(crate) stall: Duration,
    /// Only programs of this machine are meant to connect, and nobody needs a key.
    pub(crate) is_local: bool,
}

/// Who sent a request.
#[derive(Clone)]
pub(crate) struct Caller(pub(crate) Option<Arc<ApiKey>>);

impl Caller {
    /// Identifies the user that a request names, for fairness between users. Users of different keys are different.
    pub(crate) fn user(&self, named: Option<&str>) -> u64 {
        let mut hasher = DefaultHasher::new();
        (named, self.0.as_ref().map(|key| key.name())).hash(&mut hasher);
        hasher.finish()
    }
}

pub(crate) fn router(app: Arc<App>) -> Router {
    let routes = Router::new()
        .route("/v1/chat/completions", post(api::chat::serve))
        .route("/v1/completions", post(api::completions::serve))
        .route("/v1/messages", post(api::messages::serve))
        .route("/v1/messages/count_tokens", post(api::messages::count_tokens))
        .route("/v1/responses", post(api::responses::serve))
        .route("/v1/embeddings", post(api::embeddings::serve))
        .route("/tokenize", post(api::tokens::tokenize))
        .route("/detokenize", post(api::tokens::detokenize))
        .route("/v1/models", get(api::info::models))
        .route("/v1/models/{*name}", get(api::info::model))
        .route("/health", get(api::info::health))
        .route("/ready", get(api::info::ready))
        .route("/", get(page::index))
        .route("/page/{name}", get(page::file))
        .route("/openapi.json", get(api::openapi::serve))
        .route("/version", get(api::info::version))
        .route("/status", get(api::info::status))
        .route("/metrics", get(api::info::metrics));
    routes
        .fallback(async |request: Request| {
            let message = format!("there is no {} {}", request.method(), shortened(request.uri().path()));
            ApiError::new(StatusCode::NOT_FOUND, "unknown_url", message)
                .hint("/openapi.json lists all endpoints")
        })
        .method_not_allowed_fallback(async |request: Request| {
            let message = format!("{} does not take {}", request.uri().path(), request.method());
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "wrong_method", message)
                .hint("generation takes POST, everything else GET")
        })
        .layer(middleware::from_fn_with_state(app.clone(), gate))
        .with_state(app)
}

fn shortened(path: &str) -> String {
    path.chars().take(100).collect()
}

/// Endpoints by the name that metrics use, and whether they need a key.
fn endpoint(path: &str) -> (&'static str, bool) {
    const OPEN: [&str; 4] = ["/health", "/ready", "/version", "/openapi.json"];
    const KEYED: [&str; 11] = [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages/count_tokens",
        "/v1/messages",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/status",
        "/metrics",
    ];
    let named =
        |names: &[&'static str]| names.iter().copied().find(|name| path.strip_prefix(name) == Some(""));
    match (named(&OPEN), named(&KEYED)) {
        (Some(name), _) => (name, false),
        (None, Some(name)) => (name, true),
        _ if path.starts_with("/v1/models/") => ("/v1/models", true),
        _ if path.starts_with("/v1/") => ("unknown", true),
        _ => ("page", false),
    }
}

/// Checks every request before its endpoint does.
async fn gate(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let (endpoint, needs_key) = endpoint(path);
    let is_anthropic = endpoint.starts_with("/v1/messages");
    let (began, method) = (Instant::now(), request.method().clone());
    let admitted = admit(&app, &request, needs_key);
    let key = admitted.as_ref().ok().and_then(|caller| caller.0.clone());
    let mut response = match admitted {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => error.into_response(),
    };
    app.metrics.responded(endpoint, response.status().as_u16());
    if let Some(key) = &key {
        key.write_limits(response.headers_mut());
    }
    let error = response.extensions().get::<ApiError>();
    // What a request says is not logged.
    tracing::info!(
        target: REQUEST_LOG,
        method = method.as_str(),
        endpoint,
        status = response.status().as_u16(),
        ms = began.elapsed().as_secs_f64() * 1e3,
        key = key.as_ref().map(|key| key.name()),
        error = error.and_then(|error| error.code),
        "answered"
    );
    match response.extensions().get::<ApiError>() {
        Some(error) if is_anthropic => {
            let error = error.clone();
            let body = error.anthropic();
            error.respond(&body)
        }
        _ => response,
    }
}

fn admit(app: &App, request: &Request, needs_key: bool) -> Result<Caller, ApiError> {
    if app.limits.is_local {
        check_host(request.headers())?;
    }
    let key = if needs_key { lock(&app.keys).clone().check(request.headers())? } else { None };
    if app.is_draining.load(Ordering::Relaxed) && request.method() == Method::POST {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", "the server is stopping");
        let retry_after = Some(Duration::from_secs(5));
        return Err(ApiError { retry_after, ..error }.hint("send the request to another server"));
    }
    Ok(Caller(key))
}

/// A web page may make its own name resolve to this machine, and then read what it may not: its name gives it away.
fn check_host(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(host) = headers.get(header::HOST).and_then(|host| host.to_str().ok()) else { return Ok(()) };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    let is_address = name.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok();
    if is_address || name == "localhost" || name.ends_with(".localhost") {
        return Ok(());
    }
    let message = format!("the host {} is not this machine", shortened(name));
    let hint = "use localhost, or set an API key and listen on another address";
    Err(ApiError::new(StatusCode::FORBIDDEN, "wrong_host", message).hint(hint))
}

impl App {
    /// Reads the body as JSON, within the limits.
    async fn json(&self, request: Request) -> Result<Value, ApiError> {
        check_content_type(request.headers())?;
        let bytes = self.bytes(request.into_body()).await?;
        let is_large = bytes.len() > LARGE_BODY_BYTES;
        let parse = move || {
            serde_json::from_slice(&bytes).map_err(|error| {
                let message = format!("the body is not valid JSON: {error}");
                ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", message)
            })
        };
        if is_large { blocking(parse).await } else { parse() }
    }

    /// Reads the body as JSON and makes a `T` of it, away from the threads that serve connections.
    pub(crate) async fn read<T: Send + 'static>(
        self: &Arc<App>,
        request: Request,
        read: impl FnOnce(&App, Value) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let body = self.json(request).await?;
        let app = self.clone();
        blocking(move || read(&app, body)).await
    }

    async fn bytes(&self, body: Body) -> Result<Bytes, ApiError> {
        let max = self.limits.max_body_bytes;
        let too_large = |n_bytes: Option<u64>| {
            let message = match n_bytes {
                Some(n) => format!("the body has {n} bytes, the maximum is {max}"),
                None => format!("the body has more than {max} bytes"),
            };
            let hint = "shorten the request, or raise --max-body";
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message).hint(hint)
        };
        use axum::body::HttpBody as _;
        let announced = body.size_hint().exact();
        if announced.is_some_and(|n| n > max as u64) {
            return Err(too_large(announced));
        }
        match tokio::time::timeout(self.limits.body_timeout, Limited::new(body, max).collect()).await {
            Ok(Ok(body)) => Ok(body.to_bytes()),
            Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large(None)),
            Ok(Err(error)) => {
                let message = format!("the body cannot be read: {error}");
                Err(ApiError::new(StatusCode::BAD_REQUEST, "incomplete_body", message))
            }
            Err(_) => {
                let message = format!("the body did not arrive within {:?}", self.limits.body_timeout);
                Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "slow_body", message))
            }
        }
    }

    /// Notes that a request is being served; without any before it, waiting for progress starts now.
    pub(crate) fn open(self: &Arc<App>) -> OpenGuard {
        if self.metrics.n_open.fetch_add(1, Ordering::Relaxed) == 0 {
            self.metrics.progress(Instant::now());
        }
        OpenGuard { metrics: self.metrics.clone(), since: Instant::now() }
    }
}

/// Runs work that may take milliseconds away from the threads that serve connections.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        tracing::error!(%error, "a request failed by a defect of the server");
        let message = "the request failed by a defect of the server";
        Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
            .hint("report it with the request"))
    })
}

/// A web page of another origin can send a body of another type without asking first.
fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let given = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    let kind = given.split(|b| *b == b';').next().unwrap_or_default().trim_ascii();
    if kind.eq_ignore_ascii_case(b"application/json") {
        return Ok(());
    }
    let given: String = String::from_utf8_lossy(kind).chars().take(64).collect();
    let message = format!("the content type is {given:?}, must be application/json");
    let error = ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "wrong_content_type", message);
    Err(error.hint("send the header `Content-Type: application/json`"))
}

/// Counts a request while it is served.
pub(crate) struct OpenGuard {
    metrics: Arc<Metrics>,
    since: Instant,
}

impl OpenGuard {
    pub(crate) fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    pub(crate) fn n_open(&self) -> usize {
        self.metrics.n_open.load(Ordering::Relaxed)
    }
}

impl Drop for OpenGuard {
    fn drop(&mut self) {
        self.metrics.n_open.fetch_sub(1, Ordering::Relaxed);
        self.metrics.duration.record(self.since.elapsed());
    }
}
