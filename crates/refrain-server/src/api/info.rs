//! What the server serves and how it does.

use crate::app::App;
use crate::error::ApiError;
use crate::metrics::render;
use crate::served::ServedModel;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use refrain_worker::{BackendStatus, WorkerState};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;

fn model_json(model: &ServedModel, status: &BackendStatus) -> Value {
    json!({
        "id": model.name(),
        "object": "model",
        "created": model.created(),
        "owned_by": "refrain",
        "root": model.base().unwrap_or(model.name()),
        "parent": model.base(),
        "max_model_len": model.context(status),
        "chat": model.has_template(),
        "embeddings": model.embedding().is_some(),
    })
}

pub(crate) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    let status = app.backend.status();
    let data: Vec<Value> = app.models.iter().map(|model| model_json(model, &status)).collect();
    Json(json!({ "object": "list", "data": data }))
}

pub(crate) async fn model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let model = app.models.find(Some(&name))?;
    Ok(Json(model_json(&model, &app.backend.status())))
}

pub(crate) async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// Healthy means progress: a worker that can serve, and no open request that everything else waits for.
pub(crate) async fn health(State(app): State<Arc<App>>) -> impl IntoResponse {
    let status = app.backend.status();
    let is_failing =
        |state: &WorkerState| matches!(state, WorkerState::BackingOff { .. } | WorkerState::Stopped);
    let stalled = app.metrics.stalled();
    let failing = status.workers.iter().all(|worker| is_failing(&worker.state));
    let why = if failing {
        let last = status.workers.iter().find_map(|worker| worker.last_failure.as_deref());
        Some(format!("no worker runs: {}", last.unwrap_or("they were stopped")))
    } else if stalled > app.limits.stall {
        let n_open = app.metrics.n_open.load(Ordering::Relaxed);
        Some(format!("no progress for {:.0} s with {n_open} open requests", stalled.as_secs_f64()))
    } else {
        None
    };
    match why {
        None => (StatusCode::OK, Json(json!({ "status": "ok" }))),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "status": "failing", "reason": why }))),
    }
}

/// Ready means that a new request would be served now.
pub(crate) async fn ready(State(app): State<Arc<App>>) -> impl IntoResponse {
    let status = app.backend.status();
    let n_ready = status.workers.iter().filter(|worker| worker.state == WorkerState::Ready).count();
    let is_ready = n_ready > 0 && !app.is_draining.load(Ordering::Relaxed);
    let code = if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, Json(json!({ "ready": is_ready, "workers_ready": n_ready, "workers": status.workers.len() })))
}

pub(crate) async fn status(State(app): State<Arc<App>>) -> Json<Value> {
    let metrics = &app.metrics;
    let percentiles =
        |p: Option<[f64; 3]>| p.map(|[p50, p90, p99]| json!({ "p50": p50, "p90": p90, "p99": p99 }));
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "uptime_s": metrics.uptime().as_secs_f64(),
        "draining": app.is_draining.load(Ordering::Relaxed),
        "models": app.models.names(),
        "n_open": metrics.n_open.load(Ordering::Relaxed),
        "n_before_first_token": metrics.n_waiting.load(Ordering::Relaxed),
        "n_prompt_tokens": metrics.n_prompt_tokens.load(Ordering::Relaxed),
        "n_generated_tokens": metrics.n_generated_tokens.load(Ordering::Relaxed),
        "tokens_per_s": metrics.tokens_per_second(),
        "ttft_ms": percentiles(metrics.recent_first.percentiles_ms()),
        "inter_token_ms": percentiles(metrics.recent_inter.percentiles_ms()),
        "stalled_s": metrics.stalled().as_secs_f64(),
        "backend": *app.backend.status(),
    }))
}

pub(crate) async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    let text = render(&app.metrics, &app.backend.status(), &app.models.loaded_names());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
}
