//! Kernels as reference functions, which a launch runs instead of machine code.

use std::borrow::Cow;
use std::cell::RefCell;
use std::sync::atomic::Ordering;

use bytemuck::Pod;

use super::memory::{Fault, SimLocation, SimMemory, read_pinned};
use super::races::{AccessLog, SimAccess};
use crate::api::{Code, ConditionHandle, DevicePtr, HostPtr, LaunchConfig, ParamInfo};

/// Result of a twin. The first fault ends the kernel, as on a GPU.
pub type KernelResult<T = ()> = Result<T, Fault>;

type TwinBody = dyn Fn(&mut SimKernel<'_>) -> KernelResult + Send + Sync;

/// A reference function that runs when the kernel of that name is launched.
pub struct Twin {
    pub(super) name: String,
    pub(super) params: Vec<ParamInfo>,
    pub(super) param_bytes: usize,
    pub(super) waits: bool,
    pub(super) starts_next_late: bool,
    pub(super) static_shared_bytes: u32,
    pub(super) body: Box<TwinBody>,
}

impl Twin {
    /// Creates a twin with parameters of these sizes, each aligned to the largest power of two that divides its
    /// size, up to
    /// 8.
    pub fn new(
        name: &str,
        param_sizes: &[usize],
        body: impl Fn(&mut SimKernel<'_>) -> KernelResult + Send + Sync + 'static,
    ) -> Twin {
        let mut end = 0;
        let params = param_sizes
            .iter()
            .map(|&size| {
                let align = (1usize << size.trailing_zeros().min(3)).min(size.max(1));
                let offset = usize::next_multiple_of(end, align);
                end = offset + size;
                ParamInfo { offset, size }
            })
            .collect();
        Twin {
            name: name.to_owned(),
            params,
            param_bytes: end,
            waits: true,
            starts_next_late: false,
            static_shared_bytes: 0,
            body: Box::new(body),
        }
    }

    /// Declares that the kernel never waits for its predecessors when launched programmatically, so all of it may
    /// run early.
    #[must_use]
    pub fn never_waits(mut self) -> Twin {
        self.waits = false;
        self
    }

    /// Declares that the kernel lets its successor start only after its own wait, so the successor finds everything
    /// before this kernel complete.
    #[must_use]
    pub fn starts_next_late(mut self) -> Twin {
        self.starts_next_late = true;
        self
    }

    /// Sets the kernel's static shared memory in bytes, as its attribute reports it.
    #[must_use]
    pub fn static_shared_bytes(mut self, bytes: u32) -> Twin {
        self.static_shared_bytes = bytes;
        self
    }
}

/// A launch as its twin sees it: parameters, shape and checked memory access.
///
/// Every access is checked against live allocations and logged, so that unordered launches over the same bytes are
/// found. An out-of-bounds access returns a [`Fault`]; the context is lost even if the twin does not propagate it.
pub struct SimKernel<'a> {
    name: &'a str,
    config: &'a LaunchConfig,
    params: &'a [u8],
    layout: &'a [ParamInfo],
    memory: &'a mut SimMemory,
    log: RefCell<AccessLog>,
    fault: RefCell<Option<Fault>>,
    conditions: Vec<(ConditionHandle, u32)>,
    early: bool,
}

impl<'a> SimKernel<'a> {
    pub(super) fn new(
        twin: &'a Twin,
        config: &'a LaunchConfig,
        params: &'a [u8],
        memory: &'a mut SimMemory,
    ) -> SimKernel<'a> {
        SimKernel {
            name: &twin.name,
            config,
            params,
            layout: &twin.params,
            memory,
            log: RefCell::default(),
            fault: RefCell::default(),
            conditions: Vec::new(),
            early: !twin.waits,
        }
    }

    pub(super) fn finish(self) -> (AccessLog, Option<Fault>, Vec<(ConditionHandle, u32)>) {
        (self.log.into_inner(), self.fault.into_inner(), self.conditions)
    }

    /// Sets the condition of a loop, as `cudaGraphSetConditional` does. The loop reads it when its body has ended.
    pub fn set_condition(&mut self, handle: u64, value: u32) {
        self.conditions.push((ConditionHandle(handle), value));
    }

    /// The kernel's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.name
    }

    /// The launch configuration.
    #[must_use]
    pub fn config(&self) -> &LaunchConfig {
        self.config
    }

    /// Returns the `i`-th parameter.
    ///
    /// # Errors
    /// If there is no such parameter or its size differs, which is a mistake in the twin.
    pub fn arg<T: Pod>(&self, i: usize) -> KernelResult<T> {
        let info = self.layout.get(i).filter(|info| info.size == size_of::<T>());
        let bytes = info.and_then(|info| self.params.get(info.offset..info.offset + info.size));
        bytes.map(bytemuck::pod_read_unaligned).ok_or_else(|| {
            self.record(Fault::new(
                Code::LAUNCH_FAILED,
                format!(
                    "the twin reads parameter {i} as {} bytes, but it is {:?}",
                    size_of::<T>(),
                    self.layout.get(i)
                ),
            ))
        })
    }

    /// Returns the `i`-th parameter as an address.
    ///
    /// # Errors
    /// If it is not an 8-byte parameter.
    pub fn ptr(&self, i: usize) -> KernelResult<DevicePtr> {
        self.arg(i).map(DevicePtr)
    }

    /// Reads `n` elements at `ptr`, borrowed if they are in device memory.
    ///
    /// # Errors
    /// A fault if they do not lie within one live allocation, or if `ptr` is not aligned for `T`.
    pub fn view<T: Pod>(&self, ptr: DevicePtr, n: usize) -> KernelResult<Cow<'_, [T]>> {
        if n == 0 {
            return Ok(Cow::Borrowed(&[]));
        }
        match self.check::<T>(ptr, n, false)? {
            SimLocation::Device { start, offset } => {
                let bytes = &self.memory.device(start)[offset..offset + n * size_of::<T>()];
                Ok(match bytemuck::try_cast_slice(bytes) {
                    Ok(slice) => Cow::Borrowed(slice),
                    Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(bytes)),
                })
            }
            SimLocation::Pinned { addr } => {
                let mut out = vec![T::zeroed(); n];
                read_pinned(addr, bytemuck::cast_slice_mut(&mut out));
                Ok(Cow::Owned(out))
            }
        }
    }

    /// Reads `n` elements at `ptr` into a vector.
    ///
    /// # Errors
    /// As [`SimKernel::view`].
    pub fn read<T: Pod>(&self, ptr: DevicePtr, n: usize) -> KernelResult<Vec<T>> {
        self.view(ptr, n).map(Cow::into_owned)
    }

    /// Reads the element at `ptr`.
    ///
    /// # Errors
    /// As [`SimKernel::view`].
    pub fn read_one<T: Pod>(&self, ptr: DevicePtr) -> KernelResult<T> {
        self.view::<T>(ptr, 1).map(|v| v[0])
    }

    /// Writes elements at `ptr`.
    ///
    /// # Errors
    /// As [`SimKernel::view`]; then nothing is written.
    pub fn write<T: Pod>(&mut self, ptr: DevicePtr, values: &[T]) -> KernelResult {
        if values.is_empty() {
            return Ok(());
        }
        self.check::<T>(ptr, values.len(), true)?;
        self.memory.write(ptr.0, bytemuck::cast_slice(values))
    }

    /// Writes one element at `ptr`.
    ///
    /// # Errors
    /// As [`SimKernel::write`].
    pub fn write_one<T: Pod>(&mut self, ptr: DevicePtr, value: T) -> KernelResult {
        self.write(ptr, &[value])
    }

    /// Reads `n` elements, applies `change` and writes them back.
    ///
    /// # Errors
    /// As [`SimKernel::view`].
    pub fn update<T: Pod>(
        &mut self,
        ptr: DevicePtr,
        n: usize,
        change: impl FnOnce(&mut [T]),
    ) -> KernelResult {
        let mut values = self.read::<T>(ptr, n)?;
        change(&mut values);
        self.write(ptr, &values)
    }

    /// Loads 64 bits with acquire, to synchronise with a release store of the host or another kernel.
    ///
    /// # Errors
    /// As [`SimKernel::view`].
    pub fn load_acquire_u64(&self, ptr: DevicePtr) -> KernelResult<u64> {
        match self.check::<u64>(ptr, 1, false)? {
            SimLocation::Device { .. } => self.read_one(ptr),
            SimLocation::Pinned { addr } => {
                // SAFETY: the word was located in live pinned memory and is aligned; host and device access such
                // memory only through `pinned`.
                Ok(unsafe { crate::pinned::word(HostPtr(addr)) }.load(Ordering::Acquire))
            }
        }
    }

    /// Stores 64 bits with release, such as a ring's sequence number in pinned memory. Earlier writes are visible
    /// to whoever loads the value with acquire.
    ///
    /// # Errors
    /// As [`SimKernel::write`].
    pub fn store_release_u64(&mut self, ptr: DevicePtr, value: u64) -> KernelResult {
        match self.check::<u64>(ptr, 1, true)? {
            SimLocation::Device { .. } => return self.memory.write(ptr.0, &value.to_ne_bytes()),
            SimLocation::Pinned { addr } => {
                // SAFETY: as in `load_acquire_u64`.
                unsafe { crate::pinned::word(HostPtr(addr)) }.store(value, Ordering::Release);
            }
        }
        Ok(())
    }

    /// Runs the part of the kernel before it waits for its programmatic dependencies.
    ///
    /// A twin that does not call this waits at its very start. Accesses of `early` are checked against all accesses
    /// of the launches that it depends on.
    ///
    /// # Errors
    /// The errors of `early`.
    pub fn before_wait<T>(&mut self, early: impl FnOnce(&mut Self) -> KernelResult<T>) -> KernelResult<T> {
        let was = std::mem::replace(&mut self.early, true);
        let result = early(self);
        self.early = was;
        result
    }

    fn check<T>(&self, ptr: DevicePtr, n: usize, write: bool) -> KernelResult<SimLocation> {
        let doing = if write { "writes" } else { "reads" };
        let bytes = (n as u64).checked_mul(size_of::<T>() as u64);
        let place = match bytes {
            Some(_) if !ptr.0.is_multiple_of(align_of::<T>() as u64) => Err(Fault::new(
                Code::MISALIGNED_ADDRESS,
                format!("address {:#x} is not aligned to {} bytes", ptr.0, align_of::<T>()),
            )),
            Some(bytes) => self.memory.locate(ptr.0, bytes),
            None => Err(Fault::new(Code::ILLEGAL_ADDRESS, format!("{n} elements do not fit in memory"))),
        };
        match place {
            Ok(place) => {
                let end = ptr.0 + bytes.unwrap_or(0);
                self.log.borrow_mut().push(SimAccess { start: ptr.0, end, write, early: self.early });
                Ok(place)
            }
            Err(fault) => Err(self.record(Fault::new(
                fault.code,
                format!("kernel {} {doing} out of bounds: {}", self.name, fault.what),
            ))),
        }
    }

    fn record(&self, fault: Fault) -> Fault {
        self.fault.borrow_mut().get_or_insert_with(|| fault.clone());
        fault
    }
}
