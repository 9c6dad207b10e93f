//! Link specifications (`delay=20ms loss=1%`): the printed form of an accepted specification is parsed to an
//! equal specification.

use ginnel_devices::faults::LinkSpec;

/// Runs one input: the text of a specification.
///
/// # Panics
/// If the printed form of a specification is parsed to a different one, if a share is above 1 or the jitter
/// above the delay, or if an error has no text.
pub fn run(data: &[u8]) {
    let Ok(text) = core::str::from_utf8(data) else { return };
    match LinkSpec::parse(text) {
        Ok(spec) => {
            let printed = spec.to_string();
            let reparsed = LinkSpec::parse(&printed);
            assert_eq!(reparsed.as_ref(), Ok(&spec), "{text:?} prints as {printed:?}");
            assert!(spec.up.loss.share() <= 1.0 && spec.down.corrupt.share() <= 1.0);
            assert!(spec.up.jitter <= spec.up.delay, "{printed}");
        }
        Err(error) => {
            let message = error.to_string();
            assert!(!message.is_empty(), "an empty error message about {text:?}");
        }
    }
}

/// Returns the handwritten seed inputs.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let texts = [
        ("empty", ""),
        (
            "manual",
            "delay=20ms loss=1% rate=1gbit jitter=2ms duplicate=0.1% reorder=1% corrupt=0.01% limit=1000 loss-burst=2.5",
        ),
        ("directions", "loss=1% up.loss=2%,down.delay=1.5s\tup.rate=10mbit"),
        ("limits", "rate=56kbit limit-bytes=64KiB memory=1GiB corrupt-from=14 reorder-delay=250us"),
        ("bad-unit", "delay=20"),
        ("bad-number", "loss=1.%"),
        ("unknown", "colour=red"),
        ("over-100-percent", "loss=101%"),
        ("repeated", "loss=1% loss=2%"),
        ("no-value", "loss"),
    ];
    texts.map(|(name, text)| (name, text.as_bytes().to_vec())).to_vec()
}

#[cfg(test)]
mod tests {
    use super::{LinkSpec, seeds};

    /// A seed that is rejected by mistake covers nothing.
    #[test]
    fn only_seeds_of_errors_are_rejected() {
        let is_accepted = |data: &[u8]| LinkSpec::parse(core::str::from_utf8(data).unwrap()).is_ok();
        let accepted: Vec<_> =
            seeds().into_iter().filter(|(_, data)| is_accepted(data)).map(|(name, _)| name).collect();
        assert_eq!(accepted, ["empty", "manual", "directions", "limits"]);
    }
}
