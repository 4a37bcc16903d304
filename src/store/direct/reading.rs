//! The engine's side: what was routed is read, and each multiplication waits for its part of it.

use super::books::State;
use super::foresight::{Foresight, MOST_OUTSTANDING};
use super::loading::STEP;
use super::reader::{Done, FEW_IN_FLIGHT, MANY_IN_FLIGHT, Reader, Wait};
use super::{DirectStore, Fault, lock};
use crate::engine::{ExpertArena, Guess, Window};
use crate::store::{Fetched, LeaveOff};
use crate::sync::atomic::Ordering::Relaxed;
use crate::time::nanos;
use hotpin_controllers::ExpertId;
use std::collections::VecDeque;
use std::time::Instant;

/// Missing experts of a layer above which many reads are under way at a time. Below, each is waited for soon.
const FEW_MISSING: usize = 16;

/// Experts of a layer that are read at once even where there is no room for them, so that reading and
/// computing overlap.
const LEAST_AT_ONCE: usize = 2;

/// The engine's reads and what they are for.
#[derive(Debug)]
pub(super) struct Engine {
    reader: Reader,
    ended: Vec<Done>,
    /// The experts of the layer that was routed last.
    routed: Vec<ExpertId>,
    /// Those of them that the governor is loading.
    foreign: Vec<ExpertId>,
    /// Those of them that were not there when they were routed and are still to be used.
    fresh: Vec<ExpertId>,
    /// Those of them that are to be read when there is room.
    later: VecDeque<ExpertId>,
    /// Those of them that are to be read, and the addresses of their slots.
    wanted: Vec<(ExpertId, usize)>,
    /// For each part of each expert whether a read is outstanding.
    pending: Vec<bool>,
    /// Outstanding reads of each expert.
    left: Vec<u8>,
    /// Why a read failed, by expert.
    failed: Vec<(ExpertId, String)>,
    foresight: Foresight,
}

impl Engine {
    pub(super) fn new(reader: Reader, experts: usize, most_parts: usize) -> Self {
        Self {
            reader,
            ended: Vec::new(),
            routed: Vec::new(),
            foreign: Vec::new(),
            fresh: Vec::new(),
            later: VecDeque::new(),
            wanted: Vec::new(),
            pending: vec![false; experts * most_parts],
            left: vec![0; experts],
            failed: Vec::new(),
            foresight: Foresight::default(),
        }
    }

    fn has_failed(&self, id: ExpertId) -> bool {
        self.failed.iter().any(|(expert, _)| *expert == id)
    }
}

impl DirectStore {
    /// Reads what of a layer's routed experts is not there.
    pub(super) fn fetch_layer(&self, experts: &[ExpertId]) -> Result<Fetched, String> {
        let mut engine = lock(&self.engine);
        let engine = &mut *engine;
        self.take_in(engine, Wait::Not)?;
        // An expert whose other reads are outstanding is dropped when they have ended, however many
        // layers and decodes later that is.
        let left = &engine.left;
        engine.failed.retain(|(id, _)| left[id.index()] > 0);
        engine.routed.clear();
        engine.routed.extend_from_slice(experts);
        let mut found = self.look_up(engine, experts);
        engine
            .reader
            .set_depth(if engine.fresh.len() > FEW_MISSING {
                MANY_IN_FLIGHT
            } else {
                FEW_IN_FLIGHT
            });
        // Expert by expert, as they are computed.
        let wanted = std::mem::take(&mut engine.wanted);
        for &(id, address) in &wanted {
            found.bytes += self.begin_expert(engine, id, address);
        }
        engine.wanted = wanted;
        if !engine.wanted.is_empty() {
            engine.reader.start().map_err(|e| e.to_string())?;
        }
        Ok(found)
    }

    /// Sorts a layer's routed experts by where they are, and gives slots to those that are absent.
    fn look_up(&self, engine: &mut Engine, experts: &[ExpertId]) -> Fetched {
        engine.foreign.clear();
        engine.fresh.clear();
        engine.wanted.clear();
        engine.later.clear();
        let mut found = Fetched::default();
        let mut books = lock(&self.books);
        books.use_only(experts);
        if let Some(&first) = experts.first() {
            let layer = self.geometry.shape.layer_of(first);
            engine.foresight.judge(layer, experts);
        }
        let mut absent = 0;
        for &id in experts {
            self.ranks.raise(id);
            match books.state(id) {
                State::Pinned => {
                    found.hits += 1;
                    found.pinned_hits += 1;
                }
                State::Transit => found.hits += 1,
                State::Loading => {
                    found.misses += 1;
                    if engine.left[id.index()] == 0 {
                        engine.foreign.push(id);
                    } else {
                        engine.fresh.push(id);
                    }
                }
                State::Absent => {
                    found.misses += 1;
                    absent += 1;
                    engine.fresh.push(id);
                }
            }
        }
        if let Some(&first) = engine.fresh.first() {
            books.make_room(first, absent, &|index| self.ranks.of(index));
        }
        for &id in &engine.fresh {
            if books.state(id) != State::Absent {
                continue;
            }
            if engine.wanted.len() >= LEAST_AT_ONCE && !books.has_room(id) {
                engine.later.push_back(id);
                found.bytes += self.geometry.shape.bytes(id);
                continue;
            }
            books.take_slot(id);
            if let Some(address) = books.address(id) {
                engine.wanted.push((id, address));
            }
        }
        found
    }

    /// Begins to read what was left for later, as far as there is room, and `least` experts in any
    /// case.
    fn begin_later(&self, engine: &mut Engine, least: usize) -> Result<(), String> {
        let mut begun = 0;
        while let Some(&id) = engine.later.front() {
            let mut books = lock(&self.books);
            let state = books.state(id);
            if state == State::Absent {
                books.make_room(id, 1, &|index| self.ranks.of(index));
                if begun >= least && !books.has_room(id) {
                    break;
                }
                books.take_slot(id);
            }
            engine.later.pop_front();
            begun += 1;
            match (state, books.address(id)) {
                (State::Absent, Some(address)) => {
                    drop(books);
                    self.begin_expert(engine, id, address);
                }
                // The governor's side has begun to load it.
                (State::Loading, _) => engine.foreign.push(id),
                _ => {}
            }
        }
        engine.reader.start().map_err(|e| e.to_string())
    }

    /// Queues the reads of a whole expert, part by part. Returns its bytes.
    fn begin_expert(&self, engine: &mut Engine, id: ExpertId, address: usize) -> u64 {
        let parts = 0..self.geometry.parts(id);
        parts
            .map(|part| self.begin_read(engine, id, part, address))
            .sum()
    }

    /// Queues a read for the engine and notes it as outstanding. Returns the slice's bytes.
    fn begin_read(&self, engine: &mut Engine, id: ExpertId, part: usize, address: usize) -> u64 {
        engine.pending[self.geometry.slice(id, part)] = true;
        engine.left[id.index()] += 1;
        self.engine_reads.fetch_add(1, Relaxed);
        self.queue(&mut engine.reader, id, part, address)
    }

    /// Takes in reads that ended.
    fn take_in(&self, engine: &mut Engine, wait: Wait) -> Result<(), String> {
        let mut ended = std::mem::take(&mut engine.ended);
        let reaped = engine.reader.reap(wait, &mut ended);
        self.engine_reads.fetch_sub(ended.len(), Relaxed);
        for done in ended.drain(..) {
            let (id, part) = (ExpertId(done.owner.0), usize::from(done.owner.1));
            engine.pending[self.geometry.slice(id, part)] = false;
            engine.left[id.index()] = engine.left[id.index()].saturating_sub(1);
            let address = lock(&self.books).address(id);
            let taken = done.result.and_then(|()| {
                let address = address.ok_or("its slot was lost")?;
                self.settle(id, part, address)
            });
            if let Err(cause) = taken {
                engine.failed.push((id, cause));
            }
            if engine.left[id.index()] > 0 {
                continue;
            }
            if engine.has_failed(id) {
                lock(&self.books).drop_expert(id);
            } else {
                lock(&self.books).loaded(id);
            }
        }
        engine.ended = ended;
        reaped.map_err(|e| format!("waiting for reads failed: {e}"))
    }

    /// Waits for what the engine was reading when it stopped.
    pub(super) fn take_in_left_behind(&self, leave_off: LeaveOff<'_>) {
        let mut engine = lock(&self.engine);
        while engine.reader.outstanding() > 0 && !leave_off() {
            if let Err(error) = self.take_in(&mut engine, Wait::AtMost(STEP)) {
                // The next fetch looks again.
                tracing::warn!("reads that nobody needs any longer: {error}");
                return;
            }
        }
    }

    /// Reads an expert ahead if it is not resident, the guess is trusted and the disk has time.
    fn weigh(&self, engine: &mut Engine, id: ExpertId, guess: &Guess) {
        let layer = self.geometry.shape.layer_of(id);
        let mut books = lock(&self.books);
        let wanted = books.state(id) == State::Absent
            && engine.foresight.weigh(layer, id, guess)
            && engine.reader.outstanding() < MOST_OUTSTANDING;
        if !wanted {
            return;
        }
        books.make_room(id, 1, &|index| self.ranks.of(index));
        if !books.has_room(id) {
            return;
        }
        books.take_slot(id);
        let Some(address) = books.address(id) else {
            return;
        };
        drop(books);
        engine.failed.retain(|(expert, _)| *expert != id);
        self.begin_expert(engine, id, address);
    }

    /// Compares a part of an expert that is to be there with the file.
    fn check_resident(&self, id: ExpertId, part: usize) -> Result<(), String> {
        let address = lock(&self.books).address(id);
        self.check(id, part, address.ok_or("a routed expert has no slot")?)
    }

    /// Whether a part of any routed expert is still being read for the engine.
    fn awaits(&self, engine: &Engine, part: usize) -> bool {
        let mut routed = engine.routed.iter();
        routed.any(|&id| engine.pending[self.geometry.slice(id, part)])
    }

    fn count_wait(&self, since: Instant) {
        self.waited_ns.fetch_add(nanos(since.elapsed()), Relaxed);
    }

    /// Waits for an expert that the governor's side has begun to load, and begins to read it where it does not come.
    fn wait_for_governor(&self, engine: &mut Engine, id: ExpertId) -> Result<(), String> {
        if self.await_load(id)? {
            return Ok(());
        }
        let address = lock(&self.books).address(id);
        let address = address.ok_or("a routed expert has lost its slot")?;
        if !engine.fresh.contains(&id) {
            engine.fresh.push(id);
        }
        self.begin_expert(engine, id, address);
        engine.reader.start().map_err(|e| e.to_string())
    }
}

impl ExpertArena for DirectStore {
    fn window(&self, tensor: &str) -> Option<Window> {
        let (layer, at) = self.geometry.place(tensor)?;
        let class = self.geometry.layers[layer].class;
        let books = lock(&self.books);
        let (address, stride_bytes) = books.arena(class);
        Some(Window {
            address: address + at,
            stride_bytes,
            home: books.home(self.geometry.shape.id(layer, 0)),
        })
    }

    fn slot(&self, block: u32, expert: i32) -> Option<u32> {
        lock(&self.books).slot(self.geometry.expert(block, expert)?)
    }

    fn begin_all(&self) -> Result<(), String> {
        self.begin_later(&mut lock(&self.engine), usize::MAX)
    }

    fn used(&self, block: u32, experts: &[i32]) -> Result<(), String> {
        let mut engine = lock(&self.engine);
        let engine = &mut *engine;
        for &expert in experts {
            let Some(id) = self.geometry.expert(block, expert) else {
                continue;
            };
            if self.options.verify && engine.fresh.contains(&id) {
                (0..self.geometry.parts(id)).try_for_each(|part| self.check_resident(id, part))?;
            }
            engine.fresh.retain(|fresh| *fresh != id);
            lock(&self.books).spare_no_more(id);
        }
        if engine.later.is_empty() {
            return Ok(());
        }
        self.begin_later(engine, 0)
    }

    fn is_pending(&self, _block: u32, tensor: &str) -> bool {
        let Some(&(_, part)) = self.geometry.by_tensor.get(tensor) else {
            return false;
        };
        let engine = lock(&self.engine);
        !engine.foreign.is_empty() || !engine.later.is_empty() || self.awaits(&engine, part)
    }

    fn is_ready(&self, block: u32, expert: i32) -> bool {
        if self.options.fault == Some(Fault::SkipWait) {
            return true;
        }
        let Some(id) = self.geometry.expert(block, expert) else {
            return false;
        };
        lock(&self.engine).left[id.index()] == 0
            && matches!(lock(&self.books).state(id), State::Transit | State::Pinned)
    }

    fn wait_for_more(&self) -> Result<bool, String> {
        let mut engine = lock(&self.engine);
        let engine = &mut *engine;
        if !engine.routed.iter().any(|id| engine.left[id.index()] > 0) {
            if engine.later.is_empty() {
                return Ok(false);
            }
            self.begin_later(engine, LEAST_AT_ONCE)?;
            return Ok(true);
        }
        let started = Instant::now();
        self.take_in(engine, Wait::ForOne)?;
        self.count_wait(started);
        Ok(true)
    }

    fn looks_ahead(&self) -> usize {
        Foresight::layers(lock(&self.engine).reader.outstanding())
    }

    fn foresee(&self, block: u32, guesses: &[Guess]) {
        let mut engine = lock(&self.engine);
        let engine = &mut *engine;
        for guess in guesses {
            if let Some(id) = self.geometry.expert(block, guess.expert) {
                self.weigh(engine, id, guess);
            }
        }
        // A failure to start is met again when the reads are waited for.
        let _ = engine.reader.start();
    }

    fn wait(&self, _block: u32, tensor: &str) -> Result<(), String> {
        let Some(&(_, part)) = self.geometry.by_tensor.get(tensor) else {
            return Ok(());
        };
        let mut engine = lock(&self.engine);
        let engine = &mut *engine;
        let mut started = None;
        loop {
            if self.options.fault != Some(Fault::SkipWait) && self.awaits(engine, part) {
                started.get_or_insert_with(Instant::now);
                self.take_in(engine, Wait::ForOne)?;
            } else if let Some(id) = engine.foreign.pop() {
                started.get_or_insert_with(Instant::now);
                self.wait_for_governor(engine, id)?;
            } else {
                break;
            }
        }
        if let Some(started) = started {
            self.count_wait(started);
        }
        let routed_failed = engine
            .failed
            .iter()
            .find(|(id, _)| engine.routed.contains(id));
        if let Some((_, cause)) = routed_failed {
            return Err(cause.clone());
        }
        if self.options.verify {
            for &id in &engine.fresh {
                if part < self.geometry.parts(id) {
                    self.check_resident(id, part)?;
                }
            }
        }
        Ok(())
    }
}
