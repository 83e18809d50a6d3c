//! Functions of modules: attributes and launch checks.

use std::collections::HashMap;
use std::sync::Arc;

use super::kernels::Twin;
use super::ops::KernelOp;
use super::state::SimState;
use crate::api::{Code, CtxHandle, FunctionAttribute, FunctionHandle, LaunchConfig, ModuleHandle, RawResult};

pub(super) const SHARED_BLOCK_BYTES: u32 = 227 * 1024;
pub(super) const SHARED_SM_BYTES: u32 = 228 * 1024;
pub(super) const N_SMS: u32 = 132;
pub(super) const MAX_BLOCK_THREADS: u32 = 1024;
const MAX_SM_THREADS: u32 = 2048;
/// `CUDA_ERROR_INVALID_CLUSTER_SIZE`.
const INVALID_CLUSTER_SIZE: Code = Code(912);

/// A kernel of a loaded module.
pub(super) struct SimFunction {
    pub(super) module: ModuleHandle,
    pub(super) ctx: CtxHandle,
    pub(super) twin: Arc<Twin>,
    attributes: HashMap<FunctionAttribute, i32>,
}

impl SimFunction {
    pub(super) fn attribute(&self, attribute: FunctionAttribute) -> i32 {
        if let Some(&value) = self.attributes.get(&attribute) {
            return value;
        }
        match attribute {
            FunctionAttribute::MaxThreadsPerBlock => MAX_BLOCK_THREADS as i32,
            FunctionAttribute::StaticSharedBytes => self.twin.static_shared_bytes as i32,
            FunctionAttribute::LocalBytes | FunctionAttribute::NonPortableClusterSize => 0,
            FunctionAttribute::Registers => 32,
            FunctionAttribute::BinaryVersion => 90,
            FunctionAttribute::MaxDynamicSharedBytes => 48 * 1024,
            FunctionAttribute::PreferredSharedCarveout => -1,
        }
    }

    pub(super) fn set_attribute(
        &mut self,
        attribute: FunctionAttribute,
        value: i32,
        shared_block_bytes: u32,
    ) -> RawResult<()> {
        let most_shared = shared_block_bytes.saturating_sub(self.twin.static_shared_bytes) as i32;
        let legal = match attribute {
            FunctionAttribute::MaxDynamicSharedBytes => (0..=most_shared).contains(&value),
            FunctionAttribute::PreferredSharedCarveout => (-1..=100).contains(&value),
            FunctionAttribute::NonPortableClusterSize => (0..=1).contains(&value),
            _ => false,
        };
        if !legal {
            return Err(Code::INVALID_VALUE);
        }
        self.attributes.insert(attribute, value);
        Ok(())
    }

    fn check_launch(&self, config: &LaunchConfig) -> RawResult<()> {
        let product = |d: [u32; 3]| d.iter().map(|&n| u64::from(n)).product::<u64>();
        let block_threads = product(config.block);
        let limit = self.attribute(FunctionAttribute::MaxDynamicSharedBytes) as u32;
        let fits = (1..=u64::from(MAX_BLOCK_THREADS)).contains(&block_threads)
            && config.block[2] <= 64
            && product(config.grid) > 0
            && config.grid[0] <= i32::MAX as u32
            && config.grid[1].max(config.grid[2]) <= 65535
            && config.shared_bytes <= limit;
        if !fits {
            return Err(Code::INVALID_VALUE);
        }
        if let Some(cluster) = config.cluster {
            let wide = self.attribute(FunctionAttribute::NonPortableClusterSize) == 1;
            let size = product(cluster);
            let tiles = (0..3).all(|i| cluster[i] > 0 && config.grid[i].is_multiple_of(cluster[i]));
            if !tiles || size > if wide { 16 } else { 8 } {
                return Err(INVALID_CLUSTER_SIZE);
            }
        }
        let resident = u64::from(blocks_per_sm(block_threads as u32, config.shared_bytes)) * u64::from(N_SMS);
        if config.cooperative && product(config.grid) > resident {
            return Err(Code::COOPERATIVE_LAUNCH_TOO_LARGE);
        }
        Ok(())
    }
}

/// Number of such blocks that fit on one SM.
pub(super) fn blocks_per_sm(block_threads: u32, shared_bytes: u32) -> u32 {
    let by_threads = MAX_SM_THREADS / block_threads.max(1).next_multiple_of(32);
    // The system reserves one kilobyte of shared memory per block.
    by_threads.min(SHARED_SM_BYTES / shared_bytes.saturating_add(1024)).min(32)
}

impl SimState {
    pub(super) fn function(&self, handle: FunctionHandle) -> RawResult<&SimFunction> {
        self.functions.get(&handle).ok_or(Code::INVALID_HANDLE)
    }

    /// Builds a launch after checking it against the function's limits and parameter layout.
    pub(super) fn kernel_op(
        &self,
        function: FunctionHandle,
        config: &LaunchConfig,
        params: &[u8],
    ) -> RawResult<(CtxHandle, KernelOp)> {
        let f = self.function(function)?;
        f.check_launch(config)?;
        if params.len() != f.twin.param_bytes {
            return Err(Code::INVALID_VALUE);
        }
        let op = KernelOp { twin: f.twin.clone(), module: f.module, config: *config, params: params.into() };
        Ok((f.ctx, op))
    }

    /// Looks up a kernel that the module's image contains and that has a registered twin.
    pub(super) fn find_function(&mut self, module: ModuleHandle, name: &str) -> RawResult<FunctionHandle> {
        let found = self.modules.get(&module).ok_or(Code::INVALID_HANDLE)?;
        let ctx = found.ctx;
        let entry = found.entries.iter().find(|e| e.name == name).ok_or(Code::NOT_FOUND)?.clone();
        let Some(twin) = self.twins.get(name).cloned() else {
            self.report(format!("kernel {name} has no registered twin"));
            return Err(Code::NOT_FOUND);
        };
        let twin_sizes: Vec<usize> = twin.params.iter().map(|p| p.size).collect();
        if let Some(sizes) = entry.param_sizes.filter(|sizes| *sizes != twin_sizes) {
            self.report(format!(
                "kernel {name} has parameters of {sizes:?} bytes, but its twin has {twin_sizes:?}"
            ));
            return Err(Code::INVALID_IMAGE);
        }
        let handle = FunctionHandle(self.handle());
        self.functions.insert(handle, SimFunction { module, ctx, twin, attributes: HashMap::new() });
        if let Some(m) = self.modules.get_mut(&module) {
            m.functions.push(handle);
        }
        Ok(handle)
    }
}
