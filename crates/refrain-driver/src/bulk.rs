//! Large uploads: threads fill pinned slots while the device copies from others.
//!
//! One thread copies 7 to 9 GB/s into pinned memory, but the bus moves 25 to 50. So several threads fill one slot
//! each, and the caller's thread, the only one that calls the driver, sends full slots in the order in which their
//! bytes were pushed. The threads make no driver calls and end with the upload.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use crate::api::{DevicePtr, HostPtr};
use crate::error::{DriverError, panic_message};
use crate::launch::Launch;
use crate::memory::{Buf, Lease};
use crate::staging::Staging;
use crate::stream::{Stream, check_len};

/// Smallest upload for which starting threads pays off.
const MIN_THREADED_BYTES: u64 = 16 << 20;
/// On a 16-core host, 12 threads copied no faster than 8, and 16 copied slower.
const MAX_THREADS: usize = 8;
/// Double buffering: while a thread fills a slot, the device copies its previous one.
const SLOTS_PER_THREAD: usize = 2;

/// Number of threads and size of the pinned buffer of a bulk upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BulkOptions {
    /// Threads that fill slots; with 0, the caller's thread fills them.
    pub n_threads: usize,
    /// Bytes per slot. There are two slots per thread, and at least two.
    pub slot_bytes: usize,
}

impl BulkOptions {
    /// Chooses options for an upload of `bytes` on this machine; they use at most 16 MiB of pinned memory.
    #[must_use]
    pub fn for_bytes(bytes: u64) -> BulkOptions {
        let cores = thread::available_parallelism().map_or(1, |n| n.get());
        let n_threads = if bytes < MIN_THREADED_BYTES { 0 } else { cores.min(MAX_THREADS) };
        BulkOptions { n_threads, slot_bytes: 1 << 20 }
    }
}

/// A bulk upload that is being assembled; see [`Stream::bulk`].
pub struct Bulk<'s, 'b> {
    stream: &'s mut Stream,
    lease: &'s mut Lease,
    staging: &'s mut Staging,
    fillers: Vec<SlotFiller<'b>>,
    next_filler: usize,
    /// Pushed but not yet sent, in order.
    unsent: VecDeque<PendingSend>,
    n_unsent_copies: usize,
}

enum PendingSend {
    /// A copy out of a slot. It can be sent once the filler is done; a slot filled by the caller is full already.
    Copy {
        slot: usize,
        from: HostPtr,
        to: DevicePtr,
        bytes: u64,
        filler: Option<usize>,
    },
    Launch(Box<Launch>),
}

/// The caller's handle to a thread that fills slots. The thread reports completion in the order of its jobs.
struct SlotFiller<'b> {
    jobs: Sender<FillJob<'b>>,
    done: Receiver<()>,
}

struct FillJob<'b> {
    to: HostPtr,
    bytes: &'b [u8],
}

impl Stream {
    /// Uploads many bytes in the order in which `f` pushes them. Returns when the caller's memory is no longer
    /// needed; the last copies may still be in flight. A launch that `f` adds in between runs after the bytes
    /// pushed before it have arrived.
    ///
    /// If `f` fails, bytes already sent stay sent.
    pub fn bulk<'b, R, E: From<DriverError>>(
        &mut self,
        lease: &mut Lease,
        options: BulkOptions,
        f: impl FnOnce(&mut Bulk<'_, 'b>) -> Result<R, E>,
    ) -> Result<R, E> {
        self.check_usable("upload", 0)?;
        let n_slots = SLOTS_PER_THREAD * options.n_threads.max(1);
        let mut staging = Staging::new(self.context(), n_slots, options.slot_bytes)?;
        thread::scope(|scope| {
            let start = |idx: usize| {
                let (jobs, requests) = channel::<FillJob<'b>>();
                let (report, done) = channel();
                let name = format!("refrain-fill-{idx}");
                let started =
                    thread::Builder::new().name(name).spawn_scoped(scope, move || fill(&requests, &report));
                // If a thread cannot start, the upload only takes longer.
                started.is_ok().then_some(SlotFiller { jobs, done })
            };
            let mut bulk = Bulk {
                stream: self,
                lease,
                staging: &mut staging,
                fillers: (0..options.n_threads).map_while(start).collect(),
                next_filler: 0,
                unsent: VecDeque::new(),
                n_unsent_copies: 0,
            };
            // Unwind safety: a panic drops the upload, which ends its threads.
            let made = catch_unwind(AssertUnwindSafe(|| f(&mut bulk))).unwrap_or_else(|payload| {
                let message = panic_message(&*payload);
                Err(DriverError::Panicked { what: "uploading".to_owned(), message }.into())
            })?;
            bulk.finish()?;
            Ok(made)
        })
    }
}

/// Body of a filler thread; returns when the job channel closes.
fn fill(jobs: &Receiver<FillJob<'_>>, done: &Sender<()>) {
    while let Ok(FillJob { to, bytes }) = jobs.recv() {
        // SAFETY: `Bulk::push` acquired a slot of at least that many bytes from `Staging::acquire`. Nobody else
        // reads or writes it until this job reports completion, and the staging memory outlives the scope of this
        // thread.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        if done.send(()).is_err() {
            return;
        }
    }
}

impl<'b> Bulk<'_, 'b> {
    /// Adds bytes to upload to `dst`.
    pub fn push(&mut self, dst: Buf, bytes: &'b [u8]) -> Result<(), DriverError> {
        check_len("an upload", dst, bytes.len())?;
        let mut to = DevicePtr(self.lease.memory().resolve(dst)?.address());
        for chunk in bytes.chunks(self.staging.slot_bytes()) {
            // A slot whose copy has not been sent has no event to wait for.
            while self.n_unsent_copies >= self.staging.n_slots() {
                self.send_first()?;
            }
            let (slot, from) = self.staging.acquire(self.stream)?;
            let n = self.fillers.len();
            let filler = (n > 0).then(|| self.next_filler % n);
            self.next_filler += 1;
            let queued =
                filler.is_some_and(|i| self.fillers[i].jobs.send(FillJob { to: from, bytes: chunk }).is_ok());
            if !queued {
                // SAFETY: the slot is at least as large as `chunk`, `acquire` found it idle, and no filler has it.
                unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr(), from.as_ptr(), chunk.len()) };
            }
            let filler = filler.filter(|_| queued);
            let bytes = chunk.len() as u64;
            self.unsent.push_back(PendingSend::Copy { slot, from, to, bytes, filler });
            self.n_unsent_copies += 1;
            to = to.add(bytes);
            self.send_ready()?;
        }
        Ok(())
    }

    /// Adds a launch that runs after the bytes pushed so far.
    pub fn launch(&mut self, launch: Launch) -> Result<(), DriverError> {
        self.unsent.push_back(PendingSend::Launch(Box::new(launch)));
        self.send_ready()
    }

    /// Sends entries from the front of the queue as long as they are ready.
    fn send_ready(&mut self) -> Result<(), DriverError> {
        loop {
            let filler = match self.unsent.front() {
                Some(PendingSend::Copy { filler, .. }) => *filler,
                Some(PendingSend::Launch(_)) => None,
                None => return Ok(()),
            };
            if filler.is_some_and(|i| self.fillers[i].done.try_recv().is_err()) {
                return Ok(());
            }
            self.send_filled()?;
        }
    }

    /// Waits until the first entry is ready, and sends it.
    fn send_first(&mut self) -> Result<(), DriverError> {
        if let Some(PendingSend::Copy { filler: Some(i), .. }) = self.unsent.front()
            && self.fillers[*i].done.recv().is_err()
        {
            unreachable!("a filler thread ends only when it has no jobs")
        }
        self.send_filled()
    }

    /// Sends the first entry, whose filler has reported completion.
    fn send_filled(&mut self) -> Result<(), DriverError> {
        match self.unsent.pop_front() {
            Some(PendingSend::Copy { slot, from, to, bytes, .. }) => {
                self.n_unsent_copies -= 1;
                self.stream.begin_use(self.lease)?;
                self.staging.send_slot(self.stream, slot, from, to, bytes)
            }
            Some(PendingSend::Launch(launch)) => {
                self.stream.run(self.lease, false, |q| q.launch(&launch)).map(|_| ())
            }
            None => Ok(()),
        }
    }

    fn finish(mut self) -> Result<(), DriverError> {
        while !self.unsent.is_empty() {
            self.send_first()?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Bulk<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bulk ({} threads, {} entries pending)", self.fillers.len(), self.unsent.len())
    }
}
