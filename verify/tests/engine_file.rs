//! Files through the engine: from memory, into memory, from and into memory of another engine.

use std::path::PathBuf;

use crc_fast::{CrcAlgorithm, checksum};
use millpond_core::time::Duration;
use millpond_core::wire::hello::{HostIdentity, Identity};
use millpond_core::wire::message::file::{FileMove, OpenRequest, REFUSED};
use millpond_node::config::Config;
use millpond_node::engine::{
    Backing, Batch, Cause, Copy, Engine, Far, FileFault, FileOptions, FileRegion, GrantErrorKind, OpenFileError,
    Options, Outcome, RefusalReason, RemoteRegion, Report, Rights, STAGE_LEN, Stager, Status, Via,
};
use millpond_node::files::{FileService, Folder, FolderOptions, FolderRights, RemoteFile, Sync, is_done};
use millpond_node::node::{self, Node};
use millpond_node::rpc::{Client, Reason, RpcError};
use millpond_node::runtime::{Runtime, Stop};
use millpond_node::serve::Serving;
use millpond_node::session::Credentials;
use millpond_tokio::Tokio;

const BOTH: fn() -> Rights = || Rights::REMOTE_READ | Rights::REMOTE_WRITE;

fn options(node: u8) -> Options {
    Options::new(Identity { node: [node; 16], incarnation: 1, host: HostIdentity::UNKNOWN })
}

fn run<F: Future<Output = ()>>(test: impl FnOnce(Tokio) -> F) {
    millpond_tokio::run(test).unwrap();
}

fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("millpond-engine-file-{name}-{}", std::process::id()))
}

/// A new file of that length, whose name is gone already.
async fn file(engine: &Engine<Tokio>, name: &str, len: u64) -> FileRegion {
    let path = path(name);
    let file = engine.open_file(&path, FileOptions::create(len)).await.unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

fn bytes(seed: u64, len: u64) -> Vec<u8> {
    let mut state = seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_le_bytes()
    };
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| next()).collect();
    bytes.truncate(index(len));
    bytes
}

fn index(len: u64) -> usize {
    usize::try_from(len).unwrap()
}

fn sum(bytes: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc32Iscsi, bytes)
}

/// What lies in the file, read by the engine itself.
async fn back(engine: &Engine<Tokio>, there: &RemoteRegion, offset: u64, len: u64) -> Vec<u8> {
    let region = engine.allocate(len, Backing::Heap).unwrap();
    let batch = Batch::new().read(there.extent(offset, len).unwrap(), region.carve(0, len).unwrap());
    engine.submit(batch).unwrap().await.into_buffers().unwrap().remove(0).to_vec()
}

#[test]
fn a_thousand_mixed_moves_are_right_by_checksum() {
    const LEN: u64 = 10_000;
    run(|runtime| async move {
        let (near, far) =
            (Engine::start(runtime.clone(), options(1)).unwrap(), Engine::start(runtime.clone(), options(2)).unwrap());
        let stop = Stop::new();
        let address = far.listen(([127, 0, 0, 1], 0).into(), &stop).await.unwrap();
        let peer = near.open(address).await.unwrap();
        // A third each: memory here to the file, the file to memory here, a peer's memory to the file.
        let file = file(&near, "mixed", 1000 * LEN + 77).await;
        let grant = near.grant_file(&file, &[(0, file.len())], BOTH()).unwrap();
        let there = near.attach(&near.itself(), &grant.token()).unwrap();
        let memory_there = far.allocate(334 * LEN, Backing::Memfd).unwrap();
        let mut lent = memory_there.carve(0, 334 * LEN).unwrap();
        for (n, chunk) in (0..).zip(lent.chunks_mut(index(LEN))) {
            chunk.copy_from_slice(&bytes(2000 + n, LEN));
        }
        let read_grant = far.grant_read(vec![lent.freeze()]).unwrap();
        let remote = near.attach(&peer, &read_grant.token()).unwrap();
        let region = near.allocate(1000 * LEN, Backing::Memfd).unwrap();
        let at = |n: u64| there.extent((n * 769 % 1000) * LEN + 77, LEN).unwrap();
        let (mut first, mut batch) = (Batch::new(), Batch::new());
        for n in 0..1000 {
            let mut buffer = region.carve(n * LEN, LEN).unwrap();
            match n % 3 {
                0 => {
                    buffer.copy_from_slice(&bytes(n, LEN));
                    batch.push_write(buffer.freeze(), at(n));
                }
                1 => {
                    buffer.copy_from_slice(&bytes(n, LEN));
                    first.push_write(buffer.freeze(), at(n));
                }
                _ => {
                    batch.push_copy(remote.extent(n / 3 * LEN, LEN).unwrap(), at(n));
                }
            }
        }
        assert!(near.submit(first).unwrap().await.is_done());
        for n in (1..1000).step_by(3) {
            batch.push_read(at(n), region.carve(n * LEN, LEN).unwrap());
        }
        let transfer = near.submit(batch).unwrap();
        let id = transfer.id();
        let report = transfer.await;
        assert_eq!((report.via(), report.id(), report.outcomes().len()), (Some(Via::File), id, 1000));
        let read = report.into_buffers().unwrap();
        assert_eq!(read.len(), 333);
        for (n, buffer) in (1..1000).step_by(3).zip(&read) {
            assert_eq!(sum(buffer), sum(&bytes(n, LEN)), "read {n}");
        }
        for n in 0..1000 {
            let expected = bytes(if n % 3 == 2 { 2000 + n / 3 } else { n }, LEN);
            let now = back(&near, &there, at(n).offset(), LEN).await;
            assert_eq!(sum(&now), sum(&expected), "move {n}");
        }
        assert_eq!(back(&near, &there, 0, 77).await, [0; 77]);
    });
}

#[test]
fn a_file_goes_to_a_peers_memory_in_pieces_of_any_length() {
    run(|runtime| async move {
        let (near, far) =
            (Engine::start(runtime.clone(), options(1)).unwrap(), Engine::start(runtime.clone(), options(2)).unwrap());
        let stop = Stop::new();
        let address = far.listen(([127, 0, 0, 1], 0).into(), &stop).await.unwrap();
        let peer = near.open(address).await.unwrap();
        let len = 3 * STAGE_LEN + 12_345;
        let file = file(&near, "out", len).await;
        let grant = near.grant_file(&file, &[(0, len)], BOTH()).unwrap();
        let there = near.attach(&near.itself(), &grant.token()).unwrap();
        let region = near.allocate(len, Backing::Memfd).unwrap();
        let mut source = region.carve(0, len).unwrap();
        source.copy_from_slice(&bytes(5, len));
        assert!(near.submit(Batch::new().write(source.freeze(), there.whole())).unwrap().await.is_done());
        file.file().sync().unwrap();
        let memory = far.allocate(len, Backing::Memfd).unwrap();
        let target = far.grant_write(vec![memory.carve(0, len).unwrap()]).unwrap();
        let remote = near.attach(&peer, &target.token()).unwrap();
        let ranges = [(0, 0), (0, 1), (1, 4095), (4096, STAGE_LEN + 5), (4096 + STAGE_LEN + 5, 100)];
        let end = 4096 + STAGE_LEN + 105;
        let copies: Vec<Copy> = ranges
            .into_iter()
            .chain([(end, len - end)])
            .map(|(at, len)| Copy { source: there.extent(at, len).unwrap(), target: remote.extent(at, len).unwrap() })
            .collect();
        let mut stager = Stager::new(&near, 2).unwrap();
        let statuses = stager.copy(&copies).await;
        assert!(statuses.iter().all(|status| *status == Status::Done), "{statuses:?}");
        assert!(target.close().await[0][..] == bytes(5, len)[..]);
    });
}

#[test]
fn a_batch_with_copies_ends_as_a_whole_however_it_ends() {
    const LEN: u64 = 40 << 20;
    run(|runtime| async move {
        let (near, far) =
            (Engine::start(runtime.clone(), options(1)).unwrap(), Engine::start(runtime.clone(), options(2)).unwrap());
        let stop = Stop::new();
        let address = far.listen(([127, 0, 0, 1], 0).into(), &stop).await.unwrap();
        let peer = near.open(address).await.unwrap();
        let memory = far.allocate_raw(LEN, Backing::Memfd, BOTH()).unwrap();
        let remote = near.attach(&peer, &far.expose(&memory).unwrap()).unwrap();
        let file = file(&near, "copies", LEN).await;
        let grant = near.grant_file(&file, &[(0, LEN)], BOTH()).unwrap();
        let there = near.attach(&near.itself(), &grant.token()).unwrap();
        let region = near.allocate(4096, Backing::Heap).unwrap();
        let batch = || {
            let mut batch = Batch::new().read(there.extent(0, 4096).unwrap(), region.carve(0, 4096).unwrap());
            batch.push_copy(remote.whole(), there.whole());
            batch
        };
        let named = near.submit(batch().via(Via::Tcp)).unwrap_err();
        assert!(named.to_string().contains("`file`"), "its first request is of the file itself: {named}");
        drop(named);
        let mut copy = Batch::new().via(Via::Tcp);
        copy.push_copy(remote.extent(0, 4096).unwrap(), there.extent(0, 4096).unwrap());
        let report = near.submit(copy).unwrap().await;
        assert!(report.is_done(), "{:?}", report.outcomes());
        assert_eq!(near.explain(report.id()).unwrap().legs, [(Via::Tcp, Via::File)]);
        drop(report);
        let causes = |report: &Report| -> Vec<Option<Cause>> {
            let cause = |outcome: &Outcome| match &outcome.status {
                Status::Failed(failure) => Some(failure.cause.clone()),
                _ => None,
            };
            report.outcomes().iter().map(cause).collect()
        };
        // It cannot be done in that time, so the deadline is what ends it.
        let late = near.submit(batch().deadline(Duration::from_micros(1))).unwrap().await;
        assert_eq!(causes(&late)[1], Some(Cause::Deadline), "{:?}", late.outcomes());
        drop(late);
        let transfer = near.submit(batch()).unwrap();
        transfer.cancel();
        let cancelled = transfer.await;
        assert_eq!(causes(&cancelled)[1], Some(Cause::Cancelled), "{:?}", cancelled.outcomes());
        drop(cancelled);
        // A grant that is closed fails its copy and nothing else of the batch.
        let lent = far.allocate(4096, Backing::Memfd).unwrap().carve(0, 4096).unwrap().freeze();
        let closed = far.grant_read(vec![lent]).unwrap();
        let token = closed.token();
        drop(closed);
        let gone = near.attach(&peer, &token).unwrap();
        let mut mixed = batch();
        mixed.push_copy(gone.whole(), there.extent(0, 4096).unwrap());
        let report = near.submit(mixed).unwrap().await;
        let refused = Some(Cause::Refused { reason: RefusalReason::Stale });
        assert_eq!(causes(&report), [None, None, refused]);
        assert_eq!(report.outcomes()[1].bytes, LEN);
        drop(report);
        // The halves fill the whole file, whatever was under way before.
        memory.write_at(LEN - 5, b"right").unwrap();
        assert!(near.blocking().submit(batch()).unwrap().await.is_done());
        assert_eq!(back(&near, &there, LEN - 5, 5).await, b"right");
        let transfer = near.submit(batch()).unwrap();
        near.shut_down().await;
        assert!(transfer.await.outcomes().iter().all(|outcome| outcome.status.is_final()));
        assert_eq!(region.lease_count(), 0);
    });
}

#[test]
fn a_shut_down_ends_what_is_under_way_to_a_file() {
    run(|runtime| async move {
        let engine = Engine::start(runtime, options(1)).unwrap();
        let file = file(&engine, "ending", 64 << 20).await;
        let grant = engine.grant_file(&file, &[(0, 64 << 20)], BOTH()).unwrap();
        let there = engine.attach(&engine.itself(), &grant.token()).unwrap();
        let region = engine.allocate(64 << 20, Backing::Memfd).unwrap();
        let transfer = engine.submit(Batch::new().write(region.carve(0, 64 << 20).unwrap().freeze(), there.whole()));
        let transfer = transfer.unwrap();
        engine.shut_down().await;
        let report = transfer.await;
        assert!(report.outcomes()[0].status.is_final());
        drop(report);
        assert_eq!(region.lease_count(), 0, "what was sent is given back when the kernel has let go of it");
    });
}

#[test]
fn what_a_file_cannot_do_is_said_by_each_request() {
    run(|runtime| async move {
        let engine = Engine::start(runtime, options(1)).unwrap();
        let path = path("refused");
        let file = engine.open_file(&path, FileOptions::create(1 << 20)).await.unwrap();
        let again = engine.open_file(&path, FileOptions::read_write()).await.unwrap_err();
        assert!(matches!(again, OpenFileError::File(_)) && again.to_string().contains("open for writing"), "{again}");
        assert_eq!(engine.grant_file(&file, &[(1 << 20, 1)], BOTH()).unwrap_err(), GrantErrorKind::OutOfBounds);
        let grant = engine.grant_file(&file, &[(0, 1 << 20)], BOTH()).unwrap();
        let there = engine.attach(&engine.itself(), &grant.token()).unwrap();
        let region = engine.allocate(1 << 20, Backing::Heap).unwrap();
        let whole = |at: u64| there.extent(at, 4096).unwrap();
        let named = Batch::new().via(Via::Local).write(region.carve(0, 4096).unwrap().freeze(), whole(0));
        let report = engine.submit(named).unwrap().await;
        let Status::Failed(failure) = &report.outcomes()[0].status else { panic!("a file was moved by `local`") };
        assert!(matches!(failure.cause, Cause::NoPath { via: Via::Local, .. }), "{failure}");
        drop(report);
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
        std::fs::remove_file(&path).unwrap();
        let batch = Batch::new().read(whole(8192), region.carve(0, 4096).unwrap());
        let report = engine.submit(batch).unwrap().await;
        let Status::Failed(failure) = &report.outcomes()[0].status else { panic!("bytes that are not there") };
        let cause = Cause::File { fault: FileFault::Truncated };
        assert_eq!((&failure.cause, failure.far), (&cause, Far::Untouched));
        drop(grant);
        let batch = Batch::new().read(whole(0), region.carve(8192, 4096).unwrap());
        let report = engine.submit(batch).unwrap().await;
        let Status::Failed(failure) = &report.outcomes()[0].status else { panic!("a closed grant") };
        assert_eq!(failure.cause, Cause::Refused { reason: RefusalReason::Stale });
    });
}

#[test]
fn a_peer_has_the_owner_move_between_the_file_and_its_own_memory() {
    const LEN: u64 = 300_000;
    run(|runtime| async move {
        let owner = options(1);
        let engine = Engine::start(runtime.clone(), owner.clone()).unwrap();
        let service = FileService::new(&engine).unwrap();
        let node = Node::new(runtime.clone(), node::Options::new(owner.identity));
        let address = node.open_with(service.router(), &engine).await.unwrap();
        let file = file(&engine, "served", 1 << 20).await;
        let token = service.publish(engine.grant_file(&file, &[(0, 500_000)], BOTH()).unwrap());

        let user = options(2);
        let here = Engine::start(runtime.clone(), user.clone()).unwrap();
        let _peer = here.open(address).await.unwrap();
        let client = Client::new(runtime.clone(), address.into(), Credentials::new(user.identity));
        let region = here.allocate(2 * LEN, Backing::Memfd).unwrap();
        let mut source = region.carve(0, LEN).unwrap();
        source.copy_from_slice(&bytes(1, LEN));
        let readable = here.grant_read(vec![source.freeze()]).unwrap();
        let within = || runtime.now() + Duration::from_secs(10);
        let one = |file_offset, memory_offset, len| FileMove { file_offset, memory_offset, len };
        let remote = RemoteFile::new(client.clone(), token);
        // The last reaches beyond the grant.
        let moves = [one(100, 0, LEN - 5), one(400_000, 7, 4096), one(499_999, 0, 2)];
        let outcomes = remote.write(&readable.token(), &moves, Sync::Yes, within()).await.unwrap();
        let done: Vec<bool> = outcomes.iter().map(is_done).collect();
        assert_eq!(done, [true, true, false], "{outcomes:?}");
        assert!(!outcomes[2].is_touched);

        let target = here.grant_write(vec![region.carve(LEN, LEN).unwrap()]).unwrap();
        let outcomes = remote.read(&target.token(), &[one(100, LEN, LEN - 5)], within()).await.unwrap();
        assert!(outcomes.iter().all(is_done), "{outcomes:?}");
        let memory = target.close().await;
        assert!(memory[0][..index(LEN - 5)] == bytes(1, LEN)[..index(LEN - 5)]);

        let mut forged = token;
        forged.capability = millpond_core::batch::Capability::new([7; 16]);
        let forger = RemoteFile::new(client, forged);
        let refused = forger.write(&readable.token(), &moves, Sync::No, within()).await;
        assert!(matches!(refused, Err(RpcError::Refused(_))), "{refused:?}");
        service.withdraw(&token);
        let refused = remote.write(&readable.token(), &moves, Sync::No, within()).await;
        assert!(matches!(refused, Err(RpcError::Refused(_))), "{refused:?}");
        node.drain().await;
    });
}

/// A directory of the test's own, removed with it.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = path(name);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn asked(name: &str, writes: bool, create_len: u64) -> OpenRequest {
    OpenRequest { name: name.to_owned(), writes, create_len }
}

fn why<T: std::fmt::Debug>(refused: Result<T, RpcError>) -> Reason {
    refused.unwrap_err().reason().expect("the node itself said no")
}

#[test]
fn a_node_publishes_the_files_of_its_configuration() {
    const LEN: u64 = 300_000;
    run(|runtime| async move {
        let directory = Directory::new("published");
        std::fs::write(directory.0.join("old"), bytes(3, LEN)).unwrap();
        let text = format!(
            "[node]\nlisten = \"127.0.0.1:0\"\nhttp = \"127.0.0.1:0\"\n[files]\nrights = \"create\"\nlen_max = \"1MiB\"\ndirectory = {:?}",
            directory.0
        );
        let serving = Serving::start(&runtime, &Config::parse(&text, |_| None).unwrap()).await.unwrap();
        let address: std::net::SocketAddr = serving.address().parse().unwrap();
        let user = options(2);
        let here = Engine::start(runtime.clone(), user.clone()).unwrap();
        let _peer = here.open(address).await.unwrap();
        let client = || Client::new(runtime.clone(), address.into(), Credentials::new(user.identity));
        let within = || runtime.now() + Duration::from_secs(10);
        let region = here.allocate(2 * LEN, Backing::Memfd).unwrap();
        let mut source = region.carve(0, LEN).unwrap();
        source.copy_from_slice(&bytes(1, LEN));
        let readable = here.grant_read(vec![source.freeze()]).unwrap();
        let target = here.grant_write(vec![region.carve(LEN, LEN).unwrap()]).unwrap();
        let out = FileMove { file_offset: 0, memory_offset: LEN, len: LEN };

        let old = RemoteFile::open(client(), &asked("old", false, 0), within()).await.unwrap();
        assert_eq!(old.token().len, LEN);
        assert!(is_done(&old.read(&target.token(), &[out], within()).await.unwrap()[0]));
        // Whoever asked to read cannot write, though the directory would allow it.
        let into = FileMove { file_offset: 5, memory_offset: 0, len: 4096 };
        let refused = old.write(&readable.token(), &[into], Sync::No, within()).await.unwrap();
        assert_eq!((refused[0].code, refused[0].is_touched), (REFUSED, false), "{refused:?}");
        assert!(target.close().await[0][..] == bytes(3, LEN)[..]);

        let new = RemoteFile::open(client(), &asked("new", true, LEN), within()).await.unwrap();
        let whole = FileMove { file_offset: 0, memory_offset: 0, len: LEN };
        assert!(is_done(&new.write(&readable.token(), &[whole], Sync::Yes, within()).await.unwrap()[0]));
        assert!(std::fs::read(directory.0.join("new")).unwrap() == bytes(1, LEN));
        let again = RemoteFile::open(client(), &asked("new", true, 7), within()).await.unwrap();
        assert_eq!(again.token().len, LEN, "it is there: nothing is made");
        let large = RemoteFile::open(client(), &asked("large", true, (1 << 20) + 1), within()).await;
        assert_eq!(why(large), Reason::Full);
        assert!(std::fs::read(directory.0.join("old")).unwrap() == bytes(3, LEN));
        serving.drain().await;
    });
}

#[test]
fn nothing_beside_a_published_directory_is_reached_and_no_right_beyond_its_own() {
    run(|runtime| async move {
        let directory = Directory::new("guarded");
        std::fs::write(directory.0.join("file"), b"bytes").unwrap();
        std::fs::create_dir(directory.0.join("folder")).unwrap();
        let engine = Engine::start(runtime, options(1)).unwrap();
        let folder = |rights, open_max, files_max| {
            let mut options = FolderOptions::new(&directory.0);
            (options.rights, options.open_max, options.files_max) = (rights, open_max, files_max);
            Folder::new(FileService::new(&engine).unwrap(), options)
        };
        let reading = folder(FolderRights::Read, 2, 9);
        for name in ["", ".", "..", "../file", "/etc/passwd", ".hidden", "folder/x", "a\0b", &"n".repeat(256)] {
            let refused = reading.open(asked(name, false, 0)).await.unwrap_err();
            assert_eq!(refused.reason, Reason::Malformed, "{name:?}");
        }
        for (request, reason) in [
            (asked("none", false, 0), Reason::NotFound),
            (asked("folder", false, 0), Reason::NotFound),
            (asked("file", true, 0), Reason::Denied),
            (asked("none", true, 5), Reason::Denied),
            (asked("none", false, 5), Reason::Malformed),
        ] {
            assert_eq!(reading.open(request.clone()).await.unwrap_err().reason, reason, "{request:?}");
        }
        assert_eq!(
            folder(FolderRights::Write, 2, 9).open(asked("none", true, 5)).await.unwrap_err().reason,
            Reason::Denied
        );
        assert_eq!(
            folder(FolderRights::Create, 2, 2).open(asked("none", true, 5)).await.unwrap_err().reason,
            Reason::Full
        );
        assert!(!directory.0.join("none").exists());
    });
}

#[test]
fn the_published_file_unused_for_longest_makes_room_and_a_name_follows_its_file() {
    run(|runtime| async move {
        let directory = Directory::new("room");
        for name in ["a", "b", "c"] {
            std::fs::write(directory.0.join(name), name).unwrap();
        }
        let engine = Engine::start(runtime, options(1)).unwrap();
        let mut options = FolderOptions::new(&directory.0);
        options.open_max = 2;
        let folder = Folder::new(FileService::new(&engine).unwrap(), options);
        let open = async |name| folder.open(asked(name, false, 0)).await.unwrap().token;
        let (a, b) = (open("a").await, open("b").await);
        assert!(open("a").await == a && open("b").await == b, "open already");
        open("c").await;
        assert!(open("b").await == b && open("a").await != a, "it was given up for `c`");
        std::fs::write(directory.0.join("fresh"), "another").unwrap();
        std::fs::rename(directory.0.join("fresh"), directory.0.join("b")).unwrap();
        let reply = folder.open(asked("b", false, 0)).await.unwrap();
        assert!(reply.token != b && reply.len == 7);
    });
}
