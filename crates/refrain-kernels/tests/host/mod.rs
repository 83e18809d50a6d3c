//! Runs the kernels' source on the host: a C++ compiler builds it, and it runs in place of the twins.
//!
//! This finds wrong arithmetic, wrong indices and missing barriers without a GPU. Anything specific to a GPU
//! (rounding of its functions, memory model, speed) is left to the GPU tests.

use std::ffi::{CString, OsStr, c_char};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};

use refrain_driver::Device;
use refrain_driver::api::DevicePtr;
use refrain_driver::sim::{KernelResult, SimDriver, SimKernel, SimOptions};
use refrain_kernels::{GpuArch, KernelFamily, generated_headers, kernels};

use crate::bed::{Bed, Regions};

type RunKernel = unsafe extern "C" fn(*const c_char, *const u32, *const u32, *const u8, *const usize) -> i32;

/// Copies of the library that no launch is using. A library keeps its state in globals, so each copy runs one launch
/// at a time.
struct Libraries {
    idle: Mutex<Vec<RunKernel>>,
    returned: Condvar,
}

impl Libraries {
    fn run(&self, work: impl FnOnce(RunKernel) -> i32) -> i32 {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let library = loop {
            match idle.pop() {
                Some(library) => break library,
                None => idle = self.returned.wait(idle).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(idle);
        let result = work(library);
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(library);
        self.returned.notify_one();
        result
    }
}

/// A simulated device whose kernels are compiled for the host.
pub fn bed() -> Bed {
    bed_on(SimOptions::default())
}

/// The same with other device options.
pub fn bed_on(options: SimOptions) -> Bed {
    let libraries = libraries();
    let sim = SimDriver::new(SimOptions { seed: 3, strict: false, ..options });
    let regions = Regions::default();
    for info in kernels() {
        let (regions, name) = (Regions::clone(&regions), CString::new(info.name.as_str()).unwrap());
        let params = info.params.clone();
        sim.register(&info.name, &info.params, move |k| launch(k, libraries, &name, &params, &regions));
    }
    Bed { regions, copies_all: true, ..Bed::new(Device::simulated(&sim).unwrap()) }
}

fn libraries() -> &'static Libraries {
    static LIBRARIES: OnceLock<Libraries> = OnceLock::new();
    LIBRARIES.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let file = compile(folder.path());
        let n_copies = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        let idle = (0..n_copies).map(|i| {
            // The loader gives each file globals of its own.
            let copy = folder.path().join(format!("kernels-{i}.so"));
            fs::copy(&file, &copy).unwrap();
            // SAFETY: the library was just built from this folder's sources; its only initialisers register
            // kernels.
            let library: &libloading::Library =
                Box::leak(Box::new(unsafe { libloading::Library::new(copy) }.unwrap()));
            // SAFETY: the function has this signature in fibers.cpp, and the library is never closed.
            *unsafe { library.get::<RunKernel>(b"run_kernel\0") }.unwrap()
        });
        Libraries { idle: Mutex::new(idle.collect()), returned: Condvar::new() }
    })
}

/// Runs the C++ compiler.
fn compiler(folder: &Path, arguments: &[&OsStr]) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new("c++")
        // No implicit contraction into fused operations.
        .args(["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-w"])
        // Symbols of templates and inline functions would otherwise be shared by all copies of the library.
        .arg("-fvisibility=hidden")
        // Its check of longjmp knows no stacks but the thread's own.
        .arg("-U_FORTIFY_SOURCE")
        .arg("-I")
        .arg(here.join("tests/host"))
        .arg("-I")
        .arg(here.join("cu"))
        .arg("-I")
        .arg(folder)
        .args(arguments)
        .output()
        .expect("this test needs a C++ compiler called c++");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn compile(folder: &Path) -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = vec![here.join("tests/host/fibers.cpp")];
    for (name, text) in generated_headers(GpuArch { major: 9, minor: 0 }) {
        fs::write(folder.join(name), text).unwrap();
    }
    for family in KernelFamily::ALL {
        let names = kernels().into_iter().filter(|k| k.unit.family() == family).map(|k| k.name);
        let lines: Vec<String> =
            names.map(|n| format!("static Register register_{n}(\"{n}\", &{n});")).collect();
        let file = folder.join(format!("{}.cpp", family.name()));
        let text = format!("#include \"cuda.h\"\n#include \"{}.cu\"\n{}\n", family.name(), lines.join("\n"));
        fs::write(&file, text).unwrap();
        sources.push(file);
    }
    let objects: Vec<PathBuf> =
        sources.iter().map(|source| folder.join(source.file_name().unwrap()).with_extension("o")).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((source, object)) =
                    sources.iter().zip(&objects).nth(next.fetch_add(1, Ordering::Relaxed))
                {
                    let (c, o) = (OsStr::new("-c"), OsStr::new("-o"));
                    compiler(folder, &[c, source.as_os_str(), o, object.as_os_str()]);
                }
            });
        }
    });
    let library = folder.join("kernels.so");
    let mut arguments = vec![OsStr::new("-shared"), OsStr::new("-o"), library.as_os_str()];
    arguments.extend(objects.iter().map(|object| object.as_os_str()));
    compiler(folder, &arguments);
    library
}

/// Copies device memory to the host, runs the kernel there, and copies the memory back.
fn launch(
    k: &mut SimKernel<'_>,
    libraries: &Libraries,
    name: &CString,
    sizes: &[usize],
    regions: &Regions,
) -> KernelResult {
    let regions = regions.lock().unwrap_or_else(PoisonError::into_inner).clone();
    // 16-byte words, so that addresses are aligned as on a device.
    let mut copies: Vec<Vec<u128>> = Vec::new();
    for &(at, n) in &regions {
        let mut copy = vec![0_u128; (n as usize).div_ceil(16)];
        bytemuck::cast_slice_mut(&mut copy)[..n as usize]
            .copy_from_slice(&k.view::<u8>(DevicePtr(at), n as usize)?);
        copies.push(copy);
    }
    let (mut params, mut offsets) = (Vec::new(), Vec::new());
    for (i, &size) in sizes.iter().enumerate() {
        params.resize(params.len().next_multiple_of(8), 0);
        offsets.push(params.len());
        match size {
            4 => params.extend(k.arg::<[u8; 4]>(i)?),
            8 => params.extend(translate(k.arg(i)?, &regions, &copies).to_le_bytes()),
            12 => params.extend(k.arg::<[u8; 12]>(i)?),
            16 => params.extend(k.arg::<[u8; 16]>(i)?),
            20 => params.extend(bytemuck::bytes_of(&k.arg::<[u32; 5]>(i)?)),
            24 => params.extend(bytemuck::bytes_of(&k.arg::<[u32; 6]>(i)?)),
            28 => params.extend(bytemuck::bytes_of(&k.arg::<[u32; 7]>(i)?)),
            32 => params.extend(bytemuck::bytes_of(&k.arg::<[u32; 8]>(i)?)),
            36 => params.extend(bytemuck::bytes_of(&k.arg::<[u32; 9]>(i)?)),
            40 => params.extend(bytemuck::bytes_of(&k.arg::<[u32; 10]>(i)?)),
            44 => params.extend(bytemuck::bytes_of(&k.arg::<[u32; 11]>(i)?)),
            48 => params.extend(bytemuck::bytes_of(&k.arg::<[u32; 12]>(i)?)),
            52 => params.extend(bytemuck::bytes_of(&k.arg::<[u32; 13]>(i)?)),
            60 => params.extend(bytemuck::bytes_of(&k.arg::<[u32; 15]>(i)?)),
            72 => params.extend(bytemuck::bytes_of(&k.arg::<[u32; 18]>(i)?)),
            76 => params.extend(bytemuck::bytes_of(&k.arg::<[u32; 19]>(i)?)),
            80 => params.extend(bytemuck::bytes_of(&k.arg::<[u32; 20]>(i)?)),
            88 => params.extend(bytemuck::bytes_of(&k.arg::<[u32; 22]>(i)?)),
            112 => params.extend(bytemuck::bytes_of(&k.arg::<[u32; 28]>(i)?)),
            // Tables of addresses and sizes, 24 and 56 bytes per entry.
            3072 => params.extend(translated(&k.arg::<[[u64; 3]; 128]>(i)?.concat(), &regions, &copies)),
            3584 => params.extend(translated(&k.arg::<[[u64; 7]; 64]>(i)?.concat(), &regions, &copies)),
            n => panic!("{name:?} has a parameter of {n} bytes"),
        }
    }
    let (grid, block) = (k.config().grid, k.config().block);
    // SAFETY: parameters are at the given offsets, with the sizes that the launchers list and the compiler
    // checked. Pointers among them refer to `copies`, which outlive the call. A kernel that accesses memory
    // outside its buffers does so here too: the pools have guard zones around each buffer, and this is a
    // test.
    let result = libraries.run(|run| unsafe {
        run(name.as_ptr(), grid.as_ptr(), block.as_ptr(), params.as_ptr(), offsets.as_ptr())
    });
    assert_eq!(result, 0, "no kernel {name:?}");
    for (&(at, n), copy) in regions.iter().zip(&copies) {
        k.write(DevicePtr(at), &bytemuck::cast_slice::<u128, u8>(copy)[..n as usize])?;
    }
    Ok(())
}

/// Translates an address on the simulated device to the copies; other addresses (null, pinned memory) are
/// unchanged.
fn translate(address: u64, regions: &[(u64, u64)], copies: &[Vec<u128>]) -> u64 {
    let inside = regions.iter().zip(copies).find(|((at, n), _)| (*at..at + n.max(&1)).contains(&address));
    inside.map_or(address, |((at, _), copy)| copy.as_ptr() as u64 + (address - at))
}

/// Translates words of which some are addresses.
fn translated(words: &[u64], regions: &[(u64, u64)], copies: &[Vec<u128>]) -> Vec<u8> {
    words.iter().flat_map(|&word| translate(word, regions, copies).to_le_bytes()).collect()
}
