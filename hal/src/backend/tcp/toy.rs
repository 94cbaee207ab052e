//! A cipher for tests: records of odd lengths whose bytes are turned around, with a number and a sum to catch changes.

use std::collections::VecDeque;

use crate::contract::{Cipher, CipherError};

const HEAD_LEN: usize = 4;
/// Bytes of one record, at most: no divisor of anything.
const RECORD_LEN_MAX: usize = 1009;

/// One end of a connection under the toy.
#[derive(Debug, Default)]
pub(in super::super) struct Toy {
    sealed_count: u8,
    opened_count: u8,
    partial: Vec<u8>,
    opened: VecDeque<u8>,
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(1, |sum: u8, byte| sum.rotate_left(1) ^ byte)
}

impl Cipher for Toy {
    fn seal(&mut self, plain: &[u8], sealed: &mut Vec<u8>) {
        for record in plain.chunks(RECORD_LEN_MAX) {
            let len = u16::try_from(record.len()).unwrap().to_le_bytes();
            sealed.extend([len[0], len[1], self.sealed_count, sum(record)]);
            sealed.extend(record.iter().map(|byte| !byte));
            self.sealed_count = self.sealed_count.wrapping_add(1);
        }
    }

    fn accept(&mut self, sealed: &[u8]) -> Result<usize, CipherError> {
        let wanted_len = match self.partial.first_chunk::<HEAD_LEN>() {
            None => HEAD_LEN,
            Some(head) => HEAD_LEN + usize::from(u16::from_le_bytes([head[0], head[1]])),
        };
        let len = sealed.len().min(wanted_len - self.partial.len());
        self.partial.extend(&sealed[..len]);
        if self.partial.len() == wanted_len && wanted_len > HEAD_LEN {
            let plain: Vec<u8> = self.partial[HEAD_LEN..].iter().map(|byte| !byte).collect();
            if self.partial[2] != self.opened_count || self.partial[3] != sum(&plain) {
                return Err(CipherError);
            }
            self.opened_count = self.opened_count.wrapping_add(1);
            self.opened.extend(plain);
            self.partial.clear();
        }
        Ok(len)
    }

    fn opened(&mut self) -> &[u8] {
        // One piece of two that a ring may have: the other comes next.
        self.opened.as_slices().0
    }

    fn take(&mut self, len: usize) {
        self.opened.drain(..len);
    }
}
