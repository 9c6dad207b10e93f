//! The picture of the bench: efficiency (speed-up divided by the number of cores) over the number of cores.

use core::fmt::Write as _;

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 240.0;
const TOP: f64 = 70.0;
const BOTTOM: f64 = 60.0;
/// Doublings of the horizontal axis: up to 64 cores.
const DOUBLINGS: f64 = 6.0;
/// Upper end of the vertical axis.
const EFFICIENCY_MAX: f64 = 1.1;
/// Colors of the measured curves.
const COLORS: [&str; 4] = ["#0b6", "#06c", "#a3c", "#c60"];
/// Figures of Fastsocket's authors for nginx with short connections, at 24 cores: the speed-up of Fastsocket
/// is 21; the stock kernels' are in the ratio of their connections per second (475, 283 and 159 thousand).
const FASTSOCKET: [(&str, f64); 3] = [
    ("Fastsocket, nginx", 21.0),
    ("Linux 3.13", 21.0 * 283.0 / 475.0),
    ("Linux 2.6.32", 21.0 * 159.0 / 475.0),
];
const FASTSOCKET_CORES: f64 = 24.0;

/// A measured curve.
pub struct Curve {
    /// Name in the legend.
    pub name: &'static str,
    /// Cores and efficiency.
    pub points: Vec<(f64, f64)>,
}

fn x(cores: f64) -> f64 {
    LEFT + (WIDTH - LEFT - RIGHT) * cores.log2() / DOUBLINGS
}

fn y(efficiency: f64) -> f64 {
    TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - efficiency / EFFICIENCY_MAX)
}

/// Draws the curves.
pub fn draw(curves: &[Curve]) -> String {
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n"
    );
    let mut text = |at: (f64, f64), anchor: &str, text: &str| {
        let _ =
            writeln!(out, "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{text}</text>", at.0, at.1);
    };
    text(
        (LEFT, 26.0),
        "start",
        "ginnel demo-server on 1 to 64 simulated shards: work at one shard divided by work at N",
    );
    text(
        (LEFT, 46.0),
        "start",
        "(instructions, valgrind; no caches or waiting), beside speed-up / cores as published for Fastsocket",
    );
    text(((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 16.0), "middle", "shards or cores");
    for doubling in 0..=DOUBLINGS as u32 {
        let cores = f64::from(1 << doubling);
        text((x(cores), HEIGHT - BOTTOM + 20.0), "middle", &cores.to_string());
    }
    for tenth in (0..=10).step_by(2) {
        text((LEFT - 10.0, y(f64::from(tenth) / 10.0) + 4.0), "end", &format!("{} %", 10 * tenth));
    }
    for tenth in (0..=10).step_by(2) {
        let at = y(f64::from(tenth) / 10.0);
        let _ = writeln!(out, "<path d=\"M{LEFT} {at:.1}H{:.1}\" stroke=\"#ddd\"/>", WIDTH - RIGHT);
    }
    let mut legend = TOP;
    let mut line = |name: &str, color: &str, dash: &str, points: &[(f64, f64)]| {
        let path: Vec<String> = points.iter().map(|(c, e)| format!("{:.1} {:.1}", x(*c), y(*e))).collect();
        let stroke =
            format!("fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" stroke-dasharray=\"{dash}\"");
        let _ = writeln!(out, "<path d=\"M{}\" {stroke}/>", path.join("L"));
        for (cores, efficiency) in points {
            let (x, y) = (x(*cores), y(*efficiency));
            let _ = writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{color}\"/>");
        }
        if let Some((cores, efficiency)) = points.last().filter(|_| !dash.is_empty()) {
            let (x, y) = (x(*cores) + 8.0, y(*efficiency) + 4.0);
            let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\">{name}</text>");
            return;
        }
        let from = WIDTH - RIGHT + 20.0;
        let _ = writeln!(out, "<path d=\"M{from} {legend}h30\" {stroke}/>");
        let _ = writeln!(out, "<text x=\"{}\" y=\"{}\">{name}</text>", from + 38.0, legend + 4.0);
        legend += 24.0;
    };
    for (curve, color) in curves.iter().zip(COLORS) {
        line(curve.name, color, "", &curve.points);
    }
    for (name, speed_up) in FASTSOCKET {
        line(name, "#888", "6 4", &[(1.0, 1.0), (FASTSOCKET_CORES, speed_up / FASTSOCKET_CORES)]);
    }
    out.push_str("</svg>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::{Curve, draw};

    #[test]
    fn the_picture_has_all_curves() {
        let curve = |name| Curve { name, points: vec![(1.0, 1.0), (64.0, 0.99)] };
        let text = draw(&[curve("naive"), curve("proxy")]);
        for part in ["naive", "proxy", "Fastsocket, nginx", "Linux 3.13", "Linux 2.6.32"] {
            assert!(text.contains(&format!(">{part}</text>")), "{part}");
        }
        assert_eq!(text.matches("<circle").count(), 2 * 5);
        assert!(text.ends_with("</svg>\n"));
    }
}
