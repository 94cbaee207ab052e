//! What the examples are measured against: `fio` on the same file, and the median of what both came to.

use std::path::Path;
use std::process::Command;

use millpond_hal::backend::file::DEPTH;

/// Bytes per second of `moves` moves of `block` bytes in a file of twice as many blocks, by `fio`; `None` if it cannot be run.
pub(crate) fn bytes_per_second(path: &Path, block: u64, moves: u64, reads_percent: u32) -> Option<f64> {
    let output = Command::new("fio")
        .args([
            "--name=files",
            "--rw=randrw",
            "--direct=1",
            "--ioengine=io_uring",
            "--norandommap",
            "--output-format=json",
        ])
        .arg(format!("--filename={}", path.display()))
        .arg(format!("--size={}", 2 * moves * block))
        .args([format!("--bs={block}"), format!("--iodepth={DEPTH}"), format!("--number_ios={moves}")])
        .arg(format!("--rwmixread={reads_percent}"))
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    // Bytes and milliseconds of the whole job, which last as long as its slower half.
    let number = |from: &str, name: &str| -> Option<f64> {
        let value = text[text.find(from)?..].split_once(&format!("\"{name}\" : "))?.1;
        value.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    let bytes = number("\"read\"", "io_bytes")? + number("\"write\"", "io_bytes")?;
    let millis = number("\"read\"", "runtime")?.max(number("\"write\"", "runtime")?);
    (millis > 0.0).then(|| bytes * 1e3 / millis)
}

/// The value in the middle.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
