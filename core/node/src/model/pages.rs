//! KV pages on the heap: for a single process without an engine, and for tests.

use millpond_core::layout::Layout;

use super::KvPages;

/// Pages of one request in one piece of memory.
///
/// ```
/// use millpond_node::model::{pages::HeapPages, toy, KvPages};
/// let layout = toy::card().layout;
/// let pages = HeapPages::new(layout, 2);
/// assert_eq!(pages.page(1, 0).len() as u64, layout.layer_len());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeapPages {
    layout: Layout,
    page_count: u32,
    /// Whole words, so that the bytes are aligned for every element type.
    words: Vec<u64>,
}

impl HeapPages {
    /// `page_count` zeroed pages of `layout`.
    ///
    /// # Panics
    /// If they do not fit the address space.
    #[must_use]
    pub fn new(layout: Layout, page_count: u32) -> Self {
        let words = u64::from(page_count) * layout.page_len().div_ceil(8);
        let words = usize::try_from(words).expect("the pages fit the address space");
        Self { layout, page_count, words: vec![0; words] }
    }

    /// All of page `page`.
    #[must_use]
    pub fn bytes(&self, page: u32) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.place(page, 0)..][..self.page_len()]
    }

    /// All of page `page`, to fill.
    pub fn bytes_mut(&mut self, page: u32) -> &mut [u8] {
        let (start, len) = (self.place(page, 0), self.page_len());
        &mut bytemuck::cast_slice_mut(&mut self.words)[start..][..len]
    }

    fn page_len(&self) -> usize {
        usize::try_from(self.layout.page_len()).expect("checked in new")
    }

    fn layer_len(&self) -> usize {
        usize::try_from(self.layout.layer_len()).expect("checked in new")
    }

    fn place(&self, page: u32, layer: u32) -> usize {
        self.page_len().next_multiple_of(8) * page as usize + self.layer_len() * layer as usize
    }
}

impl KvPages for HeapPages {
    fn page_count(&self) -> u32 {
        self.page_count
    }

    fn page(&self, page: u32, layer: u32) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.place(page, layer)..][..self.layer_len()]
    }

    fn page_mut(&mut self, page: u32, layer: u32) -> &mut [u8] {
        let (start, len) = (self.place(page, layer), self.layer_len());
        &mut bytemuck::cast_slice_mut(&mut self.words)[start..][..len]
    }
}
