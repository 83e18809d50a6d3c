//! Models split into files named `NAME-00001-of-00003.gguf`.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Parsed file name of one part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SplitName {
    folder: PathBuf,
    prefix: String,
    pub(crate) index: u64, // from 1, as in the name
    pub(crate) count: u64,
}

impl SplitName {
    /// Parses a file name; `None` if it has another form.
    pub(crate) fn parse(path: &Path) -> Option<SplitName> {
        let stem = path.file_name().and_then(OsStr::to_str)?.strip_suffix(".gguf")?;
        let (numbered, count) = stem.rsplit_once("-of-")?;
        let (prefix, index) = numbered.rsplit_once('-')?;
        let number = |digits: &str| {
            let valid = digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit());
            if valid { digits.parse::<u64>().ok() } else { None }
        };
        let (index, count) = (number(index)?, number(count)?);
        let folder = path.parent().map(Path::to_owned).unwrap_or_default();
        (1..=count).contains(&index).then(|| SplitName { folder, prefix: prefix.into(), index, count })
    }

    /// Returns the path of part `index`, counted from 1.
    pub(crate) fn path(&self, index: u64) -> PathBuf {
        self.folder.join(format!("{}-{index:05}-of-{:05}.gguf", self.prefix, self.count))
    }
}
