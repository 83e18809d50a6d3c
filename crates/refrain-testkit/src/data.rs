//! Files beside the repository, and golden files.

use refrain_tensor::{Bytes, DType, HostTensor, Shape};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The folder with test data that is shared between checkouts: `REFRAIN_SHARED_DATA`, else `../shared/data` beside the
/// repository. `None` when it is not there.
#[expect(clippy::disallowed_methods, reason = "the one place where tests read the environment")]
pub fn shared_data() -> Option<PathBuf> {
    let named = std::env::var_os("REFRAIN_SHARED_DATA").map(PathBuf::from);
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data");
    named.unwrap_or_else(beside).canonicalize().ok().filter(|p| p.is_dir())
}

/// A file or folder of the shared test data.
///
/// # Panics
/// When it is not there: a test that was asked for must not pass without its data.
pub fn require_shared_data(path: &str) -> PathBuf {
    let root = shared_data().unwrap_or_else(|| {
        panic!(
            "the shared test data is not beside the repository\nhint: set REFRAIN_SHARED_DATA to its folder"
        )
    });
    let full = root.join(path);
    assert!(full.exists(), "{path} is not in the shared test data at {}", root.display());
    full
}

/// The tensors of a golden safetensors file, by name.
///
/// # Panics
/// When the file is missing or broken, or has a dtype that Refrain has not.
pub fn load_golden(path: impl AsRef<Path>) -> BTreeMap<String, HostTensor> {
    let path = path.as_ref();
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("golden {}: {e}", path.display()));
    let file = safetensors::SafeTensors::deserialize(&bytes)
        .unwrap_or_else(|e| panic!("golden {}: {e}", path.display()));
    let load = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let fail = |what: String| -> ! { panic!("golden {}, {name}: {what}", path.display()) };
        let dtype = dtype_of(view.dtype()).unwrap_or_else(|| fail(format!("no dtype {:?}", view.dtype())));
        let shape = Shape::new(view.shape()).unwrap_or_else(|e| fail(e.to_string()));
        let tensor = HostTensor::new(dtype, shape, Bytes::new(view.data().to_vec()));
        let tensor = tensor.unwrap_or_else(|e| fail(e.to_string()));
        (name, tensor)
    };
    file.tensors().into_iter().map(load).collect()
}

#[expect(clippy::wildcard_enum_match_arm, reason = "safetensors may grow dtypes; goldens use these")]
fn dtype_of(dtype: safetensors::Dtype) -> Option<DType> {
    match dtype {
        safetensors::Dtype::F32 => Some(DType::F32),
        safetensors::Dtype::F16 => Some(DType::F16),
        safetensors::Dtype::BF16 => Some(DType::BF16),
        safetensors::Dtype::I32 => Some(DType::I32),
        safetensors::Dtype::U32 => Some(DType::U32),
        safetensors::Dtype::I64 => Some(DType::I64),
        safetensors::Dtype::U8 => Some(DType::U8),
        _ => None,
    }
}
