//! The web page, embedded: no build step, nothing from other servers.

use axum::extract::Path;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use std::sync::LazyLock;

/// Nothing but the page's own files may be loaded or run, and no other page may show it in a frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

macro_rules! files {
    ($($name:literal),+ $(,)?) => {
        /// The files below `/page/`.
        const FILES: &[(&str, &str)] = &[$(($name, include_str!(concat!("../page/", $name)))),+];
    };
}

files!(
    "api.js",
    "app.js",
    "conversation.js",
    "dom.js",
    "early.js",
    "engine.js",
    "highlight.js",
    "icon.svg",
    "inline.js",
    "markdown.js",
    "prefs.js",
    "render.js",
    "reply.js",
    "sampling.js",
    "sse.js",
    "status.js",
    "store.js",
    "style.css",
    "thread.js",
    "transfer.js",
);

const INDEX: &str = include_str!("../page/index.html");

/// Changes with every file, so that a browser never mixes files of two versions.
static TAG: LazyLock<String> = LazyLock::new(|| {
    let mut hasher = Sha256::new();
    hasher.update(INDEX);
    FILES.iter().for_each(|(_, text)| hasher.update(text));
    let hex: String = hasher.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("\"{hex}\"")
});

pub(crate) async fn index(headers: HeaderMap) -> Response {
    answer(&headers, "text/html; charset=utf-8", INDEX)
}

pub(crate) async fn file(Path(name): Path<String>, headers: HeaderMap) -> Response {
    let kind = match name.rsplit('.').next() {
        Some("js") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        _ => "image/svg+xml",
    };
    match FILES.iter().find(|(known, _)| *known == name) {
        Some((_, text)) => answer(&headers, kind, text),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

fn answer(headers: &HeaderMap, kind: &'static str, text: &'static str) -> Response {
    let is_known = headers.get(header::IF_NONE_MATCH).is_some_and(|tag| tag.as_bytes() == TAG.as_bytes());
    let mut response = if is_known { StatusCode::NOT_MODIFIED.into_response() } else { text.into_response() };
    let fixed = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ];
    for (name, value) in fixed {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    if let Ok(tag) = HeaderValue::from_str(&TAG) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_page_is_embedded_and_named_where_it_is_used() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/page");
        for entry in std::fs::read_dir(folder).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let is_served = name == "index.html" || FILES.iter().any(|(known, _)| *known == name);
            assert!(is_served || name == "package.json", "{name} is not embedded");
        }
        for (name, text) in FILES {
            for import in text.lines().filter_map(|line| line.split_once("from \"./")) {
                let target = import.1.trim_end_matches([';', '"']);
                assert!(FILES.iter().any(|(known, _)| *known == target), "{name} imports {target}");
            }
        }
        assert!(
            !INDEX.contains("http://") && !INDEX.contains("https://"),
            "the page loads nothing from elsewhere"
        );
        assert!(!INDEX.contains("style=") && !INDEX.contains("onclick="), "the policy forbids it");
    }
}
