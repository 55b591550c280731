//! Line charts as SVG text. No scripts, and no colours but CSS classes: the page that holds them decides for light and dark
//! ([`STYLE`]). Each point tells its values to a pointer that rests on it.

use std::fmt::Write;

/// What the classes of a chart look like: the colours of Okabe and Ito, which people with any colour vision tell apart, in a darker
/// and a lighter set.
pub const STYLE: &str = "\
svg.chart{max-width:100%;height:auto;font:12px system-ui,sans-serif}
svg.chart text{fill:var(--text)}svg.chart .title{font-size:14px;font-weight:600}
svg.chart .grid{stroke:var(--grid);stroke-width:1}svg.chart .axis{stroke:var(--text);stroke-width:1}
svg.chart .line{fill:none;stroke-width:2}svg.chart .dashed{stroke-dasharray:5 4}svg.chart .band{opacity:.15;stroke:none}
:root{--c0:#0072b2;--c1:#d55e00;--c2:#00795a;--c3:#a8457e;--c4:#8a6d00;--c5:#3b6fd4;--c6:#5c5c5c;--c7:#7a3db8}
@media(prefers-color-scheme:dark){:root{--c0:#56b4e9;--c1:#ff8a3d;--c2:#2ec79a;--c3:#e58bc0;--c4:#f0e442;--c5:#8fb4ff;--c6:#b5b5b5;--c7:#c39bf0}}
";

/// Colours; further lines begin again.
pub const COLOURS: usize = 8;

/// One line.
#[derive(Clone, Debug, Default)]
pub struct Line {
    /// In the legend.
    pub name: String,
    /// `(x, y)`, ascending in x. A value that is not finite makes a gap.
    pub points: Vec<(f64, f64)>,
    /// `(x, low, high)`: a band behind the line.
    pub band: Vec<(f64, f64, f64)>,
    /// A limit or an ideal, not a result.
    pub dashed: bool,
}

/// Lines over one pair of axes. `x` is spaced by its logarithm, `y` begins at zero.
#[derive(Clone, Debug, Default)]
pub struct Chart {
    /// Above.
    pub title: String,
    /// Name and unit of x.
    pub x: String,
    /// Name and unit of y.
    pub y: String,
    /// In the order of the legend.
    pub lines: Vec<Line>,
}

const WIDTH: f64 = 560.0;
const PLOT: Plot = Plot { left: 64.0, right: 544.0, top: 52.0, bottom: 270.0 };
const LEGEND_ROW: f64 = 18.0;

struct Plot {
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
}

/// `<`, `>`, `&` and quotes as entities.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}

/// A number for people: three digits, thousands as k, M, G, T.
pub fn short(value: f64) -> String {
    let (scaled, unit) = match value.abs() {
        v if v >= 1e12 => (value / 1e12, "T"),
        v if v >= 1e9 => (value / 1e9, "G"),
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let decimals = match scaled.abs() {
        v if v == 0.0 || v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    let text = format!("{scaled:.decimals$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{unit}")
}

/// 1, 2 or 5 times a power of ten, so that at most about five steps reach `most`.
fn step_of(most: f64) -> f64 {
    let raw = most / 5.0;
    let power = 10f64.powf(raw.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= raw * (1.0 - 1e-9)).unwrap_or(raw)
}

impl Chart {
    /// The chart as an `<svg>` element; a line of words where there is nothing to draw.
    pub fn svg(&self) -> String {
        let finite = |v: &f64| v.is_finite();
        let points = || self.lines.iter().flat_map(|l| &l.points).filter(|p| p.0 > 0.0 && p.0.is_finite() && p.1.is_finite());
        let bands = self.lines.iter().flat_map(|l| &l.band).map(|b| b.2).filter(finite);
        let most = points().map(|p| p.1).chain(bands).fold(0.0, f64::max);
        let mut xs: Vec<f64> = points().map(|p| p.0).collect();
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        let (Some(&first), Some(&last), true) = (xs.first(), xs.last(), most > 0.0) else {
            return format!("<p>{}: nothing to draw.</p>", escape(&self.title));
        };
        let step = step_of(most);
        let top = (most / step - 1e-9).ceil() * step;
        let at_x = |x: f64| match last > first {
            true => PLOT.left + (x / first).ln() / (last / first).ln() * (PLOT.right - PLOT.left),
            false => (PLOT.left + PLOT.right) / 2.0,
        };
        let at_y = |y: f64| PLOT.bottom - y / top * (PLOT.bottom - PLOT.top);
        let height = PLOT.bottom + 44.0 + LEGEND_ROW * self.lines.len() as f64;
        let mut out = format!(
            "<svg class=\"chart\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" role=\"img\" \
             aria-label=\"{}\">\n<text class=\"title\" x=\"8\" y=\"18\">{}</text>\n",
            escape(&self.title),
            escape(&self.title)
        );
        let _ = writeln!(out, "<text x=\"8\" y=\"34\">{}</text>", escape(&self.y));
        self.axes(&mut out, &xs, (step, top), &at_x, &at_y);
        for (i, line) in self.lines.iter().enumerate() {
            line.draw(&mut out, i, &at_x, &at_y, self);
            let y = PLOT.bottom + 52.0 + LEGEND_ROW * i as f64;
            let dashed = if line.dashed { " dashed" } else { "" };
            let colour = i % COLOURS;
            let _ = writeln!(
                out,
                "<path class=\"line{dashed}\" style=\"stroke:var(--c{colour})\" d=\"M{} {y}h24\"/><text x=\"{}\" y=\"{}\">{}</text>",
                PLOT.left,
                PLOT.left + 32.0,
                y + 4.0,
                escape(&line.name)
            );
        }
        out.push_str("</svg>\n");
        out
    }

    fn axes(&self, out: &mut String, xs: &[f64], (step, top): (f64, f64), at_x: &dyn Fn(f64) -> f64, at_y: &dyn Fn(f64) -> f64) {
        for i in 0..=(top / step).round() as usize {
            let value = step * i as f64;
            let y = at_y(value);
            let _ = writeln!(
                out,
                "<path class=\"grid\" d=\"M{} {y:.1}H{}\"/><text text-anchor=\"end\" x=\"{}\" y=\"{:.1}\">{}</text>",
                PLOT.left,
                PLOT.right,
                PLOT.left - 6.0,
                y + 4.0,
                short(value)
            );
        }
        let mut free = f64::NEG_INFINITY;
        for &x in xs {
            let place = at_x(x);
            let _ = write!(out, "<path class=\"axis\" d=\"M{place:.1} {}v4\"/>", PLOT.bottom);
            // A label needs its room.
            if place >= free {
                let _ = writeln!(out, "<text text-anchor=\"middle\" x=\"{place:.1}\" y=\"{}\">{}</text>", PLOT.bottom + 18.0, short(x));
                free = place + 8.0 + 7.0 * short(x).len() as f64;
            }
        }
        let _ = writeln!(out, "<path class=\"axis\" d=\"M{} {}H{}\"/>", PLOT.left, PLOT.bottom, PLOT.right);
        let middle = (PLOT.left + PLOT.right) / 2.0;
        let _ = writeln!(out, "<text text-anchor=\"middle\" x=\"{middle}\" y=\"{}\">{}</text>", PLOT.bottom + 36.0, escape(&self.x));
    }
}

impl Line {
    fn draw(&self, out: &mut String, index: usize, at_x: &dyn Fn(f64) -> f64, at_y: &dyn Fn(f64) -> f64, chart: &Chart) {
        let colour = index % COLOURS;
        let band: Vec<_> = self.band.iter().filter(|b| b.0 > 0.0 && b.1.is_finite() && b.2.is_finite()).collect();
        if band.len() > 1 {
            let upper = band.iter().map(|b| (b.0, b.2));
            let lower = band.iter().rev().map(|b| (b.0, b.1.max(0.0)));
            let corners: Vec<String> = upper.chain(lower).map(|(x, y)| format!("{:.1},{:.1}", at_x(x), at_y(y))).collect();
            let _ = writeln!(out, "<polygon class=\"band\" style=\"fill:var(--c{colour})\" points=\"{}\"/>", corners.join(" "));
        }
        let mut path = String::new();
        let mut joined = false;
        for &(x, y) in &self.points {
            let there = x > 0.0 && x.is_finite() && y.is_finite();
            if there {
                let _ = write!(path, "{}{:.1} {:.1}", if joined { "L" } else { "M" }, at_x(x), at_y(y));
            }
            joined = there;
        }
        let dashed = if self.dashed { " dashed" } else { "" };
        let _ = writeln!(out, "<path class=\"line{dashed}\" style=\"stroke:var(--c{colour})\" d=\"{path}\"/>");
        for &(x, y) in self.points.iter().filter(|p| !self.dashed && p.0 > 0.0 && p.0.is_finite() && p.1.is_finite()) {
            let _ = writeln!(
                out,
                "<circle style=\"fill:var(--c{colour})\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\"><title>{}: {} {}, {} {}</title></circle>",
                at_x(x),
                at_y(y),
                escape(&self.name),
                short(x),
                escape(&chart.x),
                short(y),
                escape(&chart.y)
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        let cases = [(0.0, "0"), (0.25, "0.25"), (3.0, "3"), (42.123, "42.1"), (9999.0, "9999"), (12_500.0, "12.5k"), (2.5e9, "2.5G")];
        for (value, text) in cases {
            assert_eq!(short(value), text);
        }
        assert_eq!([1.0, 7.0, 26.0, 1e4].map(step_of), [0.2, 2.0, 10.0, 2000.0]);
    }

    #[test]
    fn gaps_bands_and_strange_values_leave_a_sound_drawing() {
        let line = |points: &[(f64, f64)]| Line { name: "a <b> & \"c\"".into(), points: points.to_vec(), ..Line::default() };
        let mut one = line(&[(1.0, 1.0), (2.0, f64::NAN), (4.0, 2.0), (8.0, f64::INFINITY), (0.0, 1.0)]);
        one.band = vec![(1.0, 0.5, 1.5), (4.0, 1.0, 3.0)];
        let chart = Chart { title: "t".into(), x: "devices".into(), y: "tokens/s".into(), lines: vec![one] };
        let svg = chart.svg();
        assert_eq!(svg.matches("<circle").count(), 2);
        let path = svg.lines().find(|l| l.starts_with("<path class=\"line")).unwrap();
        assert!(path.matches('M').count() == 2 && !path.contains('L'), "a gap is not joined: {path}");
        assert!(svg.contains("polygon") && svg.contains("a &lt;b&gt; &amp; &quot;c&quot;"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
        assert!(Chart { lines: vec![line(&[])], ..chart.clone() }.svg().contains("nothing to draw"));
        // One size only: no division by the width of the axis.
        assert!(!Chart { lines: vec![line(&[(8.0, 3.0)])], ..chart }.svg().contains("NaN"));
    }
}
