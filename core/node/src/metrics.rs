//! Counters, gauges and histograms of a node, and their text for Prometheus.
//!
//! Handles are cheap clones of atomics: updating one takes no lock and allocates nothing. Asking the registry twice for the
//! same name and labels gives the same series. A registry holds at most [`SERIES_MAX`] series; more share one that is not
//! shown, so that a label chosen by a client cannot grow it without bound.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use millpond_core::time::Duration;
use parking_lot::Mutex;

/// Series that a registry shows at most.
pub const SERIES_MAX: usize = 4_096;

/// Upper bounds of the buckets of a latency histogram: 50 microseconds to 60 seconds, about 2.2 apart.
const LATENCY_BOUNDS: [Duration; 18] = [
    Duration::from_micros(50),
    Duration::from_micros(100),
    Duration::from_micros(250),
    Duration::from_micros(500),
    Duration::from_millis(1),
    Duration::from_micros(2_500),
    Duration::from_millis(5),
    Duration::from_millis(10),
    Duration::from_millis(25),
    Duration::from_millis(50),
    Duration::from_millis(100),
    Duration::from_millis(250),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_millis(2_500),
    Duration::from_secs(5),
    Duration::from_secs(15),
    Duration::from_secs(60),
];

/// Counts up.
///
/// ```
/// let requests = millpond_node::metrics::Registry::new().counter("requests_total", "Requests served.", &[]);
/// requests.add(2);
/// assert_eq!(requests.value(), 2);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Counter(Arc<AtomicU64>);

impl Counter {
    /// Adds `amount`.
    pub fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    /// The count so far.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Goes up and down.
///
/// ```
/// let running = millpond_node::metrics::Registry::new().gauge("requests_running", "Requests being served.", &[]);
/// let one = running.hold();
/// assert_eq!(running.value(), 1);
/// drop(one);
/// assert_eq!(running.value(), 0);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Gauge(Arc<AtomicU64>);

impl Gauge {
    /// Sets the value.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The value now.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// One more, until the guard is dropped.
    #[must_use = "dropping the guard counts down at once"]
    pub fn hold(&self) -> Holding {
        self.0.fetch_add(1, Ordering::Relaxed);
        Holding(self.clone())
    }
}

/// One unit of a [`Gauge`], as long as it lives.
///
/// ```
/// let gauge = millpond_node::metrics::Gauge::default();
/// drop(gauge.hold());
/// ```
#[derive(Debug)]
pub struct Holding(Gauge);

impl Drop for Holding {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts spans of time by length.
///
/// ```
/// use millpond_core::time::Duration;
/// let registry = millpond_node::metrics::Registry::new();
/// registry.latency("first_token_seconds", "Time to the first token.", &[]).observe(Duration::from_millis(3));
/// assert!(registry.text().contains("first_token_seconds_bucket{le=\"0.005\"} 1\n"));
/// ```
#[derive(Clone, Debug)]
pub struct Latency(Arc<Spans>);

#[derive(Debug, Default)]
struct Spans {
    /// One per bound, not cumulative; longer spans are in `count` alone.
    buckets: [AtomicU64; LATENCY_BOUNDS.len()],
    count: AtomicU64,
    sum_ns: AtomicU64,
}

impl Latency {
    /// Counts one span.
    pub fn observe(&self, span: Duration) {
        if let Some(bucket) = LATENCY_BOUNDS.iter().position(|bound| span <= *bound) {
            self.0.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        }
        self.0.count.fetch_add(1, Ordering::Relaxed);
        self.0.sum_ns.fetch_add(span.as_nanos(), Ordering::Relaxed);
    }

    /// Spans counted so far, and their sum.
    #[must_use]
    pub fn totals(&self) -> (u64, Duration) {
        let sum = Duration::from_nanos(self.0.sum_ns.load(Ordering::Relaxed));
        (self.0.count.load(Ordering::Relaxed), sum)
    }
}

#[derive(Clone, Debug)]
enum Series {
    Counter(Counter),
    Gauge(Gauge),
    Latency(Latency),
}

#[derive(Debug)]
struct Family {
    help: String,
    kind: &'static str,
    /// By the labels in their text form.
    series: BTreeMap<String, Series>,
}

/// All metrics of a node. Clones are handles of the same one.
///
/// ```
/// let registry = millpond_node::metrics::Registry::new();
/// registry.counter("bytes_total", "Bytes moved.", &[("via", "tcp")]).add(7);
/// assert_eq!(
///     registry.text(),
///     "# HELP bytes_total Bytes moved.\n# TYPE bytes_total counter\nbytes_total{via=\"tcp\"} 7\n"
/// );
/// ```
#[derive(Clone, Debug, Default)]
pub struct Registry {
    families: Arc<Mutex<BTreeMap<String, Family>>>,
}

impl Registry {
    /// An empty registry.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The counter `name` with `labels`, made at the first call.
    #[must_use]
    pub fn counter(&self, name: &str, help: &str, labels: &[(&str, &str)]) -> Counter {
        match self.series(name, help, "counter", labels, || Series::Counter(Counter::default())) {
            Some(Series::Counter(counter)) => counter,
            _ => Counter::default(),
        }
    }

    /// The gauge `name` with `labels`, made at the first call.
    #[must_use]
    pub fn gauge(&self, name: &str, help: &str, labels: &[(&str, &str)]) -> Gauge {
        match self.series(name, help, "gauge", labels, || Series::Gauge(Gauge::default())) {
            Some(Series::Gauge(gauge)) => gauge,
            _ => Gauge::default(),
        }
    }

    /// The histogram `name` (its unit is seconds) with `labels`, made at the first call.
    #[must_use]
    pub fn latency(&self, name: &str, help: &str, labels: &[(&str, &str)]) -> Latency {
        match self.series(name, help, "histogram", labels, || Series::Latency(Latency(Arc::default()))) {
            Some(Series::Latency(latency)) => latency,
            _ => Latency(Arc::default()),
        }
    }

    /// The series, or `None` if the registry is full or the name is taken by another kind.
    fn series(
        &self,
        name: &str,
        help: &str,
        kind: &'static str,
        labels: &[(&str, &str)],
        new: impl FnOnce() -> Series,
    ) -> Option<Series> {
        let labels = labels_text(labels);
        let mut families = self.families.lock();
        let total: usize = families.values().map(|family| family.series.len()).sum();
        let family = families.entry(name.to_owned()).or_insert_with(|| Family {
            help: help.replace('\n', " "),
            kind,
            series: BTreeMap::new(),
        });
        if family.kind != kind || (total >= SERIES_MAX && !family.series.contains_key(&labels)) {
            tracing::error!(name, kind, "metrics: the registry is full, or the name has another kind; not shown");
            return None;
        }
        Some(family.series.entry(labels).or_insert_with(new).clone())
    }

    /// Everything in Prometheus's text format 0.0.4, ordered by name and labels.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (name, family) in self.families.lock().iter() {
            let Family { help, kind, series } = family;
            // Writing to a string does not fail.
            let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
            for (labels, series) in series {
                let _ = match series {
                    Series::Counter(counter) => writeln!(text, "{name}{} {}", braced(labels), counter.value()),
                    Series::Gauge(gauge) => writeln!(text, "{name}{} {}", braced(labels), gauge.value()),
                    Series::Latency(latency) => latency_text(&mut text, name, labels, latency),
                };
            }
        }
        text
    }
}

fn latency_text(text: &mut String, name: &str, labels: &str, latency: &Latency) -> std::fmt::Result {
    let comma = if labels.is_empty() { "" } else { "," };
    let mut below = 0;
    for (bound, bucket) in LATENCY_BOUNDS.iter().zip(&latency.0.buckets) {
        below += bucket.load(Ordering::Relaxed);
        writeln!(text, "{name}_bucket{{{labels}{comma}le=\"{}\"}} {below}", bound.as_secs_f64())?;
    }
    let (count, sum) = latency.totals();
    // A span observed while this runs may be in a bucket and not yet in the count: never show fewer than the buckets.
    let count = count.max(below);
    writeln!(text, "{name}_bucket{{{labels}{comma}le=\"+Inf\"}} {count}")?;
    writeln!(text, "{name}_sum{} {}", braced(labels), sum.as_secs_f64())?;
    writeln!(text, "{name}_count{} {count}", braced(labels))
}

fn braced(labels: &str) -> String {
    if labels.is_empty() { String::new() } else { format!("{{{labels}}}") }
}

fn labels_text(labels: &[(&str, &str)]) -> String {
    let one = |(name, value): &(&str, &str)| {
        let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        format!("{name}=\"{value}\"")
    };
    labels.iter().map(one).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_name_and_labels_are_the_same_series() {
        let registry = Registry::new();
        registry.counter("a_total", "A.", &[("x", "1")]).add(1);
        registry.counter("a_total", "A.", &[("x", "1")]).add(1);
        registry.counter("a_total", "A.", &[("x", "2")]).add(5);
        assert!(registry.text().ends_with("a_total{x=\"1\"} 2\na_total{x=\"2\"} 5\n"));
    }

    #[test]
    fn labels_are_escaped() {
        let registry = Registry::new();
        registry.gauge("g", "G.", &[("k", "a\"b\\c\nd")]).set(1);
        assert!(registry.text().contains(r#"g{k="a\"b\\c\nd"} 1"#));
    }

    #[test]
    fn buckets_are_cumulative_and_end_in_the_count() {
        let registry = Registry::new();
        let latency = registry.latency("t_seconds", "T.", &[("role", "x")]);
        for millis in [1, 1, 30, 100_000] {
            latency.observe(Duration::from_millis(millis));
        }
        let text = registry.text();
        assert!(text.contains("t_seconds_bucket{role=\"x\",le=\"0.001\"} 2\n"), "{text}");
        assert!(text.contains("t_seconds_bucket{role=\"x\",le=\"60\"} 3\n"), "{text}");
        assert!(text.contains("t_seconds_bucket{role=\"x\",le=\"+Inf\"} 4\n"), "{text}");
        assert!(text.contains("t_seconds_sum{role=\"x\"} 100.032\n"), "{text}");
    }

    #[test]
    fn a_full_registry_shows_no_more_and_still_counts() {
        let registry = Registry::new();
        for index in 0..=SERIES_MAX {
            registry.counter("c_total", "C.", &[("i", &index.to_string())]).add(1);
        }
        assert_eq!(registry.text().lines().filter(|line| line.starts_with("c_total")).count(), SERIES_MAX);
    }
}
