//! Many bytes to the device: threads fill pinned slots while the device copies others out of them.
//!
//! One thread copies 7 to 9 GB/s into pinned memory, a bus takes 25 to 50. So some threads fill a slot each, and the
//! caller's thread, which alone speaks to the driver, sends full slots in the order in which their bytes were named.
//! The threads make no driver call and end with the transfer.

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

/// From this many bytes on, threads are worth their start.
const MIN_THREADED_BYTES: u64 = 16 << 20;
/// Twelve copied no faster than eight on a host of sixteen cores, and sixteen slower.
const MAX_THREADS: usize = 8;
/// While a thread fills a slot, the device copies the one it filled before.
const SLOTS_PER_THREAD: usize = 2;

/// How many bytes are on their way at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BulkOptions {
    /// Threads that fill slots; with none the caller's thread does.
    pub n_threads: usize,
    /// Bytes of a slot. There are two for each thread, and at least two.
    pub slot_bytes: usize,
}

impl BulkOptions {
    /// What suits a transfer of so many bytes on this machine: at most 16 MiB of pinned memory.
    #[must_use]
    pub fn for_bytes(bytes: u64) -> BulkOptions {
        let cores = thread::available_parallelism().map_or(1, |n| n.get());
        let n_threads = if bytes < MIN_THREADED_BYTES { 0 } else { cores.min(MAX_THREADS) };
        BulkOptions { n_threads, slot_bytes: 1 << 20 }
    }
}

/// A transfer that is being named, piece by piece; see [`Stream::bulk`].
pub struct Bulk<'s, 'b> {
    stream: &'s mut Stream,
    lease: &'s mut Lease,
    staging: &'s mut Staging,
    fillers: Vec<SlotFiller<'b>>,
    next_filler: usize,
    /// Named and not sent yet, in order.
    pending: VecDeque<PendingSend>,
    n_pending_copies: usize,
}

enum PendingSend {
    /// A slot that is full when its filler says so; the caller's own are full already.
    Copy {
        slot: usize,
        from: HostPtr,
        to: DevicePtr,
        bytes: u64,
        filler: Option<usize>,
    },
    Launch(Box<Launch>),
}

/// A thread that fills slots, as its caller sees it. It answers in the order of its jobs.
struct SlotFiller<'b> {
    jobs: Sender<FillJob<'b>>,
    done: Receiver<()>,
}

struct FillJob<'b> {
    to: HostPtr,
    bytes: &'b [u8],
}

impl Stream {
    /// Sends many bytes, in the order in which `f` names them, and returns when the caller's memory is no longer needed:
    /// the last of them may still be on their way. Launches that are named between them run when what was named before has arrived.
    ///
    /// When `f` fails, what was sent before stays sent.
    pub fn bulk<'b, R, E: From<DriverError>>(
        &mut self,
        lease: &mut Lease,
        options: BulkOptions,
        f: impl FnOnce(&mut Bulk<'_, 'b>) -> Result<R, E>,
    ) -> Result<R, E> {
        self.usable("upload", 0)?;
        let n_slots = SLOTS_PER_THREAD * options.n_threads.max(1);
        let mut staging = Staging::new(self.context(), n_slots, options.slot_bytes)?;
        thread::scope(|scope| {
            let start = |idx: usize| {
                let (jobs, asked) = channel::<FillJob<'b>>();
                let (tell, done) = channel();
                let name = format!("refrain-fill-{idx}");
                let started =
                    thread::Builder::new().name(name).spawn_scoped(scope, move || fill(&asked, &tell));
                // With fewer threads it takes longer, that is all.
                started.is_ok().then_some(SlotFiller { jobs, done })
            };
            let mut bulk = Bulk {
                stream: self,
                lease,
                staging: &mut staging,
                fillers: (0..options.n_threads).map_while(start).collect(),
                next_filler: 0,
                pending: VecDeque::new(),
                n_pending_copies: 0,
            };
            // Unwind safety: the transfer is dropped with the panic, and its threads end with it.
            let made = catch_unwind(AssertUnwindSafe(|| f(&mut bulk))).unwrap_or_else(|payload| {
                let message = panic_message(&*payload);
                Err(DriverError::Panicked { what: "uploading".to_owned(), message }.into())
            })?;
            bulk.finish()?;
            Ok(made)
        })
    }
}

/// What a thread does until nobody has jobs for it any more.
fn fill(jobs: &Receiver<FillJob<'_>>, done: &Sender<()>) {
    while let Ok(FillJob { to, bytes }) = jobs.recv() {
        // SAFETY: `Bulk::push` asked `Staging::acquire` for a slot of at least that many bytes, which nobody else writes
        // or reads until this job was answered; the staging outlives the scope of this thread.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        if done.send(()).is_err() {
            return;
        }
    }
}

impl<'b> Bulk<'_, 'b> {
    /// Names bytes and where they go.
    pub fn push(&mut self, dst: Buf, bytes: &'b [u8]) -> Result<(), DriverError> {
        check_len("an upload", dst, bytes.len())?;
        let mut at = DevicePtr(self.lease.memory().resolve(dst)?.address());
        for part in bytes.chunks(self.staging.slot_bytes()) {
            // A slot whose copy was not sent yet has no event to wait for.
            while self.n_pending_copies >= self.staging.n_slots() {
                self.send_first()?;
            }
            let (slot, from) = self.staging.acquire(self.stream)?;
            let n = self.fillers.len();
            let filler = (n > 0).then(|| self.next_filler % n);
            self.next_filler += 1;
            let asked =
                filler.is_some_and(|i| self.fillers[i].jobs.send(FillJob { to: from, bytes: part }).is_ok());
            if !asked {
                // SAFETY: the slot is as large as `part`, and `acquire` has seen it idle; no filler knows of it.
                unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), from.as_ptr(), part.len()) };
            }
            let filler = filler.filter(|_| asked);
            let bytes = part.len() as u64;
            self.pending.push_back(PendingSend::Copy { slot, from, to: at, bytes, filler });
            self.n_pending_copies += 1;
            at = at.add(bytes);
            self.send_ready()?;
        }
        Ok(())
    }

    /// Names a launch behind the bytes so far.
    pub fn launch(&mut self, launch: Launch) -> Result<(), DriverError> {
        self.pending.push_back(PendingSend::Launch(Box::new(launch)));
        self.send_ready()
    }

    /// Sends what is first and ready.
    fn send_ready(&mut self) -> Result<(), DriverError> {
        loop {
            let filler = match self.pending.front() {
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

    /// Waits until what is first is ready, and sends it.
    fn send_first(&mut self) -> Result<(), DriverError> {
        if let Some(PendingSend::Copy { filler: Some(i), .. }) = self.pending.front()
            && self.fillers[*i].done.recv().is_err()
        {
            unreachable!("a thread that fills slots ends only when it has no jobs")
        }
        self.send_filled()
    }

    /// Sends what is first; its filler has answered.
    fn send_filled(&mut self) -> Result<(), DriverError> {
        match self.pending.pop_front() {
            Some(PendingSend::Copy { slot, from, to, bytes, .. }) => {
                self.n_pending_copies -= 1;
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
        while !self.pending.is_empty() {
            self.send_first()?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Bulk<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bulk ({} threads, {} pieces pending)", self.fillers.len(), self.pending.len())
    }
}
