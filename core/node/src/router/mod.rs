//! The router: which nodes serve a request, and the answer back to the client.

mod line;
mod prefixes;
mod records;
mod request;
mod text;

pub use line::{Line, LineLimits, Place};
pub use prefixes::Prefixes;
pub use records::Records;
pub use request::{
    EndOfText, Failure, Finish, Generate, Generation, Generator, Message, Offer, Piece, Prompt, Sampling, Token,
};
pub use text::{Assembled, Assembler};
