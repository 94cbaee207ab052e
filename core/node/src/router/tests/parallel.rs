//! A router that many threads use at once, and the log of what it decided.

use std::time::Instant as Clock;

use super::*;

const THREADS: usize = 8;
const REQUESTS: usize = 250;

/// The clock of this machine: threads decide in the order in which they come to it.
fn timers() -> Timers {
    let began = Clock::now();
    let nanos = move || u64::try_from(began.elapsed().as_nanos()).unwrap();
    Timers {
        now: Arc::new(move || Instant::from_nanos(nanos())),
        sleep: Arc::new(|_| futures::future::pending().boxed()),
    }
}

/// One client: requests whose prompts others send too, some of which it gives up.
fn client(router: &Router, thread: usize) {
    for number in 0..REQUESTS {
        let mut asked = request(&format!("{thread}-{number}"), &format!("{:0>96}", number % 17));
        asked.priority = u8::try_from(number % 3).unwrap();
        if number % 5 == 0 {
            // Others in its batch would be too slow for it.
            asked.tbt_slo = Some(Duration::from_millis(1));
        }
        match block_on(router.generate(asked)) {
            Ok(generation) if number % 7 == 0 => drop(generation),
            Ok(generation) => assert_eq!(text(generation).unwrap(), "hello"),
            Err(Failure::Overloaded { .. }) => {}
            Err(failure) => panic!("{failure}"),
        }
    }
}

#[test]
fn what_eight_threads_decided_replays_from_the_log_to_the_same_hash() {
    let path = std::env::temp_dir().join(format!("millpond-parallel-{}", std::process::id()));
    let scheduling = Scheduling { decisions: Some(path.clone()), ..Scheduling::default() };
    let decodes: Vec<Arc<Fake>> =
        (0..4).map(|_| Arc::new(Fake { scripts: Mutex::new([answer()].into()), ..Fake::default() })).collect();
    let known = |role: &str, index: usize, link: Arc<dyn Link>| Known { address: format!("{role}-{index}"), link };
    let prefills = (0..4).map(|index| known("prefill", index, Arc::new(Fake::default()))).collect();
    let decodes =
        decodes.iter().enumerate().map(|(index, link)| known("decode", index, Arc::clone(link) as _)).collect();
    let nodes = Nodes { prefills, decodes, store: None };
    let router =
        Router::new(toy::card(), nodes, RouterLimits::default(), &scheduling, timers(), &Registry::new()).unwrap();
    router.presume_up();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let router = &router;
            scope.spawn(move || client(router, thread));
        }
    });
    let view = router.view();
    router.end_log();
    let log = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let replayed = replay(&log[..]).unwrap();
    assert_eq!((replayed.decisions, &view["decisions"]), ((THREADS * REQUESTS) as u64, &serde_json::json!(2_000)));
    assert_eq!(format!("{:016x}", replayed.hash), view["decisions_hash"]);
    // The order counts: the log is of threads that took turns, and other orders of its lines do not replay.
    let mut seal = Seal::default();
    let mut objects: Vec<String> =
        log.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).map(|line| seal.open(line).unwrap()).collect();
    let is_pair = |at: &usize| objects[*at].contains("\"left\"") && objects[*at + 1].contains("\"arrived\"");
    let pairs: Vec<usize> = (objects.len() / 2..objects.len() - 1).filter(is_pair).take(20).collect();
    let mut differs = |place: usize| {
        objects.swap(place, place + 1);
        let mut other = Seal::default();
        let swapped: String = objects.iter().map(|object| other.line(object)).collect();
        objects.swap(place, place + 1);
        matches!(replay(swapped.as_bytes()), Err(Mismatch::Differs { .. }))
    };
    assert!(pairs.into_iter().any(&mut differs), "the order of lines does not matter");
}
