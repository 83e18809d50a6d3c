//! Which instructions the kernels may use, found at run time.

use std::fmt;

use super::lanes::{Portable, SimdKernel};

/// A set of instructions that this processor has been seen to have.
///
/// A `Level` other than [`Level::PORTABLE`] can only be had from [`Level::detect`], [`Level::available`] or
/// [`Level::by_name`], all of which ask the processor first; that is what makes the kernels safe to call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Level(InstructionSet);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum InstructionSet {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx2Vnni,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    #[cfg(target_arch = "aarch64")]
    Neon,
    #[cfg(target_arch = "aarch64")]
    NeonDot,
}

impl Level {
    /// Plain Rust; always there.
    pub const PORTABLE: Level = Level(InstructionSet::Portable);

    /// The best level of this processor.
    pub fn detect() -> Level {
        *Level::available().last().unwrap_or(&Level::PORTABLE)
    }

    /// Every level of this processor, the plainest first.
    pub fn available() -> Vec<Level> {
        #[cfg(target_arch = "x86_64")]
        let more = {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq");
            let vnni = avx512 && is_x86_feature_detected!("avx512vnni");
            [
                (InstructionSet::Avx2, avx2),
                (InstructionSet::Avx2Vnni, avx2 && is_x86_feature_detected!("avxvnni")),
                (InstructionSet::Avx512, avx512),
                (InstructionSet::Avx512Vnni, vnni),
                (InstructionSet::Avx512Bf16, vnni && is_x86_feature_detected!("avx512bf16")),
            ]
        };
        #[cfg(target_arch = "aarch64")]
        let more = {
            use std::arch::is_aarch64_feature_detected;
            let neon = is_aarch64_feature_detected!("neon") && is_aarch64_feature_detected!("fp16");
            [
                (InstructionSet::Neon, neon),
                (InstructionSet::NeonDot, neon && is_aarch64_feature_detected!("dotprod")),
            ]
        };
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let more: [(InstructionSet, bool); 0] = [];
        let found = more.into_iter().filter(|&(_, there)| there).map(|(kind, _)| Level(kind));
        std::iter::once(Level::PORTABLE).chain(found).collect()
    }

    /// The level of that name, if this processor has it.
    pub fn by_name(name: &str) -> Option<Level> {
        Level::available().into_iter().find(|l| l.name().eq_ignore_ascii_case(name))
    }

    /// The name that command lines and reports use.
    pub const fn name(self) -> &'static str {
        match self.0 {
            InstructionSet::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2Vnni => "avx2-vnni",
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512Vnni => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512Bf16 => "avx512-bf16",
            #[cfg(target_arch = "aarch64")]
            InstructionSet::Neon => "neon",
            #[cfg(target_arch = "aarch64")]
            InstructionSet::NeonDot => "neon-dot",
        }
    }

    /// Runs a kernel compiled for this level.
    #[inline]
    pub(crate) fn dispatch<K: SimdKernel>(self, kernel: K) -> K::Out {
        #[cfg(target_arch = "aarch64")]
        use super::lanes::neon;
        #[cfg(target_arch = "x86_64")]
        use super::lanes::x86;
        match self.0 {
            InstructionSet::Portable => kernel.run(Portable),
            // SAFETY: this `Level` exists only because `available` saw every feature that the called
            // function enables; its fields are private to this file.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => unsafe { x86::call_avx2(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2Vnni => unsafe { x86::call_avx2_vnni(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => unsafe { x86::call_avx512(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512Vnni => unsafe { x86::call_avx512_vnni(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512Bf16 => unsafe { x86::call_avx512_bf16(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            InstructionSet::Neon => unsafe { neon::call_neon(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            InstructionSet::NeonDot => unsafe { neon::call_neon_dot(kernel) },
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
