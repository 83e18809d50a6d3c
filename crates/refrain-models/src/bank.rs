//! Banks of adapters: several LoRA adapters over one set of weights, of which each sequence has one or none.
//!
//! The factors of all adapters are stacked, so that one op per linear map serves a batch of sequences with
//! different adapters ([`LoraOp`]). Maps of the same rows share the first product. An adapter that does not
//! adapt a map, or with a smaller rank than others, has zeros there.

use crate::adapter::{Adapter, LinearSite};
use crate::error::ModelError;
use crate::model::{Head, KvSpec, Model, StepSpec};
use crate::step::StepBuilder;
#[cfg(doc)]
use refrain_graph::LoraOp;
use refrain_graph::{GraphError, TensorType, ValueId, Weight, WeightId};
use refrain_tensor::{Bytes, DType, HostTensor, Shape, quant};

/// An adapter of a bank.
#[derive(Clone, Debug)]
pub struct BankAdapter {
    /// Name that requests use.
    pub name: String,
    /// Its factors.
    pub adapter: Adapter,
    /// Multiplies its output; 1 is its trained strength.
    pub scale: f64,
}

/// Adapters attached to a model.
#[derive(Clone, Debug)]
pub(crate) struct Bank {
    names: Vec<String>,
    /// Number of the model's weights before those of the bank.
    n_base: usize,
    /// First factors of the maps that multiply the same rows.
    downs: Vec<WeightId>, // [n_adapters, sum of the maps' ranks, n_in]
    maps: Vec<BankMap>,
}

/// The adapters of one linear map.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BankMap {
    /// Weight of the adapted map.
    base: WeightId, // [n_out, n_in]
    /// Index of its first factor in `downs`.
    pub down: usize,
    /// Columns of the first product that belong to it.
    pub first: usize,
    /// Largest rank of an adapter.
    pub rank: usize,
    pub up: WeightId, // [n_adapters, rank, n_out]
}

impl Bank {
    /// The adapters of a linear map; `None` if no adapter adapts it.
    pub(crate) fn map(&self, base: WeightId) -> Option<&BankMap> {
        self.maps.iter().find(|map| map.base == base)
    }

    /// The first factor of maps.
    pub(crate) fn down(&self, idx: usize) -> WeightId {
        self.downs[idx]
    }

    /// Whether a weight of the model belongs to the bank.
    pub(crate) fn owns(&self, weight: usize) -> bool {
        weight >= self.n_base
    }
}

/// The adapters of a site: its factors by adapter, of which some may be missing.
struct SiteFactors<'m> {
    site: &'m LinearSite,
    n_out: usize,
    n_in: usize,
    by_adapter: Vec<Option<FactorPair>>,
}

/// The factors of one adapter.
#[derive(Clone)]
struct FactorPair {
    rank: usize,
    a: HostTensor,
    /// Scaled, with rows in the model's order.
    b: HostTensor,
    /// Type of the second factor in its file.
    b_type: DType,
}

impl SiteFactors<'_> {
    fn rank(&self) -> usize {
        self.by_adapter.iter().flatten().map(|pair| pair.rank).max().unwrap_or(0)
    }
}

impl Model {
    /// Returns the model with adapters of which each sequence may have one, for generation. The model's own weights
    /// are unchanged. Scales are multiplied into the second factors.
    ///
    /// Factors keep the type of their files if all adapters agree on it and it represents the scaled values exactly, as
    /// it does for scales that are powers of two. Otherwise they are stored in F32.
    pub fn with_adapter_bank(&self, adapters: &[BankAdapter]) -> Result<Model, ModelError> {
        if self.attached().is_some() || self.bank().is_some() {
            return Err(ModelError::AdapterTwice);
        }
        if self.config().arch.is_encoder() {
            return Err(ModelError::BankOfEncoder { arch: self.config().arch.name() });
        }
        for (idx, BankAdapter { name, .. }) in adapters.iter().enumerate() {
            if adapters[..idx].iter().any(|other| other.name == *name) {
                return Err(ModelError::BankName { name: name.clone() });
            }
        }
        let sites = self.site_factors(adapters)?;
        let mut model = self.clone();
        let (mut downs, mut maps) = (Vec::new(), Vec::new());
        for group in self.sites_by_rows(sites)? {
            let down = downs.len();
            let mut first = 0;
            for site in &group {
                let rank = site.rank();
                let mut first_row = 0;
                for &base in &site.site.parts {
                    let n_rows = self.weights()[base.idx()].ty.shape.dims()[0];
                    let up = model.push_up(base, site, first_row)?;
                    maps.push(BankMap { base, down, first, rank, up });
                    first_row += n_rows;
                }
                first += rank;
            }
            downs.push(model.push_down(&group)?);
        }
        let names = adapters.iter().map(|adapter| adapter.name.clone()).collect();
        model.attach_bank(Bank { names, n_base: self.weights().len(), downs, maps });
        Ok(model)
    }

    /// Names of the adapters of [`Model::with_adapter_bank`], in the order of their ids.
    pub fn adapter_names(&self) -> &[String] {
        self.bank().map_or(&[], |bank| &bank.names)
    }

    /// Size of the bank of adapters in bytes; also part of [`Model::weight_bytes`].
    pub fn bank_bytes(&self) -> usize {
        let Some(bank) = self.bank() else { return 0 };
        self.tensors()[bank.n_base..].iter().map(|tensor| tensor.bytes().as_slice().len()).sum()
    }

    /// The factors of all sites that an adapter adapts.
    fn site_factors(&self, adapters: &[BankAdapter]) -> Result<Vec<SiteFactors<'_>>, ModelError> {
        let mut sites: Vec<SiteFactors<'_>> = Vec::new();
        for (idx, BankAdapter { name, adapter, scale }) in adapters.iter().enumerate() {
            for part in &adapter.parts {
                let named = |source| ModelError::InBank { name: name.clone(), source: Box::new(source) };
                let fitted = self.fit(adapter, part).map_err(named)?;
                let factor = adapter.config.scale(fitted.rank) as f32 * *scale as f32;
                let b = self.second_factor(fitted.site, &part.b, Some(factor))?;
                let at = match sites.iter().position(|known| std::ptr::eq(known.site, fitted.site)) {
                    Some(at) => at,
                    None => {
                        let by_adapter = vec![None; adapters.len()];
                        let [n_out, n_in] = fitted.dims;
                        sites.push(SiteFactors { site: fitted.site, n_out, n_in, by_adapter });
                        sites.len() - 1
                    }
                };
                sites[at].by_adapter[idx] =
                    Some(FactorPair { rank: fitted.rank, a: part.a.clone(), b, b_type: part.b.dtype() });
            }
        }
        Ok(sites)
    }

    /// Sites grouped by the rows that they multiply, as a step of the model shows them.
    fn sites_by_rows<'m>(
        &'m self,
        sites: Vec<SiteFactors<'m>>,
    ) -> Result<Vec<Vec<SiteFactors<'m>>>, ModelError> {
        let kv = KvSpec { n_blocks: 1, kv_block: 1, max_blocks: 1, n_slots: 2, dtype: DType::F16 };
        let rows = self.rows_of_maps(&StepSpec::of_one(1, 0, Head::None), &kv)?;
        let rows_of = |site: &LinearSite| rows.iter().find(|(_, w)| site.parts.contains(w)).map(|(x, _)| *x);
        let mut groups: Vec<(Option<ValueId>, Vec<SiteFactors<'m>>)> = Vec::new();
        for site in sites {
            let x = rows_of(site.site);
            match groups.iter_mut().find(|(known, _)| x.is_some() && *known == x) {
                Some((_, group)) => group.push(site),
                None => groups.push((x, vec![site])),
            }
        }
        Ok(groups.into_iter().map(|(_, group)| group).collect())
    }

    /// The linear maps of a step, each with the rows that it multiplies.
    fn rows_of_maps(&self, spec: &StepSpec, kv: &KvSpec) -> Result<Vec<(ValueId, WeightId)>, ModelError> {
        let build = || -> Result<Vec<(ValueId, WeightId)>, GraphError> {
            let mut step = self.step_builder(spec, kv)?;
            self.build_layers(&mut step)?;
            Ok(std::mem::take(&mut step.maps))
        };
        build().map_err(|source| ModelError::Graph { source: Box::new(source) })
    }

    /// Stacks the first factors of the sites of a group.
    fn push_down(&mut self, group: &[SiteFactors<'_>]) -> Result<WeightId, ModelError> {
        let (n_in, n_adapters) = (group[0].n_in, group[0].by_adapter.len());
        let n_rows: usize = group.iter().map(SiteFactors::rank).sum();
        let given =
            || group.iter().flat_map(|site| site.by_adapter.iter().flatten()).map(|pair| pair.a.dtype());
        let name = format!("{}.bank_a", group[0].site.gguf);
        let mut values = Vec::with_capacity(n_adapters * n_rows * n_in);
        for adapter in 0..n_adapters {
            for site in group {
                let end = values.len() + site.rank() * n_in;
                if let Some(FactorPair { a, .. }) = &site.by_adapter[adapter] {
                    values.extend(numbers(&name, a)?);
                }
                values.resize(end, 0.0);
            }
        }
        let dtype = common_type(given());
        self.push_stack(name, dtype, [n_adapters, n_rows, n_in], &values)
    }

    /// Stacks the transposed second factors of one map of a site, whose rows start at `first_row` of the site's.
    fn push_up(
        &mut self,
        base: WeightId,
        site: &SiteFactors<'_>,
        first_row: usize,
    ) -> Result<WeightId, ModelError> {
        let (n_adapters, rank) = (site.by_adapter.len(), site.rank());
        let n_out = self.weights()[base.idx()].ty.shape.dims()[0];
        debug_assert!(first_row + n_out <= site.n_out);
        let name = format!("{}.bank_b", self.weights()[base.idx()].name);
        let mut values = vec![0.0; n_adapters * rank * n_out];
        for (adapter, factors) in site.by_adapter.iter().enumerate() {
            let Some(FactorPair { rank: own_rank, b, .. }) = factors else { continue };
            let b = numbers(&name, b)?;
            let stack = &mut values[adapter * rank * n_out..][..rank * n_out];
            for (row, b) in b.chunks_exact(*own_rank).skip(first_row).take(n_out).enumerate() {
                b.iter().enumerate().for_each(|(j, &b)| stack[j * n_out + row] = b);
            }
        }
        let dtype = common_type(site.by_adapter.iter().flatten().map(|pair| pair.b_type));
        self.push_stack(name, dtype, [n_adapters, rank, n_out], &values)
    }

    /// Appends a weight in this type if it represents the values exactly, else in F32.
    fn push_stack(
        &mut self,
        name: String,
        dtype: DType,
        dims: [usize; 3],
        values: &[f32],
    ) -> Result<WeightId, ModelError> {
        let shape = Shape::from(dims);
        let wrap = |source| ModelError::Tensor { name: name.clone(), source };
        let tensor = match narrowed(dtype, shape, values).map_err(wrap)? {
            Some(tensor) => tensor,
            None => HostTensor::from_f32(shape, values).map_err(wrap)?,
        };
        let ty = TensorType { dtype: tensor.dtype(), shape };
        Ok(self.push(Weight { name: name.clone(), ty }, name, tensor))
    }
}

impl StepBuilder<'_> {
    /// Adds the outputs of the rows' adapters to the output `y` of a linear map of `x`.
    pub(crate) fn with_adapters(
        &mut self,
        x: ValueId,
        y: ValueId,
        base: WeightId,
        label: &str,
    ) -> Result<ValueId, GraphError> {
        let Some((bank, [seqs, adapters])) = self.adapters() else { return Ok(y) };
        let Some(&BankMap { down, first, rank, up, .. }) = bank.map(base) else { return Ok(y) };
        let all = match self.downs.iter().find(|(rows, idx, _)| (*rows, *idx) == (x, down)) {
            Some((.., product)) => *product,
            None => {
                let inputs = [x, self.weight(bank.down(down)), seqs, adapters];
                let label = format!("{label}.lora_a");
                let op = refrain_graph::Op::Lora(refrain_graph::LoraOp::Down);
                let product = self.builder.node(op, &inputs, &label)?[0];
                self.downs.push((x, down, product));
                product
            }
        };
        let t = match self.builder.ty(all).shape.dim_back(0) == rank {
            true => all,
            false => self.builder.slice(all, 1, first, rank)?,
        };
        let inputs = [y, t, self.weight(up), seqs, adapters];
        let op = refrain_graph::Op::Lora(refrain_graph::LoraOp::Up);
        Ok(self.builder.node(op, &inputs, &format!("{label}.lora_b"))?[0])
    }
}

/// The type of all tensors, or F32 if they differ.
fn common_type(mut types: impl Iterator<Item = DType>) -> DType {
    let first = types.next().unwrap_or(DType::F32);
    if types.all(|dtype| dtype == first) { first } else { DType::F32 }
}

/// The values in a type that represents all of them exactly; `None` if it does not.
fn narrowed(
    dtype: DType,
    shape: Shape,
    values: &[f32],
) -> Result<Option<HostTensor>, refrain_tensor::TensorError> {
    if dtype == DType::F32 {
        return Ok(None);
    }
    let mut bytes = vec![0; values.len() * dtype.block_bytes()];
    quant::quantize(dtype, values, &mut bytes)?;
    let tensor = HostTensor::new(dtype, shape, Bytes::new(bytes))?;
    Ok((tensor.to_f32()? == values).then_some(tensor))
}

fn numbers(name: &str, tensor: &HostTensor) -> Result<Vec<f32>, ModelError> {
    tensor.to_f32().map_err(|source| ModelError::Tensor { name: name.to_owned(), source })
}
