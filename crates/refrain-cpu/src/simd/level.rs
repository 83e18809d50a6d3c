//! Instruction sets that kernels may use, detected at run time.

use std::fmt;

use super::lanes::{Portable, SimdKernel};

/// An instruction set that this processor supports.
///
/// A `Level` other than [`Level::PORTABLE`] comes only from [`Level::detect`], [`Level::available`] or
/// [`Level::by_name`], which all check the processor first. That makes the kernels safe to call.
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
    /// Plain Rust; always available.
    pub const PORTABLE: Level = Level(InstructionSet::Portable);

    /// Returns the best level of this processor.
    pub fn detect() -> Level {
        *Level::available().last().unwrap_or(&Level::PORTABLE)
    }

    /// Returns all levels of this processor, from the most basic to the best.
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

    /// Returns the level with this name, if this processor supports it.
    pub fn by_name(name: &str) -> Option<Level> {
        Level::available().into_iter().find(|l| l.name().eq_ignore_ascii_case(name))
    }

    /// Name for command lines and reports.
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

    /// Runs a kernel, compiled for this level.
    #[inline]
    pub(crate) fn dispatch<K: SimdKernel>(self, kernel: K) -> K::Out {
        #[cfg(target_arch = "aarch64")]
        use super::lanes::neon;
        #[cfg(target_arch = "x86_64")]
        use super::lanes::x86;
        match self.0 {
            InstructionSet::Portable => kernel.run(Portable),
            // SAFETY: this `Level` exists only because `available` detected every feature that the called
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

impl Level {
    /// [`Level::dispatch`] for kernels that gain nothing from dot products: compiled for fewer levels.
    #[inline]
    pub(crate) fn dispatch_floats<K: SimdKernel>(self, kernel: K) -> K::Out {
        #[cfg(target_arch = "aarch64")]
        use super::lanes::neon;
        #[cfg(target_arch = "x86_64")]
        use super::lanes::x86;
        match self.0 {
            InstructionSet::Portable => kernel.run(Portable),
            // SAFETY: as in `dispatch`; both levels have the features of the called function.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 | InstructionSet::Avx2Vnni => unsafe { x86::call_avx2(kernel) },
            // SAFETY: as in `dispatch`; all three levels have the features of the called function.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 | InstructionSet::Avx512Vnni | InstructionSet::Avx512Bf16 => unsafe {
                x86::call_avx512(kernel)
            },
            // SAFETY: as in `dispatch`; both levels have the features of the called function.
            #[cfg(target_arch = "aarch64")]
            InstructionSet::Neon | InstructionSet::NeonDot => unsafe { neon::call_neon(kernel) },
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
