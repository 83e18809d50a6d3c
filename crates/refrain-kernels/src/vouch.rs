//! Safety argument for launches: the crate's only use of [`LaunchBuilder::build`].
//!
//! Launchers are trusted code, because safe code enqueues the launches they return. Every launcher keeps
//! these rules, which `docs/guide/add-a-kernel.md` explains:
//!
//! - Every buffer goes through the launcher's [`OpCase`]. It checks size and alignment against the header of
//!   the `.cu` file for the sizes baked into the launch, and cuts the buffer accordingly.
//! - Every size is checked to fit the kernel's type ([`OpCase::sizes`], [`OpCase::u32`]); grid, block and
//!   shared memory are those of the header.
//! - A kernel compares every index that it reads from memory (positions, sequences, block tables, ids) with
//!   the baked sizes, since memory may hold anything.
//!
//! The tests run every launcher over tables of cases with guard zones around each buffer: on the simulated
//! device, with the kernels compiled for the host, and on a GPU.
#![allow(unsafe_code)]

use refrain_driver::{Launch, LaunchBuilder};

use crate::error::OpCase;

/// Final step of every launcher.
pub(crate) trait Vouch {
    /// Builds the launch of a launcher that has kept the rules of this module, with the case it checked.
    fn vouch(self, checked: &OpCase<'_>) -> Launch;
}

impl Vouch for LaunchBuilder {
    fn vouch(self, _checked: &OpCase<'_>) -> Launch {
        // SAFETY: only launchers of this crate get here, with a kernel of `Kernels::functions`, whose
        // parameters were compared on loading with those that the launchers pass (`load::check`). The
        // launcher has checked buffers, sizes and shape by the rules above. The kernel's header states that
        // it accesses nothing beyond them and, through `overlap.cuh`, waits as `LaunchBuilder::pdl` requires.
        unsafe { self.build() }
    }
}
