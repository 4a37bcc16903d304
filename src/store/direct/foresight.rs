//! How far guesses about coming layers are trusted.
//!
//! Every guess of an expert that is not resident is remembered and judged when its layer is routed,
//! whether it was read or not. How often guesses of a margin were right is kept by class of margin;
//! a class is read ahead only while it is right often enough to pay for the reads that are not.

use crate::engine::Guess;
use hotpin_controllers::ExpertId;

/// Classes of margin.
const CLASSES: usize = 16;
/// Width of a class, in logits.
const CLASS_WIDTH: f32 = 0.125;
/// Judged guesses of a class before it may be trusted.
const LEAST_JUDGED: f32 = 8.0;
/// Judged guesses after which a class's counts are halved, so that it follows a change of topic.
const MOST_JUDGED: f32 = 256.0;
/// Share of right guesses from which on reading them pays: each wrong one costs as much of the
/// disk's time as a right one saves of the engine's.
const LEAST_PRECISION: f32 = 0.5;
/// Reads outstanding from which on the disk is not idle and no guess is read.
pub(super) const MOST_OUTSTANDING: usize = 3;
/// Layers ahead that are guessed.
const LAYERS_AHEAD: usize = 1;

/// A guess that waits for its layer.
#[derive(Clone, Copy, Debug)]
struct Open {
    layer: usize,
    id: ExpertId,
    class: usize,
}

/// What came of the guesses of one class, counts that are halved now and then.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    judged: f32,
    right: f32,
}

/// The record of guesses.
#[derive(Debug, Default)]
pub(super) struct Foresight {
    open: Vec<Open>,
    records: [Record; CLASSES],
}

fn class_of(guess: &Guess) -> usize {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "saturating, and NaN is 0"
    )]
    let class = (guess.margin / CLASS_WIDTH) as usize;
    class.min(CLASSES - 1)
}

impl Foresight {
    /// How many layers ahead to guess while `outstanding` reads are under way.
    pub(super) fn layers(outstanding: usize) -> usize {
        if outstanding < MOST_OUTSTANDING {
            LAYERS_AHEAD
        } else {
            0
        }
    }

    /// Remembers a guess of an expert that is not resident; true when it should be read.
    pub(super) fn weigh(&mut self, layer: usize, id: ExpertId, guess: &Guess) -> bool {
        let class = class_of(guess);
        self.open.push(Open { layer, id, class });
        let record = self.records[class];
        record.judged >= LEAST_JUDGED && record.right >= LEAST_PRECISION * record.judged
    }

    /// Judges the guesses about a layer by what was routed in it.
    pub(super) fn judge(&mut self, layer: usize, routed: &[ExpertId]) {
        let records = &mut self.records;
        self.open.retain(|open| {
            if open.layer != layer {
                return true;
            }
            let record = &mut records[open.class];
            record.judged += 1.0;
            if routed.contains(&open.id) {
                record.right += 1.0;
            }
            if record.judged > MOST_JUDGED {
                record.judged /= 2.0;
                record.right /= 2.0;
            }
            false
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_trusted_only_while_it_is_right_often_enough() {
        let mut foresight = Foresight::default();
        let guess = Guess {
            expert: 0,
            margin: 0.3,
        };
        let mut round = |right: bool| {
            let read = foresight.weigh(1, ExpertId(7), &guess);
            foresight.judge(1, &[ExpertId(if right { 7 } else { 8 })]);
            read
        };
        let first: Vec<bool> = (0..9).map(|_| round(true)).collect();
        assert_eq!(first, [vec![false; 8], vec![true]].concat());
        while round(false) {}
        assert!(!round(true), "one right guess is not enough again");
        assert!((0..300).any(|_| round(true)));
    }

    #[test]
    fn guesses_about_other_layers_are_left_open() {
        let mut foresight = Foresight::default();
        let guess = Guess {
            expert: 0,
            margin: f32::NAN,
        };
        foresight.weigh(3, ExpertId(1), &guess);
        foresight.judge(2, &[ExpertId(1)]);
        assert_eq!(foresight.open.len(), 1);
        foresight.judge(3, &[]);
        assert!(foresight.open.is_empty());
    }
}
