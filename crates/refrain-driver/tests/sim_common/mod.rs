//! A simulated device with a context, a stream and a few kernels, for the tests of the simulation.

#![allow(dead_code, reason = "each test file uses its part")]

use std::sync::Arc;

use refrain_driver::api::{
    Api, Code, CtxHandle, DevicePtr, EventHandle, FunctionHandle, LaunchConfig, ModuleHandle, RawResult,
    StreamHandle, StreamKind,
};
use refrain_driver::sim::{FaultScript, SimDriver, SimOptions, SimSchedule, Twin};

/// `fill(dst, value, n)`, `add(dst, a, b, n)`, `early(dst, src, n)` which reads `src` before its dependency wait,
/// `late(dst, value, n)` which lets its successor start only after its own wait, and `rude(dst, value, n)` which
/// never waits.
pub(crate) const IMAGE: &[u8] = b"sim\nfill\nadd\nearly\nlate\nrude\nassert\npanic";

pub(crate) const PLAIN: LaunchConfig = LaunchConfig::new([1, 1, 1], [32, 1, 1]);
pub(crate) const PROGRAMMATIC: LaunchConfig = LaunchConfig { programmatic: true, ..PLAIN };

pub(crate) struct Bench {
    /// The raw interface of `driver`.
    pub(crate) sim: Arc<dyn Api>,
    pub(crate) driver: SimDriver,
    pub(crate) ctx: CtxHandle,
    pub(crate) module: ModuleHandle,
    pub(crate) s: StreamHandle,
}

pub(crate) fn options(schedule: SimSchedule) -> SimOptions {
    SimOptions { seed: 7, schedule, strict: false, memory_bytes: 16 << 20, ..SimOptions::default() }
}

pub(crate) fn script(text: &str) -> FaultScript {
    FaultScript::parse(text).expect("a fault script")
}

pub(crate) fn register(sim: &SimDriver) {
    let fill = |k: &mut refrain_driver::sim::SimKernel<'_>| {
        let (dst, value, n) = (k.ptr(0)?, k.arg::<u32>(1)?, k.arg::<u32>(2)?);
        k.write(dst, &vec![value; n as usize])
    };
    sim.register("fill", &[8, 4, 4], fill);
    sim.register_twin(Twin::new("rude", &[8, 4, 4], fill).never_waits());
    sim.register_twin(Twin::new("late", &[8, 4, 4], fill).starts_next_late());
    sim.register("add", &[8, 8, 8, 4], |k| {
        let n = k.arg::<u32>(3)? as usize;
        let sum: Vec<u32> = {
            let (a, b) = (k.view::<u32>(k.ptr(1)?, n)?, k.view::<u32>(k.ptr(2)?, n)?);
            a.iter().zip(b.iter()).map(|(a, b)| a.wrapping_add(*b)).collect()
        };
        k.write(k.ptr(0)?, &sum)
    });
    sim.register("early", &[8, 8, 4], |k| {
        let (dst, src, n) = (k.ptr(0)?, k.ptr(1)?, k.arg::<u32>(2)? as usize);
        let read = k.before_wait(|k| k.read::<u32>(src, n))?;
        k.write(dst, &read)
    });
    sim.register("assert", &[], |_| Err(refrain_driver::sim::Fault::new(Code::ASSERT, "assertion failed")));
    sim.register("panic", &[], |_| panic!("a twin with a bug"));
}

impl Bench {
    pub(crate) fn new(options: SimOptions) -> Bench {
        let driver = SimDriver::new(options);
        register(&driver);
        // SAFETY: nothing else uses this device, and tests access pinned memory only while it is allocated.
        let sim = unsafe { driver.api() };
        let ctx = sim.primary_ctx_retain(0).expect("context");
        let module = sim.module_load(IMAGE).expect("module");
        let s = sim.stream_create(StreamKind::NonBlocking).expect("stream");
        Bench { sim, driver, ctx, module, s }
    }

    /// Work runs only when it is waited for, and races are only reported.
    pub(crate) fn lazy() -> Bench {
        Bench::new(options(SimSchedule::Lazy))
    }

    pub(crate) fn with_faults(text: &str) -> Bench {
        Bench::new(SimOptions { faults: script(text), ..options(SimSchedule::Seeded) })
    }

    pub(crate) fn function(&self, name: &str) -> FunctionHandle {
        self.sim.module_function(self.module, name).expect("function")
    }

    pub(crate) fn stream(&self) -> StreamHandle {
        self.sim.stream_create(StreamKind::NonBlocking).expect("stream")
    }

    pub(crate) fn event(&self) -> EventHandle {
        self.sim.event_create(true).expect("event")
    }

    /// Allocates `n` zeroed words of device memory, with no work pending.
    pub(crate) fn words(&self, n: u64) -> DevicePtr {
        let ptr = self.sim.alloc(4 * n).expect("memory");
        self.sim.memcpy_htod(ptr, &vec![0; 4 * n as usize]).expect("upload");
        ptr
    }

    pub(crate) fn fill(&self, s: StreamHandle, dst: DevicePtr, value: u32, n: u32) -> RawResult<()> {
        self.sim.launch(self.function("fill"), &PLAIN, s, &fill_params(dst, value, n))
    }

    pub(crate) fn add(
        &self,
        s: StreamHandle,
        dst: DevicePtr,
        a: DevicePtr,
        b: DevicePtr,
        n: u32,
    ) -> RawResult<()> {
        self.sim.launch(self.function("add"), &PLAIN, s, &add_params(dst, a, b, n))
    }

    pub(crate) fn read(&self, ptr: DevicePtr, n: usize) -> Vec<u32> {
        let mut bytes = vec![0; 4 * n];
        self.sim.memcpy_dtoh(&mut bytes, ptr).expect("read back");
        bytes.chunks_exact(4).map(|w| u32::from_ne_bytes([w[0], w[1], w[2], w[3]])).collect()
    }

    pub(crate) fn reports(&self) -> Vec<String> {
        self.sim.take_reports()
    }
}

pub(crate) fn fill_params(dst: DevicePtr, value: u32, n: u32) -> Vec<u8> {
    [&dst.0.to_ne_bytes()[..], &value.to_ne_bytes(), &n.to_ne_bytes()].concat()
}

pub(crate) fn add_params(dst: DevicePtr, a: DevicePtr, b: DevicePtr, n: u32) -> Vec<u8> {
    [&dst.0.to_ne_bytes()[..], &a.0.to_ne_bytes(), &b.0.to_ne_bytes(), &n.to_ne_bytes()].concat()
}

pub(crate) fn early_params(dst: DevicePtr, src: DevicePtr, n: u32) -> Vec<u8> {
    [&dst.0.to_ne_bytes()[..], &src.0.to_ne_bytes(), &n.to_ne_bytes()].concat()
}
