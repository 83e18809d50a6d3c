//! Models on this machine.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::cache::RepoCache;
use crate::catalogue::{self, CATALOGUE, CatalogueEntry, Licence};
use crate::disk::{self, Disk, RealDisk};
use crate::env::Env;
use crate::error::HubError;
use crate::http::Retry;
use crate::name::{ModelName, RepoName};
use crate::package::{self, Manifest, ModelFolder};
use crate::select::{self, Format, Selection};

/// Source of a local model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelOrigin {
    /// The user's own file or folder.
    Path,
    /// The hub's cache.
    Hub {
        /// `owner/repo`.
        repo: String,
    },
    /// A Python package index; stored in Refrain's own folder.
    Package,
}

/// A model on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalModel {
    /// Name that finds the model.
    pub name: String,
    /// What to load: a `.gguf` file (the first, if it is split) or a folder.
    pub path: PathBuf,
    /// File format.
    pub format: Format,
    /// Its files, in order.
    pub files: Vec<PathBuf>,
    /// Total size of its files in bytes.
    pub bytes: u64,
    /// Licence, if known.
    pub licence: Option<Licence>,
    /// Source.
    pub origin: ModelOrigin,
}

/// An incomplete download. Pulling again resumes it, and removing the name removes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartialDownload {
    /// Name to pull or remove.
    pub name: String,
    /// Folder of the download.
    pub path: PathBuf,
    /// Bytes downloaded so far.
    pub bytes: u64,
}

/// Result of [`Store::list`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inventory {
    /// Complete models, sorted by name.
    pub models: Vec<LocalModel>,
    /// Incomplete downloads.
    pub partial: Vec<PartialDownload>,
}

/// Result of [`Store::remove`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Removed {
    /// Number of removed files.
    pub n_files: usize,
    /// Freed bytes.
    pub bytes: u64,
}

/// Models on this machine: in the hub's cache and in Refrain's own folder.
pub struct Store {
    pub(crate) env: Env,
    pub(crate) retry: Retry,
    pub(crate) disk: Box<dyn Disk>,
}

impl Store {
    /// Opens the store of an environment. Writes nothing until something is pulled or removed.
    #[must_use]
    pub fn open(env: Env) -> Self {
        Self { env, retry: Retry::default(), disk: Box::new(RealDisk) }
    }

    /// Sets the policy for retries.
    #[must_use]
    pub fn with_retry(self, retry: Retry) -> Self {
        Self { retry, ..self }
    }

    /// Sets the disk for downloads.
    #[must_use]
    pub fn with_disk(self, disk: impl Disk + 'static) -> Self {
        Self { disk: Box::new(disk), ..self }
    }

    /// The environment it was opened with.
    #[must_use]
    pub fn env(&self) -> &Env {
        &self.env
    }

    /// Finds a model on this machine, without network access.
    pub fn find(&self, name: &ModelName) -> Result<Option<LocalModel>, HubError> {
        match name {
            ModelName::Path(path) => find_path(path),
            ModelName::Short(entry) => self.find_entry(entry),
            ModelName::Repo(repo) => self.find_repo(repo),
        }
    }

    /// Lists all models and incomplete downloads.
    #[must_use]
    pub fn list(&self) -> Inventory {
        let mut inventory = Inventory::default();
        for folder in folders_in(&package::models_folder(&self.env.refrain_home)) {
            let folder = ModelFolder::new(&self.env.refrain_home, &folder);
            let name =
                |short: &str| CATALOGUE.iter().find(|e| e.folder() == short).map(|e| e.name.to_owned());
            if let Some(manifest) = folder.manifest() {
                inventory.models.push(package_model(&folder, manifest));
            } else if let Some(bytes) = folder.partial_bytes() {
                let folder_name = folder.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let name = name(&folder_name).unwrap_or(folder_name);
                inventory.partial.push(PartialDownload { name, path: folder.path, bytes });
            }
        }
        for repo in folders_in(&self.env.hf_cache).iter().filter_map(|name| RepoName::from_cache_folder(name))
        {
            let cache = RepoCache::new(&self.env.hf_cache, &repo);
            inventory.models.extend(self.repo_models(&repo, &cache));
            let bytes: u64 = cache.incomplete_files().iter().map(|(_, bytes)| bytes).sum();
            if bytes > 0 {
                let path = cache.folder().to_owned();
                inventory.partial.push(PartialDownload { name: repo.id(), path, bytes });
            }
        }
        inventory.models.sort_by(|a, b| a.name.cmp(&b.name));
        inventory.partial.sort_by(|a, b| a.name.cmp(&b.name));
        inventory
    }

    /// Removes a pulled model and its incomplete downloads. `owner/repo` removes all files of the repository,
    /// `owner/repo:QUANT` those of one model. Paths are refused: only pulled models are removed.
    pub fn remove(&self, name: &ModelName) -> Result<Removed, HubError> {
        let mut removed = Removed::default();
        let mut add = |(n_files, bytes): (usize, u64)| {
            removed.n_files += n_files;
            removed.bytes += bytes;
        };
        let mut found = false;
        match name {
            ModelName::Path(path) => return Err(HubError::OutsideStore { path: path.clone() }),
            ModelName::Short(entry) => {
                let folder = ModelFolder::new(&self.env.refrain_home, &entry.folder());
                if is_own_folder(&folder.path)? {
                    add(folder.remove()?);
                    found = true;
                }
                if let Some(freed) = self.remove_repo(&RepoName::of_entry(entry)?)? {
                    add(freed);
                    found = true;
                }
            }
            ModelName::Repo(repo) => {
                if let Some(freed) = self.remove_repo(repo)? {
                    add(freed);
                    found = true;
                }
            }
        }
        if !found {
            return Err(self.not_here(name));
        }
        Ok(removed)
    }

    /// Returns the name closest to a mistyped one, among local models and short names.
    #[must_use]
    pub fn nearest(&self, name: &str) -> Option<String> {
        let inventory = self.list();
        let here = inventory.models.into_iter().map(|model| model.name);
        let partial = inventory.partial.into_iter().map(|partial| partial.name);
        let short = catalogue::nearest(name).map(str::to_owned);
        catalogue::nearest_of(name, here.chain(partial).chain(short)).filter(|nearest| nearest != name)
    }

    pub(crate) fn not_here(&self, name: &ModelName) -> HubError {
        let name = name.to_string();
        HubError::NotHere { nearest: self.nearest(&name), name }
    }

    pub(crate) fn find_entry(&self, entry: &CatalogueEntry) -> Result<Option<LocalModel>, HubError> {
        if let Some(source) = &entry.package {
            let folder = ModelFolder::new(&self.env.refrain_home, &entry.folder());
            if let Some(manifest) = folder.manifest().filter(|manifest| manifest.sha256 == source.sha256) {
                return Ok(Some(package_model(&folder, manifest)));
            }
        }
        let found = self.find_repo(&RepoName::of_entry(entry)?)?;
        Ok(found.map(|model| LocalModel {
            name: entry.name.to_owned(),
            licence: Some(entry.licence()),
            ..model
        }))
    }

    pub(crate) fn find_repo(&self, repo: &RepoName) -> Result<Option<LocalModel>, HubError> {
        let cache = RepoCache::new(&self.env.hf_cache, repo);
        let Some(snapshot) = cache.current_snapshot(repo.revision()) else {
            return Ok(None);
        };
        match select::select(&repo.id(), &disk::files_below(&snapshot), repo.quant()) {
            Ok(selection) => Ok(Some(self.repo_model(repo, &snapshot, &selection))),
            Err(error @ HubError::Ambiguous { .. }) => Err(error),
            Err(_) => Ok(None),
        }
    }

    fn repo_models(&self, repo: &RepoName, cache: &RepoCache) -> Vec<LocalModel> {
        let Some(snapshot) = cache.current_snapshot(repo.revision()) else {
            return Vec::new();
        };
        let selections = select::all(&disk::files_below(&snapshot));
        selections.iter().map(|selection| self.repo_model(repo, &snapshot, selection)).collect()
    }

    fn repo_model(&self, repo: &RepoName, snapshot: &Path, selection: &Selection) -> LocalModel {
        let files: Vec<_> = selection.files.iter().map(|file| snapshot.join(file)).collect();
        let path = match (selection.format, files.first()) {
            (Format::Gguf, Some(first)) => first.clone(),
            _ => snapshot.to_owned(),
        };
        let named = selection.quant.as_ref().map_or_else(|| repo.clone(), |quant| repo.with_quant(quant));
        let entry = CATALOGUE.iter().find(|e| {
            e.repo == repo.id()
                && repo.revision() == "main"
                && named.quant().is_some_and(|q| q.eq_ignore_ascii_case(e.quant))
        });
        LocalModel {
            name: entry.map_or_else(|| named.to_string(), |entry| entry.name.to_owned()),
            path,
            format: selection.format,
            bytes: total_bytes(&files),
            files,
            licence: entry.map(CatalogueEntry::licence).or_else(|| self.recorded_licence(repo)),
            origin: ModelOrigin::Hub { repo: repo.id() },
        }
    }

    /// Removes the files of a repository name; `None` if there are none.
    fn remove_repo(&self, repo: &RepoName) -> Result<Option<(usize, u64)>, HubError> {
        let cache = RepoCache::new(&self.env.hf_cache, repo);
        if !is_own_folder(cache.folder())? {
            return Ok(None);
        }
        if repo.quant().is_none() {
            let _ = fs::remove_file(self.licence_record(repo));
            return cache.remove_all().map(Some);
        }
        let here = cache.current_snapshot(repo.revision()).map(|snapshot| disk::files_below(&snapshot));
        let mut freed = match select::select(&repo.id(), &here.unwrap_or_default(), repo.quant()) {
            Ok(selection) => Some(cache.remove_files(&selection.files)?),
            Err(error @ HubError::Ambiguous { .. }) => return Err(error),
            Err(_) => None,
        };
        // Only incomplete downloads and empty folders remain: remove them too.
        if cache.is_empty() {
            let (n_files, bytes) = cache.remove_all()?;
            let (more_files, more_bytes) = freed.unwrap_or_default();
            freed = Some((n_files + more_files, bytes + more_bytes));
        }
        Ok(freed)
    }

    /// Records the licence of a repository, for which the cache's layout has no place.
    pub(crate) fn record_licence(&self, repo: &RepoName, licence: &Licence) {
        let path = self.licence_record(repo);
        let write = || {
            disk::create_dir(path.parent().unwrap_or(Path::new(".")))?;
            disk::write_atomically(&path, &serde_json::to_vec(licence).unwrap_or_default())
        };
        if self.recorded_licence(repo).as_ref() != Some(licence)
            && let Err(error) = write()
        {
            tracing::warn!(%error, "could not record the licence");
        }
    }

    fn recorded_licence(&self, repo: &RepoName) -> Option<Licence> {
        const MAX_BYTES: u64 = 4096;
        let mut text = String::new();
        File::open(self.licence_record(repo)).ok()?.take(MAX_BYTES).read_to_string(&mut text).ok()?;
        serde_json::from_str(&text).ok()
    }

    fn licence_record(&self, repo: &RepoName) -> PathBuf {
        self.env.refrain_home.join("licences").join(format!("{}.json", repo.cache_folder()))
    }
}

/// Finds the user's own file or folder. A folder with one GGUF model means that model; other folders are checked when
/// they are opened.
fn find_path(path: &Path) -> Result<Option<LocalModel>, HubError> {
    let meta = match fs::metadata(path) {
        Ok(meta) => meta,
        // A broken link exists, so the user did not mistype another name.
        Err(source) if path.is_symlink() => {
            return Err(HubError::BrokenLink { path: path.to_owned(), source });
        }
        Err(_) => return Ok(None),
    };
    let name = path.display().to_string();
    let (format, files) = if meta.is_dir() {
        match select::select(&name, &files_in(path), None) {
            Ok(Selection { format, files, .. }) => {
                (format, files.iter().map(|file| path.join(file)).collect())
            }
            Err(error @ HubError::Ambiguous { .. }) => return Err(error),
            Err(_) => (Format::Safetensors, Vec::new()),
        }
    } else {
        (Format::Gguf, vec![path.to_owned()])
    };
    let model_path = match (format, files.first()) {
        (Format::Gguf, Some(first)) => first.clone(),
        _ => path.to_owned(),
    };
    let bytes = total_bytes(&files);
    let (licence, origin) = (None, ModelOrigin::Path);
    Ok(Some(LocalModel { name, path: model_path, format, files, bytes, licence, origin }))
}

fn package_model(folder: &ModelFolder, manifest: Manifest) -> LocalModel {
    let path = folder.path.join(&manifest.file);
    LocalModel {
        name: manifest.name,
        path: path.clone(),
        format: Format::Gguf,
        files: vec![path],
        bytes: manifest.bytes,
        licence: Some(manifest.licence),
        origin: ModelOrigin::Package,
    }
}

/// Returns whether a folder exists. A symbolic link may lead out of the store and is refused.
fn is_own_folder(path: &Path) -> Result<bool, HubError> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_symlink() => Err(HubError::OutsideStore { path: path.to_owned() }),
        Ok(meta) => Ok(meta.is_dir()),
        Err(_) => Ok(false),
    }
}

fn files_in(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let files = entries.flatten().filter(|entry| entry.path().is_file());
    files.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

fn folders_in(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let folders = entries.flatten().filter(|entry| entry.path().is_dir());
    folders.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

fn total_bytes(files: &[PathBuf]) -> u64 {
    files.iter().filter_map(|file| fs::metadata(file).ok()).map(|meta| meta.len()).sum()
}
