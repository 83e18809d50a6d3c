//! Memory for repacked weights: aligned to cache lines, and on huge pages if the system supports them.
//!
//! A pass over the weights touches every page once, so with small pages every page costs a page table walk.
//! Huge pages need one walk instead of 512.

/// Zero-initialised bytes, aligned to cache lines.
pub(crate) struct AlignedBuffer {
    memory: Backing,
    n_bytes: usize,
}

enum Backing {
    /// `n_lines` lines.
    Heap(Vec<CacheLine>),
    /// A mapping of `map_bytes` at `map`; the buffer starts at `begin`.
    #[cfg(target_os = "linux")]
    Mapped { map: *mut u8, map_bytes: usize, begin: *mut u8 },
}

// SAFETY: an `AlignedBuffer` owns its memory exclusively, like a `Vec`; the pointers are into a mapping that
// only `drop` unmaps.
unsafe impl Send for AlignedBuffer {}
// SAFETY: as above; the memory is mutated only through `&mut`.
unsafe impl Sync for AlignedBuffer {}

/// One 64-byte cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct CacheLine(#[expect(dead_code, reason = "read as bytes only")] [u8; 64]);

/// Minimum size for a separate mapping.
const HUGE: usize = 2 << 20;

impl AlignedBuffer {
    /// Returns `n_bytes` zeros, or `None` if memory runs out.
    pub(crate) fn zeroed(n_bytes: usize) -> Option<AlignedBuffer> {
        #[cfg(target_os = "linux")]
        if n_bytes >= HUGE {
            return Some(AlignedBuffer { memory: map(n_bytes)?, n_bytes });
        }
        let n_lines = n_bytes.div_ceil(64);
        let mut lines = Vec::new();
        lines.try_reserve_exact(n_lines).ok()?;
        lines.resize(n_lines, CacheLine([0; 64]));
        Some(AlignedBuffer { memory: Backing::Heap(lines), n_bytes })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        let begin = match &self.memory {
            Backing::Heap(lines) => lines.as_ptr().cast(),
            #[cfg(target_os = "linux")]
            Backing::Mapped { begin, .. } => begin.cast_const(),
        };
        // SAFETY: `zeroed` allocated at least `n_bytes` initialised bytes there, which live as long as `self`.
        unsafe { std::slice::from_raw_parts(begin, self.n_bytes) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let begin = match &mut self.memory {
            Backing::Heap(lines) => lines.as_mut_ptr().cast(),
            #[cfg(target_os = "linux")]
            Backing::Mapped { begin, .. } => *begin,
        };
        // SAFETY: as in `bytes`; the borrow of `self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(begin, self.n_bytes) }
    }
}

#[cfg(target_os = "linux")]
fn map(n_bytes: usize) -> Option<Backing> {
    let map_bytes = n_bytes.checked_add(HUGE)?;
    // SAFETY: a new private mapping at an address that the kernel chooses; the kernel fills it with zeros.
    let map = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            map_bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if map == libc::MAP_FAILED {
        return None;
    }
    let map = map.cast::<u8>();
    let begin = map.wrapping_add(map.align_offset(HUGE));
    // SAFETY: the range is inside the mapping above (HUGE more than `n_bytes`). This is a hint: if huge pages
    // are disabled it fails, and small pages work too.
    let _ = unsafe { libc::madvise(begin.cast(), n_bytes, libc::MADV_HUGEPAGE) };
    Some(Backing::Mapped { map, map_bytes, begin })
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        match self.memory {
            Backing::Heap(_) => {}
            #[cfg(target_os = "linux")]
            Backing::Mapped { map, map_bytes, .. } => {
                // SAFETY: the mapping that `map` made, unmapped once, after the last borrow of it.
                unsafe { libc::munmap(map.cast(), map_bytes) };
            }
        }
    }
}
