//! Comparison of tensors with a tolerance.

use refrain_tensor::{DType, HostTensor};
use std::fmt;

/// Allowed difference from the reference. Integers and quantised blocks are always compared bit by bit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tol {
    /// Equal bits.
    Bits,
    /// Relative to each element: for ops that round each element separately.
    Each(f32),
    /// Relative to each element or to the tensor's root mean square, whichever is larger: for sums with
    /// cancellation.
    Whole(f32),
}

impl Tol {
    /// Returns this tolerance for results that are rounded to `dtype`, which adds one unit in the last place.
    #[expect(clippy::wildcard_enum_match_arm, reason = "only the two 16-bit float types round visibly")]
    pub fn rounded_to(self, dtype: DType) -> Tol {
        let ulp = match dtype {
            DType::F16 => 1.0 / 1024.0,
            DType::BF16 => 1.0 / 128.0,
            _ => 0.0,
        };
        match self {
            Tol::Bits => Tol::Bits,
            Tol::Each(rel) => Tol::Each(rel + ulp),
            Tol::Whole(rel) => Tol::Whole(rel + ulp),
        }
    }
}

/// The first element that is out of tolerance.
#[derive(Clone, Debug, PartialEq)]
pub struct Mismatch {
    /// Its index, in row-major order.
    pub element: usize,
    /// Its value.
    pub got: f64,
    /// The reference's value.
    pub want: f64,
    /// Allowed difference.
    pub allowed: f64,
    /// Number of elements out of tolerance.
    pub n_bad: usize,
    /// Total number of elements.
    pub n: usize,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mismatch { element, got, want, allowed, n_bad, n } = self;
        let off = (got - want).abs();
        write!(
            f,
            "element {element} is {got:e}, expected {want:e} (off by {off:.3e}, allowed {allowed:.3e}); "
        )?;
        write!(f, "{n_bad} of {n} elements differ")
    }
}

/// Compares numbers. NaN equals NaN, and infinities equal themselves.
pub fn compare(got: &[f32], want: &[f32], tol: Tol) -> Result<(), Mismatch> {
    assert_eq!(got.len(), want.len(), "got {} elements, expected {}", got.len(), want.len());
    let finite = want.iter().filter(|w| w.is_finite()).map(|&w| f64::from(w));
    let (n_finite, squares) = finite.fold((0usize, 0.0), |(n, s), w| (n + 1, s + w * w));
    let rms = (squares / n_finite.max(1) as f64).sqrt();
    let allowed = |want: f32| match tol {
        Tol::Bits => 0.0,
        // A relative error is meaningless below the normal range.
        Tol::Each(rel) => f64::from(rel) * f64::from(want).abs() + f64::from(f32::MIN_POSITIVE),
        Tol::Whole(rel) => f64::from(rel) * f64::from(want).abs().max(rms) + f64::from(f32::MIN_POSITIVE),
    };
    let close = |got: f32, want: f32| match tol {
        Tol::Bits => got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()),
        Tol::Each(_) | Tol::Whole(_) => {
            let off = (f64::from(got) - f64::from(want)).abs();
            got == want || (got.is_nan() && want.is_nan()) || (want.is_finite() && off <= allowed(want))
        }
    };
    let mut bad = got.iter().zip(want).enumerate().filter(|(_, (g, w))| !close(**g, **w));
    let Some((element, (&got_one, &want_one))) = bad.next() else { return Ok(()) };
    let (got_one, want_one, allowed) = (f64::from(got_one), f64::from(want_one), allowed(want_one));
    Err(Mismatch { element, got: got_one, want: want_one, allowed, n_bad: 1 + bad.count(), n: got.len() })
}

/// Panics with the first element that is out of tolerance.
#[track_caller]
pub fn assert_close(got: &[f32], want: &[f32], tol: Tol) {
    if let Err(mismatch) = compare(got, want, tol) {
        panic!("{mismatch}");
    }
}

/// Compares tensors of equal type.
pub(crate) fn compare_tensors(got: &HostTensor, want: &HostTensor, tol: Tol) -> Result<(), String> {
    if (got.dtype(), got.shape()) != (want.dtype(), want.shape()) {
        let [got, want] = [got, want].map(|t| format!("{}{}", t.dtype(), t.shape()));
        return Err(format!("got {got}, expected {want}"));
    }
    if want.dtype().is_float() {
        let [got, want] = [got, want].map(|t| t.to_f32().map_err(|e| e.to_string()));
        return compare(&got?, &want?, tol).map_err(|m| m.to_string());
    }
    let (got_bytes, want_bytes) = (got.bytes().as_slice(), want.bytes().as_slice());
    match got_bytes.iter().zip(want_bytes).position(|(g, w)| g != w) {
        None => Ok(()),
        Some(at) => {
            let block = at / want.dtype().block_bytes();
            let range = block * want.dtype().block_bytes()..(block + 1) * want.dtype().block_bytes();
            let [got, want_block] = [&got_bytes[range.clone()], &want_bytes[range]];
            Err(format!("{} block {block} is {got:02x?}, expected {want_block:02x?}", want.dtype()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mismatch_names_the_first_element_and_both_sides() {
        let e = compare(&[1.0, 2.5, 9.0], &[1.0, 2.0, 3.0], Tol::Each(0.125)).unwrap_err();
        assert_eq!((e.element, e.got, e.want, e.n_bad), (1, 2.5, 2.0, 2));
        let text =
            "element 1 is 2.5e0, expected 2e0 (off by 5.000e-1, allowed 2.500e-1); 2 of 3 elements differ";
        assert_eq!(e.to_string(), text);
    }

    #[test]
    fn nan_equals_nan_and_nothing_else() {
        assert!(compare(&[f32::NAN], &[f32::NAN], Tol::Each(0.0)).is_ok());
        assert!(compare(&[f32::NAN], &[1.0], Tol::Each(10.0)).is_err());
        assert!(compare(&[1.0], &[f32::NAN], Tol::Whole(10.0)).is_err());
        assert!(compare(&[f32::INFINITY], &[f32::INFINITY], Tol::Each(0.0)).is_ok());
        assert!(compare(&[1e30], &[f32::INFINITY], Tol::Each(1.0)).is_err());
    }

    #[test]
    fn bits_tell_zero_from_negative_zero() {
        assert!(compare(&[0.0], &[-0.0], Tol::Bits).is_err());
        assert!(compare(&[0.0], &[-0.0], Tol::Each(0.0)).is_ok());
    }
}
