//! Verification of steps that write large buffers: compared on the device, and still located to the element.

use std::sync::Arc;

use refrain_cuda::{Space, Verified, VerifyCase, VerifyError, VerifySetup, WarmPlan, verify};
use refrain_driver::sim::{FaultScript, SimDriver, SimOptions};
use refrain_driver::{
    Baked, Buf, Device, Graph, LaunchBuilder, Lease, Memory, MemoryLayout, Method, Module, RecordOptions,
    Stream, probe,
};
use refrain_kernels::{KernelLoadOptions, Kernels, register_twins};

/// Words of the large buffer: 2 MiB, so that digests are used.
const N: u32 = 1 << 19;

struct Bed {
    sim: SimDriver,
    stream: Stream,
    lease: Lease,
    memory: Arc<Memory>,
    warm: WarmPlan,
    check: VerifySetup,
    a: Buf,
    large: Buf,
}

/// `large = a + a`, with three cases of `a`.
fn bed(seed: u64) -> Bed {
    let sim = SimDriver::new(SimOptions { seed, ..SimOptions::default() });
    register_twins(&sim);
    let device = Device::simulated(&sim).unwrap();
    let ctx = device.context().unwrap();
    let kernels = Kernels::load(&ctx, &KernelLoadOptions::default()).unwrap();
    // SAFETY: the driver crate's own PTX text.
    let module = unsafe { Module::load(&ctx, "probe", probe::PROBE_PTX) }.unwrap();
    let add = module.function("refrain_probe_add").unwrap();
    let mut layout = MemoryLayout::new("bed");
    let bytes = 4 * u64::from(N);
    let regions =
        [("a", bytes), ("large", bytes), ("workspace", 4096)].map(|(n, b)| (n, layout.device(n, b)));
    let memory = Memory::plan(&ctx, &layout).unwrap();
    let [a, large, workspace] = regions.map(|(_, r)| memory.buf(r));
    let names = [("a", a), ("large", large), ("workspace", workspace)].map(|(n, b)| (n.to_owned(), b));
    let space = Arc::new(Space::new(&memory, names.to_vec()));
    let mut warm = WarmPlan::new("step", &space);
    let double = LaunchBuilder::new(&add, N / 256, 256).step("double").write(large).read(a).read(a);
    // SAFETY: it accesses `N` words of each buffer, which is the size of each.
    warm.push(unsafe { double.baked(Baked(N)).build() });
    warm.name_buffer(large, "doubled", 4);
    let case = |v: u32| VerifyCase::of(vec![(a, v.to_le_bytes().repeat(N as usize))]);
    let check = VerifySetup::new((1..4).map(case).collect()).unwrap();
    let check = check.workspace(workspace).digests(kernels.digester().unwrap());
    let (stream, lease) = (ctx.stream().unwrap(), memory.lease().unwrap());
    Bed { sim, stream, lease, memory, warm, check, a, large }
}

impl Bed {
    fn verify(&mut self, check: &VerifySetup) -> Result<Verified<Graph>, VerifyError> {
        let options = RecordOptions::named("step");
        let warm = &self.warm;
        let graph = self.stream.record(&self.memory, Method::Stream, &options, |q| warm.enqueue(q)).unwrap();
        verify(graph, &mut self.stream, &mut self.lease, &self.warm, check)
    }

    fn words(&mut self, buf: Buf) -> Vec<u32> {
        let mut bytes = vec![0; buf.len() as usize];
        self.stream.download(&self.lease, buf, &mut bytes).unwrap();
        bytemuck::pod_collect_to_vec(&bytes)
    }
}

#[test]
fn a_step_with_large_outputs_is_verified_and_memory_is_restored() {
    let mut bed = bed(1);
    let before = 7_u32.to_le_bytes().repeat(N as usize);
    for buf in [bed.a, bed.large] {
        bed.stream.upload(&mut bed.lease, buf, &before).unwrap();
    }
    let check = bed.check.clone();
    let graph = bed.verify(&check).unwrap();
    let report = graph.report();
    assert_eq!((report.bytes, report.unwritten_bytes, report.n_cases), (4 * u64::from(N), 0, 3));
    assert!(report.bit_exact);
    for buf in [bed.a, bed.large] {
        assert!(bed.words(buf).iter().all(|w| *w == 7));
    }
    // Of transient memory, only live parts are restored.
    let live = bed.large.slice(4096, 64).unwrap();
    let check = check.transient(bed.large, vec![live]);
    bed.verify(&check).unwrap();
    assert!(bed.words(live).iter().all(|w| *w == 7));
    assert!(bed.words(bed.large)[..16].iter().all(|w| *w == 6), "left by the last case");
}

#[test]
fn one_wrong_byte_among_many_is_located_to_its_element_and_launch() {
    for seed in 0..4 {
        let mut bed = bed(seed);
        bed.sim.inject(FaultScript::parse(&format!("on {}th replay: wrong byte", 1 + seed % 3)).unwrap());
        let check = bed.check.clone();
        match bed.verify(&check) {
            Err(VerifyError::Mismatch { buffer, element, launch, case }) => {
                assert_eq!((buffer.as_str(), case), ("doubled", seed as usize % 3));
                assert!(element < N as usize && launch.contains("double"), "{element} {launch}");
            }
            other => panic!("{other:?}"),
        }
    }
}
