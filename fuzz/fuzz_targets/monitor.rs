#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ginnel_fuzzing::monitor::run(data));
