//! A network other than a language model, built op by op: compared with PyTorch, and as a captured graph in bf16.

#[path = "../examples/crossasset/net.rs"]
mod net;
mod runs;

use net::{Classifier, Net, Param, Phase, Sizes};
use refrain::DType;
use refrain::graph::{Backend, Plan, PlanOptions, Ran, SegmentKind};
use refrain::train::AdamSettings;
use refrain_cpu::CpuBackend;
use refrain_cuda::{CudaBackend, GraphMode};
use refrain_driver::sim::{SimDriver, SimOptions};
use refrain_driver::{Device, DeviceKind, Method};
use runs::{AHEAD, How, ONE_BY_ONE, backend};
use safetensors::SafeTensors;

/// The sizes in `tools/crossasset_goldens.py`.
const SIZES: Sizes = Sizes {
    batch: 7,
    n_sources: 12,
    n_features: 21,
    width: 16,
    n_heads: 2,
    ffn: 24,
    n_layers: 2,
    n_classes: 3,
    dtype: DType::F32,
};
const N_SAMPLES: usize = 10;

/// Results of PyTorch.
struct Golden(Vec<u8>);

impl Golden {
    fn new() -> Golden {
        Golden(include_bytes!("crossasset.safetensors").to_vec())
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        let tensors = SafeTensors::deserialize(&self.0).unwrap();
        tensors.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).data().to_vec()
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.bytes(name).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    fn ints(&self, name: &str) -> Vec<i32> {
        self.bytes(name).as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as i32).collect()
    }

    fn classifier<B: Backend>(&self, backend: B, dtype: DType) -> Classifier<B> {
        let net = Net::new(Sizes { dtype, ..SIZES }, N_SAMPLES);
        let init = |param: &Param| self.floats(&format!("value.{}", param.name));
        Classifier::new(backend, net, &self.floats("data"), &init).unwrap_or_else(|e| panic!("{e}: {e:?}"))
    }

    /// Runs ten steps, with as many in flight as the device allows. Returns losses, norms, and how each step ran.
    fn steps<B: Backend>(&self, classifier: &mut Classifier<B>) -> Vec<net::Found> {
        let (ids, targets) = (self.ints("ids"), self.ints("targets"));
        let mut found = Vec::new();
        for step in 0..10 {
            if step >= classifier.depth() {
                found.push(classifier.collect().unwrap_or_else(|e| panic!("{e}: {e:?}")));
            }
            classifier.queue(&ids, &targets, &adam(step)).unwrap_or_else(|e| panic!("{e}: {e:?}"));
        }
        found.extend((found.len()..10).map(|_| classifier.collect().unwrap()).collect::<Vec<_>>());
        found
    }
}

fn adam(step: usize) -> AdamSettings {
    let lr = 1e-2 * (1.0 - 0.05 * step as f64);
    AdamSettings { lr, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, clip: Some(1.0) }
}

/// Largest error of a tensor, relative to its largest magnitude.
fn error(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0f32, |m, w| m.max(w.abs()));
    got.iter().zip(want).fold(0f32, |m, (g, w)| m.max((g - w).abs())) / largest.max(1e-12)
}

fn compare_with_pytorch<B: Backend>(backend: B, tolerance: f32) {
    let golden = Golden::new();
    let mut classifier = golden.classifier(backend, DType::F32);
    let gradients = classifier.gradients(&golden.ints("ids"), &golden.ints("targets")).unwrap();
    assert_eq!(gradients.len(), classifier.net.params.len());
    for (name, got) in gradients {
        let off = error(&got, &golden.floats(&format!("grad.{name}")));
        assert!(off < tolerance, "gradient of {name} is off by {off:.2e}");
    }
    let found = golden.steps(&mut classifier);
    for (step, (want, norm)) in
        golden.floats("f32.losses").into_iter().zip(golden.floats("f32.norms")).enumerate()
    {
        let got = &found[step];
        assert!(
            (got.loss - want).abs() < tolerance * want.max(0.1),
            "step {step}: loss {}, PyTorch has {want}",
            got.loss
        );
        assert!(
            (got.grad_norm - norm).abs() < 10.0 * tolerance * norm,
            "step {step}: {} {norm}",
            got.grad_norm
        );
    }
    for (name, got) in classifier.values().unwrap() {
        let off = error(&got, &golden.floats(&format!("last.{name}")));
        assert!(off < 1e-3, "{name} is off by {off:.2e} after ten steps");
    }
}

#[test]
fn losses_and_every_gradient_agree_with_pytorch_on_the_cpu() {
    compare_with_pytorch(CpuBackend::new(1).unwrap(), 2e-5);
}

#[test]
fn losses_and_every_gradient_agree_with_pytorch_on_the_simulated_device() {
    let sim = SimDriver::new(SimOptions { seed: 1, ..SimOptions::default() });
    compare_with_pytorch(backend(&sim, AHEAD).1, 2e-5);
}

#[test]
fn a_bf16_step_is_one_segment_without_host_steps() {
    let net = Net::new(Sizes { dtype: DType::BF16, ..SIZES }, N_SAMPLES);
    assert_eq!(net.n_parameters(), 4_243);
    for phase in [Phase::Learn, Phase::Classify] {
        let plan = Plan::new(&net.step(phase).unwrap().graph, PlanOptions::default()).unwrap();
        let [segment] = plan.segments() else { panic!("{} segments", plan.segments().len()) };
        assert_eq!((segment.kind, segment.steps.len()), (SegmentKind::Recordable, plan.steps().len()));
    }
}

#[test]
fn ten_replayed_steps_in_bf16_equal_eager_ones_and_have_the_losses_of_pytorch() {
    replayed_equals_eager(|how| {
        let sim = SimDriver::new(SimOptions { seed: 6, ..SimOptions::default() });
        backend(&sim, how)
    });
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn losses_and_every_gradient_agree_with_pytorch_on_a_gpu() {
    let device = Device::open(DeviceKind::Cuda(0)).unwrap();
    compare_with_pytorch(runs::backend_on(&device, AHEAD), 1e-4);
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn ten_replayed_steps_in_bf16_equal_eager_ones_on_a_gpu() {
    replayed_equals_eager(|how| {
        let device = Device::open(DeviceKind::Cuda(0)).unwrap();
        let backend = runs::backend_on(&device, how);
        (device, backend)
    });
}

fn replayed_equals_eager(open: impl Fn(How) -> (Device, CudaBackend)) {
    let golden = Golden::new();
    let nodes = How { method: Method::Nodes, ..AHEAD };
    let mut all = Vec::new();
    for how in [ONE_BY_ONE, AHEAD, nodes] {
        let (device, backend) = open(how);
        let mut classifier = golden.classifier(backend, DType::BF16);
        let found = golden.steps(&mut classifier);
        let one_launch = |ran: &Ran| matches!(ran, Ran::Replayed { n_launches: 1, n_host_steps: 0 });
        assert!(found.iter().all(|f| one_launch(&f.ran) == (how.mode == GraphMode::Require)), "{how:?}");
        for (step, want) in golden.floats("bf16.losses").into_iter().enumerate() {
            let got = found[step].loss;
            assert!((got - want).abs() < 1e-2 * want + 1e-3, "step {step}: {got}, PyTorch: {want}");
        }
        let (ids, targets) = (golden.ints("ids"), golden.ints("targets"));
        let classes = classifier.classes(&ids).unwrap();
        let learnt = targets.iter().zip(&classes).filter(|(target, _)| **target >= 0);
        assert!(learnt.clone().count() == 6 && learnt.clone().all(|(t, c)| *t == *c as i32), "{classes:?}");
        let bits: Vec<(u32, u32)> = found.iter().map(|f| (f.loss.to_bits(), f.grad_norm.to_bits())).collect();
        all.push((bits, classifier.values().unwrap()));
        drop(classifier);
        assert_eq!(device.take_reports(), Vec::<String>::new());
    }
    for other in &all[1..] {
        assert_eq!(all[0].0, other.0, "losses and norms");
        assert!(all[0].1 == other.1, "parameters");
    }
}
