//! A network of your own, trained as one captured graph: a classifier over twelve sources in bf16, with its backward pass
//! and optimiser, built op by op and run with and without graphs.
//!
//! `cargo run --release -p refrain --example crossasset -- --device cuda`

mod data;
mod net;

use std::time::Instant;

use data::{Data, Random};
use net::{Classifier, Found, Net, Param, Sizes};
use refrain::DType;
use refrain::graph::{Backend, Ran};
use refrain::train::AdamSettings;
use refrain_cpu::CpuBackend;
use refrain_cuda::{CudaBackend, CudaOptions, GraphMode, Monitor};
use refrain_driver::sim::SimOptions;
use refrain_driver::{DeviceKind, Method};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const USAGE: &str = "usage: crossasset [--device cpu|cuda|sim] [--samples N] [--epochs N] [--batch N] \
                     [--dtype bf16|f32] [--kernels DIR]";

/// Options from the command line.
struct Options {
    device: String,
    n_samples: usize,
    n_epochs: usize,
    batch: usize,
    dtype: DType,
    kernels: Option<std::path::PathBuf>,
}

fn options() -> Result<Options> {
    let mut options = Options {
        device: "cpu".into(),
        n_samples: 24_613,
        n_epochs: 3,
        batch: 256,
        dtype: DType::BF16,
        kernels: None,
    };
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().ok_or_else(|| format!("{flag} needs a value; {USAGE}"))?;
        match flag.as_str() {
            "--device" => options.device = value,
            "--samples" => options.n_samples = value.parse()?,
            "--epochs" => options.n_epochs = value.parse()?,
            "--batch" => options.batch = value.parse()?,
            "--dtype" if value == "bf16" => options.dtype = DType::BF16,
            "--dtype" if value == "f32" => options.dtype = DType::F32,
            "--kernels" => options.kernels = Some(value.into()),
            _ => return Err(format!("{flag} {value} is not known; {USAGE}").into()),
        }
    }
    if options.batch == 0 || options.n_samples < 10 || options.n_epochs == 0 {
        return Err("a batch and an epoch are at least 1, samples at least 10".into());
    }
    Ok(options)
}

fn main() -> Result<()> {
    let options = options()?;
    let sizes = Sizes {
        batch: options.batch,
        n_sources: 12,
        n_features: 193,
        width: 64,
        n_heads: 4,
        ffn: 128,
        n_layers: 2,
        n_classes: 3,
        dtype: options.dtype,
    };
    let data = Data::synthetic(&sizes, options.n_samples, 1);
    let net = Net::new(sizes, options.n_samples);
    println!(
        "{} samples of {} x {} numbers, {} parameters in {}, batches of {}",
        options.n_samples,
        sizes.n_sources,
        sizes.n_features,
        net.n_parameters(),
        sizes.dtype,
        sizes.batch
    );
    let cuda = |kind: DeviceKind, mode: GraphMode| {
        let mut cuda = CudaOptions::new(mode, Method::Stream);
        cuda.kernels.cache.clone_from(&options.kernels);
        CudaBackend::open(kind, cuda).map(|backend| {
            let monitor = backend.monitor();
            (backend, Some(monitor))
        })
    };
    let kind = match options.device.as_str() {
        "cpu" => {
            let backend = CpuBackend::new(refrain_cpu::pool::default_threads())?;
            return train("on the CPU", (backend, None), net, &data, &options);
        }
        "cuda" => DeviceKind::Cuda(0),
        "sim" => DeviceKind::Sim(SimOptions::default()),
        other => return Err(format!("there is no device {other}; {USAGE}").into()),
    };
    train("as graphs", cuda(kind.clone(), GraphMode::Require)?, net.clone(), &data, &options)?;
    train("without graphs", cuda(kind, GraphMode::Off)?, net, &data, &options)
}

/// Trains on nine tenths of the data and prints the result of each epoch.
fn train<B: Backend>(
    what: &str,
    (backend, monitor): (B, Option<Monitor>),
    net: Net,
    data: &Data,
    options: &Options,
) -> Result<()> {
    let n_held_out = options.n_samples / 10;
    let n_learnt = options.n_samples - n_held_out;
    let began = Instant::now();
    let mut classifier = Classifier::new(backend, net, &data.rows, &initial)?;
    println!(
        "{what}: ready in {:.2} s, {} steps in flight",
        began.elapsed().as_secs_f64(),
        classifier.depth()
    );
    let (mut n_replayed, mut n_steps) = (0, 0);
    for epoch in 0..options.n_epochs {
        let order = Random(100 + epoch as u64).order(n_learnt);
        let began = Instant::now();
        let (mut sum, mut in_flight) = (0.0, 0);
        let mut take = |found: Found| {
            sum += f64::from(found.loss);
            n_steps += 1;
            n_replayed += usize::from(matches!(found.ran, Ran::Replayed { .. }));
        };
        let batches: Vec<Vec<i32>> = order.chunks(options.batch).map(<[i32]>::to_vec).collect();
        let n_batches = batches.len();
        for (i, mut ids) in batches.into_iter().enumerate() {
            let mut targets: Vec<i32> = ids.iter().map(|id| data.classes[*id as usize]).collect();
            ids.resize(options.batch, -1);
            targets.resize(options.batch, -1);
            if in_flight == classifier.depth() {
                take(classifier.collect()?);
                in_flight -= 1;
            }
            classifier.queue(&ids, &targets, &adam(epoch * n_batches + i))?;
            in_flight += 1;
        }
        for _ in 0..in_flight {
            take(classifier.collect()?);
        }
        let seconds = began.elapsed().as_secs_f64();
        let right = accuracy(&mut classifier, data, n_learnt)?;
        println!(
            "  epoch {epoch}: {seconds:.3} s, {:.0} samples/s, loss {:.4}, {:.1} % of {n_held_out} held-out samples right",
            n_learnt as f64 / seconds,
            sum / n_batches as f64,
            100.0 * right
        );
    }
    println!("  {n_replayed} of {n_steps} steps replayed");
    let graphs = monitor.map(|monitor| monitor.status().graphs).unwrap_or_default();
    if let Some(graph) = graphs.iter().max_by_key(|graph| graph.n_kernels) {
        println!(
            "  a step is one launch of {} kernels, verified in {:?}",
            graph.n_kernels, graph.verify_time
        );
    }
    Ok(())
}

/// Accuracy on the held-out samples.
fn accuracy<B: Backend>(classifier: &mut Classifier<B>, data: &Data, from: usize) -> Result<f64> {
    let ids: Vec<i32> = (from as i32..data.classes.len() as i32).collect();
    let mut n_right = 0;
    for part in ids.chunks(classifier.net.sizes.batch) {
        let mut padded = part.to_vec();
        padded.resize(classifier.net.sizes.batch, -1);
        let classes = classifier.classes(&padded)?;
        let right = |(id, class): &(&i32, &usize)| data.classes[**id as usize] == **class as i32;
        n_right += part.iter().zip(&classes).filter(right).count();
    }
    Ok(n_right as f64 / ids.len().max(1) as f64)
}

fn adam(step: usize) -> AdamSettings {
    let warm = ((step + 1) as f64 / 20.0).min(1.0);
    AdamSettings { lr: 2e-3 * warm, betas: [0.9, 0.99], eps: 1e-8, weight_decay: 0.01, clip: Some(1.0) }
}

/// Initial values: norms 1, biases 0, matrices with a variance of one over the number of columns.
fn initial(param: &Param) -> Vec<f32> {
    let n = param.dims.iter().product();
    match param.dims[..] {
        [_] if param.name.ends_with("norm") => vec![1.0; n],
        [_] => vec![0.0; n],
        _ => {
            let seed = param.name.bytes().fold(7, |seed, b| seed * 31 + u64::from(b));
            let (mut random, scale) = (Random(seed), (param.dims[1] as f32).powf(-0.5));
            (0..n).map(|_| scale * random.normal()).collect()
        }
    }
}
