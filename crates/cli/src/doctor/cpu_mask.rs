//! Masks of CPUs, as the kernel writes them into files about interrupts and queues (`00000001,0000000f`).

/// Largest CPU number plus one.
const CPUS_MAX: u32 = 8192;

/// Parses a mask: groups of 32 bits in hexadecimal digits. Returns `None` if it is malformed.
pub fn parse_mask(text: &str) -> Option<Vec<u32>> {
    let groups: Option<Vec<u32>> =
        text.trim().split(',').map(|group| u32::from_str_radix(group, 16).ok()).collect();
    let groups = groups.filter(|groups| groups.len() <= (CPUS_MAX / 32) as usize)?;
    let bits = groups.iter().rev().zip((0..).step_by(32));
    Some(
        bits.flat_map(|(group, at)| {
            (0..32).filter(move |bit| group >> bit & 1 == 1).map(move |bit| at + bit)
        })
        .collect(),
    )
}

/// Formats a mask.
pub fn format_mask(cpus: &[u32]) -> String {
    let mut groups = vec![0u32; cpus.iter().max().map_or(1, |cpu| *cpu as usize / 32 + 1)];
    cpus.iter().for_each(|cpu| groups[*cpu as usize / 32] |= 1 << (cpu % 32));
    let groups: Vec<String> = groups.iter().rev().map(|group| format!("{group:08x}")).collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_have_groups_of_32_bits() {
        assert_eq!(parse_mask("00000001,0000000a\n"), Some(vec![1, 3, 32]));
        assert_eq!(parse_mask("f"), Some(vec![0, 1, 2, 3]));
        assert_eq!((parse_mask("x"), parse_mask("123456789")), (None, None));
        assert_eq!(format_mask(&[1, 3, 32]), "00000001,0000000a");
        assert_eq!(format_mask(&[]), "00000000");
    }
}
