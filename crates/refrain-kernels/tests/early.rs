//! Reads before the dependency wait: the simulated device reports a step in which an earlier, unfinished
//! launch still writes what a kernel reads. A step begins with a gather, and all launches before the gather
//! have completed.

use std::sync::Arc;

use refrain_driver::sim::SimOptions;
use refrain_driver::{
    Buf, Context, Device, Launch, Lease, Memory, MemoryLayout, Method, RecordOptions, Stream,
};
use refrain_graph::{Attention, Rope, RopeStyle, SAMPLE_PARAMS};
use refrain_kernels::{
    AttendArgs, AttendNorm, BufView, CopyArgs, GatherRowsArgs, KernelLoadOptions, Kernels, KvAppendArgs,
    SampleArgs, sample_scratch_bytes, sample_state_bytes, simulated,
};
use refrain_tensor::{DType, Shape};

const N_BLOCKS: usize = 4;
const KV_BLOCK: usize = 16;
const N_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const MAX_BLOCKS: usize = 2;
const VOCAB: usize = 2048;

struct Bed {
    lease: Lease,
    stream: Stream,
    memory: Arc<Memory>,
    kernels: Kernels,
    _ctx: Context,
    device: Device,
    pool: Buf,
    end: u64,
}

impl Bed {
    fn new() -> Bed {
        let device = simulated(SimOptions { strict: false, ..SimOptions::default() }).unwrap();
        let ctx = device.context().unwrap();
        let kernels = Kernels::load(&ctx, &KernelLoadOptions::default()).unwrap();
        let mut layout = MemoryLayout::new("early");
        let pool = layout.device("pool", 1 << 20);
        let memory = Memory::plan(&ctx, &layout).unwrap();
        let (pool, mut lease, mut stream) =
            (memory.buf(pool), memory.lease().unwrap(), ctx.stream().unwrap());
        stream.upload(&mut lease, pool, &vec![0; 1 << 20]).unwrap();
        Bed { lease, stream, memory, kernels, _ctx: ctx, device, pool, end: 0 }
    }

    /// Allocates zeroed words.
    fn words(&mut self, n: usize) -> Buf {
        let start = self.end;
        self.end = (start + 4 * n as u64).next_multiple_of(256);
        self.pool.slice(start, 4 * n as u64).unwrap()
    }

    fn ints(&mut self, values: &[i32]) -> Buf {
        let buf = self.words(values.len());
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.stream.upload(&mut self.lease, buf, &bytes).unwrap();
        buf
    }

    /// The launch that begins a step.
    fn gather(&mut self) -> Launch {
        let [table, ids, y] = [self.words(64), self.words(1), self.words(64)];
        let (dtype, packed, n_rows, d, n_ids) = (DType::F32, false, 1, 64, 1);
        let args = GatherRowsArgs { table, dtype, packed, ids, y, n_rows, d, n_ids, step: "gather" };
        self.kernels.gather_rows(&args).unwrap()
    }

    /// A launch that writes a buffer.
    fn writes(&mut self, y: Buf) -> Launch {
        let n = (y.len() / 4) as usize;
        let x = BufView::dense(self.words(n), DType::F32, Shape::new(&[n]).unwrap());
        self.kernels.copy(&CopyArgs { x, y, step: "write" }).unwrap()
    }

    /// Reports of the device about overlapping launches, eager and recorded.
    fn reports(&mut self, launches: &[Launch]) -> Vec<String> {
        let send = |q: &mut dyn refrain_driver::Queue| launches.iter().try_for_each(|l| q.launch(l));
        self.stream.run(&mut self.lease, true, send).unwrap();
        self.stream.synchronize().unwrap();
        let mut reports = self.device.take_reports();
        let eager = !reports.is_empty();
        let graph =
            self.stream.record(&self.memory, Method::Stream, &RecordOptions::named("early"), send).unwrap();
        graph.replay(&mut self.lease, &mut self.stream).unwrap();
        self.stream.synchronize().unwrap();
        let replayed = self.device.take_reports();
        assert_eq!(!replayed.is_empty(), eager, "{reports:?}, {replayed:?}");
        reports.extend(replayed);
        reports
    }
}

type Append = Box<dyn Fn(&Kernels, Buf) -> Launch>;

/// A token at position 20 of a sequence, with its operands.
struct Token {
    attend: Launch,
    /// Appends the key of one position of the same sequence.
    append: Append,
    inv_freq: Buf,
    norm: Buf,
    q: Buf,
}

fn token(bed: &mut Bed) -> Token {
    let cache_words = N_BLOCKS * N_HEADS * KV_BLOCK * HEAD_DIM;
    let [k_cache, v_cache] = [bed.words(cache_words), bed.words(cache_words)];
    let [q, k, v, y] = [(); 4].map(|()| bed.words(N_HEADS * HEAD_DIM));
    let (inv_freq, norm, seqs) = (bed.words(HEAD_DIM / 2), bed.words(HEAD_DIM), bed.words(1));
    let (positions, tables) = (bed.ints(&[20]), bed.ints(&[3, 1]));
    let heads = |buf| BufView::dense(buf, DType::F32, Shape::new(&[1, N_HEADS, HEAD_DIM]).unwrap());
    let attend = bed.kernels.attend(&AttendArgs {
        sinks: None,
        rope: Rope { style: RopeStyle::Neox, n_dims: HEAD_DIM, magnitude: 1.0 },
        attention: Attention { scale: 0.1, window: None, softcap: None },
        q: heads(q),
        kv: Some([heads(k), heads(v)]),
        norm: Some(AttendNorm { q: norm, k: Some(norm), v: Some(norm), eps: 1e-5 }),
        y,
        narrow: None,
        k_cache,
        v_cache,
        cache_dtype: DType::F32,
        positions,
        seqs,
        tables,
        inv_freq,
        scratch: None,
        counters: None,
        n: 1,
        n_heads: N_HEADS,
        n_blocks: N_BLOCKS,
        n_kv_heads: N_HEADS,
        kv_block: KV_BLOCK,
        head_dim: HEAD_DIM,
        n_seqs: 1,
        max_blocks: MAX_BLOCKS,
        n_splits: 1,
        fills: false,
        early: true,
        step: "attend",
    });
    let append = move |kernels: &Kernels, positions: Buf| {
        let args = KvAppendArgs {
            cache: k_cache,
            cache_dtype: DType::F32,
            scales: None,
            x: heads(k),
            positions,
            seqs,
            tables,
            n: 1,
            n_blocks: N_BLOCKS,
            n_kv_heads: N_HEADS,
            kv_block: KV_BLOCK,
            head_dim: HEAD_DIM,
            n_seqs: 1,
            max_blocks: MAX_BLOCKS,
            step: "append",
        };
        kernels.kv_append(&args).unwrap()
    };
    Token { attend: attend.unwrap(), append: Box::new(append), inv_freq, norm, q }
}

fn is_early_read_of(kernel: &str, reports: &[String]) -> bool {
    !reports.is_empty()
        && reports
            .iter()
            .all(|r| r.contains(&format!("kernel {kernel}")) && r.contains("before its dependency wait"))
}

#[test]
fn attend_reads_the_caches_of_earlier_positions_before_it_waits() {
    for position in [0, 15, 16, 19] {
        let mut bed = Bed::new();
        let token = token(&mut bed);
        let earlier = bed.ints(&[position]);
        let append = (token.append)(&bed.kernels, earlier);
        let reports = bed.reports(&[append.clone(), token.attend.clone()]);
        assert!(is_early_read_of("attend", &reports), "position {position}: {reports:?}");
        let gather = bed.gather();
        assert_eq!(bed.reports(&[append, gather, token.attend]), Vec::<String>::new());
    }
}

#[test]
fn attend_reads_weights_before_it_waits_and_its_own_position_and_queries_after() {
    let mut bed = Bed::new();
    let token = token(&mut bed);
    for weight in [token.inv_freq, token.norm] {
        let write = bed.writes(weight);
        let reports = bed.reports(&[write, token.attend.clone()]);
        assert!(is_early_read_of("attend", &reports), "{reports:?}");
    }
    let own = bed.ints(&[20]);
    let append = (token.append)(&bed.kernels, own);
    let write = bed.writes(token.q);
    assert_eq!(bed.reports(&[append, write, token.attend]), Vec::<String>::new());
}

#[test]
fn sampling_reads_its_parameters_before_it_waits_and_logits_after() {
    let mut bed = Bed::new();
    let logits = bed.words(VOCAB);
    let words = |bytes: u64| bytes.div_ceil(4) as usize;
    let params = bed.words(SAMPLE_PARAMS);
    let args = SampleArgs {
        logits: BufView::dense(logits, DType::F32, Shape::new(&[1, VOCAB]).unwrap()),
        params,
        rng: bed.words(4),
        history: bed.words(0),
        bias_ids: bed.words(0),
        bias: bed.words(0),
        mask: None,
        token: bed.words(1),
        logprob: bed.words(1),
        scratch: bed.words(words(sample_scratch_bytes(1, VOCAB))),
        state: bed.words(words(sample_state_bytes(1))),
        n: 1,
        vocab: VOCAB,
        n_history: 0,
        n_bias: 0,
        top: None,
        step: "sample",
    };
    let mut sample = Vec::new();
    bed.kernels.sample(&args, &mut sample).unwrap();
    let chain = |first: Vec<Launch>| first.into_iter().chain(sample.clone()).collect::<Vec<_>>();
    let (write, write_logits, gather) = (bed.writes(params), bed.writes(logits), bed.gather());
    let reports = bed.reports(&chain(vec![write.clone()]));
    assert!(is_early_read_of("sample", &reports), "{reports:?}");
    for kernel in ["sample_chunks", "sample_select"] {
        assert!(reports.iter().any(|r| r.contains(kernel)), "{kernel}: {reports:?}");
    }
    assert_eq!(bed.reports(&chain(vec![write, gather, write_logits])), Vec::<String>::new());
}
