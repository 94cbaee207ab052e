//! The shell against devices that misbehave, and its own bounds.
#![allow(unsafe_code)]

use std::sync::Arc;

use millpond_core::batch::{Extent, MemoryKind, RegionId, RegionToken, Rights};
use millpond_core::time::{Duration, Instant};
use parking_lot::Mutex;

use super::*;
use crate::contract::{
    Completions, DeviceLimits, End, Event, FarEnd, Inbound, Memory, NotPosted, Outcome, Post, RegionMemory,
    RegisterError, Transport, Turn, Wake,
};
use crate::region::Region;

/// Does what the test tells it, and never more.
#[derive(Clone, Default)]
struct Puppet(Arc<Mutex<Strings>>);

#[derive(Default)]
struct Strings {
    posts: Vec<Post>,
    cancels: Vec<TicketId>,
    closes: Vec<(LinkId, LinkDownReason)>,
    events: Vec<Event>,
    /// A close is answered as the contract says.
    obedient: bool,
    released: Vec<RegionId>,
}

// SAFETY: it touches no memory at all.
unsafe impl Memory for Puppet {
    fn moves(&self, local: MemoryKind, remote: MemoryKind) -> bool {
        (local, remote) == (MemoryKind::Host, MemoryKind::Host)
    }
    fn share_header(&mut self, _: &Arc<HeaderPage>) {}
    unsafe fn register(&mut self, _: &RegionMemory) -> Result<(), RegisterError> {
        Ok(())
    }
    fn release(&mut self, region: RegionId) {
        self.0.lock().released.push(region);
    }
    fn attach(&mut self, _: LinkId, _: &RegionToken) -> Result<(), RegisterError> {
        Ok(())
    }
    fn detach(&mut self, _: LinkId, _: RegionId) {}
}

// SAFETY: it touches no memory at all.
unsafe impl Transport for Puppet {
    fn open(&mut self, _: Instant, _: LinkId, _: Connection) -> Result<(), OpenError> {
        Ok(())
    }
    fn close(&mut self, link: LinkId, reason: LinkDownReason) {
        let mut strings = self.0.lock();
        strings.closes.push((link, reason));
        if strings.obedient {
            for post in core::mem::take(&mut strings.posts) {
                let outcome = Outcome::link_down(reason, FarEnd::Unknown);
                strings.events.push(Event::Finished { ticket: post.ticket, outcome, moves: post.moves });
            }
            strings.events.push(Event::LinkDown { link, reason });
        }
    }
    unsafe fn post(&mut self, _: Instant, post: Post) -> Result<(), NotPosted> {
        self.0.lock().posts.push(post);
        Ok(())
    }
    fn cancel(&mut self, _: Instant, ticket: TicketId) {
        self.0.lock().cancels.push(ticket);
    }
}

// SAFETY: it touches no memory at all.
unsafe impl Completions for Puppet {
    fn poll(&mut self, _: Instant, _: u64, inbound: &mut dyn Inbound) -> Turn {
        let events = core::mem::take(&mut self.0.lock().events);
        let turn = if events.is_empty() { Turn::Idle } else { Turn::Worked };
        events.into_iter().for_each(|event| inbound.event(event));
        turn
    }
    fn arm(&mut self, _: Instant) -> Wake<'_> {
        Wake::Idle
    }
}

// SAFETY: it touches no memory at all.
unsafe impl Device for Puppet {
    fn name(&self) -> &'static str {
        "puppet"
    }
    fn limits(&self) -> DeviceLimits {
        DeviceLimits { moves_max: 4, bytes_max: 1 << 20, posts_max: 64, links_max: 8 }
    }
}

struct Stage {
    fabric: Fabric,
    puppet: Puppet,
    link: LinkId,
    region: Region,
    remote: RegionId,
    /// What `remote` names.
    _raw: Region,
}

fn stage(limits: Limits) -> Stage {
    let puppet = Puppet::default();
    let mut options = FabricOptions::new([3; 32]);
    options.limits = limits;
    let mut fabric = Fabric::new(options).unwrap();
    let device = fabric.add_device(Box::new(puppet.clone())).unwrap();
    let link = fabric.open(Instant::ZERO, device, Connection::Loopback, LinkOptions::default()).unwrap();
    let region = fabric.allocate(1 << 20, AllocateOptions::default()).unwrap();
    let raw = fabric.allocate(1 << 20, AllocateOptions::raw(Rights::REMOTE_WRITE)).unwrap();
    let token = fabric.expose(&raw).unwrap();
    let remote = fabric.attach(token).unwrap();
    Stage { fabric, puppet, link, region, remote, _raw: raw }
}

impl Stage {
    fn batch(&self, requests: u64) -> Batch {
        let mut batch = Batch::new();
        for n in 0..requests {
            batch.write(self.region.carve(n * 10, 10).unwrap().freeze(), Extent::new(self.remote, n * 10, 10));
        }
        batch
    }

    fn post(&mut self, options: PostOptions) -> Ticket {
        let batch = self.batch(2);
        self.fabric.post(Instant::ZERO, self.link, batch, options).unwrap()
    }

    fn says(&mut self, event: Event) {
        self.puppet.0.lock().events.push(event);
        self.fabric.poll(Instant::ZERO);
    }
}

fn finished(ticket: TicketId, outcome: Outcome) -> Event {
    Event::Finished { ticket, outcome, moves: Vec::new() }
}

fn seconds(count: u64) -> Instant {
    Instant::ZERO + Duration::from_secs(count)
}

#[test]
fn a_dropped_fabric_leaks_what_its_device_does_not_finish() {
    let mut stage = stage(Limits::default());
    let ticket = stage.post(PostOptions::default());
    drop(stage.fabric);
    drop(ticket);
    assert!(stage.region.carve(0, 1).is_err(), "the device may still touch it");
    assert_eq!(stage.region.lease_count(), 2);
}

#[test]
fn a_dropped_fabric_frees_what_its_device_finishes_when_closed() {
    let mut stage = stage(Limits::default());
    stage.puppet.0.lock().obedient = true;
    let _ticket = stage.post(PostOptions::default());
    drop(stage.fabric);
    assert_eq!(stage.region.lease_count(), 0);
}

#[test]
fn a_dropped_waiter_does_not_free_the_lease() {
    let mut stage = stage(Limits::default());
    let ticket = stage.post(PostOptions::default());
    let id = ticket.id();
    drop(ticket);
    stage.fabric.poll(Instant::ZERO);
    assert_eq!(stage.region.lease_count(), 2);
    stage.says(finished(id, Outcome::DONE));
    assert_eq!(stage.region.lease_count(), 0);
    assert_eq!(stage.fabric.next_event(), None);
    // The ticket's place is free again.
    assert_eq!(stage.fabric.in_flight(), 0);
}

#[test]
fn unknown_and_doubled_events_are_counted_and_ignored() {
    let mut stage = stage(Limits::default());
    let ticket = stage.post(PostOptions::default());
    stage.says(finished(ticket.id(), Outcome::DONE));
    stage.says(finished(ticket.id(), Outcome::cancelled(FarEnd::Unknown)));
    stage.says(Event::Ended { ticket: ticket.id(), first: 0, count: 1, outcome: Outcome::cancelled(FarEnd::Unknown) });
    stage.says(Event::Progress { ticket: TicketId::from_bits(u64::MAX), bytes: 1 });
    assert_eq!(stage.fabric.stats().events_unknown, 3);
    assert!(stage.fabric.take(ticket).unwrap().is_done());
}

#[test]
fn outcomes_are_told_request_by_request() {
    let mut stage = stage(Limits::default());
    let batch = stage.batch(4);
    let ticket = stage.fabric.post(Instant::ZERO, stage.link, batch, PostOptions::default()).unwrap();
    let refused = Outcome::refused(crate::contract::Refusal::Busy);
    stage.says(Event::Ended { ticket: ticket.id(), first: 1, count: 2, outcome: refused });
    let ticket = stage.fabric.take(ticket).unwrap_err();
    stage.says(finished(ticket.id(), Outcome::DONE));
    let completion = stage.fabric.take(ticket).unwrap();
    let outcomes: Vec<_> = (0..4).map(|index| completion.outcome(index)).collect();
    assert_eq!(outcomes, [Outcome::DONE, refused, refused, Outcome::DONE]);
    assert_eq!((completion.bytes_done(), completion.is_done()), (20, false));
}

#[test]
fn a_deadline_cancels_and_then_closes_the_link() {
    let mut stage = stage(Limits::default());
    let ticket = stage.post(PostOptions::until(seconds(1)));
    stage.fabric.poll(seconds(0));
    assert!(stage.puppet.0.lock().cancels.is_empty());
    assert_eq!(stage.fabric.arm(seconds(0)), FabricWake::Within(Some(Duration::from_secs(1))));
    stage.fabric.poll(seconds(1));
    assert_eq!(stage.puppet.0.lock().cancels, [ticket.id()]);
    // It goes on moving, and does not answer the cancel.
    for second in 2..6 {
        stage.puppet.0.lock().events.push(Event::Progress { ticket: ticket.id(), bytes: 1 });
        stage.fabric.poll(seconds(second));
    }
    stage.fabric.poll(seconds(6));
    assert_eq!(stage.puppet.0.lock().closes, [(stage.link, LinkDownReason::Stalled)]);
}

#[test]
fn time_in_which_nobody_polled_stalls_no_link_and_a_deadline_lasts_as_long_as_it_did() {
    let mut stage = stage(Limits::default());
    let ticket = stage.post(PostOptions::until(seconds(3)));
    stage.fabric.poll(seconds(1));
    // Stopped for a minute.
    stage.fabric.on_stopped(Duration::from_secs(60));
    stage.fabric.poll(seconds(62));
    assert!(stage.puppet.0.lock().cancels.is_empty() && stage.puppet.0.lock().closes.is_empty());
    assert_eq!(stage.fabric.arm(seconds(62)), FabricWake::Within(Some(Duration::from_secs(1))));
    stage.fabric.poll(seconds(63));
    assert_eq!(stage.puppet.0.lock().cancels, [ticket.id()]);
    stage.fabric.poll(seconds(65));
    assert_eq!(
        stage.puppet.0.lock().closes,
        [(stage.link, LinkDownReason::Stalled)],
        "five seconds, of which it saw all"
    );
}

#[test]
fn a_link_that_moves_is_not_stalled_however_long_it_takes() {
    let mut stage = stage(Limits::default());
    let ticket = stage.post(PostOptions::default());
    for second in 0..100 {
        if second % 4 == 0 {
            stage.puppet.0.lock().events.push(Event::Progress { ticket: ticket.id(), bytes: 1 });
        }
        stage.fabric.poll(seconds(second));
    }
    assert!(stage.puppet.0.lock().closes.is_empty());
    stage.puppet.0.lock().obedient = true;
    for second in 100..104 {
        stage.fabric.poll(seconds(second));
    }
    assert!(matches!(stage.fabric.take(ticket).unwrap().outcome(0).end, End::LinkDown(LinkDownReason::Stalled)));
    let down = FabricEvent::LinkDown { link: stage.link, reason: LinkDownReason::Stalled };
    let events: Vec<_> = core::iter::from_fn(|| stage.fabric.next_event()).collect();
    assert_eq!(events.last(), Some(&down));
    assert_eq!(stage.fabric.link(stage.link), None);
}

#[test]
fn full_tables_are_answers_and_give_back_what_was_handed_in() {
    let limits =
        Limits { tickets_max: 1, exposures_max: 2, remotes_max: 1, links_max: 1, regions_max: 2, ..Limits::default() };
    let mut stage = stage(limits);
    let _held = stage.post(PostOptions::default());
    let mut batch = Batch::new();
    batch.write(stage.region.carve(500, 10).unwrap().freeze(), Extent::new(stage.remote, 0, 10));
    let refused = stage.fabric.post(Instant::ZERO, stage.link, batch, PostOptions::default()).unwrap_err();
    assert_eq!((refused.reason, refused.batch.len()), (PostError::TicketsFull { tickets_max: 1 }, 1));
    let grant = stage.fabric.grant_write(vec![stage.region.carve(600, 10).unwrap()]).unwrap();
    let refused = stage.fabric.grant_write(vec![stage.region.carve(700, 10).unwrap()]).unwrap_err();
    assert_eq!((refused.reason, refused.ranges.len()), (GrantError::Full { exposures_max: 2 }, 1));
    assert_eq!(stage.fabric.attach(grant.token()), Err(AttachError::Full { remotes_max: 1 }));
    assert!(matches!(
        stage.fabric.allocate(10, AllocateOptions::default()),
        Err(AllocateError::Full { regions_max: 2 })
    ));
    let device = DeviceId(0);
    let link = stage.fabric.open(Instant::ZERO, device, Connection::Loopback, LinkOptions::default());
    assert_eq!(link, Err(LinkError::Full { links_max: 1 }));
    // A dropped grant makes room by itself.
    drop(grant);
    stage.fabric.grant_write(refused.ranges).unwrap();
}

#[test]
fn too_large_a_batch_is_refused_with_the_bounds() {
    let mut stage = stage(Limits::default());
    let batch = stage.batch(5);
    let refused = stage.fabric.post(Instant::ZERO, stage.link, batch, PostOptions::default()).unwrap_err();
    assert_eq!(refused.reason, PostError::TooLarge { moves_max: 4, bytes_max: 1 << 20 });
}

#[test]
fn memory_of_a_kind_that_the_transport_does_not_move_never_reaches_it() {
    let mut stage = stage(Limits::default());
    let host = stage.fabric.attached(stage.remote).unwrap();
    for kind in [MemoryKind::Cuda { device: 0 }, MemoryKind::Hip { device: 7 }, MemoryKind::Pinned, MemoryKind::File] {
        let RegionToken { region, memory, offset, len, rights, capability, incarnation, epoch_word, .. } = host;
        let token = RegionToken::new(region, memory, offset, len, kind, rights, capability, incarnation, epoch_word);
        stage.remote = stage.fabric.attach(token).unwrap();
        let batch = stage.batch(1);
        let refused = stage.fabric.post(Instant::ZERO, stage.link, batch, PostOptions::default()).unwrap_err();
        assert_eq!(refused.reason, PostError::NotReachable { index: 0 }, "{kind:?}");
        assert!(stage.puppet.0.lock().posts.is_empty());
    }
}

#[test]
fn grants_of_several_or_foreign_regions_are_refused() {
    let mut stage = stage(Limits::default());
    let other = stage.fabric.allocate(100, AllocateOptions::default()).unwrap();
    let both = vec![stage.region.carve(0, 1).unwrap(), other.carve(0, 1).unwrap()];
    assert_eq!(stage.fabric.grant_write(both).unwrap_err().reason, GrantError::ForeignRegion);
    assert_eq!(stage.fabric.grant_read(Vec::new()).unwrap_err().reason, GrantError::Empty);
    let mut elsewhere = self::stage(Limits::default());
    let foreign = vec![elsewhere.region.carve(0, 1).unwrap()];
    assert_eq!(stage.fabric.grant_write(foreign).unwrap_err().reason, GrantError::ForeignRegion);
    let ticket = elsewhere.post(PostOptions::default());
    assert!(!stage.fabric.is_finished(&ticket), "a ticket of another fabric is nothing here");
    assert!(stage.fabric.take(ticket).is_err());
}

#[test]
fn a_region_without_handles_is_released_once_nothing_is_in_flight() {
    let mut stage = stage(Limits::default());
    let raw = stage.fabric.allocate(100, AllocateOptions::raw(Rights::LOCAL)).unwrap();
    let id = raw.id();
    let mut batch = Batch::new();
    batch.write_raw(raw.extent(0, 100), Extent::new(stage.remote, 0, 100));
    let ticket = stage.fabric.post(Instant::ZERO, stage.link, batch, PostOptions::default()).unwrap();
    drop(raw);
    stage.fabric.poll(Instant::ZERO);
    assert!(!stage.puppet.0.lock().released.contains(&id));
    stage.says(finished(ticket.id(), Outcome::DONE));
    assert_eq!(stage.puppet.0.lock().released.iter().filter(|released| **released == id).count(), 1);
    let leased = stage.fabric.allocate(100, AllocateOptions::default()).unwrap();
    let (id, lease) = (leased.id(), leased.carve(0, 10).unwrap());
    drop(leased);
    stage.fabric.poll(Instant::ZERO);
    assert!(!stage.puppet.0.lock().released.contains(&id), "a lease is a handle");
    drop(lease);
    stage.fabric.poll(Instant::ZERO);
    assert!(stage.puppet.0.lock().released.contains(&id));
}

#[test]
fn a_dropped_handle_wakes_the_fabric() {
    let mut stage = stage(Limits::default());
    let grant = stage.fabric.grant_write(vec![stage.region.carve(0, 1).unwrap()]).unwrap();
    assert_eq!(stage.fabric.arm(Instant::ZERO), FabricWake::Within(None));
    std::thread::spawn(move || drop(grant)).join().unwrap();
    let fd = stage.fabric.wake_fd();
    let mut polled = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
    let ready = rustix::event::poll(&mut polled, Some(&rustix::event::Timespec::default())).unwrap();
    assert_eq!(ready, 1);
    assert_eq!(stage.fabric.arm(Instant::ZERO), FabricWake::Now);
    stage.fabric.poll(Instant::ZERO);
    assert_eq!(stage.region.lease_count(), 0);
}

#[test]
fn capabilities_differ_by_grant_and_by_secret() {
    let mut stage = stage(Limits::default());
    let mut tokens = Vec::new();
    for _ in 0..3 {
        let grant = stage.fabric.grant_write(vec![stage.region.carve(0, 1).unwrap()]).unwrap();
        tokens.push(grant.token());
        stage.fabric.close(grant);
    }
    let different = |a: &RegionToken, b: &RegionToken| !a.capability.matches(&b.capability) && a.region != b.region;
    assert!(different(&tokens[0], &tokens[1]) && different(&tokens[1], &tokens[2]));
}

/// The end of a forked child that does `work` and says whether all was well; `None` if a signal ended it.
fn forked(work: impl FnOnce() -> bool) -> Option<i32> {
    // SAFETY:
    // - the child has this thread alone: it takes no lock that another thread of the test runner could hold, but for the
    //   allocator's, which the C library makes whole in a child, and leaves without running anything else.
    // - `waitpid` writes to the one integer that it is given.
    unsafe {
        let child = libc::fork();
        assert!(child >= 0, "no process could be forked");
        if child == 0 {
            libc::_exit(i32::from(!work()));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status))
    }
}

#[test]
#[cfg_attr(miri, ignore = "fork")]
fn a_forked_child_is_told_so_and_neither_reads_nor_writes_what_is_the_parents() {
    let mut fabric = Fabric::new(FabricOptions::new([3; 32])).unwrap();
    let device = fabric.add_device(Box::new(crate::backend::host::Host::new())).unwrap();
    let link = fabric.open(Instant::ZERO, device, Connection::Loopback, LinkOptions::default()).unwrap();
    let region = fabric.allocate(3 * 4096, AllocateOptions::default()).unwrap();
    let mut source = region.carve(0, 4096).unwrap();
    source.fill(7);
    let source = source.freeze();
    let grant = fabric.grant_write(vec![region.carve(4096, 4096).unwrap()]).unwrap();
    let remote = fabric.attach(grant.token()).unwrap();
    let batch = || {
        let mut batch = Batch::new();
        batch.write(source.clone(), Extent::new(remote, 4096, 4096));
        batch
    };
    let ticket = fabric.post(Instant::ZERO, link, batch(), PostOptions::default()).unwrap();
    let refused = forked(|| {
        let refused = fabric.post(Instant::ZERO, link, batch(), PostOptions::default());
        let is_told = refused.is_err_and(|refused| refused.reason == PostError::Forked);
        let is_idle = fabric.poll(Instant::ZERO) == Turn::Idle && !fabric.is_finished(&ticket);
        is_told && is_idle && matches!(fabric.arm(Instant::ZERO), FabricWake::Within(None))
    });
    assert_eq!(refused, Some(0));
    // A child that takes addresses along does not have the memory.
    let mut buffer = region.carve(8192, 4096).unwrap();
    let written = forked(|| {
        buffer.fill(1);
        true
    });
    assert_eq!(written, None, "a signal ends it");
    assert!(buffer.iter().all(|&byte| byte == 0));
    // The parent goes on as if there had been no child.
    while !fabric.is_finished(&ticket) {
        fabric.poll(Instant::ZERO);
    }
    assert!(fabric.take(ticket).unwrap().is_done());
    assert!(fabric.close(grant)[0].iter().all(|&byte| byte == 7));
}
