//! Histories of the transfer scheduler: 1 to 16 senders and a receiver, and everything that can happen between them.
//!
//! The scheduler is the product's; paths, devices and the receiver's memory are simulated (`net`). The world keeps what no
//! real node has: what each byte over there should be. Checked after every operation:
//! - every request has one terminal state, reached once, and its bytes count once;
//! - a job is not over while a frame of it is posted, nor later than its deadlines say;
//! - what is done is there, and stays until something newer is; what is untouched never was;
//! - windows and credit hold; a completion that is late or a duplicate is ignored; what may not be repeated is not;
//! - when everything healed, nothing is left anywhere.

mod net;
mod sender;

use millpond_core::time::{Duration, Instant};
use millpond_core::transfer::{Credit, Window};

use self::net::Receiver;
use self::sender::Sender;
use crate::Op;

/// How paths are bounded in one history.
#[derive(Clone, Copy, Debug)]
struct Profile {
    window: Window,
    slice_len: u64,
    slice_moves: u32,
    credit: Credit,
}

const ROOMY: Profile = Profile {
    window: Window { bytes: 64, moves: 8, slices: 4 },
    slice_len: 12,
    slice_moves: 3,
    credit: Credit::UNLIMITED,
};
const NARROW: Profile = Profile {
    window: Window { bytes: 1, moves: 1, slices: 1 },
    slice_len: 8,
    slice_moves: 1,
    credit: Credit::UNLIMITED,
};
const CREDITED: Profile = Profile { credit: Credit { bytes: 16, slices: 2 }, ..ROOMY };

/// Runs `ops` on the scheduler in a simulated world. The first operation chooses how many senders there are and how narrow
/// their paths.
///
/// # Errors
/// The number of the operation and what is wrong.
///
/// ```
/// millpond_fuzz::transfer::run(&[[0; 8], [1; 8], [9; 8]]).unwrap();
/// ```
pub fn run(ops: &[Op]) -> Result<(), String> {
    let Some((first, rest)) = ops.split_first() else { return Ok(()) };
    let senders = [1, 1, 2, 16][usize::from(first[0] % 4)];
    let profile = [ROOMY, ROOMY, NARROW, CREDITED][usize::from(first[1] % 4)];
    let mut world = World::new(senders, profile);
    for (number, op) in rest.iter().enumerate() {
        let wrong = |wrong| format!("operation {number} {op:?}: {wrong}");
        world.apply(op).and_then(|()| world.check()).map_err(wrong)?;
    }
    world.heal().map_err(|wrong| format!("in the end: {wrong}"))
}

struct World {
    now: Instant,
    senders: Vec<Sender>,
    receiver: Receiver,
}

impl World {
    fn new(count: usize, profile: Profile) -> Self {
        let now = Instant::from_nanos(1);
        let senders = (0..count).map(|index| Sender::new(index, profile, now)).collect();
        Self { now, senders, receiver: Receiver::new(count) }
    }

    fn apply(&mut self, op: &Op) -> Result<(), String> {
        let count = self.senders.len();
        let sender = &mut self.senders[usize::from(op[1]) % count];
        let (now, receiver) = (self.now, &mut self.receiver);
        // Rare, or nothing would ever come to an end.
        let is_rare = op[7] < 24;
        match op[0] % 20 {
            0 | 1 => sender.submit(now, op)?,
            2..=4 => sender.deliver(now, receiver, op, net::Ack::Comes)?,
            5 => sender.deliver(now, receiver, op, net::Ack::Lost)?,
            6 => sender.refuse(now, receiver, op)?,
            7 => sender.fail(now, op)?,
            8 => sender.lose_path(now, op[2], op[3])?,
            9 => sender.ghost_lands(receiver, op)?,
            10 | 11 => sender.answer_dial(now, receiver, op)?,
            12 => sender.cancel(now, op),
            13 => sender.answer_cancel(now, receiver, op)?,
            14 => sender.complete_again(now, op)?,
            15 => sender.credit(receiver, op),
            16 => sender.stall(op),
            17 => sender.refuse_next(op),
            18 if is_rare && op[2].is_multiple_of(2) => {
                receiver.restart();
                self.senders.iter_mut().try_for_each(|sender| sender.receiver_restarted(now))?;
            }
            18 if is_rare => sender.restart(now),
            18 => sender.fence(receiver, op),
            _ => return self.advance(Duration::from_micros(u64::from(op[2]) << (op[3] % 15))),
        }
        self.drain()
    }

    fn drain(&mut self) -> Result<(), String> {
        self.senders.iter_mut().try_for_each(|sender| sender.drain(self.now))
    }

    /// Lets time pass, and stops wherever a scheduler wants to be asked.
    fn advance(&mut self, span: Duration) -> Result<(), String> {
        let target = self.now + span;
        let mut stops = 0;
        while self.now < target {
            stops += 1;
            if stops > 100_000 {
                return Err("it wants to be asked all the time".to_owned());
            }
            let next = self.senders.iter().map(Sender::next_wake).min().unwrap_or(Instant::NEVER);
            self.now = next.max(self.now + Duration::from_nanos(1)).min(target);
            for sender in &mut self.senders {
                sender.on_time(self.now)?;
                sender.drain(self.now)?;
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        self.senders.iter().try_for_each(|sender| sender.check(self.now, &self.receiver))
    }

    /// Everything works from here on: all jobs end, and nothing is left.
    fn heal(&mut self) -> Result<(), String> {
        for _ in 0..400 {
            for sender in &mut self.senders {
                sender.heal(self.now, &mut self.receiver)?;
                sender.drain(self.now)?;
            }
            self.check()?;
            if self.senders.iter().all(Sender::is_idle) {
                return self.senders.iter_mut().try_for_each(Sender::assert_baseline);
            }
            self.advance(Duration::from_millis(25))?;
        }
        Err("jobs are left although everything works".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use crate::Op;

    /// The list of a seed: numbers of an xorshift generator.
    fn list(seed: u64) -> Vec<Op> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.wrapping_mul(0x2545_f491_4f6c_dd1d)
        };
        let len = 20 + next() % 300;
        (0..len).map(|_| next().to_le_bytes()).collect()
    }

    #[test]
    fn every_history_of_a_thousand_seeds_holds() {
        for seed in 0..1_000 {
            if let Err(wrong) = super::run(&list(seed)) {
                panic!("seed {seed}: {wrong}");
            }
        }
    }
}
