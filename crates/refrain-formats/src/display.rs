//! Text from model files, made fit for a terminal.

/// A name from a model file as one line without control sequences.
///
/// Model files are untrusted: their strings may hold escape sequences that rewrite a terminal, newlines that forge
/// lines of output, or invisible characters that reorder text. White space becomes single spaces, control and
/// formatting characters become U+FFFD, and everything after 200 characters is cut off.
#[must_use]
pub fn display_name(text: &str) -> String {
    const MAX_CHARS: usize = 200;
    let mut out = String::new();
    let mut n_chars = 0;
    let mut space_pending = false;
    for c in text.chars() {
        if c.is_whitespace() {
            space_pending = !out.is_empty();
            continue;
        }
        if n_chars + usize::from(space_pending) >= MAX_CHARS {
            out.push_str("...");
            break;
        }
        if std::mem::take(&mut space_pending) {
            out.push(' ');
            n_chars += 1;
        }
        out.push(if is_harmless(c) { c } else { char::REPLACEMENT_CHARACTER });
        n_chars += 1;
    }
    out
}

/// Whether a character neither controls a terminal nor changes how its neighbours are shown.
fn is_harmless(c: char) -> bool {
    let formats = matches!(
        c,
        '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}'
    );
    !c.is_control() && !formats
}

#[cfg(test)]
mod tests {
    use super::display_name;

    #[test]
    fn names_become_one_harmless_line() {
        assert_eq!(display_name("Qwen3 0.6B (chat) \u{e9}\u{4e2d}"), "Qwen3 0.6B (chat) \u{e9}\u{4e2d}");
        assert_eq!(display_name(" a\n\tb\r\n\u{2028}c "), "a b c");
        assert_eq!(display_name("\u{1b}[31mred\u{9b}0m\u{7f}"), "\u{fffd}[31mred\u{fffd}0m\u{fffd}");
        assert_eq!(display_name("a\u{202e}b\u{200b}c\u{feff}"), "a\u{fffd}b\u{fffd}c\u{fffd}");
        assert_eq!(display_name("\n \n"), "");
        assert_eq!(display_name(&"x".repeat(1000)), "x".repeat(200) + "...");
        assert_eq!(display_name(&"x".repeat(200)), "x".repeat(200));
    }
}
