//! The NVRTC compiler library, loaded when needed: building this crate needs no CUDA toolkit.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

use crate::cache::KernelCache;
use crate::compile::{Compiler, compile, n_threads};
use crate::error::KernelError;
use crate::load::GpuArch;
use crate::source::{HEADERS, KernelFamily, KernelUnit, grids};
use crate::tuning::Tuning;

type NvrtcProgram = *mut std::ffi::c_void;

const HOPPER: GpuArch = GpuArch { major: 9, minor: 0 };

/// Compiler options of every unit, besides the architecture.
pub(crate) const OPTIONS: [&CStr; 2] = [c"--std=c++17", c"-default-device"];

macro_rules! functions {
    ($($field:ident: $symbol:literal fn($($arg:ty),*);)*) => {
        #[derive(Clone, Copy)]
        struct NvrtcFunctions { $($field: unsafe extern "C" fn($($arg),*) -> u32,)* }

        impl NvrtcFunctions {
            fn look_up(library: &libloading::Library, file: &str) -> Result<NvrtcFunctions, KernelError> {
                Ok(NvrtcFunctions {
                    $($field: {
                        // SAFETY: the type is the function's signature in nvrtc.h, with its result as the number it
                        // is; `Nvrtc` keeps the library open as long as the pointer.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> u32>($symbol) };
                        *found.map_err(|_| KernelError::NvrtcSymbol {
                            library: file.to_owned(),
                            symbol: stringify!($field),
                        })?
                    },)*
                })
            }
        }
    };
}

functions! {
    version: b"nvrtcVersion\0" fn(*mut c_int, *mut c_int);
    n_archs: b"nvrtcGetNumSupportedArchs\0" fn(*mut c_int);
    archs: b"nvrtcGetSupportedArchs\0" fn(*mut c_int);
    create: b"nvrtcCreateProgram\0" fn(*mut NvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
    destroy: b"nvrtcDestroyProgram\0" fn(*mut NvrtcProgram);
    compile: b"nvrtcCompileProgram\0" fn(NvrtcProgram, c_int, *const *const c_char);
    log_size: b"nvrtcGetProgramLogSize\0" fn(NvrtcProgram, *mut usize);
    log: b"nvrtcGetProgramLog\0" fn(NvrtcProgram, *mut c_char);
    cubin_size: b"nvrtcGetCUBINSize\0" fn(NvrtcProgram, *mut usize);
    cubin: b"nvrtcGetCUBIN\0" fn(NvrtcProgram, *mut c_char);
    ptx_size: b"nvrtcGetPTXSize\0" fn(NvrtcProgram, *mut usize);
    ptx: b"nvrtcGetPTX\0" fn(NvrtcProgram, *mut c_char);
}

/// Architecture and kind of compiled code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CompileTarget {
    pub(crate) arch: GpuArch,
    /// PTX, which the driver compiles further, for a GPU newer than the compiler.
    pub(crate) ptx: bool,
}

/// The NVRTC library. Cheap to clone.
#[derive(Clone)]
pub struct Nvrtc {
    functions: NvrtcFunctions,
    version: (i32, i32),
    archs: Vec<GpuArch>,
    file: String,
    _library: Arc<libloading::Library>,
    /// NVRTC opens this library itself, by name, and finds it because it is already open.
    _builtins: Arc<[libloading::Library]>,
}

impl Nvrtc {
    /// Opens the library at a path, or in the usual locations.
    pub fn open(path: Option<&Path>) -> Result<Nvrtc, KernelError> {
        let candidates = match path {
            Some(path) => vec![path.to_owned()],
            None => candidate_paths(),
        };
        let mut tried = Vec::new();
        for file in candidates {
            // SAFETY: loading a library runs its initialisers; NVRTC's set up the compiler and nothing else.
            match unsafe { libloading::Library::new(&file) } {
                Ok(library) => return Nvrtc::from_library(library, &file),
                Err(_) => tried.push(file.display().to_string()),
            }
        }
        Err(KernelError::NvrtcMissing { tried: tried.join(", ") })
    }

    fn from_library(library: libloading::Library, path: &Path) -> Result<Nvrtc, KernelError> {
        let file = loaded_from(path).display().to_string();
        let functions = NvrtcFunctions::look_up(&library, &file)?;
        let (mut major, mut minor, mut n) = (0, 0, 0);
        // SAFETY: both functions write to the integers whose addresses they receive.
        unsafe {
            ok("nvrtcVersion", (functions.version)(&mut major, &mut minor))?;
            ok("nvrtcGetNumSupportedArchs", (functions.n_archs)(&mut n))?;
        }
        let mut archs = vec![0; usize::try_from(n).unwrap_or(0)];
        // SAFETY: it writes as many integers as the call above reported, which is the length of the vector.
        unsafe { ok("nvrtcGetSupportedArchs", (functions.archs)(archs.as_mut_ptr()))? };
        let arch = |a: c_int| GpuArch { major: a as u32 / 10, minor: a as u32 % 10 };
        let archs = archs.into_iter().map(arch).collect();
        Ok(Nvrtc {
            functions,
            version: (major, minor),
            archs,
            file,
            _library: Arc::new(library),
            _builtins: open_builtins(path).into(),
        })
    }

    /// The library's version as (major, minor), for example `(13, 0)`.
    #[must_use]
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The loaded file.
    #[must_use]
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Whether it compiles machine code for an architecture.
    #[must_use]
    pub fn knows(&self, arch: GpuArch) -> bool {
        self.archs.contains(&arch)
    }

    /// Compiles a unit to machine code.
    pub fn compile(&self, unit: KernelUnit, arch: GpuArch) -> Result<Vec<u8>, KernelError> {
        compile_unit(self, unit, CompileTarget { arch, ptx: false }, Tuning::of(arch))
    }

    /// Returns what to compile for a GPU: machine code, or PTX if the library is older than the GPU.
    pub(crate) fn target(&self, card: GpuArch) -> Result<CompileTarget, KernelError> {
        if self.archs.contains(&card) {
            return Ok(CompileTarget { arch: card, ptx: false });
        }
        let newest = self.archs.iter().copied().filter(|&a| a < card).max();
        let arch = newest.ok_or(KernelError::TooOld { compute: (card.major, card.minor) })?;
        Ok(CompileTarget { arch, ptx: !arch.runs_on(card) })
    }

    fn text(
        &self,
        program: NvrtcProgram,
        size: unsafe extern "C" fn(NvrtcProgram, *mut usize) -> u32,
        get: unsafe extern "C" fn(NvrtcProgram, *mut c_char) -> u32,
        call: &'static str,
    ) -> Result<Vec<u8>, KernelError> {
        let mut n = 0;
        // SAFETY: `program` is a live program of this library: callers pass one that they created and have
        // not destroyed.
        unsafe { ok(call, size(program, &mut n))? };
        let mut bytes = vec![0_u8; n];
        // SAFETY: as above; the second function writes as many bytes as the first reported.
        unsafe { ok(call, get(program, bytes.as_mut_ptr().cast()))? };
        Ok(bytes)
    }
}

/// Opens the builtins library in the same folder: the loader does not search a Python package's folder.
fn open_builtins(path: &Path) -> Vec<libloading::Library> {
    let folder = path.parent().filter(|f| !f.as_os_str().is_empty());
    let found = folder.map(|f| entries_starting_with(f, "libnvrtc-builtins.so.")).unwrap_or_default();
    // SAFETY: the library is NVRTC's own, from the same folder; its initialisers set up nothing else.
    found.iter().filter_map(|file| unsafe { libloading::Library::new(file) }.ok()).collect()
}

impl std::fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Nvrtc {}.{} from {}", self.version.0, self.version.1, self.file)
    }
}

fn ok(call: &'static str, code: u32) -> Result<(), KernelError> {
    if code == 0 { Ok(()) } else { Err(KernelError::Nvrtc { call, code }) }
}

/// Destroys a program on every exit path.
struct Owned<'a>(&'a Nvrtc, NvrtcProgram);

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        // SAFETY: this library created the program, and only this function destroys it. The returned code
        // could only report an invalid program.
        unsafe { (self.0.functions.destroy)(&mut self.1) };
    }
}

/// The library together with its target.
pub(crate) struct NvrtcFor {
    nvrtc: Nvrtc,
    target: CompileTarget,
    tuning: &'static Tuning,
}

impl NvrtcFor {
    /// Opens the library for a GPU.
    pub(crate) fn open(
        path: Option<&Path>,
        card: GpuArch,
        tuning: &'static Tuning,
    ) -> Result<NvrtcFor, KernelError> {
        let nvrtc = Nvrtc::open(path)?;
        let target = nvrtc.target(card)?;
        Ok(NvrtcFor { nvrtc, target, tuning })
    }
}

impl Compiler for NvrtcFor {
    fn key(&self, unit: KernelUnit) -> String {
        static HEADERS_KEY: OnceLock<String> = OnceLock::new();
        let headers = HEADERS_KEY.get_or_init(|| {
            let all = HEADERS.into_iter().chain([("grids.cuh", grids())]);
            let parts = all.flat_map(|(name, text)| [name.as_bytes(), text.as_bytes()]);
            KernelCache::key(&parts.collect::<Vec<_>>())
        });
        let (source, made_by) = (unit.source(), format!("{:?} {:?}", self.nvrtc.version, self.target));
        let mut parts = vec![unit.family().name().as_bytes(), source.as_bytes()];
        let tuning = self.tuning.header();
        parts.extend([headers.as_bytes(), tuning.as_bytes(), made_by.as_bytes()]);
        parts.extend(OPTIONS.iter().map(|o| o.to_bytes()));
        KernelCache::key(&parts)
    }

    fn compile(&self, unit: KernelUnit) -> Result<Vec<u8>, KernelError> {
        compile_unit(&self.nvrtc, unit, self.target, self.tuning)
    }

    fn tuning(&self) -> &'static Tuning {
        self.tuning
    }

    fn arch(&self) -> GpuArch {
        self.target.arch
    }
}

fn compile_unit(
    nvrtc: &Nvrtc,
    unit: KernelUnit,
    target: CompileTarget,
    tuning: &Tuning,
) -> Result<Vec<u8>, KernelError> {
    let c = |text: &str| {
        CString::new(text).map_err(|_| KernelError::Nvrtc { call: "a source with a NUL byte", code: 0 })
    };
    let (source, name) = (c(&unit.source())?, c(&format!("{}.cu", unit.family().name()))?);
    let tuning = tuning.header();
    let headers = || HEADERS.into_iter().chain([("tuning.cuh", tuning.as_str()), ("grids.cuh", grids())]);
    let names = headers().map(|(name, _)| c(name)).collect::<Result<Vec<_>, _>>()?;
    let texts = headers().map(|(_, text)| c(text)).collect::<Result<Vec<_>, _>>()?;
    let name_ptrs: Vec<*const c_char> = names.iter().map(|n| n.as_ptr()).collect();
    let text_ptrs: Vec<*const c_char> = texts.iter().map(|t| t.as_ptr()).collect();
    let kind = if target.ptx { "compute" } else { "sm" };
    // Architecture-specific instructions (`sm_90a`) for this GPU only; PTX must also run on later ones.
    let has_own = matches!(unit.family(), KernelFamily::Batch | KernelFamily::BatchPlain);
    let only = if has_own && !target.ptx && target.arch == HOPPER { "a" } else { "" };
    let arch = c(&format!("--gpu-architecture={kind}_{}{}{only}", target.arch.major, target.arch.minor))?;
    let options: Vec<*const c_char> = OPTIONS.iter().map(|o| o.as_ptr()).chain([arch.as_ptr()]).collect();
    let mut program = null_mut();
    // SAFETY: all strings are NUL-terminated and live until the program is destroyed at the end of this
    // function; the lists have as many entries as the call is passed.
    let created = unsafe {
        (nvrtc.functions.create)(
            &mut program,
            source.as_ptr(),
            name.as_ptr(),
            name_ptrs.len() as c_int,
            text_ptrs.as_ptr(),
            name_ptrs.as_ptr(),
        )
    };
    ok("nvrtcCreateProgram", created)?;
    let program = Owned(nvrtc, program);
    // SAFETY: the program is live; the options are C strings that outlive the call.
    let compiled = unsafe { (nvrtc.functions.compile)(program.1, options.len() as c_int, options.as_ptr()) };
    if compiled != 0 {
        let f = &nvrtc.functions;
        let log = nvrtc.text(program.1, f.log_size, f.log, "nvrtcGetProgramLog").unwrap_or_default();
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
        let log =
            if log.is_empty() { format!("nvrtcCompileProgram failed with code {compiled}") } else { log };
        return Err(KernelError::Compile { unit: unit.to_string(), arch: target.arch.to_string(), log });
    }
    let f = &nvrtc.functions;
    match target.ptx {
        true => nvrtc.text(program.1, f.ptx_size, f.ptx, "nvrtcGetPTX"),
        false => nvrtc.text(program.1, f.cubin_size, f.cubin, "nvrtcGetCUBIN"),
    }
}

/// Compiled code of every unit, to embed in a release.
#[derive(Clone, PartialEq, Eq)]
pub struct Image {
    /// In the order of [`KernelUnit::all`].
    code: Vec<Vec<u8>>,
}

impl Image {
    /// Creates an image from the code of every unit, in the order of [`KernelUnit::all`].
    pub(crate) fn new(code: Vec<Vec<u8>>) -> Image {
        Image { code }
    }

    /// Code of a unit.
    #[must_use]
    pub fn code(&self, unit: KernelUnit) -> Option<&[u8]> {
        let idx = KernelUnit::all().iter().position(|u| *u == unit)?;
        self.code.get(idx).map(Vec::as_slice)
    }

    /// Serialises the image: for each unit the length of its code, then the code.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let parts =
            self.code.iter().flat_map(|code| [(code.len() as u32).to_le_bytes().to_vec(), code.clone()]);
        parts.flatten().collect()
    }

    /// Inverse of [`Image::to_bytes`]; `None` for malformed bytes.
    pub(crate) fn from_bytes(mut bytes: &[u8]) -> Option<Image> {
        let mut all = Vec::with_capacity(KernelUnit::all().len());
        while let Some((head, tail)) = bytes.split_first_chunk() {
            let (code, tail) = tail.split_at_checked(u32::from_le_bytes(*head) as usize)?;
            all.push(code.to_vec());
            bytes = tail;
        }
        (bytes.is_empty() && all.len() == KernelUnit::all().len()).then_some(Image { code: all })
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bytes: usize = self.code.iter().map(Vec::len).sum();
        write!(f, "Image of {bytes} bytes in {} units", self.code.len())
    }
}

/// Compiles every unit for an architecture, to machine code or to PTX.
pub fn compile_all(nvrtc: &Nvrtc, arch: GpuArch, ptx: bool) -> Result<Image, KernelError> {
    let (target, tuning) = (CompileTarget { arch, ptx }, Tuning::of(arch));
    let compiler = NvrtcFor { nvrtc: nvrtc.clone(), target, tuning };
    Ok(Image::new(compile(&compiler, KernelUnit::all(), n_threads(), &mut |_| {})?))
}

/// File of a library that was opened by name alone, as far as the system reports it.
fn loaded_from(path: &Path) -> PathBuf {
    if path.parent().is_some_and(|p| !p.as_os_str().is_empty()) {
        return path.to_owned();
    }
    let (maps, name) =
        (std::fs::read_to_string("/proc/self/maps").unwrap_or_default(), path.to_string_lossy());
    let found = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    // The linked file may have a longer name: libnvrtc.so.13 is libnvrtc.so.13.0.88.
    let is_it = |file: &&str| file.rsplit('/').next().is_some_and(|last| last.starts_with(&*name));
    found.into_iter().find(is_it).map_or_else(|| path.to_owned(), PathBuf::from)
}

/// Candidate paths: the loader's own search, then the locations that toolkits and Python packages use.
fn candidate_paths() -> Vec<PathBuf> {
    let names = ["libnvrtc.so.13", "libnvrtc.so.12"];
    let mut paths: Vec<PathBuf> = names.iter().map(PathBuf::from).collect();
    paths.push("libnvrtc.so".into());
    let mut folders = vec![PathBuf::from("/usr/local/cuda/lib64"), "/usr/lib/x86_64-linux-gnu".into()];
    folders.extend(python_folders(&["cu13", "cuda_nvrtc"]));
    paths.extend(folders.iter().flat_map(|f| names.iter().map(move |n| f.join(n))).filter(|p| p.exists()));
    paths
}

/// Folders in which the Python packages of these names put their libraries.
pub(crate) fn python_folders(packages: &[&str]) -> Vec<PathBuf> {
    let home = std::env::home_dir().map(|h| h.join(".local/lib"));
    let libs = [Some("/usr/local/lib".into()), Some("/usr/lib".into()), home];
    let mut folders = Vec::new();
    for lib in libs.into_iter().flatten() {
        for python in entries_starting_with(&lib, "python3") {
            for site in ["site-packages/nvidia", "dist-packages/nvidia"] {
                folders.extend(packages.iter().map(|p| python.join(site).join(p).join("lib")));
            }
        }
    }
    folders
}

fn entries_starting_with(folder: &Path, start: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|e| e.file_name().to_string_lossy().starts_with(start))
        .map(|e| e.path())
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_with_an_install_hint() {
        let error = Nvrtc::open(Some(Path::new("/nowhere/libnvrtc.so"))).unwrap_err();
        assert!(error.to_string().contains("/nowhere/libnvrtc.so"), "{error}");
        assert!(error.hint().unwrap().contains("pip install nvidia-cuda-nvrtc"));
    }

    #[test]
    fn an_image_survives_serialisation_and_damage_is_detected() {
        let image = Image::new((0..KernelUnit::all().len()).map(|n| vec![7; n]).collect());
        let bytes = image.to_bytes();
        assert_eq!(Image::from_bytes(&bytes), Some(image));
        for cut in 1..bytes.len() {
            assert_eq!(Image::from_bytes(&bytes[..cut]), None, "{cut} bytes");
        }
        assert_eq!(Image::from_bytes(&[0xff; 16]), None);
        assert_eq!(Image::from_bytes(&[]), None);
    }
}
