//! Tests of the module above.

use millpond_hal::mapping::{Backing, Mapping};
use millpond_hal::region::Mode;

use super::*;

const NOW: Instant = Instant::ZERO;

fn segment(capacity: u64, slots_max: u32) -> Segment {
    let shape = Shape { facts: SegmentFacts::dram(0, 5, capacity), slots_max, policy: Kind::Lru };
    let mapping = Mapping::new(shape.region_len(), Backing::Heap).unwrap();
    Segment::new(NodeId([1; 16]), Region::unregistered(mapping, Mode::Leased), shape).unwrap()
}

fn value(key: &[u8], bytes: RegionBytes, parent: Option<&[u8]>) -> Value {
    Value { key: key.into(), bytes, checksums: Arc::new([0]), pin: Pin::Free, parent: parent.map(Into::into) }
}

fn store(segment: &mut Segment, key: &[u8], len: u64, parent: Option<&[u8]>) -> SlotId {
    let Reserved { id, mut buf } = segment.reserve(len).unwrap();
    segment.begin_writing(id);
    buf.fill(key[0]);
    assert!(segment.seal(NOW, id, value(key, buf.freeze(), parent)));
    segment.confirm(id, Stamp { term: 1, n: 1 }, false);
    id
}

#[test]
fn bytes_that_a_reader_holds_rest_until_it_is_done() {
    let mut segment = segment(8192, 4);
    let id = store(&mut segment, b"a", 8192, None);
    let at = segment.location(id);
    let pinned = segment.pin(NOW, b"a", &at).unwrap();
    assert!(segment.release(NOW, id) && !segment.release(NOW, id));
    assert!(segment.pin(NOW, b"a", &at).is_none(), "gone for everybody who asks");
    assert_eq!(segment.reserve(1).unwrap_err(), ReserveError::NoSpace);
    assert!(pinned.bytes.iter().all(|byte| *byte == b'a'));
    drop(pinned);
    assert_eq!(segment.reserve(8192).unwrap().id.generation, 2);
}

#[test]
fn a_location_names_one_life_of_a_slot() {
    let mut segment = segment(1 << 20, 1);
    let old = store(&mut segment, b"a", 10, None);
    let old_at = segment.location(old);
    segment.release(NOW, old);
    let new = store(&mut segment, b"a", 10, None);
    assert_eq!((new.slot, segment.pin(NOW, b"a", &old_at).is_none()), (old.slot, true));
    let at = segment.location(new);
    assert!(segment.pin(NOW, b"b", &at).is_none(), "another key");
    assert!(segment.pin(NOW, b"a", &Location { epoch: 4, ..at }).is_none(), "another life of the segment");
    assert!(segment.pin(NOW, b"a", &at).is_some());
}

#[test]
fn a_reservation_that_is_given_up_leaves_nothing_behind() {
    let mut segment = segment(4096, 2);
    let before = segment.counts();
    let Reserved { id, buf } = segment.reserve(4096).unwrap();
    segment.release(NOW, id);
    assert_eq!(segment.counts().leaving, 1, "a transfer may still write to it");
    drop(buf);
    segment.sweep();
    assert_eq!(segment.counts(), before);
    let Reserved { id: later, buf } = segment.reserve(4096).unwrap();
    assert!(!segment.seal(NOW, id, value(b"a", buf.freeze(), None)), "the old life is over");
    assert_eq!(later.slot, id.slot);
}

#[test]
fn a_leaf_is_proposed_before_its_parent_and_spared_ones_stay() {
    let mut segment = segment(1 << 20, 8);
    let parent = store(&mut segment, b"p", 1000, None);
    let child = store(&mut segment, b"c", 1000, Some(b"p"));
    let first = segment.propose(NOW, 1, 8);
    assert_eq!(first.iter().map(|proposal| proposal.id).collect::<Vec<_>>(), [child]);
    segment.spare(NOW, child);
    let at = segment.location(child);
    assert!(segment.pin(NOW, b"c", &at).is_some());
    for _ in 0..2 {
        let next = segment.propose(NOW, 1, 8);
        assert_eq!(next.len(), 1);
        segment.release(NOW, next[0].id);
    }
    assert!(!segment.holds(b"p") && !segment.holds(b"c"));
    assert!(!segment.release(NOW, parent));
    assert_eq!(segment.counts(), Counts { free: 1 << 20, ..Counts::default() });
}

#[test]
fn a_value_that_never_fits_is_told_apart_from_one_that_does_not_fit_now() {
    let mut segment = segment(8192, 2);
    assert_eq!(segment.reserve(8193).unwrap_err(), ReserveError::TooLong);
    store(&mut segment, b"a", 5000, None);
    assert_eq!(segment.reserve(5000).unwrap_err(), ReserveError::NoSpace);
    store(&mut segment, b"b", 10, None);
    assert_eq!(segment.reserve(10).unwrap_err(), ReserveError::NoSlot);
}

#[test]
fn the_table_in_the_segment_says_what_the_slots_hold() {
    let mut segment = segment(1 << 20, 4);
    let id = store(&mut segment, b"a", 700, None);
    let read = |segment: &Segment| Record::decode(segment.table[..SLOT_LEN].try_into().unwrap()).unwrap();
    let record = read(&segment);
    assert_eq!((record.state, record.generation, record.len), (State::Sealed, id.generation, 700));
    assert_eq!((record.object, record.version), (object_id(b"a"), Stamp { term: 1, n: 1 }));
    segment.release(NOW, id);
    assert_eq!(read(&segment).state, State::Free);
}
