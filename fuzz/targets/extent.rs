//! The segment allocator and its oracle, under any bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| millpond_fuzz::panic_on(millpond_fuzz::extent::run(&millpond_fuzz::ops(
    data
))));
