//! Host step that gathers rows of a table that stays on the host, before the remaining steps.

use refrain_graph::{HostBuf, HostCall, HostCallError, HostFn, TensorType};
use refrain_tensor::{DType, Shape, quant};
use std::sync::Arc;

/// `table[v, d]`, `ids[n]` I32 -> `[n, d]`: floats in the table's type, quantised rows decoded to F32. A
/// negative id gives a row of zeros.
struct HostRows;

/// A host call that reads rows of a table from where it is mapped.
pub(crate) fn host_rows() -> HostCall {
    let because = "its table stays on the host";
    HostCall { name: "host_rows", because, function: Arc::new(HostRows) }
}

fn refuse<T>(because: impl Into<String>) -> Result<T, HostCallError> {
    Err(HostCallError(because.into()))
}

/// Element type of the gathered rows.
fn row_dtype(table: DType) -> DType {
    if table.is_float() { table } else { DType::F32 }
}

impl HostFn for HostRows {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, HostCallError> {
        let [table, ids] = inputs else { return refuse("the inputs must be a table and ids") };
        let (&[_, d], &[n]) = (table.shape.dims(), ids.shape.dims()) else {
            return refuse(format!("{table} is not a table, or {ids} are not ids"));
        };
        if ids.dtype != DType::I32 || !(table.dtype.is_float() || table.dtype.is_quantized()) {
            return refuse(format!("unsupported types: a table of {} and ids of {}", table.dtype, ids.dtype));
        }
        let shape = Shape::new(&[n, d]).map_err(|e| HostCallError(e.to_string()))?;
        Ok(vec![TensorType { dtype: row_dtype(table.dtype), shape }])
    }

    fn call(&self, inputs: &[HostBuf<'_>], outputs: &mut [&mut [u8]]) -> Result<(), HostCallError> {
        let ([table, ids], [out]) = (inputs, outputs) else {
            return refuse("the inputs must be a table and ids");
        };
        let (n_rows, d) = (table.ty.shape.dims()[0], table.ty.shape.dims()[1]);
        let (from, to) = (table.ty.dtype, row_dtype(table.ty.dtype));
        let (Some(row_bytes), Some(out_bytes)) = (from.bytes_for(d), to.bytes_for(d)) else {
            return refuse(format!("rows of {d} elements are not a multiple of the {from} block size"));
        };
        // The file may have been truncated or replaced since it was mapped.
        let need = row_bytes.checked_mul(n_rows);
        if need != Some(table.bytes.len()) {
            let got = table.bytes.len();
            return refuse(format!("the table has {got} bytes, {n_rows} rows of {row_bytes} were declared"));
        }
        if out_bytes == 0 {
            return Ok(());
        }
        let ids = ids.bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        for (id, out) in ids.zip(out.chunks_exact_mut(out_bytes)) {
            let Ok(row) = usize::try_from(id) else {
                out.fill(0);
                continue;
            };
            let Some(bytes) = table.bytes.chunks_exact(row_bytes).nth(row) else {
                return refuse(format!("token {id} is outside the table, which has {n_rows} rows"));
            };
            if from == to {
                out.copy_from_slice(bytes);
                continue;
            }
            let mut values = vec![0.0; d];
            quant::dequantize(from, bytes, &mut values).map_err(|e| HostCallError(e.to_string()))?;
            for (out, value) in out.chunks_exact_mut(4).zip(values) {
                out.copy_from_slice(&value.to_le_bytes());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gather(table: DType, bytes: &[u8], n_rows: usize, ids: &[i32]) -> Result<Vec<u8>, String> {
        let d = 32;
        let types = [TensorType::new(table, [n_rows, d]), TensorType::new(DType::I32, [ids.len()])];
        let out = HostRows.infer(&types).map_err(|e| e.to_string())?[0];
        let mut rows = vec![0xff; out.dtype.bytes_for(out.shape.n_elements()).unwrap()];
        let ids: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let inputs = [HostBuf { ty: types[0], bytes }, HostBuf { ty: types[1], bytes: &ids }];
        HostRows.call(&inputs, &mut [&mut rows]).map_err(|e| e.to_string())?;
        Ok(rows)
    }

    #[test]
    fn float_rows_are_copied_and_quantised_rows_decoded() {
        let values: Vec<f32> = (0..96).map(|i| i as f32 - 40.0).collect();
        for dtype in [DType::F32, DType::BF16, DType::Q8_0] {
            let mut table = vec![0; dtype.bytes_for(96).unwrap()];
            quant::quantize(dtype, &values, &mut table).unwrap();
            let rows = gather(dtype, &table, 3, &[2, -1, 0, 2]).unwrap();
            let row = rows.len() / 4;
            assert!(rows[row..2 * row].iter().all(|&b| b == 0));
            assert_eq!(rows[..row], rows[3 * row..]);
            let part = table.len() / 3;
            if dtype.is_float() {
                assert_eq!(rows[..row], table[2 * part..]);
                continue;
            }
            let mut want = vec![0.0; 32];
            quant::dequantize(dtype, &table[2 * part..], &mut want).unwrap();
            let got: Vec<f32> =
                rows[..row].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
            assert_eq!(got, want);
        }
    }

    #[test]
    fn a_token_outside_the_table_and_a_table_of_another_length_are_refused() {
        let table = vec![0; 3 * 32 * 4];
        let error = gather(DType::F32, &table, 3, &[0, 3]).unwrap_err();
        assert_eq!(error, "token 3 is outside the table, which has 3 rows");
        let error = gather(DType::F32, &table[4..], 3, &[0]).unwrap_err();
        assert_eq!(error, "the table has 380 bytes, 3 rows of 128 were declared");
        assert!(gather(DType::I32, &table, 3, &[0]).is_err());
    }
}
