//! Sets of CPUs as the kernel writes them: lists (`0-3,8`) and masks (`00000001,0000000f`).

/// Largest CPU number plus one.
const CPUS_MAX: u32 = 8192;

/// Parses a list. Returns `None` if it is malformed.
pub fn parse_list(text: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= CPUS_MAX {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// Formats a list.
pub fn format_list(cpus: &[u32]) -> String {
    let mut sorted = cpus.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for cpu in sorted {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => parts.push((cpu, cpu)),
        }
    }
    let part = |(first, last): (u32, u32)| match last - first {
        0 => first.to_string(),
        _ => format!("{first}-{last}"),
    };
    parts.into_iter().map(part).collect::<Vec<_>>().join(",")
}

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
    fn lists_are_parsed_and_formatted() {
        assert_eq!(parse_list("0-2,8\n"), Some(vec![0, 1, 2, 8]));
        assert_eq!(parse_list("\n"), Some(vec![]));
        assert_eq!(format_list(&[8, 0, 2, 1, 1]), "0-2,8");
        for wrong in ["a", "3-1", "1-", "0-99999999"] {
            assert_eq!(parse_list(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn masks_have_groups_of_32_bits() {
        assert_eq!(parse_mask("00000001,0000000a\n"), Some(vec![1, 3, 32]));
        assert_eq!(parse_mask("f"), Some(vec![0, 1, 2, 3]));
        assert_eq!((parse_mask("x"), parse_mask("123456789")), (None, None));
        assert_eq!(format_mask(&[1, 3, 32]), "00000001,0000000a");
        assert_eq!(format_mask(&[]), "00000000");
    }
}
