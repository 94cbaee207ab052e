//! libFuzzer target: `millpond_fuzz::wire` on any bytes.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| millpond_fuzz::wire::run(data));
