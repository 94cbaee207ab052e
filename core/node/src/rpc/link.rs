//! The frames of one connection: what waits to be sent, what comes in, and whether the peer lives.
//!
//! One task per connection reads, writes and watches. Urgent frames (pings, cancels, credit) overtake bulk ones, so that
//! liveness does not hang on how much is to be sent. Not aware of calls: that is `server` and `channel`.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, Waker};

use futures::future::{self, Either};
use futures::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use millpond_core::wire::message::rpc::{Frame, HEADER_LEN, Head};
use parking_lot::Mutex;

use super::{Limits, RpcError};
use crate::runtime::{Runtime, by};

/// Urgent frames that may wait; a peer that makes us owe more does not play by the rules.
const URGENT_MAX: usize = 8192;

/// Bodies up to this length are copied next to their headers, so that a batch of them is one system call.
const COPY_LEN_MAX: usize = 16 << 10;

/// Bytes that one system call gathers.
const BATCH_LEN: usize = 64 << 10;

const READ_LEN: usize = 16 << 10;

/// A frame on its way out.
#[derive(Debug)]
struct Outgoing {
    frame: Frame,
    body: Vec<u8>,
}

impl Outgoing {
    fn len(&self) -> usize {
        HEADER_LEN + self.body.len()
    }
}

#[derive(Debug, Default)]
struct Queues {
    urgent: VecDeque<Frame>,
    bulk: VecDeque<Outgoing>,
    bulk_len: usize,
    writer: Option<Waker>,
    /// Senders that wait for room, and whoever waits for the queues to be empty.
    waiting: Vec<Waker>,
    /// Frames taken by the writer are on their way to the socket.
    is_writing: bool,
    is_finishing: bool,
    is_closed: bool,
}

/// The connection is gone, so nothing can be sent.
#[derive(Debug)]
pub(super) struct Closed;

/// Frames that wait to be sent.
#[derive(Debug)]
pub(super) struct Outbox {
    queues: Mutex<Queues>,
    len_max: usize,
}

impl Outbox {
    pub(super) fn new(limits: &Limits) -> Self {
        Self { queues: Mutex::default(), len_max: limits.outbox_len_max }
    }

    /// Sends a frame without a body before all others.
    ///
    /// # Errors
    /// The connection is gone, or the peer made us owe it too much, which is its fault.
    pub(super) fn urge(&self, frame: Frame) -> Result<(), Closed> {
        let mut queues = self.queues.lock();
        if queues.is_closed || queues.urgent.len() >= URGENT_MAX {
            return Err(Closed);
        }
        queues.urgent.push_back(frame);
        wake(queues.writer.take());
        Ok(())
    }

    /// Sends a frame after those before it; waits for room.
    pub(super) async fn send(&self, frame: Frame, body: Vec<u8>) -> Result<(), Closed> {
        let mut outgoing = Some(Outgoing { frame, body });
        poll_fn(|context| {
            let mut queues = self.queues.lock();
            if queues.is_closed {
                return Poll::Ready(Err(Closed));
            }
            if queues.bulk_len >= self.len_max {
                queues.wait(context.waker());
                return Poll::Pending;
            }
            if let Some(outgoing) = outgoing.take() {
                queues.bulk_len += outgoing.len();
                queues.bulk.push_back(outgoing);
                wake(queues.writer.take());
            }
            Poll::Ready(Ok(()))
        })
        .await
    }

    /// Takes the request of `call` back if it was not sent yet.
    ///
    /// # Errors
    /// It is on its way, or never was here.
    pub(super) fn withdraw(&self, call: u64) -> Result<(), Closed> {
        let mut queues = self.queues.lock();
        let is_it = |outgoing: &Outgoing| matches!(outgoing.frame, Frame::Request(request) if request.call == call);
        let place = queues.bulk.iter().position(is_it).ok_or(Closed)?;
        if let Some(outgoing) = queues.bulk.remove(place) {
            queues.bulk_len -= outgoing.len();
            queues.wake_all();
        }
        Ok(())
    }

    /// Nothing goes out any more; what waits is forgotten and who waits is told.
    pub(super) fn close(&self) {
        let mut queues = self.queues.lock();
        queues.is_closed = true;
        wake(queues.writer.take());
        queues.wake_all();
    }

    /// The writer ends the stream once everything was sent.
    pub(super) fn finish(&self) {
        let mut queues = self.queues.lock();
        queues.is_finishing = true;
        wake(queues.writer.take());
    }

    /// The next frames to be sent, encoded: a batch of small ones, or a head whose body follows by itself. `None` when
    /// the stream is to be ended.
    async fn next(&self, batch: &mut Vec<u8>) -> Option<Vec<u8>> {
        batch.clear();
        poll_fn(|context| {
            let mut queues = self.queues.lock();
            queues.is_writing = false;
            while let Some(frame) = queues.urgent.pop_front() {
                batch.extend_from_slice(&Head { frame, body_len: 0 }.encode());
            }
            // Bounded by the batch's length and the queue's.
            while batch.len() < BATCH_LEN
                && let Some(Outgoing { frame, body }) = queues.bulk.pop_front()
            {
                queues.bulk_len -= HEADER_LEN + body.len();
                // The length was checked where the frame was made.
                let body_len = u32::try_from(body.len()).unwrap_or(u32::MAX);
                batch.extend_from_slice(&Head { frame, body_len }.encode());
                if body.len() > COPY_LEN_MAX {
                    queues.start_writing();
                    return Poll::Ready(Some(body));
                }
                batch.extend_from_slice(&body);
            }
            if !batch.is_empty() {
                queues.start_writing();
                return Poll::Ready(Some(Vec::new()));
            }
            queues.wake_all();
            if queues.is_finishing || queues.is_closed {
                return Poll::Ready(None);
            }
            queues.writer = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }
}

impl Queues {
    fn wait(&mut self, waker: &Waker) {
        if !self.waiting.iter().any(|waiting| waiting.will_wake(waker)) {
            self.waiting.push(waker.clone());
        }
    }

    fn start_writing(&mut self) {
        self.is_writing = true;
        self.wake_all();
    }

    fn wake_all(&mut self) {
        self.waiting.drain(..).for_each(Waker::wake);
    }
}

fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// What becomes of frames that come in.
pub(super) trait Receive: Send {
    /// Takes a frame; the next one is read when this is done. An error ends the connection.
    fn on_frame(&mut self, frame: Frame, body: Vec<u8>) -> impl Future<Output = Result<(), RpcError>> + Send;
}

/// Reads, writes and watches one connection until it ends; says how. The outbox is closed then.
pub(super) async fn drive<R, S>(
    runtime: &R,
    stream: S,
    outbox: &Outbox,
    limits: &Limits,
    receive: &mut impl Receive,
) -> RpcError
where
    R: Runtime,
    S: AsyncRead + AsyncWrite + Send + Unpin,
{
    let (reader, writer) = stream.split();
    let heard = AtomicU64::new(0);
    let reading = pin!(read(runtime, reader, outbox, limits, &heard, receive));
    let writing = pin!(write(writer, outbox));
    let watching = pin!(watch(runtime, outbox, limits, &heard));
    let outcome = match future::select(reading, future::select(writing, watching)).await {
        Either::Left((outcome, _)) | Either::Right((Either::Left((outcome, _)) | Either::Right((outcome, _)), _)) => {
            outcome
        }
    };
    outbox.close();
    outcome.err().unwrap_or_else(|| RpcError::gone("it closed the session"))
}

async fn read<R: Runtime>(
    runtime: &R,
    reader: impl AsyncRead + Send + Unpin,
    outbox: &Outbox,
    limits: &Limits,
    heard: &AtomicU64,
    receive: &mut impl Receive,
) -> Result<(), RpcError> {
    let mut reader = BufReader::with_capacity(READ_LEN, reader);
    loop {
        let mut header = [0; HEADER_LEN];
        match reader.read_exact(&mut header).await {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(broken(&error)),
        }
        heard.fetch_add(1, Ordering::Relaxed);
        let Head { frame, body_len } = Head::decode(&header)?;
        let mut body = Vec::new();
        if body_len > 0 {
            let deadline = runtime.now() + limits.frame_span_max;
            let whole = by(runtime, deadline, read_body(&mut reader, body_len, &mut body, heard)).await;
            whole.map_err(|_| RpcError::gone("it stopped in the middle of a message"))?.map_err(|e| broken(&e))?;
        }
        match frame {
            Frame::Ping { nonce } => outbox
                .urge(Frame::Pong { nonce })
                .map_err(|Closed| RpcError::violation("it asks more often than it listens"))?,
            Frame::Pong { .. } => {}
            frame => receive.on_frame(frame, body).await?,
        }
    }
}

/// Reads a body in pieces: memory is taken as bytes come, not as a header promises them.
async fn read_body(
    reader: &mut (impl AsyncRead + Unpin),
    body_len: u32,
    body: &mut Vec<u8>,
    heard: &AtomicU64,
) -> io::Result<()> {
    // A message is at most MESSAGE_LEN_MAX, which fits.
    let body_len = usize::try_from(body_len).map_err(io::Error::other)?;
    while body.len() < body_len {
        let start = body.len();
        body.resize(body_len.min(start + BATCH_LEN), 0);
        reader.read_exact(&mut body[start..]).await?;
        heard.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

async fn write(mut writer: impl AsyncWrite + Send + Unpin, outbox: &Outbox) -> Result<(), RpcError> {
    let mut batch = Vec::new();
    while let Some(body) = outbox.next(&mut batch).await {
        writer.write_all(&batch).await.map_err(|error| broken(&error))?;
        if !body.is_empty() {
            writer.write_all(&body).await.map_err(|error| broken(&error))?;
        }
        writer.flush().await.map_err(|error| broken(&error))?;
    }
    writer.close().await.map_err(|error| broken(&error))?;
    // The reader ends the connection when the peer closes too.
    future::pending().await
}

/// Asks a silent peer whether it lives. Counts rounds rather than time, so that a pause of our own is not held against it.
async fn watch<R: Runtime>(runtime: &R, outbox: &Outbox, limits: &Limits, heard: &AtomicU64) -> Result<(), RpcError> {
    let rounds_max = limits.gone_after.as_nanos().div_ceil(limits.ping_after.as_nanos().max(1));
    let (mut silent, mut seen) = (0, heard.load(Ordering::Relaxed));
    loop {
        runtime.sleep(limits.ping_after).await;
        let now = heard.load(Ordering::Relaxed);
        if now != seen {
            (silent, seen) = (0, now);
            continue;
        }
        silent += 1;
        if silent > rounds_max {
            return Err(RpcError::gone(format!("it was silent for {}", limits.gone_after)));
        }
        // A full queue means that the peer does not read; the rounds above end that.
        let _ = outbox.urge(Frame::Ping { nonce: silent });
    }
}

fn broken(error: &io::Error) -> RpcError {
    RpcError::gone(format!("the connection broke ({error})"))
}
