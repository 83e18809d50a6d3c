//! Data that can be learnt only by looking at several sources of a sample at once.

use super::net::Sizes;

/// Samples and their classes.
pub(crate) struct Data {
    /// Features of each sample, source by source.
    pub(crate) rows: Vec<f32>, // [n_samples, n_sources * n_features]
    pub(crate) classes: Vec<i32>, // [n_samples]
}

impl Data {
    /// Noise. A random third of a sample's sources also holds a weak pattern of the sample's class, another third weak
    /// patterns of random classes, which carry no information.
    pub(crate) fn synthetic(sizes: &Sizes, n_samples: usize, seed: u64) -> Data {
        let Sizes { n_sources, n_features, n_classes, .. } = *sizes;
        let mut random = Random(seed);
        let patterns: Vec<Vec<f32>> =
            (0..n_classes).map(|_| (0..n_features).map(|_| random.normal()).collect()).collect();
        let mut rows = Vec::with_capacity(n_samples * n_sources * n_features);
        let mut classes = Vec::with_capacity(n_samples);
        for _ in 0..n_samples {
            let class = random.below(n_classes);
            let first = random.below(n_sources);
            for source in 0..n_sources {
                let pattern = match (source + n_sources - first) % n_sources * 3 / n_sources {
                    0 => Some(class),
                    1 => Some(random.below(n_classes)),
                    _ => None,
                };
                let trace = |i: usize| pattern.map_or(0.0, |p| 0.25 * patterns[p][i]);
                rows.extend((0..n_features).map(|i| random.normal() + trace(i)));
            }
            classes.push(class as i32);
        }
        Data { rows, classes }
    }
}

/// A small random generator (splitmix64): the same numbers on every machine.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n.max(1)
    }

    /// Roughly normal: the sum of four uniform numbers, with a variance of 1.
    pub(crate) fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum: u32 = (0..4).map(|i| (bits >> (16 * i)) as u16).map(u32::from).sum();
        (sum as f32 / 65_536.0 - 2.0) * 3f32.sqrt()
    }

    /// A permutation of `0..n`.
    pub(crate) fn order(&mut self, n: usize) -> Vec<i32> {
        let mut order: Vec<i32> = (0..n as i32).collect();
        (1..n).rev().for_each(|i| order.swap(i, self.below(i + 1)));
        order
    }
}
