//! libFuzzer target: `millpond_fuzz::session` on any bytes.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| millpond_fuzz::session::run(data));
