//! Memory over there that one actor moves bytes to and from, and what it should hold.

use std::collections::{BTreeMap, BTreeSet};

use millpond_node::engine::{Backing, Engine, Grant, Region, RegionToken, Rights};
use parking_lot::Mutex;

use crate::virtual_time::Virtual;

/// Places that are written, and the length of each in bytes; the last is cut into several slices.
pub(crate) const LENS: [u64; 5] = [8, 512, 4096, 70_000, 600_000];
/// What is read, after the places.
pub(crate) const LIBRARY_LEN: u64 = 200_000;
/// What a caller's memory is filled with as soon as its transfer ended. Nobody writes it on purpose.
pub(crate) const POISON: u32 = 0xdead_beef;

/// Where a place begins.
pub(crate) fn offset(place: usize) -> u64 {
    LENS[..place].iter().sum()
}

/// A word of the library.
pub(crate) fn book(at: usize) -> u32 {
    u32::try_from(at).expect("small").wrapping_mul(2_654_435_761) | 1
}

/// What a place may hold: one value throughout, or any mixture of several.
#[derive(Clone, Debug)]
pub(crate) struct Held(BTreeSet<u32>);

impl Held {
    fn only(value: u32) -> Self {
        Self(BTreeSet::from([value]))
    }
}

/// What is known of one actor's memory.
#[derive(Debug)]
pub(crate) struct Account {
    places: BTreeMap<usize, Held>,
    /// Arrivals that were announced for certain, and those that may have been.
    arrived: (u64, u64),
    /// An actor is at it.
    pub(crate) is_busy: bool,
}

/// Memory of one actor at the node that it writes to and reads from, in one incarnation of that node.
pub(crate) struct Shore {
    memory: Region,
    pub(crate) token: RegionToken,
    /// Where arrivals are counted.
    counted: Grant,
    _counted_memory: Region,
    pub(crate) account: Mutex<Account>,
}

impl Shore {
    pub(crate) fn new(engine: &Engine<Virtual>) -> Self {
        let library = offset(LENS.len());
        let rights = Rights::REMOTE_WRITE | Rights::REMOTE_READ;
        let memory = engine.allocate_raw(library + LIBRARY_LEN, Backing::Heap, rights).expect("there is memory");
        let words = usize::try_from(LIBRARY_LEN / 4).expect("small");
        let books: Vec<u8> = (0..words).flat_map(|at| book(at).to_le_bytes()).collect();
        memory.write_at(library, &books).expect("it fits");
        let token = engine.expose(&memory).expect("a raw region");
        let counted_memory = engine.allocate(4096, Backing::Heap).expect("there is memory");
        let counted = engine.grant_write(vec![counted_memory.carve(0, 64).expect("it is free")]).expect("it is ours");
        let places = (0..LENS.len()).map(|place| (place, Held::only(0))).collect();
        let account = Account { places, arrived: (0, 0), is_busy: false };
        Self { memory, token, counted, _counted_memory: counted_memory, account: Mutex::new(account) }
    }

    pub(crate) fn counted(&self) -> RegionToken {
        self.counted.token()
    }

    /// `value` is on its way to a place. Gives what was known before.
    pub(crate) fn on_start(&self, place: usize, value: u32) -> Held {
        let mut account = self.account.lock();
        let held = account.places.get_mut(&place).expect("a place");
        let before = held.clone();
        held.0.insert(value);
        before
    }

    /// It is there, and nothing else any more.
    pub(crate) fn on_done(&self, place: usize, value: u32) -> Result<(), String> {
        self.account.lock().places.insert(place, Held::only(value));
        self.check(place)
    }

    /// It never was there.
    pub(crate) fn on_untouched(&self, place: usize, before: Held) -> Result<(), String> {
        self.account.lock().places.insert(place, before);
        self.check(place)
    }

    /// An arrival is on its way.
    pub(crate) fn on_announced(&self) {
        self.account.lock().arrived.1 += 1;
    }

    /// It was counted, or it was not; neither: that is not known.
    pub(crate) fn on_arrival(&self, counted: Option<bool>) -> Result<(), String> {
        {
            let arrived = &mut self.account.lock().arrived;
            arrived.0 += u64::from(counted == Some(true));
            arrived.1 -= u64::from(counted == Some(false));
        }
        self.check_arrivals()
    }

    fn check_arrivals(&self) -> Result<(), String> {
        let (least, most) = self.account.lock().arrived;
        let count = self.counted.count(0);
        if (least..=most).contains(&count) { Ok(()) } else { Err(format!("{count} arrivals, not {least}..={most}")) }
    }

    /// A place holds what it may.
    pub(crate) fn check(&self, place: usize) -> Result<(), String> {
        let mut bytes = vec![0; usize::try_from(LENS[place]).expect("small")];
        self.memory.read_at(offset(place), &mut bytes).expect("it is inside");
        let held = self.account.lock().places[&place].clone();
        let first = held.0.first().map_or([0; 4], |value| value.to_le_bytes());
        if bytes.chunks_exact(4).all(|word| word == first) {
            return Ok(());
        }
        // A slice may end anywhere, in the middle of a word too.
        for (at, byte) in bytes.iter().enumerate() {
            if !held.0.iter().any(|value| value.to_le_bytes()[at % 4] == *byte) {
                return Err(format!("byte {at} of place {place} is {byte:#x}, of none of {held:x?}"));
            }
        }
        Ok(())
    }

    /// The same for the small places only.
    pub(crate) fn check_some(&self) -> Result<(), String> {
        (0..LENS.len()).filter(|place| LENS[*place] < 5000).try_for_each(|place| self.check(place))?;
        self.check_arrivals()
    }

    pub(crate) fn check_all(&self) -> Result<(), String> {
        (0..LENS.len()).try_for_each(|place| self.check(place))?;
        self.check_arrivals()
    }
}
