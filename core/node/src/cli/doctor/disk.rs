//! The byte test of a file: written past the page cache where that can be, read back, compared.

use std::path::Path;

use super::Finding;
use super::trial::said;
use crate::engine::{Backing, Batch, Caching, DriverInfo, Engine, FileOptions, Options, Rights};
use crate::node;
use crate::runtime::Runtime;

/// Bytes that a file has to take and give.
const LEN: u64 = 1 << 20;

/// Whether random bytes come back from a file of the temporary folder unchanged, in words.
pub(super) async fn run<R: Runtime>(runtime: &R) -> Result<(Finding, String), String> {
    let options = Options::new(node::identity("doctor: file", None).map_err(said)?);
    let engine = Engine::start(runtime.clone(), options).map_err(said)?;
    let ending = test(&engine).await;
    engine.shut_down().await;
    ending
}

async fn test<R: Runtime>(engine: &Engine<R>) -> Result<(Finding, String), String> {
    let folder = std::env::temp_dir();
    let path = folder.join(format!("millpond-doctor-{}", std::process::id()));
    let file = engine.open_file(&path, FileOptions::create(LEN)).await.map_err(said)?;
    // Its name is not needed any more, and must not stay if this ends early.
    std::fs::remove_file(&path).map_err(said)?;
    let rights = Rights::REMOTE_READ | Rights::REMOTE_WRITE;
    let grant = engine.grant_file(&file, &[(0, LEN)], rights).map_err(said)?;
    let there = engine.attach(&engine.itself(), &grant.token()).map_err(said)?;
    let memory = engine.allocate(2 * LEN, Backing::Memfd).map_err(said)?;
    let mut bytes = memory.carve(0, LEN).map_err(said)?;
    getrandom::fill(&mut bytes).map_err(said)?;
    let bytes = bytes.freeze();
    let batch = Batch::new().write(bytes.clone(), there.whole());
    let report = engine.submit(batch).map_err(said)?.await.into_done().map_err(said)?;
    let batch = Batch::new().read(there.whole(), memory.carve(LEN, LEN).map_err(said)?);
    let back = engine.submit(batch).map_err(said)?.await.into_buffers().map_err(said)?;
    if back.first().is_none_or(|back| back[..] != bytes[..]) {
        return Err("other bytes came back than were written".to_owned());
    }
    let driver = engine.files_driver().ok_or("no driver")?;
    Ok(found(&folder, file.file().caching(), driver, report.elapsed().as_micros()))
}

/// What was found out about files in `folder`: the way to the kernel, and past the page cache or not.
fn found(folder: &Path, caching: Caching, driver: DriverInfo, micros: u64) -> (Finding, String) {
    let (folder, kib) = (folder.display(), LEN >> 10);
    let text = format!("usable: {kib} KiB were written to {folder} in {micros} us and came back unchanged");
    let way = match driver.uring_refused {
        None => format!("by {}", driver.name),
        Some(code) => format!("by threads, since io_uring is refused with system error {code}"),
    };
    match caching {
        Caching::Direct { .. } if driver.uring_refused.is_none() => {
            (Finding::Good, format!("{text}; {way}, past the page cache"))
        }
        Caching::Direct { .. } => (Finding::Note, format!("{text}; {way}, past the page cache")),
        Caching::Cached { why } => (Finding::Note, format!("{text}; {way}, through the page cache: {why}")),
    }
}
