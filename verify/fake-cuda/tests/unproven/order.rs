//! Work that is not ours, beside and before ours.

use std::sync::Arc;

use millpond_core::batch::{Extent, Rights};
use millpond_core::time::{Duration, Instant};
use millpond_hal::backend::cuda::Cuda;
use millpond_hal::backend::host::Host;
use millpond_hal::contract::{Connection, End, FarEnd, Fence, FenceState, LinkDownReason, LinkId, Outcome, Turn};
use millpond_hal::fabric::{
    Batch, Completion, Fabric, FabricEvent, FabricOptions, FabricWake, Grant, LinkOptions, PostError, PostOptions,
    Ticket,
};
use millpond_hal::region::{Mode, Region};

use crate::fake::{self, Fake, address};

const LEN: u64 = 100_000;

/// Memory of a GPU that may be written, and memory of the host full of sevens.
struct Stage {
    fabric: Fabric,
    link: LinkId,
    source: Region,
    target: Region,
    grant: Option<Grant>,
    there: millpond_core::batch::RegionId,
}

fn stage(cuda: &Cuda) -> Stage {
    let (mut fabric, link) = fake::fabric(cuda, LinkOptions::default());
    let source = fabric.allocate(LEN, Default::default()).unwrap();
    let target = fabric.insert_region(cuda.allocate(0, LEN).unwrap(), Mode::Leased).unwrap();
    let grant = fabric.grant_write(vec![target.carve(0, LEN).unwrap()]).unwrap();
    let there = fabric.attach(grant.token()).unwrap();
    Stage { fabric, link, source, target, grant: Some(grant), there }
}

impl Stage {
    fn batch(&self) -> Batch {
        let mut bytes = self.source.carve(0, LEN).unwrap();
        bytes.fill(7);
        let mut batch = Batch::new();
        batch.write(bytes.freeze(), Extent::new(self.there, 0, LEN)).arrival(self.there, 0, 1);
        batch
    }

    fn post(&mut self, batch: Batch) -> Ticket {
        self.fabric.post(Instant::ZERO, self.link, batch, PostOptions::default()).unwrap()
    }

    /// Polls until nothing is to be done at once.
    fn polls(&mut self, now: Instant) {
        while self.fabric.poll(now) == Turn::Worked {}
    }

    fn end(&mut self, ticket: Ticket) -> Completion {
        while !self.fabric.is_finished(&ticket) {
            self.fabric.poll(Instant::ZERO);
            std::thread::yield_now();
        }
        self.fabric.take(ticket).unwrap()
    }

    fn target_bytes(&self, fake: &Fake) -> Vec<u8> {
        let mut bytes = vec![0; LEN as usize];
        fake.peek(address(&self.target, 0), &mut bytes);
        bytes
    }
}

fn fence(cuda: &Cuda, stream: usize) -> Arc<dyn Fence> {
    // SAFETY: a stream of the primary context of GPU 0, which the test made and keeps.
    unsafe { cuda.fence(0, stream).unwrap() }
}

/// Puts a clearing of the target into somebody's stream: what a kernel that fills it would be.
fn foreign_work(fake: &Fake, stage: &Stage) -> usize {
    let stream = fake.foreign_stream(0);
    fake.block(stream, true);
    let target = address(&stage.target, 0);
    fake::on_gpu(0, || {
        let stream = std::ptr::with_exposed_provenance_mut(stream);
        // SAFETY: the target is allocated for as long; the stream exists.
        unsafe { cudarc::driver::sys::cuMemsetD8Async(target, 0, LEN as usize, stream) }
    });
    stream
}

#[test]
fn a_batch_starts_after_the_work_before_its_fence() {
    let Some(fake) = fake::alone(5) else { return };
    let cuda = Cuda::open().unwrap();
    let mut stage = stage(&cuda);
    let stream = foreign_work(&fake, &stage);
    let fence = fence(&cuda, stream);
    let mut batch = stage.batch();
    batch.after(Arc::clone(&fence));
    let ticket = stage.post(batch);
    // However long that takes, it is no stall.
    for second in 0..30 {
        stage.polls(Instant::ZERO + Duration::from_secs(second));
        assert!(matches!(stage.fabric.arm(Instant::ZERO + Duration::from_secs(second)), FabricWake::Within(Some(_))));
    }
    assert_eq!((fence.state(), fake.count(c"cuMemcpyHtoDAsync")), (FenceState::Pending, 0));
    fake.block(stream, false);
    assert!(stage.end(ticket).is_done());
    assert_eq!(fence.state(), FenceState::Passed);
    assert!(stage.target_bytes(&fake).iter().all(|&byte| byte == 7), "the work before it came after it");
    fake.assert_clean();
}

#[test]
fn a_batch_that_waits_for_a_fence_is_cancelled_untouched() {
    let Some(fake) = fake::alone(6) else { return };
    let cuda = Cuda::open().unwrap();
    let mut stage = stage(&cuda);
    let stream = foreign_work(&fake, &stage);
    let mut batch = stage.batch();
    batch.after(fence(&cuda, stream));
    let ticket = stage.post(batch);
    stage.polls(Instant::ZERO);
    stage.fabric.cancel(Instant::ZERO, &ticket);
    assert_eq!(stage.end(ticket).outcome(0), Outcome::cancelled(FarEnd::Untouched));
    let grant = stage.grant.take().unwrap();
    assert_eq!(stage.fabric.arrived(grant.id(), 0), 0);
    // The memory is ours again although the other work still runs.
    assert_eq!(stage.source.lease_count(), 0);
    assert_eq!(fake.count(c"cuMemcpyHtoDAsync"), 0);
    fake.block(stream, false);
    fake.settle();
    fake.assert_clean();
}

#[test]
fn a_fence_whose_gpu_fails_refuses_its_batch() {
    let Some(fake) = fake::alone(7) else { return };
    let cuda = Cuda::open().unwrap();
    let mut stage = stage(&cuda);
    let stream = foreign_work(&fake, &stage);
    let mut batch = stage.batch();
    batch.after(fence(&cuda, stream));
    let ticket = stage.post(batch);
    stage.polls(Instant::ZERO);
    fake.kill(0);
    let outcome = stage.end(ticket).outcome(0);
    assert_eq!(outcome, Outcome::refused(millpond_hal::contract::Refusal::Failed));
}

#[test]
fn a_transport_that_does_not_wait_for_fences_refuses_the_batch() {
    let Some(fake) = fake::alone(8) else { return };
    let cuda = Cuda::open().unwrap();
    let stream = fake.foreign_stream(0);
    let mut fabric = Fabric::new(FabricOptions::new([2; 32])).unwrap();
    let host = fabric.add_device(Box::new(Host::new())).unwrap();
    let link = fabric.open(Instant::ZERO, host, Connection::Loopback, LinkOptions::default()).unwrap();
    let mut batch = Batch::new();
    batch.after(fence(&cuda, stream));
    let refused = fabric.post(Instant::ZERO, link, batch, PostOptions::default()).unwrap_err();
    assert_eq!(refused.reason, PostError::NotOrdered);
}

#[test]
fn copies_do_not_wait_for_other_peoples_streams_and_end_by_events() {
    let Some(fake) = fake::alone(9) else { return };
    let cuda = Cuda::open().unwrap();
    let mut stage = stage(&cuda);
    let stream = foreign_work(&fake, &stage);
    let batch = stage.batch();
    let ticket = stage.post(batch);
    assert!(stage.end(ticket).is_done(), "while somebody else's work takes for ever");
    let grant = stage.grant.take().unwrap();
    assert_eq!(stage.fabric.arrived(grant.id(), 0), 1);
    assert!(stage.target_bytes(&fake).iter().all(|&byte| byte == 7));
    assert!(fake.count(c"cuEventQuery") > 0);
    fake.assert_clean();
    fake.block(stream, false);
}

#[test]
fn nothing_is_done_in_the_call_that_posts_and_the_gpu_wakes_who_sleeps() {
    let Some(fake) = fake::alone(10) else { return };
    let cuda = Cuda::open().unwrap();
    let mut stage = stage(&cuda);
    fake.settle();
    fake.hold(0);
    let batch = stage.batch();
    let ticket = stage.post(batch);
    stage.polls(Instant::ZERO);
    assert_eq!(fake.count(c"cuMemcpyHtoDAsync"), 1);
    assert!(stage.target_bytes(&fake).iter().all(|&byte| byte == 0), "it was put in, and not done");
    assert!(matches!(stage.fabric.arm(Instant::ZERO), FabricWake::Within(Some(_))));
    fake.go();
    let fd = stage.fabric.wake_fd();
    let mut polled = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
    // The time limit is there to fail by: the GPU's word comes at once.
    let limit = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut polled, Some(&limit)).unwrap(), 1, "the GPU does not wake who sleeps");
    assert!(stage.end(ticket).is_done());
}

#[test]
fn a_batch_cancelled_in_flight_keeps_its_memory_until_its_copies_are_done() {
    let Some(fake) = fake::alone(11) else { return };
    let cuda = Cuda::open().unwrap();
    let mut stage = stage(&cuda);
    fake.settle();
    fake.hold(0);
    let batch = stage.batch();
    let ticket = stage.post(batch);
    stage.polls(Instant::ZERO);
    stage.fabric.cancel(Instant::ZERO, &ticket);
    stage.polls(Instant::ZERO);
    assert!(!stage.fabric.is_finished(&ticket) && stage.source.lease_count() == 1, "the GPU still reads it");
    fake.go();
    assert!(stage.end(ticket).is_done(), "all of it had been put in");
    assert!(stage.target_bytes(&fake).iter().all(|&byte| byte == 7));
}

#[test]
fn a_grant_is_taken_back_only_when_no_copy_reaches_it() {
    let Some(fake) = fake::alone(15) else { return };
    let cuda = Cuda::open().unwrap();
    let mut stage = stage(&cuda);
    fake.settle();
    fake.hold(0);
    let batch = stage.batch();
    let ticket = stage.post(batch);
    stage.polls(Instant::ZERO);
    let going = fake.go_when_waited_for();
    let grant = stage.grant.take().unwrap();
    let target = stage.fabric.close(grant);
    assert!(stage.target_bytes(&fake).iter().all(|&byte| byte == 7), "the copy came after the grant was taken back");
    drop((going, target));
    // It had been made before; that it arrived, nobody may count any more.
    let outcome = stage.end(ticket).outcome(0);
    let stale = Outcome { far_end: FarEnd::Done, ..Outcome::refused(millpond_hal::contract::Refusal::Stale) };
    assert_eq!(outcome, stale);
    fake.assert_clean();
}

#[test]
fn pages_are_unlocked_only_when_no_copy_reaches_them() {
    let Some(fake) = fake::alone(16) else { return };
    let cuda = Cuda::open().unwrap();
    let mut stage = stage(&cuda);
    fake.settle();
    fake.hold(0);
    let batch = stage.batch();
    let _ticket = stage.post(batch);
    stage.polls(Instant::ZERO);
    let locked = fake.count(c"cuMemHostUnregister");
    let going = fake.go_when_waited_for();
    drop(stage);
    assert_eq!(fake.count(c"cuMemHostUnregister"), locked + 1);
    drop(going);
    fake.assert_clean();
}

#[test]
fn a_gpu_that_fails_ends_the_link_and_claims_nothing() {
    let Some(fake) = fake::alone(12) else { return };
    let cuda = Cuda::open().unwrap();
    let mut stage = stage(&cuda);
    fake.settle();
    fake.hold(0);
    let batch = stage.batch();
    let ticket = stage.post(batch);
    stage.polls(Instant::ZERO);
    fake.kill(0);
    let outcome = stage.end(ticket).outcome(0);
    assert!(matches!(outcome.end, End::LinkDown(LinkDownReason::System(_))), "{outcome:?}");
    assert_eq!(outcome.far_end, FarEnd::Unknown);
    stage.polls(Instant::ZERO);
    let events: Vec<_> = std::iter::from_fn(|| stage.fabric.next_event()).collect();
    assert!(events.iter().any(|event| matches!(event, FabricEvent::LinkDown { .. })), "{events:?}");
    assert!(stage.fabric.link(stage.link).is_none());
}

#[test]
fn a_copy_that_the_driver_does_not_take_is_refused_and_its_siblings_are_done() {
    let Some(fake) = fake::alone(13) else { return };
    let cuda = Cuda::open().unwrap();
    let mut stage = stage(&cuda);
    fake.fail(c"cuMemcpyHtoDAsync", 1, 1);
    let mut batch = Batch::new();
    for n in 0..3 {
        let mut bytes = stage.source.carve(n * 100, 100).unwrap();
        bytes.fill(9);
        batch.write(bytes.freeze(), Extent::new(stage.there, n * 100, 100));
    }
    let ticket = stage.post(batch);
    let completion = stage.end(ticket);
    let refused = Outcome::refused(millpond_hal::contract::Refusal::Failed);
    let outcomes: Vec<_> = (0..3).map(|index| completion.outcome(index)).collect();
    assert_eq!(outcomes, [Outcome::DONE, refused, Outcome::DONE]);
    let bytes = stage.target_bytes(&fake);
    assert!(bytes[..100].iter().chain(&bytes[200..300]).all(|&byte| byte == 9));
    assert!(bytes[100..200].iter().all(|&byte| byte == 0));
}

#[test]
fn overlapping_parts_of_a_gpus_memory_are_not_copied() {
    let Some(_fake) = fake::alone(14) else { return };
    let cuda = Cuda::open().unwrap();
    let (mut fabric, link) = fake::fabric(&cuda, LinkOptions::default());
    let mode = Mode::Raw(Rights::REMOTE_READ | Rights::REMOTE_WRITE);
    let region = fabric.insert_region(cuda.allocate(0, LEN).unwrap(), mode).unwrap();
    let token = fabric.expose(&region).unwrap();
    let there = fabric.attach(token).unwrap();
    let mut batch = Batch::new();
    batch.write_raw(region.extent(0, 1000), Extent::new(there, 500, 1000));
    let ticket = fabric.post(Instant::ZERO, link, batch, PostOptions::default()).unwrap();
    while !fabric.is_finished(&ticket) {
        fabric.poll(Instant::ZERO);
    }
    let outcome = fabric.take(ticket).unwrap().outcome(0);
    assert_eq!(outcome, Outcome::refused(millpond_hal::contract::Refusal::OutOfBounds));
}
