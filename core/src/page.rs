//! Pages of KV memory, all of one size, and who may touch them.
//!
//! A page is free, filling (one writer), sealed (readable), leased (readers hold it) or quarantined (nobody's, but
//! something far away may still write it). Only a sealed page can be leased; only a page without leases can be freed; a
//! quarantined page comes back by [`Pages::quiet`] alone. This module never sees an address: page `n` of a region of
//! equal pages lies at `n` times their size.
//!
//! Invariants: a page's epoch is odd while it is not free, so a handle is good from [`Pages::allocate`] until the page is
//! free again; the five counts always add up to the pages of the table. Every operation is O(1), or O(pages asked for).

use core::fmt;

use crate::seeded::{self, Bug};
use crate::slab::Handle;

const NONE: u32 = u32::MAX;
/// The last even epoch: a page that reached the one after it is retired when it is freed.
const EPOCH_LAST: u32 = u32::MAX - 3;

/// Where a page is in its life.
///
/// ```
/// use millpond_core::page::{Page, Pages, State};
/// let mut pages = Pages::new([Page::EMPTY; 2]);
/// let page = pages.allocate().unwrap();
/// assert_eq!(pages.state(page), Some(State::Filling));
/// pages.quarantine(page).unwrap(); // a peer may still write it
/// assert_eq!((pages.state(page), pages.counts().free), (Some(State::Quarantined), 1));
/// pages.quiet(page).unwrap();
/// assert_eq!(pages.counts().free, 2);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// Its one owner writes it; nobody reads it.
    Filling,
    /// Written and unchanging; nobody holds it.
    Sealed,
    /// Sealed, and held by this many readers (at least 1).
    Leased(u32),
    /// Given up while a peer may still write it.
    Quarantined,
}

/// One page of a [`Pages`]: make an array or boxed slice of `Page::EMPTY` as its storage.
///
/// ```
/// use millpond_core::page::{Page, Pages};
/// let mut storage = [Page::EMPTY; 16];
/// assert_eq!(Pages::new(&mut storage[..]).counts().free, 16);
/// ```
#[derive(Clone, Debug)]
pub struct Page {
    epoch: u32,
    /// Next free page, for a free page.
    next_free: u32,
    /// `None` while free.
    state: Option<State>,
}

impl Page {
    /// A page that was never used.
    pub const EMPTY: Self = Self { epoch: 0, next_free: NONE, state: None };
}

impl Default for Page {
    fn default() -> Self {
        Self::EMPTY
    }
}

/// How many pages are in which state.
///
/// ```
/// use millpond_core::page::{Page, Pages};
/// let pages = Pages::new([Page::EMPTY; 8]);
/// assert_eq!((pages.counts().free, pages.counts().total()), (8, 8));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Can be allocated.
    pub free: u32,
    /// Being written.
    pub filling: u32,
    /// Sealed without a reader.
    pub sealed: u32,
    /// Sealed with at least one reader.
    pub leased: u32,
    /// Waiting for [`Pages::quiet`].
    pub quarantined: u32,
    /// Out of use for good: their epochs ran out.
    pub retired: u32,
}

impl Counts {
    /// All pages of the table.
    #[must_use]
    pub const fn total(&self) -> u32 {
        self.free + self.filling + self.sealed + self.leased + self.quarantined + self.retired
    }
}

/// Why a page stays as it is.
///
/// ```
/// use millpond_core::page::{Page, PageError, Pages, State};
/// let mut pages = Pages::new([Page::EMPTY; 1]);
/// let page = pages.allocate().unwrap();
/// assert_eq!(pages.lease(page), Err(PageError::State(page, State::Filling)));
/// pages.free(page).unwrap();
/// assert_eq!(pages.seal(page), Err(PageError::Stale(page)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PageError {
    /// The page was freed since this handle was made.
    Stale(Handle),
    /// The page is not in a state that allows it.
    State(Handle, State),
    /// As many leases as can be counted.
    LeaseLimit(Handle),
}

/// Fewer pages are free than were asked for; none was taken.
///
/// ```
/// use millpond_core::page::{Exhausted, Page, Pages};
/// use millpond_core::slab::Handle;
/// let mut pages = Pages::new([Page::EMPTY; 2]);
/// assert_eq!(pages.allocate_all(&mut [Handle::default(); 3]), Err(Exhausted { free: 2 }));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exhausted {
    /// Pages that are free now.
    pub free: u32,
}

impl fmt::Display for PageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stale(page) => write!(f, "page {page} was freed before; drop its handle when you free it"),
            Self::State(page, State::Filling) => write!(f, "page {page} is still being filled; seal it first"),
            Self::State(page, State::Sealed) => write!(f, "page {page} is sealed and has no lease to give back"),
            Self::State(page, State::Leased(count)) => write!(f, "page {page} has {count} leases; release them first"),
            Self::State(page, State::Quarantined) => write!(f, "page {page} is quarantined; wait until it is quiet"),
            Self::LeaseLimit(page) => write!(f, "page {page} has as many leases as can be counted; release some"),
        }
    }
}

impl fmt::Display for Exhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "only {} pages are free; free or evict some", self.free)
    }
}

impl core::error::Error for PageError {}
impl core::error::Error for Exhausted {}

/// The pages of one region over storage `S` (`[Page; N]`, `&mut [Page]`, `Box<[Page]>`, …).
///
/// ```
/// use millpond_core::page::{Page, Pages, State};
/// let mut pages = Pages::new([Page::EMPTY; 2]);
/// let page = pages.allocate().unwrap();
/// pages.seal(page).unwrap();
/// pages.lease(page).unwrap();
/// assert!(pages.free(page).is_err()); // a reader holds it
/// pages.release(page).unwrap();
/// pages.free(page).unwrap();
/// assert_eq!(pages.state(page), None); // stale from now on
/// ```
#[derive(Clone, Debug)]
pub struct Pages<S> {
    pages: S,
    free_head: u32,
    counts: Counts,
}

impl<S: AsRef<[Page]> + AsMut<[Page]>> Pages<S> {
    /// All pages free, the lowest first. What `pages` held before is forgotten; epochs are kept, so handles of an earlier
    /// table over the same storage stay stale. At most `u32::MAX` pages are used.
    pub fn new(mut pages: S) -> Self {
        let (mut free_head, mut counts) = (NONE, Counts::default());
        for (index, page) in (0..NONE).zip(pages.as_mut()).rev() {
            page.epoch = page.epoch.saturating_add(page.epoch % 2);
            page.state = None;
            if page.epoch > EPOCH_LAST {
                counts.retired += 1;
                continue;
            }
            page.next_free = free_head;
            free_head = index;
            counts.free += 1;
        }
        Self { pages, free_head, counts }
    }

    /// Takes a free page for writing; the last one freed comes first.
    pub fn allocate(&mut self) -> Result<Handle, Exhausted> {
        if self.free_head == NONE {
            return Err(Exhausted { free: 0 });
        }
        let slot = self.free_head;
        let page = &mut self.pages.as_mut()[slot as usize];
        self.free_head = page.next_free;
        page.epoch += 1;
        page.state = Some(State::Filling);
        self.counts.free -= 1;
        self.counts.filling += 1;
        Ok(Handle { slot, epoch: page.epoch })
    }

    /// Takes a page for each place of `taken`, or none at all. O(`taken.len()`).
    ///
    /// ```
    /// use millpond_core::{page::{Page, Pages}, slab::Handle};
    /// let mut pages = Pages::new([Page::EMPTY; 3]);
    /// let mut two = [Handle::default(); 2];
    /// pages.allocate_all(&mut two).unwrap();
    /// assert_eq!(pages.allocate_all(&mut two).unwrap_err().free, 1);
    /// ```
    pub fn allocate_all(&mut self, taken: &mut [Handle]) -> Result<(), Exhausted> {
        if usize::try_from(self.counts.free).is_ok_and(|free| free < taken.len()) {
            return Err(Exhausted { free: self.counts.free });
        }
        for place in taken {
            *place = self.allocate()?;
        }
        Ok(())
    }

    /// Ends writing: the page may be leased from now on and never changes again.
    pub fn seal(&mut self, page: Handle) -> Result<(), PageError> {
        match self.entry(page)?.state {
            Some(State::Filling) => self.set(page, State::Sealed),
            other => Err(refusal(page, other)),
        }
    }

    /// Adds a reader to a sealed page; the page stays until each reader called [`Pages::release`].
    pub fn lease(&mut self, page: Handle) -> Result<(), PageError> {
        match self.entry(page)?.state {
            Some(State::Sealed) => self.set(page, State::Leased(1)),
            Some(State::Leased(u32::MAX)) => Err(PageError::LeaseLimit(page)),
            Some(State::Leased(count)) => self.set(page, State::Leased(count + 1)),
            other => Err(refusal(page, other)),
        }
    }

    /// Takes one reader away; returns the leases that remain.
    pub fn release(&mut self, page: Handle) -> Result<u32, PageError> {
        match self.entry(page)?.state {
            Some(State::Leased(1)) => self.set(page, State::Sealed).map(|()| 0),
            Some(State::Leased(count)) => self.set(page, State::Leased(count - 1)).map(|()| count - 1),
            other => Err(refusal(page, other)),
        }
    }

    /// Frees a page that is filling or sealed, when nothing far away can write it any more.
    pub fn free(&mut self, page: Handle) -> Result<(), PageError> {
        match self.entry(page)?.state {
            Some(State::Filling | State::Sealed) => self.clear(page),
            Some(State::Leased(_)) if seeded::on(Bug::PageFreesLeased) => self.clear(page),
            other => Err(refusal(page, other)),
        }
    }

    /// Gives up a page that is filling or sealed while something far away may still write it.
    pub fn quarantine(&mut self, page: Handle) -> Result<(), PageError> {
        match self.entry(page)?.state {
            Some(State::Filling | State::Sealed) => self.set(page, State::Quarantined),
            other => Err(refusal(page, other)),
        }
    }

    /// Frees a quarantined page: it is proven that nothing writes it any more.
    pub fn quiet(&mut self, page: Handle) -> Result<(), PageError> {
        match self.entry(page)?.state {
            Some(State::Quarantined) => self.clear(page),
            other => Err(refusal(page, other)),
        }
    }

    /// The page's state; `None` if the handle is stale.
    pub fn state(&self, page: Handle) -> Option<State> {
        self.pages.as_ref().get(page.slot as usize).filter(|entry| entry.epoch == page.epoch)?.state
    }

    /// Pages by state. O(1).
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// All pages that are not free, in order. O(pages).
    pub fn iter(&self) -> impl Iterator<Item = (Handle, State)> {
        (0..NONE)
            .zip(self.pages.as_ref())
            .filter_map(|(slot, page)| Some((Handle { slot, epoch: page.epoch }, page.state?)))
    }

    fn entry(&mut self, page: Handle) -> Result<&mut Page, PageError> {
        let entry = self.pages.as_mut().get_mut(page.slot as usize);
        entry.filter(|entry| entry.epoch == page.epoch).ok_or(PageError::Stale(page))
    }

    fn count_mut(&mut self, state: Option<State>) -> &mut u32 {
        match state {
            None => &mut self.counts.free,
            Some(State::Filling) => &mut self.counts.filling,
            Some(State::Sealed) => &mut self.counts.sealed,
            Some(State::Leased(_)) => &mut self.counts.leased,
            Some(State::Quarantined) => &mut self.counts.quarantined,
        }
    }

    fn set(&mut self, page: Handle, state: State) -> Result<(), PageError> {
        let before = self.entry(page)?.state.replace(state);
        *self.count_mut(before) -= 1;
        *self.count_mut(Some(state)) += 1;
        Ok(())
    }

    fn clear(&mut self, page: Handle) -> Result<(), PageError> {
        let free_head = self.free_head;
        let entry = self.entry(page)?;
        let before = entry.state.take();
        if seeded::on(Bug::PageKeepsEpoch) {
            entry.epoch -= 1;
        } else {
            entry.epoch += 1;
        }
        let is_retired = entry.epoch > EPOCH_LAST;
        entry.next_free = free_head;
        *self.count_mut(before) -= 1;
        if is_retired {
            self.counts.retired += 1;
        } else {
            self.counts.free += 1;
            self.free_head = page.slot;
        }
        Ok(())
    }
}

/// Why `page` cannot do what was asked in state `found`; a free page has a stale handle.
fn refusal(page: Handle, found: Option<State>) -> PageError {
    found.map_or(PageError::Stale(page), |state| PageError::State(page, state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filling_page_cannot_be_read() {
        let mut pages = Pages::new([Page::EMPTY; 1]);
        let page = pages.allocate().unwrap();
        assert_eq!(pages.lease(page), Err(PageError::State(page, State::Filling)));
    }

    #[test]
    fn a_leased_page_is_neither_freed_nor_quarantined() {
        let mut pages = Pages::new([Page::EMPTY; 1]);
        let page = pages.allocate().unwrap();
        pages.seal(page).unwrap();
        pages.lease(page).unwrap();
        pages.lease(page).unwrap();
        assert_eq!(pages.free(page), Err(PageError::State(page, State::Leased(2))));
        assert_eq!(pages.quarantine(page), Err(PageError::State(page, State::Leased(2))));
        assert_eq!((pages.release(page), pages.release(page)), (Ok(1), Ok(0)));
        assert_eq!(pages.release(page), Err(PageError::State(page, State::Sealed)));
        pages.free(page).unwrap();
    }

    #[test]
    fn a_quarantined_page_comes_back_when_it_is_quiet_only() {
        let mut pages = Pages::new([Page::EMPTY; 1]);
        let page = pages.allocate().unwrap();
        pages.quarantine(page).unwrap();
        assert_eq!(pages.free(page), Err(PageError::State(page, State::Quarantined)));
        assert_eq!(pages.allocate(), Err(Exhausted { free: 0 }));
        pages.quiet(page).unwrap();
        assert_eq!(pages.quiet(page), Err(PageError::Stale(page)));
        assert_ne!(pages.allocate().unwrap(), page);
    }

    #[test]
    fn a_page_whose_epochs_ran_out_is_retired() {
        let mut pages = Pages::new([Page { epoch: EPOCH_LAST, ..Page::EMPTY }]);
        let page = pages.allocate().unwrap();
        pages.free(page).unwrap();
        assert_eq!(pages.allocate(), Err(Exhausted { free: 0 }));
        assert_eq!((pages.counts().retired, pages.counts().total()), (1, 1));
    }
}
