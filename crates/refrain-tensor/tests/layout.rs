//! Compares chains of views with a model that lists the flat index of every element.

use proptest::prelude::*;
use refrain_tensor::quant::dequantize;
use refrain_tensor::{Bytes, DType, HostTensor, Layout, MAX_RANK, Shape, TensorError};

/// A view as an explicit list: `flat[i]` is the flat index of element `i` in row-major order of `dims`.
#[derive(Clone, Debug)]
struct Model {
    dims: Vec<usize>,
    flat: Vec<usize>,
}

impl Model {
    fn dense(dims: &[usize]) -> Model {
        Model { dims: dims.to_vec(), flat: (0..dims.iter().product()).collect() }
    }

    fn at(&self, index: &[usize]) -> usize {
        self.flat[index.iter().zip(&self.dims).fold(0, |row, (i, d)| row * d + i)]
    }

    /// Returns a view of shape `dims` whose element at `index` is this view's element at `from(index)`.
    fn gather(&self, dims: Vec<usize>, from: impl Fn(&[usize]) -> Vec<usize>) -> Model {
        let flat = all_indices(&dims).iter().map(|index| self.at(&from(index))).collect();
        Model { dims, flat }
    }

    fn reshape(&self, dims: &[usize]) -> Model {
        Model { dims: dims.to_vec(), flat: self.flat.clone() }
    }

    fn permute(&self, order: &[usize]) -> Model {
        let dims = order.iter().map(|&a| self.dims[a]).collect();
        self.gather(dims, |index| {
            let mut from = vec![0; order.len()];
            order.iter().zip(index).for_each(|(&a, &i)| from[a] = i);
            from
        })
    }

    fn slice(&self, axis: usize, start: usize, len: usize) -> Model {
        let mut dims = self.dims.clone();
        dims[axis] = len;
        self.gather(dims, |index| {
            let mut from = index.to_vec();
            from[axis] += start;
            from
        })
    }

    fn broadcast(&self, dims: &[usize]) -> Model {
        let outer = dims.len() - self.dims.len();
        self.gather(dims.to_vec(), |index| {
            index[outer..].iter().zip(&self.dims).map(|(&i, &d)| if d == 1 { 0 } else { i }).collect()
        })
    }

    /// True if some offset and strides reach exactly these elements.
    fn is_a_view(&self) -> bool {
        let Some(&offset) = self.flat.first() else {
            return true;
        };
        let unit = |axis| (0..self.dims.len()).map(|a| usize::from(a == axis)).collect::<Vec<_>>();
        let stride = |a: usize| {
            if self.dims[a] > 1 { self.at(&unit(a)).wrapping_sub(offset) } else { 0 }
        };
        let strides: Vec<usize> = (0..self.dims.len()).map(stride).collect();
        all_indices(&self.dims).iter().zip(&self.flat).all(|(index, &flat)| {
            let reached = index.iter().zip(&strides).map(|(&i, &s)| i.wrapping_mul(s));
            reached.fold(offset, usize::wrapping_add) == flat
        })
    }

    fn is_dense(&self) -> bool {
        self.flat.windows(2).all(|w| w[1] == w[0].wrapping_add(1))
    }
}

fn all_indices(dims: &[usize]) -> Vec<Vec<usize>> {
    dims.iter().fold(vec![vec![]], |outer, &dim| {
        outer.iter().flat_map(|index| (0..dim).map(move |i| [index.as_slice(), &[i]].concat())).collect()
    })
}

/// One step of a chain; the number selects one of the possibilities for the current shape.
#[derive(Clone, Copy, Debug)]
enum Step {
    Reshape(u64),
    Permute(u64),
    Slice(u64),
    Broadcast(u64),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => any::<u64>().prop_map(Step::Reshape),
        2 => any::<u64>().prop_map(Step::Permute),
        2 => any::<u64>().prop_map(Step::Slice),
        1 => any::<u64>().prop_map(Step::Broadcast),
    ]
}

/// Draws small numbers from one seed.
struct Draw(u64);

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n.max(1)
    }

    /// Returns a random shape of `n` elements.
    fn dims(&mut self, n: usize) -> Vec<usize> {
        let rank = 1 + self.below(MAX_RANK);
        let mut dims = vec![1; rank];
        if n == 0 {
            let axis = self.below(rank);
            dims.fill_with(|| 1 + self.below(3));
            dims[axis] = 0;
            return dims;
        }
        let mut left = n;
        for divisor in 2..=n {
            while left.is_multiple_of(divisor) {
                let axis = self.below(rank);
                dims[axis] *= divisor;
                left /= divisor;
            }
        }
        dims
    }

    fn order(&mut self, rank: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..rank).collect();
        (1..rank).for_each(|i| order.swap(i, self.below(i + 1)));
        order
    }
}

/// Applies a step to both; a reshape that needs a copy leaves both unchanged.
fn apply(step: Step, layout: Layout, model: &Model) -> Result<(Layout, Model), TestCaseError> {
    match step {
        Step::Reshape(seed) => {
            let dims = Draw(seed).dims(model.flat.len());
            let shape = Shape::new(&dims).unwrap();
            let reshaped = model.reshape(&dims);
            match layout.reshape(shape) {
                Ok(view) => Ok((view, reshaped)),
                Err(TensorError::NotAView { .. }) => {
                    prop_assert!(!reshaped.is_a_view(), "{layout:?} refused {dims:?}");
                    Ok((layout, model.clone()))
                }
                Err(e) => Err(TestCaseError::fail(e.to_string())),
            }
        }
        Step::Permute(seed) => {
            let order = Draw(seed).order(model.dims.len());
            Ok((layout.permute(&order).unwrap(), model.permute(&order)))
        }
        Step::Slice(seed) if !model.dims.is_empty() => {
            let mut draw = Draw(seed);
            let axis = draw.below(model.dims.len());
            let start = draw.below(model.dims[axis] + 1);
            let available = model.dims[axis] - start;
            // Mostly non-empty, since chains after an empty view test little.
            let len = if available > 0 && draw.below(8) > 0 {
                1 + draw.below(available)
            } else {
                draw.below(available + 1)
            };
            Ok((layout.slice(axis, start, len).unwrap(), model.slice(axis, start, len)))
        }
        Step::Broadcast(seed) if model.flat.len() <= 4096 => {
            let mut draw = Draw(seed);
            let mut dims: Vec<usize> =
                model.dims.iter().map(|&d| if d == 1 { 1 + draw.below(3) } else { d }).collect();
            if dims.len() < MAX_RANK && draw.below(2) == 0 {
                dims.insert(0, 1 + draw.below(3));
            }
            Ok((layout.broadcast_to(Shape::new(&dims).unwrap()).unwrap(), model.broadcast(&dims)))
        }
        Step::Slice(_) | Step::Broadcast(_) => Ok((layout, model.clone())),
    }
}

fn check(layout: &Layout, model: &Model) -> Result<(), TestCaseError> {
    prop_assert_eq!(layout.shape().dims().to_vec(), &model.dims[..]);
    prop_assert_eq!(layout.indices().collect::<Vec<_>>(), &model.flat[..], "{:?}", layout);
    for (index, &flat) in all_indices(&model.dims).iter().zip(&model.flat) {
        prop_assert_eq!(layout.at(index), flat);
    }
    prop_assert_eq!(layout.end(), model.flat.iter().max().map_or(0, |m| m + 1), "{:?}", layout);
    let row_len = model.dims.last().copied().unwrap_or(1);
    prop_assert_eq!(layout.is_contiguous(), model.is_dense(), "{:?}", layout);
    if !model.flat.is_empty() {
        let dense_rows = model.flat.chunks(row_len).all(|row| row.windows(2).all(|w| w[1] == w[0] + 1));
        prop_assert_eq!(layout.rows_are_contiguous(), dense_rows, "{:?}", layout);
    }
    Ok(())
}

/// Types with a decoder and an encoder.
fn codecs() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|d| d.is_float() || d.is_quantized())
}

/// Creates a tensor of random blocks and returns it with its elements.
fn random_tensor(dtype: DType, dims: &[usize], seed: u64) -> (HostTensor, Vec<f32>) {
    let n = dims.iter().product();
    let mut draw = Draw(seed);
    let bytes: Vec<u8> = (0..dtype.bytes_for(n).unwrap()).map(|_| draw.below(256) as u8).collect();
    let mut values = vec![0.0; n];
    dequantize(dtype, &bytes, &mut values).unwrap();
    (HostTensor::new(dtype, Shape::new(dims).unwrap(), Bytes::new(bytes)).unwrap(), values)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn chains_of_views_match_a_list_of_indices(
        dims in proptest::collection::vec(1usize..6, 0..5),
        steps in proptest::collection::vec(any_step(), 1..10),
    ) {
        let mut layout = Layout::contiguous(Shape::new(&dims).unwrap());
        let mut model = Model::dense(&dims);
        check(&layout, &model)?;
        for step in steps {
            (layout, model) = apply(step, layout, &model)?;
            check(&layout, &model)?;
        }
    }

    #[test]
    fn views_of_every_dtype_decode_their_elements(
        dtype in proptest::sample::select(codecs().collect::<Vec<_>>()),
        rows in 1usize..5,
        steps in proptest::collection::vec(any_step(), 0..6),
        seed in any::<u64>(),
    ) {
        let dims = [rows, if dtype.is_quantized() { dtype.block_len() } else { 60 }];
        let (tensor, values) = random_tensor(dtype, &dims, seed);
        let mut layout = *tensor.layout();
        let mut model = Model::dense(&dims);
        for step in steps {
            (layout, model) = apply(step, layout, &model)?;
        }
        let got = tensor.with_layout(layout).unwrap().to_f32().unwrap();
        let got: Vec<u32> = got.iter().map(|v| v.to_bits()).collect();
        let expected: Vec<u32> = model.flat.iter().map(|&i| values[i].to_bits()).collect();
        prop_assert_eq!(got, expected, "{} {:?}", dtype, layout);
    }
}

#[test]
fn views_outside_the_tensor_are_errors() {
    let layout = Layout::contiguous(Shape::from([2, 3]));
    assert!(matches!(layout.reshape(Shape::from([7])), Err(TensorError::Reshape { .. })));
    assert!(matches!(layout.permute(&[0, 0]), Err(TensorError::Permute { .. })));
    assert!(matches!(layout.permute(&[0]), Err(TensorError::Permute { .. })));
    assert!(matches!(layout.permute(&[0, 2]), Err(TensorError::Permute { .. })));
    assert!(matches!(layout.slice(1, 2, 2), Err(TensorError::Slice { .. })));
    assert!(matches!(layout.slice(2, 0, 1), Err(TensorError::Slice { .. })));
    assert!(matches!(layout.slice(0, usize::MAX, 2), Err(TensorError::Slice { .. })));
    assert!(matches!(layout.broadcast_to(Shape::from([3, 2, 1])), Err(TensorError::Broadcast { .. })));
    assert!(matches!(layout.broadcast_to(Shape::from([3])), Err(TensorError::Broadcast { .. })));
}

#[test]
fn a_view_beyond_the_bytes_is_an_error() {
    let (tensor, _) = random_tensor(DType::Q4_0, &[2, 32], 1);
    let larger = Layout::contiguous(Shape::from([3, 32]));
    assert!(matches!(
        tensor.with_layout(larger),
        Err(TensorError::ByteCount { need_bytes: 54, got_bytes: 36, .. })
    ));
}

#[test]
fn an_empty_view_is_contiguous_whatever_its_strides() {
    let dense = Layout::contiguous(Shape::from([3, 4, 5]));
    let empty = dense.permute(&[2, 0, 1]).unwrap().slice(1, 3, 0).unwrap();
    assert!(empty.is_contiguous());
    assert!(dense.slice(2, 1, 0).unwrap().is_contiguous());
    assert!(!dense.slice(2, 1, 2).unwrap().is_contiguous());
}

#[test]
fn an_empty_slice_at_the_end_decodes_to_nothing() {
    let (tensor, _) = random_tensor(DType::Q4_0, &[2, 32], 1);
    let empty = tensor.layout().slice(0, 2, 0).unwrap();
    assert_eq!(empty.end(), 0);
    assert_eq!(tensor.with_layout(empty).unwrap().to_f32().unwrap(), Vec::<f32>::new());
}
