//! Frames of a data lane out of any bytes: parsing is total, looks only at the head, and every frame has one encoding.

use millpond_core::wire::frame::{Frame, HEADER_LEN, Parsed, parse, reseal};
use millpond_core::wire::{HEAD_LEN_MAX, MOVES_MAX};

/// Frames looked at in one input, at most.
const FRAMES_MAX: usize = 64;

/// Reads `data` as a stream of frames, once as it is and once with each head's checksum set right, so that what lies behind
/// the checksum is reached too.
///
/// # Panics
/// If a promise of `millpond_core::wire::frame` does not hold.
///
/// ```
/// millpond_fuzz::wire::run(b"no frame at all");
/// ```
pub fn run(data: &[u8]) {
    stream(data);
    let mut bytes = data.to_vec();
    let mut at = 0;
    for _ in 0..FRAMES_MAX {
        reseal(&mut bytes[at..]);
        match one(&bytes[at..]) {
            Some(len) if len < bytes.len() - at => at += len,
            _ => break,
        }
    }
}

fn stream(data: &[u8]) {
    let mut rest = data;
    for _ in 0..FRAMES_MAX {
        match one(rest) {
            Some(len) if len < rest.len() => rest = &rest[len..],
            _ => break,
        }
    }
}

/// Checks what is at the start of `bytes`; for a frame, says how long it is with all that follows its head.
fn one(bytes: &[u8]) -> Option<usize> {
    match parse(bytes) {
        Ok(Parsed::Frame { frame, head_len }) => {
            assert!(head_len <= HEAD_LEN_MAX && head_len % 8 == 0 && frame.head_len() == head_len);
            assert_eq!(parse(&bytes[..head_len]), Ok(Parsed::Frame { frame, head_len }), "looked beyond the head");
            for cut in [0, HEADER_LEN - 1, HEADER_LEN, head_len - 1] {
                let short = matches!(parse(&bytes[..cut]), Ok(Parsed::Short { head_len: wanted }) if wanted > cut);
                assert!(short || cut >= head_len, "a head cut at {cut} of {head_len} was not missed");
            }
            let mut again = vec![0xa5; head_len];
            assert_eq!(frame.encode(&mut again), Ok(head_len));
            assert_eq!(again, bytes[..head_len], "one frame, two encodings");
            if let Frame::Write { extents, .. } | Frame::Read { extents, .. } = frame {
                assert!((1..=usize::from(MOVES_MAX)).contains(&extents.len()));
                assert!(extents.iter().all(|extent| extent.offset.get().checked_add(extent.len.get()).is_some()));
            }
            usize::try_from(frame.trail().len()).ok().map(|len| head_len + len)
        }
        Ok(Parsed::Short { head_len }) => {
            assert!(head_len > bytes.len() && head_len <= HEAD_LEN_MAX);
            None
        }
        Err(violation) => {
            assert!(!violation.to_string().is_empty());
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    fn vectors() -> Vec<(String, Vec<u8>)> {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../core/src/wire/golden");
        let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        let read = |path: std::path::PathBuf| {
            let text = fs::read_to_string(&path).unwrap();
            let bytes = text.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap());
            (path.file_stem().unwrap().to_string_lossy().into_owned(), bytes.collect())
        };
        files.map(read).collect()
    }

    /// Writes golden vectors as seeds where there are none yet: `MILLPOND_GOLDEN=write cargo test -p millpond-fuzz seeds`.
    #[test]
    fn seeds_of_the_corpus_are_the_golden_vectors() {
        const HELLO: [&str; 5] = ["hello", "challenge", "proof", "welcome", "refusal"];
        for (name, bytes) in vectors().into_iter().filter(|(name, _)| name != "token") {
            let (target, bytes) = if HELLO.contains(&name.as_str()) {
                // The first byte chooses what a session does with the rest: see `session::run`.
                let role = if matches!(name.as_str(), "hello" | "proof") { 0 } else { 1 };
                ("session", [&[role], &bytes[..]].concat())
            } else {
                ("wire", bytes)
            };
            let path = format!("{}/corpus/{target}/{name}", env!("CARGO_MANIFEST_DIR"));
            if std::env::var_os("MILLPOND_GOLDEN").is_some() {
                fs::write(&path, &bytes).unwrap();
            }
            assert_eq!(fs::read(&path).unwrap(), bytes, "{path}");
            if target == "wire" { super::run(&bytes) } else { crate::session::run(&bytes) }
        }
    }

    #[test]
    fn a_frame_behind_a_frame_is_reached() {
        let frames: Vec<u8> = vectors().into_iter().filter(|(name, _)| name == "ping").flat_map(|(_, b)| b).collect();
        assert_eq!(super::one(&frames), Some(frames.len()));
        super::run(&frames.repeat(3));
    }
}
