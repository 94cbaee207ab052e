//! The simulated world around a scheduler: connections, frames on their way, and memory over there.

use millpond_core::slab::Handle;
use millpond_core::transfer::{Credit, Posting};

/// Places of each sender in the receiver's memory, and their length in bytes.
pub(super) const PLACES: usize = 4;
pub(super) const PLACE_LEN: usize = 24;
/// Paths of each sender.
pub(super) const PATHS: usize = 4;

/// Whether the sender hears of what landed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Ack {
    Comes,
    Lost,
}

/// Part of one request, and where it goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) request: usize,
    pub(super) place: usize,
    pub(super) at: usize,
    pub(super) len: usize,
}

/// A slice under way.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    pub(super) posting: Posting,
    pub(super) job: Handle,
    pub(super) path: usize,
    /// The connection that it was sent over.
    pub(super) connection: u64,
    pub(super) pieces: Vec<Piece>,
    /// What it writes; `None`: it reads.
    pub(super) value: Option<u32>,
    /// It may arrive once; names the slice.
    pub(super) once: Option<(u32, Handle)>,
    pub(super) has_landed: bool,
    pub(super) is_cancelled: bool,
    /// Bytes that moved, and those that the scheduler knows of.
    pub(super) moved: u64,
    pub(super) said: u64,
}

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) id: u64,
    pub(super) generation: u64,
    pub(super) frames: Vec<Frame>,
    pub(super) is_stalled: bool,
    pub(super) sent: Credit,
    pub(super) credit: Credit,
}

/// The node that everybody writes to.
#[derive(Debug)]
pub(super) struct Receiver {
    memory: Vec<u32>,
    /// The connection it listens to, by sender and path.
    accepted: Vec<[u64; PATHS]>,
    /// Incarnation of each sender that it knows.
    incarnations: Vec<u64>,
    next_connection: u64,
    /// What arrived and may not twice.
    arrived: Vec<(u32, Handle)>,
}

impl Receiver {
    pub(super) fn new(senders: usize) -> Self {
        Self {
            memory: vec![0; senders * PLACES * PLACE_LEN],
            accepted: vec![[0; PATHS]; senders],
            incarnations: vec![0; senders],
            next_connection: 1,
            arrived: Vec::new(),
        }
    }

    /// It died and is back: nothing of before is listened to.
    pub(super) fn restart(&mut self) {
        self.accepted.iter_mut().for_each(|paths| *paths = [0; PATHS]);
        self.memory.fill(0);
    }

    /// Takes a hello: frames of the path's earlier connections, and of earlier incarnations, are discarded from here on.
    pub(super) fn open(&mut self, sender: usize, incarnation: u64, path: usize) -> u64 {
        if self.incarnations[sender] != incarnation {
            self.incarnations[sender] = incarnation;
            self.accepted[sender] = [0; PATHS];
        }
        let id = self.next_connection;
        self.next_connection += 1;
        self.accepted[sender][path] = id;
        id
    }

    /// Listens no more to what a path had.
    pub(super) fn fence(&mut self, sender: usize, path: usize) {
        self.accepted[sender][path] = 0;
    }

    /// A frame comes, in whole: its bytes land if its connection is listened to.
    pub(super) fn land(&mut self, sender: usize, frame: &Frame) -> Result<(), String> {
        if self.accepted[sender][frame.path] != frame.connection {
            return Ok(());
        }
        if let Some(once) = frame.once {
            if self.arrived.contains(&once) {
                return Err(format!("slice {} arrived twice and may not", once.1));
            }
            self.arrived.push(once);
        }
        let Some(value) = frame.value else { return Ok(()) };
        for piece in &frame.pieces {
            self.place_mut(sender, piece.place)[piece.at..piece.at + piece.len].fill(value);
        }
        Ok(())
    }

    fn place_mut(&mut self, sender: usize, place: usize) -> &mut [u32] {
        let start = (sender * PLACES + place) * PLACE_LEN;
        &mut self.memory[start..start + PLACE_LEN]
    }

    pub(super) fn place(&self, sender: usize, place: usize) -> &[u32] {
        let start = (sender * PLACES + place) * PLACE_LEN;
        &self.memory[start..start + PLACE_LEN]
    }
}
