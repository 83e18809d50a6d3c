//! Plans whose kernels come from the real compiler, on the simulated device.

mod rig;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use refrain_cuda::{CudaOptions, GpuArch, GraphMode, KernelOrigin, LoadEvent, LoadListener};
use refrain_driver::Method;
use refrain_kernels::KernelUnit;
use refrain_tensor::DType;
use rig::{Rig, generate, options, sim};

/// `REFRAIN_NVRTC` names the library; otherwise the usual locations are searched.
#[expect(clippy::disallowed_methods, reason = "the test's compiler is configurable")]
fn nvrtc_path() -> Option<PathBuf> {
    std::env::var_os("REFRAIN_NVRTC").map(PathBuf::from)
}

type Heard = Arc<Mutex<Vec<LoadEvent>>>;

/// A model on a simulated device that accepts cubins, and the load events it reports.
fn rig(cache: &Path) -> (Rig, Heard) {
    let heard = Heard::default();
    let listened = Arc::clone(&heard);
    let on_load = LoadListener::new(move |event| listened.lock().unwrap().push(event));
    let mut options = CudaOptions { on_load, ..options(GraphMode::Require, Method::Stream) };
    options.kernels.cache = Some(cache.to_owned());
    options.kernels.nvrtc = nvrtc_path();
    options.kernels.arch = Some(GpuArch { major: 9, minor: 0 });
    (Rig::new(sim("").1, "llama", options, 128, DType::F16), heard)
}

/// Units compiled for each plan.
fn compiled(heard: &Heard) -> Vec<usize> {
    let events = std::mem::take(&mut *heard.lock().unwrap());
    let last = |event: &LoadEvent| match event {
        LoadEvent::Compiling { n_done, n_total } if n_done == n_total => Some(*n_total),
        _ => None,
    };
    events.iter().filter_map(last).collect()
}

#[test]
#[cfg_attr(not(feature = "nvrtc-tests"), ignore = "needs NVRTC: cargo xtask ci turns it on where it exists")]
fn a_model_compiles_only_the_kernels_of_its_plans_and_the_next_start_compiles_none() {
    let folder = tempfile::tempdir().unwrap();
    let (mut first, heard) = rig(folder.path());
    first.engine.plan(1).unwrap();
    let for_decode = compiled(&heard);
    assert!(for_decode.iter().sum::<usize>() < KernelUnit::all().len() / 5, "{for_decode:?}");
    first.engine.plan(1).unwrap();
    assert_eq!(compiled(&heard), Vec::<usize>::new(), "nothing is compiled twice");
    let said = generate(&mut first, 12);
    let for_prompts = compiled(&heard);
    assert!(!for_prompts.is_empty(), "a prompt needs other kernels");
    let Some(KernelOrigin::Compiled { n_cached: 0, n_compiled }) = first.monitor.status().kernels else {
        panic!("{:?}", first.monitor.status().kernels)
    };
    drop(first);

    let (mut second, heard) = rig(folder.path());
    assert_eq!(generate(&mut second, 12), said);
    assert_eq!(compiled(&heard), Vec::<usize>::new(), "the cache has all of them");
    let origin = KernelOrigin::Compiled { n_cached: n_compiled, n_compiled: 0 };
    assert_eq!(second.monitor.status().kernels, Some(origin));
}
