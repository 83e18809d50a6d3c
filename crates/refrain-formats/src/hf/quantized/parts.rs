//! The tensors that make up a quantised weight.

use super::config::{Form, Group, Order, Scales, Scheme};
use super::decode::{self, Codes, Layout};
use crate::hf::fault::HfFault;
use crate::hf::safetensors::Stored;
use crate::table::TensorInfo;
use refrain_tensor::{Bytes, DType, HostTensor, Shape};
use safetensors::Dtype;
use tokenizers::utils::SysRegex;

/// A weight that the files store in parts.
#[derive(Clone, Debug)]
pub(crate) struct Packed {
    /// The weight under its own name, as it is loaded.
    pub(crate) info: TensorInfo,
    form: Form,
    /// Matrices in the weight, their rows and their columns.
    dims: [usize; 3],
    float: DType,
    codes: Stored,
    scales: Stored,
    zeros: Option<Stored>,
    /// The group of each column.
    group_of: Option<Stored>,
    /// The shape of the weight, to be compared.
    shape: Option<Stored>,
}

/// Suffixes of tensors beside the codes.
const PARTS: [&str; 19] = [
    "weight_scale",
    "weight_scale_inv",
    "_proj_scale_inv",
    "_proj_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight_global_scale",
    ".scales",
    ".qzeros",
    ".g_idx",
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    ".activation_scale_inv",
    ".k_scale",
    ".v_scale",
    ".q_scale",
];

/// Returns whether a tensor is a part of a quantised weight, or about activations, which are not quantised here.
pub(crate) fn is_part(name: &str) -> bool {
    PARTS.iter().any(|part| name.ends_with(part))
}

/// Puts the weight together whose codes are in `codes`; `None` if that is not the codes of a weight. `stored` is sorted by
/// name.
pub(crate) fn assemble(
    scheme: &Scheme,
    codes: &Stored,
    stored: &[Stored],
) -> Result<Option<Packed>, HfFault> {
    let Some((module, kind)) = kind_of(codes) else { return Ok(None) };
    let form = form_of(scheme, &module, kind, codes)?;
    let name = if kind == Kind::Float8 { codes.name.to_string() } else { format!("{module}.weight") };
    let find = |part: String| stored.binary_search_by(|s| (*s.name).cmp(&part)).ok().map(|at| &stored[at]);
    let need = |parts: &[String]| match parts.iter().find_map(|part| find(part.clone())) {
        Some(found) => Ok(found.clone()),
        None => Err(HfFault::MissingPart { name: name.clone(), part: parts[0].clone() }),
    };
    let of_module = |part: &str| format!("{module}.{part}");
    let is_words = |order| matches!(form, Form::Words { order: of, .. } if of == order);
    let is_rows = is_words(Order::Rows);
    let scales = match kind {
        Kind::Words if !is_rows => need(&[of_module("scales")])?,
        Kind::Float8 => need(&[format!("{name}_scale_inv"), format!("{name}_scale")])?,
        Kind::Words | Kind::Bytes | Kind::Nibbles => need(&[of_module("weight_scale")])?,
    };
    let zeros = match form {
        Form::Words { order: Order::Rows, symmetric: false, .. } | Form::Bytes { symmetric: false, .. } => {
            Some(need(&[of_module("weight_zero_point")])?)
        }
        Form::Words { order: Order::Awq | Order::Gptq { .. }, .. } => Some(need(&[of_module("qzeros")])?),
        Form::Words { .. } | Form::Bytes { .. } | Form::Float8 { .. } | Form::Mxfp4 => None,
    };
    let group_of = match form {
        Form::Words { order: Order::Rows, .. } => find(of_module("weight_g_idx")).cloned(),
        Form::Words { order: Order::Gptq { .. }, .. } => find(of_module("g_idx")).cloned(),
        Form::Words { .. } | Form::Bytes { .. } | Form::Float8 { .. } | Form::Mxfp4 => None,
    };
    let shape = is_rows.then(|| find(of_module("weight_shape")).cloned()).flatten();
    let dims = dims_of(&name, form, codes)?;
    let info = TensorInfo {
        name: name.into(),
        dtype: DType::F32,
        shape: Shape::from([1]),
        offset: codes.offset,
        n_bytes: 0,
        file_idx: codes.file_idx,
    };
    let (codes, float) = (codes.clone(), scheme.float);
    let mut packed = Packed { info, form, dims, float, codes, scales, zeros, group_of, shape };
    packed.check()?;
    packed.describe()?;
    Ok(Some(packed))
}

/// What the codes of a weight look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Float8,
    Bytes,
    Words,
    Nibbles,
}

/// The module that a tensor holds the codes of, and what they look like; `None` for other tensors.
fn kind_of(tensor: &Stored) -> Option<(String, Kind)> {
    let name = &*tensor.name;
    let strip = |suffix: &str| name.strip_suffix(suffix).map(str::to_owned);
    match tensor.dtype {
        Dtype::F8_E4M3 | Dtype::F8_E5M2 if !is_part(name) => {
            Some((strip(".weight").unwrap_or_else(|| name.to_owned()), Kind::Float8))
        }
        Dtype::I8 => Some((strip(".weight")?, Kind::Bytes)),
        Dtype::U8 => Some((strip(".weight_packed")?, Kind::Nibbles)),
        _ => Some((strip(".weight_packed").or_else(|| strip(".qweight"))?, Kind::Words)),
    }
}

/// The form of a module's weight: the only one for such codes, or the one whose targets name the module.
fn form_of(scheme: &Scheme, module: &str, kind: Kind, codes: &Stored) -> Result<Form, HfFault> {
    let fits = |group: &&Group| match group.form {
        Form::Float8 { .. } => kind == Kind::Float8,
        Form::Bytes { .. } => kind == Kind::Bytes,
        Form::Words { .. } => kind == Kind::Words,
        Form::Mxfp4 => kind == Kind::Nibbles,
    };
    let fitting: Vec<&Group> = scheme.groups.iter().filter(fits).collect();
    let none = || HfFault::NoGroup { name: codes.name.to_string(), found: format!("{:?}", codes.dtype) };
    let first = fitting.first().ok_or_else(none)?;
    if fitting.iter().all(|group| group.form == first.form) {
        return Ok(first.form);
    }
    let exact = |group: &&&Group| group.targets.iter().any(|target| target == module);
    let pattern = |group: &&&Group| group.targets.iter().any(|target| matches_pattern(target, module));
    let class = |group: &&&Group| group.targets.iter().any(|target| target == "Linear");
    let found = fitting.iter().find(exact).or_else(|| fitting.iter().find(pattern));
    found.or_else(|| fitting.iter().find(class)).map(|group| group.form).ok_or_else(none)
}

/// Python's `re.match`: the pattern must match at the start of the name.
fn matches_pattern(target: &str, module: &str) -> bool {
    let Some(pattern) = target.strip_prefix("re:") else { return false };
    let regex = SysRegex::new(&format!("^(?:{pattern})"));
    regex.is_ok_and(|regex| regex.find_iter(module).next().is_some())
}

/// Matrices, rows and columns that the codes are for.
fn dims_of(name: &str, form: Form, codes: &Stored) -> Result<[usize; 3], HfFault> {
    let expect = |dtype: Dtype, expected| match codes.dtype == dtype {
        true => Ok(()),
        false => Err(part_type(codes, expected)),
    };
    let bad = |expected: &'static str| HfFault::PartType {
        name: name.into(),
        found: format!("shape {:?}", codes.shape),
        expected,
    };
    match (form, codes.shape.as_slice()) {
        (Form::Float8 { .. }, &[n, n_out, n_in]) => Ok([n, n_out, n_in]),
        (Form::Float8 { .. } | Form::Bytes { .. }, &[n_out, n_in]) => Ok([1, n_out, n_in]),
        (Form::Mxfp4, &[n_out, n_bytes]) => Ok([1, n_out, 2 * n_bytes]),
        (Form::Words { order, bits, .. }, &[rows, columns]) => {
            expect(Dtype::I32, "I32")?;
            let per_word = 32 / bits;
            Ok(match order {
                Order::Rows => [1, rows, columns.saturating_mul(per_word)],
                Order::Awq => [1, columns.saturating_mul(per_word), rows],
                Order::Gptq { .. } => [1, columns, rows.saturating_mul(per_word)],
            })
        }
        _ => Err(bad("a matrix")),
    }
}

fn part_type(part: &Stored, expected: &'static str) -> HfFault {
    HfFault::PartType { name: part.name.to_string(), found: format!("{:?}", part.dtype), expected }
}

impl Packed {
    /// Size of its parts in the files.
    pub(crate) fn file_bytes(&self) -> u64 {
        let more = [&self.zeros, &self.group_of, &self.shape];
        let more: u64 = more.into_iter().flatten().map(|part| part.n_bytes).sum();
        self.codes.n_bytes + self.scales.n_bytes + more
    }

    fn scaling(&self) -> Scales {
        match self.form {
            Form::Float8 { scales } | Form::Bytes { scales, .. } | Form::Words { scales, .. } => scales,
            Form::Mxfp4 => Scales::Group(32),
        }
    }

    /// Rows and columns that share a scale.
    fn block(&self) -> [usize; 2] {
        let [_, n_out, n_in] = self.dims;
        match self.scaling() {
            Scales::Tensor => [n_out.max(1), n_in.max(1)],
            Scales::Row => [1, n_in.max(1)],
            Scales::Group(size) => [1, size],
            Scales::Block(block) => block,
        }
    }

    /// Number of scales in a column and in a row.
    fn n_scales(&self) -> [usize; 2] {
        let ([_, n_out, n_in], [rows, columns]) = (self.dims, self.block());
        [n_out.div_ceil(rows), n_in.div_ceil(columns)]
    }

    fn check(&self) -> Result<(), HfFault> {
        let [n, n_out, n_in] = self.dims;
        if let Scales::Group(group) = self.scaling()
            && !n_in.is_multiple_of(group)
        {
            return Err(HfFault::PartialGroups { name: self.info.name().into(), n_in, group });
        }
        let [rows, columns] = self.n_scales();
        let is_transposed = matches!(self.form, Form::Words { order: Order::Awq | Order::Gptq { .. }, .. });
        let whole = matches!(self.scaling(), Scales::Tensor);
        let scales = match (is_transposed, n) {
            (true, _) => vec![vec![columns, rows]],
            (false, 1) if whole => vec![vec![], vec![1], vec![1, 1]],
            (false, 1) if columns == 1 => vec![vec![rows, 1], vec![rows]],
            (false, 1) => vec![vec![rows, columns]],
            (false, _) if whole => vec![vec![n], vec![n, 1, 1]],
            (false, _) => vec![vec![n, rows, columns]],
        };
        self.expect(&self.scales, &scales)?;
        if !matches!(self.form, Form::Mxfp4) && !is_scale(self.scales.dtype) {
            return Err(part_type(&self.scales, "F32, F16, BF16 or F8_E8M0"));
        }
        if matches!(self.form, Form::Mxfp4) && !matches!(self.scales.dtype, Dtype::U8 | Dtype::F8_E8M0) {
            return Err(part_type(&self.scales, "U8"));
        }
        if let Some(zeros) = &self.zeros {
            let (shape, dtype, expected) = match self.form {
                Form::Words { order: Order::Rows, bits, .. } => {
                    (vec![vec![rows.div_ceil(32 / bits), columns]], Dtype::I32, "I32")
                }
                Form::Words { bits, .. } => {
                    (vec![vec![columns, n_out.div_ceil(32 / bits)]], Dtype::I32, "I32")
                }
                Form::Bytes { .. } | Form::Float8 { .. } | Form::Mxfp4 => (scales, Dtype::I8, "I8"),
            };
            self.expect(zeros, &shape)?;
            if zeros.dtype != dtype {
                return Err(part_type(zeros, expected));
            }
        }
        if let Some(group_of) = &self.group_of {
            self.expect(group_of, &[vec![n_in]])?;
            if group_of.dtype != Dtype::I32 {
                return Err(part_type(group_of, "I32"));
            }
        }
        Ok(())
    }

    fn expect(&self, part: &Stored, expected: &[Vec<usize>]) -> Result<(), HfFault> {
        if expected.contains(&part.shape) {
            return Ok(());
        }
        let [_, n_out, n_in] = self.dims;
        let (name, found, form) = (part.name.to_string(), part.shape.clone(), self.form.to_string());
        Err(HfFault::PartShape { name, found, expected: expected.to_vec(), n_out, n_in, form })
    }

    /// Fills in the type and size that the weight will have, as far as headers tell.
    fn describe(&mut self) -> Result<(), HfFault> {
        let [n, n_out, n_in] = self.dims;
        let dims =
            if n == 1 && self.codes.shape.len() == 2 { vec![n_out, n_in] } else { vec![n, n_out, n_in] };
        let wrap = |source| HfFault::Packed { name: self.info.name().into(), source };
        let shape = Shape::new(&dims).map_err(wrap)?;
        let blocks = decode::block_type(self.bits(), self.is_symmetric(), self.block()[1], n_in);
        let dtype = match self.form {
            Form::Mxfp4 => DType::MXFP4,
            Form::Float8 { .. } => self.float,
            Form::Bytes { .. } | Form::Words { .. } => blocks.unwrap_or(self.float),
        };
        let n_bytes = dtype.bytes_for(shape.n_elements());
        let partial = refrain_tensor::TensorError::PartialBlocks { dtype, shape };
        let n_bytes = n_bytes.ok_or(partial).map_err(wrap)? as u64;
        (self.info.dtype, self.info.shape, self.info.n_bytes) = (dtype, shape, n_bytes);
        Ok(())
    }

    fn bits(&self) -> usize {
        match self.form {
            Form::Words { bits, .. } => bits,
            Form::Bytes { .. } | Form::Float8 { .. } => 8,
            Form::Mxfp4 => 4,
        }
    }

    fn is_symmetric(&self) -> bool {
        match self.form {
            Form::Words { symmetric, .. } | Form::Bytes { symmetric, .. } => symmetric,
            Form::Float8 { .. } | Form::Mxfp4 => true,
        }
    }

    /// Reads the parts and puts the weight together.
    pub(crate) fn load(
        &self,
        bytes: impl Fn(&Stored) -> Result<Bytes, HfFault>,
    ) -> Result<HostTensor, HfFault> {
        let [n, n_out, n_in] = self.dims;
        let (codes, scales) = (bytes(&self.codes)?, bytes(&self.scales)?);
        let (dtype, values) = match self.form {
            Form::Mxfp4 => (DType::MXFP4, decode::mxfp4(codes.as_slice(), scales.as_slice())),
            Form::Float8 { .. } => {
                let scales = decode::floats(self.scales.dtype, scales.as_slice());
                let table = decode::float8_values(self.codes.dtype);
                let dims = [n, n_out, n_in];
                let values =
                    decode::float8(codes.as_slice(), &table, dims, &scales, self.block(), self.float);
                (self.float, values)
            }
            Form::Bytes { .. } | Form::Words { .. } => {
                let zeros = self.zeros.as_ref().map(&bytes).transpose()?;
                let integers = self.integers(scales.as_slice(), zeros.as_ref(), &bytes)?;
                let codes = Codes { bytes: codes.as_slice(), layout: self.layout(), n_out, n_in };
                decode::integers(&codes, &integers, self.float)
            }
        };
        if dtype != self.info.dtype {
            let (name, planned) = (self.info.name(), self.info.dtype);
            tracing::warn!(
                "{name} is decoded to {dtype}: its groups or scales do not fit in the blocks of {planned}"
            );
        }
        // The source pages of what was rewritten need not stay in memory.
        codes.release();
        let wrap = |source| HfFault::Packed { name: self.info.name().into(), source };
        HostTensor::new(dtype, self.info.shape, Bytes::new(values)).map_err(wrap)
    }

    fn layout(&self) -> Layout {
        match self.form {
            Form::Words { order: Order::Rows, bits, .. } => Layout::Rows { bits },
            Form::Words { order: Order::Awq, .. } => Layout::AwqColumns,
            Form::Words { order: Order::Gptq { .. }, bits, .. } => Layout::Columns { bits },
            Form::Bytes { .. } | Form::Float8 { .. } | Form::Mxfp4 => Layout::Signed,
        }
    }

    /// Scales and zero points of integer weights, by row and group.
    fn integers(
        &self,
        scales: &[u8],
        zeros: Option<&Bytes>,
        bytes: &impl Fn(&Stored) -> Result<Bytes, HfFault>,
    ) -> Result<decode::Integers, HfFault> {
        let [_, n_out, n_in] = self.dims;
        let ([rows, groups], [_, group]) = (self.n_scales(), self.block());
        let values = decode::floats(self.scales.dtype, scales);
        let is_transposed = matches!(self.form, Form::Words { order: Order::Awq | Order::Gptq { .. }, .. });
        // One scale for all rows is repeated.
        let at = |row: usize, of: usize| match (is_transposed, rows) {
            (true, _) => of * n_out + row,
            (false, 1) => of,
            (false, _) => row * groups + of,
        };
        let scales = (0..n_out * groups).map(|i| values[at(i / groups, i % groups)]).collect();
        let zeros = zeros.map(|zeros| {
            let bytes = zeros.as_slice();
            let zero = |i: usize| self.zero_point(bytes, i / groups, i % groups, at(i / groups, i % groups));
            (0..n_out * groups).map(zero).collect()
        });
        let n_groups = groups;
        if let Some(shape) = &self.shape {
            let found = decode::integers_of(shape.dtype, bytes(shape)?.as_slice());
            if found != [n_out as i64, n_in as i64] {
                return Err(HfFault::WeightShape { name: shape.name.to_string(), found, n_out, n_in });
            }
        }
        let mut group_of = None;
        if let Some(part) = &self.group_of {
            let found: Vec<i32> =
                bytes(part)?.as_slice().as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
            let outside = found.iter().position(|&of| of < 0 || of as usize >= n_groups);
            if let Some(column) = outside {
                let (name, found) = (part.name.to_string(), found[column]);
                return Err(HfFault::GroupIndex { name, column, found, n_groups });
            }
            let in_order = found.iter().enumerate().all(|(column, &of)| of as usize == column / group);
            group_of = (!in_order).then(|| found.into_iter().map(|of| of as u32).collect());
        }
        Ok(decode::Integers { bits: self.bits(), n_groups, group, scales, zeros, group_of })
    }

    /// The zero point of a row's group, counted from the smallest code.
    fn zero_point(&self, zeros: &[u8], row: usize, group: usize, at: usize) -> u8 {
        let [_, n_out, _] = self.dims;
        let (n_groups, bits) = (self.n_scales()[1], self.bits());
        let per_word = 32 / bits;
        let word = |word: usize| u32::from_le_bytes(zeros.as_chunks::<4>().0[word]);
        let mask = (1_u32 << bits) - 1;
        let found = match self.form {
            Form::Words { order: Order::Rows, .. } => {
                word(row / per_word * n_groups + group) >> (bits * (row % per_word))
            }
            Form::Words { order: Order::Awq, .. } => {
                let shift = 4 * decode::AWQ_SHIFT[row % 8];
                word(group * n_out.div_ceil(8) + row / 8) >> shift
            }
            Form::Words { order: Order::Gptq { zeros_less_one }, .. } => {
                // The format's own tools subtract and add 1 for all fields at once, with carries.
                let ones = u32::MAX / mask;
                let found = word(group * n_out.div_ceil(per_word) + row / per_word);
                let found = if zeros_less_one { found.wrapping_add(ones) } else { found };
                found >> (bits * (row % per_word))
            }
            Form::Bytes { .. } | Form::Float8 { .. } | Form::Mxfp4 => u32::from(zeros[at] ^ 0x80),
        };
        (found & mask) as u8
    }
}

fn is_scale(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8_E8M0)
}
