//! The router: which nodes serve a request, and the answer back to the client.

mod request;

pub use request::{
    EndOfText, Failure, Finish, Generate, Generation, Generator, Message, Offer, Piece, Prompt, Sampling, Token,
};
