//! Fixture of the tests: a device, a stream and a small step over planned memory.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use refrain_driver::api::Api;
use refrain_driver::sim::{FaultScript, SimDriver, SimOptions};
use refrain_driver::{
    Baked, Buf, Context, Device, DeviceKind, DriverError, Function, Graph, Launch, LaunchBuilder, Lease,
    Memory, MemoryLayout, Method, Module, Queue, RecordOptions, Region, Stream, probe,
};

pub const N: u32 = 256;
pub const BYTES: u64 = N as u64 * 4;

/// A context and a step `b = a + a; e = 7; c = b + a; d = c; c = d + e`.
pub struct Bed {
    pub lease: Lease,
    pub stream: Stream,
    pub step: Step,
    pub memory: Arc<Memory>,
    pub regions: [Region; 5],
    pub module: Arc<Module>,
    pub ctx: Context,
    pub device: Device,
    pub sim: Option<SimDriver>,
}

#[derive(Clone)]
pub struct Step {
    pub fill: Function,
    pub add: Function,
    pub a: Buf,
    pub b: Buf,
    pub c: Buf,
    pub d: Buf,
    pub e: Buf,
}

impl Step {
    pub fn add(&self, dst: Buf, x: Buf, y: Buf) -> Launch {
        let add = LaunchBuilder::new(&self.add, N / 64, 64);
        built(add.step("step").write(dst).read(x).read(y).baked(Baked(N)))
    }

    pub fn fill(&self, dst: Buf, value: u32) -> Launch {
        built(self.filling(dst, value))
    }

    /// The same launch, not built yet.
    pub fn filling(&self, dst: Buf, value: u32) -> LaunchBuilder {
        let fill = LaunchBuilder::new(&self.fill, N / 64, 64);
        fill.step("step").write(dst).baked(Baked(value)).baked(Baked(N))
    }

    pub fn enqueue(&self, q: &mut dyn Queue) -> Result<(), DriverError> {
        q.launch(&self.add(self.b, self.a, self.a))?;
        q.launch(&self.fill(self.e, 7))?;
        q.launch(&self.add(self.c, self.b, self.a))?;
        q.copy(self.d, self.c)?;
        q.launch(&self.add(self.c, self.d, self.e))
    }

    pub fn expected(a: u32) -> u32 {
        a.wrapping_mul(3).wrapping_add(7)
    }
}

impl Bed {
    pub fn sim() -> Bed {
        Bed::on(&SimDriver::new(SimOptions { seed: 7, ..SimOptions::default() }))
    }

    pub fn on(sim: &SimDriver) -> Bed {
        let mut bed = Bed::try_new(Device::simulated(sim).unwrap()).unwrap();
        bed.sim = Some(sim.clone());
        bed
    }

    pub fn gpu() -> Bed {
        Bed::try_new(Device::open(DeviceKind::Cuda(0)).unwrap()).unwrap()
    }

    pub fn try_new(device: Device) -> Result<Bed, DriverError> {
        Bed::with_context(&device.context()?)
    }

    pub fn with_context(ctx: &Context) -> Result<Bed, DriverError> {
        let (ctx, device) = (ctx.clone(), ctx.device());
        // SAFETY: this crate's own PTX text.
        let module = unsafe { Module::load(&ctx, "probe", probe::PROBE_PTX) }?;
        let mut layout = MemoryLayout::new("bed");
        let regions = ["a", "b", "c", "d", "e"].map(|name| layout.device(name, BYTES));
        let memory = Memory::plan(&ctx, &layout)?;
        let [a, b, c, d, e] = regions.map(|r| memory.buf(r));
        let fill = module.function("refrain_probe_fill")?;
        let add = module.function("refrain_probe_add")?;
        Ok(Bed {
            lease: memory.lease()?,
            stream: ctx.stream()?,
            step: Step { fill, add, a, b, c, d, e },
            memory,
            regions,
            module,
            ctx,
            device,
            sim: None,
        })
    }

    pub fn function(&self, name: &str) -> Function {
        self.module.function(&format!("refrain_probe_{name}")).unwrap()
    }

    /// The raw driver, for tests that imitate a library.
    pub fn api(&self) -> Arc<dyn Api> {
        match &self.sim {
            // SAFETY: tests pass it only streams and addresses that a library call received, during that call.
            Some(sim) => unsafe { sim.api() },
            // SAFETY: as above.
            None => unsafe { refrain_driver::raw_driver() }.unwrap(),
        }
    }

    pub fn record(&mut self, method: Method) -> Result<Graph, DriverError> {
        let step = self.step.clone();
        self.stream.record(&self.memory, method, &RecordOptions::named("step"), |q| step.enqueue(q))
    }

    pub fn set_input(&mut self, value: u32) -> Result<(), DriverError> {
        let bytes = value.to_le_bytes().repeat(N as usize);
        self.stream.upload(&mut self.lease, self.step.a, &bytes)
    }

    pub fn read(&mut self, buf: Buf) -> Result<Vec<u32>, DriverError> {
        let mut bytes = vec![0; buf.len() as usize];
        self.stream.download(&self.lease, buf, &mut bytes)?;
        Ok(bytes.chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect())
    }

    /// Replays with a new input and checks the result.
    pub fn check_replay(&mut self, graph: &Graph, input: u32) -> Result<(), DriverError> {
        self.set_input(input)?;
        let out = graph.replay(&mut self.lease, &mut self.stream)?;
        let values = out.values::<u32>(&mut self.stream, self.step.c)?;
        assert!(values.iter().all(|&v| v == Step::expected(input)), "input {input}: {values:?}");
        Ok(())
    }

    /// Records and replays by both methods, to show that the device still works.
    pub fn check_good(&mut self) {
        for method in [Method::Stream, Method::Nodes] {
            let graph = self.record(method).unwrap();
            assert_eq!(graph.info().nodes.len(), 5);
            for input in [1, 99] {
                self.check_replay(&graph, input).unwrap();
            }
        }
        assert_eq!(self.device.take_reports(), Vec::<String>::new());
    }
}

/// A launch of a probe kernel.
pub fn built(launch: LaunchBuilder) -> Launch {
    // SAFETY: launches in these tests access at most the buffers that they name, `N` words each, or are refused.
    unsafe { launch.build() }
}

pub fn faults(script: &str) -> FaultScript {
    FaultScript::parse(script).unwrap()
}

/// Serialises tests on the real GPU, which share its primary context.
pub fn gpu_turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Generates two tests from one body: on the simulated device and on a GPU.
#[macro_export]
macro_rules! both {
    ($(#[doc = $doc:literal])* fn $name:ident($bed:ident) $body:block) => {
        mod $name {
            use super::*;

            $(#[doc = $doc])*
            fn body(mut $bed: Bed) $body

            #[test]
            fn on_the_simulated_device() {
                body(Bed::sim());
            }

            #[test]
            #[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
            fn on_a_gpu() {
                let _turn = common::gpu_turn();
                body(Bed::gpu());
            }
        }
    };
}
