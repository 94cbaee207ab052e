//! The yardstick over TCP.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::{Mode, Point};

/// A header as long as a small frame's: it carries the operation's number, or `LAST`.
const HEADER_LEN: usize = 64;
const ACK_LEN: usize = 40;
const LAST: u64 = u64::MAX;
const SPIN_MAX: Duration = Duration::from_micros(20);

/// Repeats a call that would block: at once while spinning, then with the kernel's help.
fn patiently<T>(
    stream: &TcpStream,
    mode: Mode,
    flags: rustix::event::PollFlags,
    mut call: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    let mut spin_until = None;
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => return other,
        }
        let now = Instant::now();
        if now >= *spin_until.get_or_insert(now + SPIN_MAX) || mode != Mode::Spin {
            let mut waits = [rustix::event::PollFd::new(stream, flags)];
            rustix::event::poll(&mut waits, None)?;
            spin_until = None;
        }
        core::hint::spin_loop();
    }
}

fn prepare(stream: &TcpStream, mode: Mode) -> io::Result<()> {
    stream.set_nodelay(true)?;
    if rustix::net::sockopt::set_tcp_congestion(stream, "reno").is_err() {
        let _ = rustix::net::sockopt::set_tcp_congestion(stream, "cubic");
    }
    stream.set_nonblocking(mode == Mode::Spin)
}

fn send_all(stream: &TcpStream, mode: Mode, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
    while !slices.is_empty() {
        let sent = patiently(stream, mode, rustix::event::PollFlags::OUT, || (&*stream).write_vectored(slices))?;
        IoSlice::advance_slices(&mut slices, sent);
    }
    Ok(())
}

fn receive_all(stream: &TcpStream, mode: Mode, mut slices: &mut [IoSliceMut<'_>]) -> io::Result<()> {
    while !slices.is_empty() {
        let got = patiently(stream, mode, rustix::event::PollFlags::IN, || (&*stream).read_vectored(slices))?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        IoSliceMut::advance_slices(&mut slices, got);
    }
    Ok(())
}

/// The pieces of operation `number`: neighbours in memory, wrapped at the end of the footprint.
fn pieces(point: &Point, number: u64, memory_len: usize) -> Option<(usize, usize, usize)> {
    let (size, batch) = (usize::try_from(point.size).ok()?, usize::try_from(point.batch).ok()?);
    let slots = u64::try_from(memory_len / size).ok()?;
    let first = usize::try_from(number.checked_mul(point.batch)? % slots).ok()?;
    Some((size, batch, first * size))
}

fn out_of_range() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, super::OUT_OF_RANGE)
}

pub(super) fn measure(stream: &mut TcpStream, point: &Point, memory: &mut [u8]) -> io::Result<(u64, f64, Vec<u64>)> {
    prepare(stream, point.mode)?;
    let result = super::repeat(point, |number| {
        let (size, batch, start) = pieces(point, number, memory.len()).ok_or_else(out_of_range)?;
        let mut header = [0; HEADER_LEN];
        header[..8].copy_from_slice(&number.to_le_bytes());
        let mut slices = Vec::with_capacity(batch + 1);
        slices.push(IoSlice::new(&header));
        let (low, high) = memory.split_at(start);
        slices.extend(high.chunks_exact(size).chain(low.chunks_exact(size)).take(batch).map(IoSlice::new));
        send_all(stream, point.mode, &mut slices)?;
        let mut ack = [0; ACK_LEN];
        receive_all(stream, point.mode, &mut [IoSliceMut::new(&mut ack)])?;
        if ack[..8] == number.to_le_bytes() { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    })?;
    let mut last = [0; HEADER_LEN];
    last[..8].copy_from_slice(&LAST.to_le_bytes());
    stream.set_nonblocking(false)?;
    stream.write_all(&last)?;
    Ok(result)
}

pub(super) fn serve(stream: &mut TcpStream, point: &Point, memory: &mut [u8]) -> io::Result<()> {
    prepare(stream, point.mode)?;
    let mut number = 0u64;
    loop {
        let (size, batch, start) = pieces(point, number, memory.len()).ok_or_else(out_of_range)?;
        let mut header = [0; HEADER_LEN];
        let mut got = 0;
        // Header and data in one call, if they come that way.
        while got < HEADER_LEN {
            let mut slices = into(&mut header, memory, size, batch, start);
            let mut rest = &mut slices[..];
            IoSliceMut::advance_slices(&mut rest, got);
            got += patiently(stream, point.mode, rustix::event::PollFlags::IN, || {
                match (&*stream).read_vectored(rest)? {
                    0 => Err(io::ErrorKind::UnexpectedEof.into()),
                    len => Ok(len),
                }
            })?;
        }
        if header[..8] == LAST.to_le_bytes() {
            break;
        }
        let total = HEADER_LEN + size * batch;
        if got < total {
            let mut slices = into(&mut header, memory, size, batch, start);
            let mut rest = &mut slices[..];
            IoSliceMut::advance_slices(&mut rest, got);
            receive_all(stream, point.mode, rest)?;
        }
        let mut ack = [0; ACK_LEN];
        ack[..8].copy_from_slice(&number.to_le_bytes());
        send_all(stream, point.mode, &mut [IoSlice::new(&ack)])?;
        number += 1;
    }
    stream.set_nonblocking(false)
}

/// A header and the pieces that start at `start`, to be filled.
fn into<'a>(
    header: &'a mut [u8],
    memory: &'a mut [u8],
    size: usize,
    batch: usize,
    start: usize,
) -> Vec<IoSliceMut<'a>> {
    let mut slices = Vec::with_capacity(batch + 1);
    slices.push(IoSliceMut::new(header));
    let (low, high) = memory.split_at_mut(start);
    slices.extend(high.chunks_exact_mut(size).chain(low.chunks_exact_mut(size)).take(batch).map(IoSliceMut::new));
    slices
}
