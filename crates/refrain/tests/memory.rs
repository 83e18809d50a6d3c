//! Memory use of the sessions of one model.

use refrain::{DType, Device, Generate, Model, Prompt, SamplingParams, Session, SessionOptions};
use refrain_testkit::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

fn session(model: &Model, options: &SessionOptions) -> Session {
    let mut session = Session::new(model, options).unwrap();
    let sampling = Some(SamplingParams::greedy());
    let generate = Generate { sampling, max_tokens: Some(4), ..Generate::default() };
    session.generate(Prompt::Text("Once upon a time"), &generate).unwrap().for_each(|p| drop(p.unwrap()));
    session
}

#[test]
fn another_session_adds_only_its_cache() {
    let model = Model::builtin().unwrap();
    let device = Device::Cpu { threads: Some(2) };
    let options = SessionOptions { device, context: Some(128), ..SessionOptions::default() };
    let live = |before: usize| ALLOCATOR.live_bytes() as isize - before as isize;

    let empty = ALLOCATOR.live_bytes();
    let first = session(&model, &options);
    let kv = first.plan(1).unwrap().traffic().kv_bytes(128) as isize;
    let packed = live(empty) - kv;
    assert!(packed > model.weight_bytes() as isize / 2, "{packed} bytes are more than weights");

    // For bookkeeping, and for plans that are recompiled for a larger cache.
    let slack = 256 * 1024;
    assert!(slack < packed / 8 && kv > 0);
    let one = ALLOCATOR.live_bytes();
    let second = session(&model, &options);
    assert!((live(one) - kv).abs() < slack, "{} bytes were added, {kv} are KV", live(one));
    // A cache of another type and length, on other threads: a separate engine over the same weights.
    let two = ALLOCATOR.live_bytes();
    let other = SessionOptions {
        device: Device::Cpu { threads: Some(1) },
        context: Some(64),
        kv_dtype: DType::F32,
        ..options.clone()
    };
    let third = session(&model, &other);
    // Steps compiled for this engine have their own arenas.
    assert!(live(two) < kv + packed / 4, "{} bytes were added, {kv} are KV", live(two));

    // The next session reuses the space of a dropped one.
    let three = ALLOCATOR.live_bytes();
    drop(second);
    let second = session(&model, &options);
    assert!(live(three).abs() < slack, "{} bytes were added", live(three));

    drop((first, second, third));
    assert!(live(empty) < slack, "{} bytes are left without a session", live(empty));
}
