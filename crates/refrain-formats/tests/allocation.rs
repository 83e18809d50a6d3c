//! Memory for reading a damaged file is bounded by its size, and a tokenizer is built in few allocations.
//!
//! The counter covers all threads, so the tests run one at a time.

use refrain_formats::gguf::{Array, Gguf, GgufWriter, StrArray};
use refrain_formats::hf::check_safetensors;
use refrain_formats::tokenizer::{Tokenizer, VocabSpec};
use refrain_tensor::{Bytes, DType, Shape};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use std::alloc::System;
use std::sync::{Mutex, PoisonError};

#[global_allocator]
static COUNTER: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

static TURN: Mutex<()> = Mutex::new(());

/// Returns the bytes allocated by `work`, including those freed again.
fn allocated(work: impl FnOnce()) -> usize {
    let region = Region::new(COUNTER);
    work();
    region.change().bytes_allocated
}

fn model() -> Vec<u8> {
    let mut w = GgufWriter::new();
    w.set("general.architecture", "llama").unwrap();
    w.set("tokens", (0..50).map(|i| i.to_string()).collect::<StrArray>()).unwrap();
    w.set("empty", Array::Array(vec![Array::U8([].into()); 40].into())).unwrap();
    w.set("scores", Array::F32([0.5; 50].into())).unwrap();
    for i in 0..10 {
        w.tensor(&format!("w{i}"), DType::F32, Shape::from([8]), Bytes::new(vec![0; 32])).unwrap();
    }
    w.to_vec()
}

#[test]
fn memory_of_readers_is_a_small_multiple_of_the_file() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let intact = model();
    let mut worst = 0;
    for at in 0..intact.len() {
        for value in [u64::MAX, 1 << 62, 1 << 40, 0xffff_ffff, 1 << 20, 1 << 8] {
            let mut bytes = intact.clone();
            let n = bytes.len();
            let width = 8.min(n - at);
            bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
            let bytes = Bytes::new(bytes);
            worst = worst.max(allocated(|| drop(Gguf::from_bytes(bytes))));
        }
    }
    // Tables of tensors and keys are a few times larger than in the file; messages add a little.
    let limit = 16 * intact.len() + 4096;
    assert!(worst <= limit, "{worst} bytes for a file of {}, at most {limit} expected", intact.len());

    let header = br#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
    let intact = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 24]].concat();
    for at in 0..intact.len() {
        for value in [0, b'0', b'9', b'[', 0xff] {
            let mut bytes = intact.clone();
            bytes[at] = value;
            let taken = allocated(|| drop(check_safetensors(&bytes)));
            assert!(taken <= 64 * intact.len() + 4096, "{taken} bytes with byte {at} set to {value}");
        }
    }
}

#[test]
fn a_sentence_piece_tokenizer_needs_no_allocation_per_token() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // All words of up to eight of three letters: each can be merged from two others in many ways.
    let mut tokens = vec![String::new()];
    for n_letters in 1..=8 {
        let before: Vec<String> = tokens.iter().filter(|t| t.len() == n_letters - 1).cloned().collect();
        tokens.extend(before.iter().flat_map(|t| ["a", "b", "c"].map(|letter| format!("{t}{letter}"))));
    }
    tokens[0] = "<unk>".to_owned();
    let scores: Vec<f32> = (0..tokens.len()).map(|id| -(id as f32)).collect();
    let n_tokens = tokens.len();
    let spec = VocabSpec {
        model: "llama".to_owned(),
        tokens: tokens.into_iter().collect(),
        scores: Some(scores),
        add_space_prefix: Some(false),
        ..Default::default()
    };
    let region = Region::new(COUNTER);
    let tokenizer = Tokenizer::from_spec(&spec).unwrap();
    let n_allocations = region.change().allocations;
    assert!(n_tokens > 9000 && n_allocations < n_tokens / 4, "{n_allocations} for {n_tokens} tokens");
    assert_eq!(tokenizer.decode(&tokenizer.encode("abcabcab", false, false).unwrap()).unwrap(), "abcabcab");
}
