//! Stop strings in streamed text.

/// Passes text through until a stop string appears; holds back text that could still become one.
#[derive(Clone, Debug)]
pub struct StopFilter {
    stops: Vec<String>,
    held: String,
}

/// Result of a text delta.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopOutcome {
    /// Text that may be shown; possibly empty.
    Pass(String),
    /// The remaining text before a stop string.
    Stop(String),
}

impl StopFilter {
    /// A filter for the given strings; empty ones are ignored.
    pub fn new(stops: &[String]) -> StopFilter {
        StopFilter { stops: stops.iter().filter(|s| !s.is_empty()).cloned().collect(), held: String::new() }
    }

    /// Adds the next text delta.
    pub fn push(&mut self, delta: &str) -> StopOutcome {
        self.held.push_str(delta);
        if let Some(start) = self.stops.iter().filter_map(|s| self.held.find(s)).min() {
            self.held.truncate(start);
            return StopOutcome::Stop(std::mem::take(&mut self.held));
        }
        let keep = self.stops.iter().map(|s| overlap(&self.held, s)).max().unwrap_or(0);
        let kept = self.held.split_off(self.held.len() - keep);
        StopOutcome::Pass(std::mem::replace(&mut self.held, kept))
    }

    /// Returns the text held back at the end of the stream.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest suffix of `text` that is a prefix of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    stop.char_indices()
        .map(|(i, _)| i)
        .filter(|&i| i <= text.len() && text.ends_with(&stop[..i]))
        .max()
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(stops: &[&str], deltas: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let mut filter = StopFilter::new(&stops);
        let mut text = String::new();
        for delta in deltas {
            match filter.push(delta) {
                StopOutcome::Pass(part) => text += &part,
                StopOutcome::Stop(part) => return (text + &part, true),
            }
        }
        (text + &filter.finish(), false)
    }

    #[test]
    fn a_stop_string_split_over_deltas_is_found() {
        assert_eq!(stream(&["END"], &["one E", "N", "D two"]), ("one ".into(), true));
    }

    #[test]
    fn text_that_only_resembles_a_stop_string_is_passed_through() {
        assert_eq!(stream(&["END"], &["one E", "N", "x"]), ("one ENx".into(), false));
        assert_eq!(stream(&["END"], &["one EN"]), ("one EN".into(), false));
    }

    #[test]
    fn the_earliest_of_several_stop_strings_wins() {
        assert_eq!(stream(&["c", "b"], &["abc"]), ("a".into(), true));
    }

    #[test]
    fn deltas_that_cannot_be_part_of_a_stop_string_pass_at_once() {
        let mut filter = StopFilter::new(&["\n\n".into()]);
        assert_eq!(filter.push("abc"), StopOutcome::Pass("abc".into()));
        assert_eq!(filter.push("d\n"), StopOutcome::Pass("d".into()));
        assert_eq!(filter.push("é"), StopOutcome::Pass("\né".into()));
    }

    #[test]
    fn every_way_of_splitting_a_text_gives_the_same_result() {
        let text = "aabaabaaacäöü|stop|x";
        for stops in [&["aaac", "|stop|"][..], &["|stop|"], &["nothing"]] {
            let whole = stream(stops, &[text]);
            let chars: Vec<char> = text.chars().collect();
            for size in 1..chars.len() {
                let deltas: Vec<String> = chars.chunks(size).map(|c| c.iter().collect()).collect();
                let deltas: Vec<&str> = deltas.iter().map(String::as_str).collect();
                assert_eq!(stream(stops, &deltas), whole, "deltas of {size}");
            }
        }
    }
}
