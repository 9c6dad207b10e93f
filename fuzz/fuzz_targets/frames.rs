#![no_main]

use ginnel_fuzzing::frames;
use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};

fuzz_target!(|data: &[u8]| drop(frames::run(data)));

// Mostly by whole operations; sometimes by libFuzzer's own mutations, which know the values that the code
// compares with.
fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    if seed % 4 == 0 {
        fuzzer_mutate(data, size, max_size)
    } else {
        frames::mutate(data, size, max_size, seed)
    }
});
