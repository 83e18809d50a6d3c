//! Description of a kernel launch: shape, arguments, and the bytes it reads and writes.

use std::sync::Arc;

use bytemuck::Pod;

use crate::api::{ConditionHandle, LaunchConfig};
use crate::error::{DriverError, WorkOrigin};
use crate::memory::{Buf, DeviceSlot, Memory};
use crate::module::Function;
use crate::shared::DeviceShared;

/// A kernel argument whose value is fixed when the launch is recorded.
///
/// Scalars must be wrapped in `Baked`, which states that every replay sees this value. A value that changes from
/// replay to replay lives in a [`DeviceSlot`].
#[derive(Clone, Copy, Debug)]
pub struct Baked<T>(pub T);

/// How a launch uses a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read only.
    Read,
    /// Written only.
    Write,
    /// Read and written.
    ReadWrite,
}

/// A launch, ready to be enqueued with [`crate::Queue::launch`].
///
/// Building it ([`LaunchBuilder::build`]) vouched for its shape and arguments, so it is sealed: it can be enqueued,
/// cloned and inspected, but neither changed nor stripped of its kernel.
///
/// ```compile_fail,E0624
/// # use refrain_driver::{Function, Launch};
/// fn kernel(launch: &Launch) -> &Function {
///     launch.function() // could be launched again with other sizes
/// }
/// ```
///
/// ```compile_fail,E0599
/// # use refrain_driver::Launch;
/// fn less_shared_memory(launch: Launch) -> Launch {
///     launch.shared(0) // the kernel relies on the shared memory that its launcher requested
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Launch {
    function: Function,
    step: Arc<str>,
    config: LaunchConfig,
    args: Vec<LaunchArg>,
    /// Bytes accessed other than through an argument.
    extra: Vec<(Buf, Access)>,
}

/// Builder of a launch: the kernel, its shape, and its arguments in the order of the kernel's parameters. It cannot
/// be enqueued until [`LaunchBuilder::build`] has turned it into a [`Launch`].
#[derive(Clone, Debug)]
pub struct LaunchBuilder {
    launch: Launch,
}

#[derive(Clone, Debug)]
enum LaunchArg {
    Buf(Buf, Access),
    Null,
    /// The condition of the loop that the launch is recorded in.
    Condition,
    Value(Vec<u8>),
    /// A struct that holds addresses, each at a byte offset.
    Table(Vec<u8>, Vec<(usize, Buf, Access)>),
}

impl LaunchBuilder {
    /// Starts a launch of `grid` blocks of `block` threads.
    #[must_use]
    pub fn new(function: &Function, grid: impl Into<Dim>, block: impl Into<Dim>) -> LaunchBuilder {
        LaunchBuilder {
            launch: Launch {
                function: function.clone(),
                step: Arc::from(""),
                config: LaunchConfig::new(grid.into().0, block.into().0),
                args: Vec::with_capacity(function.params().len()),
                extra: Vec::new(),
            },
        }
    }

    /// Finishes the launch. The number and sizes of its arguments and its shape are checked against the compiled
    /// kernel when it is enqueued; what the kernel does with them cannot be checked.
    ///
    /// ```compile_fail,E0133
    /// # use refrain_driver::{Baked, Function, Launch, LaunchBuilder};
    /// fn anywhere(poke: &Function) -> Launch {
    ///     LaunchBuilder::new(poke, 1, 1).baked(Baked(64_u64)).baked(Baked(1_u32)).build() // writes to address 64
    /// }
    /// ```
    ///
    /// # Safety
    /// Whenever it runs with this shape and these arguments, the kernel
    ///
    /// - accesses device and pinned memory only inside the buffers named here (arguments and
    ///   [`touches`](LaunchBuilder::touches)), each only as its [`Access`] allows, whatever bytes they hold;
    /// - uses no more dynamic shared memory than requested with [`shared`](LaunchBuilder::shared);
    /// - meets the obligations of [`pdl`](LaunchBuilder::pdl), if that is set.
    #[must_use]
    pub unsafe fn build(self) -> Launch {
        self.launch
    }

    /// Names the step that it belongs to, for errors and drawings.
    #[must_use]
    pub fn step(mut self, step: impl Into<Arc<str>>) -> LaunchBuilder {
        self.launch.step = step.into();
        self
    }

    /// Sets the dynamic shared memory per block; [`Function::allow_shared`] raises the limit.
    #[must_use]
    pub fn shared(mut self, bytes: u32) -> LaunchBuilder {
        self.launch.config.shared_bytes = bytes;
        self
    }

    /// Groups blocks into clusters of this size.
    #[must_use]
    pub fn cluster(mut self, blocks: impl Into<Dim>) -> LaunchBuilder {
        self.launch.config.cluster = Some(blocks.into().0);
        self
    }

    /// Requires all blocks to be resident at once, so that the kernel may synchronise its grid.
    #[must_use]
    pub fn cooperative(mut self) -> LaunchBuilder {
        self.launch.config.cooperative = true;
        self
    }

    /// Allows programmatic dependent launch: the kernel may start before the launches that it depends on have
    /// finished.
    ///
    /// In return, each block must wait for them (`griddepcontrol.wait`) before it writes anything and before it
    /// reads anything that they may still be writing. A block that does neither may exit without waiting, but on
    /// every path at least one block must wait. Only then does the end of this launch imply the end of every launch
    /// before it.
    #[must_use]
    pub fn pdl(mut self) -> LaunchBuilder {
        self.launch.config.programmatic = true;
        self
    }

    /// Adds a pointer argument that the kernel only reads.
    #[must_use]
    pub fn read(self, buf: Buf) -> LaunchBuilder {
        self.buf(buf, Access::Read)
    }

    /// Adds a pointer argument that the kernel only writes.
    #[must_use]
    pub fn write(self, buf: Buf) -> LaunchBuilder {
        self.buf(buf, Access::Write)
    }

    /// Adds a pointer argument that the kernel reads and writes.
    #[must_use]
    pub fn read_write(self, buf: Buf) -> LaunchBuilder {
        self.buf(buf, Access::ReadWrite)
    }

    /// Adds a pointer argument.
    #[must_use]
    pub fn buf(mut self, buf: Buf, access: Access) -> LaunchBuilder {
        self.launch.args.push(LaunchArg::Buf(buf, access));
        self
    }

    /// Adds a null pointer argument.
    #[must_use]
    pub fn null(mut self) -> LaunchBuilder {
        self.launch.args.push(LaunchArg::Null);
        self
    }

    /// Adds the condition of the loop that the launch is recorded in ([`crate::Stream::record_loop`]), as 64 bits for
    /// `cudaGraphSetConditional`. Everywhere else the kernel gets 0 and must set nothing.
    #[must_use]
    pub fn condition(mut self) -> LaunchBuilder {
        self.launch.args.push(LaunchArg::Condition);
        self
    }

    /// Adds a pointer to a value that may change between replays.
    #[must_use]
    pub fn slot<T: Pod>(self, slot: DeviceSlot<T>) -> LaunchBuilder {
        self.buf(slot.buf(), Access::Read)
    }

    /// Adds a pointer to such a value, which the kernel also modifies.
    #[must_use]
    pub fn slot_mut<T: Pod>(self, slot: DeviceSlot<T>) -> LaunchBuilder {
        self.buf(slot.buf(), Access::ReadWrite)
    }

    /// Adds a scalar whose value is fixed here.
    #[must_use]
    pub fn baked<T: Pod>(mut self, value: Baked<T>) -> LaunchBuilder {
        self.launch.args.push(LaunchArg::Value(bytemuck::bytes_of(&value.0).to_vec()));
        self
    }

    /// Adds a struct whose bytes are fixed here, except for addresses: each buffer's address is written to the 8
    /// bytes at its offset.
    ///
    /// # Panics
    /// If an address would lie outside the struct.
    #[must_use]
    pub fn table<T: Pod>(mut self, value: Baked<&T>, bufs: Vec<(usize, Buf, Access)>) -> LaunchBuilder {
        let bytes = bytemuck::bytes_of(value.0).to_vec();
        assert!(
            bufs.iter().all(|(offset, ..)| offset + 8 <= bytes.len()),
            "an address lies outside the struct of {} bytes",
            bytes.len()
        );
        self.launch.args.push(LaunchArg::Table(bytes, bufs));
        self
    }

    /// Declares bytes that the kernel accesses other than through an argument, so that dependencies include them.
    #[must_use]
    pub fn touches(mut self, buf: Buf, access: Access) -> LaunchBuilder {
        self.launch.extra.push((buf, access));
        self
    }
}

impl Launch {
    /// The launch's step and kernel.
    #[must_use]
    pub fn origin(&self) -> WorkOrigin {
        WorkOrigin { step: Arc::clone(&self.step), kernel: Arc::clone(self.function.name()), replay: None }
    }

    /// The buffers that it names and how it uses them, arguments first.
    pub fn accesses(&self) -> impl Iterator<Item = (Buf, Access)> + '_ {
        let args = self.args.iter().flat_map(|a| {
            let (one, table) = match a {
                LaunchArg::Buf(buf, access) => (Some((*buf, *access)), &[][..]),
                LaunchArg::Table(_, bufs) => (None, &bufs[..]),
                LaunchArg::Null | LaunchArg::Condition | LaunchArg::Value(_) => (None, &[][..]),
            };
            one.into_iter().chain(table.iter().map(|&(_, buf, access)| (buf, access)))
        });
        args.chain(self.extra.iter().copied())
    }

    /// The kernel. Not public, since nobody vouched for launching it with other arguments.
    pub(crate) fn function(&self) -> &Function {
        &self.function
    }

    /// Whether it gets the condition of a loop.
    pub(crate) fn takes_condition(&self) -> bool {
        self.args.iter().any(|arg| matches!(arg, LaunchArg::Condition))
    }

    /// The launch configuration; without `overlap`, programmatic launch is off.
    pub(crate) fn config(&self, overlap: bool) -> LaunchConfig {
        LaunchConfig { programmatic: self.config.programmatic && overlap, ..self.config }
    }

    /// Checks the launch and packs its parameters as the compiled kernel lays them out.
    pub(crate) fn pack(
        &self,
        shared: &Arc<DeviceShared>,
        memory: &Memory,
        condition: Option<ConditionHandle>,
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
                LaunchArg::Buf(buf, _) => {
                    address = memory.resolve(*buf)?.address().to_le_bytes();
                    &address
                }
                LaunchArg::Null => &[0; 8],
                LaunchArg::Condition => {
                    address = condition.map_or(0, |c| c.0).to_le_bytes();
                    &address
                }
                LaunchArg::Value(bytes) => bytes,
                LaunchArg::Table(bytes, bufs) => {
                    table = bytes.clone();
                    for (offset, buf, _) in bufs {
                        let address = memory.resolve(*buf)?.address();
                        table[*offset..offset + 8].copy_from_slice(&address.to_le_bytes());
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
        // Declared bytes are checked like arguments: a wrong declaration should not first show as a wrong result.
        self.extra.iter().try_for_each(|(buf, _)| memory.resolve(*buf).map(|_| ()))
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
                "a cluster size that does not divide the grid: blocks per cluster",
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

/// One to three extents; missing ones are 1.
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
