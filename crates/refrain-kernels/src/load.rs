//! From sources to functions on a device.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use refrain_driver::sim::{SimDriver, SimOptions, Twin};
use refrain_driver::{Context, Device, Dim, DriverError, Function, LaunchBuilder, Module};

use crate::cache::KernelCache;
use crate::error::KernelError;
use crate::nvrtc::{Image, Nvrtc};
use crate::prebuilt::{self, Archive, Unusable};
use crate::registry::{KernelInfo, entries, kernels};
use crate::source::Family;

/// A compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch {
    /// 9 of 9.0.
    pub major: u32,
    /// 0 of 9.0.
    pub minor: u32,
}

impl Arch {
    /// Whether machine code for `self` runs on a card of `card`.
    #[must_use]
    pub fn runs_on(self, card: Arch) -> bool {
        self.major == card.major && self.minor <= card.minor
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.major, self.minor)
    }
}

/// Where kernels may come from.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Folder of compiled code, made when it is not there; without one every load compiles.
    pub cache: Option<PathBuf>,
    /// The NVRTC library; without a path the usual places are searched.
    pub nvrtc: Option<PathBuf>,
    /// Compiles for this architecture instead of the card's. The simulated device compiles only when it is given: it
    /// then runs the twins of what the machine code names.
    pub arch: Option<Arch>,
}

/// Where loaded kernels came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Reference functions on the simulated device.
    Twins,
    /// Code compiled ahead of time.
    Prebuilt(Arch),
    /// The compiler, or its results on disk.
    Compiled {
        /// Families that were in the cache.
        n_cached: usize,
        /// Families that were compiled now.
        n_compiled: usize,
    },
}

/// All kernels, loaded on a device. Its methods describe launches.
pub struct Kernels {
    functions: HashMap<String, Function>,
    origin: Origin,
    /// The code waits for what it depends on, so it may start before that has ended.
    overlaps: bool,
    n_sms: usize,
    /// Most shared memory of a block, in bytes.
    shared_limit: usize,
    /// Shared memory of a multiprocessor, in bytes.
    shared_sm: usize,
    /// Cycles that a multiprocessor has for each byte if memory delivers as its clock and width allow; 0 where that is unknown.
    byte_cycles: f64,
}

/// The first architecture whose kernels can start early; `overlap.cuh` is compiled to nothing before it.
const OVERLAPS: Arch = Arch { major: 9, minor: 0 };

impl Kernels {
    /// Loads every kernel: the twins on the simulated device, else what the binary holds for the card, else from the
    /// cache or the compiler.
    pub fn load(ctx: &Context, options: &LoadOptions) -> Result<Kernels, KernelError> {
        Kernels::from_archive(ctx, options, prebuilt::embedded())
    }

    pub(crate) fn from_archive(
        ctx: &Context,
        options: &LoadOptions,
        archive: &[u8],
    ) -> Result<Kernels, KernelError> {
        if runs_twins(ctx, options) {
            return Kernels::with_images(ctx, options, &[]);
        }
        let (major, minor) = ctx.device().info().compute;
        let card = options.arch.unwrap_or(Arch { major, minor });
        let archive = Archive::parse(archive).unwrap_or_else(|why| {
            match why {
                Unusable::Stale => {
                    tracing::warn!("the prebuilt kernels are of other sources, not using them")
                }
                Unusable::Damaged => tracing::warn!("the prebuilt kernels are damaged, not using them"),
            }
            Archive::default()
        });
        let image = match archive.image_for(card) {
            Some(Ok(image)) => Some(image),
            Some(Err(_)) => {
                tracing::warn!("the prebuilt kernels for {card} are damaged, compiling instead");
                None
            }
            None => None,
        };
        let prebuilt = image.as_ref().map(|(arch, bytes)| (*arch, bytes.as_slice()));
        Kernels::with_images(ctx, options, prebuilt.as_slice()).map_err(|error| match error {
            KernelError::NvrtcMissing { tried } => {
                let archs: Vec<String> = archive.archs().iter().map(ToString::to_string).collect();
                let held = match archs.as_slice() {
                    [] => "no prebuilt kernels".to_owned(),
                    archs => format!("prebuilt kernels for {}", archs.join(", ")),
                };
                KernelError::NoKernels { card: card.to_string(), held, tried }
            }
            error => error,
        })
    }

    /// As [`Kernels::load`], with code compiled ahead of time ([`Image::to_bytes`]) where it fits the card.
    ///
    /// ```compile_fail,E0133
    /// # use refrain_driver::Context;
    /// # use refrain_kernels::{Arch, KernelError, Kernels, LoadOptions};
    /// fn downloaded(ctx: &Context, code: &[u8]) -> Result<Kernels, KernelError> {
    ///     Kernels::with_prebuilt(ctx, &LoadOptions::default(), &[(Arch { major: 9, minor: 0 }, code)])
    /// }
    /// ```
    ///
    /// # Safety
    /// Every image is what [`crate::compile_all`] of this very version made, unchanged. Names and parameters of its kernels are
    /// checked, but not that they touch only what the launchers vouch for.
    #[allow(unsafe_code)]
    pub unsafe fn with_prebuilt(
        ctx: &Context,
        options: &LoadOptions,
        prebuilt: &[(Arch, &[u8])],
    ) -> Result<Kernels, KernelError> {
        Kernels::with_images(ctx, options, prebuilt)
    }

    fn with_images(
        ctx: &Context,
        options: &LoadOptions,
        prebuilt: &[(Arch, &[u8])],
    ) -> Result<Kernels, KernelError> {
        let device = ctx.device();
        if runs_twins(ctx, options) {
            let names: Vec<String> = kernels().into_iter().map(|k| k.name).collect();
            let image = Image {
                families: vec![(Family::Linear, format!("sim\n{}\n", names.join("\n")).into_bytes())],
            };
            let (major, minor) = device.info().compute;
            return Kernels::from_image(ctx, &image, Origin::Twins, Arch { major, minor });
        }
        let (major, minor) = device.info().compute;
        let card = options.arch.unwrap_or(Arch { major, minor });
        if card.major < 8 {
            return Err(KernelError::TooOld { compute: (card.major, card.minor) });
        }
        let fitting = prebuilt.iter().filter(|(arch, _)| arch.runs_on(card)).max_by_key(|(arch, _)| *arch);
        if let Some((arch, bytes)) = fitting {
            match Image::from_bytes(bytes) {
                Some(image) => match Kernels::from_image(ctx, &image, Origin::Prebuilt(*arch), *arch) {
                    Ok(kernels) => return Ok(kernels),
                    // A lost context stays lost; everything else the compiler may still put right.
                    Err(e @ KernelError::Driver(DriverError::ContextLost { .. })) => return Err(e),
                    Err(e) => {
                        tracing::warn!("prebuilt kernels for {arch} do not load, compiling instead: {e}")
                    }
                },
                None => tracing::warn!("prebuilt kernels for {arch} are damaged, compiling instead"),
            }
        }
        Kernels::compiled(ctx, options, card)
    }

    fn compiled(ctx: &Context, options: &LoadOptions, card: Arch) -> Result<Kernels, KernelError> {
        let nvrtc = Nvrtc::open(options.nvrtc.as_deref())?;
        let target = nvrtc.target(card)?;
        let cache = options.cache.as_deref().map(KernelCache::open);
        let keys = Family::ALL.map(|family| nvrtc.key(family, target));
        let found = keys.each_ref().map(|key| cache.as_ref().and_then(|c| c.get(key)));
        let missing: Vec<Family> = Family::ALL
            .into_iter()
            .zip(&found)
            .filter(|(_, f)| f.is_none())
            .map(|(family, _)| family)
            .collect();
        let mut compiled = nvrtc.compile(&missing, target)?.into_iter();
        let mut image = Image { families: Vec::with_capacity(Family::ALL.len()) };
        for ((family, key), found) in Family::ALL.into_iter().zip(&keys).zip(found) {
            let code = match found {
                Some(code) => code,
                None => {
                    let code = compiled.next().unwrap_or_default();
                    if let Some(cache) = &cache {
                        cache.put(key, &code);
                    }
                    code
                }
            };
            image.families.push((family, code));
        }
        let n_compiled = missing.len();
        let origin = Origin::Compiled { n_cached: Family::ALL.len() - n_compiled, n_compiled };
        let loaded = Kernels::from_image(ctx, &image, origin, target.arch);
        // Code that the cache says is whole but the driver refuses was made for another driver or is falsified.
        if let (Err(error), Some(cache)) = (&loaded, &cache)
            && n_compiled < Family::ALL.len()
            && !matches!(error, KernelError::Driver(DriverError::ContextLost { .. }))
        {
            tracing::warn!("cached kernels do not load, compiling them again: {error}");
            let code = nvrtc.compile(&Family::ALL, target)?;
            let fresh = Image { families: Family::ALL.into_iter().zip(code).collect() };
            for ((_, code), key) in fresh.families.iter().zip(&keys) {
                cache.put(key, code);
            }
            let n_compiled = Family::ALL.len();
            let origin = Origin::Compiled { n_cached: 0, n_compiled };
            return Kernels::from_image(ctx, &fresh, origin, target.arch);
        }
        loaded
    }

    #[allow(unsafe_code)]
    fn from_image(ctx: &Context, image: &Image, origin: Origin, arch: Arch) -> Result<Kernels, KernelError> {
        let mut functions = HashMap::new();
        let all = kernels();
        for (family, code) in &image.families {
            // SAFETY: the code was compiled from the sources of this crate: by its build (`prebuilt`), by NVRTC just now or
            // for the cache, or so says the caller of `with_prebuilt`. `check` below compares its parameters with the list
            // that launchers are written against.
            let module = unsafe { Module::load(ctx, family.name(), code) }?;
            for info in all.iter().filter(|k| origin == Origin::Twins || k.family == *family) {
                let function = module.function(&info.name)?;
                check(info, &function)?;
                functions.insert(info.name.clone(), function);
            }
        }
        if let Some(missing) = all.iter().find(|k| !functions.contains_key(&k.name)) {
            let module = missing.family.name().to_owned();
            return Err(DriverError::KernelMissing { module, kernel: missing.name.clone() }.into());
        }
        let device = ctx.device();
        let info = device.info();
        let n_sms = info.n_sms.max(1) as usize;
        let (shared_limit, shared_sm) = (info.shared_block_bytes as usize, info.shared_sm_bytes as usize);
        let overlaps = arch >= OVERLAPS;
        let clock = f64::from(info.clock_khz) * 1e3;
        let byte_cycles = info.peak_bytes_per_second().map_or(0.0, |peak| n_sms as f64 * clock / peak);
        let kernels = Kernels { functions, origin, overlaps, n_sms, shared_limit, shared_sm, byte_cycles };
        kernels.allow_attend()?;
        kernels.allow_gemm()?;
        kernels.allow_flash()?;
        kernels.allow_product()?;
        kernels.allow_few()?;
        kernels.allow_sample()?;
        // Behind the limits: raising one may set the wish back.
        kernels.functions.values().try_for_each(Function::prefer_shared)?;
        Ok(kernels)
    }

    /// Where the kernels came from.
    #[must_use]
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// How many kernels there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.functions.len()
    }

    /// False: loading gives all kernels or an error.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    /// A launch that may start before what it depends on has ended, where the code can: kernels wait inside
    /// (`overlap.cuh`).
    pub(crate) fn launch(
        &self,
        name: &str,
        grid: impl Into<Dim>,
        block: impl Into<Dim>,
    ) -> Result<LaunchBuilder, KernelError> {
        let launch = LaunchBuilder::new(self.get(name)?, grid, block);
        Ok(if self.overlaps { launch.pdl() } else { launch })
    }

    /// Multiprocessors of the card.
    pub(crate) fn n_sms(&self) -> usize {
        self.n_sms
    }

    /// Most shared memory of a block, in bytes.
    pub(crate) fn shared_limit(&self) -> usize {
        self.shared_limit
    }

    /// Shared memory of a multiprocessor, in bytes.
    pub(crate) fn shared_sm(&self) -> usize {
        self.shared_sm
    }

    /// Cycles in which a multiprocessor gets so many bytes while all of them read; `None` where clocks are not known.
    pub(crate) fn cycles_of(&self, bytes: usize) -> Option<usize> {
        // Memory delivers about ten elevenths of what its clock and width allow.
        let cycles = 1.1 * self.byte_cycles * bytes as f64;
        (self.byte_cycles > 0.0).then_some(cycles as usize)
    }

    pub(crate) fn get(&self, name: &str) -> Result<&Function, KernelError> {
        self.functions.get(name).ok_or_else(|| {
            DriverError::KernelMissing { module: "kernels".to_owned(), kernel: name.to_owned() }.into()
        })
    }
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernels({} from {:?})", self.functions.len(), self.origin)
    }
}

/// The simulated device runs machine code only where it is asked to.
fn runs_twins(ctx: &Context, options: &LoadOptions) -> bool {
    ctx.device().backend() == "sim" && options.arch.is_none()
}

fn check(info: &KernelInfo, function: &Function) -> Result<(), KernelError> {
    let got: Vec<usize> = function.params().iter().map(|p| p.size).collect();
    for index in 0..got.len().max(info.params.len()) {
        let (expected, got) =
            (info.params.get(index).copied().unwrap_or(0), got.get(index).copied().unwrap_or(0));
        if expected != got {
            return Err(KernelError::Parameter { kernel: info.name.clone(), index, expected, got });
        }
    }
    Ok(())
}

/// Tells a simulated device about every kernel, before [`Kernels::load`] looks them up.
pub fn register_twins(sim: &SimDriver) {
    for entry in entries() {
        let body = Arc::clone(&entry.twin);
        let twin = Twin::new(&entry.info.name, &entry.info.params, move |k| body(k));
        sim.register_twin(if entry.starts_next_late { twin.starts_next_late() } else { twin });
    }
}

/// Opens a simulated device that knows the twins.
pub fn simulated(options: SimOptions) -> Result<Device, DriverError> {
    let sim = SimDriver::new(options);
    register_twins(&sim);
    Device::simulated(&sim)
}
