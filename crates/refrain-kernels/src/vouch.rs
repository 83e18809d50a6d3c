//! Where launches are vouched for: the crate's one use of [`LaunchBuilder::build`].
//!
//! Launchers are trusted code: what they return is enqueued by safe code. Each of them keeps these rules, which
//! `docs/guide/add-a-kernel.md` explains:
//!
//! - Every buffer goes through the launcher's [`OpCase`], which checks that it is as large and as aligned as the header of
//!   the `.cu` file says for the sizes baked into the same launch, and cuts it to that.
//! - Every size has been checked to fit the kernel's type ([`OpCase::sizes`], [`OpCase::u32`]); grid, block and shared memory are
//!   what the header says for them.
//! - What a kernel reads from memory and uses as an index (positions, sequences, block tables, ids) it compares with the
//!   baked sizes itself, since any bytes may be there.
//!
//! The tests run every launcher over tables of cases with guard zones around each buffer, on the simulated device, with the
//! kernels' source compiled for the host, and on a card.
#![allow(unsafe_code)]

use refrain_driver::{Launch, LaunchBuilder};

use crate::error::OpCase;

/// The end of every launcher.
pub(crate) trait Vouch {
    /// The launch of a launcher that has kept the rules of this module, with the case that it checked.
    fn vouch(self, checked: &OpCase<'_>) -> Launch;
}

impl Vouch for LaunchBuilder {
    fn vouch(self, _checked: &OpCase<'_>) -> Launch {
        // SAFETY: only launchers of this crate get here, with a kernel of `Kernels::functions`, whose parameters were
        // compared with what launchers pass when it was loaded (`load::check`). The launcher has checked buffers, sizes and
        // shape as the rules above say, and the kernel's header says that it touches nothing beyond them and, by
        // `overlap.cuh`, waits as `LaunchBuilder::pdl` demands.
        unsafe { self.build() }
    }
}
