#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ginnel_fuzzing::tcp_options::run(data));
