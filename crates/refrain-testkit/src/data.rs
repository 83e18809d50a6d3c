//! Shared test data and golden files.

use refrain_tensor::{Bytes, DType, HostTensor, Shape};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Folder of test data shared between checkouts: `REFRAIN_SHARED_DATA`, else `../shared/data` next to the
/// repository. `None` if it does not exist.
#[expect(clippy::disallowed_methods, reason = "the one place where tests read the environment")]
pub fn shared_data() -> Option<PathBuf> {
    let named = std::env::var_os("REFRAIN_SHARED_DATA").map(PathBuf::from);
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data");
    named.unwrap_or_else(beside).canonicalize().ok().filter(|p| p.is_dir())
}

/// Path of a file or folder in the shared test data.
///
/// # Panics
/// If it does not exist: a requested test must not pass without its data.
pub fn require_shared_data(path: &str) -> PathBuf {
    let root = shared_data().unwrap_or_else(|| {
        panic!(
            "the shared test data is not next to the repository\nhint: set REFRAIN_SHARED_DATA to its folder"
        )
    });
    let full = root.join(path);
    assert!(full.exists(), "{path} is not in the shared test data at {}", root.display());
    full
}

/// Loads the tensors of a golden safetensors file, by name.
///
/// # Panics
/// If the file is missing or malformed, or has a dtype that Refrain does not support.
pub fn load_golden(path: impl AsRef<Path>) -> BTreeMap<String, HostTensor> {
    let path = path.as_ref();
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("golden {}: {e}", path.display()));
    let file = safetensors::SafeTensors::deserialize(&bytes)
        .unwrap_or_else(|e| panic!("golden {}: {e}", path.display()));
    let load = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let fail = |reason: String| -> ! { panic!("golden {}, {name}: {reason}", path.display()) };
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
