//! One sender: a scheduler, its devices, its jobs, and what it may believe about the receiver's memory.

use std::collections::BTreeMap;

use millpond_core::quiet::Far;
use millpond_core::slab::{Handle, Slot};
use millpond_core::time::{Duration, Instant};
use millpond_core::transfer::{
    Action, Answer, Asked, Cause, Class, Config, Credit, Cut, Dialling, Failure, Fault, Finished, Job, JobSpec, Limits,
    Load, Outcome, PathId, PathSpec, Peer, Posting, Refusal, Scheduler, Slice, Status, Tally, Transport, carve,
};

use super::Profile;
use super::net::{Ack, Connection, Frame, PATHS, PLACE_LEN, PLACES, Piece, Receiver};
use crate::Op;

type Machine = Scheduler<[Slot<Job>; 8], [Slot<Slice>; 24], [Slot<Peer>; 2]>;

/// A job as its caller sees it.
struct Work {
    requests: Vec<Tally<Cause>>,
    /// Where each request goes.
    places: Vec<usize>,
    next: usize,
    value: u32,
    is_read: bool,
    is_once: bool,
    /// Pieces of slices that are not posted.
    held: BTreeMap<Handle, Vec<Piece>>,
    deadline: Instant,
    progressed: Instant,
}

pub(super) struct Sender {
    index: usize,
    profile: Profile,
    machine: Machine,
    incarnation: u64,
    peer: Handle,
    connections: [Option<Connection>; PATHS],
    dials: Vec<usize>,
    /// Frames nobody here waits for any more.
    ghosts: Vec<Frame>,
    works: BTreeMap<Handle, Work>,
    /// What the first bytes of a place are for certain, and how many of them.
    known: [(u32, usize); PLACES],
    next_value: u32,
    refusal: Option<Refusal>,
    /// Completions that were given.
    old: Vec<Posting>,
}

fn path(index: usize) -> PathId {
    PathId::new(index).expect("few paths")
}

fn machine() -> Machine {
    Scheduler::new(
        Config::default(),
        [const { Slot::EMPTY }; 8],
        [const { Slot::EMPTY }; 24],
        [const { Slot::EMPTY }; 2],
    )
}

impl Sender {
    pub(super) fn new(index: usize, profile: Profile, now: Instant) -> Self {
        let mut sender = Self {
            index,
            profile,
            machine: machine(),
            incarnation: 1,
            peer: Handle::default(),
            connections: [const { None }; PATHS],
            dials: Vec::new(),
            ghosts: Vec::new(),
            works: BTreeMap::new(),
            known: [(0, PLACE_LEN); PLACES],
            // No two senders write the same.
            next_value: 1 + u32::try_from(index).expect("few") * 1_000_000,
            refusal: None,
            old: Vec::new(),
        };
        sender.meet(now);
        sender
    }

    /// Makes the receiver known: two lanes of a worse transport, one of a better, one that only the receiver dials.
    fn meet(&mut self, now: Instant) {
        self.peer = self.machine.insert_peer(now).expect("two are enough");
        let kinds = [(1, 1, Dialling::Ours), (1, 1, Dialling::Ours), (0, 0, Dialling::Ours), (1, 1, Dialling::Theirs)];
        for (index, (transport, rank, dialling)) in kinds.into_iter().enumerate() {
            let mut spec = PathSpec::new(Transport::new(transport).expect("few transports"), rank);
            spec.dialling = dialling;
            spec.window = self.profile.window;
            (spec.slice_len_min, spec.slice_len_max) = (self.profile.slice_len / 2, self.profile.slice_len);
            spec.slice_moves_max = self.profile.slice_moves;
            spec.credit = self.profile.credit;
            self.machine.declare(self.peer, path(index), spec).expect("it was just made");
        }
    }

    pub(super) fn submit(&mut self, now: Instant, op: &Op) -> Result<(), String> {
        let is_free = |place: &usize| self.works.values().all(|work| !work.places.contains(place));
        let places: Vec<usize> = (0..PLACES).filter(|place| op[2] & (1 << place) != 0).filter(is_free).collect();
        if places.is_empty() {
            return Ok(());
        }
        let len = |place: &usize| u64::from(op[3].rotate_left(3 * u32::try_from(*place).unwrap_or(0))) % 25;
        let lens: Vec<u64> = places.iter().map(len).collect();
        let mut spec = JobSpec::new(self.peer, lens.iter().sum());
        spec.class = Class::ALL[usize::from(op[4] % 3)];
        spec.asked = match op[4] / 3 % 4 {
            0 => Asked::Only(Transport::new(usize::from(op[4] / 12 % 3)).expect("few transports")),
            _ => Asked::Any,
        };
        let (is_read, is_once) = (op[5].is_multiple_of(4), op[5] % 8 == 1);
        spec.has_writes = !is_read;
        if op[6] < 64 {
            spec.deadline = now + Duration::from_millis(u64::from(op[6]) * 8);
        }
        let Ok(job) = self.machine.submit(now, spec) else { return Ok(()) };
        let work = Work {
            requests: lens.into_iter().map(Tally::new).collect(),
            places,
            next: 0,
            value: self.next_value,
            is_read,
            is_once,
            held: BTreeMap::new(),
            deadline: spec.deadline,
            progressed: now,
        };
        self.next_value += 1;
        if self.works.insert(job, work).is_some() {
            return Err(format!("job {job} was given out twice"));
        }
        Ok(())
    }

    /// Does what the scheduler asks for.
    pub(super) fn drain(&mut self, now: Instant) -> Result<(), String> {
        for _ in 0..10_000 {
            let Some(action) = self.machine.poll(now) else { return Ok(()) };
            match action {
                Action::Post { posting, job, path, cut, .. } => self.post(now, posting, job, path.index(), cut)?,
                Action::Settle { slice, job } => self.end_pieces(job, slice, None)?,
                Action::Fail { slice, job, failure } => self.end_pieces(job, slice, Some(failure))?,
                Action::Cancel { posting } => {
                    let frames = self.connections.iter_mut().flatten().flat_map(|connection| &mut connection.frames);
                    let found = frames.into_iter().find(|frame| frame.posting == posting);
                    found.ok_or(format!("{posting:?} is to be cancelled and is not under way"))?.is_cancelled = true;
                }
                Action::Close { path, .. } => self.close(now, path.index(), 0xff, Fault::Stalled)?,
                Action::Dial { path, .. } => {
                    if self.connections[path.index()].is_some() || self.dials.contains(&path.index()) {
                        return Err(format!("path {} is dialled twice", path.index()));
                    }
                    self.dials.push(path.index());
                }
                Action::Finish(finished) => self.finish(finished)?,
                other => return Err(format!("unknown action {other:?}")),
            }
        }
        Err("it never stops asking for more".to_owned())
    }

    fn post(
        &mut self,
        now: Instant,
        posting: Posting,
        job: Handle,
        at: usize,
        cut: Option<Limits>,
    ) -> Result<(), String> {
        let work = self.works.get_mut(&job).ok_or(format!("a slice of job {job}, which is over"))?;
        let pieces = match cut {
            None => work.held.remove(&posting.slice).ok_or("a slice is posted again that is under way or over")?,
            Some(limits) => {
                let (mut pieces, places) = (Vec::new(), &work.places);
                let load = carve(&mut work.requests, &mut work.next, limits, |carved| {
                    let place = places[carved.request];
                    let (at, len) = (usize_of(carved.at), usize_of(carved.len));
                    pieces.push(Piece { request: carved.request, place, at, len });
                });
                let (has_writes, is_once) = (!work.is_read, work.is_once);
                let is_last = work.next == work.requests.len();
                let cut = Cut { bytes: load.bytes, moves: load.moves, has_writes, is_once, is_last };
                self.machine.on_cut(posting, cut);
                pieces
            }
        };
        if let Some(refusal) = self.refusal.take() {
            match refusal {
                Refusal::Never => end(work, &pieces, Some((Cause::NoPath, self.machine.far_of_refused(posting))))?,
                _ => drop(work.held.insert(posting.slice, pieces)),
            }
            self.machine.on_refused(now, posting, refusal);
            return Ok(());
        }
        let value = (!work.is_read).then_some(work.value);
        let once = work.is_once.then_some((work.value, posting.slice));
        let Some(connection) = &mut self.connections[at] else {
            return Err(format!("posted on path {at}, which is down"));
        };
        let bytes: u64 = pieces.iter().map(|piece| piece.len as u64).sum();
        let has_credit =
            connection.sent.slices < connection.credit.slices && connection.sent.bytes < connection.credit.bytes;
        if !has_credit {
            return Err(format!("path {at}: {:?} sent with {:?}", connection.sent, connection.credit));
        }
        (connection.sent.bytes, connection.sent.slices) = (connection.sent.bytes + bytes, connection.sent.slices + 1);
        let (has_landed, is_cancelled, moved, said) = (false, false, 0, 0);
        let (path, id) = (at, connection.id);
        let frame =
            Frame { posting, job, path, connection: id, pieces, value, once, has_landed, is_cancelled, moved, said };
        connection.frames.push(frame);
        let load = load_of(connection.frames.iter().flat_map(|frame| &frame.pieces), connection.frames.len());
        let window = self.profile.window;
        let is_over = load.bytes > window.bytes || load.moves > window.moves || load.slices > window.slices;
        if load.slices > 1 && is_over {
            return Err(format!("path {at}: {load:?} is more than {window:?}"));
        }
        Ok(())
    }

    /// A frame that is under way, taken out: the one that an operation names.
    fn take(&mut self, op: &Op, is_it: impl Fn(&Frame) -> bool) -> Option<Frame> {
        let start = usize::from(op[2]);
        for at in 0..PATHS {
            let Some(connection) = &mut self.connections[(start + at) % PATHS] else { continue };
            let count = connection.frames.len();
            if connection.is_stalled || count == 0 {
                continue;
            }
            let found = (0..count).map(|skip| (usize::from(op[3]) + skip) % count);
            if let Some(frame) = found.into_iter().find(|at| is_it(&connection.frames[*at])) {
                return Some(connection.frames.remove(frame));
            }
        }
        None
    }

    /// A frame lands, and the answer comes or is lost. A second landing is a duplicate on the wire, and is dropped.
    pub(super) fn deliver(&mut self, now: Instant, receiver: &mut Receiver, op: &Op, ack: Ack) -> Result<(), String> {
        let Some(mut frame) = self.take(op, |_| true) else { return Ok(()) };
        if !frame.has_landed {
            receiver.land(self.index, &frame)?;
            frame.has_landed = true;
        }
        if ack == Ack::Lost {
            if let Some(connection) = &mut self.connections[frame.path] {
                connection.frames.push(frame);
            }
            return Ok(());
        }
        self.complete(now, frame, Outcome::DONE, 0)
    }

    /// The peer refuses some moves of a frame, and the others land.
    pub(super) fn refuse(&mut self, now: Instant, receiver: &mut Receiver, op: &Op) -> Result<(), String> {
        let Some(mut frame) = self.take(op, |frame| !frame.has_landed && frame.once.is_none()) else { return Ok(()) };
        let refused = usize::from(op[4]) % (frame.pieces.len() + 1);
        let all = std::mem::take(&mut frame.pieces);
        frame.pieces = all[refused..].to_vec();
        receiver.land(self.index, &frame)?;
        frame.pieces = all;
        let load = load_of(frame.pieces[..refused].iter(), 0);
        self.complete(now, frame, Outcome { refused: load, ..Outcome::DONE }, refused)
    }

    /// A frame fails, and nothing of it landed.
    pub(super) fn fail(&mut self, now: Instant, op: &Op) -> Result<(), String> {
        let Some(frame) = self.take(op, |frame| !frame.has_landed) else { return Ok(()) };
        self.complete(now, frame, failed(Fault::Transient, Far::Untouched), 0)
    }

    /// Tells the scheduler how a frame ended. The first `refused` pieces of it were refused; `kept` is filled in.
    fn complete(&mut self, now: Instant, frame: Frame, mut outcome: Outcome, refused: usize) -> Result<(), String> {
        let posting = frame.posting;
        let work =
            self.works.get_mut(&frame.job).ok_or(format!("job {} was over while it was under way", frame.job))?;
        if outcome.fault.is_some() {
            outcome.kept = load_of(frame.pieces.iter(), 0);
        } else {
            work.progressed = now;
        }
        let far = self.machine.far_of_refused(posting);
        let answer = self.machine.on_finished(now, posting, outcome).ok_or("a completion that is right was ignored")?;
        self.old.push(posting);
        let (first, rest) = frame.pieces.split_at(refused);
        end(work, first, Some((Cause::NoPath, far)))?;
        match (answer, outcome.fault) {
            (Answer::Over, None) => end(work, rest, None),
            (Answer::Again, Some(_)) | (Answer::Arrived, None) => {
                work.held.insert(posting.slice, rest.to_vec());
                Ok(())
            }
            (Answer::Failed(failure), Some(_)) => end(work, rest, Some((failure.cause, failure.far))),
            other => Err(format!("{other:?} is no answer")),
        }
    }

    /// A connection breaks. `left`: a bit for each frame that was on its way, and may still land.
    pub(super) fn lose_path(&mut self, now: Instant, at: u8, left: u8) -> Result<(), String> {
        self.close(now, usize::from(at) % PATHS, left, Fault::PathLost)
    }

    fn close(&mut self, now: Instant, at: usize, left: u8, fault: Fault) -> Result<(), String> {
        let Some(connection) = self.connections[at].take() else { return Ok(()) };
        if left.is_multiple_of(2) {
            self.machine.on_down(self.peer, path(at), connection.generation);
        }
        for (index, frame) in connection.frames.into_iter().enumerate() {
            let is_out = frame.has_landed || left.rotate_right(u32::try_from(index % 8).unwrap_or(0)) & 2 != 0;
            let far = if is_out { Far::Unknown } else { Far::Untouched };
            if is_out && !frame.has_landed {
                self.ghosts.push(frame.clone());
            }
            self.complete(now, frame, failed(fault, far), 0)?;
        }
        self.machine.on_down(self.peer, path(at), connection.generation);
        Ok(())
    }

    /// A frame of a connection that is long gone comes.
    pub(super) fn ghost_lands(&mut self, receiver: &mut Receiver, op: &Op) -> Result<(), String> {
        if self.ghosts.is_empty() {
            return Ok(());
        }
        let ghost = self.ghosts.remove(usize::from(op[2]) % self.ghosts.len());
        receiver.land(self.index, &ghost)
    }

    /// A dial succeeds or fails; or the peer dials.
    pub(super) fn answer_dial(&mut self, now: Instant, receiver: &mut Receiver, op: &Op) -> Result<(), String> {
        if op[2] % 5 == 4 || self.dials.is_empty() {
            let theirs = PATHS - 1;
            if self.connections[theirs].is_none() && op[3].is_multiple_of(4) {
                self.open(now, receiver, theirs)?;
            }
            return Ok(());
        }
        let at = self.dials.remove(usize::from(op[2]) % self.dials.len());
        if op[3].is_multiple_of(4) {
            if op[4].is_multiple_of(2) {
                self.machine.on_dial_failed(now, self.peer, path(at));
            } else {
                self.machine.on_dial_refused(now, self.peer, path(at));
            }
            return Ok(());
        }
        self.open(now, receiver, at)
    }

    fn open(&mut self, now: Instant, receiver: &mut Receiver, at: usize) -> Result<(), String> {
        let id = receiver.open(self.index, self.incarnation, at);
        let generation = self.machine.on_open(now, self.peer, path(at));
        let sent = Credit { bytes: 0, slices: 0 };
        let connection =
            Connection { id, generation, frames: Vec::new(), is_stalled: false, sent, credit: self.profile.credit };
        self.connections[at] = Some(connection);
        self.ghosts.retain(|ghost| ghost.path != at || ghost.connection == id);
        Ok(())
    }

    pub(super) fn cancel(&mut self, now: Instant, op: &Op) {
        let count = self.works.len().max(1);
        if let Some(job) = self.works.keys().nth(usize::from(op[2]) % count) {
            self.machine.cancel(now, *job);
        }
    }

    /// The peer answers a cancel: from here on it discards the frame.
    pub(super) fn answer_cancel(&mut self, now: Instant, _: &mut Receiver, op: &Op) -> Result<(), String> {
        let Some(frame) = self.take(op, |frame| frame.is_cancelled) else { return Ok(()) };
        let far = if frame.has_landed { Far::Unknown } else { Far::Untouched };
        self.complete(now, frame, failed(Fault::Cancelled, far), 0)
    }

    /// A completion comes once more, or one of an attempt long over.
    pub(super) fn complete_again(&mut self, now: Instant, op: &Op) -> Result<(), String> {
        let Some(posting) = self.old.get(usize::from(op[2]) % self.old.len().max(1)) else { return Ok(()) };
        match self.machine.on_finished(now, *posting, Outcome::DONE) {
            None => Ok(()),
            Some(answer) => Err(format!("{posting:?} ended before, and now again as {answer:?}")),
        }
    }

    /// The receiver takes more; sometimes the news is old.
    pub(super) fn credit(&mut self, _: &mut Receiver, op: &Op) {
        let at = usize::from(op[2]) % PATHS;
        let Some(connection) = &mut self.connections[at] else { return };
        let grown = Credit {
            bytes: connection.credit.bytes.saturating_add(u64::from(op[3] % 16)),
            slices: connection.credit.slices.saturating_add(u64::from(op[4] % 3)),
        };
        let is_old = op[5].is_multiple_of(4);
        let said = if is_old { Credit { bytes: grown.bytes / 2, slices: grown.slices / 2 } } else { grown };
        if !is_old {
            connection.credit = grown;
        }
        self.machine.on_credit(self.peer, path(at), connection.generation, said);
    }

    /// A path stands still, or moves again; or some bytes of a frame move.
    pub(super) fn stall(&mut self, op: &Op) {
        let Some(connection) = &mut self.connections[usize::from(op[2]) % PATHS] else { return };
        let count = connection.frames.len().max(1);
        match connection.frames.get_mut(usize::from(op[4]) % count) {
            Some(frame) if op[3].is_multiple_of(2) => frame.moved += 1,
            _ => connection.is_stalled = op[3] % 4 == 1,
        }
    }

    pub(super) fn refuse_next(&mut self, op: &Op) {
        self.refusal = match op[2] % 8 {
            0 => Some(Refusal::Never),
            1..=3 => Some(Refusal::PathClosed),
            4..=6 => Some(Refusal::Full),
            _ => None,
        };
    }

    /// The receiver is asked over another connection to fence a path that is down.
    pub(super) fn fence(&mut self, receiver: &mut Receiver, op: &Op) {
        let at = usize::from(op[2]) % PATHS;
        if self.connections[at].is_none() {
            receiver.fence(self.index, at);
            // Whatever generation it had: none is open.
            self.machine.on_fenced(self.peer, path(at), u64::MAX);
        }
    }

    /// The receiver was restarted under its name: it is another peer.
    pub(super) fn receiver_restarted(&mut self, now: Instant) -> Result<(), String> {
        let old = self.peer;
        self.machine.on_peer_gone(old);
        for at in 0..PATHS {
            self.close(now, at, 0, Fault::PathLost)?;
        }
        self.drain(now)?;
        self.dials.clear();
        self.ghosts.clear();
        self.known = [(0, PLACE_LEN); PLACES];
        if !self.works.is_empty() {
            return Err("a job to a peer that is gone does not end".to_owned());
        }
        if !self.machine.remove_peer(old) {
            return Err("a peer without jobs is not forgotten".to_owned());
        }
        self.meet(now);
        Ok(())
    }

    /// This sender dies, and is started again under its name.
    pub(super) fn restart(&mut self, now: Instant) {
        for connection in self.connections.iter_mut().filter_map(Option::take) {
            self.ghosts.extend(connection.frames.into_iter().filter(|frame| !frame.has_landed));
        }
        for work in self.works.values().filter(|work| !work.is_read) {
            work.places.iter().for_each(|place| self.known[*place].1 = 0);
        }
        self.works.clear();
        self.dials.clear();
        self.old.clear();
        self.machine = machine();
        self.incarnation += 1;
        self.meet(now);
    }

    pub(super) fn next_wake(&self) -> Instant {
        self.machine.next_wake()
    }

    pub(super) fn on_time(&mut self, now: Instant) -> Result<(), String> {
        if self.machine.next_wake() > now {
            return Ok(());
        }
        for frame in self.connections.iter_mut().flatten().flat_map(|connection| &mut connection.frames) {
            if frame.moved > frame.said {
                frame.said = frame.moved;
                self.machine.on_moved(now, frame.posting, frame.moved);
                if let Some(work) = self.works.get_mut(&frame.job) {
                    work.progressed = now;
                }
            }
        }
        self.machine.on_timer(now);
        Ok(())
    }

    fn end_pieces(&mut self, job: Handle, slice: Handle, failure: Option<Failure>) -> Result<(), String> {
        let work = self.works.get_mut(&job).ok_or(format!("a slice of job {job}, which is over, ends"))?;
        let pieces = work.held.remove(&slice).ok_or("a slice that is not held ends")?;
        end(work, &pieces, failure.map(|failure| (failure.cause, failure.far)))
    }

    fn finish(&mut self, finished: Finished) -> Result<(), String> {
        let job = finished.job;
        let mut work = self.works.remove(&job).ok_or(format!("job {job} is over twice"))?;
        let mut frames = self.connections.iter().flatten().flat_map(|connection| &connection.frames);
        if let Some(frame) = frames.find(|frame| frame.job == job) {
            return Err(format!("job {job} is over while {:?} is under way", frame.posting));
        }
        if let Some(rest) = finished.rest {
            work.requests.iter_mut().for_each(|request| request.end(rest.cause));
        }
        if !work.held.is_empty() {
            return Err(format!("job {job} is over and slices of it are held"));
        }
        for (request, place) in work.requests.iter().zip(work.places) {
            let status = request.status();
            if request.bytes_done() > request.len() || (status == Status::Done && request.bytes_done() != request.len())
            {
                return Err(format!("{} of {} bytes count as done", request.bytes_done(), request.len()));
            }
            match status {
                Status::Pending => return Err(format!("job {job} is over and a request of it is not")),
                _ if work.is_read || request.len() == 0 => {}
                Status::Done => self.known[place] = (work.value, usize_of(request.len())),
                Status::Failed { far: Far::Untouched, .. } => {}
                Status::Failed { .. } => self.known[place].1 = 0,
            }
        }
        Ok(())
    }

    pub(super) fn check(&self, now: Instant, receiver: &Receiver) -> Result<(), String> {
        for (place, known) in self.known.iter().enumerate() {
            let busy = |work: &Work| !work.is_read && work.places.contains(&place);
            let (value, found) = (known.0, &receiver.place(self.index, place)[..known.1]);
            if found.iter().any(|byte| *byte != value) && !self.works.values().any(busy) {
                return Err(format!("sender {} place {place} holds {found:?}, not {value}", self.index));
            }
        }
        let config = Config::default();
        for (job, work) in &self.works {
            let patience = work.progressed + config.progress_deadline;
            let latest = patience.min(work.deadline) + config.cancel_grace;
            if now > latest + Duration::from_millis(1) {
                return Err(format!("job {job} did not end by its deadline: {now:?}, {latest:?}"));
            }
        }
        Ok(())
    }

    /// One round in which everything works.
    pub(super) fn heal(&mut self, now: Instant, receiver: &mut Receiver) -> Result<(), String> {
        self.refusal = None;
        let mut dials = std::mem::take(&mut self.dials);
        if self.connections[PATHS - 1].is_none() {
            dials.push(PATHS - 1);
        }
        for at in dials {
            self.open(now, receiver, at)?;
        }
        for at in 0..PATHS {
            let Some(connection) = &mut self.connections[at] else { continue };
            connection.is_stalled = false;
            if connection.credit != Credit::UNLIMITED {
                let more = connection.credit.bytes + 64;
                connection.credit = Credit { bytes: more, slices: connection.credit.slices + 8 };
                let credit = connection.credit;
                self.machine.on_credit(self.peer, path(at), connection.generation, credit);
            }
        }
        while let Some(mut frame) = self.take(&[0; 8], |_| true) {
            if !frame.has_landed {
                receiver.land(self.index, &frame)?;
                frame.has_landed = true;
            }
            self.complete(now, frame, Outcome::DONE, 0)?;
        }
        Ok(())
    }

    pub(super) fn is_idle(&self) -> bool {
        self.works.is_empty()
    }

    /// Nothing is under way, so nothing may be counted as such.
    pub(super) fn assert_baseline(&mut self) -> Result<(), String> {
        let machine = &self.machine;
        let loads = (0..PATHS).map(|at| machine.path_load(self.peer, path(at)));
        let loads: Vec<Load> = loads.chain([machine.load(self.peer)]).flatten().collect();
        let counters = machine.counters();
        let is_clean = loads.iter().all(|load| *load == Load::NONE)
            && (machine.jobs(), machine.slices()) == (0, 0)
            && counters.submitted == counters.done + counters.failed;
        if !is_clean {
            return Err(format!("left over: {loads:?}, {} slices, {counters:?}", machine.slices()));
        }
        Ok(())
    }
}

fn failed(fault: Fault, far: Far) -> Outcome {
    Outcome { kept: Load::NONE, refused: Load::NONE, fault: Some(fault), far }
}

fn usize_of(len: u64) -> usize {
    usize::try_from(len).expect("small")
}

fn load_of<'a>(pieces: impl Iterator<Item = &'a Piece>, slices: usize) -> Load {
    let none = Load { slices: u32::try_from(slices).expect("few"), ..Load::NONE };
    pieces.fold(none, |load, piece| Load { bytes: load.bytes + piece.len as u64, moves: load.moves + 1, ..load })
}

/// Pieces end, each once.
fn end(work: &mut Work, pieces: &[Piece], failure: Option<(Cause, Far)>) -> Result<(), String> {
    for piece in pieces {
        let request = &mut work.requests[piece.request];
        if request.is_final() {
            return Err(format!("request {} ends twice", piece.request));
        }
        match failure {
            None => request.on_done(piece.len as u64),
            Some((cause, far)) => request.on_failed(cause, far),
        }
    }
    Ok(())
}
