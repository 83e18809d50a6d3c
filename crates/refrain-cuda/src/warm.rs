//! A warm step: everything it enqueues, in order, with nothing left to look up.

use std::sync::Arc;

use refrain_driver::{Access, Buf, DriverError, Launch, Memory, Queue};
use refrain_kernels::BlasLtProduct;

/// One item that a step enqueues.
#[derive(Clone, Debug)]
pub enum Work {
    /// A kernel launch.
    Launch {
        /// The launch.
        launch: Launch,
        /// Relative difference that its F32 results may have from run to run; `None` if they must be
        /// bit-identical.
        tolerance: Option<f32>,
    },
    /// A matrix product by cuBLASLt.
    Library(BlasLtProduct),
}

impl From<Launch> for Work {
    fn from(launch: Launch) -> Work {
        Work::Launch { launch, tolerance: None }
    }
}

impl Work {
    /// Buffers it accesses.
    pub(crate) fn accesses(&self) -> Vec<(Buf, Access)> {
        match self {
            Work::Launch { launch, .. } => launch.accesses().collect(),
            Work::Library(product) => product.accesses().to_vec(),
        }
    }

    /// Buffers it writes.
    pub(crate) fn writes(&self) -> impl Iterator<Item = Buf> {
        self.accesses().into_iter().filter(|(_, access)| *access != Access::Read).map(|(buf, _)| buf)
    }

    pub(crate) fn tolerance(&self) -> Option<f32> {
        match self {
            Work::Launch { tolerance, .. } => *tolerance,
            Work::Library(_) => None,
        }
    }

    /// Step and kernel, for messages.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Work::Launch { launch, .. } => launch.origin().to_string(),
            Work::Library(product) => format!("cublasLtMatmul of step {:?}", &**product.step()),
        }
    }

    pub(crate) fn step_and_kernel(&self) -> (String, String) {
        match self {
            Work::Launch { launch, .. } => {
                let origin = launch.origin();
                (origin.step.to_string(), origin.kernel.to_string())
            }
            Work::Library(product) => (product.step().to_string(), "cublasLtMatmul".into()),
        }
    }

    pub(crate) fn enqueue(&self, q: &mut dyn Queue) -> Result<(), DriverError> {
        match self {
            Work::Launch { launch, .. } => q.launch(launch),
            Work::Library(product) => product.enqueue(q),
        }
    }
}

/// A cuBLASLt product that must run once before a recording.
#[derive(Clone, Debug)]
pub(crate) struct Rehearsal {
    pub(crate) product: BlasLtProduct,
    /// Whether to time the library's algorithms for it.
    pub(crate) is_measured: bool,
}

/// A memory with named regions, which maps buffers to regions.
#[derive(Clone, Debug)]
pub struct Space {
    memory: Arc<Memory>,
    regions: Vec<(String, Buf)>,
    /// Regions of pinned host memory, and whether their contents have to be restored after a verification.
    pinned: Vec<(usize, bool)>,
}

/// A range of one region of a [`Space`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Range {
    pub(crate) region: usize,
    pub(crate) start: u64,
    pub(crate) end: u64,
}

impl Space {
    /// A memory and its whole regions, by name.
    #[must_use]
    pub fn new(memory: &Arc<Memory>, regions: Vec<(String, Buf)>) -> Space {
        Space { memory: Arc::clone(memory), regions, pinned: Vec::new() }
    }

    /// Whether one buffer contains another.
    pub(crate) fn contains(&self, whole: Buf, part: Buf) -> bool {
        match (self.range(whole), self.range(part)) {
            (Some(w), Some(p)) => w.region == p.region && w.start <= p.start && p.end <= w.end,
            _ => false,
        }
    }

    /// Adds a region of pinned host memory for results: each step's results are read before the next step.
    #[must_use]
    pub fn with_results(mut self, name: &str, region: Buf) -> Space {
        self.pinned.push((self.regions.len(), false));
        self.regions.push((name.to_owned(), region));
        self
    }

    /// Adds a region of pinned host memory for a ring, which holds the results of several steps.
    #[must_use]
    pub fn with_ring(mut self, name: &str, region: Buf) -> Space {
        self.pinned.push((self.regions.len(), true));
        self.regions.push((name.to_owned(), region));
        self
    }

    pub(crate) fn is_pinned(&self, range: &Range) -> bool {
        self.pinned.iter().any(|(region, _)| *region == range.region)
    }

    pub(crate) fn is_kept(&self, range: &Range) -> bool {
        self.pinned.iter().all(|(region, kept)| *region != range.region || *kept)
    }

    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    pub(crate) fn region_name(&self, region: usize) -> &str {
        self.regions.get(region).map_or("memory", |(name, _)| name)
    }

    /// Range of a buffer; `None` for one of another memory.
    pub(crate) fn range(&self, buf: Buf) -> Option<Range> {
        let is_in = |base: &Buf| base.slice(buf.offset(), buf.len()).is_ok_and(|same| same == buf);
        let region = self.regions.iter().position(|(_, base)| is_in(base))?;
        Some(Range { region, start: buf.offset(), end: buf.offset() + buf.len() })
    }

    pub(crate) fn buf(&self, range: Range) -> Result<Buf, DriverError> {
        self.regions[range.region].1.slice(range.start, range.end - range.start)
    }
}

/// Sorts ranges and joins those that touch or overlap; drops empty ones.
pub(crate) fn merged(mut ranges: Vec<Range>) -> Vec<Range> {
    ranges.retain(|r| r.start < r.end);
    ranges.sort_unstable();
    let mut out: Vec<Range> = Vec::with_capacity(ranges.len());
    for r in ranges {
        match out.last_mut() {
            Some(last) if last.region == r.region && r.start <= last.end => last.end = last.end.max(r.end),
            _ => out.push(r),
        }
    }
    out
}

/// A recordable segment of a plan, ready to be enqueued any number of times.
#[derive(Clone, Debug)]
pub struct WarmPlan {
    name: Arc<str>,
    space: Arc<Space>,
    work: Vec<Work>,
    /// Names of written buffers, with the size of their elements.
    names: Vec<(Buf, String, u64)>,
    /// Notes on work that could run better.
    notes: Vec<String>,
    /// cuBLASLt products to run before a recording.
    rehearsals: Vec<Rehearsal>,
    /// Set if the work is the body of a loop: a word that the last launch makes other than 0 when the loop is to end,
    /// also outside a loop.
    loop_end: Option<Buf>,
}

impl WarmPlan {
    /// A plan without work.
    #[must_use]
    pub fn new(name: &str, space: &Arc<Space>) -> WarmPlan {
        let (work, names, notes, rehearsals) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (name, space) = (Arc::from(name), Arc::clone(space));
        WarmPlan { name, space, work, names, notes, rehearsals, loop_end: None }
    }

    /// Makes the plan the body of a loop, which ends when its last launch makes this word other than 0.
    #[must_use]
    pub(crate) fn repeated_until(mut self, loop_end: Buf) -> WarmPlan {
        self.loop_end = Some(loop_end);
        self
    }

    /// The word that ends the loop, if the plan is the body of one.
    pub(crate) fn loop_end(&self) -> Option<Buf> {
        self.loop_end
    }

    /// Appends the work of another plan over the same memory.
    pub(crate) fn append(&mut self, other: &WarmPlan) {
        self.work.extend(other.work.iter().cloned());
        self.names.extend(other.names.iter().cloned());
    }

    /// Removes and drops the last work.
    pub(crate) fn pop(&mut self) {
        self.work.pop();
    }

    /// Appends work.
    pub fn push(&mut self, work: impl Into<Work>) {
        self.work.push(work.into());
    }

    /// Notes that some work could run better; also logs it.
    pub fn note(&mut self, note: String) {
        tracing::info!("{}: {note}", self.name);
        self.notes.push(note);
    }

    /// Notes on work that could run better.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Adds a cuBLASLt product that must run once, with any contents of memory, before a recording.
    pub(crate) fn rehearse(&mut self, product: BlasLtProduct) {
        self.rehearsals.push(Rehearsal { product, is_measured: false });
    }

    /// Like `rehearse`, and times the library's algorithms, several runs each, to use the fastest.
    pub(crate) fn measure(&mut self, product: BlasLtProduct) {
        self.rehearsals.push(Rehearsal { product, is_measured: true });
    }

    pub(crate) fn rehearsals(&self) -> &[Rehearsal] {
        &self.rehearsals
    }

    /// Names a buffer that the plan writes, with the size of its elements, for reports.
    pub fn name_buffer(&mut self, buf: Buf, name: impl Into<String>, element_bytes: u64) {
        self.names.push((buf, name.into(), element_bytes.max(1)));
    }

    /// Name of the plan.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The memory it works on.
    #[must_use]
    pub fn space(&self) -> &Arc<Space> {
        &self.space
    }

    /// Everything it enqueues, in order.
    #[must_use]
    pub fn work(&self) -> &[Work] {
        &self.work
    }

    /// Enqueues everything: executed at once on a live stream, recorded in a recording.
    pub fn enqueue(&self, q: &mut dyn Queue) -> Result<(), DriverError> {
        self.work.iter().try_for_each(|work| work.enqueue(q))
    }

    /// The last work that writes a byte, and the buffer it is in.
    pub(crate) fn last_writer(&self, region: usize, byte: u64) -> Option<(&Work, Buf)> {
        let covers = |buf: &Buf| {
            self.space.range(*buf).is_some_and(|r| r.region == region && r.start <= byte && byte < r.end)
        };
        self.work.iter().rev().find_map(|work| work.writes().find(covers).map(|buf| (work, buf)))
    }

    /// Name of a written buffer, and the size of its elements.
    pub(crate) fn buffer_name(&self, buf: Buf, region: usize) -> (String, u64) {
        match self.names.iter().rev().find(|(named, ..)| *named == buf) {
            Some((_, name, bytes)) => (name.clone(), *bytes),
            None => (self.space.region_name(region).to_owned(), 4),
        }
    }
}
