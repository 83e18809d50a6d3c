//! The checks behind `refrain doctor`.

mod common;

use common::faults;
use refrain_driver::doctor::{CheckVerdict, DoctorRow, examine, examine_device};
use refrain_driver::sim::{SimDriver, SimOptions};
use refrain_driver::{Device, DeviceKind};

fn row<'a>(rows: &'a [DoctorRow], name: &str) -> &'a DoctorRow {
    rows.iter().find(|r| r.name == name).unwrap_or_else(|| panic!("no row {name} in {rows:#?}"))
}

fn print(rows: &[DoctorRow]) {
    for r in rows {
        let advice = r.advice.as_deref().unwrap_or_default();
        println!("{:26} {:7} {}: {} {advice}", r.name, r.verdict.word(), r.measured, r.words);
    }
}

#[test]
fn every_check_passes_on_the_simulated_device_and_leaves_nothing_behind() {
    let sim = SimDriver::new(SimOptions::default());
    let device = Device::simulated(&sim).unwrap();
    let live = sim.stats().live;
    let rows = examine_device(&device);
    print(&rows);
    assert!(rows.iter().all(|r| r.verdict == CheckVerdict::Good && !r.words.is_empty()), "{rows:#?}");
    assert_eq!(rows.len(), 13);
    assert_eq!(sim.stats().live, live);
}

#[test]
fn a_driver_whose_capture_fails_gets_exactly_one_bad_row_for_it() {
    let faults = faults("on every begin_capture: fail 901");
    let rows = examine(DeviceKind::Sim(SimOptions { faults, ..SimOptions::default() }));
    assert_eq!(row(&rows, "record by stream capture").verdict, CheckVerdict::Bad);
    assert!(row(&rows, "record by stream capture").measured.contains("901"));
    assert_eq!(row(&rows, "record by explicit nodes").verdict, CheckVerdict::Good);
    assert_eq!(row(&rows, "context survived").verdict, CheckVerdict::Good);
}

#[test]
fn a_replay_with_one_wrong_byte_is_detected() {
    let faults = faults("on every replay: wrong byte");
    let rows = examine(DeviceKind::Sim(SimOptions { faults, ..SimOptions::default() }));
    for name in ["record by stream capture", "record by explicit nodes"] {
        assert_eq!(row(&rows, name).verdict, CheckVerdict::Bad);
        assert!(row(&rows, name).measured.contains("replay"), "{:?}", row(&rows, name));
    }
}

#[test]
fn a_context_lost_during_the_checks_is_reported_in_the_rows() {
    let faults = faults("on 2nd replay: illegal address");
    let rows = examine(DeviceKind::Sim(SimOptions { faults, ..SimOptions::default() }));
    let bad = row(&rows, "launch cost");
    assert!(bad.verdict == CheckVerdict::Bad && bad.words.contains("700") && bad.advice.is_some(), "{bad:?}");
    assert_eq!(row(&rows, "read bandwidth").verdict, CheckVerdict::Skipped);
}

#[test]
#[cfg_attr(feature = "gpu-tests", ignore = "this machine has a CUDA device")]
fn a_machine_without_a_gpu_gets_a_row_with_the_reason() {
    let rows = examine(DeviceKind::Cuda(0));
    assert!(rows[0].verdict == CheckVerdict::Bad && rows[0].advice.is_some(), "{rows:#?}");
    assert!(rows[1..].iter().all(|r| r.verdict == CheckVerdict::Skipped));
}

#[test]
#[cfg_attr(not(feature = "gpu-tests"), ignore = "needs a CUDA device: cargo xtask gpu-bundle")]
fn everything_works_on_a_gpu() {
    let rows = examine(DeviceKind::Cuda(0));
    print(&rows);
    assert!(rows.iter().all(|r| matches!(r.verdict, CheckVerdict::Good | CheckVerdict::Note)), "{rows:#?}");
}
