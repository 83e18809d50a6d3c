//! Histograms for Prometheus, and samples for percentiles.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Counts of durations in fixed buckets.
pub(crate) struct Histogram {
    /// Upper bounds in seconds.
    bounds: &'static [f64],
    /// One more than bounds: the last counts what is above all of them.
    counts: Vec<AtomicU64>,
    sum_us: AtomicU64,
}

impl Histogram {
    pub(crate) fn new(bounds: &'static [f64]) -> Histogram {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram { bounds, counts, sum_us: AtomicU64::new(0) }
    }

    /// Adds `n` durations of the same length.
    pub(crate) fn record_n(&self, duration: Duration, n: u64) {
        let seconds = duration.as_secs_f64();
        let idx = self.bounds.iter().position(|bound| seconds <= *bound).unwrap_or(self.bounds.len());
        if let Some(count) = self.counts.get(idx) {
            count.fetch_add(n, Ordering::Relaxed);
        }
        self.sum_us.fetch_add(micros(duration).saturating_mul(n), Ordering::Relaxed);
    }

    pub(crate) fn record(&self, duration: Duration) {
        self.record_n(duration, 1);
    }

    /// Bounds with cumulative counts, then the total, and the sum in seconds.
    pub(crate) fn snapshot(&self) -> (Vec<(f64, u64)>, u64, f64) {
        let mut total = 0;
        let mut buckets = Vec::with_capacity(self.bounds.len());
        for (idx, count) in self.counts.iter().enumerate() {
            total += count.load(Ordering::Relaxed);
            if let Some(bound) = self.bounds.get(idx) {
                buckets.push((*bound, total));
            }
        }
        (buckets, total, self.sum_us.load(Ordering::Relaxed) as f64 / 1e6)
    }
}

/// The last durations, for percentiles. Readers may see a sample of the round before.
pub(crate) struct RecentSamples {
    micros: Vec<AtomicU32>,
    n: AtomicUsize,
}

impl RecentSamples {
    const CAPACITY: usize = 1024;

    pub(crate) fn new() -> RecentSamples {
        let micros = (0..Self::CAPACITY).map(|_| AtomicU32::new(0)).collect();
        RecentSamples { micros, n: AtomicUsize::new(0) }
    }

    pub(crate) fn record(&self, duration: Duration) {
        let idx = self.n.fetch_add(1, Ordering::Relaxed) % Self::CAPACITY;
        if let Some(cell) = self.micros.get(idx) {
            cell.store(u32::try_from(micros(duration)).unwrap_or(u32::MAX), Ordering::Relaxed);
        }
    }

    /// The 50th, 90th and 99th percentile in milliseconds; `None` without samples.
    pub(crate) fn percentiles_ms(&self) -> Option<[f64; 3]> {
        let n = self.n.load(Ordering::Relaxed).min(Self::CAPACITY);
        let mut samples: Vec<u32> =
            self.micros.iter().take(n).map(|cell| cell.load(Ordering::Relaxed)).collect();
        samples.sort_unstable();
        let at = |share: f64| {
            let idx = ((n as f64 * share).ceil() as usize).clamp(1, n.max(1)) - 1;
            samples.get(idx).map(|us| f64::from(*us) / 1e3)
        };
        Some([at(0.5)?, at(0.9)?, at(0.99)?])
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative() {
        let histogram = Histogram::new(&[0.01, 0.1]);
        for ms in [5, 10, 50, 500] {
            histogram.record(Duration::from_millis(ms));
        }
        let (buckets, total, sum) = histogram.snapshot();
        assert_eq!((buckets, total), (vec![(0.01, 2), (0.1, 3)], 4));
        assert!((sum - 0.565).abs() < 1e-9);
    }

    #[test]
    fn percentiles_are_those_of_the_last_samples() {
        let samples = RecentSamples::new();
        assert_eq!(samples.percentiles_ms(), None);
        samples.record(Duration::from_millis(7));
        assert_eq!(samples.percentiles_ms(), Some([7.0; 3]));
        for ms in 0..3000 {
            samples.record(Duration::from_millis(ms % 100 + 1));
        }
        let [p50, p90, p99] = samples.percentiles_ms().unwrap();
        assert!((45.0..56.0).contains(&p50) && (85.0..96.0).contains(&p90) && p99 >= 98.0);
    }
}
