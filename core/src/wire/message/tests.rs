//! Every message of the directory's and the store's families as it is made, and that it comes out of the wire as it went in.

use alloc::string::String;
use alloc::vec;
use core::fmt::Debug;

use prost::Message;

use super::directory::*;
use super::file::{FileMove, MoveOutcome, MoveReply, MoveRequest, OpenReply, OpenRequest};
use super::rail::{RAIL_LEN_MAX, RailAsk, RailMessage, RailNic, RailNics, RailWord};
use super::store::{
    FactsRequest, GetItem, GetOutcome, GetReply, GetRequest, PutItem, PutOutcome, PutReply, PutRequest, Range,
};

fn survives<M: Message + Default + PartialEq + Debug>(message: M) {
    let bytes = message.encode_to_vec();
    assert_eq!(M::decode(&bytes[..]).as_ref(), Ok(&message));
    // A field of a later version, number 1000, is skipped: so mixed versions understand each other.
    let later = [&bytes[..], &[0xc0, 0x3e, 7]].concat();
    assert_eq!(M::decode(&later[..]), Ok(message));
}

const STAMP: Stamp = Stamp { term: 3, n: 17 };
const PIN: Pin = Pin { kind: 1, ttl_ns: 5_000_000_000 };
const SEGMENT: Segment = Segment { index: 0, epoch: 5, tier: 0, capacity: 1 << 30, free: 1 << 20, replicas: 9 };

fn header() -> Option<Header> {
    Some(Header { shard: 2, term: 3 })
}

fn owner() -> Option<Owner> {
    Some(Owner { node: vec![7; 16], incarnation: 4 })
}

fn location() -> Location {
    Location { node: vec![7; 16], segment: 0, epoch: 5, slot: 11, generation: 2 }
}

#[test]
fn what_is_moved_by_the_owner_of_a_file_survives_the_wire() {
    let moves = vec![FileMove { file_offset: 1 << 40, memory_offset: 7, len: 4096 }, FileMove::default()];
    survives(MoveRequest { file: vec![1; 64], memory: vec![2; 64], into_file: true, moves, sync: true });
    let outcome = MoveOutcome { code: 2, is_touched: true, detail: String::from("full") };
    survives(MoveReply { outcomes: vec![outcome, MoveOutcome::default()] });
    survives(OpenRequest { name: String::from("kv.0"), writes: true, create_len: 1 << 30 });
    survives(OpenReply { token: vec![3; 64], len: 1 << 30 });
}

#[test]
fn what_joins_two_nics_survives_the_wire() {
    let nics = RailNics {
        nics: vec![
            RailNic { name: String::from("mlx5_0"), medium: 2, is_preferred: true, events: 3 },
            RailNic::default(),
        ],
    };
    let ask = RailAsk { nics: Some(nics.clone()), nic: 1, peer_nic: 2, record: vec![9; 96] };
    let words = [
        RailWord::Nics(nics),
        RailWord::Ask(ask),
        RailWord::Answer(vec![1; 96]),
        RailWord::Refuse(String::from("down")),
        RailWord::Put(vec![2; 70_000]),
        RailWord::Kept(vec![3; 64]),
        RailWord::Take(true),
        RailWord::Found(vec![4; 70_000]),
        RailWord::Turn(true),
    ];
    for word in words {
        let message = RailMessage { word: Some(word) };
        assert!(message.encoded_len() <= RAIL_LEN_MAX as usize);
        survives(message);
    }
}

#[test]
fn what_clients_ask_survives_the_wire() {
    let keys = vec![b"k".to_vec(), vec![0, 255]];
    survives(LocateRequest { keys: keys.clone(), lease_ns: 1_000_000 });
    let located = Located {
        hit: true,
        version: Some(STAMP),
        len: 9,
        replicas: vec![location()],
        lease_ns: 1_000_000,
        rebuilding_ns: 0,
    };
    survives(LocateReply { header: header(), located: vec![located.clone()] });
    survives(ExistsRequest { keys: keys.clone() });
    survives(ExistsReply { header: header(), present: vec![1, 0], rebuilding_ns: 0 });
    survives(StatRequest { key: keys[0].clone() });
    survives(StatReply {
        header: header(),
        located: Some(located),
        tiers: vec![0],
        pin: Some(PIN),
        ..Default::default()
    });
    survives(ListRequest { prefix: b"model/".to_vec(), after: b"model/a".to_vec(), max: 100 });
    let row = Listed { key: b"model/b".to_vec(), version: Some(STAMP), len: 9, replicas: 1 };
    survives(ListReply { header: header(), rows: vec![row], next: b"model/b".to_vec(), position: Some(STAMP) });
    survives(RemoveRequest { keys, force: true, ..Default::default() });
    survives(RemoveReply { header: header(), objects: 2, leased: 1, owners_unreachable: 0, next: vec![] });
    survives(ClearRequest {});
    survives(ExplainRequest { key: b"k".to_vec() });
    survives(ExplainReply { header: header(), kind: 1, reason: 2, node: vec![7; 16], ..Default::default() });
}

#[test]
fn what_watchers_hear_survives_the_wire() {
    survives(ViewRequest {});
    let view = OwnerView { owner: owner(), address: "[::1]:7000".into(), suspect: false, segments: vec![SEGMENT] };
    survives(ViewReply { header: header(), owners: vec![view], lease_max_ns: 60_000_000_000 });
    survives(WatchRequest { after: Some(STAMP) });
    let event =
        Event { at: Some(STAMP), kind: 1, key: b"k".to_vec(), location: Some(location()), ..Default::default() };
    survives(EventBatch { header: header(), events: vec![event], next: Some(STAMP), gap: false });
    let after = Some(Place { segment: 1, slot: 9 });
    survives(HoldingsRequest { node: vec![7; 16], prefix: b"kv/".to_vec(), after, max: 100 });
    let keys = vec![b"kv/1".to_vec()];
    survives(HoldingsReply { header: header(), owner: owner(), keys, next: after, position: Some(STAMP) });
}

#[test]
fn what_owners_report_survives_the_wire() {
    survives(JoinRequest { owner: owner(), address: "host:7000".into(), segments: vec![SEGMENT] });
    survives(HeartbeatRequest { owner: owner(), segments: vec![SEGMENT], freed: vec![location()] });
    survives(HeartbeatReply { header: header(), retired: vec![location()] });
    let entry =
        Entry { key: b"k".to_vec(), slot: 11, len: 9, version: Some(STAMP), pin: Some(PIN), ..Default::default() };
    survives(InventoryRequest { owner: owner(), segment: 0, epoch: 5, entries: vec![entry], last: true });
    survives(InventoryReply { header: header(), verdicts: vec![0, 3] });
    let item = CommitItem { key: b"k".to_vec(), len: 9, location: Some(location()), ..Default::default() };
    survives(CommitRequest { owner: owner(), items: vec![item] });
    let outcome = CommitOutcome { kind: 1, version: Some(STAMP), count: 1, ..Default::default() };
    survives(CommitReply { header: header(), outcomes: vec![outcome] });
    let victim = Victim { key: b"k".to_vec(), location: Some(location()) };
    survives(EvictRequest { owner: owner(), victims: vec![victim.clone()], pressing: true });
    let verdict = EvictVerdict { kind: 1, retry_after_ns: 1_000 };
    survives(EvictReply { header: header(), verdicts: vec![verdict] });
    survives(DroppedRequest { owner: owner(), victims: vec![victim] });
}

#[test]
fn what_goes_to_and_from_a_store_node_survives_the_wire() {
    let range = Range { offset: 4096, len: 9 };
    let put =
        PutItem { key: b"k".to_vec(), len: 9, checksums: vec![0xe306_9283], source: vec![range], ..Default::default() };
    survives(PutRequest { items: vec![put], token: vec![1; 48], via: "tcp".into() });
    let stored =
        PutOutcome { kind: 1, version: Some(STAMP), copies: 1, location: Some(location()), ..Default::default() };
    survives(PutReply { outcomes: vec![stored] });
    let get = GetItem { key: b"k".to_vec(), location: Some(location()), offset: 0, len: 9, target: vec![range] };
    survives(GetRequest { items: vec![get], token: vec![1; 48], via: String::new() });
    let got = GetOutcome { kind: 1, version: Some(STAMP), checksums: vec![0xe306_9283], ..Default::default() };
    survives(GetReply { outcomes: vec![got] });
    survives(FactsRequest::default());
}
