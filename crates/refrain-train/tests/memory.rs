//! Reading files uses a small multiple of their size in memory. The counter covers all threads, so this test
//! has its own file.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use refrain_testkit::CountingAllocator;
use refrain_train::config::{OnLong, Order};
use refrain_train::data::{Corpus, CorpusOptions, Encoder};
use refrain_train::tokenize::{TokenizerPlan, TrainedTokenizer};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// Peak memory while `work` runs, above the memory in use before.
fn peak<R>(work: impl FnOnce() -> R) -> (R, usize) {
    let (before, most, done) = (ALLOCATOR.live_bytes(), AtomicUsize::new(0), AtomicBool::new(false));
    let result = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                most.fetch_max(ALLOCATOR.live_bytes(), Ordering::Relaxed);
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        let result = work();
        done.store(true, Ordering::Relaxed);
        result
    });
    (result, most.into_inner().saturating_sub(before))
}

#[test]
fn reading_takes_a_small_multiple_of_the_file() {
    const MIB: usize = 1 << 20;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.txt");
    let mut text = String::new();
    for i in 0.. {
        let _ = writeln!(text, "Line {i} says that the cat number {} sat on the mat.", i * 7919 % 1009);
        if text.len() > 2 * MIB {
            break;
        }
    }
    std::fs::write(&path, &text).unwrap();
    let n_bytes = text.len();
    drop(text);
    let files = [path];
    let plan = TokenizerPlan { max_bytes: MIB as u64, ..TokenizerPlan::new(512) };
    let trained = TrainedTokenizer::train(&files, &plan).unwrap();
    let encoder = Encoder::new(Arc::new(trained.tokenizer)).unwrap();
    let options = CorpusOptions { context: 256, order: Order::File, on_long: OnLong::Drop, n_threads: 1 };
    let (corpus, most) = peak(|| Corpus::read(&files, &encoder, options, &mut |_, _| {}).unwrap());
    let n_tokens = corpus.tokens().len();
    assert!(n_tokens > n_bytes / 8);
    // The tokens twice while they are reallocated, plus what a tokenizer needs for a chunk of 256 KiB.
    let limit = 2 * 4 * n_tokens + 48 * MIB;
    assert!(most < limit, "{} MiB at most, {} MiB allowed", most / MIB, limit / MIB);
}
