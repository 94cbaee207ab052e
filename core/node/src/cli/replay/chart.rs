//! A line chart as SVG text that stands by itself: axes with round ticks, a legend, values on hovering.

use std::fmt::Write as _;

/// How an axis is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    /// Evenly, from 0.
    Linear,
    /// Every factor of ten takes the same room.
    Logarithmic,
}

/// An axis.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    /// What is along it, with its unit.
    pub(super) label: &'static str,
    pub(super) scale: Scale,
}

/// A line.
#[derive(Clone, Debug)]
pub(super) struct Series {
    pub(super) name: String,
    /// From left to right.
    pub(super) points: Vec<(f64, f64)>,
    /// A bound rather than something that was found: drawn dashed.
    pub(super) is_bound: bool,
}

/// A chart; empty ones draw axes only.
#[derive(Clone, Debug)]
pub(super) struct Chart {
    /// For those who hear the page instead of seeing it.
    pub(super) title: String,
    pub(super) x: Axis,
    pub(super) y: Axis,
    pub(super) series: Vec<Series>,
}

const WIDTH: f64 = 920.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 650.0;
const TOP: f64 = 16.0;
const BOTTOM: f64 = 384.0;
/// Told apart also by those who do not see all colours (after Okabe and Ito).
const COLOURS: [&str; 8] = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c6d31", "#6a51a3"];
/// About how many ticks an axis has.
const TICKS: f64 = 6.0;

/// The part of a scale that is shown, and where on the paper.
struct Span {
    low: f64,
    high: f64,
    scale: Scale,
    start: f64,
    end: f64,
}

impl Span {
    fn new(axis: &Axis, values: impl Iterator<Item = f64>, [start, end]: [f64; 2]) -> Self {
        let (low, high) = values.fold((f64::INFINITY, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = match axis.scale {
            Scale::Linear => (0.0, if high > 0.0 { high * 1.05 } else { 1.0 }),
            Scale::Logarithmic if high > 0.0 && low < high => (low.max(high / 1e6), high),
            Scale::Logarithmic => (high.max(1.0) / 10.0, high.max(1.0)),
        };
        Self { low, high, scale: axis.scale, start, end }
    }

    fn place(&self, value: f64) -> f64 {
        let part = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Logarithmic => (value.max(self.low) / self.low).ln() / (self.high / self.low).ln(),
        };
        self.start + part * (self.end - self.start)
    }

    fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let rough = (self.high - self.low) / TICKS;
                let power = 10_f64.powf(rough.log10().floor());
                let step = [1.0, 2.0, 5.0, 10.0].map(|part| part * power).into_iter().find(|step| *step >= rough);
                let step = step.unwrap_or(rough);
                (0..).map(|at| f64::from(at) * step).take_while(|tick| *tick <= self.high).collect()
            }
            Scale::Logarithmic => {
                let first = self.low.log10().floor();
                let decades = (0..8).map(|decade| 10_f64.powf(first + f64::from(decade)));
                let ticks = decades.flat_map(|decade| [1.0, 2.0, 5.0].map(|part| part * decade));
                ticks.filter(|tick| (self.low * 0.999..=self.high * 1.001).contains(tick)).collect()
            }
        }
    }
}

impl Chart {
    /// The chart as an `<svg>` element.
    pub(super) fn svg(&self) -> String {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let x = Span::new(&self.x, points().map(|point| point.0), [LEFT, RIGHT]);
        let y = Span::new(&self.y, points().map(|point| point.1), [BOTTOM, TOP]);
        // Room for the names of all lines.
        let height = HEIGHT.max(TOP + LEGEND_STEP * (count(self.series.len()) + 1.0));
        let mut svg =
            format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{}\">\n", escaped(&self.title));
        self.axes(&x, &y, &mut svg);
        for (at, series) in self.series.iter().enumerate() {
            draw(series, at, &x, &y, &mut svg);
        }
        svg.push_str("</svg>\n");
        svg
    }

    fn axes(&self, x: &Span, y: &Span, svg: &mut String) {
        for tick in y.ticks() {
            let (at, text) = (y.place(tick), tick_text(tick));
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
                 <text class=\"tick\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
                LEFT - 8.0,
                at + 4.0
            );
        }
        for tick in x.ticks() {
            let (at, text) = (x.place(tick), tick_text(tick));
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{BOTTOM}\"/>\
                 <text class=\"tick\" x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{text}</text>",
                BOTTOM + 18.0
            );
        }
        let (middle_x, middle_y) = (f64::midpoint(LEFT, RIGHT), f64::midpoint(TOP, BOTTOM));
        let _ = writeln!(
            svg,
            "<text class=\"label\" x=\"{middle_x}\" y=\"{}\" text-anchor=\"middle\">{}</text>\
             <text class=\"label\" transform=\"translate(16 {middle_y}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            BOTTOM + 44.0,
            escaped(self.x.label),
            escaped(self.y.label)
        );
    }
}

fn draw(series: &Series, at: usize, x: &Span, y: &Span, svg: &mut String) {
    let colour = if series.is_bound { "currentColor" } else { COLOURS[at % COLOURS.len()] };
    let dash = match at / COLOURS.len() {
        _ if series.is_bound => " stroke-dasharray=\"6 4\"",
        0 => "",
        // Colours come again.
        _ => " stroke-dasharray=\"2 3\"",
    };
    let places: Vec<String> =
        series.points.iter().map(|&(px, py)| format!("{:.1},{:.1}", x.place(px), y.place(py))).collect();
    let name = escaped(&series.name);
    let _ = writeln!(
        svg,
        "<polyline class=\"line\" stroke=\"{colour}\"{dash} points=\"{}\"><title>{name}</title></polyline>",
        places.join(" ")
    );
    // Of a line with many points, the points are not told apart anyway.
    for &(px, py) in series.points.iter().filter(|_| series.points.len() <= MARKED_POINTS_MAX) {
        let _ = writeln!(
            svg,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\" fill=\"{colour}\"><title>{name}: {} at {}</title></circle>",
            x.place(px),
            y.place(py),
            number(py),
            number(px)
        );
    }
    let legend = TOP + 12.0 + LEGEND_STEP * count(at);
    let _ = writeln!(
        svg,
        "<line class=\"line\" stroke=\"{colour}\"{dash} x1=\"{}\" x2=\"{}\" y1=\"{legend}\" y2=\"{legend}\"/>\
         <text class=\"key\" x=\"{}\" y=\"{}\">{name}</text>",
        RIGHT + 16.0,
        RIGHT + 44.0,
        RIGHT + 52.0,
        legend + 4.0
    );
}

const MARKED_POINTS_MAX: usize = 20;
/// From one name to the next.
const LEGEND_STEP: f64 = 22.0;

fn count(lines: usize) -> f64 {
    f64::from(u32::try_from(lines).unwrap_or(0))
}

/// A number at an axis: without zeros at its end.
fn tick_text(value: f64) -> String {
    let text = number(value);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// A number as people write it: thousands apart, no more digits than it needs.
pub(super) fn number(value: f64) -> String {
    let decimals = match value.abs() {
        100.0.. => 0,
        _ if value == value.round() => 0,
        10.0.. => 1,
        1.0.. => 2,
        _ => 3,
    };
    let text = format!("{value:.decimals$}");
    let (sign, text) = text.strip_prefix('-').map_or(("", text.as_str()), |rest| ("-", rest));
    let (whole, fraction) = text.split_once('.').map_or((text, None), |(whole, rest)| (whole, Some(rest)));
    let mut grouped = String::from(sign);
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    match fraction {
        Some(fraction) => format!("{grouped}.{fraction}"),
        None => grouped,
    }
}

/// Text in HTML.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(series: Vec<Series>) -> Chart {
        let x = Axis { label: "blocks", scale: Scale::Logarithmic };
        Chart { title: "a <b>".to_owned(), x, y: Axis { label: "%", scale: Scale::Linear }, series }
    }

    #[test]
    fn numbers_are_grouped_and_short() {
        let shown = [1_234_567.0, 1_000.0, 999.4, 36.64, 20.0, 0.25, 1.063, -1_234.0].map(number);
        assert_eq!(shown, ["1,234,567", "1,000", "999", "36.6", "20", "0.250", "1.06", "-1,234"]);
    }

    #[test]
    fn the_ends_of_a_scale_are_the_ends_of_the_paper_and_ticks_are_round() {
        let axis = |scale| Axis { label: "", scale };
        let log = Span::new(&axis(Scale::Logarithmic), [1_000.0, 100_000.0].into_iter(), [64.0, 740.0]);
        assert_eq!((log.place(1_000.0), log.place(10_000.0).round(), log.place(100_000.0)), (64.0, 402.0, 740.0));
        let ticks = [1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5];
        for (found, expected) in log.ticks().into_iter().zip(ticks) {
            assert!((found / expected - 1.0).abs() < 1e-9, "{found}");
        }
        let linear = Span::new(&axis(Scale::Linear), [36.0].into_iter(), [384.0, 16.0]);
        assert_eq!(linear.ticks(), [0.0, 10.0, 20.0, 30.0]);
        assert_eq!([0.5, 1.5, 2_000.0, 0.25, 0.0].map(tick_text), ["0.5", "1.5", "2,000", "0.25", "0"]);
    }

    #[test]
    fn a_chart_is_well_formed_even_when_there_is_nothing_or_one_point_to_show() {
        let series = |points| Series { name: "lru & <co>".to_owned(), points, is_bound: false };
        for series in [vec![], vec![series(vec![])], vec![series(vec![(5.0, 0.0)])], vec![series(vec![(1.0, 2.0); 90])]]
        {
            let svg = chart(series).svg();
            assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"), "{svg}");
            assert!(!svg.contains("NaN") && !svg.contains("inf") && !svg.contains("<co>"), "{svg}");
            assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
        }
    }
}
