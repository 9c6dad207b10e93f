//! Comparison of eight numbers at once.
#![allow(unsafe_code)] // vector instructions of the baseline are unsafe intrinsics

/// Returns a mask in which bit `i` is set if `lanes[i]` equals `wanted`.
#[inline(always)]
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(crate) fn equal_mask(lanes: &[u32; 8], wanted: u32) -> u32 {
    use core::arch::x86_64::{
        __m128i, _mm_castsi128_ps, _mm_cmpeq_epi32, _mm_loadu_si128, _mm_movemask_ps, _mm_set1_epi32,
    };
    let halves: *const __m128i = lanes.as_ptr().cast();
    // SAFETY: SSE2 is part of x86-64; both loads, which need no alignment, lie within the 32 bytes of
    // `lanes`.
    let mask = unsafe {
        let wanted = _mm_set1_epi32(wanted.cast_signed());
        let low = _mm_cmpeq_epi32(_mm_loadu_si128(halves), wanted);
        let high = _mm_cmpeq_epi32(_mm_loadu_si128(halves.add(1)), wanted);
        _mm_movemask_ps(_mm_castsi128_ps(low)) | _mm_movemask_ps(_mm_castsi128_ps(high)) << 4
    };
    mask.cast_unsigned()
}

/// Returns a mask in which bit `i` is set if `lanes[i]` equals `wanted`.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(crate) fn equal_mask(lanes: &[u32; 8], wanted: u32) -> u32 {
    lanes.iter().enumerate().fold(0, |equal, (lane, &value)| equal | u32::from(value == wanted) << lane)
}

#[cfg(test)]
mod tests {
    use super::equal_mask;

    #[test]
    fn each_lane_has_its_bit() {
        for set in 0..256u32 {
            let lanes = core::array::from_fn(|lane| if set >> lane & 1 == 1 { 7 } else { lane as u32 + 100 });
            assert_eq!(equal_mask(&lanes, 7), set);
        }
        assert_eq!(equal_mask(&[u32::MAX; 8], u32::MAX), 255);
    }
}
