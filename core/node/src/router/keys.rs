//! Who may use a router: tenants, known by their API keys.

use std::collections::HashMap;
use std::sync::Arc;

use super::request::Failure;

/// Tenants and their keys. Without any tenant everybody may use the router, as nobody in particular. Keys are kept as
/// hashes only, so looking one up takes as long whatever is wrong with it.
///
/// ```
/// use millpond_node::router::{ApiKeys, Tenant};
/// let mut keys = ApiKeys::default();
/// assert!(keys.tenant(None).unwrap().is_none());
/// assert!(keys.add(Tenant { name: "alice".into(), weight: 1.0 }, &["sk-1".into()]));
/// assert_eq!(keys.tenant(Some("sk-1")).unwrap().unwrap().name, "alice");
/// assert!(keys.tenant(Some("sk-2")).is_err() && keys.tenant(None).is_err());
/// ```
#[derive(Clone, Default, PartialEq)]
pub struct ApiKeys {
    tenants: Vec<Arc<Tenant>>,
    by_key: HashMap<[u8; 32], usize>,
}

/// Whom requests are for.
///
/// Example: [`ApiKeys`].
#[derive(Clone, Debug, PartialEq)]
pub struct Tenant {
    /// Its name in metrics and records, and whose blocks of KV it reuses.
    pub name: String,
    /// Its fair share, beside the others' weights; above 0.
    pub weight: f64,
}

impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiKeys").field("tenants", &self.tenants).finish_non_exhaustive()
    }
}

impl ApiKeys {
    /// Adds a tenant that is known by these keys. `false`: one of them is known already, and nothing was added.
    pub fn add(&mut self, tenant: Tenant, keys: &[String]) -> bool {
        let at = self.tenants.len();
        let mut added = HashMap::new();
        for key in keys {
            if self.by_key.contains_key(&hashed(key)) || added.insert(hashed(key), at).is_some() {
                return false;
            }
        }
        self.by_key.extend(added);
        self.tenants.push(Arc::new(tenant));
        true
    }

    /// Whose key that is; nobody's in particular where there are no tenants.
    ///
    /// # Errors
    /// [`Failure::Unauthorized`]: it is none, or missing.
    pub fn tenant(&self, key: Option<&str>) -> Result<Option<&Arc<Tenant>>, Failure> {
        if self.tenants.is_empty() {
            return Ok(None);
        }
        let key = key.ok_or(Failure::Unauthorized { what: "no API key was sent" })?;
        let at =
            self.by_key.get(&hashed(key)).ok_or(Failure::Unauthorized { what: "the API key is not known here" })?;
        Ok(self.tenants.get(*at))
    }

    /// The tenants' weights, in the order in which they were added.
    pub(super) fn weights(&self) -> Vec<f64> {
        self.tenants.iter().map(|tenant| tenant.weight).collect()
    }

    /// The number of a tenant; 0 if there is none of that name.
    pub(super) fn number(&self, name: &str) -> u32 {
        let at = self.tenants.iter().position(|tenant| tenant.name == name).unwrap_or(0);
        u32::try_from(at).unwrap_or(u32::MAX)
    }

    /// Tenants.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tenants.len()
    }

    /// Whether there are no tenants.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tenants.is_empty()
    }
}

fn hashed(key: &str) -> [u8; 32] {
    *blake3::hash(key.as_bytes()).as_bytes()
}
