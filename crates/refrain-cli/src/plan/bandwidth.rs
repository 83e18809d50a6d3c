//! How fast this machine reads its memory.

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::str::FromStr;
use std::time::Instant;

/// More than the caches of any machine hold.
const BYTES: usize = 512 << 20;
const ROUNDS: usize = 4;

/// The bandwidth that bounds a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Bandwidth {
    /// Stated, in bytes per second.
    Stated(f64),
    /// To be measured.
    Measure,
}

impl FromStr for Bandwidth {
    type Err = String;

    fn from_str(text: &str) -> Result<Bandwidth, String> {
        if text == "measure" {
            return Ok(Bandwidth::Measure);
        }
        match text.parse::<f64>() {
            Ok(gigabytes) if gigabytes.is_finite() && gigabytes > 0.0 => {
                Ok(Bandwidth::Stated(gigabytes * 1e9))
            }
            _ => Err("a number of GB/s above 0, or `measure`".to_owned()),
        }
    }
}

impl Bandwidth {
    pub(crate) fn bytes_per_second(self) -> f64 {
        match self {
            Bandwidth::Stated(bytes) => bytes,
            Bandwidth::Measure => measure(),
        }
    }
}

/// All threads read a large buffer; the best of some rounds counts.
fn measure() -> f64 {
    let words = vec![1_u64; BYTES / 8];
    let n_threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let round = || {
        let began = Instant::now();
        std::thread::scope(|scope| {
            for part in words.chunks(words.len().div_ceil(n_threads)) {
                scope.spawn(move || black_box(part.iter().fold(0_u64, |sum, word| sum ^ word)));
            }
        });
        BYTES as f64 / began.elapsed().as_secs_f64()
    };
    (0..ROUNDS).map(|_| round()).fold(0.0, f64::max)
}
