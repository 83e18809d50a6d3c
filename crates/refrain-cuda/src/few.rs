//! Matrix products of a few rows with packed weights: rows are rounded once and each weight is read once.

use refrain_driver::{Buf, Launch};
use refrain_graph::Step;
use refrain_kernels::{
    FewArgs, FewPart, FewRowsArgs, KernelError, MAX_FEW_PARTS, MAX_FEW_ROWS, ProductArgs, ProductWeight,
    few_bytes,
};

use crate::lower::Lowering;

impl Lowering<'_> {
    /// Matrix products of the same rows with packed weights of one dtype. When a matrix is too large to be
    /// decoded and has more rows than one launch takes, they run in several passes.
    pub(crate) fn few(
        &self,
        steps: &[&Step],
        scratch: Buf,
        launches: &mut Vec<Launch>,
    ) -> Result<(), KernelError> {
        let first = steps[0];
        let [m, _] = self.rows(&first.outputs[0]);
        let k = first.inputs[1].layout.shape().dims()[0];
        let x = self.dense(first, &first.inputs[0])?;
        let dtype = self.resident.dtype(self.plan, &first.inputs[1]);
        let mut weights = Vec::with_capacity(steps.len());
        for step in steps {
            let n = step.inputs[1].layout.shape().dims()[1];
            weights.push((self.weight(step)?, self.dense(step, &step.outputs[0])?, n, step.label.as_str()));
        }
        let is_fixed = self.rules.reproducible;
        if m == 1 && !is_fixed {
            for (w, y, n, step) in weights {
                launches.push(self.one_row(x, ProductWeight { w, dtype, bias: None, y, n }, k, step)?);
            }
            return Ok(());
        }
        let row = |buf: Buf, start: usize, n_rows: usize, n: usize| {
            buf.slice(4 * (start * n) as u64, 4 * (n_rows * n) as u64)
        };
        for start in (0..m).step_by(MAX_FEW_ROWS) {
            let m = (m - start).min(MAX_FEW_ROWS);
            let at_once = if is_fixed { MAX_FEW_ROWS } else { m };
            let rows = scratch.slice(0, few_bytes(at_once, k).unwrap_or(usize::MAX) as u64)?;
            let x = row(x, start, m, k)?;
            launches.push(self.kernels.few_rows(&FewRowsArgs {
                x,
                rows,
                m,
                k,
                is_fixed,
                step: &first.label,
            })?);
            for set in weights.chunks(MAX_FEW_PARTS) {
                let part = |&(w, y, n, _): &(Buf, Buf, usize, &str)| {
                    Ok::<_, KernelError>(FewPart { w, y: row(y, start, m, n)?, n })
                };
                let parts = set.iter().map(part).collect::<Result<Vec<_>, _>>()?;
                let label = set.iter().map(|(_, _, _, label)| *label).collect::<Vec<_>>().join(" + ");
                let args = FewArgs { rows, dtype, parts: &parts, m, k, is_fixed, step: &label };
                launches.push(self.kernels.few(&args)?);
            }
        }
        Ok(())
    }

    fn one_row(&self, a: Buf, part: ProductWeight, k: usize, step: &str) -> Result<Launch, KernelError> {
        self.kernels.product(&ProductArgs {
            a,
            b: None,
            inner: None,
            norm: None,
            eps: 0.0,
            sum: None,
            parts: &[part],
            gate: None,
            k,
            previous_tail: None,
            step,
        })
    }
}
