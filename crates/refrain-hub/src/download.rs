//! Downloads one file of the hub: resumes a partial download, verifies it, then moves it into place.

use std::fs;
use std::io::{self, Read};
use std::path::PathBuf;

use ureq::Body;
use ureq::http::{Response, StatusCode};

use crate::cache::RepoCache;
use crate::disk::{self, COPY_BYTES, Checksum, Disk, DiskFile, Hasher, Lock};
use crate::error::HubError;
use crate::http::{Client, RequestFailure, given_up};
use crate::name::RepoName;
use crate::progress::{Progress, ProgressEvent};

/// A file to download.
pub(crate) struct DownloadJob<'a> {
    pub(crate) repo: &'a RepoName,
    pub(crate) commit: &'a str,
    pub(crate) path: &'a str,
    pub(crate) url: String,
    pub(crate) bytes: u64,
    pub(crate) checksum: &'a Checksum,
}

/// Reason why an attempt did not complete the file.
enum Setback {
    /// The connection broke. The received bytes are good, and the download can resume.
    Broken(RequestFailure),
    /// The received bytes are wrong. The download must restart.
    Corrupt(HubError),
    /// A permanent error.
    Final(HubError),
}

impl From<HubError> for Setback {
    fn from(error: HubError) -> Self {
        Self::Final(error)
    }
}

/// Downloads the file as a blob, unless it is already cached.
pub(crate) fn fetch(
    client: &Client,
    disk: &dyn Disk,
    cache: &RepoCache,
    job: &DownloadJob<'_>,
    progress: &mut dyn Progress,
) -> Result<(), HubError> {
    disk::create_dir(&cache.blobs())?;
    let _lock = Lock::wait(&cache.lock(job.checksum), job.path, progress)?;
    // Another process may have downloaded it during the wait.
    if cache.has(job.commit, job.path, job.checksum, job.bytes) {
        return Ok(());
    }
    let mut partial = Partial::open(disk, cache.incomplete(job.checksum), job)?;
    progress.on(ProgressEvent::Start { file: job.path, done: partial.len, total: job.bytes });
    fetch_with_retries(client, job, &mut partial, progress)?;
    partial.file.sync().map_err(|error| disk::write_error(disk, &partial.path, 0, error))?;
    let blob = cache.blob(job.checksum);
    fs::rename(&partial.path, &blob).map_err(HubError::write(&blob))?;
    progress.on(ProgressEvent::Done { file: job.path });
    Ok(())
}

fn fetch_with_retries(
    client: &Client,
    job: &DownloadJob<'_>,
    partial: &mut Partial<'_>,
    progress: &mut dyn Progress,
) -> Result<(), HubError> {
    // An attempt that received this much resets the count of failures.
    const GOOD_PROGRESS_BYTES: u64 = 16 << 20;
    let (mut n_failures, mut was_corrupt) = (0, false);
    loop {
        let len_before = partial.len;
        match attempt(client, job, partial, progress) {
            Ok(()) => return Ok(()),
            Err(Setback::Final(error) | Setback::Broken(RequestFailure::Final(error))) => return Err(error),
            Err(Setback::Corrupt(error)) => {
                partial.restart()?;
                if was_corrupt {
                    // A later pull must not resume from wrong bytes.
                    disk::remove_file(&partial.path)?;
                    return Err(error);
                }
                was_corrupt = true;
                progress.on(ProgressEvent::Restart { file: job.path, because: &error.to_string() });
                progress.on(ProgressEvent::At { done: 0 });
            }
            Err(Setback::Broken(RequestFailure::Temporary { because, status, pause })) => {
                if partial.len.saturating_sub(len_before) >= GOOD_PROGRESS_BYTES {
                    n_failures = 0;
                }
                n_failures += 1;
                if n_failures >= client.retry.attempts {
                    if status.is_some() || partial.len == 0 {
                        return Err(given_up(&job.url, n_failures, because, status));
                    }
                    let file = job.path.to_owned();
                    let (got, want) = (partial.len, job.bytes);
                    return Err(HubError::Interrupted { file, got, want, attempts: n_failures, because });
                }
                client.pause(job.path, n_failures, client.retry.attempts, &because, pause, progress)?;
            }
        }
    }
}

/// Makes one attempt: requests the missing bytes, then verifies the checksum.
fn attempt(
    client: &Client,
    job: &DownloadJob<'_>,
    partial: &mut Partial<'_>,
    progress: &mut dyn Progress,
) -> Result<(), Setback> {
    if partial.len < job.bytes {
        let response = client.get(job.repo, &job.url, partial.len).map_err(Setback::Broken)?;
        if !accept(job, partial, &response)? {
            progress.on(ProgressEvent::At { done: 0 });
        }
        receive(job, partial, response, progress)?;
    }
    let got = partial.hasher.take().unwrap_or_else(|| job.checksum.hasher(job.bytes)).hex();
    if got == job.checksum.hex() {
        return Ok(());
    }
    Err(Setback::Corrupt(HubError::DigestMismatch {
        file: job.path.to_owned(),
        algorithm: job.checksum.algorithm(),
        got,
        want: job.checksum.hex().to_owned(),
    }))
}

/// Checks the response against the request. `false`: the server sends the file from the start, so the download restarts.
fn accept(
    job: &DownloadJob<'_>,
    partial: &mut Partial<'_>,
    response: &Response<Body>,
) -> Result<bool, Setback> {
    let mismatch =
        |got| Setback::Corrupt(HubError::SizeMismatch { file: job.path.to_owned(), got, want: job.bytes });
    let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
    let length: Option<u64> = header("content-length").and_then(|text| text.trim().parse().ok());
    match response.status() {
        StatusCode::PARTIAL_CONTENT => match header("content-range").and_then(content_range) {
            Some((_, Some(total))) if total != job.bytes => Err(mismatch(total)),
            Some((start, _)) if start == partial.len => Ok(true),
            _ => {
                partial.restart()?;
                Err(Setback::Broken(RequestFailure::broken(
                    "the server sent a different range than requested",
                )))
            }
        },
        StatusCode::OK => {
            if let Some(length) = length.filter(|length| *length != job.bytes) {
                return Err(mismatch(length));
            }
            let continued = partial.len == 0;
            if !continued {
                partial.restart()?;
            }
            Ok(continued)
        }
        status => {
            partial.restart()?;
            Err(Setback::Broken(RequestFailure::broken(format!("status {status}"))))
        }
    }
}

/// Parses the start and, if present, the total length of `bytes 5-9/10`.
fn content_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.trim().parse().ok()?, total.trim().parse().ok()))
}

fn receive(
    job: &DownloadJob<'_>,
    partial: &mut Partial<'_>,
    response: Response<Body>,
    progress: &mut dyn Progress,
) -> Result<(), Setback> {
    let mut body = response.into_body().into_reader();
    let mut buffer = vec![0; COPY_BYTES];
    loop {
        if progress.cancelled() {
            return Err(Setback::Final(HubError::Cancelled));
        }
        let n = match body.read(&mut buffer) {
            Ok(n) => n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(Setback::Broken(RequestFailure::broken(error))),
        };
        if n == 0 {
            break;
        }
        if partial.len + n as u64 > job.bytes {
            return Err(Setback::Corrupt(HubError::TooLong { file: job.path.to_owned(), want: job.bytes }));
        }
        partial.write(&buffer[..n], job.bytes)?;
        progress.on(ProgressEvent::At { done: partial.len });
    }
    if partial.len < job.bytes {
        return Err(Setback::Broken(RequestFailure::broken("the connection was closed early")));
    }
    Ok(())
}

/// The downloaded part of the file and its checksum so far.
struct Partial<'a> {
    disk: &'a dyn Disk,
    path: PathBuf,
    file: Box<dyn DiskFile>,
    len: u64,
    /// `None` after it was finished for the comparison.
    hasher: Option<Hasher>,
    checksum: &'a Checksum,
    total: u64,
}

impl<'a> Partial<'a> {
    fn open(disk: &'a dyn Disk, path: PathBuf, job: &DownloadJob<'a>) -> Result<Self, HubError> {
        let len = fs::metadata(&path).map_or(0, |meta| meta.len());
        if len > job.bytes {
            disk::remove_file(&path)?;
        }
        let file = disk.append(&path).map_err(|error| disk::write_error(disk, &path, job.bytes, error))?;
        let mut hasher = job.checksum.hasher(job.bytes);
        let len = hasher.update_from(&path).map_err(HubError::read(&path))?;
        Ok(Self { disk, path, file, len, hasher: Some(hasher), checksum: job.checksum, total: job.bytes })
    }

    /// Discards the downloaded part.
    fn restart(&mut self) -> Result<(), HubError> {
        disk::remove_file(&self.path)?;
        let reopened = self.disk.append(&self.path);
        self.file = reopened.map_err(|error| disk::write_error(self.disk, &self.path, self.total, error))?;
        self.len = 0;
        self.hasher = Some(self.checksum.hasher(self.total));
        Ok(())
    }

    fn write(&mut self, bytes: &[u8], total: u64) -> Result<(), HubError> {
        let need = total - self.len;
        self.file.write_all(bytes).map_err(|error| disk::write_error(self.disk, &self.path, need, error))?;
        if let Some(hasher) = &mut self.hasher {
            hasher.update(bytes);
        }
        self.len += bytes.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::content_range;

    #[test]
    fn content_ranges_are_parsed() {
        assert_eq!(content_range("bytes 5-9/10"), Some((5, Some(10))));
        assert_eq!(content_range("bytes 5-9/*"), Some((5, None)));
        for bad in ["", "bytes", "bytes */10", "items 1-2/3", "bytes x-9/10"] {
            assert_eq!(content_range(bad), None, "{bad}");
        }
    }
}
