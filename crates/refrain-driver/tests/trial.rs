//! Trials of stream capture on the simulated device, and stored findings.

use std::time::Duration;

use refrain_driver::sim::{FaultScript, SimOptions};
use refrain_driver::trial::{Finding, Findings, Outcome, Subject, choose, run};
use refrain_driver::{DeviceKind, Method};

/// The simulated device with faults for the trial.
fn sim(script: &str) -> DeviceKind {
    DeviceKind::Sim(SimOptions { faults: FaultScript::parse(script).unwrap(), ..SimOptions::default() })
}

fn no_trial() -> Outcome {
    panic!("a stored finding makes a trial unnecessary")
}

const POISON: &str = "on 1st end_capture: sticky 901";

#[test]
fn a_good_driver_records_by_stream_capture() {
    assert_eq!(run(sim("")).unwrap(), Finding::Usable);
    let subject = Subject::of(&sim("")).unwrap();
    let choice = choose(&subject, None, || Outcome::Found(run(sim("")).unwrap()));
    assert_eq!((choice.method, choice.avoids_capture(), choice.remembered), (Method::Stream, false, false));
    assert!(choice.because.contains("CUDA"), "{choice:?}");
}

#[test]
fn a_capture_that_loses_the_context_is_harmful_and_one_that_only_fails_is_not() {
    let Finding::Harmful { because } = run(sim(POISON)).unwrap() else { panic!("not found") };
    assert!(because.contains("901"), "{because}");
    let Finding::Harmful { because } = run(sim("on 1st begin_capture: sticky 901")).unwrap() else {
        panic!("not found")
    };
    assert!(because.contains("cuStreamBeginCapture"), "{because}");
    assert_eq!(run(sim("on 1st end_capture: fail 901")).unwrap(), Finding::Usable);
    // The first three replays are of explicit nodes.
    let Finding::Harmful { because } = run(sim("on 4th replay: wrong byte")).unwrap() else {
        panic!("not found")
    };
    assert!(because.contains("different bytes"), "{because}");
    // A broken device says nothing about capture.
    run(sim("on 1st launch: illegal address")).unwrap_err();
}

#[test]
fn a_finding_is_stored_for_its_driver_and_device() {
    let folder = tempfile::tempdir().unwrap();
    let findings = Findings::new(folder.path().join("drivers"));
    let subject = Subject::of(&sim(POISON)).unwrap();
    let first = choose(&subject, Some(&findings), || Outcome::Found(run(sim(POISON)).unwrap()));
    assert_eq!((first.method, first.avoids_capture(), first.remembered), (Method::Nodes, true, false));
    assert!(first.because.contains(&subject.driver) && first.because.contains("901"), "{first:?}");
    let second = choose(&subject, Some(&findings), no_trial);
    assert_eq!((second.method, second.remembered), (Method::Nodes, true));
    assert_eq!(second.finding, first.finding);
    for other in [
        Subject { driver: "999.1, CUDA 14.0".into(), ..subject.clone() },
        Subject { device: "another".into(), ..subject.clone() },
    ] {
        let choice = choose(&other, Some(&findings), || Outcome::Found(Finding::Usable));
        assert_eq!((choice.method, choice.remembered), (Method::Stream, false));
    }
    assert_eq!(findings.read(&subject), first.finding);
    assert_eq!(std::fs::read_dir(folder.path().join("drivers")).unwrap().count(), 3, "no file is left over");
}

#[test]
fn a_trial_that_hangs_or_dies_is_a_finding_and_one_that_did_not_run_is_not() {
    let subject = Subject::of(&sim("")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let findings = Findings::new(folder.path());
    let not_run = choose(&subject, Some(&findings), || Outcome::NotRun("no such\nprogram".into()));
    assert_eq!((not_run.method, not_run.finding), (Method::Stream, None));
    assert!(not_run.because.contains("no such program"), "{}", not_run.because);
    assert_eq!(findings.read(&subject), None, "without a finding nothing is stored");
    let hung = choose(&subject, Some(&findings), || Outcome::Hung(Duration::from_secs(20)));
    assert_eq!(hung.method, Method::Nodes);
    assert!(hung.because.contains("20s"), "{}", hung.because);
    assert_eq!(choose(&subject, Some(&findings), no_trial).finding, hung.finding);
    let died = choose(&subject, None, || Outcome::Died("signal 11".into()));
    assert_eq!(died.method, Method::Nodes);
    assert!(died.because.contains("signal 11"), "{}", died.because);
}

#[test]
fn a_file_that_cannot_be_read_means_another_trial() {
    let subject = Subject::of(&sim("")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let findings = Findings::new(folder.path());
    let harmful = Finding::Harmful { because: "it did".into() };
    findings.write(&subject, &harmful).unwrap();
    let file = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    let good = std::fs::read(&file).unwrap();
    for bad in
        [&b""[..], b"\xff\xfe", b"refrain", &good[..good.len() / 2], &[b"x".as_slice(), &good].concat()]
    {
        std::fs::write(&file, bad).unwrap();
        assert_eq!(findings.read(&subject), None, "{bad:?}");
        let choice = choose(&subject, Some(&findings), || Outcome::Found(harmful.clone()));
        assert_eq!((choice.method, choice.remembered), (Method::Nodes, false));
        assert_eq!(findings.read(&subject), Some(harmful.clone()));
    }
    // A folder in place of the file can be neither read nor replaced, but a method is still chosen.
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    let choice = choose(&subject, Some(&findings), || Outcome::Found(Finding::Usable));
    assert_eq!((choice.method, choice.remembered), (Method::Stream, false));
}

#[test]
fn findings_are_read_as_they_are_written() {
    for finding in [Finding::Usable, Finding::Harmful { because: "a b".into() }] {
        assert_eq!(finding.to_string().parse(), Ok(finding));
    }
    let lines = Finding::Harmful { because: "a\nb".into() };
    assert_eq!(lines.to_string().parse(), Ok(Finding::Harmful { because: "a b".into() }));
    assert!("stream capture is".parse::<Finding>().is_err());
}
