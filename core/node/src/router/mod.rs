//! The router: which nodes serve a request, as `core::sched` decides, and the answer back to the client.

mod decisions;
mod desk;
mod follow;
mod keys;
mod line;
mod link;
mod meters;
mod prompt;
mod records;
mod remote;
mod request;
mod service;
mod synthetic;
mod text;
mod ticket;

#[cfg(test)]
mod tests;

pub(crate) use link::Timers;
#[cfg(test)]
pub(crate) use synthetic::virtual_time::VirtualTime;
pub(crate) use synthetic::{Gaps, Synthetic, scaled, times};

#[cfg(test)]
pub(crate) use decisions::Seal;
pub use decisions::{Mismatch, Replayed, explain, replay};
pub use desk::Scheduling;
pub use keys::{ApiKeys, Tenant};
pub use line::{Line, LineLimits, Place};
pub use prompt::{Answer, Prepared};
pub use records::Records;
pub use remote::StoreLink;
pub use request::{
    EndOfText, Failure, Finish, Generate, Generation, Generator, Message, Offer, Piece, Prompt, Sampling, Stage, Token,
};
pub use service::{Router, RouterLimits};
pub use text::{Assembled, Assembler};
