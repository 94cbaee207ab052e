//! Whose blocks are whose: each tenant's names are keyed with its own secret.

use millpond_core::hash::{Model, Namer, Secret};

use crate::model::Card;

/// Derives tenants' secrets from one root that the nodes of a cluster share.
///
/// ```
/// use millpond_node::kv::Tenants;
/// use millpond_node::model::toy;
/// let tenants = Tenants::new([7; 32]);
/// let name = |tenant| tenants.namer(tenant, &toy::card()).chain(&[1; 16], 16).next();
/// assert_ne!(name("a"), name("b"));
/// ```
#[derive(Clone)]
pub struct Tenants {
    root: [u8; 32],
}

impl std::fmt::Debug for Tenants {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tenants(..)")
    }
}

impl Tenants {
    /// Tenants of the cluster with this root secret. Another root, other names: stored blocks are not found again.
    #[must_use]
    pub fn new(root: [u8; 32]) -> Self {
        Self { root }
    }

    /// Tenants of a cluster with this shared key, as its nodes have it in their configuration.
    #[must_use]
    pub fn of_key(key: &str) -> Self {
        Self { root: blake3::derive_key("millpond tenants' root v1", key.as_bytes()) }
    }

    /// Names blocks of `tenant` for the model of `card`, its very weights and its layout.
    #[must_use]
    pub fn namer(&self, tenant: &str, card: &Card) -> Namer {
        let secret = Secret(*blake3::keyed_hash(&self.root, tenant.as_bytes()).as_bytes());
        Namer::new(secret, &Model { id: &card.revision, layout: card.layout.fingerprint().0 })
    }
}
