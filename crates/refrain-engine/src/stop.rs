//! Stop strings in a stream of text that arrives in pieces.

/// Passes text on until a stop string appears; holds back what could still become one.
#[derive(Clone, Debug)]
pub struct StopFilter {
    stops: Vec<String>,
    held: String,
}

/// What a piece of text led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Text that may be shown; possibly empty.
    Pass(String),
    /// The last text before a stop string.
    Stop(String),
}

impl StopFilter {
    /// A filter for these strings; empty ones are ignored.
    pub fn new(stops: &[String]) -> StopFilter {
        StopFilter { stops: stops.iter().filter(|s| !s.is_empty()).cloned().collect(), held: String::new() }
    }

    /// Takes the next piece.
    pub fn push(&mut self, piece: &str) -> Verdict {
        self.held.push_str(piece);
        if let Some(at) = self.stops.iter().filter_map(|s| self.held.find(s)).min() {
            self.held.truncate(at);
            return Verdict::Stop(std::mem::take(&mut self.held));
        }
        let keep = self.stops.iter().map(|s| overlap(&self.held, s)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Verdict::Pass(std::mem::replace(&mut self.held, rest))
    }

    /// What was held back when the stream ended.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` that is a beginning of `stop`.
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

    fn stream(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let mut filter = StopFilter::new(&stops);
        let mut text = String::new();
        for piece in pieces {
            match filter.push(piece) {
                Verdict::Pass(part) => text += &part,
                Verdict::Stop(part) => return (text + &part, true),
            }
        }
        (text + &filter.finish(), false)
    }

    #[test]
    fn a_stop_string_split_over_pieces_is_found() {
        assert_eq!(stream(&["END"], &["one E", "N", "D two"]), ("one ".into(), true));
    }

    #[test]
    fn what_only_looked_like_a_stop_string_is_passed_on() {
        assert_eq!(stream(&["END"], &["one E", "N", "x"]), ("one ENx".into(), false));
        assert_eq!(stream(&["END"], &["one EN"]), ("one EN".into(), false));
    }

    #[test]
    fn the_earliest_of_several_stop_strings_wins() {
        assert_eq!(stream(&["c", "b"], &["abc"]), ("a".into(), true));
    }

    #[test]
    fn pieces_that_cannot_be_part_of_a_stop_string_pass_at_once() {
        let mut filter = StopFilter::new(&["\n\n".into()]);
        assert_eq!(filter.push("abc"), Verdict::Pass("abc".into()));
        assert_eq!(filter.push("d\n"), Verdict::Pass("d".into()));
        assert_eq!(filter.push("é"), Verdict::Pass("\né".into()));
    }

    #[test]
    fn every_way_of_cutting_a_text_gives_the_same_result() {
        let text = "aabaabaaacäöü|stop|x";
        for stops in [&["aaac", "|stop|"][..], &["|stop|"], &["nothing"]] {
            let whole = stream(stops, &[text]);
            let chars: Vec<char> = text.chars().collect();
            for size in 1..chars.len() {
                let pieces: Vec<String> = chars.chunks(size).map(|c| c.iter().collect()).collect();
                let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
                assert_eq!(stream(stops, &pieces), whole, "pieces of {size}");
            }
        }
    }
}
