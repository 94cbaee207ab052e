//! Checks `millpond_core::quiet` exhaustively, within small bounds: two writers with two lanes each, one of them over lanes
//! that write by themselves; one page that is given away again; restarts; messages that are lost, late, out of order or
//! doubled (what is never delivered was lost).
//!
//! The model is the world around the two machines: wires, sockets, queue pairs, the page. It keeps ghosts that no real
//! node has (whose the page is, what has landed) and complains when the machines let the wrong thing happen.

use millpond_core::quiet::{Attempt, Discard, Far, Initiator, Lane, LaneName, Memory, Peer, Progress, Reach, Refused};
use millpond_core::quiet::{Reservation, Stamp, Target};
use millpond_core::seeded::{self, Bug};
use millpond_core::slab::{Handle, Slot};
use stateright::{Checker, Model, Property};

const WRITERS: usize = 2;
const LANES: u8 = 2;

/// How much may happen in one history.
#[derive(Clone, Copy)]
struct Bounds {
    grants: u8,
    dials: [u8; WRITERS],
    posts: [u8; WRITERS],
    cancels: u8,
    restarts: u8,
    doubles: u8,
}

struct Page {
    bounds: Bounds,
    bug: Option<Bug>,
}

type Node = Initiator<[Slot<Attempt>; 3]>;

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
struct Writer {
    node: Node,
    incarnation: u64,
    grant: Option<Handle>,
    ticket: u64,
    open: [Option<LaneName>; LANES as usize],
    dialling: [Option<LaneName>; LANES as usize],
    dials_left: u8,
    posts_left: u8,
}

/// A lane as the target's sockets or queue pairs know it; `bound` is the memory window of a direct lane.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
struct Socket {
    writer: usize,
    name: LaneName,
    lane: Lane,
    is_alive: bool,
    bound: Option<Handle>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, PartialOrd, Ord)]
enum Message {
    Hello { writer: usize, name: Name },
    Opened { writer: usize, name: Name },
    Write { writer: usize, name: Name, serial: u64, ticket: u64, attempt: u8, slot: u32, epoch: u32 },
    Answer { writer: usize, name: Name, serial: u64, ticket: u64, attempt: u8, is_done: bool },
    Cancel { writer: usize, name: Name, serial: u64 },
    Cancelled { writer: usize, name: Name, serial: u64 },
}

/// A `LaneName` that sorts.
type Name = (u64, u8, u64);

fn pack(name: LaneName) -> Name {
    (name.incarnation, name.index, name.generation)
}

fn unpack((incarnation, index, generation): Name) -> LaneName {
    LaneName { incarnation, index, generation }
}

fn stamp(name: Name, serial: u64, ticket: u64, attempt: u8) -> Stamp {
    Stamp { lane: unpack(name), serial, ticket, slice: 0, attempt }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
struct World {
    target: Target<[Slot<Reservation>; 1], [Slot<Peer>; 2]>,
    sockets: Vec<Socket>,
    writers: [Writer; WRITERS],
    wire: Vec<Message>,
    /// Whose the page is: the reservation and the writer it was made for. Ghost.
    owner: Option<(Handle, usize, u64)>,
    /// Attempts that touched the page: writer, incarnation, serial. Ghost.
    landed: Vec<(usize, u64, u64)>,
    grants_left: u8,
    cancels_left: u8,
    restarts_left: u8,
    doubles_left: u8,
    wrong: Option<&'static str>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
enum Action {
    Grant(usize),
    Dial(usize, u8),
    Post(usize, u8),
    Cancel(usize, u8),
    /// The writer's deadline: it closes all lanes and ends its ticket.
    End(usize),
    Restart(usize),
    Fence,
    Free,
    Cut(usize),
    Deliver(usize),
    /// Delivered, and still on the wire.
    Double(usize),
}

fn reach(writer: usize) -> Reach {
    if writer == 1 { Reach::Direct } else { Reach::Checked }
}

fn node_id(writer: usize) -> [u8; 16] {
    [u8::try_from(writer).unwrap_or(u8::MAX); 16]
}

impl World {
    fn send(&mut self, message: Message) {
        if let Err(at) = self.wire.binary_search(&message) {
            self.wire.insert(at, message);
        }
    }

    /// A byte of an attempt reaches the page.
    fn land(&mut self, writer: usize, named: Handle, of: &Stamp) {
        let incarnation = of.lane.incarnation;
        match self.owner {
            None => self.wrong = Some("a byte landed in a page that was free"),
            Some((held, by, at)) if (held, by, at) != (named, writer, incarnation) => {
                self.wrong = Some("a byte landed in memory given to somebody else");
            }
            Some(_) if self.target.memory(named) == Some(Memory::Quiet) => {
                self.wrong = Some("a byte landed in quiet memory");
            }
            Some(_) => {}
        }
        let known = &self.writers[writer];
        if known.incarnation == incarnation
            && matches!(known.node.progress(of), Some(Progress::Fenced | Progress::Untouched))
        {
            self.wrong = Some("a byte landed after its attempt was said to be fenced or untouched");
        }
        let entry = (writer, incarnation, of.serial);
        if let Err(at) = self.landed.binary_search(&entry) {
            self.landed.insert(at, entry);
        }
    }

    fn on_hello(&mut self, writer: usize, name: Name) {
        match self.target.open(node_id(writer), unpack(name), reach(writer)) {
            Ok(lane) => {
                // A memory window for the direct lane, if the page is its node's now.
                let mine = self.owner.filter(|&(_, by, at)| by == writer && at == name.0).map(|(held, ..)| held);
                let bound =
                    mine.filter(|&held| reach(writer) == Reach::Direct && self.target.expose(held, lane).is_ok());
                self.sockets.push(Socket { writer, name: unpack(name), lane, is_alive: true, bound });
                self.send(Message::Opened { writer, name });
            }
            Err(Refused::CutFirst(lane)) => {
                self.cut(lane);
                self.on_hello(writer, name); // at most once per lane of the peer
            }
            Err(_) => {}
        }
    }

    fn cut(&mut self, lane: Lane) {
        self.sockets.iter_mut().filter(|socket| socket.lane == lane).for_each(|socket| socket.is_alive = false);
        self.target.cut(lane);
    }

    fn on_write(&mut self, writer: usize, of: &Stamp, named: Handle) {
        let is_mine = |socket: &&Socket| socket.writer == writer && socket.name == of.lane;
        let Some(socket) = self.sockets.iter().find(is_mine).cloned() else { return };
        if reach(writer) == Reach::Direct {
            // Hardware: it lands if the queue pair lives and the window is bound, whatever the target's software thinks.
            if socket.is_alive && socket.bound == Some(named) {
                self.land(writer, named, of);
                self.answer(writer, of, true);
            }
            return;
        }
        if matches!(self.target.on_frame(socket.lane, of), Err(Discard::Duplicate)) {
            return;
        }
        match self.target.admit(socket.lane, of, named) {
            Ok(()) => {
                self.land(writer, named, of);
                let arrived = self.target.on_arrived(socket.lane, of, named).is_ok();
                self.answer(writer, of, arrived);
            }
            Err(Discard::StaleLane) => {} // its socket is gone: there is nobody to answer
            Err(_) => self.answer(writer, of, false),
        }
    }

    fn answer(&mut self, writer: usize, of: &Stamp, is_done: bool) {
        let (name, serial, ticket, attempt) = (pack(of.lane), of.serial, of.ticket, of.attempt);
        self.send(Message::Answer { writer, name, serial, ticket, attempt, is_done });
    }

    fn deliver(&mut self, message: Message) {
        match message {
            Message::Hello { writer, name } => self.on_hello(writer, name),
            Message::Write { writer, name, serial, ticket, attempt, slot, epoch } => {
                self.on_write(writer, &stamp(name, serial, ticket, attempt), Handle { slot, epoch });
            }
            Message::Cancel { writer, name, serial } => {
                let is_mine = |socket: &&Socket| socket.writer == writer && socket.name == unpack(name);
                let Some(lane) = self.sockets.iter().find(is_mine).map(|socket| socket.lane) else { return };
                if self.target.on_cancel(lane, serial).is_ok() {
                    self.send(Message::Cancelled { writer, name, serial });
                }
            }
            Message::Opened { writer, name } => {
                let known = &mut self.writers[writer];
                known.node.on_opened(unpack(name));
                let index = usize::from(name.1);
                if known.dialling[index] == Some(unpack(name)) {
                    known.dialling[index] = None;
                    known.open[index] = Some(unpack(name));
                }
            }
            Message::Cancelled { writer, name, serial } => {
                self.writers[writer].node.on_cancelled(unpack(name), serial);
            }
            Message::Answer { writer, name, serial, ticket, attempt, is_done } => {
                let far = if is_done { Far::Done } else { Far::Untouched };
                self.writers[writer].node.on_ack(&stamp(name, serial, ticket, attempt), far);
                let has_landed = self.landed.contains(&(writer, name.0, serial));
                if is_done != has_landed {
                    self.wrong = Some("an answer does not tell what landed");
                }
            }
        }
    }

    fn lose(&mut self, writer: usize, lane: usize) {
        let known = &mut self.writers[writer];
        if let Some(name) = known.open[lane].take().or(known.dialling[lane].take()) {
            known.node.on_lost(name);
        }
    }
}

impl Page {
    fn writer(&self, writer: usize) -> Writer {
        Writer {
            node: Initiator::new(1, [Slot::EMPTY; 3]),
            incarnation: 1,
            grant: None,
            ticket: 0,
            open: [None; 2],
            dialling: [None; 2],
            dials_left: self.bounds.dials[writer],
            posts_left: self.bounds.posts[writer],
        }
    }

    fn writer_step(world: &mut World, writer: usize, action: &Action) -> Option<()> {
        let known = &mut world.writers[writer];
        match *action {
            Action::Dial(_, index) => {
                let name = known.node.dial(index);
                known.dials_left -= 1;
                known.open[usize::from(index)] = None;
                known.dialling[usize::from(index)] = Some(name);
                world.send(Message::Hello { writer, name: pack(name) });
            }
            Action::Post(_, index) => {
                let Handle { slot, epoch } = known.grant?;
                let Stamp { lane, serial, ticket, attempt, .. } = known.node.post(index, known.ticket, 0).ok()?;
                known.posts_left -= 1;
                world.send(Message::Write { writer, name: pack(lane), serial, ticket, attempt, slot, epoch });
            }
            Action::Cancel(_, index) => {
                let name = known.open[usize::from(index)]?;
                let serial = known.node.cancel();
                world.cancels_left -= 1;
                world.send(Message::Cancel { writer, name: pack(name), serial });
            }
            Action::End(_) => {
                (0..usize::from(LANES)).for_each(|lane| world.lose(writer, lane));
                let known = &mut world.writers[writer];
                if known.node.end(known.ticket).is_err() {
                    world.wrong = Some("an attempt did not end with its lanes");
                }
                known.grant = None;
            }
            Action::Restart(_) => {
                known.incarnation += 1;
                known.node = Initiator::new(known.incarnation, [Slot::EMPTY; 3]);
                (known.grant, known.open, known.dialling) = (None, [None; 2], [None; 2]);
                world.restarts_left -= 1;
            }
            _ => return None,
        }
        Some(())
    }
}

impl Model for Page {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World {
            target: Target::new([Slot::EMPTY; 1], [Slot::EMPTY; 2]),
            sockets: Vec::new(),
            writers: [self.writer(0), self.writer(1)],
            wire: Vec::new(),
            owner: None,
            landed: Vec::new(),
            grants_left: self.bounds.grants,
            cancels_left: self.bounds.cancels,
            restarts_left: self.bounds.restarts,
            doubles_left: self.bounds.doubles,
            wrong: None,
        }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        if world.wrong.is_some() {
            return;
        }
        for (writer, known) in world.writers.iter().enumerate() {
            if world.owner.is_none() && world.grants_left > 0 && known.grant.is_none() {
                actions.push(Action::Grant(writer));
            }
            for index in 0..LANES {
                let lane = usize::from(index);
                if known.dials_left > 0 && known.dialling[lane].is_none() {
                    actions.push(Action::Dial(writer, index)); // of an open lane: its connection broke
                }
                if known.open[lane].is_some() {
                    if known.posts_left > 0 && known.grant.is_some() {
                        actions.push(Action::Post(writer, index));
                    }
                    if world.cancels_left > 0 && reach(writer) == Reach::Checked {
                        actions.push(Action::Cancel(writer, index));
                    }
                }
            }
            if known.grant.is_some() {
                actions.push(Action::End(writer));
            }
            if world.restarts_left > 0 && known.dials_left > 0 {
                actions.push(Action::Restart(writer));
            }
        }
        if let Some((held, ..)) = world.owner {
            if matches!(world.target.memory(held), Some(Memory::Reserved | Memory::Usable)) {
                actions.push(Action::Fence);
            } else {
                actions.push(Action::Free);
            }
        }
        for (index, socket) in world.sockets.iter().enumerate() {
            if socket.is_alive && reach(socket.writer) == Reach::Direct {
                actions.push(Action::Cut(index));
            }
        }
        for (index, message) in world.wire.iter().enumerate() {
            actions.push(Action::Deliver(index));
            let is_direct = matches!(message, Message::Write { writer, .. } if reach(*writer) == Reach::Direct);
            if world.doubles_left > 0 && !is_direct {
                actions.push(Action::Double(index)); // queue pairs tell doubles apart themselves
            }
        }
    }

    fn next_state(&self, before: &World, action: Action) -> Option<World> {
        seeded::select(self.bug); // of this thread, and the checker has its own
        let mut world = before.clone();
        match action {
            Action::Grant(writer) => {
                let held = world.target.reserve().ok()?;
                world.grants_left -= 1;
                let known = &mut world.writers[writer];
                known.grant = Some(held);
                known.ticket += 1;
                world.owner = Some((held, writer, known.incarnation));
                for socket in &mut world.sockets {
                    let is_direct = socket.writer == writer && reach(writer) == Reach::Direct && socket.is_alive;
                    if is_direct && world.target.expose(held, socket.lane).is_ok() {
                        socket.bound = Some(held);
                    }
                }
            }
            Action::Fence => {
                world.target.fence(world.owner?.0).ok()?;
            }
            Action::Free => {
                world.target.free(world.owner?.0).ok()?;
                world.owner = None;
            }
            Action::Cut(index) => world.cut(before.sockets[index].lane),
            Action::Deliver(index) => {
                let message = world.wire.remove(index);
                world.deliver(message);
            }
            Action::Double(index) => {
                world.doubles_left -= 1;
                world.deliver(before.wire[index].clone());
            }
            Action::Dial(writer, _)
            | Action::Post(writer, _)
            | Action::Cancel(writer, _)
            | Action::End(writer)
            | Action::Restart(writer) => Self::writer_step(&mut world, writer, &action)?,
        }
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::<Self>::always("right bytes", |_, world: &World| world.wrong.is_none()),
            Property::<Self>::always("every attempt can be ended", |_, world: &World| {
                world.writers.iter().all(|writer| {
                    let mut node = writer.node.clone();
                    (0..LANES).for_each(|index| {
                        node.dial(index);
                    });
                    (0..=writer.ticket).all(|ticket| node.end(ticket).is_ok())
                })
            }),
            Property::<Self>::always("every page comes back once its lanes are cut", |_, world: &World| {
                let Some((held, ..)) = world.owner else { return true };
                let mut target = world.target.clone();
                let fenced = target.fence(held).is_ok();
                world.sockets.iter().for_each(|socket| target.cut(socket.lane));
                fenced && target.free(held).is_ok()
            }),
            Property::<Self>::sometimes("a slice arrives", |_, world: &World| {
                world.writers[0].node.verdict(world.writers[0].ticket, 0).is_arrived
            }),
            Property::<Self>::sometimes("a page is used twice and written twice", |page: &Self, world: &World| {
                page.bounds.grants < 2 || (world.grants_left == 0 && world.landed.len() > 1)
            }),
        ]
    }
}

fn check(name: &str, bounds: Bounds, bug: Option<Bug>) -> Option<Vec<String>> {
    let start = std::time::Instant::now();
    let checker = Page { bounds, bug }.checker().threads(1).spawn_dfs().join();
    let states = checker.unique_state_count();
    println!(
        "{name}: {states} states, depth {}, {:.1} s, bug {bug:?}",
        checker.max_depth(),
        start.elapsed().as_secs_f32()
    );
    if bug.is_none() {
        assert!(checker.is_done(), "{name}: the search did not end");
        checker.assert_properties();
    }
    let found = checker.discovery("right bytes")?;
    Some(found.into_actions().iter().map(|action| format!("{action:?}")).collect())
}

/// Both writers, both lanes, the page given away twice.
const REUSE: Bounds = Bounds { grants: 2, dials: [2, 1], posts: [1, 1], cancels: 0, restarts: 0, doubles: 0 };
/// Both writers and a restart of either.
const BOTH: Bounds = Bounds { grants: 2, dials: [1, 1], posts: [1, 1], cancels: 0, restarts: 1, doubles: 0 };
/// One writer that restarts, with doubled messages.
const RESTART: Bounds = Bounds { grants: 2, dials: [2, 0], posts: [2, 0], cancels: 0, restarts: 1, doubles: 1 };
/// One writer on two lanes with a cancel and a doubled message.
const CANCEL: Bounds = Bounds { grants: 1, dials: [2, 0], posts: [2, 0], cancels: 1, restarts: 0, doubles: 1 };
/// One writer whose device writes by itself, and its restart.
const DIRECT: Bounds = Bounds { grants: 2, dials: [0, 2], posts: [0, 2], cancels: 0, restarts: 1, doubles: 0 };

#[test]
fn no_byte_lands_where_it_must_not_and_every_attempt_ends() {
    for (name, bounds) in [("reuse", REUSE), ("both", BOTH), ("restart", RESTART), ("cancel", CANCEL)] {
        assert_eq!(check(name, bounds, None), None);
    }
}

#[test]
fn a_device_that_writes_by_itself_is_cut_before_memory_is_reused() {
    let start = std::time::Instant::now();
    let checker = Page { bounds: DIRECT, bug: None }.checker().threads(1).spawn_dfs().join();
    println!("direct: {} states, {:.1} s", checker.unique_state_count(), start.elapsed().as_secs_f32());
    checker.assert_no_discovery("right bytes");
    checker.assert_no_discovery("every attempt can be ended");
    checker.assert_no_discovery("every page comes back once its lanes are cut");
}

#[test]
fn the_checker_finds_seeded_bugs() {
    for (bug, bounds) in [
        (Bug::QuietSkipsFenceCheck, REUSE),
        (Bug::QuietSkipsLaneCheck, CANCEL),
        (Bug::QuietSkipsLaneCheck, RESTART),
        (Bug::QuietFreesExposed, DIRECT),
    ] {
        let found = check("seeded", bounds, Some(bug));
        let Some(steps) = found else { panic!("{bug:?} was not found") };
        println!("  found by: {}", steps.join(", "));
    }
}
