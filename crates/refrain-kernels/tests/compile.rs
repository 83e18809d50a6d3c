//! Checks that every kernel unit compiles and matches its launchers.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use refrain_driver::sim::SimOptions;
use refrain_kernels::{
    GpuArch, Image, KernelFamily, KernelLoadOptions, KernelOrigin, KernelUnit, Kernels, Nvrtc, compile_all,
    kernels, prebuild,
};

/// `REFRAIN_NVRTC` names the library; without it the usual locations are searched.
#[expect(clippy::disallowed_methods, reason = "the environment names the compiler library")]
fn nvrtc_path() -> Option<PathBuf> {
    std::env::var_os("REFRAIN_NVRTC").map(PathBuf::from)
}

fn nvrtc() -> Nvrtc {
    Nvrtc::open(nvrtc_path().as_deref())
        .unwrap_or_else(|e| panic!("{e}\nhint: {}", e.hint().unwrap_or_default()))
}

/// PTX of every unit, for the oldest GPUs and for the first with overlapping kernels. Compiled once.
fn ptx() -> &'static [(GpuArch, Image); 2] {
    static PTX: OnceLock<[(GpuArch, Image); 2]> = OnceLock::new();
    PTX.get_or_init(|| {
        [GpuArch { major: 8, minor: 0 }, GpuArch { major: 9, minor: 0 }]
            .map(|arch| (arch, compile_all(&nvrtc(), arch, true).unwrap_or_else(|e| panic!("{e}"))))
    })
}

/// Names and parameter sizes of the kernels in PTX.
fn entries(ptx: &str) -> Vec<(String, Vec<usize>)> {
    let mut found: Vec<(String, Vec<usize>)> = ptx
        .split(".visible .entry ")
        .skip(1)
        .map(|entry| {
            let (name, rest) = entry.split_once('(').unwrap();
            let (params, _) = rest.split_once(')').unwrap();
            (
                name.trim().to_owned(),
                params.split(',').filter(|p| !p.trim().is_empty()).map(param_size).collect(),
            )
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
    for (arch, image) in ptx() {
        for &unit in KernelUnit::all() {
            let ptx = std::str::from_utf8(image.code(unit).unwrap()).unwrap();
            let mut expected: Vec<(String, Vec<usize>)> =
                kernels().into_iter().filter(|k| k.unit == unit).map(|k| (k.name, k.params)).collect();
            expected.sort();
            assert_eq!(entries(ptx), expected, "{unit} for {arch}");
        }
    }
}

/// Name and instructions of each kernel in PTX.
fn bodies(ptx: &str) -> impl Iterator<Item = (&str, &str)> {
    ptx.split(".visible .entry ").skip(1).map(|entry| {
        let (name, body) = entry.split_once('(').unwrap();
        (name.trim(), body)
    })
}

#[test]
#[cfg_attr(not(feature = "nvrtc-tests"), ignore = "needs NVRTC: cargo xtask ci turns it on where it exists")]
fn every_kernel_releases_the_next_one_and_waits_before_it_stores_or_returns() {
    let images = ptx();
    for &unit in KernelUnit::all() {
        let [old, new] = images.each_ref().map(|(_, i)| std::str::from_utf8(i.code(unit).unwrap()).unwrap());
        assert!(!old.contains("griddepcontrol"), "{unit} for 8.0");
        for (name, body) in bodies(new) {
            assert!(body.contains("griddepcontrol.launch_dependents"), "{name}");
            // In program order: nothing before the first wait stores or returns.
            let (before, _) =
                body.split_once("griddepcontrol.wait").unwrap_or_else(|| panic!("{name} never waits"));
            for word in ["st.global", "ret;", "exit;", "red.", "atom."] {
                let found = before.split_whitespace().any(|token| token.starts_with(word));
                assert!(!found, "{name}: {word} before the wait");
            }
            // These kernels read weights, guesses that they verify after the wait, and parameters that no
            // kernel writes. All others load nothing before the wait, except for the words of the host that
            // commit_loop_i32 reads with ld.relaxed.
            let may_load = matches!(
                unit.family(),
                KernelFamily::BatchPlain
                    | KernelFamily::Linear
                    | KernelFamily::Product
                    | KernelFamily::Attend
                    | KernelFamily::Sample
                    | KernelFamily::Recurrent
            );
            if !may_load {
                assert!(!before.contains("ld.global"), "{name} loads before the wait");
            }
        }
    }
}

#[test]
#[cfg_attr(not(feature = "nvrtc-tests"), ignore = "needs NVRTC: cargo xtask ci turns it on where it exists")]
fn machine_code_is_compiled_once_and_a_damaged_or_read_only_cache_costs_only_time() {
    let device = refrain_kernels::simulated(SimOptions::default()).unwrap();
    let ctx = device.context().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("kernels");
    let arch = Some(GpuArch { major: 9, minor: 0 });
    let open = |cache: &Path| {
        let options = KernelLoadOptions { cache: Some(cache.to_owned()), nvrtc: nvrtc_path(), arch };
        Kernels::load(&ctx, &options).unwrap_or_else(|e| panic!("{e}"))
    };
    let n_compiled = |kernels: &Kernels| match kernels.origin() {
        KernelOrigin::Compiled { n_cached, n_compiled } => (n_cached, n_compiled),
        origin => panic!("{origin:?}"),
    };
    // A few are enough: the next test compiles all.
    let families = [KernelFamily::Copy, KernelFamily::Digest, KernelFamily::Norm];
    let units: Vec<KernelUnit> =
        KernelUnit::all().iter().filter(|unit| families.contains(&unit.family())).copied().collect();
    let load = |cache: &Path| {
        let kernels = open(cache);
        let mut progress = Vec::new();
        kernels.load_units(&units, &mut |event| progress.push(event)).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(kernels.loaded(), units);
        assert_eq!(progress.last().map_or(0, |event| event.n_done), n_compiled(&kernels).1);
        n_compiled(&kernels)
    };
    let n = units.len();
    assert!(n >= families.len());
    assert_eq!(load(&cache), (0, n));
    assert_eq!(load(&cache), (n, 0));

    let files: Vec<PathBuf> = std::fs::read_dir(&cache).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(files.len(), n, "{files:?}");
    std::fs::write(&files[0], b"not machine code").unwrap();
    assert_eq!(open(&cache).n_ready(), n - 1);
    assert_eq!(load(&cache), (n - 1, 1));
    assert_eq!(load(&cache), (n, 0), "the damaged file is replaced");

    let in_the_way = folder.path().join("file");
    std::fs::write(&in_the_way, b"").unwrap();
    let kernels = open(&in_the_way);
    kernels.digester().unwrap_or_else(|e| panic!("the folder cannot be created: {e}"));
    assert_eq!(n_compiled(&kernels), (0, 1));
}

#[test]
#[cfg_attr(not(feature = "nvrtc-tests"), ignore = "needs NVRTC: cargo xtask ci turns it on where it exists")]
fn prebuilt_kernels_are_used_where_they_fit_and_replaced_where_they_are_damaged() {
    let device = refrain_kernels::simulated(SimOptions::default()).unwrap();
    let ctx = device.context().unwrap();
    let card = GpuArch { major: 9, minor: 0 };
    let folder = tempfile::tempdir().unwrap();
    let options =
        KernelLoadOptions { cache: Some(folder.path().to_owned()), nvrtc: nvrtc_path(), arch: Some(card) };
    let archive = prebuild(&nvrtc(), &[card]).unwrap_or_else(|e| panic!("{e}"));
    let open = |archive: &[u8]| {
        // SAFETY: the device is simulated and runs the twins of the kernels that the code names.
        unsafe { Kernels::with_archive(&ctx, &options, archive) }.unwrap()
    };

    let kernels = open(&archive);
    assert_eq!(kernels.n_ready(), KernelUnit::all().len());
    kernels.load_all(&mut |event| panic!("{event:?}")).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(kernels.loaded().len(), KernelUnit::all().len());
    assert_eq!(kernels.origin(), KernelOrigin::Prebuilt(card));

    let kernels = open(&archive[..archive.len() / 2]);
    kernels.digester().unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(kernels.origin(), KernelOrigin::Compiled { n_cached: 0, n_compiled: 1 });
}

#[test]
#[cfg_attr(not(feature = "nvrtc-tests"), ignore = "needs NVRTC: cargo xtask ci turns it on where it exists")]
fn a_compile_error_names_file_and_line() {
    let nvrtc = nvrtc();
    // Too old for instructions that the kernels use.
    let old = GpuArch { major: 7, minor: 5 };
    assert!(nvrtc.knows(old));
    let error = compile_all(&nvrtc, old, false).unwrap_err().to_string();
    assert!(error.contains(".cu (") && error.contains("sm_75"), "{error}");
}
