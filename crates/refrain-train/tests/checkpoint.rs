//! Checkpoints are complete or absent, and only load if they are what was saved.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use refrain_tensor::DType;
use refrain_train::checkpoint::{
    BestLoss, Checkpoint, CheckpointError, CheckpointStore, FileSpec, FrozenBase, RandomState, RunProgress,
    RunState, SaveRequest, TensorSpec,
};
use refrain_train::data::DataPosition;
use refrain_train::{RealStorage, Storage, StorageFile, TrainConfig};

const WEIGHTS: &str = "weights.safetensors";

fn state(step: u64) -> RunState {
    RunState {
        step,
        position: DataPosition { epoch: 1, window: 2, row: 3, fingerprint: "0123-7".into() },
        random: RandomState { seed: u64::MAX, counter: step },
        config: TrainConfig { lr: 0.1 + 0.2, ..TrainConfig::default() },
        progress: RunProgress {
            loss: Some(1.0 / 3.0),
            best: Some(BestLoss { step: 1, loss: 0.1 + 0.7 }),
            n_tokens: 1 << 60,
            seconds: 1e-9,
        },
        base: Some(FrozenBase { name: "base".into(), sha256: "ab".repeat(32) }),
    }
}

fn tensor(name: &str, dtype: DType, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.into(), dtype, shape: shape.to_vec() }
}

fn weights() -> Vec<TensorSpec> {
    vec![
        tensor("embed", DType::BF16, &[5, 3]),
        tensor("norm", DType::F32, &[3]),
        tensor("flags", DType::U8, &[7]),
        tensor("count", DType::I64, &[]),
        tensor("empty", DType::F32, &[0, 4]),
    ]
}

fn files() -> Vec<FileSpec> {
    let moments = vec![tensor("embed", DType::F32, &[5, 3])];
    vec![
        FileSpec { name: WEIGHTS.into(), tensors: weights() },
        FileSpec { name: "moments.safetensors".into(), tensors: moments },
    ]
}

/// Bytes that differ by file, tensor and step.
fn bytes(step: u64, file: &str, tensor: &TensorSpec) -> Vec<u8> {
    let salt = step as usize * 31 + file.len() * 7 + tensor.name.len();
    (0..tensor.n_bytes().unwrap()).map(|i| (i * 13 + salt) as u8).collect()
}

fn save(store: &CheckpointStore, step: u64, is_best: bool) -> Result<PathBuf, CheckpointError> {
    let (state, files) = (state(step), files());
    let request = SaveRequest { state: &state, files: &files, is_best, keep: 2 };
    store.save(&request, &mut |file, tensor| Ok(Cow::Owned(bytes(step, &file.name, tensor))))
}

fn entries(folder: &Path) -> BTreeSet<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name != ".lock").collect()
}

fn assert_whole(path: &Path, step: u64) {
    let checkpoint = Checkpoint::open(path).unwrap();
    assert_eq!(*checkpoint.state(), state(step));
    for file in files() {
        checkpoint.expect(&file.name, &file.tensors).unwrap();
        for tensor in &file.tensors {
            assert_eq!(checkpoint.read(&file.name, &tensor.name).unwrap(), bytes(step, &file.name, tensor));
        }
    }
}

#[test]
fn checkpoints_round_trip_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(&folder.path().join("out")).unwrap();
    assert_eq!(store.latest().unwrap(), None);
    let path = save(&store, 1000, false).unwrap();
    assert!(path.ends_with("out/step-00001000"));
    assert_eq!(store.latest().unwrap(), Some(path.clone()));
    assert_whole(&path, 1000);
    assert_whole(store.folder(), 1000);
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.files().collect::<Vec<_>>(), ["moments.safetensors", WEIGHTS]);
    assert_eq!(checkpoint.tensors(WEIGHTS).count(), 5);
    assert_eq!(checkpoint.state().config.lr.to_bits(), (0.1f64 + 0.2).to_bits());
}

#[test]
fn other_programs_can_read_the_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(folder.path()).unwrap();
    let path = save(&store, 3, false).unwrap();
    let content = fs::read(path.join(WEIGHTS)).unwrap();
    let read = safetensors::SafeTensors::deserialize(&content).unwrap();
    for tensor in weights() {
        let view = read.tensor(&tensor.name).unwrap();
        assert_eq!(view.shape(), tensor.shape);
        assert_eq!(view.data(), bytes(3, WEIGHTS, &tensor));
        let offset = view.data().as_ptr() as usize - content.as_ptr() as usize;
        assert!(offset.is_multiple_of(tensor.dtype.block_bytes()), "{}: {offset}", tensor.name);
    }
}

#[test]
fn the_newest_checkpoints_and_the_best_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(folder.path()).unwrap();
    for step in [10, 20, 30, 40, 50] {
        save(&store, step, step == 20).unwrap();
    }
    let names = ["best", "latest", "step-00000020", "step-00000040", "step-00000050"];
    assert_eq!(entries(folder.path()), names.map(str::to_owned).into());
    assert_whole(&store.best().unwrap().unwrap(), 20);
    assert_whole(&store.latest().unwrap().unwrap(), 50);
    save(&store, 60, true).unwrap();
    let names = ["best", "latest", "step-00000050", "step-00000060"];
    assert_eq!(entries(folder.path()), names.map(str::to_owned).into());
}

#[test]
fn saving_a_step_again_does_not_replace_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(folder.path()).unwrap();
    let first = save(&store, 7, false).unwrap();
    let second = save(&store, 7, false).unwrap();
    assert_ne!(first, second);
    assert_eq!(store.latest().unwrap(), Some(second.clone()));
    assert_whole(&second, 7);
    save(&store, 8, false).unwrap();
    assert_eq!(
        entries(folder.path()),
        ["latest", "step-00000007-1", "step-00000008"].map(str::to_owned).into()
    );
}

#[test]
fn any_changed_byte_is_detected() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(folder.path()).unwrap();
    let path = save(&store, 5, false).unwrap();
    for name in [WEIGHTS, "moments.safetensors", "state.json"] {
        let file = path.join(name);
        let good = fs::read(&file).unwrap();
        for at in (0..good.len()).step_by(if name == "state.json" { 5 } else { 17 }) {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&file, &bad).unwrap();
            let error = Checkpoint::open(&path).expect_err(&format!("{name}, byte {at}"));
            let expected = match &error {
                CheckpointError::Checksum { path, .. } => path == &file && name != "state.json",
                CheckpointError::State { path, .. } | CheckpointError::Version { path, .. } => path == &file,
                _ => false,
            };
            assert!(expected, "{name}, byte {at}: {error}");
        }
        fs::write(&file, &good).unwrap();
    }
    assert_whole(&path, 5);
}

#[test]
fn a_truncated_or_missing_file_is_reported_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(folder.path()).unwrap();
    let path = save(&store, 5, false).unwrap();
    let file = path.join(WEIGHTS);
    let good = fs::read(&file).unwrap();
    for len in [0, 4, good.len() / 2, good.len() - 1] {
        fs::write(&file, &good[..len]).unwrap();
        let error = Checkpoint::open(&path).unwrap_err();
        assert!(matches!(&error, CheckpointError::Size { found, .. } if *found == len as u64), "{error}");
        assert_eq!(error.hint().unwrap(), "resume from an earlier checkpoint");
    }
    fs::remove_file(&file).unwrap();
    assert!(matches!(Checkpoint::open(&path), Err(CheckpointError::MissingFile { path }) if path == file));
    fs::write(&file, good).unwrap();
    let state = path.join("state.json");
    let text = fs::read(&state).unwrap();
    for len in [0, 10, text.len() - 1] {
        fs::write(&state, &text[..len]).unwrap();
        assert!(matches!(Checkpoint::open(&path), Err(CheckpointError::State { .. })));
    }
}

#[test]
fn another_version_is_refused_before_anything_else() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(folder.path()).unwrap();
    let path = save(&store, 5, false).unwrap();
    fs::write(path.join("state.json"), "{\"version\":2,\"what\":[]}").unwrap();
    let error = Checkpoint::open(&path).unwrap_err();
    assert!(error.to_string().ends_with("has version 2, the supported version is 1"), "{error}");
}

#[test]
fn differences_to_another_model_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(folder.path()).unwrap();
    let checkpoint = Checkpoint::open(&save(&store, 5, false).unwrap()).unwrap();
    let mut expected = weights();
    expected[0].shape = vec![5, 4];
    expected[1].dtype = DType::BF16;
    expected[2].name = "other".into();
    let error = checkpoint.expect(WEIGHTS, &expected).unwrap_err();
    let CheckpointError::Differs { differences, .. } = &error else { panic!("{error}") };
    assert_eq!(
        *differences,
        [
            "embed is BF16 [5, 3], the model has BF16 [5, 4]",
            "norm is F32 [3], the model has BF16 [3]",
            "other is missing",
            "flags is not in the model"
        ]
    );
    let many: Vec<_> = (0..100).map(|i| tensor(&format!("t{i}"), DType::F32, &[1])).collect();
    let error = checkpoint.expect(WEIGHTS, &many).unwrap_err();
    assert!(error.to_string().ends_with("t4 is missing; and 100 more"), "{error}");
    assert!(matches!(checkpoint.expect("masters", &many), Err(CheckpointError::MissingFile { .. })));
    assert!(matches!(checkpoint.read(WEIGHTS, "nothing"), Err(CheckpointError::Differs { .. })));
}

/// A disk with space for a number of bytes.
struct SmallDisk(Arc<AtomicU64>);

struct SmallDiskFile(Box<dyn StorageFile>, Arc<AtomicU64>);

impl Storage for SmallDisk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        Ok(Box::new(SmallDiskFile(RealStorage.create(path)?, self.0.clone())))
    }
}

impl Write for SmallDiskFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let free = self.1.load(Ordering::Relaxed) as usize;
        if free == 0 && !bytes.is_empty() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let n = self.0.write(&bytes[..bytes.len().min(free)])?;
        self.1.fetch_sub(n as u64, Ordering::Relaxed);
        Ok(n)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl StorageFile for SmallDiskFile {
    fn sync(&mut self) -> io::Result<()> {
        self.0.sync()
    }
}

#[test]
fn a_full_disk_while_saving_leaves_the_previous_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let disk_space = Arc::new(AtomicU64::new(1 << 30));
    let store = CheckpointStore::open_on(folder.path(), Box::new(SmallDisk(disk_space.clone()))).unwrap();
    let first = save(&store, 1, true).unwrap();
    let used = (1 << 30) - disk_space.load(Ordering::Relaxed);
    // Down to the last bytes, which belong to the two pointers.
    for free in (0..used).step_by(397).chain(used - 30..used) {
        disk_space.store(free, Ordering::Relaxed);
        let error = save(&store, 2, true).expect_err(&format!("{free} of {used} bytes"));
        assert!(matches!(error, CheckpointError::NoSpace { .. }), "{error}");
        assert!(error.hint().unwrap().contains("the previous checkpoint is intact"));
        assert_whole(&first, 1);
        assert_eq!(store.best().unwrap(), Some(first.clone()), "{free}");
        // The new checkpoint is the latest once its pointer is written; after that, only the pointer to the
        // best can fail.
        let latest = Checkpoint::open(folder.path()).unwrap().state().step;
        assert_eq!(latest, if free < used - 14 { 1 } else { 2 }, "{free} of {used}");
        let left = entries(folder.path());
        assert!(left.iter().all(|name| !name.ends_with(".tmp")), "{left:?}");
        if latest == 1 {
            assert_eq!(left, ["best", "latest", "step-00000001"].map(str::to_owned).into());
        }
    }
    disk_space.store(1 << 30, Ordering::Relaxed);
    save(&store, 2, true).unwrap();
    assert_whole(folder.path(), 2);
}

#[test]
fn a_tensor_that_fails_or_has_the_wrong_size_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(folder.path()).unwrap();
    let (state, files) = (state(1), files());
    let request = SaveRequest { state: &state, files: &files, is_best: false, keep: 1 };
    let lost = store.save(&request, &mut |_, _| Err(io::ErrorKind::BrokenPipe.into()));
    assert!(matches!(lost, Err(CheckpointError::Write { .. })));
    let short = store.save(&request, &mut |_, _| Ok(Cow::Borrowed(&[1, 2, 3])));
    assert!(matches!(short, Err(CheckpointError::Write { .. })));
    assert_eq!(entries(folder.path()), BTreeSet::new());
}

#[test]
fn invalid_tensors_and_names_are_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(folder.path()).unwrap();
    let state = state(1);
    let one = |name: &str, tensors: Vec<TensorSpec>| FileSpec { name: name.into(), tensors };
    let twice = || vec![tensor("a", DType::F32, &[1]); 2];
    let cases = [
        vec![one("../x", vec![])],
        vec![one("a/b", vec![])],
        vec![one("", vec![])],
        vec![one("state.json", vec![])],
        vec![one("x", vec![]), one("x", vec![])],
        vec![one("x", twice())],
        vec![one("x", vec![tensor("a", DType::Q4_0, &[32])])],
        vec![one("x", vec![tensor("a", DType::F32, &[usize::MAX, 2])])],
        vec![one("x", vec![tensor("__metadata__", DType::F32, &[1])])],
    ];
    for files in cases {
        let request = SaveRequest { state: &state, files: &files, is_best: false, keep: 1 };
        let error = store.save(&request, &mut |_, _| panic!("no tensor is fetched")).unwrap_err();
        assert!(
            matches!(error, CheckpointError::BadName { .. } | CheckpointError::BadTensor { .. }),
            "{error}"
        );
        assert_eq!(entries(folder.path()), BTreeSet::new());
    }
}

#[test]
fn two_runs_cannot_save_in_one_folder() {
    let folder = tempfile::tempdir().unwrap();
    let first = CheckpointStore::open(folder.path()).unwrap();
    assert!(matches!(CheckpointStore::open(folder.path()), Err(CheckpointError::Busy { .. })));
    drop(first);
    CheckpointStore::open(folder.path()).unwrap();
}

#[test]
fn only_the_remains_of_an_interrupted_save_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let left = folder.path().join(".step-00000009.123-0.tmp");
    fs::create_dir(&left).unwrap();
    fs::write(left.join(WEIGHTS), "half").unwrap();
    File::create(folder.path().join("notes.tmp")).unwrap();
    fs::create_dir(folder.path().join("step-00000003")).unwrap();
    let store = CheckpointStore::open(folder.path()).unwrap();
    assert_eq!(entries(folder.path()), ["notes.tmp", "step-00000003"].map(str::to_owned).into());
    assert_eq!(store.latest().unwrap(), None);
}

#[test]
fn a_folder_without_a_checkpoint_and_a_dangling_pointer_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::NotFound { .. }), "{error}");
    let store = CheckpointStore::open(folder.path()).unwrap();
    let path = save(&store, 4, false).unwrap();
    for name in ["step-00000009", "../../etc", "", "\u{fffd}"] {
        fs::write(folder.path().join("latest"), name).unwrap();
        let error = Checkpoint::open(folder.path()).unwrap_err();
        assert!(matches!(error, CheckpointError::Pointer { .. }), "{error}");
        assert_eq!(error.hint().unwrap(), format!("resume from {}", path.display()));
    }
}
