//! Seeded tensor values, including difficult ones.

use refrain_graph::TensorType;
use refrain_reference::philox4x32;
use refrain_tensor::{Bytes, DType, HostTensor, quant};

/// A seeded stream of random numbers, equal on every machine.
#[derive(Clone, Debug)]
pub struct Rng {
    seed: u64,
    n_drawn: u64,
}

impl Rng {
    /// Starts the stream of a seed.
    pub fn new(seed: u64) -> Rng {
        Rng { seed, n_drawn: 0 }
    }

    /// A random word.
    pub fn word(&mut self) -> u32 {
        let counter = [self.n_drawn as u32, (self.n_drawn >> 32) as u32, 0, 0];
        self.n_drawn += 1;
        philox4x32(counter, [self.seed as u32, (self.seed >> 32) as u32])[0]
    }

    /// A random number below `n`; 0 when `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        self.word() as usize % n.max(1)
    }

    /// A random number in [0, 1).
    pub fn unit(&mut self) -> f32 {
        (self.word() >> 8) as f32 / 16_777_216.0
    }

    /// A normally distributed number.
    pub fn normal(&mut self) -> f32 {
        let (u, v) = (1.0 - f64::from(self.unit()), f64::from(self.unit()));
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }

    /// A random permutation of `0..n`.
    pub fn shuffled(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        (1..n).for_each(|i| order.swap(i, self.below(i + 1)));
        order
    }
}

/// Contents of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum Fill {
    /// Zeros.
    Zero,
    /// Normally distributed.
    Normal,
    /// Uniform between two numbers.
    Uniform(f32, f32),
    /// All magnitudes from 2^-24 to 2^7, both zeros, and runs of equal numbers.
    Wild,
    /// Small numbers with occasional large ones, like activations.
    Outliers,
    /// Row numbers below a limit; with gaps, every fifth is -1.
    Ids {
        /// Exclusive upper bound.
        below: usize,
        /// Whether some ids are -1.
        gaps: bool,
    },
    /// These numbers, rounded to the tensor's dtype.
    Floats(Vec<f32>),
    /// These integers.
    Ints(Vec<i32>),
}

impl Fill {
    fn float(&self, i: usize, rng: &mut Rng) -> f32 {
        match self {
            Fill::Normal => rng.normal(),
            Fill::Uniform(low, high) => low + (high - low) * rng.unit(),
            Fill::Wild => match rng.below(8) {
                0 => 0.0,
                1 => -0.0,
                2 => 1.0,
                _ => {
                    let sign = if rng.below(2) == 0 { 1.0 } else { -1.0 };
                    sign * (1.0 + rng.unit()) * 2f32.powi(rng.below(31) as i32 - 24)
                }
            },
            Fill::Outliers => rng.normal() * if rng.below(61) == 0 { 300.0 } else { 0.02 },
            Fill::Floats(values) => values[i],
            Fill::Zero | Fill::Ids { .. } | Fill::Ints(_) => 0.0,
        }
    }

    fn int(&self, i: usize, rng: &mut Rng) -> i32 {
        match self {
            Fill::Ids { gaps: true, .. } if i % 5 == 3 => -1,
            Fill::Ids { below, .. } => rng.below(*below) as i32,
            Fill::Ints(values) => values[i],
            Fill::Zero | Fill::Normal | Fill::Uniform(..) | Fill::Wild | Fill::Outliers | Fill::Floats(_) => {
                0
            }
        }
    }
}

/// Creates a contiguous tensor of a type from a seed. Quantised types are encoded from floats;
/// those without an encoder are random blocks, whatever `fill`.
///
/// # Panics
/// If the type cannot hold the numbers.
pub fn tensor(ty: TensorType, fill: &Fill, seed: u64) -> HostTensor {
    let n = ty.shape.n_elements();
    let mut rng = Rng::new(seed);
    let bytes = match ty.dtype {
        DType::I32 | DType::U32 => (0..n).flat_map(|i| fill.int(i, &mut rng).to_le_bytes()).collect(),
        DType::I64 => (0..n).flat_map(|i| i64::from(fill.int(i, &mut rng)).to_le_bytes()).collect(),
        DType::U8 => (0..n).map(|i| fill.int(i, &mut rng) as u8).collect(),
        DType::F32
        | DType::F16
        | DType::BF16
        | DType::Q4_0
        | DType::Q4_1
        | DType::Q5_0
        | DType::Q5_1
        | DType::Q8_0
        | DType::Q2_K
        | DType::Q3_K
        | DType::Q4_K
        | DType::Q5_K
        | DType::Q6_K
        | DType::IQ4_NL
        | DType::IQ4_XS
        | DType::MXFP4 => encode(ty.dtype, &(0..n).map(|i| fill.float(i, &mut rng)).collect::<Vec<_>>()),
        DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S | DType::IQ3_XXS | DType::IQ3_S => {
            blocks(ty.dtype, n, &mut rng)
        }
    };
    HostTensor::new(ty.dtype, ty.shape, Bytes::new(bytes)).unwrap_or_else(|e| panic!("{e}"))
}

/// Random blocks of a type that has no encoder, all of which begin with their scale: values of about unit magnitude.
fn blocks(dtype: DType, n: usize, rng: &mut Rng) -> Vec<u8> {
    let n_bytes =
        dtype.bytes_for(n).unwrap_or_else(|| panic!("{n} elements are not whole blocks of {dtype}"));
    let mut bytes: Vec<u8> = (0..n_bytes).map(|_| rng.word() as u8).collect();
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        let mut values = vec![0.0; dtype.block_len()];
        block[..2].copy_from_slice(&ONE_F16);
        quant::dequantize(dtype, block, &mut values).unwrap_or_else(|e| panic!("{e}"));
        let peak = values.iter().fold(0f32, |peak, v| peak.max(v.abs()));
        let scale = (1.0 + rng.unit()) * if rng.below(2) == 0 { 1.0 } else { -1.0 } / peak;
        quant::quantize(DType::F16, &[scale], &mut block[..2]).unwrap_or_else(|e| panic!("{e}"));
    }
    bytes
}

const ONE_F16: [u8; 2] = 0x3c00_u16.to_le_bytes();

/// Encodes numbers as the bytes of a dtype. F32 accepts any value, including NaN. A type without an encoder gets random
/// blocks, which depend on the first number.
///
/// # Panics
/// If the dtype cannot hold them.
pub fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    if dtype == DType::F32 {
        return values.iter().flat_map(|v| v.to_le_bytes()).collect();
    }
    if !quant::can_encode(dtype) {
        let seed = values.first().map_or(0, |v| u64::from(v.to_bits()));
        return blocks(dtype, values.len(), &mut Rng::new(seed));
    }
    let n_bytes = dtype
        .bytes_for(values.len())
        .unwrap_or_else(|| panic!("{} elements are not whole blocks of {dtype}", values.len()));
    let mut bytes = vec![0; n_bytes];
    quant::quantize(dtype, values, &mut bytes).unwrap_or_else(|e| panic!("{e}"));
    bytes
}
