//! Checks RoPE against complex numbers, and paged attention against dense attention.

use refrain_graph::{Attention, Op, Rope, RopeStyle, TensorType};
use refrain_reference::{In, Out, ReferenceError, run};
use refrain_tensor::{DType, HostTensor, Shape};
use refrain_testkit::{Fill, Rng, Tol, assert_close, encode, tensor};

fn random(dims: &[usize], seed: u64) -> HostTensor {
    tensor(TensorType { dtype: DType::F32, shape: Shape::new(dims).unwrap() }, &Fill::Normal, seed)
}

fn ints(dims: &[usize], values: &[i32]) -> HostTensor {
    HostTensor::from_i32(Shape::new(dims).unwrap(), values).unwrap()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// The single F32 output of an op, with the shape of its first input.
fn eval(op: &Op, inputs: &[&HostTensor]) -> Result<Vec<f32>, ReferenceError> {
    let ins: Vec<In<'_>> = inputs.iter().map(|t| In::from(*t)).collect();
    let ty = ins[0].ty();
    let mut bytes = vec![0xFF; ty.shape.n_elements() * 4];
    run(op, &ins, &mut [Out { ty, bytes: &mut bytes }])?;
    Ok(floats(&bytes))
}

#[test]
fn rope_multiplies_pairs_by_a_unit_complex_number() {
    let (n, n_heads, head_dim, n_dims) = (4, 3, 10, 8);
    let x = random(&[n, n_heads, head_dim], 1);
    let positions = [0, 5, -1, 1023];
    let inv_freq: Vec<f32> = (0..n_dims / 2).map(|i| 500f32.powf(-(i as f32) / 4.0)).collect();
    let freq = HostTensor::from_f32(Shape::from([n_dims / 2]), &inv_freq).unwrap();
    for (style, magnitude) in [
        (RopeStyle::Neox, 1.0),
        (RopeStyle::Interleaved, 1.0),
        (RopeStyle::Neox, 1.3),
        (RopeStyle::Interleaved, 0.7),
    ] {
        let op = Op::Rope(Rope { style, n_dims, magnitude });
        let got = eval(&op, &[&x, &ints(&[n], &positions), &freq]).unwrap();
        let mut want = x.to_f32().unwrap();
        for (row, head) in (0..n).flat_map(|r| (0..n_heads).map(move |h| (r, h))) {
            let head = &mut want[(row * n_heads + head) * head_dim..][..head_dim];
            for (i, &freq) in inv_freq.iter().enumerate().filter(|_| positions[row] >= 0) {
                let (re, im) = match style {
                    RopeStyle::Neox => (i, i + 4),
                    RopeStyle::Interleaved => (2 * i, 2 * i + 1),
                };
                let (a, b) = (f64::from(head[re]), f64::from(head[im]));
                let angle = f64::from(positions[row]) * f64::from(freq);
                let (c, s) = (f64::from(magnitude) * angle.cos(), f64::from(magnitude) * angle.sin());
                // (a + bi)(c + si)
                (head[re], head[im]) = ((a * c - b * s) as f32, (a * s + b * c) as f32);
            }
        }
        assert_close(&got, &want, Tol::Bits);
    }
}

#[test]
fn rope_preserves_lengths_and_depends_only_on_distance() {
    let freq = HostTensor::from_f32(Shape::from([2]), &[1.0, 0.1]).unwrap();
    let op = Op::Rope(Rope { style: RopeStyle::Neox, n_dims: 4, magnitude: 1.0 });
    let (q, k) = (random(&[1, 1, 4], 2), random(&[1, 1, 4], 3));
    let at = |x: &HostTensor, p: i32| eval(&op, &[x, &ints(&[1], &[p]), &freq]).unwrap();
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let near = dot(&at(&q, 7), &at(&k, 3));
    let far = dot(&at(&q, 107), &at(&k, 103));
    assert!((near - far).abs() < 1e-4, "{near} {far}");
    let turned = at(&q, 77);
    assert!((dot(&turned, &turned) - dot(&q.to_f32().unwrap(), &q.to_f32().unwrap())).abs() < 1e-4);
}

/// Keys and values of several sequences, contiguous: `[seq][position][n_kv_heads * head_dim]`.
struct World {
    n_kv_heads: usize,
    head_dim: usize,
    kv_block: usize,
    max_blocks: usize,
    n_blocks: usize,
    k: Vec<Vec<Vec<f32>>>,
    v: Vec<Vec<Vec<f32>>>,
    tables: Vec<i32>,
}

impl World {
    fn new(lengths: &[usize], n_kv_heads: usize, head_dim: usize, kv_block: usize, seed: u64) -> World {
        let mut rng = Rng::new(seed);
        let mut rows = |l: usize| -> Vec<Vec<f32>> {
            (0..l).map(|_| (0..n_kv_heads * head_dim).map(|_| rng.normal()).collect()).collect()
        };
        let k = lengths.iter().map(|&l| rows(l)).collect();
        let v = lengths.iter().map(|&l| rows(l)).collect();
        let max_blocks = lengths.iter().max().unwrap().div_ceil(kv_block) + 1;
        let n_blocks = lengths.len() * max_blocks;
        let blocks = rng.shuffled(n_blocks);
        let tables = blocks.iter().map(|&b| b as i32).collect();
        World { n_kv_heads, head_dim, kv_block, max_blocks, n_blocks, k, v, tables }
    }

    fn tables(&self) -> HostTensor {
        ints(&[self.k.len(), self.max_blocks], &self.tables)
    }

    /// A cache filled row by row in shuffled order, with padding rows in between.
    fn cache(&self, of: &[Vec<Vec<f32>>], dtype: DType) -> HostTensor {
        let ty = TensorType::new(dtype, [self.n_blocks, self.n_kv_heads, self.kv_block, self.head_dim]);
        let mut rows: Vec<(i32, i32)> = of
            .iter()
            .enumerate()
            .flat_map(|(s, l)| (0..l.len()).map(move |p| (s as i32, p as i32)))
            .collect();
        rows.push((0, -1));
        let order = Rng::new(9).shuffled(rows.len());
        let rows: Vec<(i32, i32)> = order.into_iter().map(|i| rows[i]).collect();
        let row_of = |&(s, p): &(i32, i32)| match usize::try_from(p) {
            Ok(p) => of[s as usize][p].clone(),
            Err(_) => vec![f32::NAN; self.n_kv_heads * self.head_dim],
        };
        let x: Vec<f32> = rows.iter().flat_map(row_of).collect();
        let x = HostTensor::from_f32(Shape::from([rows.len(), self.n_kv_heads, self.head_dim]), &x).unwrap();
        let n = [rows.len()];
        let positions = ints(&n, &rows.iter().map(|r| r.1).collect::<Vec<_>>());
        let seqs = ints(&n, &rows.iter().map(|r| r.0).collect::<Vec<_>>());
        let mut bytes = encode(dtype, &vec![0.0; ty.shape.n_elements()]);
        let tables = self.tables();
        let inputs = [&x, &positions, &seqs, &tables].map(In::from);
        run(&Op::KvAppend, &inputs, &mut [Out { ty, bytes: &mut bytes }]).unwrap();
        HostTensor::new(dtype, ty.shape, refrain_tensor::Bytes::new(bytes)).unwrap()
    }

    /// Dense softmax attention over the positions visible to a row.
    fn dense(&self, a: &Attention, q: &[f32], seq: usize, position: usize, n_heads: usize) -> Vec<f32> {
        let d = self.head_dim;
        let first = a.window.map_or(0, |w| (position + 1).saturating_sub(w));
        let mut out = Vec::new();
        for head in 0..n_heads {
            let kv = head / (n_heads / self.n_kv_heads) * d;
            let score = |p: usize| {
                let dot: f64 =
                    (0..d).map(|i| f64::from(q[head * d + i]) * f64::from(self.k[seq][p][kv + i])).sum();
                let s = dot * f64::from(a.scale);
                a.softcap.map_or(s, |c| f64::from(c) * (s / f64::from(c)).tanh())
            };
            let exps: Vec<f64> = (first..=position).map(|p| score(p).exp()).collect();
            let total: f64 = exps.iter().sum();
            let mixed = |i: usize| {
                let terms = exps.iter().zip(first..).map(|(e, p)| e * f64::from(self.v[seq][p][kv + i]));
                (terms.sum::<f64>() / total) as f32
            };
            out.extend((0..d).map(mixed));
        }
        out
    }

    fn check(&self, a: Attention, n_heads: usize, rows: &[(i32, i32)], dtype: DType, tol: Tol) {
        let q = random(&[rows.len(), n_heads, self.head_dim], 4);
        let n = [rows.len()];
        let inputs = [
            &q,
            &self.cache(&self.k, dtype),
            &self.cache(&self.v, dtype),
            &ints(&n, &rows.iter().map(|r| r.1).collect::<Vec<_>>()),
            &ints(&n, &rows.iter().map(|r| r.0).collect::<Vec<_>>()),
            &self.tables(),
        ];
        let got = eval(&Op::Attention(a), &inputs).unwrap();
        let q = q.to_f32().unwrap();
        let width = n_heads * self.head_dim;
        let want = rows.iter().enumerate().flat_map(|(row, &(s, p))| match usize::try_from(p) {
            Ok(p) => self.dense(&a, &q[row * width..][..width], s as usize, p, n_heads),
            Err(_) => vec![0.0; width],
        });
        assert_close(&got, &want.collect::<Vec<_>>(), tol);
    }
}

const PLAIN: Attention = Attention { scale: 0.4, window: None, softcap: None };

#[test]
fn paged_attention_equals_dense_attention() {
    let world = World::new(&[5, 1, 13], 2, 6, 4, 1);
    let rows = [(2, 12), (0, 0), (0, 4), (1, 0), (2, 7), (2, 8)];
    world.check(PLAIN, 6, &rows, DType::F32, Tol::Each(1e-5));
    world.check(PLAIN, 2, &rows, DType::F32, Tol::Each(1e-5));
    world.check(PLAIN, 2, &rows, DType::F16, Tol::Whole(3e-3));
    world.check(PLAIN, 2, &rows, DType::BF16, Tol::Whole(3e-2));
}

#[test]
fn a_window_hides_the_past_and_a_cap_bounds_the_scores() {
    let world = World::new(&[19, 7], 1, 8, 4, 2);
    let rows = [(0, 18), (1, 6), (0, 0), (1, 2), (0, 3)];
    for window in [1, 2, 4, 5, 18, 19, 100] {
        world.check(Attention { window: Some(window), ..PLAIN }, 3, &rows, DType::F32, Tol::Each(1e-5));
    }
    world.check(Attention { softcap: Some(1.5), scale: 3.0, ..PLAIN }, 3, &rows, DType::F32, Tol::Each(1e-5));
}

#[test]
fn padding_rows_write_nothing_and_return_zeros() {
    let world = World::new(&[3], 1, 4, 2, 3);
    // The sequence of a padding row is ignored.
    world.check(PLAIN, 1, &[(0, -1), (99, -1), (0, 2), (-7, i32::MIN)], DType::F32, Tol::Each(1e-5));
}

#[test]
fn out_of_range_indices_are_refused_by_name() {
    let world = World::new(&[3], 1, 4, 2, 3);
    let (k, v) = (world.cache(&world.k, DType::F32), world.cache(&world.v, DType::F32));
    let refuse = |seq: i32, position: i32, tables: &HostTensor| {
        let inputs = [&random(&[1, 1, 4], 5), &k, &v, &ints(&[1], &[position]), &ints(&[1], &[seq]), tables];
        eval(&Op::Attention(PLAIN), &inputs).unwrap_err().to_string()
    };
    assert_eq!(refuse(1, 0, &world.tables()), "sequence is 1, must be below 1");
    assert_eq!(refuse(-1, 0, &world.tables()), "sequence is -1, must be below 1");
    assert_eq!(refuse(0, 6, &world.tables()), "position is 6, must be below 6");
    assert_eq!(refuse(0, 0, &ints(&[1, 3], &[3, 0, 1])), "KV block is 3, must be below 3");
    assert_eq!(refuse(0, 2, &ints(&[1, 3], &[0, -1, 1])), "KV block is -1, must be below 3");
}
