//! What the machine can do at best: the smallest program that moves bytes between two processes, to measure ours against.
//!
//! One process writes, the other answers; sizes, depth and footprint are those of the transports' own benchmark. There are
//! no headers to parse, no checks, no tables: over TCP one `writev` and one `readv` per operation, over shared memory one
//! copy. It is a yardstick, not a transport. Three modes: both sides block in the kernel; both sides spin for at most 20 us
//! before they do; shared memory. Peers on one host get the same congestion control as the `tcp` backend's lanes.

mod shm;
mod tcp;

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// Bytes that a point rotates over on each side, so that caches do not flatter it.
pub const FOOTPRINT_LEN: u64 = 256 << 20;
/// Operations per point, at least, however long they take.
const OPS_MIN: usize = 20;
/// Operations whose latencies are kept.
const SAMPLES_MAX: usize = 1 << 20;

/// How the two processes wait for each other.
///
/// ```
/// use millpond_hal::bare::Mode;
/// assert_eq!("spin".parse(), Ok(Mode::Spin));
/// assert!("fast".parse::<Mode>().unwrap_err().to_string().contains("blocking, spin, shm"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// TCP, blocking system calls.
    Blocking,
    /// TCP, both sides spin for at most 20 us before they block.
    Spin,
    /// Shared memory, the target copies, both sides spin.
    Shm,
}

/// No such mode.
///
/// Example: [`Mode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no such mode; choose one of blocking, spin, shm")]
pub struct UnknownMode;

impl core::str::FromStr for Mode {
    type Err = UnknownMode;

    fn from_str(text: &str) -> Result<Self, UnknownMode> {
        match text {
            "blocking" => Ok(Self::Blocking),
            "spin" => Ok(Self::Spin),
            "shm" => Ok(Self::Shm),
            _ => Err(UnknownMode),
        }
    }
}

impl Mode {
    const fn code(self) -> u64 {
        match self {
            Self::Blocking => 0,
            Self::Spin => 1,
            Self::Shm => 2,
        }
    }

    const fn peer(self) -> &'static str {
        match self {
            Self::Blocking => "bare-blocking",
            Self::Spin => "bare-spin",
            Self::Shm => "bare-shm",
        }
    }
}

/// One measurement: `batch` pieces of `size` bytes per operation, one operation at a time.
///
/// ```
/// use millpond_hal::bare::{Mode, Point};
/// let point = Point { mode: Mode::Spin, size: 4096, batch: 128, time: std::time::Duration::from_secs(1) };
/// assert_eq!(point.op_len(), 512 << 10);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// How both sides wait.
    pub mode: Mode,
    /// Bytes of a piece; 1 to [`FOOTPRINT_LEN`].
    pub size: u64,
    /// Pieces per operation; 1 to 1,024, together at most [`FOOTPRINT_LEN`].
    pub batch: u64,
    /// How long to measure.
    pub time: Duration,
}

impl Point {
    /// Bytes of one operation.
    #[must_use]
    pub const fn op_len(&self) -> u64 {
        self.size.saturating_mul(self.batch)
    }

    fn checked(self) -> io::Result<Self> {
        let fits = self.size > 0 && (1..=1024).contains(&self.batch) && self.op_len() <= FOOTPRINT_LEN;
        if fits { Ok(self) } else { Err(io::Error::new(io::ErrorKind::InvalidInput, OUT_OF_RANGE)) }
    }
}

const OUT_OF_RANGE: &str =
    "a point needs a size of 1 byte to 256 MiB, a batch of 1 to 1,024, and both together at most 256 MiB";

/// What a point came to, as the benchmarks of all transports report it.
///
/// ```
/// use millpond_hal::bare::Row;
/// let row = Row { peer: "bare-spin", op: "write", size: 4096, threads: 1, batch: 1, gbps: 0.4, ops_s: 1e5,
///     p50_us: 10.0, p99_us: 14.0, cpu_s_per_gb: Some(5.0), other_cores: None };
/// assert!(row.to_json().starts_with(r#"{"peer":"bare-spin","op":"write","size":4096,"threads":1,"batch":1,"GBps":0.4"#));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    /// Whose row it is.
    pub peer: &'static str,
    /// What was done.
    pub op: &'static str,
    /// Bytes of a piece.
    pub size: u64,
    /// Threads on the initiating side.
    pub threads: u32,
    /// Pieces per operation.
    pub batch: u64,
    /// 10^9 bytes per second.
    pub gbps: f64,
    /// Operations per second.
    pub ops_s: f64,
    /// Median time of an operation.
    pub p50_us: f64,
    /// 99th percentile of it.
    pub p99_us: f64,
    /// CPU seconds of both sides per 10^9 bytes.
    pub cpu_s_per_gb: Option<f64>,
    /// Cores that others used meanwhile: above 0.2 the row is no result.
    pub other_cores: Option<f64>,
}

impl Row {
    /// One line of JSON.
    #[must_use]
    pub fn to_json(&self) -> String {
        let optional = |value: Option<f64>| value.map_or_else(|| "null".to_owned(), |value| format!("{value:.4}"));
        format!(
            r#"{{"peer":"{}","op":"{}","size":{},"threads":{},"batch":{},"GBps":{},"ops_s":{:.1},"p50_us":{:.2},"p99_us":{:.2},"cpu_s_per_GB":{},"other_cores":{}}}"#,
            self.peer,
            self.op,
            self.size,
            self.threads,
            self.batch,
            (self.gbps * 10_000.0).round() / 10_000.0,
            self.ops_s,
            self.p50_us,
            self.p99_us,
            optional(self.cpu_s_per_gb),
            optional(self.other_cores)
        )
    }
}

/// CPU time and wall time from a start on, to tell how much a measurement and how much others used.
///
/// ```
/// let meter = millpond_hal::bare::Meter::start();
/// assert!(meter.elapsed_s() >= 0.0 && meter.own_s() >= 0.0);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Meter {
    started: Instant,
    own_s: f64,
    machine_s: Option<f64>,
}

impl Meter {
    /// Starts counting.
    #[must_use]
    pub fn start() -> Self {
        Self { started: Instant::now(), own_s: own_cpu_s(), machine_s: machine_cpu_s() }
    }

    /// Seconds since the start.
    #[must_use]
    pub fn elapsed_s(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// CPU seconds that this process used since the start.
    #[must_use]
    pub fn own_s(&self) -> f64 {
        own_cpu_s() - self.own_s
    }

    /// Cores that processes other than the measured ones used, given the CPU seconds of all measured ones.
    #[must_use]
    pub fn other_cores(&self, measured_s: f64) -> Option<f64> {
        let machine_s = machine_cpu_s()? - self.machine_s?;
        Some(((machine_s - measured_s) / self.elapsed_s()).max(0.0))
    }
}

fn own_cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// User and system time of all cores; `None` where /proc does not say.
fn machine_cpu_s() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    let fields = text.lines().next()?.split_whitespace().skip(1).filter_map(|field| field.parse::<u64>().ok());
    // User, nice, system. Interrupts are left out: on loopback they are the kernel working for whoever is measured.
    let busy: u64 = fields.take(3).sum();
    Some(busy as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// Makes a row of the latencies of operations in nanoseconds, in any order.
#[must_use]
pub fn row(
    peer: &'static str,
    op: &'static str,
    point: &Point,
    ops: u64,
    elapsed_s: f64,
    latencies: &mut [u64],
) -> Row {
    latencies.sort_unstable();
    let at = |percent: usize| latencies.get((latencies.len() * percent / 100).min(latencies.len().max(1) - 1));
    let us = |percent| at(percent).map_or(0.0, |nanos| *nanos as f64 / 1e3);
    let ops_s = ops as f64 / elapsed_s;
    Row {
        peer,
        op,
        size: point.size,
        threads: 1,
        batch: point.batch,
        gbps: ops_s * point.op_len() as f64 / 1e9,
        ops_s,
        p50_us: us(50),
        p99_us: us(99),
        cpu_s_per_gb: None,
        other_cores: None,
    }
}

/// The other process's part: connects to `addr` and answers until the connection ends. Run it in a process of its own.
pub fn serve(addr: &str) -> io::Result<()> {
    let mut control = TcpStream::connect(addr)?;
    control.set_nodelay(true)?;
    let mut memory = Vec::new();
    loop {
        let mut point = [0; 32];
        match control.read_exact(&mut point) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        }
        let word = |index: usize| u64::from_le_bytes(point[index * 8..index * 8 + 8].try_into().unwrap_or_default());
        let mode = [Mode::Blocking, Mode::Spin, Mode::Shm].into_iter().find(|mode| mode.code() == word(0));
        let mode = mode.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, UnknownMode))?;
        let point = Point { mode, size: word(1), batch: word(2), time: Duration::ZERO }.checked()?;
        memory.resize(usize::try_from(FOOTPRINT_LEN).map_err(io::Error::other)?, 1);
        let meter = Meter::start();
        match mode {
            Mode::Shm => shm::serve(&mut control, &point, &mut memory)?,
            Mode::Blocking | Mode::Spin => tcp::serve(&mut control, &point, &mut memory)?,
        }
        let cpu_nanos = Duration::from_secs_f64(meter.own_s().max(0.0)).as_nanos();
        control.write_all(&u64::try_from(cpu_nanos).unwrap_or(0).to_le_bytes())?;
    }
}

/// Measures `points` against a second process, which `command` says how to start: it must call [`serve`] with the address
/// it is given. Each row goes to `each` as soon as it is known.
pub fn run(points: &[Point], command: impl FnOnce(&str) -> Command, mut each: impl FnMut(Row)) -> io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut child = Ended(command(&listener.local_addr()?.to_string()).spawn()?);
    let mut control = accept_from(&listener, &mut child.0)?;
    control.set_nodelay(true)?;
    let mut memory = vec![1; usize::try_from(FOOTPRINT_LEN).map_err(io::Error::other)?];
    for point in points {
        let point = point.checked()?;
        let words = [point.mode.code(), point.size, point.batch, 0];
        control.write_all(&words.map(u64::to_le_bytes).concat())?;
        each(measure(&mut control, &point, &mut memory)?);
    }
    Ok(())
}

fn measure(control: &mut TcpStream, point: &Point, memory: &mut [u8]) -> io::Result<Row> {
    let meter = Meter::start();
    let (ops, elapsed_s, mut latencies) = match point.mode {
        Mode::Shm => shm::measure(control, point)?,
        Mode::Blocking | Mode::Spin => tcp::measure(control, point, memory)?,
    };
    let mut child_nanos = [0; 8];
    control.read_exact(&mut child_nanos)?;
    let measured_s = meter.own_s() + u64::from_le_bytes(child_nanos) as f64 / 1e9;
    let row = row(point.mode.peer(), "write", point, ops, elapsed_s, &mut latencies);
    let gb = ops as f64 * point.op_len() as f64 / 1e9;
    Ok(Row { cpu_s_per_gb: Some(measured_s / gb), other_cores: meter.other_cores(measured_s), ..row })
}

/// Repeats `op` for the point's time and says how often, how long in all and each.
fn repeat(point: &Point, mut op: impl FnMut(u64) -> io::Result<()>) -> io::Result<(u64, f64, Vec<u64>)> {
    let mut latencies = Vec::with_capacity(SAMPLES_MAX);
    let warm_until = Instant::now() + point.time / 10;
    let mut number = 0;
    while number < 3 || Instant::now() < warm_until {
        op(number)?;
        number += 1;
    }
    let (first, started) = (number, Instant::now());
    let mut before = started;
    while latencies.len() < OPS_MIN || before - started < point.time {
        op(number)?;
        number += 1;
        let now = Instant::now();
        if latencies.len() < SAMPLES_MAX {
            latencies.push(u64::try_from((now - before).as_nanos()).unwrap_or(u64::MAX));
        }
        before = now;
    }
    Ok((number - first, started.elapsed().as_secs_f64(), latencies))
}

/// Waits for the second process, but not if it ended before it connected.
fn accept_from(listener: &TcpListener, child: &mut Child) -> io::Result<TcpStream> {
    listener.set_nonblocking(true)?;
    let give_up = Instant::now() + Duration::from_secs(10);
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            Err(_) => {}
        }
        if let Some(status) = child.try_wait()? {
            return Err(io::Error::other(format!("the second process ended before it connected ({status})")));
        }
        if Instant::now() > give_up {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the second process did not connect within 10 s"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A process that does not outlive the measurement.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
