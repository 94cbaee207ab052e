//! libFuzzer target: `millpond_fuzz::page` against its oracle, on any list of operations.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(difference) = millpond_fuzz::page::run(&millpond_fuzz::ops(data)) {
        panic!("{difference}");
    }
});
