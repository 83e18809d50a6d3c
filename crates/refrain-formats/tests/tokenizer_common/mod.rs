//! Small handmade vocabularies, and a reference implementation of SentencePiece.
#![allow(dead_code)] // Each test takes what it needs.

use std::collections::HashMap;

use refrain_formats::tokenizer::{SpecialIds, VocabSpec};

/// GPT-2's characters for the 256 bytes, in byte order.
fn byte_chars() -> Vec<String> {
    let mut next = 0x100;
    let mut chars = Vec::new();
    for byte in 0..=255u8 {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable {
            u32::from(byte)
        } else {
            next += 1;
            next - 1
        };
        chars.push(char::from_u32(code).unwrap().to_string());
    }
    chars
}

/// All bytes, a few words, two control tokens (260, 261) and two user-defined ones (262, 263).
pub(crate) fn byte_level() -> VocabSpec {
    let mut tokens = byte_chars();
    tokens.extend(
        ["he", "Ġt", "Ġthe", "ll", "<|im_start|>", "<|im_end|>", "<tool>", "\t\t"].map(str::to_owned),
    );
    let mut types = vec![1; 260];
    types.extend([3, 3, 4, 4]);
    VocabSpec {
        model: "gpt2".to_owned(),
        pre: Some("gpt-2".to_owned()),
        tokens: tokens.into_iter().collect(),
        token_types: Some(types),
        merges: Some(["h e", "Ġ t", "Ġt he", "l l"].into_iter().collect()),
        specials: SpecialIds { bos: Some(260), eos: Some(261), ..Default::default() },
        add_bos: Some(true),
        ..Default::default()
    }
}

/// `<unk>`, `<s>`, `</s>`, all bytes, small letters, a few words, and user-defined tokens at the end.
pub(crate) fn sentence_piece() -> VocabSpec {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    let mut types = vec![2, 3, 3];
    types.extend([6; 256]);
    let mut scores = vec![0.0; 259];
    let pieces = [
        "▁t", "he", "▁the", "▁a", "an", "aa", "aaa", "aaaa", "▁▁", "el", "ll", "hel", "lo", "hello", "▁hello",
    ];
    for (i, piece) in pieces.into_iter().enumerate() {
        tokens.push(piece.to_owned());
        scores.push(-(i as f32));
    }
    for (i, letter) in ('a'..='z').chain(['▁', '<', '>', '/', 'é']).enumerate() {
        tokens.push(letter.to_string());
        scores.push(-100.0 - i as f32);
    }
    types.resize(tokens.len(), 1);
    for added in ["<tool>", "▁▁▁", "\n\n"] {
        tokens.push(added.to_owned());
        types.push(4);
        scores.push(0.0);
    }
    VocabSpec {
        model: "llama".to_owned(),
        tokens: tokens.into_iter().collect(),
        token_types: Some(types),
        scores: Some(scores),
        specials: SpecialIds { bos: Some(1), eos: Some(2), unk: Some(0), ..Default::default() },
        ..Default::default()
    }
}

/// A WordPiece vocabulary in the form of GGUF.
pub(crate) fn word_piece() -> VocabSpec {
    let tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁hello", "▁wor", "ld", "▁,", "▁!", "s"];
    VocabSpec {
        model: "bert".to_owned(),
        tokens: tokens.into_iter().collect(),
        token_types: Some(vec![3, 3, 3, 3, 1, 1, 1, 1, 1, 1]),
        ..Default::default()
    }
}

/// Reference implementation of SentencePiece: merge the neighbours with the best score, leftmost first.
pub(crate) fn obvious_sentence_piece(spec: &VocabSpec, text: &str) -> Vec<u32> {
    let types = spec.token_types.as_ref().unwrap();
    let scores = spec.scores.as_ref().unwrap();
    let ids: HashMap<&str, usize> =
        spec.tokens.iter().enumerate().filter(|&(i, _)| types[i] == 1).map(|(i, t)| (t, i)).collect();
    let mut symbols: Vec<String> = text.chars().map(String::from).collect();
    loop {
        let joint = |i: usize| ids.get(format!("{}{}", symbols[i], symbols[i + 1]).as_str()).copied();
        let best = (0..symbols.len().saturating_sub(1))
            .filter_map(|i| joint(i).map(|id| (i, scores[id])))
            .reduce(|a, b| if b.1 > a.1 { b } else { a });
        let Some((i, _)) = best else { break };
        let right = symbols.remove(i + 1);
        symbols[i].push_str(&right);
    }
    symbols.iter().map(|symbol| ids[symbol.as_str()] as u32).collect()
}

/// `<pad>`, `<eos>`, `<bos>`, `<unk>`, all bytes, letters, results of merges, and user-defined tokens at the end.
pub(crate) fn merged_pieces() -> VocabSpec {
    let mut tokens: Vec<String> = ["<pad>", "<eos>", "<bos>", "<unk>"].map(str::to_owned).to_vec();
    tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    let mut types = vec![3, 3, 3, 2];
    types.extend([6; 256]);
    tokens.extend(('a'..='z').chain(['\u{2581}', '\n', '.', 'é']).map(String::from));
    let merges = [
        "t h",
        "th e",
        "\u{2581} the",
        "\u{2581} a",
        "\n \n",
        "l l",
        "e ll",
        "h ell",
        "hell o",
        "o \u{2581}",
    ];
    tokens.extend(merges.map(|merge| merge.replace(' ', "")));
    types.resize(tokens.len(), 1);
    for (text, kind) in
        [("<|turn>", 3), ("<turn|>", 3), ("<|channel>", 4), ("<channel|>", 4), ("\u{2581}\u{2581}", 4)]
    {
        tokens.push(text.to_owned());
        types.push(kind);
    }
    VocabSpec {
        model: "gemma4".to_owned(),
        pre: Some("gemma4".to_owned()),
        scores: Some(vec![0.0; tokens.len()]),
        tokens: tokens.into_iter().collect(),
        token_types: Some(types),
        merges: Some(merges.into_iter().collect()),
        specials: SpecialIds { bos: Some(2), eos: Some(1), unk: Some(3), pad: Some(0), ..Default::default() },
        add_bos: Some(true),
        add_space_prefix: Some(false),
        ..Default::default()
    }
}
