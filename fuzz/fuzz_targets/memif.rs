#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = ginnel_fuzzing::memif::run(data);
});
