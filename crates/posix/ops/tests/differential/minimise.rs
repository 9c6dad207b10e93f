//! Minimises a failing sequence (delta debugging: Zeller and Hildebrandt, "Simplifying and Isolating
//! Failure-Inducing Input", 2002).

/// Returns the smallest subsequence of `all` found that still fails. `all` must fail.
pub fn minimise(all: Vec<usize>, fails: impl Fn(&[usize]) -> bool) -> Vec<usize> {
    let mut steps = all;
    let mut parts = 2;
    while steps.len() > 1 {
        let size = steps.len().div_ceil(parts);
        let without = steps.chunks(size).enumerate().map(|(out, _)| {
            let kept = steps.chunks(size).enumerate().filter(|(part, _)| *part != out);
            kept.flat_map(|(_, part)| part.iter().copied()).collect::<Vec<usize>>()
        });
        let smaller = without.into_iter().find(|rest| !rest.is_empty() && fails(rest));
        match smaller {
            Some(rest) => {
                steps = rest;
                parts = (parts - 1).max(2);
            }
            None if size == 1 => break,
            None => parts = (parts * 2).min(steps.len()),
        }
    }
    steps
}

#[test]
fn irrelevant_steps_are_removed() {
    let needed = [3, 17, 18, 40];
    let fails = |subset: &[usize]| needed.iter().all(|step| subset.contains(step));
    assert_eq!(minimise((0..50).collect(), fails), needed);
    assert_eq!(minimise((0..50).collect(), |_| true).len(), 1);
}
