//! A new graph is compared with the eager run of the same plan before anything trusts it.
//!
//! For each of three control-block states the plan runs eagerly, with overlap between kernels off, and then as a
//! replay, each time from the same poisoned memory. Everything it writes must come out equal, bit for bit unless a
//! kernel declares a tolerance. What was there before is put back, whatever happens.
//!
//! Much memory is compared where it lies, by digests; only when those differ is it brought to the host, to find where.

use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_driver::{Buf, DriverError, Graph, GraphInfo, Lease, Stream};
use refrain_graph::Reason;
use refrain_kernels::Digester;

use crate::error::CudaError;
use crate::reason::{Stage, reason_of};
use crate::saved::{Saved, pieces};
use crate::warm::{Range, WarmPlan, Work, merged};

/// How many control-block states a graph is verified with.
pub const N_CASES: usize = 3;

/// NaN in every float type and -1 in every integer type: a result that nobody wrote, or that was computed from one,
/// shows.
const POISON: u8 = 0xFF;

/// Less than this is brought to the host at once: a digest costs a launch for each range.
const DIGEST_FROM: u64 = 1 << 20;

/// One state to verify with: the bytes that are put in place before each run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Case {
    /// Buffers and their contents, repeated to the end of the buffer: the control block, and whatever the plan reads
    /// without having written it.
    pub uploads: Vec<(Buf, Vec<u8>)>,
    /// Bytes that are sent once and repeated on the device through all of these buffers, from another place in each. They
    /// are whole words of eight bytes, or as long as the largest buffer.
    pub patterns: Vec<(Vec<u8>, Vec<Buf>)>,
}

impl Case {
    /// A case of contents alone.
    #[must_use]
    pub fn of(uploads: Vec<(Buf, Vec<u8>)>) -> Case {
        Case { uploads, patterns: Vec::new() }
    }
}

/// What a graph is verified with.
#[derive(Clone, Debug)]
pub struct Check {
    cases: Vec<Case>,
    narrowed: Vec<(Buf, Vec<Buf>)>,
    /// Poisoned before each run, and of no interest after it.
    workspace: Option<Buf>,
    digester: Option<Digester>,
    /// Memory of which only these parts mean anything between steps.
    transient: Option<(Buf, Vec<Buf>)>,
    /// Memory that holds nothing but zeros.
    zero: Option<Buf>,
}

impl Check {
    /// Three states, all different.
    pub fn new(cases: Vec<Case>) -> Result<Check, CudaError> {
        let different = cases.iter().enumerate().filter(|(i, case)| !cases[..*i].contains(case)).count();
        if different < N_CASES {
            return Err(CudaError::TooFewCases { need: N_CASES, got: different });
        }
        Ok(Check::of_one_state(cases))
    }

    /// For a plan that has one state only, whatever happens.
    pub(crate) fn of_one_state(cases: Vec<Case>) -> Check {
        Check { cases, narrowed: Vec::new(), workspace: None, digester: None, transient: None, zero: None }
    }

    /// Of what is declared as written in `whole`, these parts are all that the states of this check can reach: the
    /// scratch blocks of a cache. The rest is neither saved nor touched.
    #[must_use]
    pub fn narrow(mut self, whole: Buf, parts: Vec<Buf>) -> Check {
        self.narrowed.push((whole, parts));
        self
    }

    /// What kernels write there only they read, in the same step: what is wrong with it shows in their results.
    #[must_use]
    pub fn workspace(mut self, buf: Buf) -> Check {
        self.workspace = Some(buf);
        self
    }

    /// Compares much memory by digests, which go to the workspace.
    #[must_use]
    pub fn digests(mut self, digester: Digester) -> Check {
        self.digester = Some(digester);
        self
    }

    /// Of `whole`, only `live` has to be put back: no step is under way, so nothing else of it will be read.
    #[must_use]
    pub fn transient(mut self, whole: Buf, live: Vec<Buf>) -> Check {
        self.transient = Some((whole, live));
        self
    }

    /// Nothing was written to `whole` since it was cleared: it is put back by clearing it again.
    #[must_use]
    pub fn zeroed(mut self, whole: Buf) -> Check {
        self.zero = Some(whole);
        self
    }

    /// What the plan writes under this check.
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

    /// Ranges to put back: of what is transient only what lives.
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
            |case: &Case| case.patterns.iter().flat_map(|(_, bufs)| bufs.clone()).collect::<Vec<_>>();
        let uploaded = |case: &Case| case.uploads.iter().map(|(buf, _)| *buf).collect::<Vec<_>>();
        let all = self.cases.iter().flat_map(|case| [uploaded(case), patterned(case)].concat());
        all.filter_map(|buf| warm.space().range(buf)).collect()
    }
}

fn contains(warm: &WarmPlan, whole: Buf, part: Buf) -> bool {
    warm.space().contains(whole, part)
}

/// What a verification looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyReport {
    /// States compared.
    pub n_cases: usize,
    /// Bytes compared for each.
    pub bytes: u64,
    /// Bytes among them that were still poison after the last eager run: what kernels declare and do not write.
    pub unwritten_bytes: u64,
    /// Whether a kernel's declared tolerance was needed.
    pub bit_exact: bool,
    /// How long it took.
    pub took: Duration,
}

/// A graph that came out equal to the eager run. Only [`verify`] makes one, and the cache replays nothing else.
#[derive(Debug)]
pub struct Verified<G> {
    graph: G,
    report: VerifyReport,
}

impl<G> Verified<G> {
    /// What was compared.
    #[must_use]
    pub fn report(&self) -> &VerifyReport {
        &self.report
    }
}

impl Verified<Graph> {
    /// What the graph holds.
    #[must_use]
    pub fn info(&self) -> &GraphInfo {
        self.graph.info()
    }

    /// Runs the whole recording as one launch, without waiting for it.
    pub fn replay(&self, lease: &mut Lease, stream: &mut Stream) -> Result<(), DriverError> {
        self.graph.replay(lease, stream).map(|_| ())
    }

    /// How often it was replayed, verification included.
    #[must_use]
    pub fn n_replays(&self) -> u64 {
        self.graph.n_replays()
    }
}

/// Why a graph is not trusted.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// A replay came out other than the eager run.
    #[error(
        "replay and eager run differ in {buffer}, element {element}, written by {launch} (control-block state {case})"
    )]
    Mismatch {
        /// The buffer.
        buffer: String,
        /// Its first differing element.
        element: usize,
        /// The launch that wrote it last.
        launch: String,
        /// Which state, from 0.
        case: usize,
    },
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl VerifyError {
    /// The same for the ledger.
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
    check: &Check,
) -> Result<Verified<Graph>, VerifyError> {
    let began = Instant::now();
    let written = check.written(warm);
    // Results are read before the next step is sent, so there is nothing of them to keep.
    let kept = written.iter().filter(|range| warm.space().is_kept(range)).copied();
    let touched = check.without_transient(warm, merged(kept.chain(check.uploaded(warm)).collect()));
    let mut saved = Saved::take(stream, lease, warm.space(), &touched, check.zero)?;
    let compared = compare_cases(&graph, stream, lease, warm, check, &written);
    // Also after a mismatch or a failed replay: whoever runs next must not see what this left. An error of the
    // comparison goes before one of this.
    let restored = saved.put_back(stream, lease, warm.space());
    let mut report = compared?;
    restored?;
    report.took = began.elapsed();
    Ok(Verified { graph, report })
}

/// A step at hand: a decode step of a running text, or a step of a training run.
pub(crate) struct LiveStep {
    /// What it reads and changes: put back before it runs again.
    pub(crate) inputs: Vec<Buf>,
    /// How its result reaches the host, where that is through the ring.
    pub(crate) ring: Option<LiveRing>,
    /// What comes out of it.
    pub(crate) results: Vec<Buf>,
    /// What compares many bytes where they lie, and where its numbers go.
    pub(crate) digests: Option<(Digester, Buf)>,
}

/// The ring of a step that feeds itself.
pub(crate) struct LiveRing {
    /// The ring's count, and its value for the run that the host does not hear of.
    pub(crate) unheard: (Buf, u64),
    /// Where each of the ring's entries has its payload.
    pub(crate) entries: Vec<Buf>,
}

/// Replays a step without the host hearing of it, then runs it eagerly, from the same inputs; the eager run stands.
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
    if let Some(LiveRing { unheard: (count_at, unheard), .. }) = &step.ring {
        stream.download(lease, *count_at, &mut count)?;
        stream.upload(lease, *count_at, &unheard.to_le_bytes())?;
    }
    let entry = |stream: &mut Stream, lease: &Lease, count: u64| match &step.ring {
        Some(ring) => read_entry(stream, lease, &ring.entries, count),
        None => Ok(Vec::new()),
    };
    if let Err(error) = graph.replay(lease, stream) {
        if !error.is_final() {
            saved.put_back(stream, lease, warm.space())?;
        }
        return Err(error.into());
    }
    let digests = step.digests.as_ref().and_then(|(by, into)| Digests::new(warm, by, *into, &results));
    let take = |stream: &mut Stream, lease: &mut Lease| match &digests {
        Some(digests) => digests.take(stream, lease, warm),
        None => Ok((download(stream, lease, warm, &results)?, Vec::new())),
    };
    let (replayed, replayed_digests) = take(stream, lease)?;
    let replayed_entry = entry(stream, lease, step.ring.as_ref().map_or(0, |ring| ring.unheard.1))?;
    saved.put_back(stream, lease, warm.space())?;
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
        // What the replay had left there is gone: the chunk is as near as this comes.
        return Err(digests.mismatch_in(warm, chunk, 0));
    }
    Ok(())
}

fn differing_chunk(a: &[[u64; 2]], b: &[[u64; 2]]) -> Option<usize> {
    a.iter().zip(b).position(|(a, b)| a[0] != b[0])
}

/// What the step that found `count` entries in the ring wrote there.
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

/// Fills a buffer with bytes, again and again.
fn upload(stream: &mut Stream, lease: &mut Lease, buf: Buf, bytes: &[u8]) -> Result<(), DriverError> {
    let mut at = 0;
    while at < buf.len() && !bytes.is_empty() {
        let n = (buf.len() - at).min(bytes.len() as u64);
        stream.upload(lease, buf.slice(at, n)?, &bytes[..n as usize])?;
        at += n;
    }
    Ok(())
}

/// Sends a pattern to the largest of some buffers and repeats it on the device: through that one, and from another place of
/// it through each of the others, so that no two hold the same.
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

/// How far one buffer's part of a pattern begins behind that of the one before; a prime number of words.
const SHIFT: u64 = 8 * 10_007;

fn compare_cases(
    graph: &Graph,
    stream: &mut Stream,
    lease: &mut Lease,
    warm: &WarmPlan,
    check: &Check,
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
        stream.run(lease, false, |q| warm.enqueue(q))?;
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

/// Small ranges as they are, and for each chunk of large ones its digest and how much of it is poison.
type Taken = (Vec<Vec<u8>>, Vec<[u64; 2]>);

/// How much memory is compared without moving it.
struct Digests<'a> {
    written: &'a [Range],
    /// What is digested; the others are few bytes.
    large: Vec<Range>,
    small: Vec<Range>,
    digester: &'a Digester,
    into: Buf,
}

impl<'a> Digests<'a> {
    /// `None` when everything has to be brought to the host: there is little of it, or a tolerance to apply.
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

    /// Runs one case both ways; how many bytes were still poison.
    #[expect(clippy::too_many_arguments, reason = "what verification is about")]
    fn compare(
        &self,
        graph: &Graph,
        stream: &mut Stream,
        lease: &mut Lease,
        warm: &WarmPlan,
        check: &Check,
        case: &Case,
        idx: usize,
    ) -> Result<u64, VerifyError> {
        prepare(stream, lease, warm, self.written, check, case)?;
        stream.run(lease, false, |q| warm.enqueue(q))?;
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
            stream.run(lease, false, |q| warm.enqueue(q))?;
            let eager = download(stream, lease, warm, &self.large)?;
            for ((range, eager), replayed) in self.large.iter().zip(&eager).zip(&replayed) {
                compare(warm, *range, eager, replayed, idx)?;
            }
            // The second eager run was as the replay: it is the eager run that is not the same every time.
            return Err(self.mismatch_in(warm, chunk, idx));
        }
        let few = eager.0.iter().flatten().filter(|b| **b == POISON).count() as u64;
        Ok(few + eager.1.iter().map(|chunk| chunk[1]).sum::<u64>())
    }

    /// A difference somewhere in a chunk.
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
        let launch = writer.map_or_else(|| "nobody".to_owned(), |(work, _)| work.name());
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

/// Poisons what will be written, then puts the case's bytes in place.
fn prepare(
    stream: &mut Stream,
    lease: &mut Lease,
    warm: &WarmPlan,
    written: &[Range],
    check: &Check,
    case: &Case,
) -> Result<(), DriverError> {
    let space = warm.space();
    let (pinned, others): (Vec<Range>, Vec<Range>) = written.iter().partition(|range| space.is_pinned(range));
    stream.run(lease, false, |q| {
        others.iter().try_for_each(|range| q.fill(space.buf(*range)?, POISON))?;
        check.workspace.iter().filter(|buf| !buf.is_empty()).try_for_each(|buf| q.fill(*buf, POISON))?;
        // Drivers promise copies to pinned memory, not fills: the poison comes from what was filled above.
        let Some(source) = largest(&others) else { return Ok(()) };
        let source = space.buf(source)?;
        for range in pinned.iter().flat_map(|range| pieces(*range, source.len())) {
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

/// `Ok(true)` for equal bits, `Ok(false)` where a tolerance was needed.
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
            let (buffer, launch) = (warm.space().region_name(range.region).to_owned(), "nobody".to_owned());
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
