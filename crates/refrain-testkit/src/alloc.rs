//! Counts allocations, for code that must not allocate, and live bytes, for code with a memory limit.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The system allocator with counters.
///
/// ```
/// use refrain_testkit::CountingAllocator;
///
/// #[global_allocator]
/// static ALLOCATOR: CountingAllocator = CountingAllocator::new();
///
/// let (_, n) = ALLOCATOR.count(|| std::hint::black_box(Box::new(1)));
/// assert!(n >= 1);
/// ```
///
/// It counts all threads, so a test that uses it must be alone in its file.
#[derive(Debug, Default)]
pub struct CountingAllocator {
    made: AtomicU64,
    live_bytes: AtomicUsize,
}

impl CountingAllocator {
    /// Creates an allocator with zeroed counters.
    pub const fn new() -> CountingAllocator {
        CountingAllocator { made: AtomicU64::new(0), live_bytes: AtomicUsize::new(0) }
    }

    /// Number of allocations and reallocations since the program started.
    pub fn allocations(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }

    /// Currently allocated bytes, as requested; untouched zeroed memory counts too.
    pub fn live_bytes(&self) -> usize {
        self.live_bytes.load(Ordering::Relaxed)
    }

    fn add(&self, bytes: usize) {
        self.made.fetch_add(1, Ordering::Relaxed);
        self.live_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Runs a function and counts the allocations of all threads during the call.
    pub fn count<R>(&self, f: impl FnOnce() -> R) -> (R, u64) {
        let before = self.allocations();
        let result = f();
        (result, self.allocations() - before)
    }
}

// SAFETY: every method passes its arguments to `System` unchanged, so `System` upholds the contract of
// `GlobalAlloc`; the counters are atomics and do not allocate.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: the caller of this method upholds the contract of `System.alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: the caller of this method upholds the contract of `System.alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        self.add(new_size);
        self.live_bytes.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `ptr` came from `System` through this allocator; the caller upholds the rest of the
        // contract.
        unsafe { System.realloc(ptr, layout, new_size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        self.live_bytes.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `ptr` came from `System` through this allocator; the caller upholds the rest of the
        // contract.
        unsafe { System.dealloc(ptr, layout) }
    }
}
