//! Damaged files are read or refused and never panic. Every test run tries a fixed number of mutations.

use crate::common::{read, small_gguf, use_all};
use proptest::prelude::*;
use proptest::sample::Index;
use refrain_formats::hf::{JsonObject, check_safetensors};
use refrain_formats::params::ModelConfig;
use std::path::Path;

/// Damage to a file.
#[derive(Debug, Clone)]
enum Damage {
    Flip(Index, u8),
    Set(Index, u8),
    Number(Index, u64, bool),
    Cut(Index),
    Remove(Index, u8),
    Copy(Index, Index, u8),
}

fn damage() -> impl Strategy<Value = Damage> {
    let absurd = prop_oneof![
        Just(0),
        Just(1),
        Just(u64::MAX),
        Just(1 << 63),
        Just(u64::MAX >> 1),
        Just(1 << 32),
        Just(0xffff_ffff),
        Just(1 << 20),
        (0u64..64),
        any::<u64>(),
    ];
    prop_oneof![
        3 => (any::<Index>(), 0u8..8).prop_map(|(at, bit)| Damage::Flip(at, bit)),
        2 => (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Damage::Set(at, byte)),
        4 => (any::<Index>(), absurd, any::<bool>()).prop_map(|(at, v, wide)| Damage::Number(at, v, wide)),
        1 => any::<Index>().prop_map(Damage::Cut),
        1 => (any::<Index>(), 1u8..32).prop_map(|(at, n)| Damage::Remove(at, n)),
        1 => (any::<Index>(), any::<Index>(), 1u8..64).prop_map(|(from, to, n)| Damage::Copy(from, to, n)),
    ]
}

fn apply(bytes: &mut Vec<u8>, damage: &Damage) {
    if bytes.is_empty() {
        return;
    }
    let n = bytes.len();
    match damage {
        Damage::Flip(at, bit) => bytes[at.index(n)] ^= 1 << bit,
        Damage::Set(at, byte) => bytes[at.index(n)] = *byte,
        Damage::Number(at, value, wide) => {
            let at = at.index(n);
            let width = if *wide { 8 } else { 4 }.min(n - at);
            bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        }
        Damage::Cut(at) => bytes.truncate(at.index(n)),
        Damage::Remove(at, len) => {
            let at = at.index(n);
            bytes.drain(at..(at + usize::from(*len)).min(n));
        }
        Damage::Copy(from, to, len) => {
            let (from, to) = (from.index(n), to.index(n));
            let part = bytes[from..(from + usize::from(*len)).min(n)].to_vec();
            bytes.splice(to..to, part);
        }
    }
}

fn small_safetensors() -> Vec<u8> {
    let header = br#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend([0; 32]);
    bytes
}

const CONFIG: &[u8] = br#"{"architectures":["Gemma3ForCausalLM"],"hidden_size":640,"intermediate_size":2048,
"num_hidden_layers":7,"num_attention_heads":4,"num_key_value_heads":1,"head_dim":256,"sliding_window":512,
"max_position_embeddings":32768,"vocab_size":999,"eos_token_id":[1,2],"query_pre_attn_scalar":256,"rope_parameters":
{"full_attention":{"rope_type":"yarn","factor":4.0,"rope_theta":1e6},"sliding_attention":{"rope_theta":1e4}}}"#;

proptest! {
    #![proptest_config(ProptestConfig { cases: 50_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_gguf_files_are_read_or_refused(all in prop::collection::vec(damage(), 1..4)) {
        let mut bytes = small_gguf();
        all.iter().for_each(|d| apply(&mut bytes, d));
        match read(bytes) {
            Ok(gguf) => use_all(&gguf),
            Err(error) => prop_assert!(error.to_string().len() < 2000),
        }
    }

    #[test]
    fn damaged_safetensors_files_are_read_or_refused(all in prop::collection::vec(damage(), 1..4)) {
        let mut bytes = small_safetensors();
        all.iter().for_each(|d| apply(&mut bytes, d));
        if let Ok(tensors) = check_safetensors(&bytes) {
            let end = tensors.iter().map(|t| t.offset() + t.n_bytes()).max();
            prop_assert!(end.unwrap_or(0) <= bytes.len() as u64);
        }
    }

    #[test]
    fn damaged_configurations_are_read_or_refused(all in prop::collection::vec(damage(), 1..4)) {
        let mut bytes = CONFIG.to_vec();
        all.iter().for_each(|d| apply(&mut bytes, d));
        if let Ok(value) = serde_json::from_slice(&bytes)
            && let Ok(json) = JsonObject::new(Path::new("config.json"), value)
            && let Ok(config) = ModelConfig::from_hf_config(&json)
        {
            prop_assert!(config.n_heads.is_multiple_of(config.n_kv_heads));
            prop_assert_eq!(config.layers.len(), config.n_layers);
        }
    }

    #[test]
    fn random_bytes_after_a_header_are_read_or_refused(tail in prop::collection::vec(any::<u8>(), 0..200), version in 2u8..4) {
        let mut bytes = vec![b'G', b'G', b'U', b'F', version, 0, 0, 0];
        bytes.extend(&tail);
        if let Ok(gguf) = read(bytes) {
            use_all(&gguf);
        }
        let _ = check_safetensors(&tail);
    }
}

#[test]
fn the_undamaged_configuration_is_valid() {
    let json = JsonObject::new(Path::new("config.json"), serde_json::from_slice(CONFIG).unwrap()).unwrap();
    assert_eq!(ModelConfig::from_hf_config(&json).unwrap().n_vocab, 999);
}

#[test]
fn safetensors_files_cut_off_anywhere_are_refused() {
    let bytes = small_safetensors();
    assert_eq!(check_safetensors(&bytes).unwrap().len(), 2);
    for n in 0..bytes.len() {
        assert!(check_safetensors(&bytes[..n]).is_err(), "accepted {n} of {} bytes", bytes.len());
    }
}

#[test]
fn safetensors_headers_with_absurd_sizes_are_refused() {
    for (shape, end) in [("18446744073709551615", "18446744073709551615"), ("4294967296,4294967296", "0")] {
        let header = format!(r#"{{"a":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,{end}]}}}}"#);
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
        assert!(check_safetensors(&bytes).is_err());
    }
    assert!(check_safetensors(&[0xff; 64]).is_err());
}
