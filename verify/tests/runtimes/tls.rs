//! What `node::tls` promises, with every pair of runtimes at the two ends.
#![allow(clippy::cast_possible_truncation)] // test data

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;

use futures::{AsyncReadExt, AsyncWriteExt};
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::hello::{Field, HostIdentity, Identity, Purpose};
use millpond_core::wire::session::Failure;
use millpond_node::client::{self, Got, PutOptions, StoreClient};
use millpond_node::config::Config;
use millpond_node::engine::{Backing, Batch, Engine, OpenError, Options, Via};
use millpond_node::node::{self, Node};
use millpond_node::runtime::{Runtime, Stop, local_addr, start};
use millpond_node::serve::Serving;
use millpond_node::session::{Acceptor, Credentials, Limits, Session, SessionError, Target, dial};
use millpond_node::tls::{Files, Tls, TlsError};
use parking_lot::Mutex;
use rcgen::{CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};

use crate::runtime::loopback;
use crate::session::identity;

/// A certificate authority with a folder of its own.
struct Ca {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: PathBuf,
}

impl Ca {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("millpond-tls-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("ca.crt"), issuer.pem()).unwrap();
        Self { issuer, folder }
    }

    /// A node's files, with a certificate that is good until that year.
    fn files_until(&self, node: &str, year: i32) -> Files {
        let mut params = CertificateParams::new(vec![node.to_owned(), "millpond".to_owned()]).unwrap();
        params.not_after = date_time_ymd(year, 1, 1);
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        let (crt, key_file) = (self.folder.join(format!("{node}.crt")), self.folder.join(format!("{node}.key")));
        std::fs::write(&crt, cert.pem()).unwrap();
        std::fs::write(&key_file, key.serialize_pem()).unwrap();
        Files::new(crt, key_file, self.folder.join("ca.crt"))
    }

    fn files(&self, node: &str) -> Files {
        self.files_until(node, 4000)
    }

    fn tls(&self, node: &str) -> Tls {
        Tls::load(&self.files(node)).unwrap()
    }
}

impl Drop for Ca {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn soon<R: Runtime>(runtime: &R) -> Instant {
    runtime.now() + Duration::from_secs(5)
}

fn of(node: u8, tls: Option<Tls>) -> Credentials {
    let credentials = Credentials::new(identity(node, 1));
    match tls {
        Some(tls) => credentials.with_tls(tls),
        None => credentials,
    }
}

/// A port that answers a word on each session that it lets in, and remembers why it turned others away.
async fn port<R: Runtime>(runtime: &R, credentials: Credentials) -> (SocketAddr, Arc<Mutex<Vec<SessionError>>>) {
    let listener = runtime.listen(loopback()).await.unwrap();
    let address = local_addr(&listener).unwrap();
    let refused = Arc::<Mutex<Vec<SessionError>>>::default();
    let (owner, noted) = (runtime.clone(), refused.clone());
    start(runtime, async move {
        let acceptor = Acceptor::new(credentials, Limits::default());
        while let Ok((stream, from)) = owner.accept(&listener).await {
            match acceptor.accept(&owner, stream, from).await {
                Err(error) => noted.lock().push(error),
                Ok(mut session) => {
                    let mut word = vec![0; 50_000];
                    // Who was only to be let in says nothing.
                    if session.stream.read_exact(&mut word).await.is_ok() {
                        word.reverse();
                        session.stream.write_all(&word).await.unwrap();
                        session.stream.close().await.unwrap();
                    }
                }
            }
        }
    })
    .detach();
    (address, refused)
}

async fn dial_as<R: Runtime>(
    runtime: &R,
    address: SocketAddr,
    credentials: &Credentials,
) -> Result<Session<R::Stream>, SessionError> {
    dial(runtime, &address.into(), Purpose::Control, credentials, soon(runtime)).await
}

/// Forwards one connection to `to`, and keeps what went through.
fn listening_in(to: SocketAddr) -> (SocketAddr, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, heard) = (listener.local_addr().unwrap(), Arc::<Mutex<Vec<u8>>>::default());
    let keep = heard.clone();
    std::thread::spawn(move || {
        let near = listener.accept().unwrap().0;
        let far = TcpStream::connect(to).unwrap();
        let pump = |mut from: TcpStream, mut to: TcpStream, keep: Arc<Mutex<Vec<u8>>>| {
            let mut bytes = [0; 4096];
            while let Ok(len @ 1..) = from.read(&mut bytes) {
                keep.lock().extend(&bytes[..len]);
                if to.write_all(&bytes[..len]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(std::net::Shutdown::Write);
        };
        let (near_too, far_too, keep_too) = (near.try_clone().unwrap(), far.try_clone().unwrap(), keep.clone());
        std::thread::spawn(move || pump(far_too, near_too, keep_too));
        pump(near, far, keep);
    });
    (address, heard)
}

fn contains(heard: &[u8], wanted: &[u8]) -> bool {
    heard.windows(wanted.len()).any(|window| window == wanted)
}

async fn what_is_said_under_tls_is_heard_by_its_two_ends_only<A: Runtime, B: Runtime>(a: A, b: B) {
    let ca = Ca::new("one");
    for tls in [true, false] {
        let of = |node, name: &str| of(node, tls.then(|| ca.tls(name)));
        let (address, _) = port(&b, of(2, "two")).await;
        let (address, heard) = listening_in(address);
        let mut session = dial_as(&a, address, &of(1, "one")).await.unwrap();
        assert_eq!(session.peer.hello.identity, identity(2, 1));
        let word: Vec<u8> = b"a secret ".iter().copied().cycle().take(50_000).collect();
        session.stream.write_all(&word).await.unwrap();
        session.stream.flush().await.unwrap();
        let mut back = vec![0; 50_000];
        session.stream.read_exact(&mut back).await.unwrap();
        back.reverse();
        assert!(back == word);
        let heard = heard.lock().clone();
        let is_clear = contains(&heard, b"a secret") || contains(&heard, &[2; 16]);
        assert_eq!(is_clear, !tls, "of {} bytes", heard.len());
    }
}

async fn each_way_in_which_tls_fails_is_said_at_both_ends<A: Runtime, B: Runtime>(a: A, b: B) {
    let (ca, other) = (Ca::new("one"), Ca::new("other"));
    let (address, refused) = port(&b, of(2, Some(ca.tls("two")))).await;
    let why = |outcome: Result<Session<A::Stream>, SessionError>| match outcome.err().expect("nobody is let in") {
        SessionError::Tls { why, .. } => why,
        error => panic!("{error}"),
    };
    // Of another CA: whoever looks first, which is the dialer, says so.
    let said = why(dial_as(&a, address, &of(1, Some(other.tls("stranger")))).await);
    assert!(said.contains("not signed by the CA"), "{said}");
    // A node whose CA file has both, and whose own certificate is of the wrong one: the acceptor says no.
    let mixed = other.files("mixed");
    let both =
        [ca.folder.join("ca.crt"), other.folder.join("ca.crt")].map(|path| std::fs::read(path).unwrap()).concat();
    std::fs::write(&mixed.ca_file, both).unwrap();
    let said = why(dial_as(&a, address, &of(1, Some(Tls::load(&mixed).unwrap()))).await);
    assert!(said.contains("the peer refuses our certificate"), "{said}");
    // No TLS here, TLS there.
    let outcome = dial_as(&a, address, &of(1, None)).await;
    assert_eq!(outcome.err().and_then(|error| error.refusal()).map(|refusal| refusal.field), Some(Field::Tls));
    // TLS here, none there.
    let (plain, turned_away) = port(&b, of(3, None)).await;
    let said = why(dial_as(&a, plain, &of(1, Some(ca.tls("one")))).await);
    assert!(said.contains("speaks no TLS"), "{said}");
    while turned_away.lock().is_empty() {
        a.sleep(Duration::from_millis(1)).await;
    }
    assert!(matches!(turned_away.lock()[..], [SessionError::Hello { failure: Failure::Foreign(_), .. }]));
    // Another name than the one asked for.
    let mut named = ca.files("named");
    named.server_name = "elsewhere".to_owned();
    assert!(Tls::load(&named).unwrap_err().to_string().contains("tls.server_name"), "its own must have it too");
    named = ca.files("elsewhere");
    named.server_name = "elsewhere".to_owned();
    let said = why(dial_as(&a, address, &of(1, Some(Tls::load(&named).unwrap()))).await);
    assert!(said.contains("tls.server_name"), "{said}");
    // After all that the port still lets in who belongs there.
    dial_as(&a, address, &of(1, Some(ca.tls("one")))).await.unwrap();
    let refused = refused.lock().iter().map(ToString::to_string).collect::<Vec<_>>();
    assert!(refused.iter().any(|said| said.contains("not signed by the CA")), "{refused:?}");
}

fn chain(files: &Files) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let cert = CertificateDer::pem_file_iter(&files.cert_file).unwrap().map(Result::unwrap).collect();
    (cert, PrivateKeyDer::from_pem_file(&files.key_file).unwrap())
}

fn roots(ca: &Ca) -> Arc<rustls::RootCertStore> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(ca.issuer.der().clone()).unwrap();
    Arc::new(roots)
}

async fn who_has_no_certificate_or_one_that_expired_is_refused<A: Runtime, B: Runtime>(a: A, b: B) {
    let ca = Ca::new("one");
    let (address, refused) = port(&b, of(2, Some(ca.tls("two")))).await;
    // An old certificate is refused where it is loaded, so these ends are plain rustls.
    let old = ca.files_until("old", 2001);
    let client = |with_cert: bool| {
        let builder = rustls::ClientConfig::builder().with_root_certificates(roots(&ca));
        let (cert, key) = chain(&old);
        let config =
            if with_cert { builder.with_client_auth_cert(cert, key).unwrap() } else { builder.with_no_client_auth() };
        let name = ServerName::try_from("millpond").unwrap();
        let mut client = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
        let mut socket = TcpStream::connect(address).unwrap();
        let mut stream = rustls::Stream::new(&mut client, &mut socket);
        // The handshake is over for this end before the other one has looked: its answer comes with the first read.
        let said = stream.write_all(b"hello").and_then(|()| stream.read(&mut [0; 64]));
        said.unwrap_err().to_string()
    };
    assert!(client(true).contains("CertificateExpired"), "{}", client(true));
    assert!(client(false).contains("CertificateRequired"), "{}", client(false));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let expired = listener.local_addr().unwrap();
    let (cert, key) = chain(&old);
    let server = rustls::ServerConfig::builder().with_no_client_auth().with_single_cert(cert, key).unwrap();
    std::thread::spawn(move || {
        let mut socket = listener.accept().unwrap().0;
        let mut server = rustls::ServerConnection::new(Arc::new(server)).unwrap();
        let _ = rustls::Stream::new(&mut server, &mut socket).read(&mut [0; 64]);
    });
    let outcome = dial_as(&a, expired, &of(1, Some(ca.tls("one")))).await;
    let Err(SessionError::Tls { why, .. }) = outcome else { panic!("{:?}", outcome.err()) };
    assert!(why.contains("has expired"), "{why}");
    let error = Tls::load(&old).unwrap_err().to_string();
    assert!(error.contains("has expired") && error.contains("old.crt"), "{error}");
    dial_as(&a, address, &of(1, Some(ca.tls("one")))).await.unwrap();
    let refused = refused.lock().iter().map(ToString::to_string).collect::<Vec<_>>();
    assert!(refused.iter().any(|said| said.contains("has expired")), "{refused:?}");
    assert!(refused.iter().any(|said| said.contains("shows no certificate")), "{refused:?}");
}

fn options(node: u8, tls: Option<Tls>, transports: &[Via]) -> Options {
    let host = HostIdentity { boot: [8; 16], namespaces: [u64::from(std::process::id()); 3] };
    // Names of sockets are made of it: tests run side by side.
    static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    let incarnation = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let mut options = Options::new(Identity { node: [node; 16], incarnation, host });
    (options.tls, options.transports) = (tls, transports.to_vec());
    options.connect_deadline = Duration::from_secs(10);
    options
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 251) as u8).collect()
}

async fn lanes_under_tls_move_right_bytes_over_tcp_and_shared_memory<A: Runtime, B: Runtime>(a: A, b: B) {
    let ca = Ca::new("one");
    for via in [Via::Tcp, Via::Shm] {
        let transports = [Via::Local, Via::Tcp, via];
        let here = Engine::start(a.clone(), options(1, Some(ca.tls("one")), &transports)).unwrap();
        let there = Engine::start(b.clone(), options(2, Some(ca.tls("two")), &transports)).unwrap();
        let stop = Stop::new();
        let address = there.listen(loopback(), &stop).await.unwrap();
        let (address, heard) = if via == Via::Tcp { listening_in(address) } else { (address, Arc::default()) };
        let peer = here.open(address).await.unwrap();
        let (near, far) =
            (here.allocate(8 << 20, Backing::Memfd).unwrap(), there.allocate(8 << 20, Backing::Memfd).unwrap());
        let len = 3_000_001;
        let word = pattern(len);
        let grant = there.grant_write(vec![far.carve(0, len as u64).unwrap()]).unwrap();
        let remote = here.attach(&peer, &grant.token()).unwrap();
        let mut source = near.carve(0, len as u64).unwrap();
        source.copy_from_slice(&word);
        let report = here.submit(Batch::new().write(source.freeze(), remote.whole()).via(via)).unwrap().await;
        assert!(report.is_done(), "{via}: {:?}", report.outcomes());
        assert_eq!(report.via(), Some(via));
        let written = grant.close().await.remove(0);
        assert!(written[..] == word, "{via}: other bytes were written");
        let grant = there.grant_read(vec![written.freeze()]).unwrap();
        let remote = here.attach(&peer, &grant.token()).unwrap();
        let batch = Batch::new().read(remote.whole(), near.carve(4 << 20, len as u64).unwrap()).via(via);
        let read = here.submit(batch).unwrap().await.into_buffers().unwrap();
        assert!(read[0][..] == word, "{via}: other bytes were read");
        let heard = heard.lock().clone();
        assert!(via == Via::Shm || heard.len() > 2 * len && !contains(&heard, &word[1000..1032]), "{}", heard.len());
        here.shut_down().await;
        there.shut_down().await;
    }
    let here = Engine::start(a.clone(), options(1, None, &[Via::Local, Via::Tcp])).unwrap();
    let there = Engine::start(b.clone(), options(2, Some(ca.tls("two")), &[Via::Local, Via::Tcp])).unwrap();
    let address = there.listen(loopback(), &Stop::new()).await.unwrap();
    let OpenError::Hello { why } = here.open(address).await.unwrap_err() else { panic!("another error") };
    assert!(why.contains("TLS: this port takes nothing else"), "{why}");
}

async fn a_store_under_tls_serves_whoever_has_a_certificate<A: Runtime, B: Runtime>(a: A, b: B) {
    let ca = Ca::new("one");
    let files = ca.files("store");
    let path = |path: &PathBuf| format!("{:?}", path.display().to_string());
    let text = format!(
        "[store]\nsize = \"16MiB\"\ndirectory = true\n[node]\nlisten = \"127.0.0.1:0\"\nhttp = \"127.0.0.1:0\"\n\
         [tls]\ncert_file = {}\nkey_file = {}\nca_file = {}",
        path(&files.cert_file),
        path(&files.key_file),
        path(&files.ca_file)
    );
    let serving = Serving::start(&b, &Config::parse(&text, |_| None).unwrap()).await.unwrap();
    let client = |tls: Option<Tls>| {
        let engine_options = options(1, tls.clone(), &[Via::Local, Via::Tcp]);
        let mut node_options = node::Options::new(engine_options.identity);
        node_options.tls = tls;
        let engine = Engine::start(a.clone(), engine_options).unwrap();
        let directory = Target::parse(serving.address()).unwrap();
        StoreClient::connect(&Node::new(a.clone(), node_options), engine, directory, client::Options::default())
            .unwrap()
    };
    let secured = client(Some(ca.tls("client")));
    let word = pattern(100_000);
    secured.put(b"key", word.as_slice(), &PutOptions::default()).await.unwrap();
    let Got::Hit(value) = secured.get(b"key").await.unwrap() else { panic!("it is not there") };
    assert!(value.to_vec() == word);
    let error = client(None).get(b"key").await.unwrap_err().to_string();
    assert!(error.contains("TLS"), "{error}");
    serving.drain().await;
}

/// Names a session as its ends see it, or says why there is none.
fn met<S>(session: &Result<Session<S>, SessionError>) -> Result<[u8; 16], String> {
    session.as_ref().map(|session| session.peer.hello.identity.node).map_err(ToString::to_string)
}

async fn a_certificate_is_renewed_without_a_restart<A: Runtime, B: Runtime>(a: A, b: B) {
    let (ca, next) = (Ca::new("one"), Ca::new("next"));
    let files = ca.files("two");
    let (there, here, strange) =
        (Tls::load(&files).unwrap(), ca.tls("one"), Tls::load(&next.files("stranger")).unwrap());
    let (address, _) = port(&b, of(2, Some(there.clone()))).await;
    // A port serves one session at a time, so the one that stays open has a port of its own.
    let (busy, _) = port(&b, of(3, Some(there.clone()))).await;
    let mut before = dial_as(&a, busy, &of(1, Some(here.clone()))).await.unwrap();
    assert!(dial_as(&a, address, &of(1, Some(strange.clone()))).await.is_err());
    assert!(!there.reload().unwrap(), "nothing changed");
    // A certificate without its key: what was loaded stays in force until both are there.
    let renewed = next.files("two");
    std::fs::copy(&renewed.cert_file, &files.cert_file).unwrap();
    assert!(there.reload().unwrap_err().to_string().contains("not signed by the CA"));
    std::fs::copy(&renewed.ca_file, &files.ca_file).unwrap();
    assert!(there.reload().unwrap_err().to_string().contains("tls.key_file"));
    dial_as(&a, address, &of(1, Some(here.clone()))).await.unwrap();
    std::fs::copy(&renewed.key_file, &files.key_file).unwrap();
    assert!(there.reload().unwrap());
    dial_as(&a, address, &of(1, Some(strange))).await.unwrap();
    assert!(dial_as(&a, address, &of(1, Some(here))).await.is_err(), "its CA is not trusted any more");
    let mut word = vec![3; 50_000];
    before.stream.write_all(&word).await.unwrap();
    before.stream.flush().await.unwrap();
    before.stream.read_exact(&mut word).await.unwrap();
}

async fn a_node_cannot_claim_the_id_of_another_whose_certificate_it_has_not<A: Runtime, B: Runtime>(a: A, b: B) {
    let ca = Ca::new("one");
    let tls = |name: &str, binds: bool| {
        let mut files = ca.files(name);
        files.bind_nodes = binds;
        Tls::load(&files).unwrap()
    };
    let as_node = |name: &str, tls: &Tls| {
        Credentials::new(Identity { node: Identity::id_of(name), ..identity(1, 1) }).with_tls(tls.clone())
    };
    let (address, refused) = port(&b, as_node("two", &tls("two", true))).await;
    let (one, loose) = (tls("one", true), tls("one", false));
    assert!(one.is_of(&Identity::id_of("one")) && !one.is_of(&Identity::id_of("two")));
    assert_eq!(met(&dial_as(&a, address, &as_node("one", &one)).await), Ok(Identity::id_of("two")));
    // The dialer lies, with a certificate of the same CA.
    let session = dial_as(&a, address, &as_node("three", &loose)).await;
    assert!(met(&session).unwrap_err().contains("it is not of this node"));
    // The one that is dialled lies.
    let (lying, _) = port(&b, as_node("three", &tls("two", false))).await;
    let session = dial_as(&a, lying, &as_node("one", &one)).await;
    assert!(met(&session).unwrap_err().contains("it is not of this node"));
    assert_eq!(met(&dial_as(&a, lying, &as_node("one", &loose)).await), Ok(Identity::id_of("three")));
    let refused = refused.lock().iter().map(ToString::to_string).collect::<Vec<_>>();
    assert!(refused.len() == 1 && refused[0].contains("it is not of this node"), "{refused:?}");
    // Names that are none of DNS stand in a URI.
    let mut params = CertificateParams::new(vec!["millpond".to_owned()]).unwrap();
    let uri = "millpond:store@10.0.0.1:7000".try_into().unwrap();
    params.subject_alt_names.push(rcgen::SanType::URI(uri));
    let (key, mut files) = (KeyPair::generate().unwrap(), ca.files("uri"));
    std::fs::write(&files.cert_file, params.signed_by(&key, &ca.issuer).unwrap().pem()).unwrap();
    std::fs::write(&files.key_file, key.serialize_pem()).unwrap();
    files.bind_nodes = true;
    let named = Tls::load(&files).unwrap();
    assert_eq!(named.own_node(), Some(Identity::id_of("store@10.0.0.1:7000")));
    let session = dial_as(&a, address, &as_node("store@10.0.0.1:7000", &named)).await;
    assert_eq!(met(&session), Ok(Identity::id_of("two")));
}

on_pairs!(
    a_certificate_is_renewed_without_a_restart,
    a_node_cannot_claim_the_id_of_another_whose_certificate_it_has_not,
    a_store_under_tls_serves_whoever_has_a_certificate,
    what_is_said_under_tls_is_heard_by_its_two_ends_only,
    each_way_in_which_tls_fails_is_said_at_both_ends,
    who_has_no_certificate_or_one_that_expired_is_refused,
    lanes_under_tls_move_right_bytes_over_tcp_and_shared_memory,
);

#[test]
fn files_that_make_no_tls_are_named_with_what_is_wrong() {
    let (ca, other) = (Ca::new("one"), Ca::new("other"));
    let good = ca.files("good");
    Tls::load(&good).unwrap();
    let said = |change: &dyn Fn(&mut Files)| {
        let mut files = good.clone();
        change(&mut files);
        Tls::load(&files).unwrap_err().to_string()
    };
    let nowhere = PathBuf::from("/nowhere/node.crt");
    for (key, set) in [
        ("tls.cert_file", (|files: &mut Files, path| files.cert_file = path) as fn(&mut Files, PathBuf)),
        ("tls.key_file", |files, path| files.key_file = path),
        ("tls.ca_file", |files, path| files.ca_file = path),
    ] {
        let missing = said(&|files| set(files, nowhere.clone()));
        assert!(missing.contains(key) && missing.contains("/nowhere/node.crt"), "{missing}");
        let empty = ca.folder.join("empty");
        std::fs::write(&empty, "no PEM at all").unwrap();
        let empty = said(&|files| set(files, empty.clone()));
        assert!(empty.contains(key) && empty.contains("-----BEGIN"), "{empty}");
        let broken = ca.folder.join("broken");
        std::fs::write(&broken, "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n").unwrap();
        assert!(said(&|files| set(files, broken.clone())).contains(key));
    }
    let foreign = said(&|files| files.ca_file = other.folder.join("ca.crt"));
    assert!(foreign.contains("not signed by the CA") && foreign.contains("good.crt"), "{foreign}");
    let mismatch = said(&|files| files.key_file = ca.files("another").key_file);
    assert!(mismatch.contains("tls.key_file") && mismatch.contains("not the key of"), "{mismatch}");
    let mut named = good.clone();
    named.server_name = "no name!".to_owned();
    assert!(matches!(Tls::load(&named), Err(TlsError::Name { .. })));
}

#[test]
fn a_node_that_is_not_of_its_certificate_does_not_start() {
    let ca = Ca::new("one");
    let files = ca.files("decode-0");
    let start = |name: &str| {
        let text = format!(
            "[files]\ndirectory = {:?}\n[node]\nname = {name:?}\nlisten = \"127.0.0.1:0\"\nhttp = \"127.0.0.1:0\"\n\
             [tls]\nbind_nodes = true\nreload_interval = \"1ms\"\ncert_file = {:?}\nkey_file = {:?}\nca_file = {:?}",
            ca.folder, files.cert_file, files.key_file, files.ca_file
        );
        millpond_tokio::run(move |runtime| async move {
            let serving = Serving::start(&runtime, &Config::parse(&text, |_| None).unwrap()).await;
            let serving = serving.map_err(|error| error.to_string())?;
            // It looks at its files by itself; here they do not change.
            runtime.sleep(Duration::from_millis(20)).await;
            serving.drain().await;
            Ok::<(), String>(())
        })
        .unwrap()
    };
    start("decode-0").unwrap();
    let error = start("decode-1").unwrap_err();
    assert!(error.contains("decode-1") && error.contains("millpond:decode-1"), "{error}");
}
