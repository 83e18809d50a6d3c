//! Learning-rate schedules.

use std::f64::consts::PI;

use crate::config::{ScheduleKind, TrainConfig};

/// The learning rate as a function of the step alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LrSchedule {
    /// Shape after warm-up.
    pub kind: ScheduleKind,
    /// Peak learning rate.
    pub lr: f64,
    /// Final value of cosine and linear.
    pub min_lr: f64,
    /// Number of warm-up steps.
    pub warmup: u64,
    /// Number of steps in the run.
    pub steps: u64,
}

impl LrSchedule {
    /// The schedule of a configuration.
    pub fn of(config: &TrainConfig) -> Self {
        Self {
            kind: config.schedule,
            lr: config.lr,
            min_lr: config.min_lr,
            warmup: config.warmup,
            steps: config.steps,
        }
    }

    /// Learning rate of step `step`, counted from 0.
    ///
    /// Warm-up rises linearly from `lr / (warmup + 1)` at step 0 to `lr` at step `warmup`. After that, cosine
    /// and linear decay; they reach `min_lr` at step `steps`, one past the last step, and stay there.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.lr * ((step + 1) as f64 / (self.warmup as f64 + 1.0));
        }
        let share = match self.steps.saturating_sub(self.warmup) {
            0 => 1.0,
            n_steps => ((step - self.warmup) as f64 / n_steps as f64).min(1.0),
        };
        let range = self.lr - self.min_lr;
        match self.kind {
            ScheduleKind::Constant => self.lr,
            ScheduleKind::Linear => self.min_lr + range * (1.0 - share),
            ScheduleKind::Cosine => self.min_lr + range * (0.5 * (1.0 + (PI * share).cos())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn schedule(kind: ScheduleKind, warmup: u64, steps: u64) -> LrSchedule {
        LrSchedule { kind, lr: 3e-4, min_lr: 3e-5, warmup, steps }
    }

    #[test]
    fn known_points_of_each_shape() {
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-15, "{a} and {b}");
        for kind in [ScheduleKind::Constant, ScheduleKind::Linear, ScheduleKind::Cosine] {
            let s = schedule(kind, 9, 109);
            close(s.at(0), 3e-5);
            close(s.at(4), 1.5e-4);
            close(s.at(9), 3e-4);
        }
        close(schedule(ScheduleKind::Constant, 9, 109).at(108), 3e-4);
        close(schedule(ScheduleKind::Linear, 9, 109).at(59), (3e-4 + 3e-5) / 2.0);
        close(schedule(ScheduleKind::Linear, 9, 109).at(109), 3e-5);
        close(schedule(ScheduleKind::Cosine, 9, 109).at(59), (3e-4 + 3e-5) / 2.0);
        // After a quarter, a cosine has lost (1 - cos 45°) / 2 of its range.
        let lost = 0.5 * (1.0 - std::f64::consts::FRAC_1_SQRT_2);
        close(schedule(ScheduleKind::Cosine, 9, 109).at(34), 3e-4 - lost * (3e-4 - 3e-5));
        close(schedule(ScheduleKind::Cosine, 9, 109).at(1_000_000), 3e-5);
    }

    #[test]
    fn a_run_of_only_warm_up_rises_to_its_end() {
        let s = schedule(ScheduleKind::Cosine, 10, 10);
        assert!((s.at(9) - 3e-4 * 10.0 / 11.0).abs() < 1e-15);
        assert!((s.at(10) - 3e-5).abs() < 1e-15);
    }

    proptest! {
        #[test]
        fn rates_rise_to_the_peak_then_never_rise_and_stay_in_range(
            kind in 0..3usize, warmup in 0..50u64, rest in 0..200u64, lr in 1e-6..1.0f64, share in 0.0..1.0f64,
        ) {
            let kind = [ScheduleKind::Constant, ScheduleKind::Linear, ScheduleKind::Cosine][kind];
            let s = LrSchedule { kind, lr, min_lr: lr * share, warmup, steps: warmup + rest };
            let rates: Vec<f64> = (0..s.steps + 10).map(|step| s.at(step)).collect();
            for (step, pair) in rates.windows(2).enumerate() {
                if (step as u64) + 1 < warmup {
                    prop_assert!(pair[0] < pair[1]);
                } else if step as u64 >= warmup {
                    prop_assert!(pair[1] <= pair[0] * (1.0 + 1e-12));
                }
            }
            for (step, &rate) in rates.iter().enumerate() {
                prop_assert!(rate > 0.0 || share == 0.0);
                prop_assert!(rate <= lr * (1.0 + 1e-12));
                prop_assert!((step as u64) < warmup || rate >= s.min_lr * (1.0 - 1e-12));
            }
            if rest > 0 {
                prop_assert!((s.at(warmup) - lr).abs() <= lr * 1e-12);
            }
        }
    }
}
