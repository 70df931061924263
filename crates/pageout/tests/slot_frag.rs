//! The shape of the kernel's `thp_swap_allocator_test`: 60 MiB in pieces of 64 KiB and 4 MiB in single
//! pages on a device of 64 MiB; 100 rounds of dropping some at random and writing them again. No piece
//! may find its order refused.
#![cfg(not(any(loom, shuttle)))]

use pageout::slot::*;

const ORDER: u8 = 4;
const PIECES: usize = (60 << 20) / (64 << 10);
const SINGLES: usize = (4 << 20) / 4096;
/// Dropped and written again in a round: 16 MiB of pieces, 1 MiB of single pages.
const PIECES_DROPPED: usize = (16 << 20) / (64 << 10);
const SINGLES_DROPPED: usize = (1 << 20) / 4096;

fn random(state: &mut u64) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 11) as usize
}

/// One who writes: what is not on the device goes there. The program moves between `cpus`.
fn rounds(cpus: usize, batch: bool) -> usize {
    let slots = Slots::new(cpus);
    slots.swapon(DeviceConfig::new((64 << 20) / 4096)).unwrap();
    let mut pieces: Vec<Option<Entry>> = vec![None; PIECES];
    let mut singles: Vec<Option<Entry>> = vec![None; SINGLES];
    let mut state = 88172645463325252;
    let mut refused = 0;
    for round in 0..=100 {
        if round > 0 {
            for _ in 0..PIECES_DROPPED {
                if let Some(entry) = pieces[random(&mut state) % PIECES].take() {
                    slots.put(entry, 1 << ORDER).unwrap();
                }
            }
            for _ in 0..SINGLES_DROPPED {
                if let Some(entry) = singles[random(&mut state) % SINGLES].take() {
                    slots.put(entry, 1).unwrap();
                }
            }
        }
        let owner = |i: usize| Owner { space: 1, page: i as u64 };
        for (i, piece) in pieces.iter_mut().enumerate().filter(|(_, piece)| piece.is_none()) {
            *piece = slots.alloc(random(&mut state) % cpus, ORDER, owner(i));
            refused += usize::from(piece.is_none());
        }
        if batch {
            let mut out = vec![Entry::INVALID; singles.iter().filter(|single| single.is_none()).count()];
            assert_eq!(slots.alloc_batch(0, 0, owner, &mut out), out.len());
            singles
                .iter_mut()
                .filter(|single| single.is_none())
                .zip(out)
                .for_each(|(single, got)| *single = Some(got));
        } else {
            for (i, single) in singles.iter_mut().enumerate().filter(|(_, single)| single.is_none()) {
                *single = Some(slots.alloc(random(&mut state) % cpus, 0, owner(i)).expect("a slot is left"));
            }
        }
    }
    slots.audit();
    refused
}

#[test]
fn s4_3_no_piece_is_refused_in_100_rounds() {
    for cpus in [1, 2, 16] {
        for batch in [true, false] {
            assert_eq!(rounds(cpus, batch), 0, "{cpus} CPUs, batches: {batch}");
        }
    }
}
