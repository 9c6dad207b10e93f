//! Draws distributions of latencies: as SVG, and as text for a terminal.

use crate::distribution::Distribution;
use ginnel_apps::units::show_nanos;
use std::fmt::Write as _;

// The size of the picture and its margins, in pixels.
const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 36.0;
const TOP: f64 = 48.0;
const BOTTOM: f64 = 64.0;

/// Marks of the vertical axis: a share of the requests, and its label. Each nine takes equal space, so that
/// the slowest requests are visible.
const SHARES: [(f64, &str); 6] =
    [(0.0, "0 %"), (0.5, "50 %"), (0.9, "90 %"), (0.99, "99 %"), (0.999, "99.9 %"), (0.9999, "99.99 %")];
/// Nines of the share at the upper end of the vertical axis: 99 % has two.
const NINES_MAX: f64 = 4.5;

/// A curve of the picture.
struct Curve {
    name: &'static str,
    color: &'static str,
    /// Latency in nanoseconds, and the share of the requests that took at most that long.
    points: Vec<(u64, f64)>,
    count: u64,
}

impl Curve {
    fn of(name: &'static str, color: &'static str, distribution: &Distribution) -> Option<Self> {
        let histogram = distribution.histogram();
        let count = histogram.len();
        if count == 0 {
            return None;
        }
        let mut below = 0;
        let points = histogram
            .iter_recorded()
            .map(|value| {
                below += value.count_at_value();
                (value.value_iterated_to().max(1), below as f64 / count as f64)
            })
            .collect();
        Some(Self { name, color, points, count })
    }
}

/// Returns an SVG with the cumulative distribution of all latencies and, if both priorities have some, with
/// those of high and of low priority.
#[must_use]
pub fn svg(title: &str, latencies: &[Distribution; 2]) -> String {
    let [low, high] = latencies;
    let mut total = low.clone();
    total.add(high);
    let has_both = low.count() > 0 && high.count() > 0;
    let curves: Vec<Curve> = [
        Curve::of("all requests", "#222222", &total),
        Curve::of("high priority", "#c0392b", high).filter(|_| has_both),
        Curve::of("low priority", "#2471a3", low).filter(|_| has_both),
    ]
    .into_iter()
    .flatten()
    .collect();
    let mut out = String::new();
    let _ = writeln!(
        out,
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13">"#
    );
    let _ = writeln!(out, r#"<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>"#);
    let _ = writeln!(out, r#"<text x="{LEFT}" y="28" font-size="16">{}</text>"#, escape(title));
    draw(&mut out, &curves);
    out.push_str("</svg>\n");
    out
}

fn draw(out: &mut String, curves: &[Curve]) {
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    let ends = curves.iter().flat_map(|curve| [curve.points.first(), curve.points.last()]).flatten();
    let (first, last) =
        ends.fold((u64::MAX, 0), |(first, last), (nanos, _)| (first.min(*nanos), last.max(*nanos)));
    if first > last {
        let _ = writeln!(out, r#"<text x="{LEFT}" y="{}">no responses</text>"#, HEIGHT / 2.0);
        return;
    }
    // Whole decades.
    let (from, to) = ((first as f64).log10().floor(), (last as f64).log10().floor() + 1.0);
    let x = |nanos: f64| LEFT + (nanos.log10() - from) / (to - from) * (right - LEFT);
    let y = |share: f64| {
        let nines = if share < 1.0 { -(1.0 - share).log10() } else { NINES_MAX };
        bottom - nines.min(NINES_MAX) / NINES_MAX * (bottom - TOP)
    };
    // The casts keep the values, which are whole and below 21.
    for decade in from as i32..=to as i32 {
        let nanos = 10f64.powi(decade);
        let at = x(nanos);
        let _ = writeln!(out, r##"<path d="M{at:.1} {TOP}V{bottom}" stroke="#dddddd"/>"##);
        let label = show_decade(decade);
        let _ =
            writeln!(out, r#"<text x="{at:.1}" y="{}" text-anchor="middle">{label}</text>"#, bottom + 20.0);
    }
    for (share, label) in SHARES {
        let at = y(share);
        let _ = writeln!(out, r##"<path d="M{LEFT} {at:.1}H{right}" stroke="#dddddd"/>"##);
        let _ =
            writeln!(out, r#"<text x="{}" y="{:.1}" text-anchor="end">{label}</text>"#, LEFT - 8.0, at + 4.0);
    }
    let middle = (LEFT + right) / 2.0;
    let _ = writeln!(out, r#"<text x="{middle}" y="{}" text-anchor="middle">latency</text>"#, HEIGHT - 14.0);
    for (number, curve) in curves.iter().enumerate() {
        let mut path = String::new();
        let (mut last_x, mut last_y) = (f64::MIN, bottom);
        for (nanos, share) in &curve.points {
            let (px, py) = (x(*nanos as f64), y(*share));
            if path.is_empty() {
                let _ = write!(path, "M{px:.1} {bottom:.1}V{py:.1}");
            } else if px - last_x >= 0.5 || last_y - py >= 0.5 || *share == 1.0 {
                let _ = write!(path, "H{px:.1}V{py:.1}");
            } else {
                continue;
            }
            (last_x, last_y) = (px, py);
        }
        let _ =
            writeln!(out, r#"<path d="{path}" fill="none" stroke="{}" stroke-width="1.8"/>"#, curve.color);
        let at = TOP + 20.0 + 20.0 * number as f64;
        let _ = writeln!(
            out,
            r#"<path d="M{} {}h26" stroke="{}" stroke-width="3"/><text x="{}" y="{at}">{} ({})</text>"#,
            LEFT + 14.0,
            at - 4.0,
            curve.color,
            LEFT + 48.0,
            curve.name,
            curve.count
        );
    }
}

/// Formats a power of ten of nanoseconds.
fn show_decade(decade: i32) -> String {
    let unit = ["ns", "µs", "ms", "s"][(decade / 3).clamp(0, 3) as usize];
    let rest = decade - (decade / 3).clamp(0, 3) * 3;
    format!("{} {unit}", 10f64.powi(rest))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Draws a histogram of the latencies for a terminal of `columns` columns: a line for each factor of 2, with
/// `#` for low and `H` for high priority.
#[must_use]
pub fn text(latencies: &[Distribution; 2], columns: usize) -> String {
    let bins = latencies.each_ref().map(|distribution| {
        let mut bins = [0u64; 64];
        for value in distribution.histogram().iter_recorded() {
            bins[value.value_iterated_to().max(1).ilog2() as usize] += value.count_at_value();
        }
        bins
    });
    let [low, high] = &bins;
    let sum = |bin: usize| low[bin] + high[bin];
    let used: Vec<usize> = (0..64).filter(|bin| sum(*bin) > 0).collect();
    let (Some(first), Some(last)) = (used.first(), used.last()) else { return "  no responses\n".to_owned() };
    let most = used.iter().map(|bin| sum(*bin)).max().unwrap_or(1).max(1);
    let width = columns.saturating_sub(34).clamp(10, 200);
    let mut out = String::new();
    for bin in *first..=*last {
        // Every bin that is not empty is visible.
        let scale = |count: u64| (u128::from(count) * width as u128).div_ceil(u128::from(most)) as usize;
        let [low, high] = [scale(low[bin]), scale(high[bin])];
        let upper = show_nanos(1u64.checked_shl(bin as u32 + 1).unwrap_or(u64::MAX));
        let _ = writeln!(out, "  < {upper:>10} {:>12} {}{}", sum(bin), "H".repeat(high), "#".repeat(low));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_stack::time::Instant;

    fn latencies() -> [Distribution; 2] {
        let mut latencies = [Distribution::default(), Distribution::default()];
        for us in 1..=5000 {
            latencies[0].record(Instant::ZERO, Instant::from_micros(us * us / 500 + 300));
            if us % 20 == 0 {
                latencies[1].record(Instant::ZERO, Instant::from_micros(us / 10 + 100));
            }
        }
        latencies
    }

    #[test]
    fn svg_has_a_curve_for_each_priority() {
        let picture = svg("a < b & c", &latencies());
        for part in [
            "a &lt; b &amp; c",
            "all requests (5250)",
            "high priority (250)",
            "low priority (5000)",
            "99.9 %",
            "1 ms",
        ] {
            assert_eq!(picture.matches(part).count(), 1, "{part}");
        }
        assert!(!picture.contains("NaN") && picture.len() < 100_000, "{}", picture.len());
        let [low, _] = latencies();
        assert_eq!(svg("", &[low, Distribution::default()]).matches("stroke-width=\"1.8\"").count(), 1);
        assert!(svg("", &Default::default()).contains("no responses"));
    }

    #[test]
    fn text_fits_the_terminal() {
        let text = text(&latencies(), 80);
        assert!(text.lines().count() > 5 && text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.contains('H') && text.contains('#'));
    }
}
