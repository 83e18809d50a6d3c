//! Fixtures for the tests of cache and verification: a device and a small step of probe kernels.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::sync::Arc;

use refrain_cuda::{CacheOptions, CudaError, GraphCache, Site, Space, VerifyCase, VerifySetup, WarmPlan};
use refrain_driver::sim::{FaultScript, SimDriver, SimOptions};
use refrain_driver::{
    Baked, Buf, Device, DriverError, Function, Launch, LaunchBuilder, Lease, Memory, MemoryLayout, Module,
    Stream, probe,
};
use refrain_graph::Ran;

pub const N: u32 = 64;
pub const BYTES: u64 = N as u64 * 4;

/// `b = a + a; c = b + a; cache[scratch] = c + c`: `a` is the control block, `cache` has a live and a scratch half.
pub struct Bed {
    pub cache: GraphCache<u32>,
    pub lease: Lease,
    pub stream: Stream,
    pub warm: WarmPlan,
    pub a: Buf,
    pub b: Buf,
    pub c: Buf,
    pub kv: Buf,
    pub add: Function,
    pub fill: Function,
    pub space: Arc<Space>,
    pub sim: SimDriver,
}

pub fn faults(script: &str) -> FaultScript {
    FaultScript::parse(script).unwrap()
}

pub fn words(value: u32) -> Vec<u8> {
    value.to_le_bytes().repeat(N as usize)
}

/// A launch of a probe kernel.
pub fn built(launch: LaunchBuilder) -> Launch {
    // SAFETY: launches in these tests access `N` words of each buffer they name, which is the size of each.
    unsafe { launch.build() }
}

impl Bed {
    pub fn new(options: CacheOptions) -> Bed {
        let sim = SimDriver::new(SimOptions { seed: 11, ..SimOptions::default() });
        let device = Device::simulated(&sim).unwrap();
        let ctx = device.context().unwrap();
        // SAFETY: the driver crate's own PTX text.
        let module = unsafe { Module::load(&ctx, "probe", probe::PROBE_PTX) }.unwrap();
        let (add, fill) =
            (module.function("refrain_probe_add").unwrap(), module.function("refrain_probe_fill").unwrap());
        let mut layout = MemoryLayout::new("bed");
        let names = ["a", "b", "c", "kv"];
        let regions = [BYTES, BYTES, BYTES, 2 * BYTES].iter().zip(names).map(|(b, n)| layout.device(n, *b));
        let regions: Vec<_> = regions.collect();
        let memory = Memory::plan(&ctx, &layout).unwrap();
        let bufs: Vec<Buf> = regions.into_iter().map(|r| memory.buf(r)).collect();
        let named = names.iter().zip(&bufs).map(|(n, b)| ((*n).to_owned(), *b)).collect();
        let space = Arc::new(Space::new(&memory, named));
        let [a, b, c, kv] = bufs[..] else { unreachable!() };
        let mut bed = Bed {
            cache: GraphCache::new(options),
            lease: memory.lease().unwrap(),
            stream: ctx.stream().unwrap(),
            warm: WarmPlan::new("step", &space),
            a,
            b,
            c,
            kv,
            add,
            fill,
            space,
            sim,
        };
        bed.warm = bed.step_named("step");
        for buf in [a, b, c] {
            bed.write(buf, &words(0));
        }
        bed.write(kv, &words(5).repeat(2));
        bed
    }

    pub fn step_named(&self, name: &str) -> WarmPlan {
        let add = |step: &str, dst: Buf, x: Buf, y: Buf| {
            let add = LaunchBuilder::new(&self.add, N / 64, 64).step(step.to_owned());
            add.write(dst).read(x).read(y).baked(Baked(N))
        };
        let mut warm = WarmPlan::new(name, &self.space);
        warm.push(built(add("double", self.b, self.a, self.a)));
        warm.push(built(add("triple", self.c, self.b, self.a)));
        // A kernel that may write anywhere in the cache, as an append does; it writes the half it is given.
        let scratch = self.scratch();
        let append = add("append", scratch, self.c, self.c);
        warm.push(built(append.touches(self.kv, refrain_driver::Access::ReadWrite)));
        for (buf, name) in [(self.b, "b"), (self.c, "c"), (scratch, "cache")] {
            warm.name_buffer(buf, name, 4);
        }
        warm
    }

    pub fn scratch(&self) -> Buf {
        self.kv.slice(BYTES, BYTES).unwrap()
    }

    pub fn check(&self) -> Result<VerifySetup, CudaError> {
        let case = |v: u32| VerifyCase::of(vec![(self.a, words(v)), (self.scratch(), words(77))]);
        Ok(VerifySetup::new(vec![case(3), case(1000), case(70_000)])?.narrow(self.kv, vec![self.scratch()]))
    }

    pub fn write(&mut self, buf: Buf, bytes: &[u8]) {
        self.stream.upload(&mut self.lease, buf, bytes).unwrap();
    }

    pub fn read(&mut self, buf: Buf) -> Result<Vec<u32>, DriverError> {
        let mut bytes = vec![0; buf.len() as usize];
        self.stream.download(&self.lease, buf, &mut bytes)?;
        Ok(bytes.chunks_exact(4).map(|w| u32::from_le_bytes(w.try_into().unwrap())).collect())
    }

    /// Runs one step of a key with an input, and checks its result.
    pub fn step(&mut self, key: u32, input: u32) -> Result<Ran, CudaError> {
        self.write(self.a, &words(input));
        let check = self.check();
        let ran = {
            let mut site = Site { stream: &mut self.stream, lease: &mut self.lease };
            self.cache.step(&key, &mut site, &self.warm, || check)?
        };
        let failed = |source| CudaError::Driver { step: "reading".into(), source };
        let c = self.read(self.c).map_err(failed)?;
        assert!(c.iter().all(|&v| v == 3 * input), "input {input}, {ran:?}: {c:?}");
        let live = self.read(self.kv.slice(0, BYTES).unwrap()).map_err(failed)?;
        assert!(live.iter().all(|&v| v == 5), "the live half of the cache changed: {live:?}");
        Ok(ran)
    }
}
