//! Sources of compiled code: twins, the binary, the cache or the compiler.

use crate::cache::KernelCache;
use crate::compile::{Compiler, Compiling, compile, n_threads};
use crate::error::KernelError;
use crate::load::{GpuArch, KernelLoadOptions, KernelOrigin};
use crate::nvrtc::{Image, NvrtcFor};
use crate::registry::kernels;
use crate::source::KernelUnit;
use crate::tuning::Tuning;

/// Source of the code of units.
pub(crate) enum Supply {
    /// Names of twins, which the simulated device accepts as code.
    Twins(GpuArch),
    /// Prebuilt code, and how to compile instead if the driver refuses it.
    Prebuilt { arch: GpuArch, image: Image, card: GpuArch, options: KernelLoadOptions },
    /// Code compiled on demand.
    Compiled(UnitCompiler),
}

/// The compiler with its cache.
pub(crate) struct UnitCompiler {
    compiler: Box<dyn Compiler>,
    cache: Option<KernelCache>,
    n_threads: usize,
    /// Whether some of the most recently returned code was read from the cache.
    used_cache: bool,
    /// The driver refused cached code, so the next code is compiled.
    distrusts_cache: bool,
    n_cached: usize,
    n_compiled: usize,
}

impl Supply {
    /// Opens the compiler for a GPU.
    pub(crate) fn nvrtc(
        options: &KernelLoadOptions,
        card: GpuArch,
        tuning: &'static Tuning,
    ) -> Result<Supply, KernelError> {
        let compiler = Box::new(NvrtcFor::open(options.nvrtc.as_deref(), card, tuning)?);
        let cache = options.cache.as_deref().map(KernelCache::open);
        Ok(Supply::Compiled(UnitCompiler::new(compiler, cache, n_threads())))
    }

    /// Returns the code of each of these units.
    pub(crate) fn code(
        &mut self,
        units: &[KernelUnit],
        on_progress: &mut dyn FnMut(Compiling),
    ) -> Result<Vec<Vec<u8>>, KernelError> {
        match self {
            Supply::Twins(_) => Ok(twins(units)),
            Supply::Prebuilt { image, .. } => {
                Ok(units.iter().map(|&unit| image.code(unit).unwrap_or_default().to_vec()).collect())
            }
            Supply::Compiled(compiled) => compiled.code(units, on_progress),
        }
    }

    /// Called after the driver refused code. Returns true if there is another source: prebuilt code is
    /// replaced by the compiler, and cached code is compiled again.
    pub(crate) fn fall_back(&mut self, refused: &KernelError) -> Result<bool, KernelError> {
        match self {
            Supply::Twins(_) => Ok(false),
            Supply::Prebuilt { arch, card, options, .. } => {
                tracing::warn!("prebuilt kernels for {arch} do not load, compiling instead: {refused}");
                // Launchers keep using the tuning of the code loaded before.
                *self = Supply::nvrtc(options, *card, Tuning::of(*arch))?;
                Ok(true)
            }
            Supply::Compiled(compiled) => {
                if compiled.used_cache {
                    tracing::warn!("cached kernels do not load, compiling them again: {refused}");
                    compiled.distrusts_cache = true;
                }
                Ok(compiled.used_cache)
            }
        }
    }

    /// Architecture of the code.
    pub(crate) fn arch(&self) -> GpuArch {
        match self {
            Supply::Twins(arch) | Supply::Prebuilt { arch, .. } => *arch,
            Supply::Compiled(compiled) => compiled.compiler.arch(),
        }
    }

    /// Tuning that the code was compiled with.
    pub(crate) fn tuning(&self) -> &'static Tuning {
        match self {
            Supply::Twins(arch) | Supply::Prebuilt { arch, .. } => Tuning::of(*arch),
            Supply::Compiled(compiled) => compiled.compiler.tuning(),
        }
    }

    pub(crate) fn origin(&self) -> KernelOrigin {
        match self {
            Supply::Twins(_) => KernelOrigin::Twins,
            Supply::Prebuilt { arch, .. } => KernelOrigin::Prebuilt(*arch),
            Supply::Compiled(UnitCompiler { n_cached, n_compiled, .. }) => {
                KernelOrigin::Compiled { n_cached: *n_cached, n_compiled: *n_compiled }
            }
        }
    }

    /// Number of units that need no compiler because the binary or the cache has them.
    pub(crate) fn n_ready(&self) -> usize {
        match self {
            Supply::Twins(_) | Supply::Prebuilt { .. } => KernelUnit::all().len(),
            Supply::Compiled(compiled) => {
                let is_cached = |unit: &&KernelUnit| compiled.cached(**unit).is_some();
                KernelUnit::all().iter().filter(is_cached).count()
            }
        }
    }
}

impl UnitCompiler {
    pub(crate) fn new(
        compiler: Box<dyn Compiler>,
        cache: Option<KernelCache>,
        n_threads: usize,
    ) -> UnitCompiler {
        UnitCompiler {
            compiler,
            cache,
            n_threads,
            used_cache: false,
            distrusts_cache: false,
            n_cached: 0,
            n_compiled: 0,
        }
    }

    fn cached(&self, unit: KernelUnit) -> Option<Vec<u8>> {
        self.cache.as_ref()?.get(&self.compiler.key(unit))
    }

    fn code(
        &mut self,
        units: &[KernelUnit],
        on_progress: &mut dyn FnMut(Compiling),
    ) -> Result<Vec<Vec<u8>>, KernelError> {
        let trusts_cache = !std::mem::take(&mut self.distrusts_cache);
        let found = units.iter().map(|&unit| self.cached(unit).filter(|_| trusts_cache));
        let found: Vec<Option<Vec<u8>>> = found.collect();
        let missing = units.iter().zip(&found).filter(|(_, found)| found.is_none());
        let missing: Vec<KernelUnit> = missing.map(|(unit, _)| *unit).collect();
        let compiled = compile(&*self.compiler, &missing, self.n_threads, on_progress)?;
        if let Some(cache) = &self.cache {
            missing.iter().zip(&compiled).for_each(|(&unit, code)| {
                cache.put(&self.compiler.key(unit), code);
            });
        }
        self.used_cache = missing.len() < units.len();
        self.n_compiled += missing.len();
        self.n_cached += units.len() - missing.len();
        let mut compiled = compiled.into_iter();
        Ok(found.into_iter().filter_map(|found| found.or_else(|| compiled.next())).collect())
    }
}

/// Code for the simulated device: the names of each unit's kernels.
pub(crate) fn twins(units: &[KernelUnit]) -> Vec<Vec<u8>> {
    let all = kernels();
    let of = |unit: &KernelUnit| {
        let names = all.iter().filter(|k| k.unit == *unit).map(|k| k.name.as_str());
        ["sim"].into_iter().chain(names).collect::<Vec<_>>().join("\n").into_bytes()
    };
    units.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{Kernels, simulated};
    use crate::source::KernelFamily;
    use refrain_driver::sim::SimOptions;
    use refrain_driver::{Context, DriverError, Memory, MemoryLayout, Method, RecordOptions};
    use refrain_tensor::DType;
    use std::path::Path;
    use std::sync::{Arc, Condvar, Mutex};
    use std::time::Duration;

    /// A compiler whose output the simulated device accepts as code.
    #[derive(Clone, Default)]
    struct Fake {
        compiled: Arc<Mutex<Vec<KernelUnit>>>,
        /// Units being compiled concurrently, and how many there must be before any finishes.
        together: Arc<(Mutex<usize>, Condvar, usize)>,
        fails: Option<KernelUnit>,
    }

    impl Compiler for Fake {
        fn key(&self, unit: KernelUnit) -> String {
            KernelCache::key(&[unit.source().as_bytes()])
        }

        fn compile(&self, unit: KernelUnit) -> Result<Vec<u8>, KernelError> {
            let (n, changed, wanted) = &*self.together;
            let mut n = n.lock().unwrap();
            *n += 1;
            changed.notify_all();
            let (_n, waited) =
                changed.wait_timeout_while(n, Duration::from_secs(30), |n| *n < *wanted).unwrap();
            assert!(!waited.timed_out(), "{unit} is compiled alone");
            if self.fails == Some(unit) {
                let (unit, arch) = (unit.to_string(), self.arch().to_string());
                return Err(KernelError::Compile { unit, arch, log: "error: expected a ;".into() });
            }
            self.compiled.lock().unwrap().push(unit);
            Ok(twins(&[unit]).remove(0))
        }

        fn arch(&self) -> GpuArch {
            GpuArch { major: 9, minor: 0 }
        }

        fn tuning(&self) -> &'static Tuning {
            Tuning::of(self.arch())
        }
    }

    impl Fake {
        fn kernels(&self, ctx: &Context, n_threads: usize, cache: Option<&Path>) -> Kernels {
            let cache = cache.map(KernelCache::open);
            Kernels::of(ctx, Supply::Compiled(UnitCompiler::new(Box::new(self.clone()), cache, n_threads)))
        }

        fn compiled(&self) -> Vec<KernelUnit> {
            let mut units = std::mem::take(&mut *self.compiled.lock().unwrap());
            units.sort();
            units
        }
    }

    fn context() -> Context {
        simulated(SimOptions::default()).unwrap().context().unwrap()
    }

    fn digest() -> KernelUnit {
        KernelUnit::whole(KernelFamily::Digest)
    }

    fn pack(name: &str) -> KernelUnit {
        KernelUnit::named(KernelFamily::Pack, name)
    }

    /// Requests the kernels of [`digest`] and of two packed dtypes.
    fn describe(kernels: &Kernels) -> Result<(), KernelError> {
        kernels.request_pack([DType::Q4_K, DType::F16, DType::Q6_K])?;
        kernels.digester().map(drop)
    }

    #[test]
    fn only_requested_units_are_compiled_and_loaded() {
        let (ctx, fake) = (context(), Fake::default());
        let kernels = fake.kernels(&ctx, 2, None);
        assert_eq!(kernels.loaded(), []);
        let (mut n_runs, mut progress) = (0, Vec::new());
        let mut run = || {
            let described =
                kernels.prepared(&mut |event| progress.push((event.n_done, event.n_total)), || {
                    n_runs += 1;
                    describe(&kernels)
                });
            described.unwrap().unwrap();
        };
        run();
        run();
        assert_eq!(n_runs, 3, "the second time nothing is missing");
        assert_eq!(progress, [(0, 3), (1, 3), (2, 3), (3, 3)]);
        let mut wanted = vec![pack("q4_k"), pack("q6_k"), digest()];
        wanted.sort();
        assert_eq!(fake.compiled(), wanted);
        assert_eq!(kernels.loaded(), wanted);
        assert_eq!(kernels.origin(), KernelOrigin::Compiled { n_cached: 0, n_compiled: 3 });
        kernels.request_pack([DType::Q8_0]).unwrap();
        assert_eq!(fake.compiled(), [pack("q8_0")], "a single requested unit is compiled alone");
    }

    #[test]
    fn units_are_compiled_in_parallel() {
        let ctx = context();
        let fake = Fake { together: Arc::new((Mutex::default(), Condvar::new(), 3)), ..Fake::default() };
        let kernels = fake.kernels(&ctx, 3, None);
        kernels.prepared(&mut |_| {}, || describe(&kernels)).unwrap().unwrap();
        assert_eq!(fake.compiled().len(), 3);
    }

    #[test]
    fn a_unit_that_does_not_compile_is_one_error_with_its_file_and_compiler_log() {
        let (ctx, failing) = (context(), Fake { fails: Some(pack("q6_k")), ..Fake::default() });
        for n_threads in [1, 3] {
            let kernels = failing.kernels(&ctx, n_threads, None);
            let error = kernels.prepared(&mut |_| {}, || describe(&kernels)).unwrap_err();
            assert_eq!(
                error.to_string(),
                "pack.cu (q6_k) does not compile for sm_90: error: expected a ;",
                "{n_threads} threads"
            );
            assert_eq!(kernels.loaded(), []);
        }
    }

    #[test]
    fn cached_units_that_are_damaged_or_refused_by_the_driver_are_compiled_again() {
        let (ctx, fake) = (context(), Fake::default());
        let folder = tempfile::tempdir().unwrap();
        let load = || {
            let kernels = fake.kernels(&ctx, 2, Some(folder.path()));
            kernels.prepared(&mut |_| {}, || describe(&kernels)).unwrap().unwrap();
            assert_eq!(kernels.n_ready(), 3);
            (fake.compiled(), kernels.origin())
        };
        assert_eq!(load().0.len(), 3);
        assert_eq!(load(), (vec![], KernelOrigin::Compiled { n_cached: 3, n_compiled: 0 }));

        let key = fake.key(pack("q4_k"));
        std::fs::write(folder.path().join(format!("{key}.kernels")), b"not what was written").unwrap();
        assert_eq!(load(), (vec![pack("q4_k")], KernelOrigin::Compiled { n_cached: 2, n_compiled: 1 }));
        assert_eq!(load().0, [], "the cache is repaired");

        KernelCache::open(folder.path()).put(&key, &[0xff, 0xfe]);
        let (compiled, _) = load();
        assert!(compiled.contains(&pack("q4_k")), "{compiled:?}");
        assert_eq!(load().0, [], "the cache is repaired");
    }

    #[test]
    fn processes_that_fill_one_cache_at_once_both_get_their_kernels() {
        let folder = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let (ctx, fake) = (context(), Fake::default());
                    let kernels = fake.kernels(&ctx, 2, Some(folder.path()));
                    kernels.prepared(&mut |_| {}, || describe(&kernels)).unwrap().unwrap();
                    assert_eq!(kernels.loaded().len(), 3);
                });
            }
        });
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn prebuilt_code_that_the_driver_refuses_is_compiled_or_fails_with_an_install_hint() {
        let ctx = context();
        let arch = GpuArch { major: 9, minor: 0 };
        let mut code = twins(KernelUnit::all());
        code[KernelUnit::all().iter().position(|unit| *unit == digest()).unwrap()] = vec![0xff, 0xfe];
        let options =
            KernelLoadOptions { nvrtc: Some("/nowhere/libnvrtc.so".into()), ..KernelLoadOptions::default() };
        let kernels =
            Kernels::of(&ctx, Supply::Prebuilt { arch, image: Image::new(code), card: arch, options });
        kernels.request_pack([DType::Q4_K]).unwrap();
        assert_eq!(kernels.origin(), KernelOrigin::Prebuilt(arch));
        let error = kernels.digester().unwrap_err();
        assert!(matches!(error, KernelError::NvrtcMissing { .. }), "{error}");
        assert!(error.hint().unwrap().contains("pip install nvidia-cuda-nvrtc"));
    }

    #[test]
    fn a_launch_described_without_its_kernel_is_refused_by_every_stream() {
        let (ctx, fake) = (context(), Fake::default());
        let kernels = fake.kernels(&ctx, 2, None);
        let mut layout = MemoryLayout::new("memory");
        let (x, y) = (layout.device("x", 256), layout.device("y", 256));
        let memory = Memory::plan(&ctx, &layout).unwrap();
        let [x, y] = [x, y].map(|name| memory.buf(name));
        let mut launches = Vec::new();
        let described = kernels.prepared(&mut |_| {}, || {
            launches.push(kernels.digester()?.launch(x, y)?);
            Ok::<_, KernelError>(())
        });
        described.unwrap().unwrap();
        let [stand_in, real] = &launches[..] else { panic!("{} launches", launches.len()) };
        let mut stream = ctx.stream().unwrap();
        let (options, method) = (RecordOptions::named("test"), Method::Stream);
        let refused = stream.record(&memory, method, &options, |q| q.launch(stand_in)).map(drop).unwrap_err();
        assert!(matches!(refused, DriverError::ForeignDevice { .. }), "{refused}");
        stream.record(&memory, method, &options, |q| q.launch(real)).unwrap();
    }

    #[test]
    fn nothing_is_compiled_or_loaded_during_a_recording() {
        let (ctx, fake) = (context(), Fake::default());
        let kernels = fake.kernels(&ctx, 2, None);
        let mut layout = MemoryLayout::new("memory");
        layout.device("x", 256);
        let memory = Memory::plan(&ctx, &layout).unwrap();
        let mut stream = ctx.stream().unwrap();
        let mut error = None;
        let _ = stream.record(&memory, Method::Stream, &RecordOptions::named("test"), |_| {
            error = kernels.digester().err();
            Ok(())
        });
        let error = error.expect("the kernel was not loaded");
        assert!(matches!(error, KernelError::Driver(DriverError::CaptureIncompatible { .. })), "{error}");
        assert_eq!((fake.compiled(), kernels.loaded()), (vec![], vec![]));
    }
}
