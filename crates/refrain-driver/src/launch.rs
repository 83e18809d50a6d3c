//! One kernel launch, described: shape, arguments, and which bytes it reads and writes.

use std::sync::Arc;

use bytemuck::Pod;

use crate::api::LaunchConfig;
use crate::error::{DriverError, WorkOrigin};
use crate::memory::{Buf, DeviceSlot, Memory};
use crate::module::Function;
use crate::shared::DeviceShared;

/// A kernel argument that is frozen when the launch is recorded.
///
/// Scalars must be wrapped in `Baked`, which states that the value is fixed for every replay. What changes from replay to
/// replay lives in a [`DeviceSlot`].
#[derive(Clone, Copy, Debug)]
pub struct Baked<T>(pub T);

/// How a launch uses a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only reads it.
    Read,
    /// Only writes it.
    Write,
    /// Reads and writes it.
    ReadWrite,
}

/// A launch, ready to be enqueued with [`crate::Queue::launch`].
///
/// Whoever built it ([`LaunchBuilder::build`]) vouched for its shape and arguments, so it is sealed: it can be enqueued,
/// cloned and inspected, not changed, and its kernel cannot be taken out of it.
///
/// ```compile_fail,E0624
/// # use refrain_driver::{Function, Launch};
/// fn kernel(launch: &Launch) -> &Function {
///     launch.function() // would be launched again with other sizes
/// }
/// ```
///
/// ```compile_fail,E0599
/// # use refrain_driver::Launch;
/// fn less_shared_memory(launch: Launch) -> Launch {
///     launch.shared(0) // the kernel relies on what its launcher asked for
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Launch {
    function: Function,
    step: Arc<str>,
    config: LaunchConfig,
    args: Vec<Arg>,
    /// Bytes touched that are no argument of their own.
    also: Vec<(Buf, Access)>,
}

/// A launch that is being described: the kernel, its shape, and its arguments in the order of the kernel's parameters.
/// It cannot be enqueued before [`LaunchBuilder::build`] has made it a [`Launch`].
#[derive(Clone, Debug)]
pub struct LaunchBuilder {
    launch: Launch,
}

#[derive(Clone, Debug)]
enum Arg {
    Buf(Buf, Access),
    Null,
    Value(Vec<u8>),
    /// A structure that holds addresses: each at its place among the bytes.
    Table(Vec<u8>, Vec<(usize, Buf, Access)>),
}

impl LaunchBuilder {
    /// A launch of `grid` blocks of `block` threads.
    #[must_use]
    pub fn new(function: &Function, grid: impl Into<Dim>, block: impl Into<Dim>) -> LaunchBuilder {
        LaunchBuilder {
            launch: Launch {
                function: function.clone(),
                step: Arc::from(""),
                config: LaunchConfig::new(grid.into().0, block.into().0),
                args: Vec::with_capacity(function.params().len()),
                also: Vec::new(),
            },
        }
    }

    /// The finished launch. Number and size of its arguments are checked against the compiled kernel when it is enqueued,
    /// and so is its shape; what the kernel does with them cannot be.
    ///
    /// ```compile_fail,E0133
    /// # use refrain_driver::{Baked, Function, Launch, LaunchBuilder};
    /// fn anywhere(poke: &Function) -> Launch {
    ///     LaunchBuilder::new(poke, 1, 1).baked(Baked(64_u64)).baked(Baked(1_u32)).build() // writes to address 64
    /// }
    /// ```
    ///
    /// # Safety
    /// Run with this shape and these arguments, any number of times, the kernel
    ///
    /// - reads and writes device and pinned memory only inside the buffers that are named here (arguments and
    ///   [`touches`](LaunchBuilder::touches)), each only as its [`Access`] says, whatever bytes they hold;
    /// - uses no more dynamic shared memory than [`shared`](LaunchBuilder::shared) asks for;
    /// - keeps the promises of [`pdl`](LaunchBuilder::pdl) where that is asked for.
    #[must_use]
    pub unsafe fn build(self) -> Launch {
        self.launch
    }

    /// Names the step it belongs to, for errors and drawings.
    #[must_use]
    pub fn step(mut self, step: impl Into<Arc<str>>) -> LaunchBuilder {
        self.launch.step = step.into();
        self
    }

    /// Dynamic shared memory per block; [`Function::allow_shared`] raises what is allowed.
    #[must_use]
    pub fn shared(mut self, bytes: u32) -> LaunchBuilder {
        self.launch.config.shared_bytes = bytes;
        self
    }

    /// Groups blocks into clusters.
    #[must_use]
    pub fn cluster(mut self, blocks: impl Into<Dim>) -> LaunchBuilder {
        self.launch.config.cluster = Some(blocks.into().0);
        self
    }

    /// All blocks are resident at once, so that the kernel may synchronise its whole grid.
    #[must_use]
    pub fn cooperative(mut self) -> LaunchBuilder {
        self.launch.config.cooperative = true;
        self
    }

    /// Programmatic dependent launch: the kernel may start before the launches it depends on have finished.
    ///
    /// The kernel promises that each of its blocks waits for them (`griddepcontrol.wait`) before it writes anything and
    /// before it reads anything that they may still be writing. A block that does neither may leave without waiting, but at
    /// least one block waits on every path: only so does the end of this launch mean the end of all before it.
    #[must_use]
    pub fn pdl(mut self) -> LaunchBuilder {
        self.launch.config.programmatic = true;
        self
    }

    /// A pointer argument that is only read.
    #[must_use]
    pub fn read(self, buf: Buf) -> LaunchBuilder {
        self.buf(buf, Access::Read)
    }

    /// A pointer argument that is only written.
    #[must_use]
    pub fn write(self, buf: Buf) -> LaunchBuilder {
        self.buf(buf, Access::Write)
    }

    /// A pointer argument that is read and written.
    #[must_use]
    pub fn read_write(self, buf: Buf) -> LaunchBuilder {
        self.buf(buf, Access::ReadWrite)
    }

    /// A pointer argument.
    #[must_use]
    pub fn buf(mut self, buf: Buf, access: Access) -> LaunchBuilder {
        self.launch.args.push(Arg::Buf(buf, access));
        self
    }

    /// A pointer argument that is null.
    #[must_use]
    pub fn null(mut self) -> LaunchBuilder {
        self.launch.args.push(Arg::Null);
        self
    }

    /// A pointer to a value that may differ at each replay.
    #[must_use]
    pub fn slot<T: Pod>(self, slot: DeviceSlot<T>) -> LaunchBuilder {
        self.buf(slot.buf(), Access::Read)
    }

    /// A pointer to such a value, which the kernel changes.
    #[must_use]
    pub fn slot_mut<T: Pod>(self, slot: DeviceSlot<T>) -> LaunchBuilder {
        self.buf(slot.buf(), Access::ReadWrite)
    }

    /// A value that is frozen here.
    #[must_use]
    pub fn baked<T: Pod>(mut self, value: Baked<T>) -> LaunchBuilder {
        self.launch.args.push(Arg::Value(bytemuck::bytes_of(&value.0).to_vec()));
        self
    }

    /// A structure that is frozen here, but for the addresses in it: each buffer's goes to the eight bytes at its place.
    ///
    /// # Panics
    /// When an address would lie outside the structure.
    #[must_use]
    pub fn table<T: Pod>(mut self, value: Baked<&T>, bufs: Vec<(usize, Buf, Access)>) -> LaunchBuilder {
        let bytes = bytemuck::bytes_of(value.0).to_vec();
        assert!(
            bufs.iter().all(|(at, ..)| at + 8 <= bytes.len()),
            "an address outside of {} bytes",
            bytes.len()
        );
        self.launch.args.push(Arg::Table(bytes, bufs));
        self
    }

    /// Declares bytes that the kernel reaches other than through an argument, so that dependencies see them.
    #[must_use]
    pub fn touches(mut self, buf: Buf, access: Access) -> LaunchBuilder {
        self.launch.also.push((buf, access));
        self
    }
}

impl Launch {
    /// Step and kernel.
    #[must_use]
    pub fn origin(&self) -> WorkOrigin {
        WorkOrigin { step: Arc::clone(&self.step), kernel: Arc::clone(self.function.name()), replay: None }
    }

    /// The buffers it names and how it uses them, arguments first.
    pub fn accesses(&self) -> impl Iterator<Item = (Buf, Access)> + '_ {
        let args = self.args.iter().flat_map(|a| {
            let (one, table) = match a {
                Arg::Buf(buf, access) => (Some((*buf, *access)), &[][..]),
                Arg::Table(_, bufs) => (None, &bufs[..]),
                Arg::Null | Arg::Value(_) => (None, &[][..]),
            };
            one.into_iter().chain(table.iter().map(|&(_, buf, access)| (buf, access)))
        });
        args.chain(self.also.iter().copied())
    }

    /// The kernel. Not public: a launch with other arguments would be one that nobody vouched for.
    pub(crate) fn function(&self) -> &Function {
        &self.function
    }

    /// The configuration, with overlap switched off where asked.
    pub(crate) fn config(&self, overlap: bool) -> LaunchConfig {
        LaunchConfig { programmatic: self.config.programmatic && overlap, ..self.config }
    }

    /// Checks everything and packs the parameters as the compiled kernel lays them out.
    pub(crate) fn pack(
        &self,
        shared: &Arc<DeviceShared>,
        memory: &Memory,
        out: &mut Vec<u8>,
    ) -> Result<(), DriverError> {
        if !Arc::ptr_eq(self.function.module().shared(), shared) {
            return Err(DriverError::ForeignDevice { what: "a kernel" });
        }
        self.check_shape(shared)?;
        let params = self.function.params();
        if params.len() != self.args.len() {
            return Err(DriverError::ParamCount {
                kernel: self.function.name().to_string(),
                step: self.step.to_string(),
                expected: params.len(),
                given: self.args.len(),
            });
        }
        out.clear();
        for (index, (param, arg)) in params.iter().zip(&self.args).enumerate() {
            let end = param.offset + param.size;
            if out.len() < end {
                out.resize(end, 0);
            }
            let address;
            let mut table;
            let bytes: &[u8] = match arg {
                Arg::Buf(buf, _) => {
                    address = memory.resolve(*buf)?.address().to_le_bytes();
                    &address
                }
                Arg::Null => &[0; 8],
                Arg::Value(bytes) => bytes,
                Arg::Table(bytes, bufs) => {
                    table = bytes.clone();
                    for (at, buf, _) in bufs {
                        let address = memory.resolve(*buf)?.address();
                        table[*at..at + 8].copy_from_slice(&address.to_le_bytes());
                    }
                    &table
                }
            };
            if bytes.len() != param.size {
                return Err(DriverError::ParamSize {
                    kernel: self.function.name().to_string(),
                    step: self.step.to_string(),
                    index,
                    expected: param.size,
                    given: bytes.len(),
                });
            }
            out[param.offset..end].copy_from_slice(bytes);
        }
        // Declared bytes are checked like arguments, so that a wrong declaration is not found by a wrong result.
        self.also.iter().try_for_each(|(buf, _)| memory.resolve(*buf).map(|_| ()))
    }

    fn check_shape(&self, shared: &DeviceShared) -> Result<(), DriverError> {
        let c = &self.config;
        let fail = |what, given, limit| {
            let (kernel, step) = (self.function.name().to_string(), self.step.to_string());
            Err(DriverError::LaunchShape { kernel, step, what, given, limit })
        };
        let product = |d: [u32; 3]| d.iter().fold(1_u64, |p, &n| p.saturating_mul(u64::from(n)));
        let threads = product(c.block);
        let limit = u64::from(self.function.max_threads().min(shared.info.max_block_threads));
        if threads == 0 || threads > limit {
            return fail("threads per block", threads, limit);
        }
        let blocks = product(c.grid);
        if blocks == 0 || c.grid[0] > i32::MAX as u32 || c.grid[1] > 65_535 || c.grid[2] > 65_535 {
            return fail("blocks", blocks, i32::MAX as u64);
        }
        if c.shared_bytes > self.function.max_shared_bytes() {
            let limit = self.function.max_shared_bytes();
            return fail("dynamic shared bytes", u64::from(c.shared_bytes), u64::from(limit));
        }
        if let Some(cluster) = c.cluster
            && (product(cluster) == 0 || cluster.iter().zip(c.grid).any(|(&n, g)| g % n != 0))
        {
            return fail(
                "a cluster that does not divide the grid: blocks per cluster",
                product(cluster),
                blocks,
            );
        }
        if c.cooperative {
            let per_sm = self.function.occupancy(threads as u32, c.shared_bytes)?;
            let resident = u64::from(per_sm) * u64::from(shared.info.n_sms);
            if blocks > resident {
                return fail("cooperative blocks", blocks, resident);
            }
        }
        Ok(())
    }
}

/// One to three extents; the missing ones are 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dim(pub [u32; 3]);

impl From<u32> for Dim {
    fn from(x: u32) -> Dim {
        Dim([x, 1, 1])
    }
}

impl From<[u32; 2]> for Dim {
    fn from([x, y]: [u32; 2]) -> Dim {
        Dim([x, y, 1])
    }
}

impl From<[u32; 3]> for Dim {
    fn from(d: [u32; 3]) -> Dim {
        Dim(d)
    }
}
