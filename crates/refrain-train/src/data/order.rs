//! Shuffles the samples anew each epoch, without storing a permutation.

use refrain_reference::philox4x32;

/// A permutation of `0..n`, computed point by point. It depends only on seed, epoch and purpose, is the same
/// on every platform, and takes no memory.
///
/// A Feistel network permutes the smallest power of four that is at least `n`; results outside `0..n` are
/// permuted again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permutation {
    n: u64,
    half_bits: u32,
    seed: u64,
    stream: u64,
}

const N_ROUNDS: u32 = 6;

impl Permutation {
    /// The permutation of `n` elements for a seed. `stream` selects among independent permutations of the
    /// same seed.
    pub fn new(n: u64, seed: u64, stream: u64) -> Self {
        let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
        Self { n, half_bits: bits.div_ceil(2).max(1), seed, stream }
    }

    /// Maps element `i`, which must be below `n`.
    pub fn at(&self, i: u64) -> u64 {
        assert!(i < self.n, "element {i} of {}", self.n);
        let mut x = i;
        loop {
            x = self.network(x);
            if x < self.n {
                return x;
            }
        }
    }

    fn network(&self, x: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (x >> self.half_bits, x & mask);
        for round in 0..N_ROUNDS {
            (left, right) = (right, left ^ (self.round(right, round) & mask));
        }
        left << self.half_bits | right
    }

    fn round(&self, half: u64, round: u32) -> u64 {
        let [lo, hi] = [self.stream as u32, (self.stream >> 32) as u32];
        let words = philox4x32([half as u32, round, lo, hi], [self.seed as u32, (self.seed >> 32) as u32]);
        u64::from(words[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_permutations_are_the_same_on_every_platform() {
        let order = |n, seed, stream| {
            let permutation = Permutation::new(n, seed, stream);
            (0..n).map(|i| permutation.at(i)).collect::<Vec<_>>()
        };
        assert_eq!(order(1, 7, 0), [0]);
        assert_eq!(order(8, 1, 0), KNOWN_A);
        assert_eq!(order(8, 1, 1), KNOWN_B);
    }

    const KNOWN_A: [u64; 8] = [7, 0, 1, 4, 6, 2, 3, 5];
    const KNOWN_B: [u64; 8] = [7, 0, 4, 5, 6, 1, 3, 2];

    #[test]
    fn each_element_goes_to_every_index_about_equally_often() {
        let (n, n_streams) = (10u64, 4_000);
        let mut counts = [[0u32; 10]; 10];
        for stream in 0..n_streams {
            let permutation = Permutation::new(n, 3, stream);
            for i in 0..n {
                counts[i as usize][permutation.at(i) as usize] += 1;
            }
        }
        for count in counts.iter().flatten() {
            assert!((300..500).contains(count), "{counts:?}");
        }
    }

    proptest! {
        #[test]
        fn every_element_occurs_once(n in 1..2_000u64, seed: u64, stream: u64) {
            let permutation = Permutation::new(n, seed, stream);
            let mut seen = vec![false; n as usize];
            for i in 0..n {
                let to = permutation.at(i) as usize;
                prop_assert!(!seen[to]);
                seen[to] = true;
            }
        }

        #[test]
        fn large_counts_stay_in_range(n in 1..u64::MAX >> 8, seed: u64) {
            let permutation = Permutation::new(n, seed, 0);
            prop_assert!(permutation.at(0) < n);
            prop_assert!(permutation.at(n - 1) < n);
        }
    }
}
