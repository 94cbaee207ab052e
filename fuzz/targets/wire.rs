//! Frames of a data lane, under any bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| millpond_fuzz::wire::run(data));
