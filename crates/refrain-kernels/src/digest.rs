//! Digests of device memory, which compare two states without copying them.

use refrain_driver::sim::{KernelResult, SimKernel};
use refrain_driver::{Baked, Buf, Function, Launch, LaunchBuilder};
use refrain_tensor::DType;

use crate::error::{KernelError, OpCase};
use crate::load::Kernels;
use crate::registry::{KernelEntry, P};
use crate::source::KernelFamily;
use crate::vouch::Vouch;

const BLOCK: u32 = 256;

/// Builds launches that reduce memory to digests. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Digester {
    function: Function,
}

impl Digester {
    /// Bytes of memory per pair of digest numbers.
    pub const CHUNK: u64 = 65_536;

    /// Digest size for `n_bytes` of memory: for each chunk the sum of its words and the number of `0xff`
    /// bytes, both U64.
    #[must_use]
    pub fn bytes(n_bytes: u64) -> u64 {
        16 * n_bytes.div_ceil(Digester::CHUNK)
    }

    /// Builds the launch that writes the digest of `x` to `y`.
    pub fn launch(&self, x: Buf, y: Buf) -> Result<Launch, KernelError> {
        let shape = [("n_bytes", usize::try_from(x.len()).unwrap_or(usize::MAX))];
        let case = OpCase { op: "digest", dtype: DType::U8, shape: &shape };
        crate::require!(case, !x.is_empty(), "x is empty");
        crate::require!(case, x.offset().is_multiple_of(8), "x must be 8-byte aligned");
        let blocks = case.u32("the number of chunks", x.len().div_ceil(Digester::CHUNK) as usize)?;
        Ok(LaunchBuilder::new(&self.function, blocks, BLOCK)
            .step("digest")
            .write(case.buf("y", y, Some(Digester::bytes(x.len()) as usize), 8)?)
            .read(x)
            .baked(Baked(x.len()))
            .vouch(&case))
    }
}

impl Kernels {
    /// Returns the builder of digest launches.
    pub fn digester(&self) -> Result<Digester, KernelError> {
        Ok(Digester { function: self.get(NAME)?.function })
    }
}

const NAME: &str = "digest_chunks";

pub(crate) fn entries(all: &mut Vec<KernelEntry>) {
    all.push(KernelEntry::new(KernelFamily::Digest, NAME, &[P, P, 8], twin));
}

fn mixed(word: u64, at: u64) -> u64 {
    let mut h = word.wrapping_add(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(at + 1));
    h = (h ^ h >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    h = (h ^ h >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    h ^ h >> 33
}

fn twin(k: &mut SimKernel<'_>) -> KernelResult {
    let n_bytes: u64 = k.arg(2)?;
    let mut out = Vec::new();
    {
        let bytes = k.view::<u8>(k.ptr(1)?, n_bytes as usize)?;
        for (i, chunk) in bytes.chunks(Digester::CHUNK as usize).enumerate() {
            let word = |w: &[u8]| w.iter().rev().fold(0, |x, &b| x << 8 | u64::from(b));
            let at = |j: usize| i as u64 * Digester::CHUNK + 8 * j as u64;
            let words = chunk.chunks(8).enumerate().map(|(j, w)| mixed(word(w), at(j)));
            out.push(words.fold(0, u64::wrapping_add));
            out.push(chunk.iter().filter(|b| **b == 0xff).count() as u64);
        }
    }
    k.write(k.ptr(0)?, &out)
}
