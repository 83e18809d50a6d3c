//! Listings of repositories on the hub.

use serde::Deserialize;
use serde_json::Value;
use ureq::http::StatusCode;

use crate::catalogue::Licence;
use crate::disk::Checksum;
use crate::error::HubError;
use crate::http::{Client, RequestFailure, encode_path};
use crate::name::{RepoName, is_relative_name};
use crate::progress::Progress;

/// The files of a repository at one commit.
#[derive(Debug)]
pub(crate) struct Listing {
    pub(crate) commit: String,
    pub(crate) files: Vec<RemoteFile>,
    pub(crate) licence: Option<Licence>,
}

/// One file of a repository.
#[derive(Debug, Clone)]
pub(crate) struct RemoteFile {
    pub(crate) path: String,
    pub(crate) bytes: Option<u64>,
    pub(crate) checksum: Option<Checksum>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListingResponse {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
    #[serde(default)]
    card_data: Value,
    #[serde(default)]
    tags: Vec<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    #[serde(alias = "oid")]
    sha256: Option<String>,
    size: Option<u64>,
}

/// Requests the listing of a repository.
pub(crate) fn list(
    client: &Client,
    repo: &RepoName,
    progress: &mut dyn Progress,
) -> Result<Listing, HubError> {
    let url = format!(
        "{}/api/models/{}/revision/{}?blobs=true",
        client.endpoint(),
        repo.id(),
        encode_path(repo.revision()).replace('/', "%2F")
    );
    let answer = client.with_retries(&url, progress, || {
        // Generous for a listing, and a limit for servers that send without end.
        const MAX_BYTES: u64 = 32 << 20;
        let mut response = client.get(repo, &url, 0)?;
        if response.status() != StatusCode::OK {
            return Err(HubError::Status { url: url.clone(), status: response.status().as_u16() }.into());
        }
        match response.body_mut().with_config().limit(MAX_BYTES).read_to_vec() {
            Ok(bytes) => Ok(bytes),
            Err(ureq::Error::BodyExceedsLimit(limit)) => {
                let found = format!("more than {limit} bytes");
                Err(HubError::BadListing { repo: repo.id(), because: "too long", found }.into())
            }
            Err(error) => Err(RequestFailure::broken(error)),
        }
    })?;
    read(repo, &answer)
}

fn read(repo: &RepoName, answer: &[u8]) -> Result<Listing, HubError> {
    let bad =
        |because, found: &str| HubError::BadListing { repo: repo.id(), because, found: found.to_owned() };
    let answer: ListingResponse =
        serde_json::from_slice(answer).map_err(|error| bad("not a listing", &error.to_string()))?;
    // The commit becomes a folder name.
    if !matches!(Checksum::parse(&answer.sha), Some(Checksum::GitBlob(_))) {
        return Err(bad("the commit is missing", &answer.sha));
    }
    let licence = licence(&answer.card_data, &answer.tags);
    // Names that could leave the cache are skipped.
    let files = answer.siblings.into_iter().filter(|file| is_relative_name(&file.rfilename)).map(remote_file);
    Ok(Listing { commit: answer.sha, licence, files: files.collect() })
}

fn remote_file(sibling: Sibling) -> RemoteFile {
    let (bytes, checksum) = match sibling.lfs {
        // For a large file, the blob is only an LFS pointer.
        Some(lfs) => (lfs.size.or(sibling.size), lfs.sha256),
        None => (sibling.size, sibling.blob_id),
    };
    RemoteFile { path: sibling.rfilename, bytes, checksum: checksum.as_deref().and_then(Checksum::parse) }
}

fn licence(card: &Value, tags: &[Value]) -> Option<Licence> {
    let text = |key| match card.get(key)? {
        Value::String(text) => Some(text.clone()),
        Value::Array(several) => several.first()?.as_str().map(str::to_owned),
        _ => None,
    };
    let tag = || tags.iter().find_map(|tag| tag.as_str()?.strip_prefix("license:")).map(str::to_owned);
    let name =
        text("license").filter(|name| name != "other").or_else(|| text("license_name")).or_else(tag)?;
    // Both are printed to a terminal.
    let shown = |text: &String| text.len() <= 200 && !text.chars().any(char::is_control);
    let url = text("license_link").filter(|url| url.starts_with("https://") && shown(url));
    shown(&name).then_some(Licence { name, url })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<Listing, HubError> {
        read(&RepoName::parse("o/r").unwrap(), text.as_bytes())
    }

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn a_listing_has_sizes_checksums_and_licence() {
        let sha256 = "ab".repeat(32);
        let listing = read_text(&format!(
            r#"{{"sha":"{COMMIT}","cardData":{{"license":"other","license_name":"llama3.2","license_link":"https://l"}},
            "siblings":[{{"rfilename":"m.gguf","size":10,"blobId":"{COMMIT}","lfs":{{"sha256":"{sha256}","size":10,"pointerSize":134}}}},
            {{"rfilename":"config.json","size":2,"blobId":"{COMMIT}"}},{{"rfilename":"../evil","size":2}},{{"rfilename":".gitattributes"}}]}}"#
        ))
        .unwrap();
        assert_eq!(listing.files.len(), 2);
        assert_eq!(listing.files[0].checksum, Some(Checksum::Sha256(sha256)));
        assert_eq!(listing.files[1].checksum, Some(Checksum::GitBlob(COMMIT.to_owned())));
        assert_eq!(listing.licence.unwrap().to_string(), "llama3.2 (https://l)");
    }

    #[test]
    fn unusable_listings_are_refused() {
        for text in ["", "[]", "<html>", r#"{"sha":"../../x"}"#, r#"{"sha":"main","siblings":[]}"#] {
            assert!(matches!(read_text(text), Err(HubError::BadListing { .. })), "{text}");
        }
    }

    #[test]
    fn the_licence_may_be_a_tag_or_missing() {
        let tagged = format!(r#"{{"sha":"{COMMIT}","tags":["gguf",7,"license:mit"]}}"#);
        assert_eq!(read_text(&tagged).unwrap().licence.unwrap().name, "mit");
        let odd = format!(r#"{{"sha":"{COMMIT}","cardData":{{"license":"\u001b[31m"}}}}"#);
        assert_eq!(read_text(&odd).unwrap().licence, None);
    }
}
