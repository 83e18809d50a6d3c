//! From a name on the command line to a model on this machine.

use crate::bars::Delayed;
use crate::cli::CliContext;
use crate::out::talk;
use crate::pull;
use refrain::{Builtin, Model, ModelFiles};
use refrain_hub::{HubError, Licence, LocalModel, ModelName};
use refrain_worker::ModelSource;
use std::path::{Path, PathBuf};

/// Below this, a suggestion confuses more often than it helps.
const NEAR_ENOUGH: f64 = 0.7;

/// A model that can be opened.
#[derive(Debug, Clone)]
pub(crate) struct FoundModel {
    /// The name that found it.
    pub(crate) name: String,
    location: Location,
    /// Its licence, if known.
    pub(crate) licence: Option<Licence>,
}

#[derive(Debug, Clone)]
enum Location {
    Builtin(Builtin),
    Path(PathBuf),
}

impl FoundModel {
    fn builtin(builtin: Builtin) -> FoundModel {
        FoundModel { name: builtin.name().to_owned(), location: Location::Builtin(builtin), licence: None }
    }

    fn at(name: String, path: PathBuf, licence: Option<Licence>) -> FoundModel {
        FoundModel { name, location: Location::Path(path), licence }
    }

    /// Opens and checks the model.
    pub(crate) fn open(&self) -> anyhow::Result<Model> {
        let _waiting = Delayed::spinner(&format!("opening {}", self.name));
        match &self.location {
            Location::Builtin(builtin) => Ok(builtin.open()?),
            Location::Path(path) => Model::open(path).map_err(|error| with_nearest_file(path, error.into())),
        }
    }

    /// Where its files are, for a process that opens them itself.
    pub(crate) fn source(&self) -> ModelSource {
        match &self.location {
            Location::Builtin(builtin) => ModelSource::Builtin(*builtin),
            Location::Path(path) => ModelSource::Path(path.clone()),
        }
    }

    /// Opens only the files, which may contain less than a whole model.
    pub(crate) fn files(&self) -> anyhow::Result<ModelFiles> {
        match &self.location {
            Location::Builtin(builtin) => Ok(builtin.files()?),
            Location::Path(path) => ModelFiles::open(path)
                .map_err(|error| with_nearest_file(path, refrain::Error::from(error).into())),
        }
    }
}

/// Finds a model by name; without a name, the built-in story model. A known model that is not in the store is pulled.
pub(crate) fn find(name: Option<&str>, context: &CliContext) -> anyhow::Result<FoundModel> {
    find_or(name, Builtin::Stories, context)
}

/// As [`find`], with another built-in model as the default.
pub(crate) fn find_or(
    name: Option<&str>,
    default: Builtin,
    context: &CliContext,
) -> anyhow::Result<FoundModel> {
    let Some(text) = name else { return Ok(FoundModel::builtin(default)) };
    if let Some(builtin) = builtin(text) {
        return Ok(FoundModel::builtin(builtin));
    }
    let name = parse(text, context)?;
    let found = |model: LocalModel| FoundModel::at(model.name, model.path, model.licence);
    if let Some(model) = context.store.find(&name)? {
        return Ok(found(model));
    }
    if let ModelName::Path(path) = name {
        // Opening it reports the error of the system.
        return Ok(FoundModel::at(text.to_owned(), path, None));
    }
    if !context.quiet && !context.store.env().offline {
        talk!("{name} is not in the local store: pulling it");
    }
    pull::with_bars(&name, context).map(found)
}

/// Refuses an invalid name without searching for the model.
pub(crate) fn check(text: &str, context: &CliContext) -> Result<(), HubError> {
    if is_builtin(text) { Ok(()) } else { parse(text, context).map(drop) }
}

/// Parses a name; the error of an unknown name suggests the nearest known one.
pub(crate) fn parse(text: &str, context: &CliContext) -> Result<ModelName, HubError> {
    ModelName::parse(text).map_err(|error| match error {
        HubError::UnknownName { name, nearest } => {
            let nearest = nearest.or_else(|| context.store.nearest(&name)).or_else(|| near_builtin(&name));
            let nearest = nearest.filter(|nearest| *nearest != name);
            HubError::UnknownName { name, nearest }
        }
        other => other,
    })
}

/// Whether the only argument of `run` is a model: an existing path, or a known name.
pub(crate) fn is_model(text: &str) -> bool {
    is_builtin(text)
        || ModelName::is_known(text)
        || (!has_white_space(text) && ModelName::parse(text).is_ok())
}

pub(crate) fn has_white_space(text: &str) -> bool {
    text.contains(char::is_whitespace)
}

pub(crate) fn is_builtin(text: &str) -> bool {
    builtin(text).is_some()
}

fn builtin(text: &str) -> Option<Builtin> {
    // A file of that name takes precedence.
    Builtin::named(text).filter(|_| !Path::new(text).exists())
}

fn near_builtin(name: &str) -> Option<String> {
    // Too many words differ from `chat` in one letter: `cat` is more likely a prompt.
    const ONE_SLIP_IN_FIVE: f64 = 0.8;
    let name = name.to_lowercase();
    Builtin::ALL
        .map(|builtin| (strsim::normalized_damerau_levenshtein(&name, builtin.name()), builtin.name()))
        .into_iter()
        .filter(|(score, _)| *score >= ONE_SLIP_IN_FIVE)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name.to_owned())
}

/// For a path that does not exist, suggests the file in its folder with the nearest name.
fn with_nearest_file(path: &Path, error: anyhow::Error) -> anyhow::Error {
    let wanted = path.file_name().map(|name| name.to_string_lossy().to_lowercase());
    let folder = path.parent().map(|p| if p.as_os_str().is_empty() { Path::new(".") } else { p });
    let (Some(wanted), Some(folder), false) = (wanted, folder, path.exists()) else { return error };
    let Ok(entries) = folder.read_dir() else { return error };
    let nearest = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .map(|name| (strsim::normalized_damerau_levenshtein(&wanted, &name.to_lowercase()), name))
        .filter(|(score, _)| *score >= NEAR_ENOUGH)
        .max_by(|a, b| a.0.total_cmp(&b.0));
    match nearest {
        Some((_, name)) => {
            let hint = format!("did you mean {}?", path.with_file_name(name).display());
            crate::fail::Hinted::new(format!("{} does not exist", path.display()), hint).into()
        }
        None => error,
    }
}
