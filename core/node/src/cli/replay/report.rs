//! A page for a browser that needs nothing else: text, charts and tables in one file.

use std::fmt::Write as _;

use super::Facts;
use super::chart::{Chart, escaped, number};

/// Figures in rows; the first of each is its name.
#[derive(Clone, Debug)]
pub(super) struct Table {
    pub(super) title: String,
    pub(super) head: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
}

/// A question and what was found.
#[derive(Clone, Debug)]
pub(super) struct Section {
    pub(super) heading: &'static str,
    /// Paragraphs that say how to read the chart.
    pub(super) text: Vec<String>,
    /// Several have their titles above them.
    pub(super) charts: Vec<Chart>,
    pub(super) tables: Vec<Table>,
}

impl Table {
    /// For a terminal: the names to the left, the figures to the right of their columns.
    pub(super) fn text(&self) -> String {
        let lines = || std::iter::once(&self.head).chain(&self.rows);
        let width =
            |column: usize| lines().filter_map(|line| Some(line.get(column)?.chars().count())).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.head.len()).map(width).collect();
        let mut text = format!("{}\n", self.title);
        for line in lines() {
            for (at, (figure, width)) in line.iter().zip(&widths).enumerate() {
                let _ = match at {
                    0 => write!(text, "{figure:<width$}"),
                    _ => write!(text, "  {figure:>width$}"),
                };
            }
            text.push('\n');
        }
        text
    }

    fn html(&self) -> String {
        let mut html = format!("<table><caption>{}</caption>\n", escaped(&self.title));
        for (at, line) in std::iter::once(&self.head).chain(&self.rows).enumerate() {
            html.push_str("<tr>");
            for (column, figure) in line.iter().enumerate() {
                let tag = if at == 0 || column == 0 { "th" } else { "td" };
                let _ = write!(html, "<{tag}>{}</{tag}>", escaped(figure));
            }
            html.push_str("</tr>\n");
        }
        html.push_str("</table>\n");
        html
    }
}

const STYLE: &str = "\
body{font:16px/1.5 system-ui,sans-serif;max-width:58rem;margin:2rem auto;padding:0 1rem;color:#1b1b1b;background:#fff}
h1{font-size:1.6rem;margin-bottom:.2rem}h2{font-size:1.25rem;margin-top:2.5rem}h3{font-size:1rem;margin-bottom:0}
svg{width:100%;height:auto;font:13px system-ui,sans-serif}
.grid{stroke:currentColor;opacity:.15}.tick,.label,.key{fill:currentColor}.tick{font-size:12px}
.line{fill:none;stroke-width:2.2}
.scroll{overflow-x:auto}table{border-collapse:collapse;margin:1rem 0;font-size:.85rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:.3rem 0}
th,td{padding:.2rem .4rem;text-align:right;border-bottom:1px solid #8884;white-space:nowrap}th:first-child{text-align:left}
tr:first-child th{white-space:normal;vertical-align:bottom}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem}dd{margin:0}
@media(prefers-color-scheme:dark){body{color:#e8e8e8;background:#161616}}";

/// The page about a trace.
pub(super) fn page(facts: &Facts, sections: &[Section]) -> String {
    let name = escaped(&facts.name);
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>Replay of {name}</title>\n\
         <style>\n{STYLE}\n</style>\n<h1>What would become of these requests?</h1>\n"
    );
    html.push_str("<dl>\n");
    for (term, value) in [
        ("trace", name),
        ("requests", format!("{} in {} s", number(facts.requests as f64), number(facts.seconds.round()))),
        ("prompt", format!("{} tokens on average", number(facts.input_mean.round()))),
        ("answer", format!("{} tokens on average", number(facts.output_mean.round()))),
        (
            "blocks",
            format!("{} in all prompts, {} different", number(facts.blocks as f64), number(f64::from(facts.distinct))),
        ),
    ] {
        let _ = writeln!(html, "<dt>{term}</dt><dd>{value}</dd>");
    }
    html.push_str("</dl>\n");
    for section in sections {
        let _ = writeln!(html, "<h2>{}</h2>", escaped(section.heading));
        for paragraph in &section.text {
            let _ = writeln!(html, "<p>{}</p>", escaped(paragraph));
        }
        for chart in &section.charts {
            if section.charts.len() > 1 {
                let _ = writeln!(html, "<h3>{}</h3>", escaped(&chart.title));
            }
            html.push_str(&chart.svg());
        }
        for table in &section.tables {
            let _ = write!(html, "<div class=\"scroll\">{}</div>", table.html());
        }
    }
    html.push_str("</html>\n");
    html
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest() {
        let owned = |line: [&str; 3]| line.map(str::to_owned).to_vec();
        let rows = vec![owned(["lru", "4.45", "36.37"]), owned(["s3-fifo", "5.6", "36.2"])];
        let table = Table { title: "hits".to_owned(), head: owned(["", "1,000", "2"]), rows };
        assert_eq!(table.text(), "hits\n         1,000      2\nlru       4.45  36.37\ns3-fifo    5.6   36.2\n");
        assert!(table.html().contains("<tr><th>lru</th><td>4.45</td><td>36.37</td></tr>"));
    }
}
