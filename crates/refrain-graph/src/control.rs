//! The control block: all step inputs in one allocation.

use crate::graph::{Input, InputId};
use crate::inputs::Field;
use crate::op::TensorType;
use crate::plan::{PlanError, whole_bytes};
use refrain_tensor::DType;

/// Location of a step input in the control block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Byte offset.
    pub offset: usize,
    /// Size in bytes.
    pub bytes: usize,
    /// Type.
    pub ty: TensorType,
}

/// Layout of the control block.
#[derive(Clone, Debug, Default)]
pub struct ControlLayout {
    slots: Vec<Slot>,
    names: Vec<String>,
    bytes: usize,
}

impl ControlLayout {
    /// Packs inputs one after another. Refuses an input whose size is not a whole number of blocks.
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

    /// Slot of an input.
    pub fn slot(&self, id: InputId) -> Slot {
        self.slots[id.idx()]
    }

    /// All slots, in the order of the graph's inputs.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Finds an input by name.
    pub fn find(&self, name: &str) -> Option<InputId> {
        self.names.iter().position(|n| n == name).map(InputId::from_idx)
    }

    /// Fields of one row, in every input that has `n_rows` rows.
    pub fn row_fields(&self, n_rows: usize, row: usize) -> impl Iterator<Item = Field> + '_ {
        let has_rows = move |slot: &&Slot| slot.ty.shape.dims().first() == Some(&n_rows);
        let whole = |slot: &Slot| Field { offset: slot.offset, len: slot.bytes / 4 };
        self.slots.iter().filter(has_rows).map(move |slot| whole(slot).row(n_rows, row))
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// A value that does not fit its slot.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("step input {name:?} is {slot}, got {got} elements of {dtype}")]
pub struct ControlError {
    /// Name of the input.
    pub name: String,
    /// Type that the plan expects.
    pub slot: TensorType,
    /// Type of the value.
    pub dtype: DType,
    /// Number of elements in the value.
    pub got: usize,
}

/// A control block in host memory, aligned for every element type.
#[derive(Clone, Debug)]
pub struct ControlBlock {
    layout: ControlLayout,
    words: Vec<u64>,
}

impl ControlBlock {
    /// Returns a zeroed block.
    pub fn new(layout: &ControlLayout) -> ControlBlock {
        ControlBlock { layout: layout.clone(), words: vec![0; layout.bytes().div_ceil(8)] }
    }

    /// Layout of the block.
    pub fn layout(&self) -> &ControlLayout {
        &self.layout
    }

    /// Bytes of the whole block.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.layout.bytes()]
    }

    /// The whole block as words; every step input of a run consists of words.
    pub(crate) fn words_mut(&mut self) -> &mut [u32] {
        bytemuck::cast_slice_mut(&mut self.words)
    }

    /// Sets an I32 input.
    pub fn set_i32(&mut self, id: InputId, values: &[i32]) -> Result<(), ControlError> {
        self.set(id, DType::I32, values)
    }

    /// Sets a U32 input.
    pub fn set_u32(&mut self, id: InputId, values: &[u32]) -> Result<(), ControlError> {
        self.set(id, DType::U32, values)
    }

    /// Sets an F32 input.
    pub fn set_f32(&mut self, id: InputId, values: &[f32]) -> Result<(), ControlError> {
        self.set(id, DType::F32, values)
    }

    /// Sets one row of an input, its entry along the first dimension; other rows are unchanged. The element
    /// size must match the input's.
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
