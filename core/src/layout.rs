//! Geometry of KV memory: what one page holds, where each layer lies in it, and what moves between ranks.
//!
//! A page holds the keys and values of one block of tokens as `[layer][K|V][token][kv head][head dim]`, so one layer of
//! one page is contiguous and can travel while the next layer is still computed. Nothing here knows an address or a
//! model's weights. Invariants: a [`Layout`] that exists is within the named limits, so no length overflows a `u64`;
//! the pieces of a map cover each head of each layer of the target exactly once.

use core::fmt;
use core::ops::Range;

/// Tokens in one block (and page) unless a model says otherwise.
pub const BLOCK_TOKENS_DEFAULT: u32 = 16;
/// Most layers of a layout.
pub const LAYER_COUNT_MAX: u32 = 1024;
/// Most KV heads of a layout.
pub const KV_HEAD_COUNT_MAX: u32 = 1024;
/// Longest head, in elements.
pub const HEAD_DIM_MAX: u32 = 4096;
/// Most tokens in one block.
pub const BLOCK_TOKENS_MAX: u32 = 1024;

/// How one element of a key or value is stored, little-endian.
///
/// ```
/// use millpond_core::layout::Dtype;
/// assert_eq!((Dtype::F16.element_len(), Dtype::F16.to_string()), (2, "f16".into()));
/// assert_eq!(Dtype::from_code(Dtype::Bf16.code()), Some(Dtype::Bf16));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
    /// Eight-bit floating point, 4 exponent bits.
    F8E4m3,
}

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn element_len(self) -> u32 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::F8E4m3 => 1,
        }
    }

    /// Its number on the wire and in fingerprints; never reused.
    #[must_use]
    pub const fn code(self) -> u32 {
        match self {
            Self::F32 => 1,
            Self::F16 => 2,
            Self::Bf16 => 3,
            Self::F8E4m3 => 4,
        }
    }

    /// The element type with that number.
    #[must_use]
    pub const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            1 => Self::F32,
            2 => Self::F16,
            3 => Self::Bf16,
            4 => Self::F8E4m3,
            _ => return None,
        })
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F8E4m3 => "f8e4m3",
        })
    }
}

/// The numbers a layout is made of, unchecked; [`Layout::new`] checks them.
///
/// Example: [`Layout`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Transformer layers whose KV is kept.
    pub layer_count: u32,
    /// Heads of K, and as many of V, per layer.
    pub kv_head_count: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// How an element is stored.
    pub dtype: Dtype,
    /// Tokens of one block, which is what one page holds.
    pub block_tokens: u32,
}

/// A checked KV geometry.
///
/// ```
/// use millpond_core::layout::{Dtype, Layout, Shape};
/// let layout =
///     Layout::new(Shape { layer_count: 30, kv_head_count: 3, head_dim: 64, dtype: Dtype::F16, block_tokens: 16 }).unwrap();
/// assert_eq!(layout.page_len(), 30 * 2 * 16 * 3 * 64 * 2);
/// assert_eq!(layout.layer_range(1), 12_288..24_576);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    shape: Shape,
}

/// Names one of the two tensors of a layer.
///
/// ```
/// use millpond_core::layout::{Dtype, Layout, Shape, Side};
/// let shape = Shape { layer_count: 2, kv_head_count: 2, head_dim: 8, dtype: Dtype::F32, block_tokens: 16 };
/// let layout = Layout::new(shape).unwrap();
/// assert_ne!(Side::Key, Side::Value); // a layer's range holds all keys, then all values
/// assert_eq!(layout.layer_range(0).end, layout.page_len() / 2);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Keys.
    Key,
    /// Values.
    Value,
}

/// A hash of every field of a layout: two nodes that differ in any of them must not exchange pages.
///
/// ```
/// use millpond_core::layout::{Dtype, Layout, Shape};
/// let shape = Shape { layer_count: 2, kv_head_count: 2, head_dim: 8, dtype: Dtype::F32, block_tokens: 16 };
/// let longer = Layout::new(Shape { block_tokens: 32, ..shape }).unwrap();
/// assert_ne!(Layout::new(shape).unwrap().fingerprint(), longer.fingerprint());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 16]);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Why a layout or a shard of it cannot be.
///
/// ```
/// use millpond_core::layout::{Dtype, Layout, LayoutError, Shape};
/// let shape = Shape { layer_count: 0, kv_head_count: 2, head_dim: 8, dtype: Dtype::F32, block_tokens: 16 };
/// assert!(matches!(Layout::new(shape), Err(LayoutError::OutOfRange { .. })));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayoutError {
    /// A field is zero or above its maximum.
    OutOfRange {
        /// Which field.
        field: &'static str,
        /// What it was.
        value: u32,
        /// The largest it may be; the smallest is 1.
        max: u32,
    },
    /// The heads cannot be divided among that many tensor-parallel ranks.
    HeadsDoNotDivide {
        /// KV heads of the layout.
        kv_head_count: u32,
        /// The degree asked for.
        degree: u32,
    },
    /// There are more pipeline ranks than layers.
    TooManyStages {
        /// Layers of the layout.
        layer_count: u32,
        /// The degree asked for.
        degree: u32,
    },
    /// A rank is not below its degree.
    RankOutOfRange {
        /// The rank.
        rank: u32,
        /// Its degree.
        degree: u32,
    },
    /// The element type's number is not one of [`Dtype::code`].
    UnknownDtype {
        /// The number.
        code: u32,
    },
}

impl fmt::Display for LayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::OutOfRange { field, value, max } => write!(f, "{field} is {value}; it must lie in 1..={max}"),
            Self::HeadsDoNotDivide { kv_head_count, degree } => write!(
                f,
                "{kv_head_count} KV heads cannot be split over tensor-parallel degree {degree}; use a divisor or a multiple"
            ),
            Self::TooManyStages { layer_count, degree } => {
                write!(f, "{layer_count} layers cannot fill {degree} pipeline stages; use at most {layer_count}")
            }
            Self::UnknownDtype { code } => {
                write!(f, "element type {code} is unknown; it comes from a newer node, upgrade this one")
            }
            Self::RankOutOfRange { rank, degree } => write!(f, "rank {rank} must be below its degree {degree}"),
        }
    }
}

impl core::error::Error for LayoutError {}

impl Layout {
    /// Checks `shape` against the limits of this module.
    pub const fn new(shape: Shape) -> Result<Self, LayoutError> {
        let fields = [
            ("layer_count", shape.layer_count, LAYER_COUNT_MAX),
            ("kv_head_count", shape.kv_head_count, KV_HEAD_COUNT_MAX),
            ("head_dim", shape.head_dim, HEAD_DIM_MAX),
            ("block_tokens", shape.block_tokens, BLOCK_TOKENS_MAX),
        ];
        let mut index = 0;
        while index < fields.len() {
            let (field, value, max) = fields[index];
            if value == 0 || value > max {
                return Err(LayoutError::OutOfRange { field, value, max });
            }
            index += 1;
        }
        Ok(Self { shape })
    }

    /// The numbers it is made of.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// The first field in which two layouts differ, for refusals; `None` if they are equal.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Option<&'static str> {
        let (a, b) = (self.shape, other.shape);
        [
            ("layer_count", a.layer_count == b.layer_count),
            ("kv_head_count", a.kv_head_count == b.kv_head_count),
            ("head_dim", a.head_dim == b.head_dim),
            ("dtype", a.dtype == b.dtype),
            ("block_tokens", a.block_tokens == b.block_tokens),
        ]
        .into_iter()
        .find_map(|(field, equal)| (!equal).then_some(field))
    }

    /// Bytes of the keys (or the values) of one token in one layer.
    #[must_use]
    pub const fn row_len(&self) -> u64 {
        self.shape.kv_head_count as u64 * self.head_len()
    }

    /// Bytes of the keys (or the values) of one block in one layer.
    #[must_use]
    pub const fn side_len(&self) -> u64 {
        self.shape.block_tokens as u64 * self.row_len()
    }

    /// Bytes of one layer of one page: its keys, then its values.
    #[must_use]
    pub const fn layer_len(&self) -> u64 {
        2 * self.side_len()
    }

    /// Bytes of one page: one block of tokens in every layer.
    #[must_use]
    pub const fn page_len(&self) -> u64 {
        self.shape.layer_count as u64 * self.layer_len()
    }

    /// Bytes of the KV of one token in all layers.
    #[must_use]
    pub const fn token_len(&self) -> u64 {
        self.shape.layer_count as u64 * 2 * self.row_len()
    }

    /// Where `layer` lies in a page.
    #[must_use]
    pub const fn layer_range(&self, layer: u32) -> Range<u64> {
        let start = layer as u64 * self.layer_len();
        start..start + self.layer_len()
    }

    /// Where the keys or values of `token` (counted in the block) lie in a layer's range.
    #[must_use]
    pub const fn row_range(&self, side: Side, token: u32) -> Range<u64> {
        let start = side.index() * self.side_len() + token as u64 * self.row_len();
        start..start + self.row_len()
    }

    /// Pages that `tokens` tokens need.
    #[must_use]
    pub const fn pages_for(&self, tokens: u64) -> u64 {
        tokens.div_ceil(self.shape.block_tokens as u64)
    }

    /// A hash of every field, for hellos and block names: BLAKE3 with its own context, cut to 128 bits.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        let Shape { layer_count, kv_head_count, head_dim, dtype, block_tokens } = self.shape;
        let mut hasher = blake3::Hasher::new_derive_key("millpond kv layout v1");
        for field in [layer_count, kv_head_count, head_dim, dtype.code(), block_tokens] {
            hasher.update(&field.to_le_bytes());
        }
        let mut cut = [0u8; 16];
        cut.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Fingerprint(cut)
    }

    /// The layers and heads that one rank holds.
    pub const fn part(&self, shard: Shard) -> Result<Part, LayoutError> {
        let (layers, heads) = (self.shape.layer_count, self.shape.kv_head_count);
        if shard.tensor_rank >= shard.tensor_degree {
            return Err(LayoutError::RankOutOfRange { rank: shard.tensor_rank, degree: shard.tensor_degree });
        }
        if shard.pipeline_rank >= shard.pipeline_degree {
            return Err(LayoutError::RankOutOfRange { rank: shard.pipeline_rank, degree: shard.pipeline_degree });
        }
        if !heads.is_multiple_of(shard.tensor_degree) && !shard.tensor_degree.is_multiple_of(heads) {
            return Err(LayoutError::HeadsDoNotDivide { kv_head_count: heads, degree: shard.tensor_degree });
        }
        if shard.pipeline_degree > layers {
            return Err(LayoutError::TooManyStages { layer_count: layers, degree: shard.pipeline_degree });
        }
        let head_start = scaled(shard.tensor_rank, heads, shard.tensor_degree);
        let per_rank = if shard.tensor_degree > heads { 1 } else { heads / shard.tensor_degree };
        let layer_start = scaled(shard.pipeline_rank, layers, shard.pipeline_degree);
        let layer_end = scaled(shard.pipeline_rank + 1, layers, shard.pipeline_degree);
        Ok(Part { layer_start, layer_count: layer_end - layer_start, head_start, head_count: per_rank })
    }

    /// The geometry of the pages of one rank: same tokens, only its layers and heads.
    pub const fn shard(&self, shard: Shard) -> Result<Self, LayoutError> {
        match self.part(shard) {
            Ok(part) => {
                let shape = Shape { layer_count: part.layer_count, kv_head_count: part.head_count, ..self.shape };
                Ok(Self { shape })
            }
            Err(error) => Err(error),
        }
    }

    const fn head_len(&self) -> u64 {
        self.shape.head_dim as u64 * self.shape.dtype.element_len() as u64
    }
}

impl Side {
    const fn index(self) -> u64 {
        match self {
            Self::Key => 0,
            Self::Value => 1,
        }
    }
}

/// `rank * whole / degree` without overflow; the quotient is at most `whole`.
#[allow(clippy::cast_possible_truncation)]
const fn scaled(rank: u32, whole: u32, degree: u32) -> u32 {
    (rank as u64 * whole as u64 / degree as u64) as u32
}

/// One rank of an instance that splits a model by tensor and pipeline parallelism.
///
/// Example: [`pieces`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    /// Ranks that share the heads of a layer.
    pub tensor_degree: u32,
    /// Which of them, from 0.
    pub tensor_rank: u32,
    /// Stages that share the layers.
    pub pipeline_degree: u32,
    /// Which of them, from 0.
    pub pipeline_rank: u32,
}

impl Shard {
    /// The only rank of an instance that is not split.
    pub const WHOLE: Self = Self { tensor_degree: 1, tensor_rank: 0, pipeline_degree: 1, pipeline_rank: 0 };

    /// Rank `rank` of `degree` tensor-parallel ones, no pipeline.
    #[must_use]
    pub const fn tensor(rank: u32, degree: u32) -> Self {
        Self { tensor_degree: degree, tensor_rank: rank, ..Self::WHOLE }
    }
}

/// The layers and heads of a whole model that one rank holds.
///
/// Example: [`pieces`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// First layer.
    pub layer_start: u32,
    /// Layers.
    pub layer_count: u32,
    /// First KV head.
    pub head_start: u32,
    /// KV heads.
    pub head_count: u32,
}

/// What one rank of the target instance takes from one rank of the source instance: a rectangle of layers and heads.
///
/// Example: [`pieces`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The source rank.
    pub source: Shard,
    /// The layers and heads, counted in the whole model.
    pub part: Part,
}

/// A contiguous run of bytes of one page, and where it goes in the page of the other rank.
///
/// ```
/// use millpond_core::layout::{pieces, strips, Dtype, Layout, Shape, Shard};
/// let whole =
///     Layout::new(Shape { layer_count: 2, kv_head_count: 8, head_dim: 4, dtype: Dtype::F32, block_tokens: 16 }).unwrap();
/// let rank = Shard::tensor(1, 2);
/// let piece = pieces(whole, rank, rank).unwrap().next().unwrap(); // both sides hold the same heads
/// let strips: Vec<_> = strips(whole, piece, rank).unwrap().collect();
/// assert_eq!(strips.len(), 2); // one per layer
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strip {
    /// First byte in the source rank's page.
    pub source_offset: u64,
    /// First byte in the target rank's page.
    pub target_offset: u64,
    /// Bytes.
    pub len: u64,
}

/// What `target` takes from each rank of an instance of degrees (`tensor_degree`, `pipeline_degree`) of `source` (its
/// ranks are not looked at). Where heads are replicated in the source, target ranks take from different replicas.
/// Each layer and head of the target comes exactly once. O(ranks of the source), no heap.
///
/// ```
/// use millpond_core::layout::{pieces, Dtype, Layout, Shape, Shard};
/// let whole =
///     Layout::new(Shape { layer_count: 2, kv_head_count: 8, head_dim: 4, dtype: Dtype::F32, block_tokens: 16 }).unwrap();
/// // Prefill on four ranks, decode on two: the second decode rank takes heads 4..6 from rank 2 and 6..8 from rank 3.
/// let from: Vec<_> = pieces(whole, Shard::tensor(0, 4), Shard::tensor(1, 2)).unwrap().collect();
/// assert_eq!(from.iter().map(|piece| (piece.source.tensor_rank, piece.part.head_start)).collect::<Vec<_>>(), [(2, 4), (3, 6)]);
/// ```
pub fn pieces(whole: Layout, source: Shard, target: Shard) -> Result<impl Iterator<Item = Piece>, LayoutError> {
    let wanted = whole.part(target)?;
    let first = Shard { tensor_rank: 0, pipeline_rank: 0, ..source };
    whole.part(first)?;
    let replicas = (source.tensor_degree / whole.shape.kv_head_count).max(1);
    // Which replica of a head this target takes, so that targets spread over them.
    let replica = target.tensor_rank % replicas;
    Ok((0..source.pipeline_degree).flat_map(move |pipeline_rank| {
        (0..source.tensor_degree).filter(move |rank| rank % replicas == replica).filter_map(move |tensor_rank| {
            let source = Shard { tensor_rank, pipeline_rank, ..source };
            let part = intersection(&whole.part(source).ok()?, &wanted)?;
            Some(Piece { source, part })
        })
    }))
}

/// The runs of bytes of one page that a piece consists of, in ascending order of both offsets, as long as they can be: one per
/// layer when both ranks hold the same heads, else one per layer, side and token. No heap.
pub fn strips(whole: Layout, piece: Piece, target: Shard) -> Result<impl Iterator<Item = Strip>, LayoutError> {
    let (source_part, target_part) = (whole.part(piece.source)?, whole.part(target)?);
    let (source, target) = (whole.shard(piece.source)?, whole.shard(target)?);
    let part = piece.part;
    let whole_rows = part.head_count == source_part.head_count && part.head_count == target_part.head_count;
    let (runs, len) = if whole_rows {
        (1, source.layer_len())
    } else {
        (2 * u64::from(whole.shape.block_tokens), u64::from(part.head_count) * whole.head_len())
    };
    let place = move |layout: Layout, held: Part, layer: u32, run: u64| {
        let head = u64::from(part.head_start - held.head_start) * whole.head_len();
        layout.layer_range(layer - held.layer_start).start + run * layout.row_len() + head
    };
    Ok((part.layer_start..part.layer_start + part.layer_count).flat_map(move |layer| {
        (0..runs).map(move |run| Strip {
            source_offset: place(source, source_part, layer, run),
            target_offset: place(target, target_part, layer, run),
            len,
        })
    }))
}

fn intersection(a: &Part, b: &Part) -> Option<Part> {
    let layers = overlap(a.layer_start, a.layer_count, b.layer_start, b.layer_count)?;
    let heads = overlap(a.head_start, a.head_count, b.head_start, b.head_count)?;
    Some(Part {
        layer_start: layers.start,
        layer_count: layers.end - layers.start,
        head_start: heads.start,
        head_count: heads.end - heads.start,
    })
}

fn overlap(a_start: u32, a_count: u32, b_start: u32, b_count: u32) -> Option<Range<u32>> {
    let range = a_start.max(b_start)..(a_start + a_count).min(b_start + b_count);
    (!range.is_empty()).then_some(range)
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::vec;
    use std::vec::Vec;

    const WHOLE: Shape = Shape { layer_count: 5, kv_head_count: 4, head_dim: 3, dtype: Dtype::F16, block_tokens: 4 };

    fn whole() -> Layout {
        Layout::new(WHOLE).unwrap()
    }

    fn shards(tensor_degree: u32, pipeline_degree: u32) -> impl Iterator<Item = Shard> {
        (0..pipeline_degree).flat_map(move |pipeline_rank| {
            (0..tensor_degree).map(move |tensor_rank| Shard {
                tensor_degree,
                tensor_rank,
                pipeline_degree,
                pipeline_rank,
            })
        })
    }

    /// A page of one rank, each byte saying which byte of the whole model's page it is (oracle: five plain loops).
    fn page_of(shard: Shard) -> Vec<u16> {
        let part = whole().part(shard).unwrap();
        let (heads, head_len) = (u64::from(WHOLE.kv_head_count), whole().head_len());
        let mut page = Vec::new();
        for layer in part.layer_start..part.layer_start + part.layer_count {
            for side in 0..2u64 {
                for token in 0..u64::from(WHOLE.block_tokens) {
                    for head in part.head_start..part.head_start + part.head_count {
                        for byte in 0..head_len {
                            let row = (u64::from(layer) * 2 + side) * u64::from(WHOLE.block_tokens) + token;
                            page.push(u16::try_from((row * heads + u64::from(head)) * head_len + byte).unwrap());
                        }
                    }
                }
            }
        }
        page
    }

    #[test]
    fn pages_of_any_degrees_turn_into_pages_of_any_other() {
        let degrees = [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (1, 3), (4, 5), (16, 2)];
        for (source_tensor, source_pipeline) in degrees {
            for (target_tensor, target_pipeline) in degrees {
                let source = shards(source_tensor, source_pipeline).next().unwrap();
                for target in shards(target_tensor, target_pipeline) {
                    let expected = page_of(target);
                    let mut page = vec![u16::MAX; expected.len()];
                    for piece in pieces(whole(), source, target).unwrap() {
                        let from = page_of(piece.source);
                        for strip in strips(whole(), piece, target).unwrap() {
                            let [s, t, len] = [strip.source_offset, strip.target_offset, strip.len]
                                .map(|value| usize::try_from(value).unwrap());
                            assert!(page[t..t + len].iter().all(|byte| *byte == u16::MAX), "written twice");
                            page[t..t + len].copy_from_slice(&from[s..s + len]);
                        }
                    }
                    assert_eq!(page, expected, "{source:?} to {target:?}");
                }
            }
        }
    }

    #[test]
    fn equal_degrees_move_whole_layers() {
        let shard = Shard::tensor(1, 2);
        let piece: Vec<_> = pieces(whole(), shard, shard).unwrap().collect();
        assert_eq!(piece.len(), 1);
        let lens: Vec<u64> = strips(whole(), piece[0], shard).unwrap().map(|strip| strip.len).collect();
        assert_eq!(lens, [whole().shard(shard).unwrap().layer_len(); 5]);
    }

    #[test]
    fn targets_of_replicated_heads_spread_over_the_replicas() {
        let taken: Vec<u32> = (0..8)
            .flat_map(|rank| pieces(whole(), Shard::tensor(0, 8), Shard::tensor(rank, 8)).unwrap())
            .map(|piece| piece.source.tensor_rank)
            .collect();
        assert_eq!(taken, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn every_field_changes_the_fingerprint_and_is_named() {
        let others = [
            ("layer_count", Shape { layer_count: 6, ..WHOLE }),
            ("kv_head_count", Shape { kv_head_count: 5, ..WHOLE }),
            ("head_dim", Shape { head_dim: 4, ..WHOLE }),
            ("dtype", Shape { dtype: Dtype::Bf16, ..WHOLE }),
            ("block_tokens", Shape { block_tokens: 5, ..WHOLE }),
        ];
        for (field, other) in others {
            let other = Layout::new(other).unwrap();
            assert_ne!(other.fingerprint(), whole().fingerprint(), "{field}");
            assert_eq!(other.difference(&whole()), Some(field));
        }
    }

    #[test]
    fn impossible_shards_are_refused_with_the_reason() {
        let three = whole().part(Shard::tensor(0, 3)).unwrap_err();
        assert_eq!(three, LayoutError::HeadsDoNotDivide { kv_head_count: 4, degree: 3 });
        let beyond = whole().part(Shard::tensor(2, 2)).unwrap_err();
        assert_eq!(beyond, LayoutError::RankOutOfRange { rank: 2, degree: 2 });
        let stages = Shard { pipeline_degree: 6, ..Shard::WHOLE };
        assert_eq!(whole().part(stages).unwrap_err(), LayoutError::TooManyStages { layer_count: 5, degree: 6 });
        let none = Layout::new(Shape { head_dim: 0, ..WHOLE }).unwrap_err();
        assert_eq!(none, LayoutError::OutOfRange { field: "head_dim", value: 0, max: HEAD_DIM_MAX });
    }
}
