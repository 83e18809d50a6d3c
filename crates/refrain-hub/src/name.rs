//! Names of models.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::catalogue::{self, CatalogueEntry};
use crate::error::HubError;

/// Name of a model, as typed by a user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelName {
    /// A short name of the catalogue.
    Short(&'static CatalogueEntry),
    /// A repository on the hub.
    Repo(RepoName),
    /// A file or folder.
    Path(PathBuf),
}

impl ModelName {
    /// Parses a name: a path that exists or looks like one, a short name, or `owner/repo[@revision][:QUANT]`.
    ///
    /// Anything else is [`HubError::UnknownName`] with the closest short name.
    pub fn parse(text: &str) -> Result<Self, HubError> {
        let path = Path::new(text);
        if !text.is_empty() && (looks_like_a_path(text) || path.exists() || path.is_symlink()) {
            return Ok(Self::Path(path.to_owned()));
        }
        if let Some(entry) = catalogue::lookup(text) {
            return Ok(Self::Short(entry));
        }
        if text.contains('/') {
            return RepoName::parse(text).map(Self::Repo);
        }
        Err(HubError::UnknownName {
            name: text.to_owned(),
            nearest: catalogue::nearest(text).map(str::to_owned),
        })
    }

    /// Returns whether a text is unambiguously a model: an existing path or a short name.
    ///
    /// `owner/repo` does not count, because a prompt may contain a slash.
    #[must_use]
    pub fn is_known(text: &str) -> bool {
        !text.is_empty() && (Path::new(text).exists() || catalogue::lookup(text).is_some())
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short(entry) => f.write_str(entry.name),
            Self::Repo(repo) => repo.fmt(f),
            Self::Path(path) => path.display().fmt(f),
        }
    }
}

impl std::str::FromStr for ModelName {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        Self::parse(text)
    }
}

fn looks_like_a_path(text: &str) -> bool {
    let starts = ["/", "./", "../", "~/", ".\\", "..\\"].iter().any(|prefix| text.starts_with(prefix));
    let drive = matches!(text.as_bytes(), [letter, b':', b'\\' | b'/', ..] if letter.is_ascii_alphabetic());
    let file = text.to_ascii_lowercase().ends_with(".gguf") && !text.contains(':');
    starts || drive || file || text == "." || text == ".."
}

/// A repository on the hub, with an optional revision and quantisation.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RepoName {
    owner: String,
    repo: String,
    revision: Option<String>,
    quant: Option<String>,
}

impl RepoName {
    /// Parses `owner/repo[@revision][:QUANT]` or the web address of a repository.
    ///
    /// `QUANT` is a quantisation such as `Q4_K_M`, the name of one `.gguf` file, or `safetensors`.
    pub fn parse(text: &str) -> Result<Self, HubError> {
        let bad = |because| HubError::BadName { name: text.to_owned(), because };
        let name = ["https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/"]
            .iter()
            .find_map(|prefix| text.strip_prefix(prefix))
            .unwrap_or(text);
        let (name, quant) = match name.split_once(':') {
            Some((name, quant)) => (name, Some(quant)),
            None => (name, None),
        };
        let (name, revision) = match name.split_once('@') {
            Some((name, revision)) => (name, Some(revision)),
            None => (name, None),
        };
        let (owner, repo) = name.split_once('/').ok_or_else(|| bad("a repository is `owner/repo`"))?;
        if !is_repo_part(owner) || !is_repo_part(repo) {
            return Err(bad(
                "owner and repository consist of letters and digits, with single `-`, `_` or `.` between them",
            ));
        }
        if revision.is_some_and(|revision| !is_relative_name(revision)) {
            return Err(bad("a revision is a branch, a tag or a commit"));
        }
        if quant.is_some_and(|quant| !is_relative_name(quant)) {
            return Err(bad("the colon must be followed by a quantisation such as Q4_K_M or a file name"));
        }
        Ok(Self {
            owner: owner.to_owned(),
            repo: repo.to_owned(),
            revision: revision.map(str::to_owned),
            quant: quant.map(str::to_owned),
        })
    }

    /// Returns the repository and quantisation of a short name on the hub.
    pub(crate) fn of_entry(entry: &CatalogueEntry) -> Result<Self, HubError> {
        Self::parse(&format!("{}:{}", entry.repo, entry.quant))
    }

    /// `owner/repo`.
    #[must_use]
    pub fn id(&self) -> String {
        format!("{}/{}", self.owner, self.repo)
    }

    /// Branch, tag or commit; `main` by default.
    #[must_use]
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// The requested quantisation or file.
    #[must_use]
    pub fn quant(&self) -> Option<&str> {
        self.quant.as_deref()
    }

    /// Folder name in the hub's cache.
    pub(crate) fn cache_folder(&self) -> String {
        format!("models--{}--{}", self.owner, self.repo)
    }

    /// The reverse of [`Self::cache_folder`].
    pub(crate) fn from_cache_folder(folder: &str) -> Option<Self> {
        let (owner, repo) = folder.strip_prefix("models--")?.split_once("--")?;
        Self::parse(&format!("{owner}/{repo}")).ok()
    }

    pub(crate) fn with_quant(&self, quant: &str) -> Self {
        Self { quant: Some(quant.to_owned()), ..self.clone() }
    }
}

impl fmt::Display for RepoName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.repo)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        if let Some(quant) = &self.quant {
            write!(f, ":{quant}")?;
        }
        Ok(())
    }
}

/// Returns whether an owner or repository name is valid by the hub's rule. The rule also keeps the cache folder's name
/// unambiguous (no `--`) and inside the cache.
fn is_repo_part(part: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let edge = |b: Option<u8>| b.is_some_and(|b| b != b'-' && b != b'.');
    part.len() <= 96
        && part.bytes().all(plain)
        && edge(part.bytes().next())
        && edge(part.bytes().last())
        && !part.contains("--")
        && !part.contains("..")
}

/// Returns whether a name stays inside the folder it is joined to on every system: plain characters, separated by `/`,
/// and no part that is empty or starts with a dot.
pub(crate) fn is_relative_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'/' | b'+' | b' ');
    !name.is_empty()
        && name.len() <= 512
        && name.bytes().all(plain)
        && name.split('/').all(|part| !part.is_empty() && !part.starts_with('.') && part.trim() == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_names_ignore_case() {
        for text in ["smollm2", "smollm2:135m", "SmolLM2"] {
            assert_eq!(ModelName::parse(text).unwrap().to_string(), "smollm2:135m");
        }
        assert_eq!(ModelName::parse("gemma3:270m-base").unwrap().to_string(), "gemma3:270m-base");
    }

    #[test]
    fn repositories_have_an_optional_revision_and_quant() {
        let name = RepoName::parse("Qwen/Qwen3-0.6B-GGUF@v1.0:q8_0").unwrap();
        assert_eq!(
            (name.id().as_str(), name.revision(), name.quant()),
            ("Qwen/Qwen3-0.6B-GGUF", "v1.0", Some("q8_0"))
        );
        let plain = RepoName::parse("https://huggingface.co/Qwen/Qwen3-0.6B").unwrap();
        assert_eq!((plain.revision(), plain.quant()), ("main", None));
        assert_eq!(RepoName::from_cache_folder(&name.cache_folder()).unwrap().id(), name.id());
    }

    #[test]
    fn names_that_would_leave_the_cache_are_refused() {
        for text in [
            "../../etc/passwd",
            "a/..",
            "../b",
            "a/b/c",
            "a//b",
            "a/b@../x",
            "a/b:../x",
            "a/b:/x",
            "a--b/c",
            "a/b:",
            "a/b@",
            "a/",
            "/b",
            "-a/b",
            "a/b\0",
            "a/b\n",
            "a b/c",
            ".a/b",
            "é/b",
        ] {
            assert!(matches!(RepoName::parse(text), Err(HubError::BadName { .. })), "{text:?}");
        }
    }

    #[test]
    fn paths_are_distinguished_from_names() {
        for text in ["./x", "/a/b", "../m.gguf", "models/m.gguf", "m.GGUF", "C:\\models\\m", "."] {
            assert!(matches!(ModelName::parse(text), Ok(ModelName::Path(_))), "{text}");
        }
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().to_str().unwrap();
        assert!(ModelName::is_known(text));
        assert!(matches!(ModelName::parse(text), Ok(ModelName::Path(_))));
    }

    #[test]
    fn a_typo_suggests_the_closest_name() {
        let error = ModelName::parse("smolm2").unwrap_err();
        assert_eq!(error.to_string(), "no model is called `smolm2`");
        assert_eq!(error.hint().unwrap(), "did you mean `smollm2`?");
        assert!(ModelName::parse("").is_err());
    }
}
