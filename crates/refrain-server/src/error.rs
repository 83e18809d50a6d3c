//! Errors: of the server itself, and of requests in the shape that each API's clients expect.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use refrain_worker::{Refusal, RefusalKind};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// An error that keeps the server from starting, or ends it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address cannot be bound.
    #[error("cannot listen on {addr}")]
    Bind {
        /// The address.
        addr: SocketAddr,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// A public address without keys.
    #[error("{addr} can be reached from other machines, and no API key is set")]
    Unprotected {
        /// The address.
        addr: SocketAddr,
    },
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// A line of the key file is wrong. The key itself is never part of the message.
    #[error("{}, line {line}: {reason}", path.display())]
    KeyLine {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// The certificate or its key cannot be used.
    #[error("cannot use the TLS certificate {}: {reason}", path.display())]
    Tls {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// An origin that no browser sends.
    #[error("{origin:?} is not the origin of a web page")]
    Origin {
        /// What was given.
        origin: String,
    },
    /// Two served models have the same name.
    #[error("two served models are named {name}")]
    SameName {
        /// The name.
        name: String,
    },
}

impl ServeError {
    /// An action that resolves the error.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            ServeError::Bind { source, .. } => match source.kind() {
                std::io::ErrorKind::AddrInUse => "another program uses this port: choose another one".into(),
                std::io::ErrorKind::PermissionDenied => "ports below 1024 need rights: use 8080".into(),
                _ => "check that the address belongs to this machine".into(),
            },
            ServeError::Unprotected { .. } => "set an API key, or listen on 127.0.0.1".into(),
            ServeError::Read { .. } => "check the path and its permissions".into(),
            ServeError::KeyLine { .. } => {
                "a line is a key, then settings: name=ci concurrent=4 requests-per-minute=60 tokens-per-minute=9000 no-prefix-cache".into()
            }
            ServeError::Tls { .. } => {
                "give a PEM file with the certificate chain, and one with its key".into()
            }
            ServeError::Origin { .. } => "give scheme and host, such as https://example.com, or * for any".into(),
            ServeError::SameName { .. } => "give each model a name of its own: NAME=MODEL".into(),
        })
    }
}

/// An error of one request.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// Kind of error, as OpenAI's clients know it.
    pub kind: &'static str,
    /// What is wrong, with the numbers.
    pub message: String,
    /// The field at fault.
    pub param: Option<String>,
    /// A word for programs.
    pub code: Option<&'static str>,
    /// An action that resolves the error.
    pub hint: Option<String>,
    /// When a new attempt may succeed.
    pub retry_after: Option<Duration>,
}

impl ApiError {
    /// An error with a status and a code.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> ApiError {
        let kind = match status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        ApiError {
            status,
            kind,
            message: message.into(),
            param: None,
            code: Some(code),
            hint: None,
            retry_after: None,
        }
    }

    /// A field with a wrong value.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        let error = ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", message);
        ApiError { param: Some(param.into()), ..error }
    }

    /// A field that is known but not supported.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError { code: Some("unsupported_parameter"), ..ApiError::invalid(param, message) }
    }

    /// Adds a hint.
    #[must_use]
    pub fn hint(self, hint: impl Into<String>) -> ApiError {
        ApiError { hint: Some(hint.into()), ..self }
    }

    /// The body in OpenAI's shape. The hint is part of the message as well, because clients print only that.
    pub fn openai(&self) -> Value {
        json!({ "error": {
            "message": self.full_message(),
            "type": self.kind,
            "param": self.param,
            "code": self.code,
            "hint": self.hint,
        } })
    }

    /// The body in Anthropic's shape.
    pub fn anthropic(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 | 529 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        };
        json!({ "type": "error", "error": { "type": kind, "message": self.full_message() } })
    }

    fn full_message(&self) -> String {
        match &self.hint {
            Some(hint) => format!("{}; hint: {hint}", self.message),
            None => self.message.clone(),
        }
    }

    /// The response with a body of either shape.
    pub(crate) fn respond(self, body: &Value) -> Response {
        let mut response =
            (self.status, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response();
        if let Some(after) = self.retry_after {
            let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // The outer layer rewrites the body for Anthropic's endpoints.
        response.extensions_mut().insert(self);
        response
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = self.openai();
        self.respond(&body)
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> ApiError {
        let (status, code) = match refusal.kind {
            RefusalKind::Invalid => (StatusCode::BAD_REQUEST, "invalid_request"),
            RefusalKind::UnknownModel => (StatusCode::NOT_FOUND, "model_not_found"),
            RefusalKind::Busy => (StatusCode::TOO_MANY_REQUESTS, "overloaded"),
            RefusalKind::Unavailable => (StatusCode::SERVICE_UNAVAILABLE, "no_worker"),
            RefusalKind::Failed => (StatusCode::INTERNAL_SERVER_ERROR, "generation_failed"),
        };
        let error = ApiError::new(status, code, refusal.message);
        ApiError { hint: refusal.hint, retry_after: refusal.retry_after, ..error }
    }
}

impl From<refrain::Error> for ApiError {
    fn from(error: refrain::Error) -> ApiError {
        let hint = error.hint();
        let error = ApiError::new(StatusCode::BAD_REQUEST, "invalid_request", causes(&error));
        ApiError { hint, ..error }
    }
}

/// An error with its causes in one line; causes that the message already contains are left out.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
