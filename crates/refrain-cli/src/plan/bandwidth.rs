//! The argument of --bandwidth.

use std::str::FromStr;

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
            _ => Err("must be a number of GB/s above 0, or `measure`".to_owned()),
        }
    }
}
