//! Rows in signed bytes with one scale each, as in an 8-bit KV cache.

/// Below this magnitude a row is stored as zeros: its scale would lose precision.
const LEAST: f32 = 1e-35;

fn largest(row: &[f32]) -> f32 {
    // The bits of magnitudes order like the numbers, with NaN above infinity.
    f32::from_bits(row.iter().map(|v| v.to_bits() & 0x7fff_ffff).max().unwrap_or(0))
}

/// The scale of a row: 127 stands for its largest magnitude. NaN if any element is not finite, so that every element of
/// the row is read back as NaN.
#[must_use]
pub fn row_scale(row: &[f32]) -> f32 {
    let largest = largest(row);
    match largest {
        m if m < LEAST => 0.0,
        m if m.is_finite() => m * (1.0 / 127.0),
        _ => f32::NAN,
    }
}

/// Rounds a row to signed bytes, to nearest with ties to even. An element is its byte times [`row_scale`].
///
/// # Panics
/// If the lengths differ.
pub fn row_to_bytes(row: &[f32], to: &mut [u8]) {
    assert_eq!(row.len(), to.len());
    let largest = largest(row);
    if largest < LEAST || !largest.is_finite() {
        return to.fill(0);
    }
    let factor = 127.0 / largest;
    to.iter_mut().zip(row).for_each(|(to, v)| *to = (v * factor).round_ties_even() as i8 as u8);
}

/// Reads a row back.
///
/// # Panics
/// If the lengths differ.
pub fn row_from_bytes(bytes: &[u8], scale: f32, to: &mut [f32]) {
    assert_eq!(bytes.len(), to.len());
    to.iter_mut().zip(bytes).for_each(|(to, &byte)| *to = f32::from(byte as i8) * scale);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(row: &[f32]) -> (f32, Vec<f32>) {
        let (mut bytes, mut back) = (vec![7; row.len()], vec![7.0; row.len()]);
        row_to_bytes(row, &mut bytes);
        row_from_bytes(&bytes, row_scale(row), &mut back);
        (row_scale(row), back)
    }

    #[test]
    fn a_row_is_off_by_at_most_half_a_step() {
        let row: Vec<f32> = (0..97).map(|i| ((i * 37) % 101) as f32 * 0.31 - 15.0).collect();
        let (scale, back) = round(&row);
        assert!(row.iter().zip(&back).all(|(a, b)| (a - b).abs() <= 0.5001 * scale));
        assert_eq!(round(&[127.0, -127.0, 0.5, 1.5, -2.5]).1, [127.0, -127.0, 0.0, 2.0, -2.0]);
    }

    #[test]
    fn zeros_stay_zeros_and_what_is_not_finite_spoils_its_row() {
        assert_eq!(round(&[0.0, -0.0, 1e-38]), (0.0, vec![0.0; 3]));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (scale, back) = round(&[1.0, bad, 2.0]);
            assert!(scale.is_nan() && back.iter().all(|v| v.is_nan()));
        }
        let (scale, back) = round(&[f32::MAX, -1e38]);
        assert!(scale.is_finite() && back.iter().all(|v| v.is_finite()));
    }
}
