//! The models on this machine.

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

/// Where a model on this machine came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelOrigin {
    /// A file or folder of the person's own.
    Path,
    /// The hub's cache.
    Hub {
        /// `owner/repo`.
        repo: String,
    },
    /// A Python package index; it lies in Refrain's own store.
    Package,
}

/// A model on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalModel {
    /// A name that finds it again.
    pub name: String,
    /// What to load: a `.gguf` file (the first, if it is split) or a folder.
    pub path: PathBuf,
    /// In which form it is.
    pub format: Format,
    /// Its files, in order.
    pub files: Vec<PathBuf>,
    /// Bytes of all files together.
    pub bytes: u64,
    /// The terms it comes under, where they are known.
    pub licence: Option<Licence>,
    /// Where it came from.
    pub origin: ModelOrigin,
}

/// A download that did not end. Pulling again continues it; removing the name removes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartialDownload {
    /// The name to pull or remove.
    pub name: String,
    /// The folder it lies in.
    pub path: PathBuf,
    /// Bytes that are here.
    pub bytes: u64,
}

/// What [`Store::list`] finds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inventory {
    /// Models that can be loaded, by name.
    pub models: Vec<LocalModel>,
    /// Downloads that did not end.
    pub partial: Vec<PartialDownload>,
}

/// What [`Store::remove`] freed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Removed {
    /// Number of files.
    pub n_files: usize,
    /// Bytes.
    pub bytes: u64,
}

/// The models on this machine: the hub's cache and Refrain's own folder.
pub struct Store {
    pub(crate) env: Env,
    pub(crate) retry: Retry,
    pub(crate) disk: Box<dyn Disk>,
}

impl Store {
    /// The store of an environment. Touches nothing until something is pulled or removed.
    #[must_use]
    pub fn open(env: Env) -> Self {
        Self { env, retry: Retry::default(), disk: Box::new(RealDisk) }
    }

    /// With another patience in front of failing connections.
    #[must_use]
    pub fn with_retry(self, retry: Retry) -> Self {
        Self { retry, ..self }
    }

    /// With another disk below the downloads.
    #[must_use]
    pub fn with_disk(self, disk: impl Disk + 'static) -> Self {
        Self { disk: Box::new(disk), ..self }
    }

    /// The environment it was opened with.
    #[must_use]
    pub fn env(&self) -> &Env {
        &self.env
    }

    /// The model, if it is on this machine. Never touches the network.
    pub fn find(&self, name: &ModelName) -> Result<Option<LocalModel>, HubError> {
        match name {
            ModelName::Path(path) => find_path(path),
            ModelName::Short(entry) => self.find_entry(entry),
            ModelName::Repo(repo) => self.find_repo(repo),
        }
    }

    /// All models and unfinished downloads.
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
                let own = folder.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let name = name(&own).unwrap_or(own);
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

    /// Removes a pulled model and its unfinished downloads. `owner/repo` removes all of the repository's files,
    /// `owner/repo:QUANT` those of one model. A path is refused: what was not pulled is not removed.
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

    /// The name nearest to a mistyped one, among the models here and the short names.
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
            licence: entry.map(CatalogueEntry::licence).or_else(|| self.noted_licence(repo)),
            origin: ModelOrigin::Hub { repo: repo.id() },
        }
    }

    /// Removes what a repository's name means; `None` if there is nothing.
    fn remove_repo(&self, repo: &RepoName) -> Result<Option<(usize, u64)>, HubError> {
        let cache = RepoCache::new(&self.env.hf_cache, repo);
        if !is_own_folder(cache.folder())? {
            return Ok(None);
        }
        if repo.quant().is_none() {
            let _ = fs::remove_file(self.licence_note(repo));
            return cache.remove_all().map(Some);
        }
        let here = cache.current_snapshot(repo.revision()).map(|snapshot| disk::files_below(&snapshot));
        let mut freed = match select::select(&repo.id(), &here.unwrap_or_default(), repo.quant()) {
            Ok(selection) => Some(cache.remove_files(&selection.files)?),
            Err(error @ HubError::Ambiguous { .. }) => return Err(error),
            Err(_) => None,
        };
        // Only unfinished downloads and empty folders are left: they go, too.
        if cache.is_empty() {
            let (n_files, bytes) = cache.remove_all()?;
            let (more_files, more_bytes) = freed.unwrap_or_default();
            freed = Some((n_files + more_files, bytes + more_bytes));
        }
        Ok(freed)
    }

    /// Notes under which terms a repository comes; the cache's layout has no place for it.
    pub(crate) fn note_licence(&self, repo: &RepoName, licence: &Licence) {
        let path = self.licence_note(repo);
        let write = || {
            disk::create_dir(path.parent().unwrap_or(Path::new(".")))?;
            disk::write_atomically(&path, &serde_json::to_vec(licence).unwrap_or_default())
        };
        if self.noted_licence(repo).as_ref() != Some(licence)
            && let Err(error) = write()
        {
            tracing::warn!(%error, "could not note the licence");
        }
    }

    fn noted_licence(&self, repo: &RepoName) -> Option<Licence> {
        const MAX_BYTES: u64 = 4096;
        let mut text = String::new();
        File::open(self.licence_note(repo)).ok()?.take(MAX_BYTES).read_to_string(&mut text).ok()?;
        serde_json::from_str(&text).ok()
    }

    fn licence_note(&self, repo: &RepoName) -> PathBuf {
        self.env.refrain_home.join("licences").join(format!("{}.json", repo.cache_folder()))
    }
}

/// A file or folder of the person's own. A folder with one GGUF model means that model; what else a folder
/// holds is for the reader of formats to judge.
fn find_path(path: &Path) -> Result<Option<LocalModel>, HubError> {
    let Ok(meta) = fs::metadata(path) else { return Ok(None) };
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

/// Whether the folder is there. One that is a link leads out of the store, and is refused.
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
