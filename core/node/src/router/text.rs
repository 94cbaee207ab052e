//! Tokens' bytes into text that can be shown: whole characters, cut at stop texts.
//!
//! It knows no tokenizer. Bytes that may still become part of a character or of a stop text are held back; everything else
//! comes out at once. What is held back is bounded by the longest stop text and one character.

/// Assembles the text of one answer.
///
/// ```
/// use millpond_node::router::Assembler;
/// let mut text = Assembler::new(vec!["END".into()]);
/// assert_eq!(text.push(b"a E").text, "a ");
/// let last = text.push(b"ND b");
/// assert!(last.stopped && last.text.is_empty());
/// ```
#[derive(Clone, Debug)]
pub struct Assembler {
    stops: Vec<String>,
    held: Vec<u8>,
}

/// What a push brought.
///
/// ```
/// assert!(!millpond_node::router::Assembled::default().stopped);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assembled {
    /// Text to show now.
    pub text: String,
    /// Whether a stop text ended the answer; `text` ends before it and nothing more is to be pushed.
    pub stopped: bool,
}

impl Assembler {
    /// For an answer that ends at any of `stops`; empty ones are ignored.
    #[must_use]
    pub fn new(mut stops: Vec<String>) -> Self {
        stops.retain(|stop| !stop.is_empty());
        Self { stops, held: Vec::new() }
    }

    /// Takes the bytes of the next token.
    pub fn push(&mut self, bytes: &[u8]) -> Assembled {
        self.held.extend_from_slice(bytes);
        let first = self.stops.iter().filter_map(|stop| find(&self.held, stop.as_bytes())).min();
        if let Some(end) = first {
            let text = lossy(&self.held[..end]);
            self.held.clear();
            return Assembled { text, stopped: true };
        }
        let longest = self.stops.iter().map(|stop| overlap(&self.held, stop.as_bytes())).max().unwrap_or(0);
        let free = self.held.len() - longest;
        let end = free - incomplete(&self.held[..free]);
        let text = lossy(&self.held[..end]);
        self.held.drain(..end);
        Assembled { text, stopped: false }
    }

    /// The rest, once no more tokens come.
    #[must_use]
    pub fn finish(self) -> String {
        lossy(&self.held)
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Where `needle` starts in `bytes`.
fn find(bytes: &[u8], needle: &[u8]) -> Option<usize> {
    bytes.windows(needle.len()).position(|window| window == needle)
}

/// How many bytes at the end of `bytes` could be the start of `stop`.
fn overlap(bytes: &[u8], stop: &[u8]) -> usize {
    let longest = bytes.len().min(stop.len() - 1);
    (1..=longest).rev().find(|len| bytes.ends_with(&stop[..*len])).unwrap_or(0)
}

/// How many bytes at the end of `bytes` are the start of a character that is not whole yet.
fn incomplete(bytes: &[u8]) -> usize {
    // A character has at most four bytes, so its unfinished start at most three.
    for len in 1..=bytes.len().min(3) {
        let tail = &bytes[bytes.len() - len..];
        if let Err(error) = std::str::from_utf8(tail)
            && error.valid_up_to() == 0
            && error.error_len().is_none()
        {
            return len;
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes `bytes` in pieces of `len`.
    fn assemble(bytes: &[u8], len: usize, stops: &[&str]) -> (String, bool) {
        let mut assembler = Assembler::new(stops.iter().map(|stop| (*stop).into()).collect());
        let mut text = String::new();
        for piece in bytes.chunks(len) {
            let got = assembler.push(piece);
            text.push_str(&got.text);
            if got.stopped {
                return (text, true);
            }
        }
        text.push_str(&assembler.finish());
        (text, false)
    }

    #[test]
    fn characters_come_out_whole_however_the_tokens_cut_them() {
        let text = "naïve 🦆 日本語";
        for len in 1..8 {
            assert_eq!(assemble(text.as_bytes(), len, &[]), (text.into(), false), "{len}");
        }
        let mut assembler = Assembler::new(Vec::new());
        assert_eq!(assembler.push(&"🦆".as_bytes()[..3]).text, "");
        assert_eq!(assembler.push(&"🦆".as_bytes()[3..]).text, "🦆");
    }

    #[test]
    fn the_earliest_stop_ends_the_answer_however_the_tokens_cut_it() {
        for len in 1..20 {
            assert_eq!(assemble(b"one two three", len, &["three", "two"]), ("one ".into(), true), "{len}");
            assert_eq!(assemble(b"aaab", len, &["aab"]), ("a".into(), true), "{len}");
            assert_eq!(assemble("a→b".as_bytes(), len, &["→"]), ("a".into(), true), "{len}");
            assert_eq!(assemble(b"on tw", len, &["two"]), ("on tw".into(), false), "{len}");
        }
    }

    #[test]
    fn bytes_that_are_no_text_do_not_hold_up_what_follows() {
        assert_eq!(assemble(b"a\xffb", 1, &[]), ("a\u{fffd}b".into(), false));
        assert_eq!(assemble(b"a\xe6\x97", 1, &[]), ("a\u{fffd}".into(), false));
    }
}
