//! The cluster index and its oracle, under any bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| millpond_fuzz::panic_on(millpond_fuzz::index::run(&millpond_fuzz::ops(
    data
))));
