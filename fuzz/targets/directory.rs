//! libFuzzer target: `millpond_fuzz::directory` on any bytes.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| millpond_fuzz::directory::run(data));
