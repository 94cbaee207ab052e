//! The router: which nodes serve a request, and the answer back to the client.

mod line;
mod link;
mod meters;
mod placement;
mod prefixes;
mod prompt;
mod records;
mod remote;
mod request;
mod service;
mod text;
mod ticket;

#[cfg(test)]
mod tests;

pub use line::{Line, LineLimits, Place};
pub use prefixes::Prefixes;
pub use prompt::{Answer, Prepared};
pub use records::Records;
pub use request::{
    EndOfText, Failure, Finish, Generate, Generation, Generator, Message, Offer, Piece, Prompt, Sampling, Token,
};
pub use service::{Router, RouterLimits};
pub use text::{Assembled, Assembler};
