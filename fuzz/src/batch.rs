//! Operation lists for joining and cutting moves: each operation adds a move to the batch.

use millpond_core::batch::{Extent, Move, RegionId, Split, coalesce};
use millpond_oracle::batch::{bytes, has_joinable_neighbours};

use crate::Op;

/// Builds a batch from `ops` and checks that joining and cutting change neither which bytes move nor their order.
///
/// # Errors
/// What is wrong.
///
/// ```
/// millpond_fuzz::batch::run(&[[0; 8], [1; 8]]).unwrap();
/// ```
pub fn run(ops: &[Op]) -> Result<(), String> {
    let moves = moves(ops);
    let expected = bytes(&moves);
    let mut joined = moves.clone();
    let kept = coalesce(&mut joined);
    joined.truncate(kept);
    if bytes(&joined) != expected {
        return Err(format!("joined {moves:?} to {joined:?}"));
    }
    if has_joinable_neighbours(&joined) {
        return Err(format!("neighbours left in {joined:?}"));
    }
    let len_max = ops.first().map_or(1, |op| u64::from(op[7] % 16));
    let pieces: Vec<Move> = Split::new(&joined, len_max).collect();
    if bytes(&pieces) != expected {
        return Err(format!("cut {joined:?} to {pieces:?}"));
    }
    if pieces.iter().any(|piece| piece.len() > len_max.max(1)) {
        return Err(format!("a piece is longer than {len_max} in {pieces:?}"));
    }
    Ok(())
}

/// Moves that often continue the one before, on one side or both.
fn moves(ops: &[Op]) -> Vec<Move> {
    let mut moves: Vec<Move> = Vec::new();
    for op in ops {
        let len = u64::from(op[1] % 24);
        let place = |region: u8, offset: u8| {
            Extent::new(RegionId { slot: u32::from(region % 2), epoch: 1 }, u64::from(offset), len)
        };
        let mut next = (place(op[2], op[3]), place(op[4], op[5]));
        if let Some(last) = moves.last() {
            let behind = |extent: Extent| Extent { offset: extent.offset + extent.len, len, ..extent };
            if op[0] & 1 != 0 {
                next.0 = behind(last.source);
            }
            if op[0] & 2 != 0 {
                next.1 = behind(last.target);
            }
        }
        moves.push(Move::new(next.0, next.1).expect("both have the same length"));
    }
    moves
}
