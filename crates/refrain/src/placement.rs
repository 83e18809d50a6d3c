//! Placement of weights of which a token reads little: the per-layer embedding table of Gemma 4 E2B and E4B, of which it
//! reads one row, and the experts of a mixture.

use refrain_models::{KvSpec, Model, NamedShape};
use std::fmt;

/// Placement of the per-layer embedding table. All placements give the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TablePlacement {
    /// The first of the other placements that fits.
    #[default]
    Auto,
    /// On the device: rows are gathered inside the graph.
    Device,
    /// In pinned host memory that the device reads over the bus: rows are gathered inside the graph.
    Pinned,
    /// In the mapped file: a host step gathers rows before the graph, so each token must reach the host first.
    Host,
}

impl TablePlacement {
    /// All placements but `Auto`.
    pub const PLACES: [TablePlacement; 3] =
        [TablePlacement::Device, TablePlacement::Pinned, TablePlacement::Host];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            TablePlacement::Auto => "auto",
            TablePlacement::Device => "device",
            TablePlacement::Pinned => "pinned",
            TablePlacement::Host => "host",
        }
    }
}

impl fmt::Display for TablePlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Placement of the experts that routers choose from. Both give the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertPlacement {
    /// On the device.
    #[default]
    Device,
    /// In pinned host memory that the device reads over the bus, inside the graph.
    Host,
}

impl ExpertPlacement {
    /// All placements.
    pub const PLACES: [ExpertPlacement; 2] = [ExpertPlacement::Device, ExpertPlacement::Host];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            ExpertPlacement::Device => "device",
            ExpertPlacement::Host => "host",
        }
    }
}

/// Sizes of the experts that routers choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertNeeds {
    /// Bytes of all of them.
    pub expert_bytes: u64,
    /// Bytes that a token reads.
    pub token_bytes: u64,
    /// Bytes of all other weights.
    pub other_bytes: u64,
}

impl ExpertNeeds {
    /// The sizes of a model; `None` if it has no experts.
    pub(crate) fn of(model: &Model) -> Option<ExpertNeeds> {
        let experts = model.config().experts?;
        let bytes = |id: &refrain_graph::WeightId| model.tensors()[id.idx()].bytes().as_slice().len() as u64;
        let expert_bytes: u64 = model.expert_matrices().iter().map(bytes).sum();
        let (n_experts, n_choices) = (experts.n_experts.max(1) as u64, experts.n_choices as u64);
        Some(ExpertNeeds {
            expert_bytes,
            token_bytes: (u128::from(expert_bytes) * u128::from(n_choices) / u128::from(n_experts)) as u64,
            other_bytes: (model.weight_bytes() as u64).saturating_sub(expert_bytes),
        })
    }
}

/// Sizes that decide the placement of a model's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableNeeds {
    /// Bytes of the table.
    pub table_bytes: u64,
    /// Bytes of a row; a token reads one.
    pub row_bytes: u64,
    /// Bytes of all other weights and of the KV cache.
    pub other_bytes: u64,
}

/// Reserve for activations and workspaces.
const RESERVE_BYTES: u64 = 1 << 30;

impl TableNeeds {
    /// The sizes of a model with a KV cache of this spec; `None` if it has no such table.
    pub(crate) fn of(model: &Model, kv: &KvSpec) -> Option<TableNeeds> {
        let table = model.token_table()?.idx();
        let bytes = model.tensors()[table].bytes().as_slice().len() as u64;
        let n_rows = model.weights()[table].ty.shape.dims()[0].max(1) as u64;
        let of_states = |state: &refrain_graph::State| state.ty.dtype.bytes_for(state.ty.shape.n_elements());
        let kv_bytes: u64 = model.states(kv).iter().filter_map(of_states).map(|bytes| bytes as u64).sum();
        let others = (model.weight_bytes() as u64).saturating_sub(bytes);
        Some(TableNeeds {
            table_bytes: bytes,
            row_bytes: bytes / n_rows,
            other_bytes: others.saturating_add(kv_bytes),
        })
    }

    /// The sizes of a shape with 16-bit weights and no cache; `None` if it has no such table.
    pub fn of_shape(shape: &NamedShape) -> Option<TableNeeds> {
        let [others, table] = shape.n_parameters().map(|n| 2 * n as u64);
        let rows = shape.config().per_layer?.n_vocab.max(1) as u64;
        Some(TableNeeds { table_bytes: table, row_bytes: table / rows, other_bytes: others })
    }

    /// Whether the model without its table fits this much free device memory.
    pub fn rest_fits(&self, device_free: u64) -> bool {
        self.other_bytes.saturating_add(RESERVE_BYTES) <= device_free
    }

    /// The first placement that fits the free memory of device and host. A device that shares the host's memory gains
    /// nothing from pinning.
    pub fn choose(&self, device_free: u64, host_free: Option<u64>, unified: bool) -> TablePlacement {
        let needed = self.other_bytes.saturating_add(RESERVE_BYTES);
        if needed.saturating_add(self.table_bytes) <= device_free {
            return TablePlacement::Device;
        }
        // Pinned pages are unavailable to everyone else, so pin at most half of the free memory.
        match host_free {
            Some(free) if !unified && self.table_bytes <= free / 2 => TablePlacement::Pinned,
            _ => TablePlacement::Host,
        }
    }
}

/// Host memory that is available without swapping, if the system reports it.
pub fn host_free_bytes() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_goes_where_it_fits() {
        const GIB: u64 = 1 << 30;
        let needs = TableNeeds { table_bytes: 5 * GIB, row_bytes: 17_920, other_bytes: 4 * GIB };
        assert_eq!(needs.choose(10 * GIB, Some(64 * GIB), false), TablePlacement::Device);
        assert_eq!(needs.choose(10 * GIB - 1, Some(64 * GIB), false), TablePlacement::Pinned);
        assert_eq!(needs.choose(6 * GIB, Some(10 * GIB), false), TablePlacement::Pinned);
        assert_eq!(needs.choose(6 * GIB, Some(10 * GIB - 2), false), TablePlacement::Host);
        assert_eq!(needs.choose(6 * GIB, None, false), TablePlacement::Host);
        assert_eq!(needs.choose(6 * GIB, Some(64 * GIB), true), TablePlacement::Host);
    }
}
