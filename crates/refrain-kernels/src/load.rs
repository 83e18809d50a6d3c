//! Loading kernels: from sources to functions on a device.

use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use refrain_driver::sim::{SimDriver, SimOptions, Twin};
use refrain_driver::{Context, Device, Dim, DriverError, Function, LaunchBuilder, Module};

use crate::card::Card;
use crate::compile::Compiling;
use crate::error::KernelError;
use crate::nvrtc::Image;
use crate::prebuilt::{self, Archive, Unusable};
use crate::registry::{KernelEntry, KernelInfo, entries};
use crate::source::KernelUnit;
use crate::supply::Supply;
use crate::tuning::Tuning;

/// CUDA compute capability of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GpuArch {
    /// Major version: 9 of 9.0.
    pub major: u32,
    /// Minor version: 0 of 9.0.
    pub minor: u32,
}

impl GpuArch {
    /// Whether machine code for `self` runs on a GPU of architecture `card`.
    #[must_use]
    pub(crate) fn runs_on(self, card: GpuArch) -> bool {
        self.major == card.major && self.minor <= card.minor
    }
}

impl fmt::Display for GpuArch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.major, self.minor)
    }
}

/// Sources of compiled kernels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelLoadOptions {
    /// Cache folder for compiled code, created if missing. Without one, every load compiles.
    pub cache: Option<PathBuf>,
    /// Path of the NVRTC library; `None` searches the usual locations.
    pub nvrtc: Option<PathBuf>,
    /// Compiles for this architecture instead of the GPU's own. The simulated device compiles only if this is
    /// set, and then runs the twins of the kernels that the machine code names.
    pub arch: Option<GpuArch>,
}

/// Origin of the loaded kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelOrigin {
    /// Reference functions on the simulated device.
    Twins,
    /// Code compiled ahead of time.
    Prebuilt(GpuArch),
    /// The compiler, or its cached output.
    Compiled {
        /// Units read from the cache so far.
        n_cached: usize,
        /// Units compiled so far.
        n_compiled: usize,
    },
}

/// The kernels of a device. Its methods describe launches.
///
/// Describing the first launch of a kernel loads it, together with the other kernels of its unit. Loading is
/// refused during a recording. [`Kernels::prepared`] first collects all kernels that a plan needs, and
/// compiles the missing ones on all cores.
pub struct Kernels {
    entries: HashMap<String, KernelEntry>,
    card: Card,
    supply: RefCell<Supply>,
    loaded: RefCell<HashMap<String, Loaded>>,
    /// Units that are requested but not loaded, while [`Kernels::prepared`] collects them.
    missing: RefCell<Option<BTreeSet<KernelUnit>>>,
    stand_in: OnceCell<Function>,
    ctx: Context,
}

/// A kernel loaded on the device.
#[derive(Clone)]
pub(crate) struct Loaded {
    pub(crate) function: Function,
    /// The kernel waits for its dependencies inside (PDL), so it may start before they have finished.
    overlaps: bool,
}

/// First architecture with programmatic dependent launch; `overlap.cuh` compiles to nothing on older ones.
const OVERLAPS: GpuArch = GpuArch { major: 9, minor: 0 };

impl Kernels {
    /// Selects the source of kernels: the twins on a simulated device, else prebuilt code for the GPU, else
    /// cache and compiler. Fails if none serves the GPU.
    pub fn load(ctx: &Context, options: &KernelLoadOptions) -> Result<Kernels, KernelError> {
        Kernels::from_archive(ctx, options, prebuilt::embedded())
    }

    /// Like [`Kernels::load`], with an archive that [`crate::prebuild`] packed instead of the embedded one.
    ///
    /// ```compile_fail,E0133
    /// # use refrain_driver::Context;
    /// # use refrain_kernels::{KernelError, Kernels, KernelLoadOptions};
    /// fn downloaded(ctx: &Context, archive: &[u8]) -> Result<Kernels, KernelError> {
    ///     Kernels::with_archive(ctx, &KernelLoadOptions::default(), archive)
    /// }
    /// ```
    ///
    /// # Safety
    /// [`crate::prebuild`] of this exact version produced the archive, and it is unchanged. Names and
    /// parameters of its kernels are checked, but not that they access only what the launchers vouch for.
    #[allow(unsafe_code)]
    pub unsafe fn with_archive(
        ctx: &Context,
        options: &KernelLoadOptions,
        archive: &[u8],
    ) -> Result<Kernels, KernelError> {
        Kernels::from_archive(ctx, options, archive)
    }

    pub(crate) fn from_archive(
        ctx: &Context,
        options: &KernelLoadOptions,
        archive: &[u8],
    ) -> Result<Kernels, KernelError> {
        let (major, minor) = ctx.device().info().compute;
        let card = options.arch.unwrap_or(GpuArch { major, minor });
        if runs_twins(ctx, options) {
            return Ok(Kernels::of(ctx, Supply::Twins(card)));
        }
        if card.major < 8 {
            return Err(KernelError::TooOld { compute: (card.major, card.minor) });
        }
        let archive = Archive::parse(archive).unwrap_or_else(|why| {
            match why {
                Unusable::Stale => {
                    tracing::warn!("ignoring prebuilt kernels of another version")
                }
                Unusable::Damaged => tracing::warn!("ignoring damaged prebuilt kernels"),
            }
            Archive::default()
        });
        let prebuilt = archive.image_for(card).and_then(|found| {
            let image = found.ok().and_then(|(arch, bytes)| Some((arch, Image::from_bytes(&bytes)?)));
            if image.is_none() {
                tracing::warn!("the prebuilt kernels for {card} are damaged, compiling instead");
            }
            image
        });
        let supply = match prebuilt {
            Some((arch, image)) => Ok(Supply::Prebuilt { arch, image, card, options: options.clone() }),
            None => Supply::nvrtc(options, card, Tuning::of(card)),
        };
        let supply = supply.map_err(|error| match error {
            KernelError::NvrtcMissing { tried } => {
                KernelError::NoKernels { card: card.to_string(), contents: contents(&archive), tried }
            }
            error => error,
        });
        Ok(Kernels::of(ctx, supply?))
    }

    pub(crate) fn of(ctx: &Context, supply: Supply) -> Kernels {
        Kernels {
            entries: entries().into_iter().map(|entry| (entry.info.name.clone(), entry)).collect(),
            card: Card::new(ctx.device().info(), supply.tuning()),
            supply: RefCell::new(supply),
            loaded: RefCell::default(),
            missing: RefCell::default(),
            stand_in: OnceCell::new(),
            ctx: ctx.clone(),
        }
    }

    /// Runs `describe` with every kernel that it requests loaded; fails if one cannot be loaded.
    ///
    /// `describe` runs once, and its result is returned if no kernel was missing. Otherwise the result is
    /// dropped, all requested kernels are compiled on all cores and loaded, and `describe` runs again. `on_progress`
    /// receives the progress. During the first run, missing kernels are replaced by a stand-in of another
    /// device, whose launches every stream refuses.
    pub fn prepared<T, E>(
        &self,
        on_progress: &mut dyn FnMut(Compiling),
        mut describe: impl FnMut() -> Result<T, E>,
    ) -> Result<Result<T, E>, KernelError> {
        let search = Search::begin(self);
        let described = describe();
        let missing = search.end();
        // An error with some kernels missing would also occur with all of them loaded.
        if missing.is_empty() || described.is_err() {
            return Ok(described);
        }
        drop(described);
        self.load_units(&missing, on_progress)?;
        Ok(describe())
    }

    /// Loads every kernel.
    pub fn load_all(&self, on_progress: &mut dyn FnMut(Compiling)) -> Result<(), KernelError> {
        let loaded = self.loaded();
        let missing = KernelUnit::all().iter().filter(|unit| !loaded.contains(unit));
        self.load_units(&missing.copied().collect::<Vec<_>>(), on_progress)
    }

    /// Where the kernels came from.
    #[must_use]
    pub fn origin(&self) -> KernelOrigin {
        self.supply.borrow().origin()
    }

    /// Number of units in [`KernelUnit::all`] that need no compiler, because the binary or the cache has
    /// them.
    #[must_use]
    pub fn n_ready(&self) -> usize {
        self.supply.borrow().n_ready()
    }

    /// Units loaded on the device, in order.
    #[must_use]
    pub fn loaded(&self) -> Vec<KernelUnit> {
        let units =
            self.loaded.borrow().keys().map(|name| self.entries[name].info.unit).collect::<BTreeSet<_>>();
        units.into_iter().collect()
    }

    /// Starts describing a launch. It may start before its dependencies have finished if the kernel waits for
    /// them inside (`overlap.cuh`).
    pub(crate) fn launch(
        &self,
        name: &str,
        grid: impl Into<Dim>,
        block: impl Into<Dim>,
    ) -> Result<LaunchBuilder, KernelError> {
        let Loaded { function, overlaps } = self.get(name)?;
        let launch = LaunchBuilder::new(&function, grid, block);
        Ok(if overlaps { launch.pdl() } else { launch })
    }

    /// Properties of the GPU.
    pub(crate) fn card(&self) -> &Card {
        &self.card
    }

    /// Returns a kernel, loading it if necessary. While missing kernels are collected, returns a stand-in
    /// instead.
    pub(crate) fn get(&self, name: &str) -> Result<Loaded, KernelError> {
        if let Some(loaded) = self.loaded.borrow().get(name) {
            return Ok(loaded.clone());
        }
        let unknown = || DriverError::KernelMissing { module: "kernels".to_owned(), kernel: name.to_owned() };
        let unit = self.entries.get(name).ok_or_else(unknown)?.info.unit;
        if let Some(missing) = &mut *self.missing.borrow_mut() {
            missing.insert(unit);
            return Ok(Loaded { function: self.stand_in()?, overlaps: false });
        }
        self.load_units(&[unit], &mut |_| {})?;
        Ok(self.loaded.borrow().get(name).ok_or_else(unknown)?.clone())
    }

    /// Loads the kernels of these units; they are compiled side by side.
    pub fn load_units(
        &self,
        units: &[KernelUnit],
        on_progress: &mut dyn FnMut(Compiling),
    ) -> Result<(), KernelError> {
        // Checked before compiling, since the driver would refuse to load the result.
        self.ctx.refuse_while_recording("loading kernels")?;
        let mut supply = self.supply.borrow_mut();
        let refused = match self.load_code(&mut supply, units, on_progress) {
            Ok(()) => return Ok(()),
            // Neither a lost context nor a compile error goes away on a second attempt.
            Err(
                error @ (KernelError::Driver(DriverError::ContextLost { .. }) | KernelError::Compile { .. }),
            ) => {
                return Err(error);
            }
            Err(error) => error,
        };
        match supply.fall_back(&refused)? {
            true => self.load_code(&mut supply, units, on_progress),
            false => Err(refused),
        }
    }

    fn load_code(
        &self,
        supply: &mut Supply,
        units: &[KernelUnit],
        on_progress: &mut dyn FnMut(Compiling),
    ) -> Result<(), KernelError> {
        let code = supply.code(units, on_progress)?;
        let overlaps = supply.arch() >= OVERLAPS;
        units.iter().zip(code).try_for_each(|(&unit, code)| self.load_unit(unit, &code, overlaps))
    }

    #[allow(unsafe_code)]
    fn load_unit(&self, unit: KernelUnit, code: &[u8], overlaps: bool) -> Result<(), KernelError> {
        // SAFETY: the code was compiled from this crate's sources: by its build (`prebuilt`), by NVRTC, in
        // this process or for the cache, or as the caller of `with_archive` guarantees. `check` below
        // compares its parameters with those that the launchers pass.
        let module = unsafe { Module::load(&self.ctx, &unit.to_string(), code) }?;
        let mut functions = Vec::new();
        for KernelEntry { info, shared, .. } in self.entries.values().filter(|entry| entry.info.unit == unit)
        {
            let function = module.function(&info.name)?;
            check(info, &function)?;
            function.allow_shared(shared(&self.card))?;
            // After the limit, because raising it may reset the preference.
            function.prefer_shared()?;
            functions.push((info.name.clone(), Loaded { function, overlaps }));
        }
        self.loaded.borrow_mut().extend(functions);
        Ok(())
    }

    /// Returns a kernel of a simulated device, which no stream of this device accepts.
    #[allow(unsafe_code)]
    fn stand_in(&self) -> Result<Function, KernelError> {
        const NAME: &str = "stand_in";
        if let Some(function) = self.stand_in.get() {
            return Ok(function.clone());
        }
        let sim = SimDriver::new(SimOptions::default());
        sim.register_twin(Twin::new(NAME, &[], |_| Ok(())));
        let ctx = Device::simulated(&sim)?.context()?;
        // SAFETY: the simulated device runs registered functions and checks their accesses; this one makes
        // none.
        let module = unsafe { Module::load(&ctx, NAME, format!("sim\n{NAME}").as_bytes()) }?;
        let function = module.function(NAME)?;
        Ok(self.stand_in.get_or_init(|| function).clone())
    }
}

/// Collects missing units until it ends or a panic drops it.
struct Search<'a>(&'a Kernels);

impl<'a> Search<'a> {
    fn begin(kernels: &'a Kernels) -> Search<'a> {
        kernels.missing.replace(Some(BTreeSet::new()));
        Search(kernels)
    }

    fn end(self) -> Vec<KernelUnit> {
        self.0.missing.take().into_iter().flatten().collect()
    }
}

impl Drop for Search<'_> {
    fn drop(&mut self) {
        self.0.missing.take();
    }
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernels({} loaded, {:?})", self.loaded.borrow().len(), self.origin())
    }
}

/// Describes the contents of an archive.
fn contents(archive: &Archive<'_>) -> String {
    let archs: Vec<String> = archive.archs().iter().map(ToString::to_string).collect();
    match archs.as_slice() {
        [] => "no prebuilt kernels".to_owned(),
        archs => format!("prebuilt kernels for {}", archs.join(", ")),
    }
}

/// The simulated device runs machine code only on request.
fn runs_twins(ctx: &Context, options: &KernelLoadOptions) -> bool {
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

/// Registers every twin with a simulated device. Call it before [`Kernels::load`].
pub fn register_twins(sim: &SimDriver) {
    for entry in entries() {
        let body = Arc::clone(&entry.twin);
        let twin = Twin::new(&entry.info.name, &entry.info.params, move |k| body(k));
        sim.register_twin(if entry.starts_next_late { twin.starts_next_late() } else { twin });
    }
}

/// Opens a simulated device with all twins registered.
pub fn simulated(options: SimOptions) -> Result<Device, DriverError> {
    let sim = SimDriver::new(options);
    register_twins(&sim);
    Device::simulated(&sim)
}
