//! Modules and their kernels.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::api::{Code, FunctionAttribute, FunctionHandle, ModuleHandle, ParamInfo};
use crate::device::Context;
use crate::error::DriverError;
use crate::shared::{DeviceShared, Garbage};

/// Code loaded on the device. Its [`Function`]s, and every graph that launches one, keep it alive.
pub struct Module {
    shared: Arc<DeviceShared>,
    handle: ModuleHandle,
    name: String,
}

impl Module {
    /// Loads a cubin, a fatbin or PTX text. Refused during a recording.
    ///
    /// # Safety
    /// `image` is unmodified compiler output for the device, since the driver does not check machine code. The
    /// behaviour of its kernels is vouched for separately for each launch ([`crate::LaunchBuilder::build`]).
    pub unsafe fn load(ctx: &Context, name: &str, image: &[u8]) -> Result<Arc<Module>, DriverError> {
        let shared = ctx.shared();
        shared.refuse_while_recording("module load", image.len() as u64)?;
        let handle = shared.raw(|api| api.module_load(image))?.map_err(|code| {
            if code.is_sticky() {
                shared.fail("cuModuleLoadData", code)
            } else {
                DriverError::ModuleLoad { module: name.to_owned(), code }
            }
        })?;
        Ok(Arc::new(Module { shared: Arc::clone(shared), handle, name: name.to_owned() }))
    }

    /// Looks up a kernel and loads it completely, so that nothing is left to load lazily at the first launch.
    pub fn function(self: &Arc<Self>, name: &str) -> Result<Function, DriverError> {
        let shared = &self.shared;
        shared.refuse_while_recording("function lookup", 0)?;
        let handle =
            shared.raw(|api| api.module_function(self.handle, name))?.map_err(|code| match code {
                Code::NOT_FOUND => {
                    DriverError::KernelMissing { module: self.name.clone(), kernel: name.to_owned() }
                }
                code => shared.fail("cuModuleGetFunction", code),
            })?;
        let params = shared.call("cuFuncGetParamInfo", |api| api.function_params(handle))?;
        let attribute = |a| shared.call("cuFuncGetAttribute", |api| api.function_attribute(handle, a));
        let max_threads = attribute(FunctionAttribute::MaxThreadsPerBlock)?;
        let max_shared = attribute(FunctionAttribute::MaxDynamicSharedBytes)?;
        let static_shared = attribute(FunctionAttribute::StaticSharedBytes)?;
        Ok(Function {
            inner: Arc::new(FunctionInner {
                module: Arc::clone(self),
                handle,
                name: Arc::from(name),
                params,
                max_threads: u32::try_from(max_threads).unwrap_or(0),
                static_shared: u32::try_from(static_shared).unwrap_or(0),
                max_shared: AtomicU32::new(u32::try_from(max_shared).unwrap_or(0)),
            }),
        })
    }

    /// The name under which it was loaded.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn shared(&self) -> &Arc<DeviceShared> {
        &self.shared
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        self.shared.discard(Garbage::Module(self.handle));
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Module {:?}", self.name)
    }
}

/// A kernel with its properties. Cheap to clone. Launching it takes [`crate::LaunchBuilder::build`], which is
/// `unsafe`.
#[derive(Clone)]
pub struct Function {
    inner: Arc<FunctionInner>,
}

struct FunctionInner {
    module: Arc<Module>,
    handle: FunctionHandle,
    name: Arc<str>,
    params: Vec<ParamInfo>,
    max_threads: u32,
    static_shared: u32,
    max_shared: AtomicU32,
}

impl Function {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &Arc<str> {
        &self.inner.name
    }

    /// Its module.
    #[must_use]
    pub fn module(&self) -> &Arc<Module> {
        &self.inner.module
    }

    /// Its parameters as compiled.
    #[must_use]
    pub fn params(&self) -> &[ParamInfo] {
        &self.inner.params
    }

    /// Maximum threads per block.
    #[must_use]
    pub fn max_threads(&self) -> u32 {
        self.inner.max_threads
    }

    /// Current limit of dynamic shared memory per launch, in bytes.
    #[must_use]
    pub fn max_shared_bytes(&self) -> u32 {
        self.inner.max_shared.load(Ordering::Relaxed)
    }

    /// Raises the limit of dynamic shared memory per launch. Part of the warm-up; refused during a recording.
    pub fn allow_shared(&self, bytes: u32) -> Result<(), DriverError> {
        let shared = self.inner.module.shared();
        shared.refuse_while_recording("setting a function attribute", u64::from(bytes))?;
        let limit = shared.info.shared_block_bytes.saturating_sub(self.inner.static_shared);
        if bytes > limit {
            return Err(DriverError::LaunchShape {
                kernel: self.name().to_string(),
                step: String::new(),
                what: "dynamic shared bytes",
                given: u64::from(bytes),
                limit: u64::from(limit),
            });
        }
        if bytes > self.max_shared_bytes() {
            self.set(FunctionAttribute::MaxDynamicSharedBytes, bytes as i32)?;
            self.inner.max_shared.store(bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Sets the preferred carveout to the maximum shared memory. Kernels with different carveouts cannot share an
    /// SM: the next kernel waits until the previous one has left it, even if it may start early (PDL).
    pub fn prefer_shared(&self) -> Result<(), DriverError> {
        self.inner.module.shared().refuse_while_recording("setting a function attribute", 0)?;
        self.set(FunctionAttribute::PreferredSharedCarveout, 100)
    }

    /// Number of blocks of a given size that fit on one SM.
    pub fn occupancy(&self, block_threads: u32, shared_bytes: u32) -> Result<u32, DriverError> {
        let shared = self.inner.module.shared();
        shared.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", |api| {
            api.occupancy(self.inner.handle, block_threads, shared_bytes)
        })
    }

    /// Queries an attribute from the driver.
    pub fn attribute(&self, attribute: FunctionAttribute) -> Result<i32, DriverError> {
        let shared = self.inner.module.shared();
        shared.call("cuFuncGetAttribute", |api| api.function_attribute(self.inner.handle, attribute))
    }

    fn set(&self, attribute: FunctionAttribute, value: i32) -> Result<(), DriverError> {
        let shared = self.inner.module.shared();
        shared
            .call("cuFuncSetAttribute", |api| api.function_set_attribute(self.inner.handle, attribute, value))
    }

    pub(crate) fn handle(&self) -> FunctionHandle {
        self.inner.handle
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Function {:?} of {:?}", &*self.inner.name, self.inner.module.name)
    }
}
