//! Compares a new graph with the eager run of the same plan before it is trusted.
//!
//! For each of three cases, the plan runs eagerly, without overlap between kernels, and then as a replay,
//! each time from the same poisoned memory. Everything it writes must be equal, bit for bit unless a kernel
//! declares a tolerance. The previous contents are restored in any event.
//!
//! Large memory is compared on the device, by digests. It is copied to the host only if the digests differ,
//! to locate the difference.

use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_driver::{Buf, DriverError, Graph, GraphInfo, Lease, Stream};
use refrain_graph::Reason;
use refrain_kernels::Digester;

use crate::error::CudaError;
use crate::reason::{Stage, reason_of};
use crate::saved::{Saved, chunks};
use crate::warm::{Range, WarmPlan, Work, merged};

/// Number of cases that a graph is verified with.
pub const N_CASES: usize = 3;

/// NaN in every float type and -1 in every integer type, so that a result that was not written, or that was
/// computed from unwritten memory, shows.
const POISON: u8 = 0xFF;

/// Smaller memory is copied to the host directly: a digest costs one launch per range.
const DIGEST_FROM: u64 = 1 << 20;

/// One verification case: the bytes to upload before each run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifyCase {
    /// Buffers and their contents, repeated to the end of the buffer: the control block, and everything that
    /// the plan reads before writing it.
    pub uploads: Vec<(Buf, Vec<u8>)>,
    /// Bytes that are uploaded once and repeated on the device through all of these buffers, with a different
    /// offset in each. Their length is a multiple of 8, or that of the largest buffer.
    pub patterns: Vec<(Vec<u8>, Vec<Buf>)>,
}

impl VerifyCase {
    /// A case without patterns.
    #[must_use]
    pub fn of(uploads: Vec<(Buf, Vec<u8>)>) -> VerifyCase {
        VerifyCase { uploads, patterns: Vec::new() }
    }
}

/// Inputs of a verification.
#[derive(Clone, Debug)]
pub struct VerifySetup {
    cases: Vec<VerifyCase>,
    narrowed: Vec<(Buf, Vec<Buf>)>,
    /// Poisoned before each run; its contents are not compared.
    workspace: Option<Buf>,
    digester: Option<Digester>,
    /// Memory of which only these parts are live between steps.
    transient: Option<(Buf, Vec<Buf>)>,
    /// Memory that holds only zeros.
    zero: Option<Buf>,
}

impl VerifySetup {
    /// A setup with three cases that all differ.
    pub fn new(cases: Vec<VerifyCase>) -> Result<VerifySetup, CudaError> {
        let different = cases.iter().enumerate().filter(|(i, case)| !cases[..*i].contains(case)).count();
        if different < N_CASES {
            return Err(CudaError::TooFewCases { need: N_CASES, got: different });
        }
        Ok(VerifySetup::of_one_case(cases))
    }

    /// For a plan that can only have one case.
    pub(crate) fn of_one_case(cases: Vec<VerifyCase>) -> VerifySetup {
        VerifySetup {
            cases,
            narrowed: Vec::new(),
            workspace: None,
            digester: None,
            transient: None,
            zero: None,
        }
    }

    /// Declares that of the writes to `whole`, these cases can reach only `parts`: the scratch blocks of a
    /// cache. Everything else is neither saved nor touched.
    #[must_use]
    pub fn narrow(mut self, whole: Buf, parts: Vec<Buf>) -> VerifySetup {
        self.narrowed.push((whole, parts));
        self
    }

    /// Declares a buffer that only kernels of the same step read: errors in it show in their results.
    #[must_use]
    pub fn workspace(mut self, buf: Buf) -> VerifySetup {
        self.workspace = Some(buf);
        self
    }

    /// Compares large memory by digests, which are written to the workspace.
    #[must_use]
    pub fn digests(mut self, digester: Digester) -> VerifySetup {
        self.digester = Some(digester);
        self
    }

    /// Declares that of `whole`, only `live` has to be restored: no step is in flight, so nothing else of it
    /// will be read.
    #[must_use]
    pub fn transient(mut self, whole: Buf, live: Vec<Buf>) -> VerifySetup {
        self.transient = Some((whole, live));
        self
    }

    /// Declares that `whole` has held only zeros since it was cleared: it is restored by clearing it again.
    #[must_use]
    pub fn zeroed(mut self, whole: Buf) -> VerifySetup {
        self.zero = Some(whole);
        self
    }

    /// Ranges that the plan writes in this setup.
    fn written(&self, warm: &WarmPlan) -> Vec<Range> {
        let space = warm.space();
        let parts = |buf: Buf| {
            let narrow = self.narrowed.iter().find(|(whole, _)| contains(warm, *whole, buf));
            narrow.map_or_else(|| vec![buf], |(_, parts)| parts.clone())
        };
        let is_result = |buf: &Buf| !self.workspace.is_some_and(|whole| contains(warm, whole, *buf));
        let writes = |work: &Work| work.writes().filter(is_result).flat_map(parts).collect::<Vec<_>>();
        let all = warm.work().iter().flat_map(writes);
        merged(all.filter_map(|buf| space.range(buf)).collect())
    }

    /// Ranges to restore: of transient memory only what is live.
    fn without_transient(&self, warm: &WarmPlan, ranges: Vec<Range>) -> Vec<Range> {
        let Some((whole, live)) = &self.transient else { return ranges };
        let Some(whole) = warm.space().range(*whole) else { return ranges };
        let inside = |r: &Range| r.region == whole.region && whole.start <= r.start && r.end <= whole.end;
        let live = live.iter().filter_map(|buf| warm.space().range(*buf)).filter(|r| inside(r));
        let kept = ranges.iter().copied().filter(|r| !inside(r));
        merged(kept.chain(live).collect())
    }

    fn uploaded(&self, warm: &WarmPlan) -> Vec<Range> {
        let patterned =
            |case: &VerifyCase| case.patterns.iter().flat_map(|(_, bufs)| bufs.clone()).collect::<Vec<_>>();
        let uploaded = |case: &VerifyCase| case.uploads.iter().map(|(buf, _)| *buf).collect::<Vec<_>>();
        let all = self.cases.iter().flat_map(|case| [uploaded(case), patterned(case)].concat());
        all.filter_map(|buf| warm.space().range(buf)).collect()
    }
}

fn contains(warm: &WarmPlan, whole: Buf, part: Buf) -> bool {
    warm.space().contains(whole, part)
}

/// Results of a verification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyReport {
    /// Number of cases compared.
    pub n_cases: usize,
    /// Bytes compared per case.
    pub bytes: u64,
    /// Compared bytes that were still poison after the last eager run, which kernels declare as written but
    /// do not write.
    pub unwritten_bytes: u64,
    /// False if a kernel's declared tolerance was needed.
    pub bit_exact: bool,
    /// Time of the verification.
    pub took: Duration,
}

/// A graph whose replay equals the eager run. Only [`verify`] creates one, and the cache replays nothing
/// else.
#[derive(Debug)]
pub struct Verified<G> {
    graph: G,
    report: VerifyReport,
}

impl<G> Verified<G> {
    /// Results of the verification.
    #[must_use]
    pub fn report(&self) -> &VerifyReport {
        &self.report
    }
}

impl Verified<Graph> {
    /// Nodes and recording time of the graph.
    #[must_use]
    pub fn info(&self) -> &GraphInfo {
        self.graph.info()
    }

    /// Runs the whole recording as one launch, without waiting for it.
    pub fn replay(&self, lease: &mut Lease, stream: &mut Stream) -> Result<(), DriverError> {
        self.graph.replay(lease, stream).map(|_| ())
    }

    /// Number of replays, including those of the verification.
    #[must_use]
    pub fn n_replays(&self) -> u64 {
        self.graph.n_replays()
    }
}

/// The reason why a graph is not trusted.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// A replay differs from the eager run.
    #[error("replay and eager run differ in {buffer}, element {element}, written by {launch} (case {case})")]
    Mismatch {
        /// Name of the buffer.
        buffer: String,
        /// Index of its first differing element.
        element: usize,
        /// The last launch that wrote it.
        launch: String,
        /// Index of the case.
        case: usize,
    },
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl VerifyError {
    /// The error as a reason for the ledger.
    #[must_use]
    pub fn reason(&self) -> Reason {
        match self {
            VerifyError::Mismatch { buffer, element, launch, .. } => {
                Reason::VerifyMismatch { buffer: buffer.clone(), element: *element, launch: launch.clone() }
            }
            VerifyError::Driver(error) => reason_of(error, Stage::Verify),
        }
    }
}

/// Compares a graph with the eager run of the plan it was recorded from.
pub fn verify(
    graph: Graph,
    stream: &mut Stream,
    lease: &mut Lease,
    warm: &WarmPlan,
    check: &VerifySetup,
) -> Result<Verified<Graph>, VerifyError> {
    let began = Instant::now();
    let written = check.written(warm);
    // Pinned results are read before the next step is launched, so they need not be saved.
    let kept = written.iter().filter(|range| warm.space().is_kept(range)).copied();
    let touched = check.without_transient(warm, merged(kept.chain(check.uploaded(warm)).collect()));
    let mut saved = Saved::take(stream, lease, warm.space(), &touched, check.zero)?;
    let compared = compare_cases(&graph, stream, lease, warm, check, &written);
    // Restore even after a mismatch or a failed replay: the next run must not see the changes. An error of
    // the comparison takes precedence over one of the restore.
    let restored = saved.restore(stream, lease, warm.space());
    let mut report = compared?;
    restored?;
    report.took = began.elapsed();
    Ok(Verified { graph, report })
}

/// A live step: a decode step of a running generation, or a training step.
pub(crate) struct LiveStep {
    /// Buffers that it reads and changes: restored before it runs again.
    pub(crate) inputs: Vec<Buf>,
    /// The ring, if the step reports its result through it.
    pub(crate) ring: Option<LiveRing>,
    /// Buffers to compare.
    pub(crate) results: Vec<Buf>,
    /// The digester for large results, and the buffer for its output.
    pub(crate) digests: Option<(Digester, Buf)>,
}

/// The ring of a step that feeds itself.
pub(crate) struct LiveRing {
    /// The ring's count, and its value for the run whose result the host ignores.
    pub(crate) unreported: (Buf, u64),
    /// Payload of each entry of the ring.
    pub(crate) entries: Vec<Buf>,
}

/// Replays a step without reporting to the host, then runs it eagerly from the same inputs. The eager results
/// stay.
pub(crate) fn compare_live(
    graph: &Verified<Graph>,
    stream: &mut Stream,
    lease: &mut Lease,
    warm: &WarmPlan,
    step: &LiveStep,
) -> Result<(), VerifyError> {
    let ranges = |bufs: &[Buf]| merged(bufs.iter().filter_map(|buf| warm.space().range(*buf)).collect());
    let (inputs, results) = (ranges(&step.inputs), ranges(&step.results));
    let mut saved = Saved::take(stream, lease, warm.space(), &inputs, None)?;
    let mut count = [0; 8];
    if let Some(LiveRing { unreported: (count_buf, unreported), .. }) = &step.ring {
        stream.download(lease, *count_buf, &mut count)?;
        stream.upload(lease, *count_buf, &unreported.to_le_bytes())?;
    }
    let entry = |stream: &mut Stream, lease: &Lease, count: u64| match &step.ring {
        Some(ring) => read_entry(stream, lease, &ring.entries, count),
        None => Ok(Vec::new()),
    };
    if let Err(error) = graph.replay(lease, stream) {
        if !error.is_final() {
            saved.restore(stream, lease, warm.space())?;
        }
        return Err(error.into());
    }
    let digests = step.digests.as_ref().and_then(|(by, into)| Digests::new(warm, by, *into, &results));
    let take = |stream: &mut Stream, lease: &mut Lease| match &digests {
        Some(digests) => digests.take(stream, lease, warm),
        None => Ok((download(stream, lease, warm, &results)?, Vec::new())),
    };
    let (replayed, replayed_digests) = take(stream, lease)?;
    let replayed_entry = entry(stream, lease, step.ring.as_ref().map_or(0, |ring| ring.unreported.1))?;
    saved.restore(stream, lease, warm.space())?;
    stream.run(lease, false, |q| warm.enqueue(q))?;
    let (eager, eager_digests) = take(stream, lease)?;
    let eager_entry = entry(stream, lease, u64::from_le_bytes(count))?;
    if let Some(byte) = first_difference(&eager_entry, &replayed_entry) {
        let (buffer, launch) = ("the ring's entry".to_owned(), "the commit of the step".to_owned());
        return Err(VerifyError::Mismatch { buffer, element: byte / 4, launch, case: 0 });
    }
    let taken = digests.as_ref().map_or(results.as_slice(), |digests| &digests.small);
    for ((range, eager), replayed) in taken.iter().zip(&eager).zip(&replayed) {
        compare(warm, *range, eager, replayed, 0)?;
    }
    if let (Some(digests), Some(chunk)) = (&digests, differing_chunk(&eager_digests, &replayed_digests)) {
        // The replay's output is overwritten by now, so the mismatch can be located only to a chunk.
        return Err(digests.mismatch_in(warm, chunk, 0));
    }
    Ok(())
}

fn differing_chunk(a: &[[u64; 2]], b: &[[u64; 2]]) -> Option<usize> {
    a.iter().zip(b).position(|(a, b)| a[0] != b[0])
}

/// Reads the ring entry written by the step that found `count` entries.
fn read_entry(
    stream: &mut Stream,
    lease: &Lease,
    entries: &[Buf],
    count: u64,
) -> Result<Vec<u8>, DriverError> {
    let Some(entry) = entries.get((count % entries.len().max(1) as u64) as usize) else {
        return Ok(Vec::new());
    };
    let mut bytes = vec![0; entry.len() as usize];
    stream.download(lease, *entry, &mut bytes)?;
    Ok(bytes)
}

/// Fills a buffer by repeating `bytes`.
fn upload(stream: &mut Stream, lease: &mut Lease, buf: Buf, bytes: &[u8]) -> Result<(), DriverError> {
    let mut at = 0;
    while at < buf.len() && !bytes.is_empty() {
        let n = (buf.len() - at).min(bytes.len() as u64);
        stream.upload(lease, buf.slice(at, n)?, &bytes[..n as usize])?;
        at += n;
    }
    Ok(())
}

/// Uploads a pattern to the largest of some buffers and repeats it there on the device. The other buffers are
/// filled from it at different offsets, so that no two hold the same bytes.
fn upload_pattern(
    stream: &mut Stream,
    lease: &mut Lease,
    pattern: &[u8],
    bufs: &[Buf],
) -> Result<(), DriverError> {
    let Some((first, source)) = bufs.iter().copied().enumerate().max_by_key(|(_, buf)| buf.len()) else {
        return Ok(());
    };
    let n = source.len().min(pattern.len() as u64);
    if n == 0 {
        return Ok(());
    }
    stream.upload(lease, source.slice(0, n)?, &pattern[..n as usize])?;
    let copied = stream.run(lease, false, |q| {
        let mut filled = n;
        while filled < source.len() {
            let len = filled.min(source.len() - filled);
            q.copy(source.slice(filled, len)?, source.slice(0, len)?)?;
            filled += len;
        }
        for (idx, buf) in bufs.iter().enumerate().filter(|(idx, _)| *idx != first) {
            let shift = (SHIFT * (idx as u64 + 1) % source.len()) & !7;
            let head = buf.len().min(source.len() - shift);
            q.copy(buf.slice(0, head)?, source.slice(shift, head)?)?;
            q.copy(buf.slice(head, buf.len() - head)?, source.slice(0, buf.len() - head)?)?;
        }
        Ok(())
    });
    copied.map(|_| ())
}

/// Offset between the patterns of consecutive buffers; a prime number of words.
const SHIFT: u64 = 8 * 10_007;

fn compare_cases(
    graph: &Graph,
    stream: &mut Stream,
    lease: &mut Lease,
    warm: &WarmPlan,
    check: &VerifySetup,
    written: &[Range],
) -> Result<VerifyReport, VerifyError> {
    let bytes = written.iter().map(|r| r.end - r.start).sum();
    let mut report = VerifyReport {
        n_cases: check.cases.len(),
        bytes,
        unwritten_bytes: 0,
        bit_exact: true,
        took: Duration::ZERO,
    };
    let digests = check.digester.as_ref().zip(check.workspace);
    if let Some(digests) = digests.and_then(|(by, into)| Digests::new(warm, by, into, written)) {
        for (idx, case) in check.cases.iter().enumerate() {
            report.unwritten_bytes = digests.compare(graph, stream, lease, warm, check, case, idx)?;
        }
        return Ok(report);
    }
    for (idx, case) in check.cases.iter().enumerate() {
        prepare(stream, lease, warm, written, check, case)?;
        run_eagerly(stream, lease, warm)?;
        let eager = download(stream, lease, warm, written)?;
        prepare(stream, lease, warm, written, check, case)?;
        graph.replay(lease, stream)?;
        let replayed = download(stream, lease, warm, written)?;
        for ((range, eager), replayed) in written.iter().zip(&eager).zip(&replayed) {
            report.bit_exact &= compare(warm, *range, eager, replayed, idx)?;
        }
        report.unwritten_bytes = eager.iter().flatten().filter(|b| **b == POISON).count() as u64;
    }
    Ok(report)
}

/// Most bodies of a loop that one case may run.
const MAX_BODIES: usize = 8;

/// Runs a plan eagerly. The body of a loop is run once for each time that the loop would run it, with the same decisions
/// between the bodies.
fn run_eagerly(stream: &mut Stream, lease: &mut Lease, warm: &WarmPlan) -> Result<(), DriverError> {
    let Some(loop_end) = warm.loop_end() else {
        return stream.run(lease, false, |q| warm.enqueue(q)).map(drop);
    };
    for _ in 0..MAX_BODIES {
        stream.run(lease, false, |q| warm.enqueue(q))?;
        let mut end = [0; 8];
        stream.download(lease, loop_end, &mut end)?;
        if end != [0; 8] {
            return Ok(());
        }
    }
    let because = format!("the loop would run its body more than {MAX_BODIES} times");
    Err(DriverError::caller(CudaError::Mismatch { what: "verification cases", because }))
}

/// Contents of small ranges; digest and number of poison bytes for each chunk of large ones.
type Taken = (Vec<Vec<u8>>, Vec<[u64; 2]>);

/// Comparison of large memory without copying it to the host.
struct Digests<'a> {
    written: &'a [Range],
    /// Ranges that are digested; the others are small.
    large: Vec<Range>,
    small: Vec<Range>,
    digester: &'a Digester,
    into: Buf,
}

impl<'a> Digests<'a> {
    /// `None` if everything has to be copied to the host, because it is little or a tolerance applies.
    fn new(warm: &WarmPlan, digester: &'a Digester, into: Buf, written: &'a [Range]) -> Option<Digests<'a>> {
        let is_large = |r: &Range| !warm.space().is_pinned(r) && r.start.is_multiple_of(8);
        let (large, small): (Vec<Range>, Vec<Range>) = written.iter().partition(|r| is_large(r));
        let bytes = |f: fn(u64) -> u64| large.iter().map(|r| f(r.end - r.start)).sum::<u64>();
        let exact = warm.work().iter().all(|work| work.tolerance().is_none());
        let fits = bytes(Digester::bytes) <= into.len() && into.offset().is_multiple_of(8);
        (exact && fits && bytes(|n| n) >= DIGEST_FROM).then_some(Digests {
            written,
            large,
            small,
            digester,
            into,
        })
    }

    /// Runs one case both ways; returns the number of bytes that were still poison.
    #[expect(clippy::too_many_arguments, reason = "the parameters of a verification")]
    fn compare(
        &self,
        graph: &Graph,
        stream: &mut Stream,
        lease: &mut Lease,
        warm: &WarmPlan,
        check: &VerifySetup,
        case: &VerifyCase,
        idx: usize,
    ) -> Result<u64, VerifyError> {
        prepare(stream, lease, warm, self.written, check, case)?;
        run_eagerly(stream, lease, warm)?;
        let eager = self.take(stream, lease, warm)?;
        prepare(stream, lease, warm, self.written, check, case)?;
        graph.replay(lease, stream)?;
        let (small, digest) = self.take(stream, lease, warm)?;
        for ((range, eager), replayed) in self.small.iter().zip(&eager.0).zip(&small) {
            compare(warm, *range, eager, replayed, idx)?;
        }
        if let Some(chunk) = differing_chunk(&eager.1, &digest) {
            let replayed = download(stream, lease, warm, &self.large)?;
            prepare(stream, lease, warm, self.written, check, case)?;
            run_eagerly(stream, lease, warm)?;
            let eager = download(stream, lease, warm, &self.large)?;
            for ((range, eager), replayed) in self.large.iter().zip(&eager).zip(&replayed) {
                compare(warm, *range, eager, replayed, idx)?;
            }
            // The second eager run equals the replay, so the eager run itself is not deterministic.
            return Err(self.mismatch_in(warm, chunk, idx));
        }
        let few = eager.0.iter().flatten().filter(|b| **b == POISON).count() as u64;
        Ok(few + eager.1.iter().map(|chunk| chunk[1]).sum::<u64>())
    }

    /// A mismatch somewhere in a chunk.
    fn mismatch_in(&self, warm: &WarmPlan, mut chunk: usize, case: usize) -> VerifyError {
        let mut at = self.large[0];
        for range in &self.large {
            let n = (range.end - range.start).div_ceil(Digester::CHUNK) as usize;
            at = *range;
            if chunk < n {
                break;
            }
            chunk -= n;
        }
        let byte = at.start + chunk as u64 * Digester::CHUNK;
        let writer = warm.last_writer(at.region, byte);
        let launch = writer.map_or_else(|| "no launch".to_owned(), |(work, _)| work.name());
        let buffer = warm.space().region_name(at.region).to_owned();
        VerifyError::Mismatch { buffer, element: (byte / 4) as usize, launch, case }
    }

    fn take(&self, stream: &mut Stream, lease: &mut Lease, warm: &WarmPlan) -> Result<Taken, DriverError> {
        let small = download(stream, lease, warm, &self.small)?;
        let (mut launches, mut end) = (Vec::with_capacity(self.large.len()), 0);
        for range in &self.large {
            let bytes = Digester::bytes(range.end - range.start);
            let launch = self.digester.launch(warm.space().buf(*range)?, self.into.slice(end, bytes)?);
            launches.push(launch.map_err(|e| DriverError::Caller(Arc::new(e)))?);
            end += bytes;
        }
        stream.run(lease, false, |q| launches.iter().try_for_each(|launch| q.launch(launch)))?;
        let mut bytes = vec![0; end as usize];
        stream.download(lease, self.into.slice(0, end)?, &mut bytes)?;
        Ok((small, bytemuck::pod_collect_to_vec(&bytes)))
    }
}

/// Poisons the memory that will be written, then uploads the case.
fn prepare(
    stream: &mut Stream,
    lease: &mut Lease,
    warm: &WarmPlan,
    written: &[Range],
    check: &VerifySetup,
    case: &VerifyCase,
) -> Result<(), DriverError> {
    let space = warm.space();
    let (pinned, others): (Vec<Range>, Vec<Range>) = written.iter().partition(|range| space.is_pinned(range));
    stream.run(lease, false, |q| {
        others.iter().try_for_each(|range| q.fill(space.buf(*range)?, POISON))?;
        check.workspace.iter().filter(|buf| !buf.is_empty()).try_for_each(|buf| q.fill(*buf, POISON))?;
        // Drivers guarantee copies to pinned memory, not fills, so copy the poison from device memory.
        let Some(source) = largest(&others) else { return Ok(()) };
        let source = space.buf(source)?;
        for range in pinned.iter().flat_map(|range| chunks(*range, source.len())) {
            let part = space.buf(range)?;
            q.copy(part, source.slice(0, part.len())?)?;
        }
        Ok(())
    })?;
    for (pattern, bufs) in &case.patterns {
        upload_pattern(stream, lease, pattern, bufs)?;
    }
    case.uploads.iter().try_for_each(|(buf, bytes)| upload(stream, lease, *buf, bytes))
}

/// Returns true if all bits are equal, and false if a tolerance was needed.
fn compare(
    warm: &WarmPlan,
    range: Range,
    eager: &[u8],
    replayed: &[u8],
    case: usize,
) -> Result<bool, VerifyError> {
    if eager == replayed {
        return Ok(true);
    }
    let mut at = 0;
    while let Some(offset) = first_difference(&eager[at..], &replayed[at..]) {
        let byte = range.start + (at + offset) as u64;
        let Some((work, buf)) = warm.last_writer(range.region, byte) else {
            let (buffer, launch) =
                (warm.space().region_name(range.region).to_owned(), "no launch".to_owned());
            return Err(VerifyError::Mismatch { buffer, element: (byte / 4) as usize, launch, case });
        };
        let (buffer, element_bytes) = warm.buffer_name(buf, range.region);
        let element = (byte - buf.offset()) / element_bytes;
        let start = (buf.offset() + element * element_bytes).saturating_sub(range.start) as usize;
        if !work.tolerance().is_some_and(|tol| within(tol, eager, replayed, start)) {
            let (element, launch) = (element as usize, work.name());
            return Err(VerifyError::Mismatch { buffer, element, launch, case });
        }
        at = (start + element_bytes as usize).max(at + offset + 1).min(eager.len());
    }
    Ok(false)
}

fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    a.iter().zip(b).position(|(a, b)| a != b)
}

fn within(tolerance: f32, eager: &[u8], replayed: &[u8], at: usize) -> bool {
    let value = |bytes: &[u8]| bytes.get(at..at + 4).map(bytemuck::pod_read_unaligned::<f32>);
    match (value(eager), value(replayed)) {
        (Some(a), Some(b)) => (a - b).abs() <= tolerance * a.abs().max(b.abs()),
        _ => false,
    }
}

fn download(
    stream: &mut Stream,
    lease: &Lease,
    warm: &WarmPlan,
    ranges: &[Range],
) -> Result<Vec<Vec<u8>>, DriverError> {
    let read = |range: &Range| {
        let buf = warm.space().buf(*range)?;
        let mut bytes = vec![0; buf.len() as usize];
        stream.download(lease, buf, &mut bytes)?;
        Ok(bytes)
    };
    ranges.iter().map(read).collect()
}

fn largest(ranges: &[Range]) -> Option<Range> {
    ranges.iter().max_by_key(|range| range.end - range.start).copied()
}
