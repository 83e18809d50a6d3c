//! Function table of the driver library, loaded once.
//!
//! The library is opened through cudarc, and handles and structs are its `sys` types or integers of the same size.
//! The functions are looked up here instead of called through `sys` for two reasons: `sys` panics on a missing
//! library or symbol, and it declares results as a Rust enum, so an unknown code from a newer driver would be
//! undefined behaviour.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::path::PathBuf;

use cudarc::driver::sys;

use crate::api::RawHostFn;
use crate::error::DriverError;

/// A handle or device address; pointer-sized on every platform that CUDA supports.
type H = u64;

macro_rules! table {
    ($($since:literal { $($name:ident($($arg:ty),* $(,)?);)* })*) => {
        /// One pointer per driver function. All return a `CUresult` as an integer.
        #[expect(non_snake_case, reason = "the driver's own names")]
        pub(super) struct DriverTable {
            $($(pub(super) $name: unsafe extern "C" fn($($arg),*) -> u32,)*)*
        }

        impl DriverTable {
            /// Looks up every function in the library, which must be present. The error names the first missing
            /// one.
            fn look_up() -> Result<DriverTable, DriverError> {
                // SAFETY: opening the library runs its initialisers, which are safe to run at any time; the caller
                // has checked that it is present, so cudarc does not panic.
                let library = unsafe { sys::culib() };
                Ok(DriverTable {
                    $($($name: {
                        let symbol = concat!(stringify!($name), "\0").as_bytes();
                        // SAFETY: the type is the function's C signature in cuda.h, where every handle is a pointer
                        // and `CUresult` an unsigned int; the library is never closed.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> u32>(symbol) };
                        *found.map_err(|_| DriverError::SymbolMissing {
                            symbol: stringify!($name),
                            since: $since,
                        })?
                    },)*)*
                })
            }
        }
    };
}

table! {
    "11.4" {
        cuInit(c_uint);
        cuDriverGetVersion(*mut c_int);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGet(*mut c_int, c_int);
        cuDeviceGetName(*mut c_char, c_int, c_int);
        cuDeviceGetAttribute(*mut c_int, c_int, c_int);
        cuDeviceTotalMem_v2(*mut usize, c_int);
        cuDeviceGetUuid_v2(*mut [u8; 16], c_int);
        cuDeviceGetPCIBusId(*mut c_char, c_int, c_int);
        cuDevicePrimaryCtxRetain(*mut H, c_int);
        cuDevicePrimaryCtxRelease_v2(c_int);
        cuCtxCreate_v2(*mut H, c_uint, c_int);
        cuCtxDestroy_v2(H);
        cuCtxSetCurrent(H);
        cuCtxGetCurrent(*mut H);
        cuCtxSynchronize();
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuMemAlloc_v2(*mut H, usize);
        cuMemFree_v2(H);
        cuMemAllocHost_v2(*mut H, usize);
        cuMemFreeHost(H);
        cuMemAllocManaged(*mut H, usize, c_uint);
        cuMemAllocAsync(*mut H, usize, H);
        cuMemFreeAsync(H, H);
        cuMemcpyHtoD_v2(H, *const u8, usize);
        cuMemcpyDtoH_v2(*mut u8, H, usize);
        cuMemcpyHtoDAsync_v2(H, *const u8, usize, H);
        cuMemcpyDtoHAsync_v2(*mut u8, H, usize, H);
        cuMemcpyDtoDAsync_v2(H, H, usize, H);
        cuMemsetD8Async(H, u8, usize, H);
        cuStreamCreate(*mut H, c_uint);
        cuStreamDestroy_v2(H);
        cuStreamSynchronize(H);
        cuStreamQuery(H);
        cuStreamWaitEvent(H, H, c_uint);
        cuStreamBeginCapture_v2(H, c_uint);
        cuStreamEndCapture(H, *mut H);
        cuStreamIsCapturing(H, *mut c_uint);
        cuStreamGetCaptureInfo_v2(H, *mut c_uint, *mut u64, *mut H, *mut *const H, *mut usize);
        cuLaunchHostFunc(H, RawHostFn, *mut c_void);
        cuEventCreate(*mut H, c_uint);
        cuEventDestroy_v2(H);
        cuEventRecord(H, H);
        cuEventQuery(H);
        cuEventSynchronize(H);
        cuEventElapsedTime(*mut f32, H, H);
        cuModuleLoadData(*mut H, *const u8);
        cuModuleUnload(H);
        cuModuleGetFunction(*mut H, H, *const c_char);
        cuFuncGetAttribute(*mut c_int, c_int, H);
        cuFuncSetAttribute(H, c_int, c_int);
        cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, H, c_int, usize);
        cuGraphCreate(*mut H, c_uint);
        cuGraphDestroy(H);
        cuGraphDestroyNode(H);
        cuGraphAddMemcpyNode(*mut H, H, *const H, usize, *const sys::CUDA_MEMCPY3D, H);
        cuGraphAddMemsetNode(*mut H, H, *const H, usize, *const sys::CUDA_MEMSET_NODE_PARAMS, H);
        cuGraphAddChildGraphNode(*mut H, H, *const H, usize, H);
        cuGraphAddEmptyNode(*mut H, H, *const H, usize);
        cuGraphAddHostNode(*mut H, H, *const H, usize, *const sys::CUDA_HOST_NODE_PARAMS);
        cuGraphGetNodes(H, *mut H, *mut usize);
        cuGraphNodeGetType(H, *mut c_uint);
        cuGraphChildGraphNodeGetGraph(H, *mut H);
        cuGraphInstantiateWithFlags(*mut H, H, c_ulonglong);
        cuGraphExecDestroy(H);
        cuGraphUpload(H, H);
        cuGraphLaunch(H, H);
        cuGraphKernelNodeSetAttribute(H, c_uint, *const sys::CUlaunchAttributeValue);
    }
    "12.0" {
        cuLaunchKernelEx(*const sys::CUlaunchConfig, H, *mut *mut c_void, *mut *mut c_void);
        cuGraphAddKernelNode_v2(*mut H, H, *const H, usize, *const sys::CUDA_KERNEL_NODE_PARAMS);
    }
    "12.3" {
        cuGraphAddDependencies_v2(H, *const H, *const H, *const sys::CUgraphEdgeData, usize);
        cuGraphGetEdges_v2(H, *mut H, *mut H, *mut sys::CUgraphEdgeData, *mut usize);
        cuGraphAddNode_v2(*mut H, H, *const H, *const sys::CUgraphEdgeData, usize, *mut sys::CUgraphNodeParams);
        cuGraphConditionalHandleCreate(*mut u64, H, H, c_uint, c_uint);
    }
    "12.4" {
        cuFuncGetParamInfo(H, usize, *mut usize, *mut usize);
        cuFuncLoad(H);
    }
}

/// Opens the driver library.
pub(super) fn open() -> Result<(DriverTable, Option<PathBuf>), DriverError> {
    // SAFETY: opens and closes the driver library, whose initialisers and finalisers are safe to run at any time.
    if !unsafe { sys::is_culib_present() } {
        return Err(DriverError::LibraryMissing { library: "libcuda.so.1" });
    }
    let table = DriverTable::look_up()?;
    let path = path_of(table.cuInit as *const c_void);
    Ok((table, path))
}

/// Returns the file that a function was loaded from.
#[cfg(unix)]
fn path_of(function: *const c_void) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt as _;
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `dladdr` only looks up the address and fills `info`, for which all zeros are valid.
    let (found, info) = unsafe { (libc::dladdr(function, info.as_mut_ptr()), info.assume_init()) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: `dladdr` succeeded, so the name is a C string owned by the loader, and the library stays open.
    let name = unsafe { std::ffi::CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes())))
}

#[cfg(not(unix))]
fn path_of(_: *const c_void) -> Option<PathBuf> {
    None
}
