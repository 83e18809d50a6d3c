//! Counting allocations, for code that must not make any, and bytes, for code that must not make many.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The system's allocator with a counter in front.
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
/// All threads are counted, so a test that uses it has its file to itself.
#[derive(Debug, Default)]
pub struct CountingAllocator {
    made: AtomicU64,
    live_bytes: AtomicUsize,
}

impl CountingAllocator {
    /// An allocator that has counted nothing yet.
    pub const fn new() -> CountingAllocator {
        CountingAllocator { made: AtomicU64::new(0), live_bytes: AtomicUsize::new(0) }
    }

    /// Allocations and reallocations since the program began.
    pub fn allocations(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }

    /// Bytes that are allocated now, as they were asked for: zeros that nobody has touched count too.
    pub fn live_bytes(&self) -> usize {
        self.live_bytes.load(Ordering::Relaxed)
    }

    fn add(&self, bytes: usize) {
        self.made.fetch_add(1, Ordering::Relaxed);
        self.live_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Runs a function and counts the allocations of all threads meanwhile.
    pub fn count<R>(&self, f: impl FnOnce() -> R) -> (R, u64) {
        let before = self.allocations();
        let result = f();
        (result, self.allocations() - before)
    }
}

// SAFETY: every method hands its arguments to `System` unchanged, so the caller's promises to `GlobalAlloc` are kept
// by `System`; the counters are atomics and allocate nothing themselves.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: the caller of this method promises what `System.alloc` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: the caller of this method promises what `System.alloc_zeroed` asks for.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        self.add(new_size);
        self.live_bytes.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `ptr` came from `System` through this allocator; the rest the caller promises.
        unsafe { System.realloc(ptr, layout, new_size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        self.live_bytes.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `ptr` came from `System` through this allocator; the rest the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}
