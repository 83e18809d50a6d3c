//! Models by name.
#![cfg(feature = "pull")]

use refrain::hub::Silent;
use refrain::{Error, Model};

#[test]
fn a_path_needs_no_download_and_an_unknown_name_is_refused_with_a_hint() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stories.gguf");
    let builtin = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/stories.gguf");
    std::fs::copy(builtin, &path).unwrap();
    let model = Model::pull(path.to_str().unwrap(), &mut Silent).unwrap();
    assert_eq!(model.n_parameters(), Model::builtin().unwrap().n_parameters());
    let error = Model::pull("smolm2", &mut Silent).unwrap_err();
    assert!(matches!(error, Error::Hub(_)) && error.hint().unwrap().contains("smollm2"), "{error}");
}
