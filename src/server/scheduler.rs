//! The engine's thread: sequences that are decoded together, one token each, with one prompt's next
//! part in between. Jobs enter and leave between tokens (continuous batching).

use super::job::{Event, Failure, Finish, Job};
use super::queue::{End, Queue};
use super::slot::{Active, Slot, Step, failure};
use super::stats::{Finished, Outcome, Stats};
use crate::engine::{EngineError, Model, Row, Session};
use crate::plant::{Move, VramLink};
use crate::time::nanos;
use crate::trace::Recording;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Part of a prompt that a used sequence must share with it to be preferred to one that was not used
/// for longer.
const WORTH_SHARING: usize = 10;

/// Time between two looks at what a pool in a device's memory should be, while nothing is decoded.
const IDLE_LOOK: Duration = Duration::from_millis(100);

/// Owns the session for as long as the server runs.
#[derive(Debug)]
pub struct Scheduler<'s, 'm> {
    session: &'s mut Session<'m>,
    slots: Vec<Slot>,
    queue: Arc<Queue>,
    stats: Arc<Stats>,
    began: Instant,
    turn: u64,
    rows: Vec<Row>,
    recording: Option<Recording>,
    words: Option<Arc<Model>>,
    link: Option<Arc<VramLink>>,
}

/// Why a scheduler stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// The queue is closed, and nothing runs any more.
    Closed,
    /// The model is to be loaded anew; what runs goes on with the next session.
    Moves(Move),
}

/// What a scheduler leaves for the next one: its sequences with the jobs that use them.
#[derive(Debug)]
pub struct Desk {
    slots: Vec<Slot>,
    began: Instant,
    turn: u64,
}

impl<'s, 'm> Scheduler<'s, 'm> {
    /// A scheduler over a session with an empty context.
    #[must_use]
    pub fn new(session: &'s mut Session<'m>, queue: Arc<Queue>, stats: Arc<Stats>) -> Self {
        let sequences = u32::try_from(session.sequences()).unwrap_or(1);
        Self {
            slots: (0..sequences).map(Slot::new).collect(),
            session,
            queue,
            stats,
            began: Instant::now(),
            turn: 0,
            rows: Vec::new(),
            recording: None,
            words: None,
            link: None,
        }
    }

    /// Stops where the model is to be loaded anew. What outlives a session then, such as an output's grammar, is
    /// made with `words`.
    #[must_use]
    pub fn moving(mut self, words: Arc<Model>, link: Option<Arc<VramLink>>) -> Self {
        self.words = Some(words);
        self.link = link;
        self
    }

    /// Goes on where another scheduler stopped. Where its sequences were `lost`, the jobs that use them
    /// fail.
    #[must_use]
    pub fn resumed(mut self, desk: Option<Desk>, lost: Option<&str>) -> Self {
        if let Some(desk) = desk {
            self.slots = desk.slots;
            self.began = desk.began;
            self.turn = desk.turn;
        }
        if let Some(why) = lost {
            self.fail_all(&Failure::Engine(why.to_owned()));
            for slot in &mut self.slots {
                slot.forget(self.session);
            }
        }
        self
    }

    /// Leaves what the next one goes on with.
    #[must_use]
    pub fn leave(self) -> Desk {
        Desk {
            slots: self.slots,
            began: self.began,
            turn: self.turn,
        }
    }

    /// Announces each request to a recording.
    #[must_use]
    pub fn recorded(mut self, recording: Option<Recording>) -> Self {
        self.recording = recording;
        self
    }

    /// Serves until the queue is closed, or the model is to be loaded anew.
    pub fn run(&mut self) -> Stopped {
        loop {
            self.stats.round();
            self.drop_the_gone();
            if let Some(end) = self.queue.end() {
                turn_away(&self.queue, &self.stats, &Failure::Shutdown);
                if end == End::Now {
                    self.fail_all(&Failure::Shutdown);
                }
                if self.running() == 0 {
                    return Stopped::Closed;
                }
            } else if let Some(order) = self.link.as_ref().and_then(|link| link.move_due()) {
                return Stopped::Moves(order);
            }
            self.admit();
            self.stats.set_running(self.running());
            if self.running() == 0 {
                self.rest();
                continue;
            }
            self.decode_next();
            self.decode_prompt_part();
        }
    }

    /// Waits for a job. Others may want memory of a device meanwhile.
    fn rest(&mut self) {
        let queue = &self.queue;
        self.session
            .rest(&mut || queue.waiting() > 0 || queue.end().is_some());
        if !self.session.may_have_pool() {
            self.queue.wait();
            return;
        }
        self.queue.wait_for(IDLE_LOOK);
        if let Err(error) = self.session.follow_orders() {
            // The next job is told as well.
            tracing::error!("{error}");
        }
    }

    fn running(&self) -> usize {
        self.slots.iter().filter(|s| s.active.is_some()).count()
    }

    /// Gives jobs to sequences that are free.
    fn admit(&mut self) {
        while self.slots.iter().any(|slot| slot.active.is_none()) {
            let Some(job) = self.queue.take() else { return };
            if job.gone.is_set() {
                self.stats.ended(Outcome::Cancelled);
                continue;
            }
            self.turn += 1;
            let Some(slot) = choose(&mut self.slots, &job) else {
                return;
            };
            let words = self.words.as_deref().unwrap_or(self.session.model());
            if !slot.take(self.session, words, job, self.turn) {
                self.stats.ended(Outcome::Failed);
                continue;
            }
            if let Some(recording) = &self.recording {
                recording.prompt(format!("request {}", self.turn));
            }
        }
    }

    /// Ends the jobs whose reader has gone or whose time is up.
    fn drop_the_gone(&mut self) {
        let now = Instant::now();
        for index in 0..self.slots.len() {
            let Some(active) = &self.slots[index].active else {
                continue;
            };
            if active.job.gone.is_set() {
                self.end(index, Outcome::Cancelled, None);
            } else if active.job.deadline.is_some_and(|deadline| now > deadline) {
                self.end(index, Outcome::Failed, Some(Failure::Deadline));
            }
        }
    }

    fn fail_all(&mut self, failure: &Failure) {
        for index in 0..self.slots.len() {
            self.end(index, Outcome::Failed, Some(failure.clone()));
        }
    }

    /// One token for each sequence that generates.
    fn decode_next(&mut self) {
        let began = Instant::now();
        self.rows.clear();
        let mut members = Vec::with_capacity(self.slots.len());
        for (index, slot) in self.slots.iter().enumerate() {
            if let Some(token) = slot.active.as_ref().and_then(|active| active.next) {
                self.rows.push(Row {
                    token,
                    position: slot.tokens.len(),
                    sequence: slot.sequence,
                    logits: true,
                });
                members.push(index);
            }
        }
        if members.is_empty() {
            return;
        }
        if let Err(error) = self.session.decode_next(&self.rows) {
            self.decode_failed(&members, &error);
            return;
        }
        // Booked before anybody is answered: whoever has an answer finds it in the metrics.
        let ns = nanos(began.elapsed());
        self.stats.decoded(members.len(), ns);
        for (row, &index) in members.iter().enumerate() {
            self.slots[index].tokens.push(self.rows[row].token);
            self.choose(index, row);
        }
    }

    /// The next part of the prompt that has waited longest.
    fn decode_prompt_part(&mut self) {
        let Some(index) = (0..self.slots.len())
            .filter(|&index| self.slots[index].prefills())
            .min_by_key(|&index| self.slots[index].used)
        else {
            return;
        };
        let slot = &mut self.slots[index];
        let Some(active) = &mut slot.active else {
            return;
        };
        let done = slot.tokens.len();
        let end = active.job.prompt.len().min(done + self.session.n_batch());
        let last = end == active.job.prompt.len();
        let part = &active.job.prompt[done..end];
        let poison = self.session.poison();
        let session = &mut *self.session;
        let outcome = active.job.gone.watch(&poison, || {
            session.decode_prompt(slot.sequence, done, part, last)
        });
        if let Err(error) = outcome {
            if active.job.gone.is_set() {
                slot.forget(self.session);
                self.end(index, Outcome::Cancelled, None);
            } else {
                self.decode_failed(&[index], &error);
            }
            return;
        }
        slot.tokens.extend_from_slice(part);
        if last {
            let (decoded, cached) = active.prompt_decoded();
            self.stats.prompt(decoded, cached);
            self.choose(index, end - done - 1);
        }
    }

    /// Chooses the next token of a sequence whose logits are in `row`.
    fn choose(&mut self, index: usize, row: usize) {
        let slot = &mut self.slots[index];
        // The token that is chosen now has to be decoded before another can be.
        let room = self.session.n_ctx().saturating_sub(slot.tokens.len());
        let Some(active) = &mut slot.active else {
            return;
        };
        let before = active.generated();
        let step = active.choose(self.session, row, room);
        if active.generated() > before {
            self.stats.chosen();
        }
        match step {
            Ok(Step::Goes) => {}
            Ok(Step::Ended(finish)) => self.finish(index, finish),
            Err(error) => self.end(index, Outcome::Failed, Some(failure(&error))),
        }
    }

    fn finish(&mut self, index: usize, finish: Finish) {
        let Some(active) = self.slots[index].active.take() else {
            return;
        };
        self.book(&active, Outcome::Finished);
        active.finish(finish);
    }

    /// Counts a job that ends. Before its client is told, so that who asks afterwards finds it.
    fn book(&self, active: &Active, outcome: Outcome) {
        book(&self.stats, self.began, active, outcome);
        self.stats.set_running(self.running());
    }

    /// Ends a job early.
    fn end(&mut self, index: usize, outcome: Outcome, failure: Option<Failure>) {
        let Some(active) = self.slots[index].active.take() else {
            return;
        };
        self.book(&active, outcome);
        if let Some(failure) = failure {
            let _ = active.job.output.send(Event::Failed(failure));
        }
    }

    /// A decode that failed leaves the state of its sequences unknown.
    fn decode_failed(&mut self, members: &[usize], error: &EngineError) {
        tracing::error!("a decode of {} sequences failed: {error}", members.len());
        for &index in members {
            self.slots[index].forget(self.session);
            self.end(index, Outcome::Failed, Some(failure(error)));
        }
    }
}

impl Desk {
    /// Whether no job waits for the next session.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.slots.iter().all(|slot| slot.active.is_none())
    }

    /// Ends all jobs, those of the queue as well: no session follows.
    pub fn close(self, queue: &Queue, stats: &Stats, why: &Failure) {
        for active in self.slots.into_iter().filter_map(|slot| slot.active) {
            book(stats, self.began, &active, Outcome::Failed);
            let _ = active.job.output.send(Event::Failed(why.clone()));
        }
        stats.set_running(0);
        turn_away(queue, stats, why);
    }
}

fn book(stats: &Stats, began: Instant, active: &Active, outcome: Outcome) {
    let (usage, timings) = active.spent();
    stats.ended(outcome);
    stats.remember(Finished {
        id: active.job.id.clone(),
        at_s: began.elapsed().as_secs_f64(),
        outcome,
        usage,
        timings,
    });
}

/// Answers the jobs that wait: they will not be served.
fn turn_away(queue: &Queue, stats: &Stats, why: &Failure) {
    while let Some(job) = queue.take() {
        stats.ended(Outcome::Failed);
        let _ = job.output.send(Event::Failed(why.clone()));
    }
}

/// The free sequence to use: the one that shares most with the prompt, unless that is little; then the
/// one not used for longest.
fn choose<'a>(slots: &'a mut [Slot], job: &Job) -> Option<&'a mut Slot> {
    let worth = job.prompt.len() / WORTH_SHARING;
    slots
        .iter_mut()
        .filter(|slot| slot.active.is_none())
        .max_by_key(|slot| {
            let shared = slot.shared(&job.prompt);
            let counts = if shared > worth { shared } else { 0 };
            (counts, std::cmp::Reverse(slot.used))
        })
}
