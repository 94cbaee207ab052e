//! Mutual TLS between nodes: who holds a certificate of the cluster's CA is let in, and nobody else hears what is said.
//!
//! TLS lies below the hello: both ends show a certificate before the first byte of it. Sessions go on as a [`Channel`]; a
//! lane leaves with a `Cipher`, the state of its connection, which the transport drives. Certificates are checked against
//! the CA for both roles; the name in them is compared only if one is configured, since nodes are told apart by their ids
//! and come and go under any address. With `bind_nodes` the id that a peer's hello says must be that of a name in its
//! certificate, so that no node speaks for another. The files may change while the node runs: [`Tls::reload`] has new
//! connections made of what they hold by then, and leaves open ones as they are. TLS 1.3 by `rustls` over `ring`, which needs a
//! C compiler and nothing else. This module opens no sockets. Invariants: files that cannot be used change nothing; without a
//! certificate of the CA on both sides no byte of a hello is read or written; nothing beyond the record in which the hello ends
//! is read from the socket.

use std::fmt;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use futures_rustls::{TlsAcceptor, TlsConnector};
use millpond_core::time::Duration;
use millpond_core::wire::hello::Identity;
use millpond_hal::contract::{Cipher, CipherError};
use parking_lot::RwLock;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    AlertDescription, CertificateError, ClientConfig, Connection, DigitallySignedStruct, RootCertStore, ServerConfig,
    SignatureScheme,
};

mod channel;
mod records;

pub use channel::Channel;
pub(crate) use channel::Rejected;

/// The name that a dialer says when none is configured; nobody looks at it.
const NO_NAME: &str = "millpond";
/// What a URI begins with that names a node.
const NODE_SCHEME: &str = "millpond:";

/// The files that a node's TLS is made of, PEM each; the section `[tls]` of its configuration.
///
/// ```
/// use millpond_node::tls::{Files, Tls};
/// let files = Files::new("node.crt", "node.key", "ca.crt");
/// let error = Tls::load(&files).unwrap_err();
/// assert!(error.to_string().contains("tls.ca_file") && error.to_string().contains("ca.crt"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Files {
    /// The node's certificate, and those that lead from it to the CA, in this order.
    pub cert_file: PathBuf,
    /// The certificate's private key.
    pub key_file: PathBuf,
    /// Certificates of the CA that signs those of all nodes.
    pub ca_file: PathBuf,
    /// The name that a node which is dialled must have in its certificate; empty: any.
    pub server_name: String,
    /// Whether a node is only believed its id if its certificate has its name: as a DNS name, or as the URI `millpond:NAME`.
    pub bind_nodes: bool,
    /// How often a node looks whether the files changed.
    pub reload_interval: Duration,
}

impl Files {
    /// These files, any name, nodes not bound, a look every 10 s.
    #[must_use]
    pub fn new(cert_file: impl Into<PathBuf>, key_file: impl Into<PathBuf>, ca_file: impl Into<PathBuf>) -> Self {
        let (cert_file, key_file, ca_file) = (cert_file.into(), key_file.into(), ca_file.into());
        let (server_name, reload_interval) = (String::new(), Duration::from_secs(10));
        Self { cert_file, key_file, ca_file, server_name, bind_nodes: false, reload_interval }
    }
}

/// Why TLS cannot be had from the files given.
///
/// ```
/// use millpond_node::tls::TlsError;
/// let error = TlsError::Empty { key: "tls.cert_file", path: "node.crt".into(), wants: "certificate" };
/// assert!(error.to_string().contains("-----BEGIN"));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    #[error("`{key}`: cannot read {path}: {why}", path = path.display())]
    File {
        /// Which setting names it.
        key: &'static str,
        /// Where it is.
        path: PathBuf,
        /// What the system or the PEM reader says.
        why: String,
    },
    /// A file has none of what it is for.
    #[error("`{key}`: {path} holds no {wants}; it must be PEM, with a line -----BEGIN ...-----", path = path.display())]
    Empty {
        /// Which setting names it.
        key: &'static str,
        /// Where it is.
        path: PathBuf,
        /// What was looked for.
        wants: &'static str,
    },
    /// What a file holds cannot be used.
    #[error("`{key}`: {path} cannot be used: {why}", path = path.display())]
    Unsound {
        /// Which setting names it.
        key: &'static str,
        /// Where it is.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// Nodes are bound to their certificates, and this one is not of this node.
    #[error("`tls.cert_file`: {path} does not name the node {node:?}; issue it with that as a DNS name, or with the URI {NODE_SCHEME}{node}", path = path.display())]
    Node {
        /// Where the certificate is.
        path: PathBuf,
        /// The node's name.
        node: String,
    },
    /// The name is none.
    #[error("`tls.server_name`: {name:?} is neither a host name nor an address")]
    Name {
        /// What was given.
        name: String,
    },
}

/// A node's side of TLS, for both roles. Clones share it, also what is loaded later.
///
/// Example: [`Files`].
#[derive(Clone)]
pub struct Tls(Arc<Shared>);

struct Shared {
    files: Files,
    loaded: RwLock<Arc<Loaded>>,
}

/// What the files held.
struct Loaded {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    name: ServerName<'static>,
    /// The node's own certificate.
    own: CertificateDer<'static>,
    stamp: Stamp,
}

/// Tells a file from what it was: device, inode, length and time of change, of each of the three.
type Stamp = [Option<(u64, u64, u64, i64, i64)>; 3];

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("files", &self.0.files).finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads the files and tries the certificate against the CA, as a peer will: what peers would refuse is refused here.
    /// Reads files, so it blocks for a moment.
    ///
    /// # Errors
    /// See [`TlsError`]; it names the setting and the file at fault.
    pub fn load(files: &Files) -> Result<Self, TlsError> {
        let loaded = RwLock::new(Arc::new(Loaded::read(files)?));
        Ok(Self(Arc::new(Shared { files: files.clone(), loaded })))
    }

    /// Reads the files again if one of them changed; says whether. Connections that are made from then on, by all clones,
    /// use what they hold now. Blocks for a moment.
    ///
    /// # Errors
    /// What they hold now cannot be used, perhaps because only some of them were replaced so far; nothing changed, and the
    /// next call tries again.
    pub fn reload(&self) -> Result<bool, TlsError> {
        if stamp(&self.0.files) == self.loaded().stamp {
            return Ok(false);
        }
        let loaded = Arc::new(Loaded::read(&self.0.files)?);
        *self.0.loaded.write() = loaded;
        Ok(true)
    }

    /// The node that its own certificate is made for as the URI `millpond:NAME`, if it has one.
    #[must_use]
    pub fn own_node(&self) -> Option<[u8; 16]> {
        nodes_of(&self.loaded().own).into_iter().find(|(_, by)| *by == NamedBy::Uri).map(|(node, _)| node)
    }

    /// Whether peers that bind nodes to certificates will believe this one that it is `node`.
    #[must_use]
    pub fn is_of(&self, node: &[u8; 16]) -> bool {
        nodes_of(&self.loaded().own).iter().any(|(named, _)| named == node)
    }

    /// Whether the peer with this certificate is believed to be `node`.
    pub(crate) fn believes(&self, certificate: Option<&CertificateDer<'_>>, node: &[u8; 16]) -> bool {
        !self.binds_nodes() || certificate.is_some_and(|own| nodes_of(own).iter().any(|(named, _)| named == node))
    }

    /// Whether a node is only believed its id if its certificate has its name.
    #[must_use]
    pub fn binds_nodes(&self) -> bool {
        self.0.files.bind_nodes
    }

    fn loaded(&self) -> Arc<Loaded> {
        Arc::clone(&self.0.loaded.read())
    }

    fn connector(&self) -> (TlsConnector, ServerName<'static>) {
        let loaded = self.loaded();
        (TlsConnector::from(Arc::clone(&loaded.client)), loaded.name.clone())
    }

    fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.loaded().server))
    }
}

/// How a certificate names a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NamedBy {
    Dns,
    Uri,
}

/// The ids of the nodes that a certificate names.
fn nodes_of(certificate: &CertificateDer<'_>) -> Vec<([u8; 16], NamedBy)> {
    let Ok(parsed) = webpki::EndEntityCert::try_from(certificate) else { return Vec::new() };
    let uris = parsed.valid_uri_names().filter_map(|uri| uri.strip_prefix(NODE_SCHEME));
    let uris = uris.map(|name| (Identity::id_of(name), NamedBy::Uri));
    uris.chain(parsed.valid_dns_names().map(|name| (Identity::id_of(name), NamedBy::Dns))).collect()
}

fn stamp(files: &Files) -> Stamp {
    [&files.cert_file, &files.key_file, &files.ca_file].map(|path| {
        let of = std::fs::metadata(path).ok()?;
        Some((of.dev(), of.ino(), of.len(), of.mtime(), of.mtime_nsec()))
    })
}

impl Loaded {
    fn read(files: &Files) -> Result<Self, TlsError> {
        // Taken first: what changes while the files are read is read again at the next look.
        let stamp = stamp(files);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        for ca in certificates("tls.ca_file", &files.ca_file)? {
            roots.add(ca).map_err(|error| unsound("tls.ca_file", &files.ca_file, &error))?;
        }
        let chain = certificates("tls.cert_file", &files.cert_file)?;
        let own = chain[0].clone(); // there is one: an empty file is an error above
        let key = || private_key(&files.key_file);
        let name = match files.server_name.as_str() {
            "" => ServerName::try_from(NO_NAME),
            name => ServerName::try_from(name.to_owned()),
        };
        let name = name.map_err(|_| TlsError::Name { name: files.server_name.clone() })?;
        let peers = Peers::new(roots, &provider, !files.server_name.is_empty());
        let clients = peers.clients(&provider).map_err(|why| unsound("tls.ca_file", &files.ca_file, &why))?;
        peers.try_own(&*clients, &chain, &name).map_err(|why| unsound("tls.cert_file", &files.cert_file, &why))?;
        let key_error = |error: rustls::Error| match error {
            rustls::Error::InconsistentKeys(_) => {
                unsound("tls.key_file", &files.key_file, &"it is not the key of the certificate in `tls.cert_file`")
            }
            other => unsound("tls.key_file", &files.key_file, &other),
        };
        let versions = &[&rustls::version::TLS13];
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_protocol_versions(versions);
        let mut server = builder
            .map_err(|error| unsound("tls.cert_file", &files.cert_file, &error))?
            .with_client_cert_verifier(clients)
            .with_single_cert(chain.clone(), key()?)
            .map_err(key_error)?;
        // Sessions are few and long; a ticket would only travel behind the hello.
        server.send_tls13_tickets = 0;
        let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(versions);
        let mut client = builder
            .map_err(|error| unsound("tls.cert_file", &files.cert_file, &error))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(peers))
            .with_client_auth_cert(chain, key()?)
            .map_err(key_error)?;
        client.resumption = Resumption::disabled();
        Ok(Self { client: Arc::new(client), server: Arc::new(server), name, own, stamp })
    }
}

fn unsound(key: &'static str, path: &std::path::Path, why: &dyn fmt::Display) -> TlsError {
    TlsError::Unsound { key, path: path.to_owned(), why: why.to_string() }
}

fn certificates(key: &'static str, path: &std::path::Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let failed = |why: String| TlsError::File { key, path: path.to_owned(), why };
    let text = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|error| failed(error.to_string()))?;
    if found.is_empty() {
        return Err(TlsError::Empty { key, path: path.to_owned(), wants: "certificate" });
    }
    Ok(found)
}

fn private_key(path: &std::path::Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let key = "tls.key_file";
    let failed = |why: String| TlsError::File { key, path: path.to_owned(), why };
    let text = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
    match PrivateKeyDer::from_pem_slice(&text) {
        Ok(found) => Ok(found),
        Err(rustls::pki_types::pem::Error::NoItemsFound) => {
            Err(TlsError::Empty { key, path: path.to_owned(), wants: "private key" })
        }
        Err(error) => Err(failed(error.to_string())),
    }
}

/// Checks the certificates of nodes that are dialled.
#[derive(Debug)]
struct Peers {
    roots: Arc<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
    is_named: bool,
}

impl Peers {
    fn new(roots: RootCertStore, provider: &CryptoProvider, is_named: bool) -> Self {
        Self { roots: Arc::new(roots), algorithms: provider.signature_verification_algorithms, is_named }
    }

    /// Checks the certificates of nodes that dial.
    fn clients(&self, provider: &Arc<CryptoProvider>) -> Result<Arc<dyn ClientCertVerifier>, String> {
        let builder = WebPkiClientVerifier::builder_with_provider(Arc::clone(&self.roots), Arc::clone(provider));
        builder.build().map_err(|error| error.to_string())
    }

    /// Whether peers with the same CA will take this node's own certificate, in both roles.
    fn try_own(
        &self,
        clients: &dyn ClientCertVerifier,
        chain: &[CertificateDer<'_>],
        name: &ServerName<'_>,
    ) -> Result<(), String> {
        let (own, between) = chain.split_first().ok_or("it holds no certificate")?;
        let now = UnixTime::now();
        let as_client = clients.verify_client_cert(own, between, now).map(|_| ());
        let as_server = self.verify_server_cert(own, between, name, &[], now).map(|_| ());
        as_client.and(as_server).map_err(|error| explained(&error))
    }
}

impl ServerCertVerifier for Peers {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let cert = ParsedCertificate::try_from(end_entity)?;
        verify_server_cert_signed_by_trust_anchor(&cert, &self.roots, intermediates, now, self.algorithms.all)?;
        if self.is_named {
            verify_server_name(&cert, server_name)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// What a fault of TLS means for whoever has to mend it; `None`: the error is none of TLS.
pub(crate) fn fault(error: &io::Error) -> Option<String> {
    Some(explained(error.get_ref()?.downcast_ref::<rustls::Error>()?))
}

fn explained(error: &rustls::Error) -> String {
    use CertificateError as Bad;
    let text = match error {
        rustls::Error::InvalidCertificate(bad) => match bad {
            Bad::UnknownIssuer => "the certificate is not signed by the CA in `tls.ca_file`; all nodes need one CA",
            Bad::Expired | Bad::ExpiredContext { .. } => "the certificate has expired; renew it (or set the clock)",
            Bad::NotValidYet | Bad::NotValidYetContext { .. } => "the certificate is not valid yet; look at the clocks",
            Bad::InvalidPurpose | Bad::InvalidPurposeContext { .. } => {
                "the certificate is for one role only; issue it for serverAuth and clientAuth"
            }
            Bad::NotValidForName | Bad::NotValidForNameContext { .. } => {
                "the certificate does not have the name in `tls.server_name`"
            }
            _ => return format!("the certificate cannot be used: {error}"),
        },
        rustls::Error::NoCertificatesPresented => "the peer shows no certificate; set [tls] there as here",
        rustls::Error::AlertReceived(alert) => match alert {
            AlertDescription::UnknownCA => {
                "the peer refuses our certificate: it is not signed by the CA in the peer's `tls.ca_file`"
            }
            AlertDescription::CertificateExpired => "the peer refuses our certificate: it has expired",
            AlertDescription::CertificateRequired => "the peer wants a certificate; set [tls] here as there",
            AlertDescription::BadCertificate | AlertDescription::CertificateUnknown => {
                "the peer refuses our certificate"
            }
            AlertDescription::ProtocolVersion => {
                "the peer speaks no TLS, or none as new as 1.3; set [tls] on both nodes or on neither"
            }
            _ => return format!("the peer ended the TLS handshake: {alert:?}"),
        },
        rustls::Error::InvalidMessage(_) => "the peer speaks no TLS; set [tls] on both nodes or on neither",
        other => return other.to_string(),
    };
    text.to_owned()
}

/// The connection of a lane, as its transport drives it.
#[derive(Debug)]
struct LaneCipher(Connection);

impl LaneCipher {
    fn new(mut connection: Connection) -> Self {
        // Records are taken out as soon as they are made.
        connection.set_buffer_limit(None);
        Self(connection)
    }
}

impl Cipher for LaneCipher {
    fn seal(&mut self, plain: &[u8], sealed: &mut Vec<u8>) {
        // Both go to memory, so neither fails.
        let _ = self.0.writer().write_all(plain);
        while self.0.wants_write() && self.0.write_tls(sealed).is_ok_and(|len| len > 0) {}
    }

    fn accept(&mut self, sealed: &[u8]) -> Result<usize, CipherError> {
        let mut rest = sealed;
        let len = self.0.read_tls(&mut rest).map_err(|_| CipherError)?;
        self.0.process_new_packets().map_err(|_| CipherError)?;
        // Nothing is taken after the peer closed its side.
        if len == 0 && !sealed.is_empty() { Err(CipherError) } else { Ok(len) }
    }

    fn opened(&mut self) -> &[u8] {
        // An error says that there is nothing now, or nothing more.
        self.0.reader().into_first_chunk().unwrap_or_default()
    }

    fn take(&mut self, len: usize) {
        io::BufRead::consume(&mut self.0.reader(), len);
    }
}
