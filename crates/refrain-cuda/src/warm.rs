//! A step made ready: everything it enqueues, in order, with nothing left to look up.

use std::sync::Arc;

use refrain_driver::{Access, Buf, DriverError, Launch, Memory, Queue};
use refrain_kernels::BlasLtProduct;

/// One thing a step enqueues.
#[derive(Clone, Debug)]
pub enum Work {
    /// A kernel.
    Launch {
        /// The launch.
        launch: Launch,
        /// How far its F32 results may differ from run to run, relative to each; `None`: not by a bit.
        tolerance: Option<f32>,
    },
    /// A product by a library.
    Library(BlasLtProduct),
}

impl From<Launch> for Work {
    fn from(launch: Launch) -> Work {
        Work::Launch { launch, tolerance: None }
    }
}

impl Work {
    /// The buffers it touches and how.
    pub(crate) fn accesses(&self) -> Vec<(Buf, Access)> {
        match self {
            Work::Launch { launch, .. } => launch.accesses().collect(),
            Work::Library(product) => product.accesses().to_vec(),
        }
    }

    /// The buffers it writes.
    pub(crate) fn writes(&self) -> impl Iterator<Item = Buf> {
        self.accesses().into_iter().filter(|(_, access)| *access != Access::Read).map(|(buf, _)| buf)
    }

    pub(crate) fn tolerance(&self) -> Option<f32> {
        match self {
            Work::Launch { tolerance, .. } => *tolerance,
            Work::Library(_) => None,
        }
    }

    /// Step and kernel, for people.
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

/// A product by a library that must have run before anything records.
#[derive(Clone, Debug)]
pub(crate) struct Rehearsal {
    pub(crate) product: BlasLtProduct,
    /// Whether the library's algorithms are timed for it.
    pub(crate) is_measured: bool,
}

/// A memory with the names of its regions, so that a handle can be told apart by region.
#[derive(Clone, Debug)]
pub struct Space {
    memory: Arc<Memory>,
    regions: Vec<(String, Buf)>,
    /// Regions of pinned host memory, and whether what is in them is kept by whoever works on the memory meanwhile.
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
    /// A memory and its whole regions by name.
    #[must_use]
    pub fn new(memory: &Arc<Memory>, regions: Vec<(String, Buf)>) -> Space {
        Space { memory: Arc::clone(memory), regions, pinned: Vec::new() }
    }

    /// Whether one handle lies inside another.
    pub(crate) fn contains(&self, whole: Buf, part: Buf) -> bool {
        match (self.range(whole), self.range(part)) {
            (Some(w), Some(p)) => w.region == p.region && w.start <= p.start && p.end <= w.end,
            _ => false,
        }
    }

    /// With one more region, of pinned host memory: what each step writes there is read before the next one.
    #[must_use]
    pub fn with_results(mut self, name: &str, region: Buf) -> Space {
        self.pinned.push((self.regions.len(), false));
        self.regions.push((name.to_owned(), region));
        self
    }

    /// With one more region, of pinned host memory: a ring, which holds results of several steps.
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

    /// Where a handle lies; `None` for one of another memory.
    pub(crate) fn range(&self, buf: Buf) -> Option<Range> {
        let is_in = |base: &Buf| base.slice(buf.offset(), buf.len()).is_ok_and(|same| same == buf);
        let region = self.regions.iter().position(|(_, base)| is_in(base))?;
        Some(Range { region, start: buf.offset(), end: buf.offset() + buf.len() })
    }

    pub(crate) fn buf(&self, range: Range) -> Result<Buf, DriverError> {
        self.regions[range.region].1.slice(range.start, range.end - range.start)
    }
}

/// Sorted, with what touches or overlaps joined; empty ranges are dropped.
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

/// A recordable piece of a plan, ready to be enqueued any number of times.
#[derive(Clone, Debug)]
pub struct WarmPlan {
    name: Arc<str>,
    space: Arc<Space>,
    work: Vec<Work>,
    /// What written buffers are called, and the size of their elements.
    names: Vec<(Buf, String, u64)>,
    /// What could not be done as one would like.
    told: Vec<String>,
    /// Products by a library, into results that nobody reads.
    rehearsals: Vec<Rehearsal>,
}

impl WarmPlan {
    /// A plan without work.
    #[must_use]
    pub fn new(name: &str, space: &Arc<Space>) -> WarmPlan {
        let (work, names, told, rehearsals) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        WarmPlan { name: Arc::from(name), space: Arc::clone(space), work, names, told, rehearsals }
    }

    /// Adds work behind what is there.
    pub fn push(&mut self, work: impl Into<Work>) {
        self.work.push(work.into());
    }

    /// Says that something could not be done as one would like, in the log and to whoever asks.
    pub fn tell(&mut self, what: String) {
        tracing::info!("{}: {what}", self.name);
        self.told.push(what);
    }

    /// What was told.
    #[must_use]
    pub fn told(&self) -> &[String] {
        &self.told
    }

    /// Adds a product by a library that must have run once, in any memory, before anything records.
    pub(crate) fn rehearse(&mut self, product: BlasLtProduct) {
        self.rehearsals.push(Rehearsal { product, is_measured: false });
    }

    /// The same, with the fastest of the library's algorithms, of which each runs several times.
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

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The memory it works on.
    #[must_use]
    pub fn space(&self) -> &Arc<Space> {
        &self.space
    }

    /// What it enqueues, in order.
    #[must_use]
    pub fn work(&self) -> &[Work] {
        &self.work
    }

    /// Enqueues all of it: at once on a live stream, as a recording on the others.
    pub fn enqueue(&self, q: &mut dyn Queue) -> Result<(), DriverError> {
        self.work.iter().try_for_each(|work| work.enqueue(q))
    }

    /// The last work that writes a byte.
    pub(crate) fn last_writer(&self, region: usize, byte: u64) -> Option<(&Work, Buf)> {
        let covers = |buf: &Buf| {
            self.space.range(*buf).is_some_and(|r| r.region == region && r.start <= byte && byte < r.end)
        };
        self.work.iter().rev().find_map(|work| work.writes().find(covers).map(|buf| (work, buf)))
    }

    /// What a written buffer is called, and the size of its elements.
    pub(crate) fn buffer_name(&self, buf: Buf, region: usize) -> (String, u64) {
        match self.names.iter().rev().find(|(named, ..)| *named == buf) {
            Some((_, name, bytes)) => (name.clone(), *bytes),
            None => (self.space.region_name(region).to_owned(), 4),
        }
    }
}
