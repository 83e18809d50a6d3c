//! Philox 4x32-10: random numbers as a function of key and counter, so that a step can be repeated.
//!
//! J. Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Returns four random words for a counter and a key.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c, mut k] = [counter, [key[0], key[1], 0, 0]];
    for _ in 0..10 {
        let a = u64::from(MULTIPLIERS[0]) * u64::from(c[0]);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(c[2]);
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k[0] = k[0].wrapping_add(WEYL[0]);
        k[1] = k[1].wrapping_add(WEYL[1]);
    }
    c
}

/// Returns the uniform number in [0, 1) for a seed and a position. It decides the token sampled at that
/// position.
pub fn uniform(seed: u64, position: u32) -> f32 {
    let word = philox4x32([position, 0, 0, 0], [seed as u32, (seed >> 32) as u32])[0];
    // An f32 holds 24 bits exactly, so the result never rounds up to 1.
    (word >> 8) as f32 * (1.0 / 16_777_216.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Known answers for ten rounds, published with the authors' Random123 library.
    #[test]
    fn philox_reproduces_the_published_known_answers() {
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox4x32([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn uniform_numbers_stay_below_one_and_spread_evenly() {
        let n = 20_000;
        let mut buckets = [0; 10];
        for position in 0..n {
            let u = uniform(7, position);
            assert!((0.0..1.0).contains(&u));
            buckets[(u * 10.0) as usize] += 1;
        }
        assert!(buckets.iter().all(|&b| (1_800..2_200).contains(&b)), "{buckets:?}");
    }
}
