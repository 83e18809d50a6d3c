//! Every kernel family compiles, and the code is what the launchers expect.

use std::path::PathBuf;

use refrain_kernels::{Arch, Family, Image, KernelCache, Nvrtc, compile_all, kernels};

/// `REFRAIN_NVRTC` names the library; without it the usual places are searched.
#[expect(clippy::disallowed_methods, reason = "a test says where its compiler is")]
fn nvrtc() -> Nvrtc {
    let path = std::env::var_os("REFRAIN_NVRTC").map(PathBuf::from);
    Nvrtc::open(path.as_deref()).unwrap_or_else(|e| panic!("{e}\nhint: {}", e.hint().unwrap_or_default()))
}

/// Names and parameter sizes of the kernels in PTX text.
fn entries(ptx: &str) -> Vec<(String, Vec<usize>)> {
    let mut found: Vec<(String, Vec<usize>)> = ptx
        .split(".visible .entry ")
        .skip(1)
        .map(|entry| {
            let (name, rest) = entry.split_once('(').unwrap();
            let (params, _) = rest.split_once(')').unwrap();
            (name.trim().to_owned(), params.split(',').filter(|p| !p.trim().is_empty()).map(param_size).collect())
        })
        .collect();
    found.sort();
    found
}

fn param_size(param: &str) -> usize {
    if let Some((_, rest)) = param.split_once('[') {
        return rest.split_once(']').unwrap().0.parse().unwrap();
    }
    match param {
        p if p.contains(".u64") || p.contains(".b64") => 8,
        p if p.contains(".u32") || p.contains(".f32") || p.contains(".b32") => 4,
        p => panic!("parameter {p}"),
    }
}

#[test]
#[cfg_attr(not(feature = "nvrtc-tests"), ignore = "needs NVRTC: cargo xtask ci turns it on where it exists")]
fn every_kernel_compiles_with_the_symbols_and_parameters_its_launcher_expects() {
    let nvrtc = nvrtc();
    for arch in [Arch { major: 8, minor: 0 }, Arch { major: 9, minor: 0 }] {
        let image = compile_all(&nvrtc, arch, true).unwrap_or_else(|e| panic!("{e}"));
        for family in Family::ALL {
            let ptx = std::str::from_utf8(image.code(family).unwrap()).unwrap();
            let mut expected: Vec<(String, Vec<usize>)> =
                kernels().into_iter().filter(|k| k.family == family).map(|k| (k.name, k.params)).collect();
            expected.sort();
            assert_eq!(entries(ptx), expected, "{} for {arch}", family.name());
        }
    }
}

#[test]
#[cfg_attr(not(feature = "nvrtc-tests"), ignore = "needs NVRTC: cargo xtask ci turns it on where it exists")]
fn machine_code_holds_every_kernel_and_survives_the_cache() {
    let nvrtc = nvrtc();
    let image = compile_all(&nvrtc, Arch { major: 9, minor: 0 }, false).unwrap_or_else(|e| panic!("{e}"));
    for kernel in kernels() {
        let code = image.code(kernel.family).unwrap();
        let section = format!(".text.{}\0", kernel.name);
        assert!(code.windows(section.len()).any(|w| w == section.as_bytes()), "{}", kernel.name);
    }
    let folder = tempfile::tempdir().unwrap();
    let cache = KernelCache::open(folder.path());
    assert!(cache.put("all", &image.to_bytes()));
    assert_eq!(Image::from_bytes(&cache.get("all").unwrap()), Some(image));
}
