//! Transfers between nodes that share their NICs.
//!
//! Each node has one NIC that sends and receives at the link's rate. A transfer gets the smaller of its fair shares at both
//! ends, and its share changes whenever one begins or ends there.

use alloc::vec;
use alloc::vec::Vec;

use crate::sched::cost::Link;
use crate::sched::queue::nanos;
use crate::time::{Duration, Instant};

/// What is under way.
pub(super) struct Network {
    link: Link,
    sending: Vec<u32>,
    receiving: Vec<u32>,
    flows: Vec<Flow>,
    at: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Flow {
    id: u64,
    source: u32,
    target: u32,
    left: f64,
}

impl Network {
    pub(super) fn new(nodes: usize, link: Link) -> Self {
        Self { link, sending: vec![0; nodes], receiving: vec![0; nodes], flows: Vec::new(), at: Instant::ZERO }
    }

    pub(super) fn sending(&self, node: u32) -> u32 {
        self.sending[node as usize]
    }

    pub(super) fn receiving(&self, node: u32) -> u32 {
        self.receiving[node as usize]
    }

    /// A transfer begins; its latency counts as bytes.
    pub(super) fn start(&mut self, now: Instant, id: u64, source: u32, target: u32, bytes: u64) {
        self.advance(now);
        self.sending[source as usize] += 1;
        self.receiving[target as usize] += 1;
        let left = bytes as f64 + self.link.latency * self.link.bytes_per_second;
        self.flows.push(Flow { id, source, target, left });
    }

    /// When the next transfer ends, if nothing changes.
    pub(super) fn next(&self) -> Option<Instant> {
        let ends = self.flows.iter().map(|flow| nanos(libm::ceil(flow.left / self.rate(flow) * 1e9)));
        ends.min().map(|soonest| self.at + Duration::from_nanos(soonest))
    }

    /// Takes out a transfer that is over by `now`, the first to have begun of those.
    pub(super) fn ended(&mut self, now: Instant) -> Option<u64> {
        self.advance(now);
        // Less than a byte is the rounding of nanoseconds.
        let place = self.flows.iter().position(|flow| flow.left < 1.0)?;
        let flow = self.flows.remove(place);
        self.sending[flow.source as usize] -= 1;
        self.receiving[flow.target as usize] -= 1;
        Some(flow.id)
    }

    fn rate(&self, flow: &Flow) -> f64 {
        let sharers = self.sending[flow.source as usize].max(self.receiving[flow.target as usize]);
        self.link.bytes_per_second / f64::from(sharers)
    }

    fn advance(&mut self, now: Instant) {
        let seconds = now.since(self.at).as_secs_f64();
        self.at = self.at.max(now);
        for place in 0..self.flows.len() {
            let moved = self.rate(&self.flows[place]) * seconds;
            // More than nanoseconds round away never goes missing: who is nearly done is done.
            self.flows[place].left = (self.flows[place].left - moved).max(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network() -> Network {
        Network::new(3, Link { bytes_per_second: 1e6, latency: 0.0 })
    }

    fn millis(millis: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(millis)
    }

    #[test]
    fn a_transfer_alone_has_the_whole_link() {
        let mut network = network();
        network.start(Instant::ZERO, 7, 0, 1, 5_000);
        assert_eq!((network.next(), network.sending(0), network.receiving(1)), (Some(millis(5)), 1, 1));
        assert_eq!(network.ended(millis(4)), None);
        assert_eq!((network.ended(millis(5)), network.ended(millis(5)), network.next()), (Some(7), None, None));
        assert_eq!((network.sending(0), network.receiving(1)), (0, 0));
    }

    #[test]
    fn two_from_one_sender_share_it_and_the_second_goes_on_alone() {
        let mut network = network();
        network.start(Instant::ZERO, 1, 0, 1, 2_000);
        network.start(Instant::ZERO, 2, 0, 2, 4_000);
        assert_eq!(network.next(), Some(millis(4)));
        assert_eq!(network.ended(millis(4)), Some(1));
        assert_eq!(network.next(), Some(millis(6)));
        assert_eq!(network.ended(millis(6)), Some(2));
    }

    #[test]
    fn the_busier_end_decides() {
        let mut network = network();
        network.start(Instant::ZERO, 1, 0, 2, 2_000);
        network.start(millis(1), 2, 1, 2, 1_000); // the first has 1,000 left; both get half
        assert_eq!(network.next(), Some(millis(3)));
        assert_eq!((network.ended(millis(3)), network.ended(millis(3))), (Some(1), Some(2)));
    }
}
