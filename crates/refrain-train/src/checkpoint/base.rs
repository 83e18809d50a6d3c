//! The frozen weights that an adapter is trained on, identified by content.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use refrain_models::Model;
use refrain_tensor::HostTensor;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::hex;

/// Digits of the digest shown in messages.
const SHOWN: usize = 12;

/// Frozen base weights. Two bases are equal if their digests are; the name is for humans.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrozenBase {
    /// The run's name for the model.
    pub name: String,
    /// SHA-256 over the names, types, sizes and bytes of the weights.
    pub sha256: String,
}

impl FrozenBase {
    /// Digests the base weights of `model`; `None` without an adapter, since every weight is trained then.
    /// Reads every byte, on all cores.
    pub fn of(model: &Model, name: &str) -> Option<Self> {
        let weights: Vec<(&str, &HostTensor)> = model.below_adapter()?.collect();
        let n_threads = thread::available_parallelism().map_or(1, usize::from).clamp(1, weights.len().max(1));
        let next = AtomicUsize::new(0);
        let digest_some = || {
            let mut done = Vec::new();
            while let idx = next.fetch_add(1, Ordering::Relaxed)
                && let Some((name, tensor)) = weights.get(idx)
            {
                done.push((idx, digest(name, tensor)));
            }
            done
        };
        let mut digests: Vec<(usize, [u8; 32])> = thread::scope(|scope| {
            let threads: Vec<_> = (0..n_threads).map(|_| scope.spawn(digest_some)).collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().flat_map(join).collect()
        });
        digests.sort_unstable();
        let mut all = Sha256::new();
        digests.iter().for_each(|(_, digest)| all.update(digest));
        Some(Self { name: name.to_owned(), sha256: hex(all.finalize()) })
    }

    /// Whether these are the same weights, regardless of their name.
    pub fn is(&self, other: &Self) -> bool {
        self.sha256 == other.sha256
    }
}

impl fmt::Display for FrozenBase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self.sha256.get(..SHOWN).unwrap_or(&self.sha256);
        write!(f, "{} (sha256 {shown}...)", self.name)
    }
}

fn digest(name: &str, tensor: &HostTensor) -> [u8; 32] {
    let mut digest = Sha256::new();
    // Terminated by a newline, so that bytes of one field cannot be mistaken for another.
    digest.update(format!("{name} {} {:?}\n", tensor.dtype().name(), tensor.shape().dims()));
    digest.update(tensor.bytes().as_slice());
    digest.finalize().into()
}
