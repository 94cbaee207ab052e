//! libFuzzer target: `millpond_fuzz::extent` against its oracle, on any list of operations.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(difference) = millpond_fuzz::extent::run(&millpond_fuzz::ops(data)) {
        panic!("{difference}");
    }
});
