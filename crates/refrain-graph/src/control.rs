//! The control block: everything that changes from step to step, in one piece of memory.

use crate::graph::{Input, InputId};
use crate::inputs::Field;
use crate::op::TensorType;
use crate::plan::{PlanError, whole_bytes};
use refrain_tensor::DType;

/// Where one step input lies in the control block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Byte offset.
    pub offset: usize,
    /// Size.
    pub bytes: usize,
    /// Type.
    pub ty: TensorType,
}

/// Where every step input lies.
#[derive(Clone, Debug, Default)]
pub struct ControlLayout {
    slots: Vec<Slot>,
    names: Vec<String>,
    bytes: usize,
}

impl ControlLayout {
    /// Lays inputs out one after another; refuses one that is not whole blocks.
    pub fn new(inputs: &[Input], align: usize) -> Result<ControlLayout, PlanError> {
        let mut layout = ControlLayout::default();
        for input in inputs {
            let bytes = whole_bytes(&input.name, input.ty)?;
            let offset = layout.bytes.next_multiple_of(align);
            layout.slots.push(Slot { offset, bytes, ty: input.ty });
            layout.names.push(input.name.clone());
            layout.bytes = offset + bytes;
        }
        layout.bytes = layout.bytes.next_multiple_of(align);
        Ok(layout)
    }

    /// The place of an input.
    pub fn slot(&self, id: InputId) -> Slot {
        self.slots[id.idx()]
    }

    /// All places, in the order of the graph's inputs.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The input of that name.
    pub fn find(&self, name: &str) -> Option<InputId> {
        self.names.iter().position(|n| n == name).map(InputId::from_idx)
    }

    /// The places of one row, in every input that has `n_rows` rows.
    pub fn row_fields(&self, n_rows: usize, row: usize) -> impl Iterator<Item = Field> + '_ {
        let has_rows = move |slot: &&Slot| slot.ty.shape.dims().first() == Some(&n_rows);
        let whole = |slot: &Slot| Field { offset: slot.offset, len: slot.bytes / 4 };
        self.slots.iter().filter(has_rows).map(move |slot| whole(slot).row(n_rows, row))
    }

    /// Size of the block.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// A value that does not fit its place.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("step input {name:?} is {slot}, got {got} elements of {dtype}")]
pub struct ControlError {
    /// Name of the input.
    pub name: String,
    /// What the plan expects.
    pub slot: TensorType,
    /// Type that came.
    pub dtype: DType,
    /// Elements that came.
    pub got: usize,
}

/// A control block in host memory, aligned for every element type.
#[derive(Clone, Debug)]
pub struct ControlBlock {
    layout: ControlLayout,
    words: Vec<u64>,
}

impl ControlBlock {
    /// A block of zeros.
    pub fn new(layout: &ControlLayout) -> ControlBlock {
        ControlBlock { layout: layout.clone(), words: vec![0; layout.bytes().div_ceil(8)] }
    }

    /// Where each input lies.
    pub fn layout(&self) -> &ControlLayout {
        &self.layout
    }

    /// The whole block.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.layout.bytes()]
    }

    /// The whole block as words, which every step input of a run is made of.
    pub(crate) fn words_mut(&mut self) -> &mut [u32] {
        bytemuck::cast_slice_mut(&mut self.words)
    }

    /// Sets an input of I32.
    pub fn set_i32(&mut self, id: InputId, values: &[i32]) -> Result<(), ControlError> {
        self.set(id, DType::I32, values)
    }

    /// Sets an input of U32.
    pub fn set_u32(&mut self, id: InputId, values: &[u32]) -> Result<(), ControlError> {
        self.set(id, DType::U32, values)
    }

    /// Sets an input of F32.
    pub fn set_f32(&mut self, id: InputId, values: &[f32]) -> Result<(), ControlError> {
        self.set(id, DType::F32, values)
    }

    /// Sets one row of an input, its entry along the first dimension; the others stay as they are. Elements must be as
    /// wide as the input's.
    pub fn set_row<T: bytemuck::Pod>(
        &mut self,
        id: InputId,
        row: usize,
        values: &[T],
    ) -> Result<(), ControlError> {
        let slot = self.layout.slot(id);
        let n_rows = slot.ty.shape.dims().first().copied().unwrap_or(1);
        let row_bytes = slot.bytes / n_rows.max(1);
        if row >= n_rows || size_of_val(values) != row_bytes || size_of::<T>() != slot.ty.dtype.block_bytes()
        {
            let name = self.layout.names[id.idx()].clone();
            return Err(ControlError { name, slot: slot.ty, dtype: slot.ty.dtype, got: values.len() });
        }
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        let start = slot.offset + row * row_bytes;
        bytes[start..start + row_bytes].copy_from_slice(bytemuck::cast_slice(values));
        Ok(())
    }

    fn set<T: bytemuck::Pod>(&mut self, id: InputId, dtype: DType, values: &[T]) -> Result<(), ControlError> {
        let slot = self.layout.slot(id);
        if slot.ty.dtype != dtype || slot.ty.shape.n_elements() != values.len() {
            let name = self.layout.names[id.idx()].clone();
            return Err(ControlError { name, slot: slot.ty, dtype, got: values.len() });
        }
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        bytes[slot.offset..slot.offset + slot.bytes].copy_from_slice(bytemuck::cast_slice(values));
        Ok(())
    }
}
