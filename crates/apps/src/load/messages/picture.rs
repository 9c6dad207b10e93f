//! A picture of distributions (SVG): latency over the share of requests, both on logarithmic scales, so that
//! the tail is visible.

use crate::load::latency::Latency;
use crate::units::show_nanos;
use core::fmt;
use hdrhistogram::Histogram;

/// Size of the picture, and margins around the curves.
const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 520.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 50.0;
const TOP: f64 = 80.0;
const BOTTOM: f64 = 60.0;
/// Decades of the horizontal axis: up to 99.999 %.
const DECADES: f64 = 5.0;
/// Shorter times are drawn as this one, in nanoseconds.
const NANOS_MIN: u64 = 1_000;
/// Points of a curve in each decade.
const POINTS_PER_DECADE: u32 = 40;
/// Shares that have a label on the horizontal axis.
const SHARES: [(f64, &str); 7] = [
    (0.0, "0 %"),
    (0.5, "50 %"),
    (0.9, "90 %"),
    (0.99, "99 %"),
    (0.999, "99.9 %"),
    (0.9999, "99.99 %"),
    (0.99999, "99.999 %"),
];

/// A distribution to draw.
pub struct Curve<'a> {
    /// Name in the legend.
    pub name: &'a str,
    /// Color of the line.
    pub color: &'a str,
    /// The recorded values.
    pub values: &'a Latency,
}

/// A picture of distributions.
pub struct Picture<'a> {
    /// First line above the curves.
    pub title: &'a str,
    /// Second line above the curves.
    pub subtitle: &'a str,
    /// Distributions; those without values are left out.
    pub curves: &'a [Curve<'a>],
}

/// Returns the horizontal position of a share.
fn x_of(share: f64) -> f64 {
    let decades = -(1.0 - share).max(1e-9).log10();
    LEFT + (WIDTH - LEFT - RIGHT) * (decades / DECADES).min(1.0)
}

/// The vertical axis: decades of nanoseconds.
struct TimeAxis {
    first: f64,
    last: f64,
}

impl TimeAxis {
    fn new(curves: &[(&Curve<'_>, Histogram<u64>)]) -> Self {
        let smallest = curves.iter().map(|(_, h)| h.min().max(NANOS_MIN)).min().unwrap_or(NANOS_MIN);
        let largest = curves.iter().map(|(_, h)| h.max().max(NANOS_MIN)).max().unwrap_or(NANOS_MIN);
        let first = (smallest as f64).log10().floor();
        Self { first, last: (largest as f64).log10().ceil().max(first + 1.0) }
    }

    /// Returns the vertical position of a time.
    fn y_of(&self, nanos: f64) -> f64 {
        let part = (nanos.max(1.0).log10() - self.first) / (self.last - self.first);
        HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part.clamp(0.0, 1.0)
    }
}

/// Replaces characters that have a meaning in XML.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

impl fmt::Display for Picture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let curves: Vec<_> = self.curves.iter().map(|curve| (curve, curve.values.histogram())).collect();
        let curves: Vec<_> = curves.into_iter().filter(|(_, values)| !values.is_empty()).collect();
        let axis = TimeAxis::new(&curves);
        writeln!(
            f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
             viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"13\">"
        )?;
        writeln!(f, "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>")?;
        let title = escape(self.title);
        writeln!(f, "<text x=\"{LEFT}\" y=\"26\" font-size=\"17\" font-weight=\"bold\">{title}</text>")?;
        writeln!(f, "<text x=\"{LEFT}\" y=\"46\" fill=\"#555\">{}</text>", escape(self.subtitle))?;
        draw_grid(f, &axis)?;
        for (number, (curve, values)) in curves.iter().enumerate() {
            draw_curve(f, &axis, curve, values)?;
            let (x, y) = (LEFT + 8.0 + 265.0 * number as f64, TOP - 16.0);
            writeln!(
                f,
                "<line x1=\"{x}\" y1=\"{y}\" x2=\"{:.0}\" y2=\"{y}\" stroke=\"{}\" stroke-width=\"3\"/>\
                 <text x=\"{:.0}\" y=\"{:.0}\">{} (p99 {})</text>",
                x + 22.0,
                curve.color,
                x + 28.0,
                y + 4.0,
                escape(curve.name),
                show_nanos(values.value_at_quantile(0.99))
            )?;
        }
        writeln!(f, "</svg>")
    }
}

fn draw_grid(f: &mut fmt::Formatter<'_>, axis: &TimeAxis) -> fmt::Result {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    for (share, label) in SHARES {
        let x = x_of(share);
        writeln!(
            f,
            "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{bottom}\" stroke=\"#ddd\"/>\
             <text x=\"{x:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{label}</text>",
            bottom + 18.0
        )?;
    }
    let decades = (axis.last - axis.first) as i32;
    for decade in 0..=decades {
        let nanos = 10f64.powi(axis.first as i32 + decade);
        let y = axis.y_of(nanos);
        writeln!(
            f,
            "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 8.0,
            y + 4.0,
            show_power(nanos as u64)
        )?;
    }
    writeln!(
        f,
        "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\">share of messages that took at most this time</text>",
        (LEFT + right) / 2.0,
        HEIGHT - 18.0
    )
}

/// Formats a power of ten of nanoseconds.
fn show_power(nanos: u64) -> String {
    match nanos {
        0..1_000 => format!("{nanos} ns"),
        1_000..1_000_000 => format!("{} µs", nanos / 1_000),
        1_000_000..1_000_000_000 => format!("{} ms", nanos / 1_000_000),
        _ => format!("{} s", nanos / 1_000_000_000),
    }
}

fn draw_curve(
    f: &mut fmt::Formatter<'_>,
    axis: &TimeAxis,
    curve: &Curve<'_>,
    values: &Histogram<u64>,
) -> fmt::Result {
    write!(f, "<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"2\" points=\"", curve.color)?;
    // Beyond this share there is no value: the curve ends at the largest one.
    let last = 1.0 - 1.0 / values.len() as f64;
    for point in 0..=DECADES as u32 * POINTS_PER_DECADE {
        let share = 1.0 - 10f64.powf(-f64::from(point) / f64::from(POINTS_PER_DECADE));
        if share > last && point > 0 {
            break;
        }
        write!(f, "{:.1},{:.1} ", x_of(share), axis.y_of(values.value_at_quantile(share) as f64))?;
    }
    let end = x_of(last.min(1.0 - 10f64.powf(-DECADES)));
    writeln!(f, "{end:.1},{:.1}\"/>", axis.y_of(values.max() as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel::Instant;

    #[test]
    fn a_picture_has_a_curve_for_each_distribution() {
        let mut values = Latency::default();
        (1..=1_000).for_each(|micros| values.record(Instant::ZERO, Instant::from_micros(micros)));
        let empty = Latency::default();
        let curves = [
            Curve { name: "a <b>", color: "red", values: &values },
            Curve { name: "none", color: "blue", values: &empty },
        ];
        let svg = Picture { title: "t & u", subtitle: "s", curves: &curves }.to_string();
        assert_eq!((svg.matches("<polyline").count(), svg.matches("</svg>").count()), (1, 1));
        for part in ["a &lt;b&gt; (p99 990.", "t &amp; u", "99.9 %", ">1 ms<", ">1 µs<"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf") && !svg.contains("blue"), "{svg}");
        let axis = TimeAxis { first: 3.0, last: 6.0 };
        let (top, bottom) = (axis.y_of(1e6), axis.y_of(1e3));
        assert_eq!((top, bottom), (TOP, HEIGHT - BOTTOM));
        assert_eq!((x_of(0.0), x_of(0.99999)), (LEFT, WIDTH - RIGHT));
    }

    #[test]
    fn a_picture_without_values_is_valid() {
        let svg = Picture { title: "", subtitle: "", curves: &[] }.to_string();
        assert!(svg.contains("</svg>") && !svg.contains("NaN"), "{svg}");
    }
}
