//! Two processes, a fabric each, one TCP lane between them, driven by their callers without any runtime; and how fast that
//! is, as rows beside those of `--example bare`: `cargo run --release -p millpond-hal --example lane -- write 4096 1`.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, ExitCode};
use std::time::Duration;

use millpond_core::batch::{Extent, RegionId, RegionToken, Rights};
use millpond_core::time::Instant;
use millpond_hal::backend::tcp::{TcpDevice, TcpOptions};
use millpond_hal::bare::{FOOTPRINT_LEN, Meter, Mode, Point, Row, row};
use millpond_hal::contract::{Connection, Lane, LaneSide, LinkId, Turn};
use millpond_hal::fabric::{
    AllocateOptions, Batch, Fabric, FabricEvent, FabricOptions, FabricWake, LinkOptions, PostOptions,
};
use millpond_hal::region::Region;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerocopy::{FromBytes, IntoBytes};

/// How long both sides spin before they wait in the kernel.
const SPIN_MAX: Duration = Duration::from_micros(20);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", addr] => serve(addr),
        ["write", size, batch] => measure("write", size, batch),
        ["read", size, batch] => measure("read", size, batch),
        _ => Err("usage: lane write|read SIZE BATCH".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lane: {error}");
            ExitCode::FAILURE
        }
    }
}

fn now() -> Instant {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Instant::from_nanos(time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs())
}

/// A fabric with one lane over `stream` and one region of the benchmark's footprint.
fn fabric(stream: TcpStream, side: LaneSide, rights: Rights) -> Result<(Fabric, LinkId, Region), Box<dyn Error>> {
    let mut secret = [0; 32];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut secret)?;
    let mut fabric = Fabric::new(FabricOptions::new(secret))?;
    let device = fabric.add_device(Box::new(TcpDevice::new(TcpOptions::default())?))?;
    let region = fabric.allocate(FOOTPRINT_LEN, AllocateOptions::raw(rights))?;
    for offset in (0..FOOTPRINT_LEN).step_by(4096) {
        region.write_at(offset, &[1; 4096])?;
    }
    let lane = Lane { side, generation: 1, incarnation: 1, peer_incarnation: 1 };
    let connection = Connection::Stream { fd: stream.into(), read_ahead: Vec::new(), lane };
    let link = fabric.open(now(), device, connection, LinkOptions::default())?;
    Ok((fabric, link, region))
}

/// Polls until `done`; spins a little, then waits in the kernel.
fn drive(fabric: &mut Fabric, mut done: impl FnMut(&mut Fabric) -> bool) -> Result<(), Box<dyn Error>> {
    let mut worked_at = std::time::Instant::now();
    while !done(fabric) {
        if fabric.poll(now()) == Turn::Worked {
            worked_at = std::time::Instant::now();
        } else if worked_at.elapsed() > SPIN_MAX
            && let FabricWake::Within(within) = fabric.arm(now())
        {
            let within = within.map(|span| Timespec { tv_sec: 0, tv_nsec: (span.as_nanos() % 1_000_000_000) as _ });
            poll(&mut [PollFd::from_borrowed_fd(fabric.wake_fd(), PollFlags::IN)], within.as_ref())?;
            worked_at = std::time::Instant::now();
        }
    }
    Ok(())
}

fn serve(addr: &str) -> Result<(), Box<dyn Error>> {
    let mut stream = TcpStream::connect(addr)?;
    let rights = Rights::LOCAL | Rights::REMOTE_READ | Rights::REMOTE_WRITE;
    let (mut fabric, _, region) = fabric(TcpStream::connect(addr)?, LaneSide::Dialed, rights)?;
    let meter = Meter::start();
    stream.write_all(fabric.expose(&region)?.as_bytes())?;
    drive(&mut fabric, |fabric| matches!(fabric.next_event(), Some(FabricEvent::LinkDown { .. })))?;
    let cpu_nanos = Duration::from_secs_f64(meter.own_s()).as_nanos();
    stream.write_all(&u64::try_from(cpu_nanos)?.to_le_bytes())?;
    Ok(())
}

fn measure(op: &'static str, size: &str, batch: &str) -> Result<(), Box<dyn Error>> {
    let point = Point { mode: Mode::Spin, size: size.parse()?, batch: batch.parse()?, time: Duration::from_secs(1) };
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut child =
        Command::new(std::env::current_exe()?).args(["serve", &listener.local_addr()?.to_string()]).spawn()?;
    let mut control = listener.accept()?.0;
    let (mut fabric, link, region) = fabric(listener.accept()?.0, LaneSide::Accepted, Rights::LOCAL)?;
    let mut token = [0; 64];
    control.read_exact(&mut token)?;
    let remote = fabric.attach(RegionToken::read_from_bytes(&token).map_err(|_| "not a token")?)?;
    let meter = Meter::start();
    let (mut latencies, mut number) = (Vec::new(), 0u64);
    let mut spare = Some(Batch::new());
    while meter.elapsed_s() < point.time.as_secs_f64() * 1.1 {
        let started = std::time::Instant::now();
        let batch = filled(spare.take().unwrap_or_default(), &point, number, op, &region, remote);
        let ticket = fabric.post(now(), link, batch, PostOptions::default()).map_err(|refused| refused.reason)?;
        drive(&mut fabric, |fabric| fabric.is_finished(&ticket))?;
        let completion = fabric.take(ticket).map_err(|_| "the ticket is not finished")?;
        if !completion.is_done() {
            return Err(format!("{:?}", completion.overall()).into());
        }
        spare = Some(completion.into_batch());
        number += 1;
        // The first tenth warms up.
        if meter.elapsed_s() > point.time.as_secs_f64() * 0.1 {
            latencies.push(u64::try_from(started.elapsed().as_nanos())?);
        }
    }
    let ops = latencies.len() as u64;
    let elapsed_s = latencies.iter().sum::<u64>() as f64 / 1e9;
    let own_s = meter.own_s();
    fabric.close_link(link);
    drive(&mut fabric, |fabric| matches!(fabric.next_event(), Some(FabricEvent::LinkDown { .. })))?;
    let mut child_nanos = [0; 8];
    control.read_exact(&mut child_nanos)?;
    child.wait()?;
    let measured_s = own_s + u64::from_le_bytes(child_nanos) as f64 / 1e9;
    let gb = number as f64 * point.op_len() as f64 / 1e9;
    let row = row("millpond-tcp", op, &point, ops, elapsed_s, &mut latencies);
    println!(
        "{}",
        Row { cpu_s_per_gb: Some(measured_s / gb), other_cores: meter.other_cores(measured_s), ..row }.to_json()
    );
    Ok(())
}

/// The batch of operation `number`, rotating over the footprint on both sides.
fn filled(mut batch: Batch, point: &Point, number: u64, op: &str, region: &Region, remote: RegionId) -> Batch {
    batch.clear();
    let slots = FOOTPRINT_LEN / point.size;
    for index in 0..point.batch {
        let offset = (number * point.batch + index) % slots * point.size;
        let (here, there) = (region.extent(offset, point.size), Extent::new(remote, offset, point.size));
        if op == "write" {
            batch.write_raw(here, there)
        } else {
            batch.read_raw(there, here)
        };
    }
    batch
}
