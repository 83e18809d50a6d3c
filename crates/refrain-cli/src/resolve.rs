//! From what a person types to a model on this machine.

use crate::bars::Delayed;
use crate::cli::Context;
use crate::out::talk;
use crate::pull;
use refrain::{BUILTIN_NAME, Model, ModelFiles};
use refrain_hub::{HubError, Licence, LocalModel, ModelName};
use std::path::{Path, PathBuf};

/// Below this, a suggestion confuses more often than it helps.
const NEAR_ENOUGH: f64 = 0.7;

/// A model that can be opened.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    /// The name it was found by.
    pub(crate) name: String,
    /// Where it lies; `None` for the built-in model.
    pub(crate) path: Option<PathBuf>,
    /// The terms it comes under, where they are known.
    pub(crate) licence: Option<Licence>,
}

/// Open files of a model, or of the built-in one.
pub(crate) enum Files {
    Builtin(Box<Model>),
    Open(ModelFiles),
}

impl std::ops::Deref for Files {
    type Target = ModelFiles;

    fn deref(&self) -> &ModelFiles {
        match self {
            Files::Builtin(model) => model.files(),
            Files::Open(files) => files,
        }
    }
}

impl Found {
    fn builtin() -> Found {
        Found { name: BUILTIN_NAME.to_owned(), path: None, licence: None }
    }

    /// Opens and checks the model.
    pub(crate) fn open(&self) -> anyhow::Result<Model> {
        let _waiting = Delayed::spinner(&format!("opening {}", self.name));
        match &self.path {
            None => Ok(Model::builtin()?),
            Some(path) => Model::open(path).map_err(|error| with_nearest_file(path, error.into())),
        }
    }

    /// Opens the files only: they may hold less than a whole model.
    pub(crate) fn files(&self) -> anyhow::Result<Files> {
        match &self.path {
            None => Ok(Files::Builtin(Box::new(Model::builtin()?))),
            Some(path) => {
                let files = ModelFiles::open(path);
                Ok(Files::Open(
                    files.map_err(|error| with_nearest_file(path, refrain::Error::from(error).into()))?,
                ))
            }
        }
    }
}

/// The model of that name, or the built-in one. A known name that is not here is pulled.
pub(crate) fn find(name: Option<&str>, context: &Context) -> anyhow::Result<Found> {
    let Some(text) = name else { return Ok(Found::builtin()) };
    if is_builtin(text) {
        return Ok(Found::builtin());
    }
    let name = parse(text, context)?;
    let found =
        |model: LocalModel| Found { name: model.name, path: Some(model.path), licence: model.licence };
    if let Some(model) = context.store.find(&name)? {
        return Ok(found(model));
    }
    if let ModelName::Path(path) = name {
        // Opening it says what the system has against it.
        return Ok(Found { name: text.to_owned(), path: Some(path), licence: None });
    }
    if !context.quiet && !context.store.env().offline {
        talk!("{name} is not here yet: pulling it");
    }
    pull::with_bars(&name, context).map(found)
}

/// Refuses a name that cannot be one, without looking for the model.
pub(crate) fn check(text: &str, context: &Context) -> Result<(), HubError> {
    if is_builtin(text) { Ok(()) } else { parse(text, context).map(drop) }
}

/// Reads a name; an unknown one is an error with the nearest.
pub(crate) fn parse(text: &str, context: &Context) -> Result<ModelName, HubError> {
    ModelName::parse(text).map_err(|error| match error {
        HubError::UnknownName { name, nearest } => {
            let nearest = nearest.or_else(|| context.store.nearest(&name)).or_else(|| near_builtin(&name));
            let nearest = nearest.filter(|nearest| *nearest != name);
            HubError::UnknownName { name, nearest }
        }
        other => other,
    })
}

/// Whether a lone argument of `run` means a model: a path that exists, or a name that is known.
pub(crate) fn is_model(text: &str) -> bool {
    is_builtin(text)
        || ModelName::is_known(text)
        || (!has_white_space(text) && ModelName::parse(text).is_ok())
}

pub(crate) fn has_white_space(text: &str) -> bool {
    text.contains(char::is_whitespace)
}

pub(crate) fn is_builtin(text: &str) -> bool {
    // A file of that name is meant by those who have one.
    text.eq_ignore_ascii_case(BUILTIN_NAME) && !Path::new(text).exists()
}

fn near_builtin(name: &str) -> Option<String> {
    let score = strsim::normalized_damerau_levenshtein(&name.to_lowercase(), BUILTIN_NAME);
    (score >= NEAR_ENOUGH).then(|| BUILTIN_NAME.to_owned())
}

/// For a path that does not exist, names the file beside it that was probably meant.
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
