//! Texts and hints of errors.

use std::sync::Arc;
use std::time::Duration;

use refrain_driver::sim::SimOptions;
use refrain_driver::{Code, Device, DeviceKind, DriverError, Lost, WorkOrigin};

fn origin() -> Option<WorkOrigin> {
    Some(WorkOrigin { step: Arc::from("layer 3"), kernel: Arc::from("rope_bf16"), replay: None })
}

#[test]
fn texts_name_the_operation_and_the_numbers_on_both_sides() {
    let cases = [
        (
            DriverError::LibraryMissing { library: "libcuda.so.1" },
            "no CUDA driver: libcuda.so.1 was not found",
        ),
        (
            DriverError::CaptureIncompatible { what: "upload", bytes: 4096 },
            "upload (4096 bytes) was refused: this device is being recorded on",
        ),
        (
            DriverError::Driver { call: "cuGraphLaunch", code: Code::OUT_OF_MEMORY, origin: origin() },
            "cuGraphLaunch failed: CUDA_ERROR_OUT_OF_MEMORY (2); sent last: kernel \"rope_bf16\" of step \"layer 3\"",
        ),
        (
            DriverError::RecordingDeadline {
                name: "decode".to_owned(),
                limit: Duration::from_secs(10),
                n_enqueued: 41,
                last: origin(),
            },
            "recording \"decode\" was aborted after 10s with 41 calls enqueued; sent last: kernel \"rope_bf16\" of \
             step \"layer 3\"",
        ),
        (
            DriverError::ContextLost(Arc::new(Lost {
                code: Some(Code::ILLEGAL_ADDRESS),
                call: "cuStreamQuery",
                origin: Some(WorkOrigin { replay: Some(17), ..origin().unwrap() }),
            })),
            "the device context is lost: cuStreamQuery returned CUDA_ERROR_ILLEGAL_ADDRESS (700); sent last: replay 17 \
             of graph \"layer 3\" (ends in kernel \"rope_bf16\")",
        ),
        (
            DriverError::OutOfMemory {
                what: "region \"kv\"".to_owned(),
                need_bytes: 10,
                free_bytes: 4,
                total_bytes: 8,
            },
            "region \"kv\" needs 10 bytes, 4 of 8 are free on the device",
        ),
        (
            DriverError::ParamSize {
                kernel: "rope_bf16".to_owned(),
                step: "layer 3".to_owned(),
                index: 2,
                expected: 4,
                given: 8,
            },
            "parameter 2 of kernel \"rope_bf16\" has 4 bytes, got 8 (step \"layer 3\")",
        ),
    ];
    for (error, text) in cases {
        assert_eq!(error.to_string(), text);
        assert!(!text.ends_with('.'));
    }
}

#[test]
fn errors_with_a_remedy_have_a_hint() {
    let hint = |e: DriverError| e.hint().unwrap_or_default();
    assert!(hint(DriverError::LibraryMissing { library: "libcuda.so.1" }).contains("nvidia-smi"));
    assert!(hint(DriverError::NoDevice { code: Code::NO_DEVICE }).contains("CUDA_VISIBLE_DEVICES"));
    assert!(
        hint(DriverError::CaptureIncompatible { what: "upload", bytes: 1 }).contains("before the recording")
    );
}

#[test]
#[cfg_attr(feature = "gpu-tests", ignore = "this machine has a CUDA device")]
fn opening_a_missing_gpu_names_what_is_missing_and_how_to_check() {
    let error = Device::open(DeviceKind::Cuda(0)).unwrap_err();
    assert!(matches!(error, DriverError::LibraryMissing { .. } | DriverError::NoDevice { .. }), "{error}");
    assert!(error.hint().unwrap().contains("nvidia-smi"));
}

#[test]
fn a_machine_without_devices_reports_no_device() {
    let none =
        Device::open(DeviceKind::Sim(SimOptions { n_devices: 0, ..SimOptions::default() })).unwrap_err();
    assert!(matches!(none, DriverError::NoDevice { .. }), "{none}");
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn a_gpu_that_does_not_exist_is_reported_with_the_number_of_gpus() {
    let error = Device::open(DeviceKind::Cuda(99)).unwrap_err();
    assert!(matches!(error, DriverError::NoSuchDevice { ordinal: 99, .. }), "{error}");
}
