//! The texts that wait to be embedded: which of them a step takes, and who gets the vectors.
//!
//! Callers take turns: a step has one text of each, then another one of each, while they fit. So a caller with
//! thousands of texts delays others by one step.

use super::stream::VectorSink;
use crate::error::EngineError;
use std::collections::VecDeque;

/// The texts of one caller.
pub(super) struct EmbedJob {
    pub(super) texts: Vec<Vec<u32>>,
    pub(super) sink: VectorSink,
}

/// A job with its progress.
struct OpenJob {
    job: EmbedJob,
    n_done: usize,
    /// Its next texts run without those of others, because a step with others failed.
    n_alone: usize,
}

/// All jobs, the next one to be served first.
#[derive(Default)]
pub(super) struct JobQueue {
    jobs: VecDeque<OpenJob>,
}

/// Texts of a step: for each of the first jobs of the queue, how many of its next texts.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct StepTexts {
    n_of_job: Vec<usize>,
    pub(super) n_tokens: usize,
}

impl StepTexts {
    pub(super) fn n_texts(&self) -> usize {
        self.n_of_job.iter().sum()
    }

    fn is_shared(&self) -> bool {
        self.n_of_job.len() > 1
    }
}

impl JobQueue {
    pub(super) fn push(&mut self, job: EmbedJob) {
        if !job.texts.is_empty() {
            self.jobs.push_back(OpenJob { job, n_done: 0, n_alone: 0 });
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Drops the jobs that nobody waits for any more.
    pub(super) fn drop_cancelled(&mut self) {
        self.jobs.retain(|open| !open.job.sink.is_cancelled());
    }

    /// Chooses the texts of the next step: as many as fit, at least one.
    pub(super) fn next_step(&self, max_tokens: usize, max_texts: usize) -> Option<StepTexts> {
        let first = self.jobs.front()?;
        let n_jobs = match first.n_alone {
            0 => self.jobs.iter().position(|open| open.n_alone > 0).unwrap_or(self.jobs.len()),
            _ => 1,
        };
        let mut step = StepTexts { n_of_job: Vec::new(), n_tokens: 0 };
        let (mut n_texts, mut round) = (0, 0);
        loop {
            let n_before = n_texts;
            for (idx, open) in self.jobs.iter().take(n_jobs).enumerate() {
                let most = if open.n_alone > 0 { open.n_alone } else { usize::MAX };
                let Some(text) = open.job.texts.get(open.n_done + round).filter(|_| round < most) else {
                    continue;
                };
                if n_texts > 0 && (step.n_tokens + text.len() > max_tokens || n_texts == max_texts) {
                    return Some(step);
                }
                if round == 0 {
                    step.n_of_job.push(0);
                }
                step.n_of_job[idx] += 1;
                (n_texts, step.n_tokens) = (n_texts + 1, step.n_tokens + text.len());
            }
            if n_texts == n_before {
                return Some(step);
            }
            round += 1;
        }
    }

    /// The texts of a step, in the order in which [`JobQueue::finish`] expects their vectors.
    pub(super) fn texts(&self, step: &StepTexts) -> Vec<&[u32]> {
        let of_job = |(open, n): (&OpenJob, &usize)| open.n_done..open.n_done + n;
        let jobs = self.jobs.iter().zip(&step.n_of_job);
        jobs.flat_map(|(open, n)| of_job((open, n)).map(|idx| &*open.job.texts[idx])).collect()
    }

    /// Delivers the vectors of a step, or what went wrong.
    pub(super) fn finish(&mut self, step: &StepTexts, ran: Result<Vec<Vec<f32>>, EngineError>) {
        let vectors = match ran {
            // Attention multiplies the values of other texts by 0, which does not remove NaN.
            Ok(vectors) if step.is_shared() && !vectors.iter().all(|vector| is_finite(vector)) => {
                return self.run_alone(step);
            }
            Ok(vectors) => vectors,
            Err(_) if step.is_shared() => return self.run_alone(step),
            Err(error) => {
                if let Some(failed) = self.jobs.pop_front() {
                    failed.job.sink.fail(error);
                }
                return;
            }
        };
        let mut vectors = vectors.into_iter();
        for (open, &n) in self.jobs.iter_mut().zip(&step.n_of_job) {
            open.deliver(vectors.by_ref().take(n).collect());
        }
        // Those that were not served come first.
        self.jobs.rotate_left(step.n_of_job.len());
        self.jobs.retain(|open| open.n_done < open.job.texts.len());
    }

    /// A step of several jobs failed: each of them gets its own, so that only those at fault fail.
    fn run_alone(&mut self, step: &StepTexts) {
        for (open, &n) in self.jobs.iter_mut().zip(&step.n_of_job) {
            open.n_alone = n;
        }
    }

    /// Fails every job.
    pub(super) fn fail_all(&mut self, error: impl Fn() -> EngineError) {
        self.jobs.drain(..).for_each(|open| open.job.sink.fail(error()));
    }
}

impl OpenJob {
    fn deliver(&mut self, vectors: Vec<Vec<f32>>) {
        let n_texts = self.job.texts.len();
        if !vectors.iter().all(|vector| is_finite(vector)) {
            self.job.sink.fail(EngineError::NonFiniteVectors { n_texts });
            self.n_done = n_texts;
            return;
        }
        self.n_done += vectors.len();
        self.n_alone = self.n_alone.saturating_sub(vectors.len());
        self.job.sink.push(vectors);
    }
}

fn is_finite(vector: &[f32]) -> bool {
    vector.iter().all(|v| v.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::embed::stream::{VectorStream, vector_channel};

    fn job(queue: &mut JobQueue, lengths: &[usize]) -> VectorStream {
        let (sink, stream) = vector_channel(lengths.len(), None);
        let texts = lengths.iter().map(|n| vec![0; *n]).collect();
        queue.push(EmbedJob { texts, sink });
        stream
    }

    /// Runs steps to the end; a vector is the length of its text. `breaks` says which steps fail, by their texts.
    fn run(queue: &mut JobQueue, breaks: impl Fn(&[usize]) -> bool) -> Vec<Vec<usize>> {
        let mut steps = Vec::new();
        while let Some(step) = queue.next_step(10, 4) {
            let lengths: Vec<usize> = queue.texts(&step).iter().map(|text| text.len()).collect();
            assert_eq!((lengths.len(), lengths.iter().sum()), (step.n_texts(), step.n_tokens));
            let ran = match breaks(&lengths) {
                true => Err(EngineError::EmptyPrompt),
                false => Ok(lengths.iter().map(|n| vec![*n as f32]).collect()),
            };
            queue.finish(&step, ran);
            steps.push(lengths);
        }
        steps
    }

    fn lengths(stream: VectorStream) -> Result<Vec<usize>, EngineError> {
        stream.map(|vector| vector.map(|v| v[0] as usize)).collect()
    }

    #[test]
    fn callers_take_turns_and_a_long_text_runs_alone() {
        let mut queue = JobQueue::default();
        let many = job(&mut queue, &[3, 3, 3, 3, 3]);
        let one = job(&mut queue, &[2]);
        let long = job(&mut queue, &[40, 1]);
        assert_eq!(run(&mut queue, |_| false), [vec![3, 2], vec![40], vec![3, 3, 3, 1], vec![3]]);
        assert_eq!(lengths(many).unwrap(), [3; 5]);
        assert_eq!((lengths(one).unwrap(), lengths(long).unwrap()), (vec![2], vec![40, 1]));
    }

    #[test]
    fn only_the_caller_at_fault_fails_and_nobody_waits_for_ever() {
        let mut queue = JobQueue::default();
        let streams: Vec<_> = [1, 7, 2].into_iter().map(|n| job(&mut queue, &[n, n])).collect();
        run(&mut queue, |lengths| lengths.contains(&7));
        for (n, stream) in [1, 7, 2].into_iter().zip(streams) {
            match lengths(stream) {
                Ok(got) => assert_eq!((got, n == 7), (vec![n, n], false)),
                Err(error) => assert_eq!((error.to_string().is_empty(), n), (false, 7)),
            }
        }
    }

    #[test]
    fn texts_that_nobody_waits_for_are_not_run() {
        let mut queue = JobQueue::default();
        drop(job(&mut queue, &[1, 1]));
        let kept = job(&mut queue, &[2]);
        queue.drop_cancelled();
        assert_eq!(run(&mut queue, |_| false), [[2]]);
        assert_eq!(lengths(kept).unwrap(), [2]);
    }
}
