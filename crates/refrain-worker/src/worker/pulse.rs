//! Heartbeats, and the load that they report.
//!
//! An engine answers between two steps, so one thread may wait for it, and another one sends heartbeats whatever happens.

use super::models::Models;
use super::{Link, spawn};
use crate::engine::{EngineFailure, Progress};
use crate::protocol::FromWorker;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

pub(super) fn start(
    models: Arc<Models>,
    link: Arc<Link>,
    progress: Progress,
    every: Duration,
) -> io::Result<()> {
    let watched = (models.clone(), link.clone(), progress.clone());
    spawn("refrain-load", move || {
        let (models, link, progress) = watched;
        watch(&models, &link, &progress, every);
    })?;
    spawn("refrain-pulse", move || {
        loop {
            let (is_loading, models) = (models.is_loading(), models.loads());
            link.send(&FromWorker::Heartbeat { progress: progress.count(), is_loading, models });
            thread::sleep(every);
        }
    })
}

/// Asks the engines for their load. Steps count as progress, and an engine that has stopped ends the worker.
fn watch(models: &Models, link: &Link, progress: &Progress, every: Duration) {
    let mut n_steps = HashMap::new();
    loop {
        for (idx, engine) in models.engines() {
            let load = match engine.load() {
                Ok(load) => load,
                Err(EngineFailure::Unusable(words)) => return link.fail(words),
                // An unloaded engine, or one that is too busy to say.
                Err(EngineFailure::Refused(_)) => continue,
            };
            // Dropping the last handle to an unloaded engine waits for its thread.
            drop(engine);
            let n = load.steps.replayed + load.steps.eager + load.steps.failed;
            let before = n_steps.insert(idx, n);
            progress.advance(n.abs_diff(before.unwrap_or(0)));
            models.set_load(idx, load);
        }
        thread::sleep(every);
    }
}
