//! Names of blocks: each names its tokens and everything before them.
//!
//! Three families, never mixed. [`BlockName`] names what is stored: BLAKE3 keyed with a tenant's secret and cut to 128 bits,
//! so nobody without the secret can construct the name of another tenant's block. [`RouteHash`] is a fast 64-bit chain for
//! routing, events and traces: equal chains may collide, so it only ever chooses a place, never bytes. [`vllm`] and
//! [`sglang`] are the chains other engines make, to read their events and keys.
//!
//! Invariant of every chain: block `i`'s name is a function of the tokens of blocks `0..=i` and the model; equal names mean
//! equal prefixes. Only whole blocks have names. Tokens are hashed as little-endian `u32`.

use core::fmt;

use xxhash_rust::xxh3::{Xxh3Builder, xxh3_64_with_seed};

pub mod sglang;
pub mod vllm;

/// The name of a stored block: 128 bits of a keyed BLAKE3. Plain data, safe to send; shown as 32 hex digits.
///
/// ```
/// use millpond_core::hash::BlockName;
/// let name = BlockName([0xab; 16]);
/// assert_eq!(BlockName::parse(&name.to_string()), Some(name));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct BlockName(pub [u8; 16]);

impl BlockName {
    /// The name written as 32 hex digits; `None` if `text` is anything else.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let digits = <&[u8; 32]>::try_from(text.as_bytes()).ok()?;
        let mut name = [0; 16];
        for (byte, pair) in name.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |at: usize| char::from(pair[at]).to_digit(16);
            *byte = u8::try_from(digit(0)? << 4 | digit(1)?).ok()?;
        }
        Some(Self(name))
    }
}

impl fmt::Display for BlockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BlockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A tenant's 32 secret bytes. Never shown.
///
/// ```
/// use millpond_core::hash::Secret;
/// assert_eq!(format!("{:?}", Secret([7; 32])), "Secret(..)");
/// ```
#[derive(Clone)]
pub struct Secret(pub [u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// What the KV of a block depends on besides its tokens.
///
/// ```
/// use millpond_core::hash::Model;
/// let model = Model { id: "smollm2-135m", layout: [1; 16] };
/// assert_eq!(model, model.clone());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model<'a> {
    /// The model's name and revision, as the deployment writes it.
    pub id: &'a str,
    /// Fingerprint of the KV layout: `layout::Fingerprint`'s bytes.
    pub layout: [u8; 16],
}

const DOMAIN_ROOT: u8 = 0;
const DOMAIN_BLOCK: u8 = 1;

/// Makes the names of one tenant's blocks for one model and layout.
///
/// ```
/// use millpond_core::hash::{BlockName, Model, Namer, Secret};
/// let namer = Namer::new(Secret([7; 32]), &Model { id: "toy", layout: [0; 16] });
/// let names: Vec<BlockName> = namer.chain(&[1, 2, 3, 4, 5], 2).collect();
/// assert_eq!(names.len(), 2); // the fifth token fills no block
/// assert_eq!(names[1], namer.name(names[0], &[3, 4]));
/// ```
#[derive(Clone, Debug)]
pub struct Namer {
    secret: Secret,
    root: BlockName,
}

impl Namer {
    /// A namer for `model`, keyed with `secret`.
    #[must_use]
    pub fn new(secret: Secret, model: &Model<'_>) -> Self {
        let mut hasher = blake3::Hasher::new_keyed(&secret.0);
        hasher.update(&[DOMAIN_ROOT]);
        hasher.update(&model.layout);
        hasher.update(model.id.as_bytes());
        let root = cut(&hasher);
        Self { secret, root }
    }

    /// The parent of a first block: names the model and layout, no tokens.
    #[must_use]
    pub fn root(&self) -> BlockName {
        self.root
    }

    /// The name of the block of `tokens` after `parent`. About 100 ns for 16 tokens.
    #[must_use]
    pub fn name(&self, parent: BlockName, tokens: &[u32]) -> BlockName {
        let mut hasher = blake3::Hasher::new_keyed(&self.secret.0);
        hasher.update(&[DOMAIN_BLOCK]);
        hasher.update(&parent.0);
        each_bytes(tokens, |bytes| {
            hasher.update(bytes);
        });
        cut(&hasher)
    }

    /// The names of the whole blocks of `tokens`, first to last. `block_len` is in tokens; 0 gives no block.
    pub fn chain<'a>(&'a self, tokens: &'a [u32], block_len: usize) -> impl Iterator<Item = BlockName> + 'a {
        let mut parent = self.root;
        blocks(tokens, block_len).map(move |block| {
            parent = self.name(parent, block);
            parent
        })
    }
}

fn cut(hasher: &blake3::Hasher) -> BlockName {
    let mut name = [0; 16];
    hasher.finalize_xof().fill(&mut name);
    BlockName(name)
}

/// A 64-bit hash of a block and all before it, for routing, events and traces. Not a name of bytes: it may collide.
///
/// ```
/// use millpond_core::hash::{RouteHash, RouteHasher};
/// let hashes: Vec<RouteHash> = RouteHasher::default().chain(&[0; 32], 16).collect();
/// assert_eq!(hashes.len(), 2);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct RouteHash(pub u64);

impl fmt::Display for RouteHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for RouteHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Makes route hashes: XXH3-64 of the block's tokens, chained as XXH3-64(before ‖ block). With the default seed the values
/// are those of Dynamo and of Mooncake's conductor, so their events need no translation.
///
/// ```
/// use millpond_core::hash::RouteHasher;
/// let hasher = RouteHasher { seed: 1337 };
/// assert_eq!(hasher.block(&[1, 2]), RouteHasher::default().block(&[1, 2]));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteHasher {
    /// Distinguishes models and adapters that must not share routes.
    pub seed: u64,
}

impl Default for RouteHasher {
    fn default() -> Self {
        Self { seed: 1337 }
    }
}

impl RouteHasher {
    /// The hash of a block by itself ("local" in Dynamo's events).
    #[must_use]
    pub fn block(&self, tokens: &[u32]) -> u64 {
        if cfg!(target_endian = "little") {
            return xxh3_64_with_seed(bytemuck::cast_slice(tokens), self.seed);
        }
        let mut hasher = Xxh3Builder::new().with_seed(self.seed).build();
        each_bytes(tokens, |bytes| hasher.update(bytes));
        hasher.digest()
    }

    /// The hash of the block with local hash `block` after `parent`; a first block's hash is its local one.
    #[must_use]
    pub fn after(&self, parent: Option<RouteHash>, block: u64) -> RouteHash {
        let Some(RouteHash(parent)) = parent else { return RouteHash(block) };
        let mut both = [0; 16];
        both[..8].copy_from_slice(&parent.to_le_bytes());
        both[8..].copy_from_slice(&block.to_le_bytes());
        RouteHash(xxh3_64_with_seed(&both, self.seed))
    }

    /// The hashes of the whole blocks of `tokens`, first to last. `block_len` is in tokens; 0 gives no block.
    pub fn chain(self, tokens: &[u32], block_len: usize) -> impl Iterator<Item = RouteHash> {
        let mut parent = None;
        blocks(tokens, block_len).map(move |block| {
            let hash = self.after(parent, self.block(block));
            parent = Some(hash);
            hash
        })
    }
}

/// The whole blocks of `tokens`.
fn blocks(tokens: &[u32], block_len: usize) -> core::slice::ChunksExact<'_, u32> {
    if block_len == 0 { [].chunks_exact(1) } else { tokens.chunks_exact(block_len) }
}

/// Hands the tokens' little-endian bytes to `update`, in one piece where memory already has that order.
fn each_bytes(tokens: &[u32], mut update: impl FnMut(&[u8])) {
    if cfg!(target_endian = "little") {
        update(bytemuck::cast_slice(tokens));
    } else {
        tokens.iter().for_each(|token| update(&token.to_le_bytes()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens 0..15 and 16..31, as in the golden vectors of the other engines.
    pub(super) fn tokens() -> [u32; 32] {
        core::array::from_fn(|index| u32::try_from(index).unwrap())
    }

    fn namer(secret: u8, id: &str, layout: u8) -> Namer {
        Namer::new(Secret([secret; 32]), &Model { id, layout: [layout; 16] })
    }

    #[test]
    fn a_name_depends_on_secret_model_layout_parent_and_tokens() {
        let name = |namer: Namer, tokens: &[u32]| namer.chain(tokens, 2).last();
        let one = name(namer(1, "m", 1), &[1, 2, 3, 4]);
        for other in [
            name(namer(2, "m", 1), &[1, 2, 3, 4]),
            name(namer(1, "n", 1), &[1, 2, 3, 4]),
            name(namer(1, "m", 2), &[1, 2, 3, 4]),
            name(namer(1, "m", 1), &[9, 2, 3, 4]),
            name(namer(1, "m", 1), &[1, 2, 3, 9]),
        ] {
            assert_ne!(one, other);
        }
        assert_eq!(one, name(namer(1, "m", 1), &[1, 2, 3, 4, 5]));
    }

    #[test]
    fn names_match_the_golden_vectors() {
        let mut names = namer(7, "toy", 3).chain(&tokens(), 16).collect::<heapless::Vec<_, 2>>().into_iter();
        assert_eq!(names.next(), BlockName::parse("a7d2ec14b1e5851431b4a14cdc40864d"));
        assert_eq!(names.next(), BlockName::parse("98fa7ff20c56e73fc0fd7d177fc8f53f"));
    }

    #[test]
    fn route_hashes_are_dynamos() {
        let hasher = RouteHasher::default();
        assert_eq!(hasher.block(&tokens()[16..]), 15_292_316_782_987_903_195);
        let hashes: heapless::Vec<_, 2> = hasher.chain(&tokens(), 16).collect();
        assert_eq!(hashes, [RouteHash(15_310_707_395_893_867_146), RouteHash(13_769_157_705_258_532_664)]);
    }

    #[test]
    fn a_block_of_no_tokens_is_no_block() {
        assert_eq!(RouteHasher::default().chain(&[1, 2], 0).count(), 0);
        assert_eq!(namer(1, "m", 1).chain(&[1], 2).count(), 0);
    }
}
