//! The page hashes SGLang makes: SHA-256 over the hash before and the page's tokens.
//!
//! Source: SGLang's hierarchical cache (`get_hash_str`), checked against its own algorithm in Python; the vectors are in
//! the tests. To read its events and keys only: nothing of ours is named this way.

use sha2::{Digest as _, Sha256};

/// The hash of the page of `tokens` after the page or namespace with hash `before`.
///
/// ```
/// use millpond_core::hash::sglang;
/// let first = sglang::page(None, &[1, 2, 3]);
/// assert_ne!(sglang::page(Some(&first), &[1, 2, 3]), first);
/// ```
#[must_use]
pub fn page(before: Option<&[u8; 32]>, tokens: &[u32]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    hasher.update(before.map_or(&[][..], |before| before));
    super::each_bytes(tokens, |bytes| hasher.update(bytes));
    hasher.finalize().into()
}

/// The same for token numbers that may exceed 32 bits (multimodal placeholders).
#[must_use]
pub fn page_wide(before: Option<&[u8; 32]>, tokens: &[u64]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    hasher.update(before.map_or(&[][..], |before| before));
    let is_wide = tokens.iter().any(|&token| u32::try_from(token).is_err());
    if is_wide {
        hasher.update([0xff]);
    }
    for token in tokens {
        hasher.update(&token.to_le_bytes()[..if is_wide { 8 } else { 4 }]);
    }
    hasher.finalize().into()
}

/// The hash storage keys start from when a request has an extra key or a cache salt: the page before the first one.
#[must_use]
pub fn namespace(extra_key: Option<&str>, cache_salt: Option<&str>) -> [u8; 32] {
    let mut hasher = Sha256::new();
    hasher.update("sglang-cache-namespace-v1");
    for part in [extra_key, cache_salt] {
        match part {
            None => hasher.update([0]),
            Some(text) => {
                hasher.update([1]);
                hasher.update(u64::try_from(text.len()).unwrap_or(u64::MAX).to_le_bytes());
                hasher.update(text);
            }
        }
    }
    hasher.finalize().into()
}

/// The number by which events name a page.
#[must_use]
pub fn event_id(page: &[u8; 32]) -> i64 {
    let mut first = [0; 8];
    first.copy_from_slice(&page[..8]);
    i64::from_be_bytes(first)
}

#[cfg(test)]
mod tests {
    use super::super::tests::tokens;
    use super::super::vllm::tests::hex;
    use super::*;

    #[test]
    fn pages_match_the_golden_vectors() {
        let first = page(None, &tokens()[..16]);
        assert_eq!(first, hex("5d85718ec594b982c252d0279e5966ffca33a5eaf2a455038d3ab331fde70cea"));
        let second = page(Some(&first), &tokens()[16..]);
        assert_eq!(second, hex("4681c0107c38f402cd1bc30b0b09a65202dba31f98269d9d7f63f5e0dea6901a"));
        assert_eq!(event_id(&first), 6_738_917_275_443_968_386);
    }

    #[test]
    fn wide_tokens_are_tagged_only_when_one_is_wide() {
        assert_eq!(page_wide(None, &[1, 2, 3]), page(None, &[1, 2, 3]));
        let wide = page_wide(None, &[1, 2, 1 << 32]);
        assert_eq!(wide, hex("d4cca438bb17c5910f834c3e1af2c8ba7daa798b5ef9dd8e04ecccce95ae18a2"));
    }

    #[test]
    fn namespaces_keep_extra_key_and_salt_apart() {
        let lora = namespace(Some("lora-a"), None);
        assert_eq!(lora, hex("407c773a7c02b33bd4a62af6bf5fc77997c2c8067811ecf2b39e3839c3f4284b"));
        let salt = namespace(None, Some("salt"));
        assert_eq!(salt, hex("43601f36bb365a5bdb202f3b4398e5edcdc529750311c8aa2028ce19293f8d6e"));
    }
}
