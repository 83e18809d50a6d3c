//! Cross-origin requests: which web pages may send requests and read the answers.

use crate::error::ServeError;
use axum::http::{HeaderName, HeaderValue, Method, Uri, header};
use std::time::Duration;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// Headers of answers that pages may read besides the usual ones.
const EXPOSED: [&str; 6] = [
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
];

/// Answers the questions of browsers for these origins; `None` without origins.
pub(super) fn layer(origins: &[String]) -> Result<Option<CorsLayer>, ServeError> {
    if origins.is_empty() {
        return Ok(None);
    }
    let allowed = match origins.iter().any(|origin| origin == "*") {
        true => AllowOrigin::any(),
        false => AllowOrigin::list(origins.iter().map(|text| origin(text)).collect::<Result<Vec<_>, _>>()?),
    };
    let exposed = EXPOSED.map(HeaderName::from_static).into_iter().chain([header::RETRY_AFTER]);
    let layer = CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(exposed.collect::<Vec<_>>())
        .max_age(Duration::from_secs(600));
    Ok(Some(layer))
}

/// Browsers send the scheme, the host, and the port if it is not the usual one.
fn origin(text: &str) -> Result<HeaderValue, ServeError> {
    let wrong = || ServeError::Origin { origin: text.chars().take(100).collect() };
    let uri: Uri = text.parse().map_err(|_| wrong())?;
    let is_origin = matches!(uri.scheme_str(), Some("http" | "https"))
        && uri.host().is_some_and(|host| !host.is_empty())
        && uri.path_and_query().is_none_or(|path| path == "/")
        && !text.ends_with('/');
    if is_origin { HeaderValue::from_str(text).map_err(|_| wrong()) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_has_a_scheme_and_a_host_and_nothing_after_them() {
        for right in ["https://example.com", "http://localhost:3000", "http://[::1]:80"] {
            assert!(origin(right).is_ok(), "{right}");
        }
        for wrong in
            ["", "example.com", "https://", "https://a.b/", "https://a.b/c", "ftp://a.b", "null", "a\nb"]
        {
            assert!(origin(wrong).is_err(), "{wrong}");
        }
    }
}
